"""A conversation: its messages, the prompt made of them, its .jsonl file, and the hypertokens of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mlx_zip.errors import DataError, errors_as
from mlx_zip.files import atomic_file, check_writable, expand_home
from mlx_zip.progress import pluralize
from mlx_zip.text.prompts import Chat, encode_prompt
from mlx_zip.text.sources import Skipped, Source, SourceReader, parse_item, source_kind
from mlx_zip.text.token_facts import TokenTexts

_SUFFIX = ".jsonl"
_ROLES = ("user", "assistant")
_MOST_LISTED = 20
_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})  # what is shown for blanks and line ends


@dataclass
class Conversation:
    """A conversation. system: the system message. messages: user and assistant messages, alternating.

    asked: the user's last message. answered: whether `asked` has an answer; if not, `asked` is not in `messages`.
    saved: files that hold this conversation. uses: per answer, the uses of hypertokens in order; answers loaded from a
    file are left out.
    """

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    asked: str | None = None
    answered: bool = False
    saved: set[Path] = field(default_factory=set)
    uses: list[Sequence[HypertokenUse]] = field(default_factory=list)

    def prompt_ids(self, engine: Any, text: str, options: Mapping[str, Any]) -> list[int]:
        """Returns the base ids of a prompt: the conversation, then the user message `text`.

        An answer that the engine generated keeps the base ids that were emitted, so that the prompt can continue a kept
        session. options: further arguments of the chat template. Raises `GenerationError` if the chat template fails.
        """
        chat = Chat([*self.messages, {"role": "user", "content": text}], self.system, options=options)
        return encode_prompt(engine.tokenizer, chat, answers=engine.answers())

    def set_question(self, question: str) -> None:
        """Sets the user's next message; `add_answer` then adds `question` and its answer to the messages."""
        self.asked, self.answered = question, False

    def add_answer(self, answer: str, uses: Sequence[HypertokenUse] = ()) -> None:
        """Adds the user's last message and its answer. uses: uses of hypertokens in the answer, in order."""
        assert self.asked is not None
        question, self.answered = self.asked, True
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.uses.append(uses)

    def without_last_answer(self) -> Conversation:
        """Returns the conversation as it was before the last answer: `asked` is set, but not in `messages`."""
        if not self.answered:
            return self
        return replace(self, messages=self.messages[:-2], uses=self.uses[:-1], answered=False)

    def save(self, name: str) -> Path:
        """Writes the conversation to a .jsonl file atomically, and returns the file's path.

        The file has one line, {"messages": [...]}, as in training data. Raises `DataError` if the file cannot be
        written, or exists and was not saved or loaded by this conversation.
        """
        path = _conversation_path(name)
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        line = json.dumps({"messages": [*before, *self.messages]}, ensure_ascii=False)
        with errors_as(DataError, str(path), OSError):
            if path.exists() and path.resolve() not in self.saved:
                raise DataError(f"{path}: is there already; give another name, or remove it first")
            check_writable(path)
            with atomic_file(path) as partial:
                partial.write_text(line + "\n", encoding="utf-8")
        self.saved.add(path.resolve())
        return path

    @classmethod
    def load(cls, name: str) -> Conversation:
        """Returns the conversation in a .jsonl file. Raises `DataError` unless it holds one valid conversation."""
        path = _conversation_path(name)
        with errors_as(DataError, str(path), OSError):
            if source_kind(str(path)) != "json":
                raise DataError(f"{path}: a conversation is read from a {_SUFFIX} file")
            items = list(islice(iter(SourceReader(Source((str(path),)))), 2))
        if len(items) != 1:
            raise DataError(f"{path}: holds {'no' if not items else 'more than one'} conversation")
        record = parse_item(items[0])
        if isinstance(record, Skipped):
            raise DataError(f"{record.where}: {record.reason}")
        if record.messages is None:
            raise DataError(f"{record.where}: holds no messages")
        return cls._from_messages(record.messages, record.where, path)

    @classmethod
    def _from_messages(cls, messages: tuple[Mapping[str, Any], ...], where: str, path: Path) -> Conversation:
        """Returns the conversation of `messages`. where: file and line, for errors. Raises `DataError`."""
        texts = [{"role": message["role"], "content": message.get("content") or ""} for message in messages]
        system = texts.pop(0)["content"] if texts and texts[0]["role"] == "system" else None
        for k, message in enumerate(texts):
            if message["role"] != _ROLES[k % 2]:
                raise DataError(f"{where}: message {k} is by {message['role']!r:.40}, not by {_ROLES[k % 2]!r}")
        left = texts.pop()["content"] if len(texts) % 2 else None
        asked = left if left is not None or not texts else texts[-2]["content"]
        return cls(system, texts, asked, left is None, {path.resolve()})


def _conversation_path(name: str) -> Path:
    """Returns the path of a conversation's file; adds .jsonl to a name without suffix. Raises `DataError`."""
    path = expand_home(name)
    if path.name in ("", "..") or "\0" in name:
        raise DataError(f"{path}: is no name of a file")
    if path.suffix == "":
        path = path.with_name(path.name + _SUFFIX)
    if path.suffix != _SUFFIX:
        raise DataError(f"{path}: a conversation is a {_SUFFIX} file")
    return path


class HypertokenUse(NamedTuple):
    """One use of a hypertoken. base_ids: its entry. origin: where the entry is from: "pack", "prompt" or "answer"."""

    base_ids: tuple[int, ...]
    origin: str


def hypertoken_use_lines(uses: Sequence[HypertokenUse], tokenizer: Any) -> Iterator[str]:
    """Yields a heading, then one line per hypertoken, the most used first: number of uses, where learned, parts.

    uses: uses of hypertokens in all answers, in order. Hypertokens with equally many uses are sorted by length, the
    longest first, then by first use. "Where learned" is that of the last use. At most `_MOST_LISTED` are listed.
    """
    found = _count_uses(uses)
    if not found:
        yield "no hypertokens yet; answers from a loaded file are not counted"
        return
    most = sorted(found, key=lambda base_ids: (-found[base_ids][0], -len(base_ids)))[:_MOST_LISTED]
    total = pluralize(len(found), "hypertoken")
    yield f"the {len(most)} most used of {total} in this conversation: uses, where learned, parts"
    texts = TokenTexts(tokenizer)
    for base_ids in most:
        count, learned = found[base_ids]
        parts = " | ".join(texts[(one,)][0].translate(_VISIBLE) for one in base_ids)
        yield f"{count:>7,}x  {learned:6}  {parts}"


def _count_uses(uses: Iterable[HypertokenUse]) -> dict[tuple[int, ...], tuple[int, str]]:
    """Returns entry -> (number of uses, origin of the last use), in the order of the first uses."""
    found: dict[tuple[int, ...], tuple[int, str]] = {}
    for base_ids, learned in uses:
        found[base_ids] = found.get(base_ids, (0, ""))[0] + 1, learned
    return found
