"""Runs `mlx_zip` in this process, for tests of commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_zip import cli

WITHOUT_TORCH = (
    "import sys\nsys.modules['torch'] = None\n"  # transformers imports PyTorch if it can, which takes seconds
)


def without_torch(module: str, *flags: str) -> list[str]:
    """Returns the words that start `python FLAGS -m MODULE` as on a machine without PyTorch."""
    run = f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, *flags, "-c", WITHOUT_TORCH + run]


def runner(capsys: Any, *first: str) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs `mlx_zip FIRST WORDS...` and returns (status, stdout, stderr)."""

    def command(*words: Any) -> tuple[int, str, str]:
        return (cli.main([*first, *map(str, words)]), *capsys.readouterr())

    return command


def outcome(capsys: Any, *first: str) -> Callable[..., tuple[int, str, str]]:
    """Like `runner`, but an error of the parser is a status too, not an exit."""

    def command(*words: Any) -> tuple[int, str, str]:
        try:
            status = cli.main([*first, *map(str, words)])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        return (status, *capsys.readouterr())

    return command


def shown(out: str) -> dict[str, str]:
    """Returns the figures that a command printed, one per line, by name."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if re.match(r"\S.*?  +\S", line))


def stay_home(monkeypatch: Any, folder: Path) -> None:
    """Moves the hub cache into `folder` and cuts off the network."""
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its variable was read at import
