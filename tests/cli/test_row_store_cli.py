"""`--row-cache` of generate and evaluate, and `mlx_zip rows`."""

import json
import stat

import pytest

from mlx_zip import cli
from mlx_zip.models.rows.row_folder import RowFolder, list_row_files, sum_disk_usage
from support import tiny_text

pytestmark = pytest.mark.usefixtures("home")

MODEL = "llama_transformer_tied_lora"
PROMPT = "The cat sat on the mat. The cat sat on the mat."


@pytest.fixture
def generate(run):
    """Runs `mlx_zip generate --json` -> its record."""

    def command(*flags):
        status, out, err = run(
            "generate",
            "--model",
            tiny_text.converted(MODEL),
            "--prompt",
            PROMPT,
            "--ignore-chat-template",
            "--max-tokens",
            20,
            "--json",
            *flags,
        )
        assert (status, err) == (0, "")
        return json.loads(out)

    return command


def test_the_second_run_of_a_prompt_encodes_nothing_and_prints_equal_text(generate, tmp_path):
    folder = tmp_path / "rows"
    first, second, plain = generate("--row-cache", folder), generate("--row-cache", folder), generate()
    assert first["text"] == second["text"] == plain["text"]
    assert first["rows_encoded"] == plain["rows_encoded"] == second["rows_from_disk"] > 0
    assert second["rows_encoded"] == first["rows_from_disk"] == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_stored_without_the_flag(generate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate()
    monkeypatch.setenv("MLX_ZIP_ROW_CACHE", str(tmp_path / "rows"))
    generate("--row-cache", "off")
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
    generate()
    assert len(list_row_files(tmp_path / "rows")) == 1


def test_a_folder_that_cannot_be_used_costs_one_warning_and_changes_no_text(run, tmp_path, caplog):
    (tmp_path / "rows").write_text("")
    status, out, _ = run(
        "generate",
        "--model",
        tiny_text.converted(MODEL),
        "--prompt",
        PROMPT,
        "--ignore-chat-template",
        "--verbose",
        "False",
        "--row-cache",
        tmp_path / "rows",
    )
    assert status == 0
    assert out
    assert len([record for record in caplog.records if record.name == "mlx_zip"]) == 1


@pytest.mark.parametrize("size", ["0", "-1", "1T", "x", ""])
def test_a_row_cache_size_that_is_no_size_is_refused(size, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--row-cache", str(tmp_path / "rows"), f"--row-cache-bytes={size}"])


def test_the_folder_stays_within_row_cache_bytes(generate, tmp_path):
    folder = tmp_path / "rows"
    assert generate("--row-cache", folder, "--row-cache-bytes", "300K")["rows_encoded"] > 0
    assert 0 < sum(path.stat().st_size for path in list_row_files(folder)) <= 300_000


def test_evaluate_reads_and_fills_the_folder_too(run, tmp_path, monkeypatch):
    text, folder = tmp_path / "text.txt", tmp_path / "rows"
    text.write_text(PROMPT)
    flags = ("evaluate", "--model", tiny_text.converted(MODEL), "--data", text, "--row-cache", folder)
    assert run(*flags)[0] == 0
    size = sum_disk_usage(list_row_files(folder))
    assert size > 0
    found = []
    find = RowFolder.find_rows
    monkeypatch.setattr(RowFolder, "find_rows", lambda *args: found.append(find(*args)) or found[-1])
    assert run(*flags)[0] == 0
    assert all(there.all() for there, _ in found)
    assert found
    assert sum_disk_usage(list_row_files(folder)) == size  # nothing was encoded anew


def test_rows_shows_and_purges_a_folder(run, generate, tmp_path, monkeypatch):
    folder = tmp_path / "rows"
    generate("--row-cache", folder)
    size = sum_disk_usage(list_row_files(folder))
    assert run("rows", "show", folder) == (0, f"1 file, {size} bytes\n", "")
    monkeypatch.setenv("MLX_ZIP_ROW_CACHE", str(folder))
    assert run("rows", "purge") == (0, f"removed: 1 file, {size} bytes\n", "")
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [("purge",), ("show", "nowhere"), ("purge", "off")])
def test_rows_without_a_folder_is_an_error(arguments, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("rows", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
