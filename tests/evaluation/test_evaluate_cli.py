"""`mlx_zip evaluate`, in process: models side by side, a table for people and a record for machines."""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_zip import GenerationError, cli
from mlx_zip.engine.mlx.generate import load
from mlx_zip.evaluation import evaluation_report
from mlx_zip.evaluation.bits import cut_scored_windows, measure_bits
from mlx_zip.evaluation.evaluate import EvaluationOptions, check_prompts_fit, evaluate
from mlx_zip.text.documents import read_corpus
from support import checkpoints, tiny_text
from support.places import GOLDEN_MODELS

pytestmark = pytest.mark.usefixtures("home")

NAME = "llama_transformer_tied_lora"
TEXT = (
    "The cat sat on the mat. The cat sat on the mat.\n<end>\nOnce upon a time a cat sat on a time, once upon a mat.\n"
)


@pytest.fixture
def zipped():
    return str(tiny_text.converted(NAME))


@pytest.fixture
def base():
    return str(GOLDEN_MODELS / NAME / "base")


@pytest.fixture
def words(tmp_path):
    """A plain model of whole words with 256 positions."""
    checkpoints.write_base(tmp_path / "words")
    return str(tmp_path / "words")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture
def run(capsys, tmp_path):
    """Runs `mlx_zip evaluate` -> (status, stdout, stderr, record)."""

    def evaluate(*flags):
        file = tmp_path / "record.json"
        status = cli.main(["evaluate", "--out", str(file), *map(str, flags)])
        out, err = capsys.readouterr()
        return status, out, err, json.loads(file.read_text()) if file.exists() else None

    return evaluate


