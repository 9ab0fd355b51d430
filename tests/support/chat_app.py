"""The chat app on a real socket, with an engine that replays an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.running import make_chat_app, with_open_page
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.engine import Engine
from mlx_zip.engine.engines import Engines, OtherModel
from mlx_zip.server.options import Options
from mlx_zip.server.running import Server, bind_socket
from support.fake_engine import FakeEngine
from support.http_server import WAIT_S, Answer, Served, events, until

KEY = "a-key"
API = "/app/api/"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CONVERSATIONS = "conversations"


class Chat(Served):
    """The app that runs in a thread, and a plain way to talk to it."""

    store: Store

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Sends a request with the key."""
        return self.ask(method, API + path, body, {**AUTHORIZED, **(headers or {})})

    def create(self, **fields: Any) -> dict[str, Any]:
        return self.call("POST", CONVERSATIONS, fields).json

    def show(self, one: str) -> dict[str, Any]:
        return self.call("GET", f"{CONVERSATIONS}/{one}").json

    def answer(self, one: str, **body: Any) -> list[dict[str, Any]]:
        """Asks for an answer and returns its frames."""
        answer = self.call("POST", f"{CONVERSATIONS}/{one}/answer", body)
        assert answer.status == 200, answer.body
        return events(answer.body)

    def said(self, one: str, text: str, parent: str | None = None) -> dict[str, Any]:
        """Sends a message and returns the whole answer."""
        last = self.answer(one, parent=parent, text=text)[-1]
        assert last["type"] == "done", last
        return last["message"]


@contextmanager
def chatting(
    engine: Engine | None = None,
    file: Path | None = None,
    others: Sequence[OtherModel] = (),
    open_model: Any = None,
    system: str = "",
    **options: Any,
) -> Iterator[Chat]:
    """Serves the app with an engine on a free port. file: of the conversations, None for memory.

    system: system prompt of new conversations.
    """
    engine, store = engine or FakeEngine(), Store(file)
    models = Models(Engines(engine, others), with_open_page(Options(api_key=KEY, **options)), open_model)
    listener = bind_socket("127.0.0.1", 0)
    server = Server(models.main, app=make_chat_app(store, models, Settings(system=system)))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started)
        chat = Chat(listener.getsockname()[1], models.main, server)
        chat.store = store
        yield chat
    finally:
        engine.close()
        models.close()
        server.should_exit = True
        thread.join(WAIT_S)
        store.close()
        assert not thread.is_alive()
