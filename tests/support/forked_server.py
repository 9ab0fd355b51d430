"""`mlx_zip serve` in a process of its own, which takes a third of the time of one that imports everything anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.http_server import until
from support.processes import Command

START_S = 240  # until a server is there, on a busy machine


@contextmanager
def forked_server(folder: Path, *flags: str) -> Iterator[tuple[Command, str]]:
    """Runs `mlx_zip serve FLAGS` on a free port, offline; gives the process and its address, and kills it at last.

    folder: for what it prints, `printed` and `said`.
    """
    printed, said = folder / "printed", folder / "said"
    printed.write_text("")  # a server before this one has printed its address
    settings = {"MLX_ZIP_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = Command(["serve", "--port", "0", *flags], said, settings, printed)
    try:
        assert until(lambda: process.ended or printed.read_text().endswith("\n"), START_S)
        line = printed.read_text()
        assert line.startswith("serving stories on "), said.read_text()
        yield process, line.split()[3].removesuffix("/v1")
    finally:
        if not process.ended:
            process.send_signal(signal.SIGKILL)
        process.wait(60)
