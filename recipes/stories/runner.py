"""What every stage of the recipe is given: settings, folders, and a way to run the project's own commands."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError

from .settings import Settings

STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # exit statuses of a command that was asked to stop


def in_process_of_its_own(module: str, arguments: Sequence[str], folder: Path, trainers: int = 1) -> int:
    """Runs `python -m MODULE ARGUMENTS` in a folder and returns its exit status.

    trainers: number of processes of `mlx_zip train`, which share its batches over MLX's ring on this machine; then the
    first exit status that is not 0 is returned. Ctrl-C reaches the processes from the terminal, and SIGTERM is passed
    on to them; a training run saves its last step before it ends.
    """
    command = [sys.executable, "-m", *module.split(), *arguments]
    count = trainers if [module, *arguments[:1]] == ["mlx_zip", "train"] else 1
    with contextlib.ExitStack() as stack:
        places = [{}] if count == 1 else stack.enter_context(ring(count))
        children = [
            stack.enter_context(subprocess.Popen(command, cwd=folder, env={**os.environ, **place})) for place in places
        ]
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: [one.terminate() for one in children]}
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        return next(filter(None, [child.wait() for child in children]), 0)


@contextlib.contextmanager
def ring(count: int) -> Iterator[list[dict[str, str]]]:
    """Yields the environment variables of `count` processes that form MLX's ring on free ports of this machine."""
    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
        stack.close()  # free again for the processes
        json.dump(hosts, file)
        file.flush()
        yield [{"MLX_RANK": str(rank), "MLX_HOSTFILE": file.name} for rank in range(count)]


def on_stderr(line: str) -> None:
    """Prints a line to stderr at once, so that it stands before the output of the command that follows."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Recipe:
    """Settings and folders of a recipe, and how its commands are run.

    data: the folder of the stories. out: the folder of all results. check: refuse other files than the recorded ones.
    call: runs a module of this Python with arguments in a folder and returns its exit status. say: shows a line.
    """

    settings: Settings
    data: Path
    out: Path
    check: bool = True
    call: Callable[[str, Sequence[str], Path], int] = in_process_of_its_own
    say: Callable[[str], None] = on_stderr

    def command(self, name: str, flags: Mapping[str, Any]) -> None:
        """Runs `mlx_zip name --flags`, shown as a user would type it. Raises `TrainingError` when it fails."""
        self.execute("mlx_zip", [*name.split(), *as_words(flags)])

    def execute(self, module: str, arguments: Sequence[str]) -> None:
        """Runs an installed module of this Python in `out`, so that paths are short and the same everywhere."""
        self.say("$ " + shlex.join([module.replace(" ", "."), *arguments]))
        status = self.call(module, arguments, self.out)
        if status in STOPPED:
            raise KeyboardInterrupt
        if status:
            shown = shlex.join([module, *arguments[:1]])
            raise TrainingError(f"{shown} ended with status {status}; run the same again to go on from its last step")


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line: names with dashes; lists as several words; True as a bare flag."""
    out: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        out.append("--" + name.replace("_", "-"))
        if value is not True:
            out += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return out
