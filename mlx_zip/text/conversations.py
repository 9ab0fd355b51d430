"""What generation is measured on: prompts from a file or the openings of documents, and conversations made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.text.documents import Document
from mlx_zip.text.prompts import encode_prompt
from mlx_zip.text.sources import Reader, Source, kind_of
from mlx_zip.text.token_facts import encode_with_bytes

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """text to be continued, or chat messages to be answered."""

    content: str | Messages

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return not isinstance(self.content, str)


def read_prompts(file: str | Path) -> list[Prompt]:
    """A .jsonl[.gz] file of objects with `messages` (role and content) or `prompt` (text). Raises `DataError`."""
    if kind_of(str(file)) != "json":
        raise DataError(f"{file}: prompts are read from a .jsonl file")
    prompts = [_prompt(item.where, item.raw) for item in Reader(Source((str(file),)))]
    if not prompts:
        raise DataError(f"{file}: no prompts")
    return prompts


def _prompt(where: str, line: bytes) -> Prompt:
    try:
        record = loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    content = record.get("messages", record.get("prompt")) if isinstance(record, Mapping) else None
    if not content or not (isinstance(content, str) or _are_messages(content)):
        raise DataError(f"{where}: neither text under prompt nor chat messages under messages")
    return Prompt(content)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def openings(tokenizer: Any, documents: Sequence[Document], base_ids: int) -> list[Prompt]:
    """The first `base_ids` base ids of each document, as text."""
    if base_ids < 1:
        raise DataError(f"openings (--opening) must be at least 1 base id long, got {base_ids}")
    texts = [_opening(tokenizer, document.text, base_ids) for document in documents]
    return [Prompt(text) for text in texts if text]


def _opening(tokenizer: Any, text: str, base_ids: int) -> str:
    n_bytes = encode_with_bytes(tokenizer, text)[1][:base_ids].sum()
    return text.encode("utf-8")[:n_bytes].decode("utf-8", "ignore")


def make_conversations(prompts: Sequence[Prompt], count: int, turns: int, repeat: bool) -> list[list[Prompt]]:
    """`count` conversations of `turns` prompts. The last prompts are those of the file in order, whatever `turns` is.

    The earlier turns of conversation i are the prompts that follow i in the file, the nearest last. repeat: whether
    more conversations than prompts make sense (sampling). Raises `DataError` when there are too few prompts, or
    prompts of both kinds for one conversation.
    """
    n = len(prompts)
    if count < 1 or turns < 1:
        raise DataError(f"conversations (--generate) and turns (--turns) must be at least 1, got {count} and {turns}")
    if count > n and not repeat:
        raise DataError(f"{count} continuations (--generate) of {n} prompts would repeat: greedy text never varies")
    if turns > n:
        raise DataError(f"{turns} turns (--turns) of {n} prompts would ask the same twice in one conversation")
    if turns > 1 and len({prompt.is_chat for prompt in prompts}) > 1:
        raise DataError("a conversation (--turns) is of chat messages or of texts: the prompts are of both kinds")
    return [[prompts[(i + turns - 1 - turn) % n] for turn in range(turns)] for i in range(count)]


@dataclass
class Conversation:
    """One conversation as it grows: what the next turn's prompt is, in base ids."""

    tokenizer: Any
    prompts: Sequence[Prompt]
    turn: int = 0
    _messages: Messages = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        """Base ids of all that the model reads before it writes this turn: earlier turns, then the new prompt.

        Chats are rendered anew by the template, as a server does; texts follow their predecessors behind an eos.
        """
        prompt = self.prompts[self.turn]
        if prompt.is_chat:
            assert not isinstance(prompt.content, str)
            self._messages += prompt.content
            return encode_prompt(self.tokenizer, self._messages)
        self._ids += encode_prompt(self.tokenizer, prompt.content, continues=self.turn > 0)
        return list(self._ids)

    def answer(self, text: str, base_ids: Sequence[int]) -> None:
        """Takes what the model wrote: text and the base ids that count, an eos at the end included."""
        if self.prompts[self.turn].is_chat:
            self._messages.append({"role": "assistant", "content": text})
        eos = self.tokenizer.eos_token_id
        self._ids += base_ids
        if eos is not None and (not base_ids or base_ids[-1] not in self.tokenizer.eos_token_ids):
            self._ids.append(eos)
        self.turn += 1