def row(table, label):
    """The cells of one line of the table."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(label + "  ")]
    return line.strip().removeprefix(label).split()


def test_base_and_zip_model_stand_next_to_one_another_on_the_same_bytes(run, base, zipped, text):
    status, out, _, record = run("--model", base, "--model", zipped, "--data", text, "--separator", "<end>")
    plain, zip2zip = (model["text"] for model in record["models"])
    assert status == 0
    assert [model["kind"] for model in record["models"]] == ["plain", "zip2zip"]
    assert plain["bytes"] == zip2zip["bytes"] == record["data"]["bytes"] == len(TEXT.replace("\n<end>\n", "").strip())
    assert plain["base_ids"] == zip2zip["base_ids"] == plain["ids"] > zip2zip["ids"]
    assert row(out, "bits per byte") == [f"{part['bits_per_byte']:.4f}" for part in (plain, zip2zip)]
    assert row(out, "to the first model") == ["-", f"{zip2zip['bits_per_byte_relative']:+.2%}"]


def test_the_record_is_what_the_library_measures(run, zipped, text):
    record = run("--model", zipped, "--data", text, "--context", 20, "--batch-size", 3, "--fill-windows")[3]
    model, tokenizer = load(zipped)
    windows = cut_scored_windows(tokenizer, read_corpus([text]).documents, 20, fill_windows=True)
    expected = measure_bits(model, windows).record()
    found = record["models"][0]["text"]
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], abs=1e-5)
    assert {key: found[key] for key in ("windows", "ids", "hyper_share")} == {
        key: expected[key] for key in ("windows", "ids", "hyper_share")
    }


def test_the_record_says_how_it_came_about(run, zipped, text):
    record = run("--model", zipped, "--data", text, "--limit-bytes", 30)[3]
    assert record["version"] == evaluation_report.VERSION
    assert record["versions"]["mlx"]
    assert record["models"][0]["model"] == zipped
    assert (record["settings"]["context"], record["settings"]["availability"]) == (1024, "causal")
    assert (record["data"]["bytes"], record["data"]["cut_by_limit"]) == (30, True)


def test_stories_are_generated_from_openings_over_turns(run, base, zipped, text):
    flags = ("--data", text, "--separator", "<end>", "--generate", 2, "--turns", 2, "--max-tokens", 12)
    _, out, _, record = run("--model", base, "--model", zipped, *flags)
    plain, zip2zip = (model["generation"] for model in record["models"])
    assert len(zip2zip["turns"]) == 2
    assert len(zip2zip["texts"]) == 2
    assert row(out, "base tokens per step") == ["1.000", f"{zip2zip['base_tokens_per_step']:.3f}"]
    assert row(out, "canonical") == ["-", f"{zip2zip['canonical_base_tokens_per_step']:.3f}"]
    assert row(out, "invalid ids") == ["0", "0"]
    assert plain["base_tokens"] == 24


def test_chat_prompts_come_from_a_file(run, zipped, tmp_path):
    asked = [json.dumps({"messages": [{"role": "user", "content": f"The {who}"}]}) for who in ("cat", "mat")]
    (tmp_path / "p.jsonl").write_text("\n".join(asked))
    flags = ("--prompts", tmp_path / "p.jsonl", "--generate", 1, "--turns", 2, "--keep-cache", "--max-tokens", 8)
    status, _, _, record = run("--model", zipped, *flags)
    assert (status, record["data"]) == (0, None)
    assert "text" not in record["models"][0]
    first, second = record["models"][0]["generation"]["turns"]
    assert second["prompt_base_tokens"] > 2 * first["prompt_base_tokens"] - 8


def test_legacy_availability_is_labelled_as_not_comparable(run, zipped, text):
    legacy = run("--model", zipped, "--data", text, "--availability", "legacy")
    assert "not comparable" in legacy[1]
    assert legacy[3]["models"][0]["text"]["availability"] == "legacy"
    assert "not comparable" not in run("--model", zipped, "--data", text)[1]


def test_text_that_the_ids_do_not_give_back_is_pointed_out(run, words, tmp_path):
    (tmp_path / "t.txt").write_text("w5 w6 nothing")
    _, out, _, record = run("--model", words, "--data", tmp_path / "t.txt")
    assert "1 of 1 documents are not what their base ids decode to" in out
    assert record["data"]["altered_documents"] == 1


def test_the_context_is_by_default_the_models_and_can_be_no_longer(run, words, tmp_path):
    (tmp_path / "t.txt").write_text("w5 w6 " * 200)
    assert run("--model", words, "--data", tmp_path / "t.txt")[3]["settings"]["context"] == 256
    status, _, err, _ = run("--model", words, "--data", tmp_path / "t.txt", "--context", 257)
    assert (status, "windows of 257 base ids (--context) do not fit the model's 256 positions" in err) == (2, True)


def test_models_with_different_tokenizers_are_refused_before_any_model_is_loaded(run, zipped, words, text, monkeypatch):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    status, out, err, record = run("--model", zipped, "--model", words, "--data", text)
    assert (status, out, record) == (2, "", None)
    assert "has another tokenizer than" in err


def test_a_missing_second_model_is_named_before_the_first_is_loaded(run, zipped, text, monkeypatch):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    status, _, err, _ = run("--model", zipped, "--model", "/no/such", "--data", text)
    assert (status, err.startswith("error: /no/such: no such model folder")) == (2, True)


def damaged(model, folder, file, content):
    """A copy of a model's folder with another content of one file; None: without that file."""
    shutil.copytree(model, folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("model.safetensors", None, "second has no weights (model*.safetensors)"),
        ("model.safetensors", b"junk" * 99, "second/model.safetensors cannot be read: "),
        ("model.safetensors", b"", "second/model.safetensors cannot be read: "),
        ("config.json", b'{"model_type": "zip2zip"}', "zip2zip"),
    ],
)
def test_a_damaged_second_model_is_named_before_the_first_is_loaded(
    file, content, reason, run, zipped, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    second = damaged(zipped, tmp_path / "second", file, content)
    status, out, err, _ = run("--model", zipped, "--model", second, "--data", text)
    assert (status, out, err.count("\n"), reason in err) == (2, "", 1, True)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--codebook-size", -5), "(--codebook-size) must be from 0 to 1048576, got -5"),
        (("--codebook-size", 10**11), "(--codebook-size) must be from 0 to 1048576"),
        (("--codebook-size", 1, "--pack", "PACK"), "2 entries, but the model's codebook has 1 slots"),
        (("--tasks", ","), "--tasks names no task"),
        (("--generate", 1, "--stop", "x", ""), "a stop string (--stop) is empty"),
    ],
)
def test_what_no_model_can_meet_is_one_line_before_a_model_is_loaded(
    flags, reason, run, base, zipped, text, tmp_path, monkeypatch
):
    ids = load(zipped)[1].encode("cat mat", add_special_tokens=False)
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    (tmp_path / "pack.json").write_text(json.dumps([ids[:2], ids[1:3]]))
    flags = [tmp_path / "pack.json" if flag == "PACK" else flag for flag in flags]
    status, out, err, _ = run("--model", base, "--model", zipped, "--data", text, *flags)
    assert (status, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1


def test_openings_that_end_inside_a_character_are_no_prompts(run, zipped, tmp_path):
    (tmp_path / "t.txt").write_text("\N{FROG FACE}" * 9)
    for temperature in (0, 1):
        flags = ("--data", tmp_path / "t.txt", "--generate", 1, "--opening", 1, "--temp", temperature)
        status, _, err, _ = run("--model", zipped, *flags)
        assert (status, err.count("\n"), "raise --opening" in err) == (2, 1, True)


def test_a_model_whose_weights_are_not_numbers_is_named(run, base, text, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(base, second)
    weights = dict(mx.load(str(second / "model.safetensors")))
    weights["model.norm.weight"] *= mx.nan
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "nan.safetensors"), weights)
    (tmp_path / "nan.safetensors").replace(second / "model.safetensors")
    status, out, err, record = run("--model", base, "--model", second, "--data", text)
    assert (status, out, record) == (2, "", None)
    assert f"error: {second}: row 0: the model gives id" in err


