"""bench generate: what each engine emits, what a record holds, what is refused (no timing is judged here)."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_bench
import tiny_text
from mlx.utils import tree_flatten
from tiny_bench import ON, SHAPE, made_run, parse

from mlx_zip.bench import engines, generate, machine, workloads
from mlx_zip.bench.engines import Forced, MlxLm, MlxZip, Run, make_engine, zip_ids
from mlx_zip.bench.generate_record import FIGURES, SECTIONS, ceiling, checked, figures
from mlx_zip.bench.lookup import Lookup, PlainLookup, ZipLookup, until_end, verify
from mlx_zip.bench.shapes import ENCODERS, ZipOptions, from_config, from_folders
from mlx_zip.bench.workloads import Turn, Workload, chat, cut, read_tokenizer, sources
from mlx_zip.codec import Codebook
from mlx_zip.errors import InstallationError, MlxZipError
from mlx_zip.generate import stream_generate

PROMPT = tiny.base_ids(60, seed=3)
TEXT = [i for i in tiny.base_ids(60, seed=3) if i > 2][:40]
MLX_ENGINES = {"mlx-lm": MlxLm, "mlx-zip": MlxZip, "mlx-lm+lookup": PlainLookup, "mlx-zip+lookup": ZipLookup}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


def engine(name, seed=0):
    _, args = parse("generate")
    return make_engine(name, tiny_bench.models(seed), args)


# ---- engines


@pytest.mark.parametrize("name", MLX_ENGINES)
def test_replay_emits_exactly_the_forced_ids(name):
    made = engine(name)
    run = made.run(PROMPT, len(TEXT), TEXT)
    assert run.base_ids == TEXT
    assert isinstance(made, MLX_ENGINES[name])
    if name.startswith("mlx-zip"):
        prompt_ids, ids = zip_ids(made.model.make_cache()[-1].books[0], PROMPT, TEXT)
        assert len(ids) < len(TEXT)
        assert (run.prompt_ids, list(chain(*run.ids))) == (len(prompt_ids), ids.tolist())
    else:
        assert (run.prompt_ids, list(chain(*run.ids))) == (len(PROMPT), TEXT)


@pytest.mark.parametrize("name", MLX_ENGINES)
def test_a_run_counts_steps_bytes_and_what_the_cache_holds(name):
    made = engine(name)
    run = made.run(PROMPT, len(TEXT), TEXT)
    assert len(run.times) == len(run.ids)
    assert run.times == sorted(run.times)
    assert run.text_bytes == len(made.tokenizer.decode(TEXT).encode())
    assert run.kv_ids == run.prompt_ids + sum(map(len, run.ids))
    assert (run.row_bytes > 0) == name.startswith("mlx-zip")
    assert run.peak_bytes > made.weight_bytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("plain", "lookup"), [("mlx-lm", "mlx-lm+lookup"), ("mlx-zip", "mlx-zip+lookup")])
def test_lookup_decoding_emits_what_greedy_decoding_does(plain, lookup, seed):
    expected, found = (engine(name, seed).run(PROMPT, 60) for name in (plain, lookup))
    assert found.base_ids == expected.base_ids
    assert list(chain(*found.ids)) == list(chain(*expected.ids))
    if plain == "mlx-lm":  # of ids that the tokenizer has not, mlx_zip makes no text, mlx-lm some
        assert found.text_bytes == expected.text_bytes


def test_lookup_takes_fewer_steps_where_a_text_repeats_itself():
    text = TEXT[:8] * 5
    run = engine("mlx-lm+lookup").run(TEXT[:8], len(text), text)
    assert run.base_ids == text
    assert len(run.times) < len(text) / 3


@pytest.mark.parametrize(("plain", "lookup"), [("mlx-lm", "mlx-lm+lookup"), ("mlx-zip", "mlx-zip+lookup")])
def test_a_conversation_goes_on_alike_with_and_without_lookup(plain, lookup):
    said = []
    for name in (plain, lookup):
        made = engine(name)
        held = made.start()
        said.append([made.run(prompt, 20, None, held).base_ids for prompt in (PROMPT, TEXT[:9], TEXT[9:14])])
    assert said[0] == said[1]


def test_mlx_zip_runs_as_its_own_stream_generate_does():
    made = engine("mlx-zip")
    expected = list(stream_generate(made.model, made.tokenizer, PROMPT, max_tokens=30))
    run = made.run(PROMPT, 30)
    assert run.ids == [[response.token] for response in expected]
    assert run.text_bytes == expected[-1].bytes


def test_a_forced_sampler_gives_its_ids_and_then_the_last_again():
    forced = Forced([5, 9])
    assert [int(forced(mx.array([[0.0, 1.0]]))[0]) for _ in range(3)] == [5, 9, 9]
    assert forced(mx.zeros((1, 4))).dtype == mx.uint32


def test_a_fresh_engine_has_another_model_object_over_the_same_weights():
    options = ZipOptions(encoder_layers=1, codebook_size=64)
    made = MlxZip(*(m := from_config("tiny", SHAPE, "float32", read_tokenizer("stories"), options), m.zipped))
    before = made.model
    made.fresh()
    assert made.model is not before
    for (name, a), (other, b) in zip(*(tree_flatten(m.parameters()) for m in (before, made.model)), strict=True):
        assert name == other
        assert bool((a == b).all())


def test_lookup_finds_what_followed_the_longest_run_last():
    lookup = Lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    assert lookup.propose(2) == [9, 2]  # behind 1 2 3, though 2 3 came later
    lookup.add([8])
    assert lookup.propose(3) == [1, 2, 3]  # behind 2 3 8
    assert Lookup([1, 2]).propose(4) == []


def test_a_draft_is_kept_as_far_as_the_model_agrees():
    assert verify([4, 5, 6], [4, 5, 7, 8]) == [4, 5, 7]
    assert verify([4], [4, 9]) == [4, 9]
    assert verify([], [3]) == [3]


def test_ids_count_up_to_an_eos_or_the_limit():
    assert until_end([[5], [6, 1, 7], [8]], 9, {1}) == (2, [5, 6, 1])
    assert until_end([[5], [6, 7], [8]], 2, {1}) == (2, [5, 6])
    assert until_end([[5], [6]], 9, {1}) == (2, [5, 6])


# ---- engines on torch


def test_transformers_replays_and_chooses_as_mlx_lm_does():
    pytest.importorskip("torch", reason="the engine hf needs torch")
    _, args = parse("generate")
    found = from_folders(None, str(tiny_text.GOLDEN / "llama_transformer_untied_pos" / "base"))
    plain, hf = (make_engine(name, found, args) for name in ("mlx-lm", "hf"))
    prompt, text = list(range(10, 40)) * 2, list(range(20, 50))
    replayed, expected = hf.run(prompt, 30, text), plain.run(prompt, 30, text)
    assert replayed.base_ids == text
    assert replayed.text_bytes == expected.text_bytes
    assert hf.run(prompt, 20).base_ids == plain.run(prompt, 20).base_ids
    assert (hf.weight_bytes, hf.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)


def test_transformers_goes_on_with_a_conversation_as_mlx_lm_does():
    pytest.importorskip("torch", reason="the engine hf needs torch")
    _, args = parse("generate")
    found = from_folders(None, str(tiny_text.GOLDEN / "llama_transformer_untied_pos" / "base"))
    said = []
    for made in (make_engine(name, found, args) for name in ("mlx-lm", "hf")):
        held = made.start()
        said.append([made.run(prompt, 12, None, held).base_ids for prompt in (list(range(10, 40)), [7, 8, 9])])
    assert said[0] == said[1]


def test_the_published_package_replays_and_chooses_as_we_do():
    for library in ("torch", "peft", "zip2zip"):
        pytest.importorskip(library, reason=f"the engine zip2zip needs {library}")
    name = "phi3_reslatent_mean_untied_v2"  # self-contained
    _, args = parse("generate", "--published", tiny_text.GOLDEN / name)
    found = from_folders(str(tiny_text.converted(name)), None)
    ours, theirs = (make_engine(name, found, args) for name in ("mlx-zip", "zip2zip"))
    prompt = list(range(10, 30)) * 3
    text = list(range(10, 30)) * 2
    runs = [made.run(prompt, len(text), text) for made in (ours, theirs)]
    assert runs[0].base_ids == runs[1].base_ids == text
    assert runs[0].ids == runs[1].ids
    assert runs[0].prompt_ids == runs[1].prompt_ids < len(prompt)
    free = [made.run(prompt, 20) for made in (ours, theirs)]
    assert free[0].ids == free[1].ids


# ---- workloads


def test_a_text_is_cut_into_prompt_and_continuation(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("once upon a time there was a dog.\n\n" * 40)
    tokenizer = read_tokenizer("stories")
    first, second = cut("web", [file], tokenizer, 12, 8, 2, "replay")
    ids = tokenizer.encode(file.read_text(), add_special_tokens=False)
    assert [*first.turns[0].prompt, *(first.turns[0].text or ())] == ids[:20]
    assert [*second.turns[0].prompt, *(second.turns[0].text or ())] == ids[20:40]
    assert cut("web", [file], tokenizer, 12, 8, 1, "free")[0].turns[0].text is None


def test_a_text_that_is_too_short_or_ends_within_is_refused(tmp_path):
    tokenizer = tiny_text.byte_level()
    file = tmp_path / "a.txt"
    file.write_text("short")
    with pytest.raises(MlxZipError, match="has 7 base ids, 1 window"):
        cut("web", [file], tokenizer, 12, 8, 1, "replay")
    file.write_text("so it goes <|eos|> and on and on")
    with pytest.raises(MlxZipError, match=r"holds the end of a text \(id 1\)"):
        cut("web", [file], tokenizer, 12, 8, 1, "replay")


def test_texts_are_found_by_domain_held_out_ones_first(tmp_path):
    (tmp_path / "code").mkdir()
    for name in ("x.train.txt", "x.test.txt"):
        (tmp_path / "code" / name).write_text("a")
    assert [path.name for path in sources((), tmp_path, ["code"])["code"]] == ["x.test.txt"]
    with pytest.raises(MlxZipError, match="no text in web/"):
        sources((), tmp_path, ["web"])
    with pytest.raises(MlxZipError, match="expected DOMAIN=FILE"):
        sources([f"code={tmp_path / 'none'}"], None, ())


def test_a_chat_begins_once():
    tokenizer = read_tokenizer("stories")
    found = chat(tokenizer, workloads.REQUESTS, 2, 16)
    assert found.turns[0].prompt[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in found.turns[1].prompt
    assert found.positions == sum(len(turn.prompt) + 17 for turn in found.turns)


# ---- shapes


@pytest.mark.parametrize("precision", ["16", "8", "4"])
def test_a_shape_is_kept_in_the_precision_asked_for(precision):
    wide = {**SHAPE, "hidden_size": 64, "intermediate_size": 64}
    made = from_config("tiny", wide, precision, read_tokenizer("stories"), ZipOptions(encoder_layers=1))
    full = from_config("tiny", wide, "float32", read_tokenizer("stories"), ZipOptions(encoder_layers=1))
    sizes = [engines.weight_bytes(one.plain()) for one in (made, full)]
    bits = {"16": 16, "8": 9, "4": 5}[precision]  # scales and biases of a group of 64 are a bit each, in float32
    assert sizes[0] / sizes[1] == pytest.approx(bits / 32, rel=0.02)
    text = [10, 11, 12, 10, 11, 12, 10, 11]
    assert MlxZip(made, made.zipped).run(text, 8, text).base_ids == text


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_shape_can_have_any_encoder(encoder):
    options = ZipOptions(encoder, 1, codebook_size=64)
    made = from_config("tiny", SHAPE, "float32", read_tokenizer("stories"), options)
    text = [10, 11, 12] * 4
    run = MlxZip(made, made.zipped).run(text, 12, text)
    assert run.base_ids == text
    assert len(run.ids) < 12


def test_the_bundled_models_belong_together():
    made = from_folders("stories", "stories-base")
    assert made.zipped is not None
    assert hasattr(made.zipped(), "layout")
    assert not hasattr(made.plain(), "layout")
    with pytest.raises(MlxZipError, match="--model stories-base has no hypertokens"):
        from_folders("stories-base", None)
    with pytest.raises(MlxZipError, match="--base stories has hypertokens"):
        from_folders(None, "stories")


# ---- records


def test_figures_are_those_of_the_steps():
    run = made_run(step_s=0.1, steps=5, first_s=0.5, per_step=2)
    top = ceiling(1e6, 1000, 10, run)
    assert top.step_bytes == 1000 + 10 * (11 - 5 / 2)
    found = figures(8, [run, run], [3.0, 4.0], top)
    expected = {
        "ttft_ms": 500, "prefill_tokens_per_s": 16, "steps_per_s": 10, "step_ms": 100, "base_tokens_per_s": 20,
        "base_tokens_per_step": 2, "end_to_end_tokens_per_s": 10 / 0.9, "bytes_per_s": 20 / 0.9, "bytes_per_token": 2,
        "total_s": 0.9, "peak_bytes": 1000, "joules": 3.5, "joules_per_token": 0.35,
        "ceiling_percent": 100 * 10 / (1e6 / 1085),
    }  # fmt: skip
    assert {name: figure["median"] for name, figure in found.items()} == pytest.approx(expected, rel=1e-5)
    assert found["joules"]["samples"] == [3, 4]


def test_what_is_not_known_is_null():
    run = made_run(steps=1)
    run.peak_bytes = None
    found = figures(8, [run], [None], ceiling(1e6, 1000, 10, run))
    unknown = {"steps_per_s", "step_ms", "base_tokens_per_s", "peak_bytes", "joules", "joules_per_token"}
    assert {name for name, figure in found.items() if figure is None} == {*unknown, "ceiling_percent"}


def lines(capsys, *flags):
    assert tiny_bench.run("generate", *flags) == 0
    return [checked(line, "here") for line in capsys.readouterr().out.splitlines()]


def test_every_engine_and_size_has_a_record_that_keeps_to_the_schema(capsys):
    found = lines(capsys, *ON, "--sizes", "24+12", "32+8", "--trials", 3, "--engines", *MLX_ENGINES)
    assert [(r["engine"], r["workload"]["prompt_tokens"]) for r in found] == [
        (name, prompt) for prompt in (24, 32) for name in MLX_ENGINES
    ]
    for record in found:
        assert record.keys() == SECTIONS.keys()
        assert record["figures"].keys() == FIGURES.keys()
        assert record["counts"]["base_tokens"] == record["workload"]["tokens"]
        assert len(record["figures"]["total_s"]["samples"]) == 3
        assert record["mode"] == "replay"
        assert record["model"]["weights"] == "random"
    assert len({record["run"] for record in found}) == 1


def test_a_chat_has_a_record_per_turn(capsys):
    flags = ["--model", "stories", "--base", "stories-base", "--mode", "chat", "--turns", 2, "--sizes", "1+6"]
    found = lines(capsys, *flags, "--trials", 1, "--warmup", 0)
    assert [(r["engine"], r["workload"]["turn"]) for r in found] == [
        (n, t) for n in ("mlx-lm", "mlx-zip") for t in (0, 1)
    ]
    assert found[1]["counts"]["kv_ids"] > found[0]["counts"]["kv_ids"]


class Fake(engines.Engine):
    """Says which runs it was asked for."""

    def __init__(self, name, told, stop_at=None):
        self.name, self.told, self.stop_at = name, told, stop_at
        self.weight_bytes = self.kv_bytes = 100

    def bandwidth(self):
        return 1e6

    def fresh(self):
        self.told.append(f"fresh {self.name}")

    def start(self):
        return self.name

    def run(self, prompt, tokens, replay=None, held=None):
        self.told.append(self.name)
        if len(self.told) == self.stop_at:
            raise KeyboardInterrupt
        return made_run(steps=tokens)


def measure(told, capsys, monkeypatch, *flags, stop_at=None):
    monkeypatch.setattr(generate, "make_engine", lambda name, *_: Fake(name, told, stop_at))
    status = tiny_bench.run("generate", *ON, "--sizes", "8+4", *flags)
    return status, capsys.readouterr().out.splitlines()


def test_trials_are_interleaved_and_take_turns_in_going_first(capsys, monkeypatch):
    told: list[str] = []
    _, out = measure(told, capsys, monkeypatch, "--trials", 3, "--warmup", 1)
    a, b = "mlx-lm", "mlx-zip"
    assert told == [b, a, a, b, b, a, a, b]
    assert [json.loads(line)["engine"] for line in out] == [a, b]


def test_cold_rows_are_those_of_a_fresh_model(capsys, monkeypatch):
    told: list[str] = []
    measure(told, capsys, monkeypatch, "--trials", 1, "--warmup", 0, "--rows", "cold")
    assert told == ["fresh mlx-lm", "mlx-lm", "fresh mlx-zip", "mlx-zip"]


def test_an_interrupt_keeps_the_records_that_are_finished(capsys, monkeypatch):
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        measure(told, capsys, monkeypatch, "--trials", 1, "--warmup", 0, "--sizes", "8+4", "8+6", stop_at=3)
    assert [json.loads(line)["workload"]["tokens"] for line in capsys.readouterr().out.splitlines()] == [4, 4]


def test_the_page_explains_every_field_and_figure():
    page = (Path(__file__).resolve().parents[1] / "docs" / "bench.md").read_text()
    assert all(f"| `{name}` | {unit} | {what} |" in page for name, (unit, what) in FIGURES.items())
    assert all(f"`{name}`" in page for name in SECTIONS)
    assert all(f"`{name}`" in page for name in engines.ENGINES)


# ---- energy


def test_joules_come_from_a_counter_that_may_be_read(tmp_path, monkeypatch):
    (tmp_path / "intel-rapl:0").mkdir()
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.write_text("2000000\n")
    monkeypatch.setattr(machine, "RAPL", tmp_path)
    meter = machine.EnergyMeter()
    before = meter.read()
    counter.write_text("5500000\n")
    assert (meter.source, machine.used(before, meter.read())) == ("package", 3.5)
    assert machine.used(5.0, 1.0) is None  # it began anew


def test_without_a_counter_there_are_no_joules(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RAPL", tmp_path)
    monkeypatch.setattr(machine, "_nvidia", lambda: None)
    meter = machine.EnergyMeter()
    assert (meter.source, meter.read(), machine.used(None, None)) == (None, None, None)


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "vllm"], "engine 'vllm' is not one of mlx-lm, mlx-zip"),
        (["--engines", "mlx-lm", "mlx-lm"], "mlx-lm is named twice"),
        (["--sizes", "512"], r"--sizes 512: expected P\+G"),
        (["--sizes", "8+1"], "to write"),
        (["--sizes", "300+20"], "needs 321 positions, the model's context has 256"),
        (["--mode", "free"], "random weights"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--text", "code=none.txt"], "expected DOMAIN=FILE"),
        (["--data", "nowhere"], "no text in code/"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere cannot be read"),
        (["--model", "stories"], "name a model"),
    ],
)
def test_bad_requests_are_refused_before_any_weight_is_made(flags, message, monkeypatch):
    monkeypatch.setattr(generate, "from_shape", lambda *_: pytest.fail("too late"))
    with pytest.raises(MlxZipError, match=message):
        tiny_bench.run("generate", *ON, "--sizes", "8+4", *flags)


def test_a_missing_library_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(generate, "prepare", lambda *_: pytest.fail("too late"))
    with pytest.raises(InstallationError, match="engine hf needs torch, transformers: pip install torch transformers"):
        tiny_bench.run("generate", *ON, "--engines", "hf")


def test_a_conversation_is_not_for_every_engine():
    turns = (Turn((1,), 4), Turn((2,), 4))
    with pytest.raises(MlxZipError, match="zip2zip cannot go on with a conversation"):
        generate.check_fit(["mlx-lm", "zip2zip"], [Workload("chat", "chat", "requests", turns)])


def test_a_plain_model_alone_has_no_hypertokens():
    with pytest.raises(MlxZipError, match="mlx-zip needs a model with hypertokens"):
        tiny_bench.run("generate", "--base", "stories-base", "--sizes", "8+4", "--engines", "mlx-zip")


def test_too_wide_a_tokenizer_is_refused():
    with pytest.raises(MlxZipError, match="shape narrow only 64"):
        from_config("narrow", {**SHAPE, "vocab_size": 64}, "float32", read_tokenizer("stories"), ZipOptions())


def test_zip_ids_leave_the_codebook_as_it_is():
    book = Codebook(tiny.tiny_model().config.codec_params)
    prompt_ids, ids = zip_ids(book, PROMPT, TEXT)
    assert len(book) == book.mark() == 0
    book.push(prompt_ids)
    book.push(ids)
    assert book.expand(np.concatenate([prompt_ids, ids])).tolist() == [*PROMPT, *TEXT]


def test_a_run_knows_what_came_with_its_first_step():
    run = Run(3)
    run.step(0.1, [9], [4, 5])
    run.step(0.2, [6], [6])
    assert (run.first_base, run.base_ids, run.ids) == (2, [4, 5, 6], [[9], [6]])
