"""bench nvidia: its parts at tiny sizes on the CPU, its targets, and the script around them."""

from __future__ import annotations

import re
import shlex

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


from mlx_zip.bench.engines import device_clock
from mlx_zip.bench.engines.shape_table import SHAPES, narrow_shape_config
from mlx_zip.bench.generation import report
from mlx_zip.bench.gpu import card_checks, nvidia
from mlx_zip.bench.gpu.nvidia import PARTS
from mlx_zip.bench.gpu.targets import TARGETS
from mlx_zip.bench.records import read_lines
from mlx_zip.cuda import devices
from mlx_zip.cuda.network import decoder
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.card_script import quick_python, run_script
from support.places import DOCS, REPO

H100 = {"device": {"device": "cuda", "chip": "NVIDIA H100", "threads": {}}}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)
    monkeypatch.setattr(nvidia, "STEPS", nvidia.STEPS[:1])
    monkeypatch.setattr(nvidia, "WHOLE", nvidia.WHOLE[:2])
    yield
    for name in [name for name in SHAPES if name.endswith("-narrow")]:
        del SHAPES[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def rehearsed(folder, *parts):
    assert tiny_bench.run("nvidia", "--rehearse", "--out", folder, "--parts", *parts) == 0
    return [line for part in parts for line in read_lines(folder / f"{part}.jsonl")]


# ---- parts


def test_steps_and_prefill_are_timed_apart_for_each_engine(folder):
    lines = rehearsed(folder, "steps")
    assert [(one["engine"], one["rows"]) for one in lines] == [
        ("torch-base", "warm"),
        ("torch-zip", "warm"),
        ("torch-zip", "cold"),
    ]
    base, zipped, _ = lines
    assert base["bytes"]["rows"] == 0 < zipped["bytes"]["rows"]
    assert base["bytes"]["weights"] == zipped["bytes"]["weights"]
    assert len(base["prefill"]["device_ms"]["samples"]) == 1
    assert base["step"]["tokens_per_step"] == 1 <= zipped["step"]["tokens_per_step"]
    assert zipped["step"]["clock"] == "host"


def test_whole_requests_are_records_that_report_reads(folder, capsys):
    lines = rehearsed(folder, "generate")
    assert [(one["model"]["precision"], one["engine"]) for one in lines] == [
        (bits, name) for bits in ("16", "16", "4", "4") for name in ("torch-base", "torch-zip")
    ]
    assert {one["kv_dtype"] for one in lines} == {"float32"}  # on a CPU
    capsys.readouterr()
    assert tiny_bench.run("report", folder / "generate.jsonl") == 0
    heads, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    ratios = [(row[4], row[heads.index("base tokens/s, to the base")] == "-") for row in rows]
    assert set(ratios) == {("torch-base", True), ("torch-zip", False)}


def test_the_summary_of_a_rehearsal_claims_nothing(folder, capsys):
    if not (folder / "steps.jsonl").exists():  # another process may have run the tests above
        rehearsed(folder, "steps")
    lines = rehearsed(folder, "summary")
    assert {one["verdict"] for one in lines} == {"not measured"}
    assert "met" not in capsys.readouterr().out.split()


@pytest.mark.slow
def test_recorded_ids_are_compared_and_a_difference_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(card_checks, "MODELS", ("stories-base",))
    monkeypatch.setattr(card_checks, "PROMPTS", card_checks.PROMPTS[:1])
    expected = card_checks.read_recorded_ids()["stories-base"][:1]
    monkeypatch.setattr(card_checks, "read_recorded_ids", lambda: {"stories-base": expected})
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "checks") == 0
    expected[0][1] += 1
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path / "again", "--parts", "checks") == 1
    assert f"FAIL greedy ids of stories-base, float32, equal MLX's text 1, id 2: {expected[0][1] - 1}" in (
        capsys.readouterr().out
    )


# ---- tables


def test_torch_zip_is_compared_with_torch_base_where_other_bases_ran_too():
    records = [tiny_bench.record(name) for name in ("mlx-lm", "torch-base", "mlx-zip", "torch-zip")]
    records[1]["figures"]["base_tokens_per_s"] = records[3]["figures"]["base_tokens_per_s"]
    ratios = [report.ratio_cells(record, report.base_record(record, records)) for record in records[1:]]
    assert ratios[0] == ["-", "-"]
    assert (ratios[1][0][:4], ratios[2][0][:4]) == ("2.00", "1.00")


