"""The output of a conversion: there whole or not at all, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_zip import files
from mlx_zip.converters import output
from mlx_zip.errors import MlxZipError
from support.checkpoints import WIDTH, write_adapter, write_checkpoint
from support.command_line import WITHOUT_TORCH
from support.converting import convert, loaded
from support.refusing import assert_refused


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_an_existing_output_is_refused_and_untouched(make: Callable[[Path], None], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    make(tmp_path / "out")
    assert_refused(tmp_path, "already exists")


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src")
    monkeypatch.setattr(files, "flush_folder_to_disk", lambda _: (tmp_path / "out").mkdir())
    with pytest.raises(MlxZipError, match="already exists"):
        convert(tmp_path / "src", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["", "a/b/c", "what is this"])
def test_a_repository_name_that_cannot_be_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    with pytest.raises(MlxZipError, match="--upload-repo"):
        convert(tmp_path / "src", tmp_path / "out", upload_repo=name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb"], ids=["zero byte", "not UTF-8"])
def test_an_output_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "src")
    with pytest.raises(MlxZipError, match="is not a file name"):
        convert(tmp_path / "src", tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["src"]


def fail_at(call: int, error: BaseException) -> Callable[[Any], memoryview]:
    """`host_bytes` that raises at its n-th call."""
    real, calls = output.host_bytes, iter(range(1, 1000))

    def host_bytes(array: Any) -> memoryview:
        if next(calls) == call:
            raise error
        return real(array)

    return host_bytes


@pytest.mark.parametrize("options", [{}, {"lora_only": True}], ids=["model", "adapter"])
def test_a_full_disk_leaves_nothing_behind(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "src")
    write_adapter(tmp_path / "src", {"model.layers.0.self_attn.q_proj": (WIDTH, WIDTH, 2)})
    monkeypatch.setattr(output, "host_bytes", fail_at(2, OSError(errno.ENOSPC, "No space left on device")))
    assert_refused(tmp_path, "No space left on device", **options)


def test_parents_made_for_an_output_that_failed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src")
    monkeypatch.setattr(output, "host_bytes", fail_at(2, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(MlxZipError, match="No space left"):
        convert(tmp_path / "src", tmp_path / "a" / "b" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src")
    monkeypatch.setattr(output, "host_bytes", fail_at(5, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "src", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_output_and_does_not_block_the_next(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    code = (
        WITHOUT_TORCH + "import os, signal, sys\nfrom mlx_zip.converters import convert, output\n"
        "real, calls = output.host_bytes, []\n"
        "def host_bytes(array):\n    calls.append(1)\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 9 else real(array)\n"
        "output.host_bytes = host_bytes\nconvert(sys.argv[1], sys.argv[2])"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "src"), str(tmp_path / "out")]
    assert subprocess.run(arguments, capture_output=True).returncode == -signal.SIGKILL
    left = sorted(path.name.partition("partial-")[0] for path in tmp_path.iterdir())
    assert left == [".out.", "src"]
    loaded(convert(tmp_path / "src", tmp_path / "out"))


def test_an_output_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src")
    (tmp_path / "file").touch()
    with pytest.raises(MlxZipError, match="cannot write"):
        convert(tmp_path / "src", tmp_path / "file" / "out")
