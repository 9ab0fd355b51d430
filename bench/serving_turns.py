"""How much of a long chat's prompt the server takes from its sessions, also after a restart and after a kill."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .dialects import DIALECTS, Dialect
from .http_client import Reply, ask
from .served import Served, ours

STORY = "Once upon a time there was a {} who wanted to find {}. "  # long prompts are made of it
THINGS = ("the sea", "a red kite", "the old bridge", "some honey", "a quiet place", "the moon", "a green door", "home")
WORDS, TOKENS = 1500, 48  # words of the first message, about 2,000 base tokens; base tokens of each answer
MOMENTS = (  # and the signal that ends the server afterwards
    ("second turn", signal.SIGTERM),
    ("after a restart", signal.SIGKILL),
    ("after kill -9", signal.SIGTERM),
)


def turns(model: str) -> dict[str, dict[str, float]]:
    """Returns, for each moment and dialect, the share of the prompt's base tokens that was cached.

    The moments: the second turn of a chat, the third after the server was ended and started again, and the fourth after
    it was killed by SIGKILL and started again.
    """
    found: dict[str, dict[str, float]] = {}
    chats = [_Chat(dialect, number) for number, dialect in enumerate(DIALECTS)]
    with TemporaryDirectory() as folder:
        for moment, by in MOMENTS:
            with Served(ours(model, Path(folder) / "sessions")) as server:
                if moment == "second turn":
                    for chat in chats:
                        asyncio.run(chat.ask(server.port))
                found[moment] = {chat.dialect.name: asyncio.run(chat.ask(server.port)) for chat in chats}
                server.end(by)
    return found


class _Chat:
    """A conversation in one dialect that begins with a long message."""

    def __init__(self, dialect: Dialect, number: int) -> None:
        self.dialect = dialect
        self.messages: list[dict[str, str]] = [{"role": "user", "content": long_prompt(WORDS, 1000 + number)}]

    async def ask(self, port: int) -> float:
        """Asks for the next answer, adds it and a further request, and returns the prompt's cached share."""
        name = (await ask(port, "/v1/models")).body["data"][0]["id"]
        body: dict[str, Any] = self.dialect.body(self.messages, TOKENS, True) | {"model": name}
        reply: Reply = await ask(port, self.dialect.path, body)
        prompt, cached, _ = self.dialect.usage(reply)
        self.messages.append({"role": "assistant", "content": self.dialect.text(reply)})
        self.messages.append({"role": "user", "content": "Tell me more."})
        return cached / prompt


def long_prompt(words: int, number: int) -> str:
    """Returns a made-up text of so many words; texts of different numbers differ from the beginning on."""
    begin = f"Here are {number + 100} stories. "
    names = ("dog", "cat", "girl", "boy", "bird", "bear", "fox", "frog")
    pieces = (STORY.format(names[(i + number) % 8], THINGS[(i // 8 + i * number) % 8]) for i in range(words))
    return " ".join((begin + "".join(pieces)).split()[:words])
