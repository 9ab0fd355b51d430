"""`mlx_zip chat` in a process of its own, with an engine that replays an answer: python chat_child.py SCRIPT FLAGS...

SCRIPT: JSON of the fields of `Script`, or "stories" for the bundled model. `ForkedChat` starts one without Python.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def main(script: str, *flags: str) -> int:
    if sys.stdin is not None and sys.stdin.isatty():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal for this process
    from mlx_zip import cli

    if script != "stories":
        import mlx_zip.cli.serving.opening as opening
        from support.fake_engine import FakeEngine, Script

        engine = FakeEngine(Script(**json.loads(script)))
        opening.open_chosen_engine = lambda args, *given: engine
    return cli.main(["chat", *flags])


class ForkedChat:
    """A chat in a terminal, forked from a process that has imported what it needs; what `Popen` has, as far as asked.

    words: SCRIPT and FLAGS. slave: the terminal.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], slave: int) -> None:
        from support.processes import CONTEXT

        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would not live through a fork
        self._process = CONTEXT.Process(target=_enter, args=(os.ttyname(slave), dict(environment), list(words)))
        self._process.start()
        self.terminate, self.kill, self.wait = self._process.terminate, self._process.kill, self._process.join

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _enter(terminal: str, environment: Mapping[str, str], words: Sequence[str]) -> None:
    """Makes this process one that was started in a terminal, and runs the chat."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)
    for stream in range(3):
        os.dup2(opened, stream)
    os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1, encoding="utf-8", errors="surrogateescape", closefd=False)
        for number, mode in enumerate("rww")
    )
    os.environ.update(environment)
    sys.exit(main(*words))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers imports it if it can, which takes seconds
    sys.exit(main(*sys.argv[1:]))
