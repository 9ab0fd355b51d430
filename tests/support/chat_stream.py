"""A process that writes a long answer into a database of conversations until it is killed: `python FILE DB`.

Prints the conversation's id when the first words are there.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.modules["torch"] = None  # type: ignore[assignment]  # which transformers would import for seconds

from support.chat_app import chatting
from support.fake_engine import FakeEngine, Script
from support.http_server import until

if __name__ == "__main__":
    engine = FakeEngine(Script(text="Once upon a time there was a boat. " * 200, delay_s=0.02))
    with chatting(engine, Path(sys.argv[1])) as chat:
        one = chat.create(title="A boat")["id"]
        threading.Thread(target=lambda: chat.answer(one, text="Tell me a story."), daemon=True).start()
        until(lambda: "boat" in (chat.show(one)["messages"] or [{}])[-1].get("text", ""))
        print(one, flush=True)
        threading.Event().wait(60)
