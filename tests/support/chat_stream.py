"""The chat app in a process of its own, which writes a long answer into a database until it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.chat_app import chatting
from support.command_line import WITHOUT_TORCH
from support.fake_engine import FakeEngine, Script
from support.http_server import until
from support.places import REPO

_CODE = WITHOUT_TORCH + "from support.chat_stream import write\nwrite(sys.argv[1])\n"


def write(file: str) -> None:
    """Begins a conversation, and prints its id when the first words of the answer are there."""
    engine = FakeEngine(Script(text="Once upon a time there was a boat. " * 200, delay_s=0.02))
    with chatting(engine, Path(file)) as chat:
        one = chat.create(title="A boat")["id"]
        threading.Thread(target=lambda: chat.answer(one, text="Tell me a story."), daemon=True).start()
        until(lambda: "boat" in (chat.show(one)["messages"] or [{}])[-1].get("text", ""))
        print(one, flush=True)
        threading.Event().wait(60)


@contextmanager
def writing(file: Path) -> Iterator[str]:
    """Gives the id of a conversation that the process is writing; the process is killed at the end (SIGKILL)."""
    environment = os.environ | {"PYTHONPATH": str(REPO / "tests")}
    words = [sys.executable, "-c", _CODE, str(file)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
