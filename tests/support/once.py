"""What is made once for all processes of a test run."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def once(factory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder that `make(folder)` has filled, by the first process that asks; the others wait for it.

    factory: pytest's `tmp_path_factory`. A process that fails leaves the folder to the next one to ask, emptied of its
    mark only: `make` must go on from, or write over, what is there.
    """
    of_run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_run = of_run.parent
    folder = of_run / name
    folder.mkdir(exist_ok=True)
    with open(of_run / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (mark := of_run / f"{name}.made").exists():
            make(folder)
            mark.touch()
    return folder
