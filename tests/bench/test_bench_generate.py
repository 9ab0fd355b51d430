"""bench generate: workloads, shapes, what a record holds, what is refused (no timing is judged here)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlx_zip.bench import machine
from mlx_zip.bench.engines import choice, mlx_engines, workloads
from mlx_zip.bench.engines import model_making as shapes
from mlx_zip.bench.engines.choice import ENGINES
from mlx_zip.bench.engines.interface import Engine
from mlx_zip.bench.engines.mlx_engines import MlxZip
from mlx_zip.bench.engines.model_making import models_from_config, models_from_folders
from mlx_zip.bench.engines.shape_table import ENCODERS, ZipOptions
from mlx_zip.bench.engines.workloads import (
    cut_text,
    domain_files,
    make_conversations,
    read_tokenizer,
)
from mlx_zip.bench.generation import generate
from mlx_zip.bench.generation.generate_record import (
    FIGURES,
    SECTIONS,
    average_step_bytes,
    ceiling_record,
    summarize_figures,
)
from mlx_zip.errors import InstallationError, MlxZipError
from mlx_zip.layout import has_hypertokens
from support import tiny_bench, tiny_text
from support.bench_engines import MLX_ENGINES
from support.places import DOCS
from support.tiny_bench import ON, SHAPE, made_run

SINCE = ("load_average", "idle_share", "preloaded", "blas", "kv_dtype")  # fields that older records lack


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


# ---- workloads


def test_a_text_is_cut_into_prompt_and_continuation(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("once upon a time there was a dog.\n\n" * 40)
    tokenizer = read_tokenizer("stories")
    first = cut_text("web", [file], tokenizer, 12, 8, "replay")
    ids = tokenizer.encode(file.read_text(), add_special_tokens=False)
    assert [*first.turns[0].prompt, *(first.turns[0].text or ())] == ids[:20]
    assert cut_text("web", [file], tokenizer, 12, 8, "free").turns[0].text is None


def test_a_text_that_is_too_short_or_ends_within_is_refused(tmp_path):
    tokenizer = tiny_text.byte_level()
    file = tmp_path / "a.txt"
    file.write_text("short")
    with pytest.raises(MlxZipError, match="has 7 base ids, 20 are needed"):
        cut_text("web", [file], tokenizer, 12, 8, "replay")
    file.write_text("so it goes <|eos|> and on and on")
    with pytest.raises(MlxZipError, match=r"holds the end of a text \(id 1\)"):
        cut_text("web", [file], tokenizer, 12, 8, "replay")


@pytest.mark.parametrize("names", [("question", "answer"), ("text", "code"), ("prompt", "canonical_solution")])
def test_a_record_of_two_texts_is_read_as_both_on_lines_of_their_own(names, tmp_path):
    tokenizer = read_tokenizer("stories")
    file, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    file.write_text((json.dumps(dict(zip(names, ("once upon", "a time"), strict=True))) + "\n") * 9)
    plain.write_text("once upon\na time\n\n" * 9)
    assert cut_text("web", [file], tokenizer, 12, 8, "replay").turns == (
        cut_text("web", [plain], tokenizer, 12, 8, "replay").turns
    )


def test_a_record_without_a_text_is_refused_with_its_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ""}\n{"title": "x"}\n')
    with pytest.raises(MlxZipError, match=r"a\.jsonl:2: has neither text"):
        cut_text("web", [file], tiny_text.byte_level(), 1, 1, "replay")


def test_requests_are_the_lines_of_a_file_that_are_not_empty(tmp_path):
    (tmp_path / "asked.txt").write_text("  Who?\n\nWhat?\n")
    assert workloads.read_requests(tmp_path / "asked.txt") == ["Who?", "What?"]


def test_texts_are_named_by_domain(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a")
    found = domain_files([f"code={tmp_path / 'a.txt'}", f"code={tmp_path / 'b.txt'}"])
    assert [path.name for path in found["code"]] == ["a.txt", "b.txt"]
    assert domain_files(()) == {"synthetic": []}
    with pytest.raises(MlxZipError, match="expected DOMAIN=FILE"):
        domain_files([f"code={tmp_path / 'none'}"])


def test_a_chat_begins_once():
    tokenizer = read_tokenizer("stories")
    (found,) = make_conversations(tokenizer, workloads.REQUESTS, 1, 2, 16)
    assert found.turns[0].prompt[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in found.turns[1].prompt
    assert found.positions == sum(len(turn.prompt) + 17 for turn in found.turns)


# ---- shapes


@pytest.mark.parametrize("precision", ["16", "8", "4"])
def test_a_shape_is_kept_in_the_precision_asked_for(precision):
    wide = {**SHAPE, "hidden_size": 64, "intermediate_size": 64}
    made = models_from_config("tiny", wide, precision, read_tokenizer("stories"), ZipOptions(encoder_layers=1))
    full = models_from_config("tiny", wide, "float32", read_tokenizer("stories"), ZipOptions(encoder_layers=1))
    sizes = [mlx_engines.weight_bytes(one.plain()) for one in (made, full)]
    bits = {"16": 16, "8": 9, "4": 5}[precision]  # scales and biases of a group of 64 are a bit each, in float32
    assert sizes[0] / sizes[1] == pytest.approx(bits / 32, rel=0.02)
    text = [10, 11, 12, 10, 11, 12, 10, 11]
    assert MlxZip(made).run(text, 8, text).base_ids == text


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_shape_can_have_any_encoder(encoder):
    options = ZipOptions(encoder, 1, codebook_size=64)
    made = models_from_config("tiny", SHAPE, "float32", read_tokenizer("stories"), options)
    text = [10, 11, 12] * 4
    run = MlxZip(made).run(text, 12, text)
    assert run.base_ids == text
    assert len(run.ids) < 12


def test_the_bundled_models_belong_together():
    made = models_from_folders("stories", "stories-base")
    assert made.zipped is not None
    assert has_hypertokens(made.zipped())
    assert not has_hypertokens(made.plain())
    with pytest.raises(MlxZipError, match="--model stories-base has no hypertokens"):
        models_from_folders("stories-base", None)
    with pytest.raises(MlxZipError, match="--base stories has hypertokens"):
        models_from_folders(None, "stories")


# ---- records


def test_figures_are_those_of_the_steps():
    run = made_run(step_s=0.1, steps=5, first_s=0.5, per_step=2)
    step_bytes = average_step_bytes(1000, 10, run)
    assert step_bytes == 1000 + 10 * (11 - 5 / 2)
    found = summarize_figures([replace(run, joules=3.0), replace(run, joules=4.0)], [step_bytes] * 2, 1e6)
    expected = {
        "ttft_ms": 500,
        "prefill_tokens_per_s": 16,
        "steps_per_s": 10,
        "step_ms": 100,
        "base_tokens_per_s": 20,
        "base_tokens_per_step": 2,
        "end_to_end_tokens_per_s": 10 / 0.9,
        "bytes_per_s": 20 / 0.9,
        "bytes_per_token": 2,
        "total_s": 0.9,
        "peak_bytes": 1000,
        "joules": 3.5,
        "joules_per_token": 0.35,
        "ceiling_percent": 100 * 10 / (1e6 / 1085),
    }
    assert {name: figure["median"] for name, figure in found.items()} == pytest.approx(expected, rel=1e-5)
    assert found["joules"]["samples"] == [3, 4]


def test_every_trial_has_its_own_ceiling():
    run, longer = made_run(step_s=0.1, steps=5), made_run(step_s=0.1, steps=5)
    longer.kv_ids *= 2
    step_bytes = [average_step_bytes(1000, 10, one) for one in (run, longer)]
    found = summarize_figures([run, longer], step_bytes, 1e6)["ceiling_percent"]["samples"]
    assert found == pytest.approx([100 * 10 / (1e6 / size) for size in step_bytes], rel=1e-5)
    assert ceiling_record(step_bytes, 1e6)["steps_per_s"] == pytest.approx(1e6 / (sum(step_bytes) / 2), rel=1e-5)


def test_what_is_not_known_is_null():
    run = made_run(steps=1)
    run.peak_bytes = None
    found = summarize_figures([run], [average_step_bytes(1000, 10, run)], 1e6)
    unknown = {"steps_per_s", "step_ms", "base_tokens_per_s", "peak_bytes", "joules", "joules_per_token"}
    assert {name for name, figure in found.items() if figure is None} == {*unknown, "ceiling_percent"}


def lines(capsys, *flags):
    assert tiny_bench.run("generate", *flags) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_engine_and_size_has_a_record_that_keeps_to_the_schema(capsys):
    found = lines(capsys, *ON, "--sizes", "24+12", "32+8", "--trials", 3, "--engines", *MLX_ENGINES)
    assert [(r["engine"], r["workload"]["prompt_tokens"]) for r in found] == [
        (name, prompt) for prompt in (24, 32) for name in MLX_ENGINES
    ]
    for record in found:
        assert record.keys() == {*SECTIONS, *SINCE}
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
    assert {(r["model"]["name"], r["model"]["base"]) for r in found} == {("stories", "stories-base")}


def test_conversations_have_requests_of_their_own():
    tokenizer = read_tokenizer("stories")
    found = make_conversations(tokenizer, workloads.REQUESTS, 20, 2, 16)
    assert len({turn.prompt for conversation in found for turn in conversation.turns}) == 40
    with pytest.raises(MlxZipError, match=r"33 conversation\(s\) of 2 turn\(s\) need 66 requests, there are 64"):
        make_conversations(tokenizer, workloads.REQUESTS, 33, 2, 16)


def test_the_requests_for_stories_all_differ():
    assert len(set(workloads.REQUESTS)) == len(workloads.REQUESTS) == 64


CHAT = ["--model", "stories", "--base", "stories-base", "--mode", "chat", "--turns", "1", "--sizes", "1+6"]


@pytest.mark.slow
def test_several_conversations_are_one_record_with_a_sample_per_conversation_and_trial(capsys):
    found = lines(capsys, *CHAT, "--conversations", 3, "--trials", 2, "--warmup", 0, "--rows", "cold", "warm")
    assert [(r["engine"], r["setting"]["rows"]) for r in found] == [
        (engine, rows) for rows in ("cold", "warm") for engine in ("mlx-lm", "mlx-zip")
    ]
    for record in found:
        assert record["workload"]["conversations"] == 3
        assert len(record["figures"]["bytes_per_s"]["samples"]) == 6
        assert record["counts"]["base_tokens"] == 3 * 6
        assert record["run"] == found[0]["run"]


@pytest.mark.slow
def test_the_table_of_a_chat_has_cold_and_warm_rows_and_ratios_to_the_base(capsys):
    assert tiny_bench.run("generate", *CHAT, "--conversations", 2, "--trials", 1, "--rows", "cold", "warm") == 0
    told = capsys.readouterr().err
    assert "stories on" in told
    assert "load average" in told
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| mlx-")]
    assert [(row[0], row[1]) for row in rows] == [
        ("| mlx-lm", "cold"),
        ("| mlx-zip", "cold"),
        ("| mlx-lm", "warm"),
        ("| mlx-zip", "warm"),
    ]
    assert [" to " in row[-1] for row in rows] == [False, True, False, True]


class Fake(mlx_engines.Engine):
    """Says which runs it was asked for."""

    def __init__(self, name, told, stop_at=None):
        self.name, self.told, self.stop_at = name, told, stop_at
        self.weight_bytes = self.kv_bytes = 100

    def bandwidth(self):
        return 1e6

    def forget_encoded_rows(self):
        self.told.append(f"fresh {self.name}")

    def start_conversation(self):
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


def test_engines_take_turns_in_going_first_from_conversation_to_conversation(capsys, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(generate, "make_engine", lambda name, *_: Fake(name, told))
    assert tiny_bench.run("generate", *CHAT, "--conversations", 3, "--trials", 1, "--warmup", 0) == 0
    a, b = "mlx-lm", "mlx-zip"
    assert told == [a, b, b, a, a, b]


def test_an_interrupt_keeps_the_records_that_are_finished(capsys, monkeypatch):
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        measure(told, capsys, monkeypatch, "--trials", 1, "--warmup", 0, "--sizes", "8+4", "8+6", stop_at=3)
    assert [json.loads(line)["workload"]["tokens"] for line in capsys.readouterr().out.splitlines()] == [4, 4]


def test_the_page_explains_every_field_and_figure():
    page = (DOCS / "bench.md").read_text()
    assert all(f"| `{name}` | {unit} | {what} |" in page for name, (unit, what) in FIGURES.items())
    assert all(f"`{name}`" in page for name in (*SECTIONS, *SINCE))
    assert all(f"`{name}`" in page for name in ENGINES)


# ---- energy


def test_joules_come_from_a_counter_that_may_be_read(tmp_path, monkeypatch):
    (tmp_path / "intel-rapl:0").mkdir()
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.write_text("2000000\n")
    monkeypatch.setattr(machine, "RAPL", tmp_path)
    meter = machine.EnergyMeter()
    before = meter.read()
    counter.write_text("5500000\n")
    assert (meter.source, machine.joules_between(before, meter.read())) == ("package", 3.5)
    assert machine.joules_between(5.0, 1.0) is None  # it began anew


def test_without_a_counter_there_are_no_joules(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RAPL", tmp_path)
    monkeypatch.setattr(machine, "gpu_energy_reader", lambda: None)
    meter = machine.EnergyMeter()
    assert (meter.source, meter.read(), machine.joules_between(None, None)) == (None, None, None)


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
        (["--text", f"={__file__}"], "expected DOMAIN=FILE"),
        (["--tokenizer", "nowhere"], "nowhere: no folder with a tokenizer, no tokenizer file"),
        (["--model", "stories"], "name a model"),
    ],
)
def test_bad_requests_are_refused_before_any_weight_is_made(flags, message, monkeypatch):
    monkeypatch.setattr(shapes, "models_from_shape", lambda *_: pytest.fail("too late"))
    with pytest.raises(MlxZipError, match=message):
        tiny_bench.run("generate", *ON, "--sizes", "8+4", *flags)


def test_a_missing_library_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    monkeypatch.setattr(generate, "prepare_models_and_workloads", lambda *_: pytest.fail("too late"))
    with pytest.raises(
        InstallationError,
        match="engine hf needs torch, transformers, which are not installed: run pip install torch transformers",
    ):
        tiny_bench.run("generate", *ON, "--engines", "hf")


def test_a_conversation_is_not_for_every_engine():
    class OneRequest(Engine):
        name = "zip2zip"

        def run(self, prompt, tokens, replay=None, held=None):
            pytest.fail("too late")

    with pytest.raises(MlxZipError, match="zip2zip runs single requests only: leave it out, or --turns 1"):
        OneRequest().start_conversation()


def test_a_plain_model_alone_has_no_hypertokens():
    with pytest.raises(MlxZipError, match="mlx-zip needs a model with hypertokens"):
        tiny_bench.run("generate", "--base", "stories-base", "--sizes", "8+4", "--engines", "mlx-zip")


def test_too_wide_a_tokenizer_is_refused():
    with pytest.raises(MlxZipError, match="shape narrow only 64"):
        models_from_config("narrow", {**SHAPE, "vocab_size": 64}, "float32", read_tokenizer("stories"), ZipOptions())


class Reader(Fake):
    """Reads from memory at a speed of its own."""

    def __init__(self, name, bytes_per_s, chip="a chip"):
        super().__init__(name, [])
        self.bytes_per_s, self.chip = bytes_per_s, chip

    @property
    def device(self):
        return {"device": "gpu", "chip": self.chip, "threads": {}}

    @property
    def yardstick(self):
        return f"products of {self.name}"

    def bandwidth(self):
        return self.bytes_per_s


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_engines_of_a_chip_have_the_fastest_reading_of_its_memory_in_any_order(order):
    readers = [Reader("torch-zip", 3e6), Reader("hf", 2e6), Reader("mlx-zip", 1e6, "another chip")]
    _, args = tiny_bench.parse("generate", *ON)
    models = models_from_folders("stories", None)
    comparison = generate.EngineComparison(args, [(readers[at], "warm") for at in order], models)
    fast = (3e6, "products of torch-zip")
    assert comparison.bandwidths == {"torch-zip": fast, "hf": fast, "mlx-zip": (1e6, "products of mlx-zip")}


def test_a_record_names_what_measured_the_bandwidth(capsys):
    [record] = lines(capsys, *ON, "--sizes", "24+12", "--trials", 1, "--engines", "mlx-lm")
    assert record["ceiling"]["yardstick"] == "float32 matrix 64 x 64 times a vector, read only, by MLX"