def test_a_chat_template_that_is_missing_is_named_before_the_model_is_loaded(run, words, text, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "w5"}]}')
    status, out, err, _ = run("--model", words, "--data", text, "--generate", 1, "--prompts", tmp_path / "p.jsonl")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "prompt 1: the chat template cannot render the messages" in err


@pytest.mark.parametrize("kind", ["plain", "zip2zip"])
def test_a_prompt_longer_than_the_context_is_named_before_a_model_is_loaded(
    kind, run, zipped, base, tmp_path, monkeypatch
):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    model = base if kind == "plain" else zipped
    context = positions(model)
    (tmp_path / "t.txt").write_text("The cat sat on the mat. " * context)
    flags = ("--data", tmp_path / "t.txt", "--generate", 1, "--opening", 8 * context)
    status, out, err, _ = run("--model", model, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"context has {context} and generation needs at least one: shorten it (--opening" in err


def test_a_prompt_that_fits_the_context_only_compressed_is_refused_for_the_plain_model_alone(zipped, base):
    tokenizer = load(zipped)[1]
    text = "The cat sat on the mat. " * positions(base)
    ids = tokenizer.encode(text)[: positions(base) + 50]
    conversations = [[tokenizer.decode(ids)]]
    check_prompts_fit(Path(zipped), tokenizer, conversations, None, None)
    with pytest.raises(GenerationError, match="prompt 1 takes"):
        check_prompts_fit(Path(base), tokenizer, conversations, None, None)


def positions(model):
    """The number of positions in a model's context."""
    return json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]