def page_command(bench):
    """Returns the flags of the command of this bench that the page gives for a Mac, and for both machines' records."""
    text = (DOCS / "reports" / "nvidia.md").read_text()
    return shlex.split(re.search(rf"^ *mlx_zip bench {bench} (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.slow
def test_the_pages_command_for_a_mac_makes_records_that_stand_in_one_table_with_a_cards(tmp_path, capsys, monkeypatch):
    """MLX's CPU backend stands in for the Mac, and PyTorch on the CPU for the card; shapes and sizes are small."""
    monkeypatch.setitem(SHAPES, "phi-3.5-mini", narrow_shape_config(SHAPES["phi-3.5-mini"]))
    monkeypatch.setattr(device_clock, "describe_torch_device", lambda device: H100["device"])
    code = tmp_path / "code.txt"
    code.write_text("def add(a, b):\n    return a + b\n" * 40)
    card = ["--rehearse", "--out", tmp_path / "records", "--code", code, "--parts", "generate"]
    assert tiny_bench.run("nvidia", *card) == 0
    flags = page_command("generate")
    flags = [{"code=code.txt": f"code={code}", "512+256": "16+4", "2048+256": "20+4"}.get(word, word) for word in flags]
    capsys.readouterr()
    for bits in ("16", "4"):
        words = [bits if word == "$bits" else word for word in flags]
        assert "$bits" in flags
        assert tiny_bench.run("generate", *words, "--trials", 1, "--warmup", 0) == 0
    (tmp_path / "mac.jsonl").write_text(capsys.readouterr().out)
    (tmp_path / "records" / "generate.jsonl").open("a").write('{"bench": "nvidia-card"}\n')
    monkeypatch.chdir(tmp_path)
    assert tiny_bench.run("report", *page_command("report")) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in capsys.readouterr().out.splitlines()]
    for name in ("16 bit", "4 bit"):
        mine = [row[4] for row in rows if f"phi-3.5-mini, {name}" in row[1] and "H100" not in row[0]]
        card = [row[4] for row in rows if "H100" in row[0] and f"-narrow, {name}" in row[1]]
        assert mine == ["mlx-lm", "mlx-zip"] * 2
        assert list(dict.fromkeys(card)) == ["torch-base", "torch-zip"]


def count_parameters(config):
    """Returns the number of weights of a decoder by its config.json, without biases."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * size
    layer = width * (2 * heads * size + 2 * keys) + 3 * width * inner + 2 * width
    tables = config["vocab_size"] * width * (1 if config["tie_word_embeddings"] else 2)
    return config["num_hidden_layers"] * layer + tables + width


def test_parameters_are_those_of_published_models():
    assert count_parameters(SHAPES["phi-3.5-mini"]) == 3_821_079_552
    assert count_parameters(SHAPES["llama-3.2-1b"]) == 1_235_814_400
    assert count_parameters(SHAPES["phi-3-medium"]) == 13_960_238_080


def test_full_sizes_are_refused_where_no_card_is(tmp_path):
    if devices.find_device().type == "cuda":
        pytest.skip("a card is here")
    with pytest.raises(MlxZipError, match=r"no usable CUDA card here: .*; --rehearse runs all parts at tiny sizes"):
        tiny_bench.run("nvidia", "--out", tmp_path / "records")
    assert not (tmp_path / "records").exists()
    assert tiny_bench.run("nvidia", "--out", tmp_path, "--parts", "summary") == 0


# ---- the script


@pytest.mark.slow
def test_the_script_runs_chosen_parts_into_a_folder_and_says_which_target_is_met(tmp_path):
    status, said, err = run_script(tmp_path, "--cpu-rehearsal", PARTS="summary")
    assert status == 0, said + err
    assert "not measured  torch-base reaches 78 %" in said
    assert "== sanitizer: not run (no GPU)" in said
    assert len(read_lines(tmp_path / "an out folder" / "summary.jsonl")) == len(TARGETS)
    assert "not measured" in (tmp_path / "an out folder" / "summary.log").read_text()


@pytest.mark.slow
def test_a_part_that_fails_is_named_at_the_end(tmp_path):
    flags = ("--cpu-rehearsal", "--code", "none.txt")
    status, said, _ = run_script(tmp_path, *flags, PARTS="summary", PYTHON=quick_python(tmp_path))
    assert status == 1
    assert said.endswith("failed or out of time: summary\n")


@pytest.mark.slow
def test_the_script_refuses_what_it_cannot_do(tmp_path):
    assert "unknown flag --fast" in run_script(tmp_path, "--fast")[2]
    status, _, err = run_script(tmp_path, CUDA_VISIBLE_DEVICES="", PYTHON=quick_python(tmp_path))
    assert status == 2
    assert "torch finds no CUDA card" in err


def test_the_tests_that_the_script_runs_on_a_card_are_those_that_run_on_a_pretended_one():
    text = (REPO / "bench" / "h100.sh").read_text()
    named = set(re.search(r"^tests=\((.*?)\)", text, re.DOTALL | re.MULTILINE)[1].split())  # type: ignore[index]
    files = (REPO / "tests" / "cuda" / "kernels").glob("test_*.py")
    assert named == {file.stem for file in files if 'usefixtures("on_a_card")' in file.read_text()}


def test_the_scripts_parts_take_less_than_nine_minutes_together():
    text = (REPO / "bench" / "h100.sh").read_text()
    words = [line.split() for line in text.splitlines()]
    limits = {
        line[1]: int(line[2]) for line in words if len(line) > 2 and line[0] in ("part", "bench") and line[2].isdigit()
    }
    assert limits.keys() | {"others"} == {*PARTS, "float64", "sanitizer"}  # "others" run only if they are asked for
    assert list(limits)[-2:] == ["summary", "sanitizer"]  # the last gets what is left, and nothing waits for it
    assert sum(limits.values()) - limits["sanitizer"] <= 515  # installing wheels and importing torch take the rest
    assert limits["float64"] == 120
    assert "whole=${WHOLE:-525} last=25" in text  # what bounds a run with other engines


# ---- prompts in two chunks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", list(card_checks.CHUNKED))
def test_a_prompt_in_two_chunks_is_checked_and_a_mask_that_begins_at_the_first_key_fails(heads, dtype, monkeypatch):
    [line] = card_checks.check_chunks(heads, dtype, "cpu")
    assert line["holds"], line["found"]
    config = card_checks.narrow_shape_config(SHAPES[card_checks.CHUNKED[heads]])
    is_grouped = config["num_attention_heads"] > config["num_key_value_heads"]
    assert is_grouped == (heads == "grouped key heads")
    monkeypatch.setattr(decoder, "causal_mask", lambda length, end, _: decoder.torch.ones(length, end).tril().bool())
    [line] = card_checks.check_chunks(heads, dtype, "cpu")
    assert not line["holds"]
