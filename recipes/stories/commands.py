"""Runs the project's own commands for the recipes, and holds the settings and folders of a run."""

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

RunModule = Callable[[str, Sequence[str], Path], int]  # type of `run_in_own_process`
Word = str | Path | int | float  # of a command line
LAST_FILES = {"prepare": "index.json", "train": "model/config.json"}  # what a command writes last in its folder --out
STOPPED_STATUSES = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # exit statuses of a command that was asked to stop


def run_in_own_process(module: str, arguments: Sequence[str], folder: Path, trainers: int = 1) -> int:
    """Runs `python -m MODULE ARGUMENTS` in a folder and returns its exit status.

    trainers: number of processes that run `mlx_zip train` together and share each batch over MLX's ring on this
    machine. Other commands run in one process. Of several exit statuses, returns the first that is not 0. Ctrl-C
    reaches the processes from the terminal, and SIGTERM is passed on to them; a training run then saves its last step.
    """
    command = [sys.executable, "-m", *module.split(), *arguments]
    count = trainers if [module, *arguments[:1]] == ["mlx_zip", "train"] else 1
    with contextlib.ExitStack() as stack:
        places = [{}] if count == 1 else stack.enter_context(make_ring(count))
        children = [
            stack.enter_context(subprocess.Popen(command, cwd=folder, env={**os.environ, **place})) for place in places
        ]
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: [one.terminate() for one in children]}
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        return next(filter(None, [child.wait() for child in children]), 0)


def run_command(call: RunModule, module: str, words: Sequence[Word], folder: Path) -> None:
    """Runs `python -m MODULE WORDS` in a folder with `call`.

    Raises `TrainingError` if the command fails, and `KeyboardInterrupt` if a signal stopped the command.
    """
    arguments = [str(word) for word in words]
    status = call(module, arguments, folder)
    if status in STOPPED_STATUSES:
        raise KeyboardInterrupt
    if status:
        shown = shlex.join([module, *arguments])
        raise TrainingError(f"exit status {status} of: {shown}; start the recipe again to go on from there")


@contextlib.contextmanager
def make_ring(count: int) -> Iterator[list[dict[str, str]]]:
    """Context manager: yields environment variables for `count` processes that form MLX's ring on free local ports."""
    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
        stack.close()  # frees the ports for the processes
        json.dump(hosts, file)
        file.flush()
        yield [{"MLX_RANK": str(rank), "MLX_HOSTFILE": file.name} for rank in range(count)]


def print_to_stderr(line: str) -> None:
    """Prints a line to stderr at once, before the output of the next command."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Recipe:
    """Settings and folders of a recipe; runs commands.

    data: folder of the stories. out: folder of all results. check: refuse files whose checksums differ from the
    recorded checksums. call: runs a Python module with arguments in a folder and returns the exit status. say: shows a
    line of progress. engine: `--engine` of `mlx_zip train`, except for draft heads, which only MLX trains.
    """

    settings: Settings
    data: Path
    out: Path
    check: bool = True
    call: RunModule = run_in_own_process
    say: Callable[[str], None] = print_to_stderr
    engine: str = "mlx"

    def run_mlx_zip(self, name: str, flags: Mapping[str, Any]) -> None:
        """Runs the command `mlx_zip NAME FLAGS` and shows the command line, unless the command's result exists.

        flags: values by name, see `as_words`; `out` is the result. Raises `TrainingError` if the command fails.
        """
        if "out" in flags and (self.out / flags["out"] / LAST_FILES.get(name, "")).exists():
            return
        if name == "train" and self.engine != "mlx" and "draft_head" not in flags:
            flags = {**flags, "engine": self.engine}
        self.run_module("mlx_zip", [*name.split(), *as_words(flags)])

    def run_module(self, module: str, arguments: Sequence[str]) -> None:
        """Runs `python -m MODULE ARGUMENTS` in the folder `out`, to which paths in the arguments are relative.

        Raises `TrainingError` if the command fails, and `KeyboardInterrupt` if a signal stopped the command.
        """
        self.say("$ " + shlex.join([module.replace(" ", "."), *arguments]))
        run_command(self.call, module, arguments, self.out)


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Returns flags as words of a command line, for example {"val_batches": 4} as --val-batches 4.

    A list gives several words, True gives a flag without a value, and flags that are None or False are left out.
    """
    out: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        out.append("--" + name.replace("_", "-"))
        if value is not True:
            out += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return out
