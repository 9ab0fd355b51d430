"""Reads prompts from a file or from the beginnings of documents; makes conversations to measure generation on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, failure_reason
from mlx_zip.text.documents import Document
from mlx_zip.text.prompts import Messages, encode_prompt
from mlx_zip.text.sources import Source, SourceReader, source_kind
from mlx_zip.text.token_facts import encode_with_bytes

Prompt = str | Messages  # one request to a model: text to be continued, or chat messages to be answered


def read_prompts(file: str | Path) -> list[Prompt]:
    """Reads prompts from a .jsonl or .jsonl.gz file of objects with `messages` (role and content) or `prompt` (text).

    Raises `DataError`, naming the file and line, if a line is invalid or there are no prompts.
    """
    if source_kind(str(file)) != "json":
        raise DataError(f"{file}: prompts are read from a .jsonl file")
    prompts = [_parse_prompt_line(item.where, item.raw) for item in SourceReader(Source((str(file),)))]
    if not prompts:
        raise DataError(f"{file}: no prompts")
    return prompts


def _parse_prompt_line(where: str, line: bytes) -> Prompt:
    """Returns the prompt in one line of a file. where: file and line, for the `DataError` if the line is invalid."""
    try:
        record = loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {failure_reason(error)}") from error
    content = record.get("messages", record.get("prompt")) if isinstance(record, Mapping) else None
    if not content or not (isinstance(content, str) or _are_text_messages(content)):
        raise DataError(f"{where}: neither text under prompt nor chat messages under messages")
    return content


def _are_text_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def document_openings(tokenizer: Any, documents: Sequence[Document], base_ids: int) -> list[Prompt]:
    """Returns the text of the first `base_ids` base ids of each document. Leaves out documents that give no text.

    Raises `DataError` if `base_ids` is below 1.
    """
    if base_ids < 1:
        raise DataError(f"openings (--opening) must be at least 1 base id long, got {base_ids}")
    texts = [_text_of_first_ids(tokenizer, document.text, base_ids) for document in documents]
    return [text for text in texts if text]


def _text_of_first_ids(tokenizer: Any, text: str, base_ids: int) -> str:
    n_bytes = encode_with_bytes(tokenizer, text)[1][:base_ids].sum()
    return text.encode("utf-8")[:n_bytes].decode("utf-8", "ignore")


def make_conversations(prompts: Sequence[Prompt], count: int, turns: int, repeat: bool) -> list[list[Prompt]]:
    """Returns `count` conversations of `turns` prompts each.

    The last prompt of conversation i is `prompts[i]` for any value of `turns`. The turns before are the prompts
    i + turns - 1 down to i + 1. repeat: whether to use prompts again if there are fewer than `count`, for sampled text.
    Raises `DataError` if there are too few prompts, or if conversations of several turns would mix texts and chat
    messages.
    """
    n = len(prompts)
    if count < 1 or turns < 1:
        raise DataError(f"conversations (--generate) and turns (--turns) must be at least 1, got {count} and {turns}")
    if n == 0:
        raise DataError(
            "the first base ids of the documents hold no whole character: raise --opening, or give --prompts"
        )
    if count > n and not repeat:
        raise DataError(f"{count} continuations (--generate) of {n} prompts would repeat: greedy text never varies")
    if turns > n:
        raise DataError(f"{turns} turns (--turns) of {n} prompts would ask the same twice in one conversation")
    if turns > 1 and len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise DataError("a conversation (--turns) is of chat messages or of texts: the prompts are of both kinds")
    return [[prompts[(i + turns - 1 - turn) % n] for turn in range(turns)] for i in range(count)]


@dataclass
class Conversation:
    """One conversation as it grows. prompts: one per turn. turn: index of the next turn.

    For each turn call `next_prompt`, then `answer` with what the model wrote.
    """

    tokenizer: Any
    prompts: Sequence[Prompt]
    turn: int = 0
    _messages: list[Mapping[str, Any]] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        """Returns the base ids that the model reads before it writes this turn: earlier turns, then the new prompt.

        A chat is rendered as a whole by the template. A text is appended to the earlier texts after an eos.
        """
        prompt = self.prompts[self.turn]
        if not isinstance(prompt, str):
            self._messages += prompt
            return encode_prompt(self.tokenizer, self._messages)
        self._ids += encode_prompt(self.tokenizer, prompt, continues=self.turn > 0)
        return list(self._ids)

    def answer(self, text: str, base_ids: Sequence[int]) -> None:
        """Adds the model's answer to this turn. base_ids: base ids of `text`, and the eos if the model wrote one."""
        if not isinstance(self.prompts[self.turn], str):
            self._messages.append({"role": "assistant", "content": text})
        eos = self.tokenizer.eos_token_id
        self._ids += base_ids
        if eos is not None and (not base_ids or base_ids[-1] not in self.tokenizer.eos_token_ids):
            self._ids.append(eos)
        self.turn += 1
