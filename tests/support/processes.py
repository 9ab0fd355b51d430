"""Commands in processes of their own, forked from one that has imported what they need and computed nothing."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "mlx_lm.models.llama",
        "mlx_lm.tokenizer_utils",
        "transformers.models.auto.tokenization_auto",
        "mlx_zip.cli.training",
        "mlx_zip.text.tokenizers",
        "mlx_zip.training.run",
        "transformers.generation.utils",  # which loading a tokenizer imports where PyTorch is installed
        "matplotlib.backends.backend_agg",
        "mlx_zip.cli.chat.terminal",
        "support.fake_engine",
    ]
)


def _run(argv: Sequence[str], out: str, said: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # it is that of whoever started the first process
    os.environ.update(environment)
    for stream, path in ((1, out), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    from mlx_zip.cli import main

    sys.exit(main(list(argv)))


class Command:
    """`mlx_zip ARGV` in a process. said, out: files that its standard error and its standard output go to."""

    def __init__(
        self, argv: Sequence[str], said: Path, environment: Mapping[str, str] | None = None, out: Path | None = None
    ) -> None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would not live through a fork
        self._said = said
        self._process = CONTEXT.Process(
            target=_run, args=(list(argv), str(out or os.devnull), str(said), {**os.environ, **(environment or {})})
        )
        self._process.start()

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, limit_s: float) -> tuple[int, str]:
        """(exit status, standard error); a process that takes longer is killed."""
        self._process.join(max(0.1, limit_s))
        if not self.ended:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode, self._said.read_text()


def wait_all(commands: Sequence[Command], limit_s: float) -> list[tuple[int, str]]:
    """What `Command.wait` gives of each, all within one limit."""
    deadline = time.monotonic() + limit_s
    return [command.wait(deadline - time.monotonic()) for command in commands]