def test_windows_too_long_for_the_second_model_are_named_before_the_first_is_loaded(run, words, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_zip.evaluation.evaluate.load", None)
    config = json.loads((Path(words) / "config.json").read_text())
    second = damaged(
        words, tmp_path / "short", "config.json", json.dumps({**config, "max_position_embeddings": 9}).encode()
    )
    (tmp_path / "t.txt").write_text("w5 w6 " * 20)
    status, _, err, _ = run("--model", words, "--model", second, "--data", tmp_path / "t.txt")
    assert (status, err.count("\n"), "do not fit the model's 9 positions" in err) == (2, 1, True)


def test_a_header_says_on_stderr_what_will_be_measured(run, zipped, base, text):
    err = run("--model", base, "--model", zipped, "--data", text, "--generate", 1, "--max-tokens", 4)[2]
    assert err.splitlines()[0] == (
        f"models: {base}, {zipped} (the first is the baseline); text: 109 bytes in 1 document, 1 window of at most "
        "1,024 base ids; generation: 1 conversation of 1 turn, at most 4 base tokens per turn; engine: mlx; device: "
        f"{mx.default_device().type.name}"
    )


def test_each_part_of_the_table_is_explained_after_it(run, zipped, text):
    out = run("--model", zipped, "--data", text)[1]
    assert "\n- bits per byte: what the text costs the model, lower is better" in out
    assert "- base tokens per step:" not in out


def test_the_library_gives_the_record_that_the_command_writes(run, zipped, text):
    record = run("--model", zipped, "--data", text, "--fill-windows")[3]
    ours = evaluate([zipped], EvaluationOptions(data=[text], fill_windows=True))
    assert ours["settings"] == record["settings"]
    assert ours["models"][0]["text"]["bits_per_byte"] == record["models"][0]["text"]["bits_per_byte"]


def test_a_starting_codebook_is_read_from_a_file(run, zipped, text, tmp_path):
    tokenizer = load(zipped)[1]
    entry = tokenizer.encode("cat", add_special_tokens=False)[:2]
    (tmp_path / "pack.json").write_text(json.dumps([entry]))
    without, given = (
        run("--model", zipped, "--data", text, *flags)[3]["models"][0]["text"]
        for flags in ((), ("--pack", tmp_path / "pack.json"))
    )
    assert given["ids"] <= without["ids"]
    assert given["bits_per_byte"] != without["bits_per_byte"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "nothing to evaluate"),
        (("--generate", 3), "--generate needs --prompts"),
        (("--data", "TEXT", "--generate", 0), "(--generate)"),
        (("--prompts", "p.jsonl", "--data", "TEXT"), "--prompts needs --generate"),
        (
            ("--data", "TEXT", "--num-shots", 2, "--include-path", "."),
            "--include-path, --num-shots: of benchmark tasks",
        ),
        (("--data", "TEXT", "--apply-chat-template"), "--apply-chat-template: of benchmark tasks"),
        (("--data", "TEXT", "--border", "split"), "--border: of benchmark tasks"),
        (("--data", "TEXT", "--confirm-run-unsafe-code"), "--confirm-run-unsafe-code: of benchmark tasks"),
        (("--data", "missing.txt"), "missing.txt: no such file"),
        (("--data", "TEXT", "--context", 0), "--context"),
        (("--data", "TEXT", "--generate", 9), "9 continuations"),
        (("--data", "TEXT", "--out", "/nowhere/at/all.json"), "/nowhere/at/all.json: no such folder"),
    ],
)
def test_bad_requests_are_one_line_that_names_the_culprit(run, zipped, text, flags, reason):
    status, out, err, _ = run("--model", zipped, *(text if flag == "TEXT" else flag for flag in flags))
    assert (status, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("positions", "flags", "windows", "requests"),
    [(256, (), 256, 256), (4096, (), 1024, 4096), (256, ("--context", 100), 100, 100)],
)
def test_tasks_read_all_positions_of_the_first_model_unless_told_otherwise(
    run, words, tmp_path, monkeypatch, positions, flags, windows, requests
):
    """Windows are short for speed; a task's question that loses its beginning is another question."""
    config = Path(words) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": positions}))
    (tmp_path / "t.txt").write_text("w5 w6")
    results = {"results": {"t": {"acc,none": 0.5}}, "truncated": 3, "context": requests}
    asked = []

    def run_tasks(model, tokenizer, tasks, *, context, **options):
        asked.append(context)
        return results

    monkeypatch.setattr("mlx_zip.evaluation.tasks.check_tasks", lambda *_: None)
    monkeypatch.setattr("mlx_zip.evaluation.tasks.run_tasks", run_tasks)
    given = ("--data", tmp_path / "t.txt", "--tasks", "t", "--include-path", tmp_path, *flags)
    _, out, _, record = run("--model", words, *given)
    assert (asked, record["settings"]["context"]) == ([requests], windows)
    assert record["settings"]["include_path"] == str(tmp_path)
    assert f"3 requests of tasks lost the beginning of their context, to fit {requests} base ids" in out


def test_without_the_harness_tasks_say_what_to_install(run, zipped, monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx_zip.evaluation.lm_eval_model", raising=False)
    monkeypatch.delattr("mlx_zip.evaluation.lm_eval_model", raising=False)
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance"):
        monkeypatch.setitem(sys.modules, name, None)
    status, _, err, _ = run("--model", zipped, "--tasks", "arc_easy,hellaswag")
    assert status == 2
    assert "pip install -e '.[eval]'" in err
