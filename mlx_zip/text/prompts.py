"""Encodes prompts as base ids: text, chat messages (rendered by the tokenizer's template), or base ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_zip.errors import GenerationError, bare_exceptions_as_value_errors
from mlx_zip.text.tokenizers import thinking_marks

Messages = Sequence[Mapping[str, Any]]
Encode = Callable[[Any, str, bool], list[int]]  # the type of `encode_text`

_OURS = {"tokenizer", "messages", "conversation", "tokenize", "continue_final_message", "add_generation_prompt"}
_QUERY = "\ue000query\ue001"  # private-use characters, which no template looks for


@dataclass(frozen=True)
class Chat:
    """A conversation as a prompt, for the tokenizer's chat template.

    messages: mappings with the keys "role" and "content". system: a system message to put before `messages`. prefill:
    beginning of the answer, as part of the prompt. options: further arguments of the template. Raises `GenerationError`
    if a field has another type, or if `options` contains an argument that the prompt itself sets.
    """

    messages: Messages
    system: str | None = None
    prefill: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _are_chat_messages(self.messages):
            raise GenerationError("a conversation is a list of messages, each a map with the keys role and content")
        if not all(isinstance(text, str | None) for text in (self.system, self.prefill)):
            raise GenerationError("the system message and the beginning of the answer must be text")
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise GenerationError("template options, --chat-template-config: they must be a map from names to values")
        if taken := sorted(self.options.keys() & _OURS):
            raise GenerationError(
                f"template options, --chat-template-config: {', '.join(taken)} cannot be set here; the prompt sets it"
            )

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """All messages, including the system message and the prefill."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        after = [] if self.prefill is None else [{"role": "assistant", "content": self.prefill}]
        return [*before, *self.messages, *after]

    def text(self, tokenizer: Any, turns: Messages | None = None) -> str:
        """Renders the conversation, ready for the answer. turns: messages to render in place of `self.turns`."""
        end = "add_generation_prompt" if self.prefill is None else "continue_final_message"
        return render_chat(tokenizer, self.turns if turns is None else turns, **{end: True}, **self.options)

    def next_turn(self, tokenizer: Any) -> str:
        """Returns the rendered conversation from the last user message on, for a cache that holds the earlier text.

        The text begins with that message's content, without the template's text before it. Raises `GenerationError` if
        the template alters the content.
        """
        turns = self.turns
        last = max((i for i, turn in enumerate(turns) if turn.get("role") == "user"), default=0)
        marked = [{**turn, "content": _QUERY} if i == last else turn for i, turn in enumerate(turns)]
        at = self.text(tokenizer, marked).find(_QUERY)
        if at < 0:
            raise GenerationError(
                "the chat template alters the last user message, so where the new turn begins is unknown: give the "
                "conversation without a prompt cache"
            )
        return self.text(tokenizer)[at:]

    def ids(
        self, tokenizer: Any, answers: Mapping[str, Sequence[int]] | None = None, encode: Encode | None = None
    ) -> list[int]:
        """Returns the conversation's base ids. answers: text of an answer -> the ids that a model emitted for the text.

        encode: used in place of `encode_text`. An assistant message becomes the ids in `answers` if its content is a
        key of `answers`, because the tokenizer may split the text differently than the model did. For a message with
        reasoning or tool calls, the text that the template writes must be a key. If the template alters a content
        (other than its surrounding white space), the message is encoded as text.
        """
        whole, at, encode = self.text(tokenizer), 0, encode or encode_text
        ids: list[int] = []
        for begin, end, answer in self._find_known_answers(tokenizer, whole, answers or {}):
            ids += [*encode(tokenizer, whole[at:begin], False), *answer]
            at = end
        return [*ids, *encode(tokenizer, whole[at:], False)]

    def _find_known_answers(
        self, tokenizer: Any, whole: str, answers: Mapping[str, Sequence[int]]
    ) -> list[KnownAnswer]:
        turns = self.turns
        said, prefill = (turns, []) if self.prefill is None else (turns[:-1], turns[-1:])
        marks = thinking_marks(tokenizer) if answers else None
        render = lambda marked: self.text(tokenizer, [*marked, *prefill])
        return find_known_answers(said, whole, render, answers, marks and marks[0])


def as_chat(prompt: Any) -> Chat | None:
    """Returns `prompt` as a `Chat` if it is a `Chat` or a list of messages, else None."""
    if isinstance(prompt, Chat):
        return prompt
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return Chat(prompt) if is_list and isinstance(prompt[0], Mapping) else None


def _are_chat_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def encode_prompt(
    tokenizer: Any,
    prompt: Any,
    continues: bool = False,
    answers: Mapping[str, Sequence[int]] | None = None,
    encode: Encode | None = None,
) -> list[int]:
    """Returns the base ids of a prompt: text, a conversation (`Chat` or messages), or base ids as they are.

    continues: whether the prompt continues a cached conversation. Text gets the tokenizer's special tokens, unless it
    begins with the bos token or `continues`. A conversation is always rendered whole. answers, encode: see `Chat.ids`.
    Raises `GenerationError` if the prompt is empty, is not valid Unicode or is refused by the chat template.
    """
    if isinstance(prompt, str):
        ids = (encode or encode_text)(tokenizer, prompt, not continues)
    elif (chat := as_chat(prompt)) is not None:
        ids = chat.ids(tokenizer, answers, encode)
    else:
        ids = _checked_base_ids(prompt)
    if not ids:
        raise GenerationError("the prompt is empty: give at least one token")
    return list(ids)


def render_chat(tokenizer: Any, messages: Messages, **options: Any) -> str:
    """Renders chat messages as text. options: further arguments of the chat template.

    Raises `GenerationError` if the template refuses the messages or the rendered text is not valid Unicode.
    """
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils as of_tools

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (
        TemplateError,
        of_tools.DocstringParsingException,
        of_tools.TypeHintParsingException,
        *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError),
    ) as error:  # there is no template, or its code fails on these messages or options
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GenerationError(f"the chat template cannot render the messages: {reason}") from error
    check_unicode("the rendered conversation", text)
    return text


def check_system_message(tokenizer: Any, system: str, options: Mapping[str, Any]) -> None:
    """Raises `GenerationError` if the chat template cannot render a system message. options: see `Chat`."""
    try:
        Chat([{"role": "user", "content": "Hello."}], system, options=options).text(tokenizer)
    except GenerationError as error:
        raise GenerationError(f"this model takes no system message: {error}") from error


def check_unicode(what: str, text: str) -> None:
    """Raises `GenerationError` if a text contains half of a surrogate pair, which UTF-8 cannot encode.

    what: name of the text. Python decodes each invalid byte of a command-line argument to half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerationError(f"{what} is not valid Unicode at character {error.start}") from error


def encode_text(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Returns the base ids of a text, [] for "". special: add special tokens, unless the text begins with bos.

    Raises `GenerationError` if the text is not valid Unicode or the tokenizer cannot encode it.
    """
    check_unicode("the prompt", text)
    if not text:
        return []
    bos = tokenizer.bos_token
    special = special and (bos is None or not text.startswith(bos))
    try:
        with bare_exceptions_as_value_errors():
            return list(tokenizer.encode(text, add_special_tokens=special))
    except (ValueError, TypeError) as error:  # a vocabulary without a token for unknown text, or a damaged setting
        raise GenerationError(f"the tokenizer cannot encode the prompt: {error}") from error


def encode_shared_prompt(tokenizer: Any, text: str) -> list[int]:
    """Returns the base ids of a text with which several prompts begin.

    If the tokenizer has a chat template, the ids end inside the user's message, which each prompt continues.
    """
    if not tokenizer.has_chat_template:
        return encode_prompt(tokenizer, text)
    message = {"role": "user", "content": text}
    return encode_text(tokenizer, render_chat(tokenizer, [message], continue_final_message=True))


def _checked_base_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise GenerationError("a prompt is a string, a list of chat messages or a flat list of base ids")
    return list(ids)


# ---- finding answers whose emitted ids are known in a rendered conversation

Turns = Sequence[Mapping[str, Any]]
_PARTS = ("tool_calls", "reasoning_content")  # keys of a message whose values the template reformats
_MOST_ENDS = 16  # maximum number of positions to try as the end of a message


class KnownAnswer(NamedTuple):
    """An answer with known ids in a rendered conversation. begin, end: its characters are `text[begin:end]`."""

    begin: int
    end: int
    ids: Sequence[int]


def find_known_answers(
    turns: Turns,
    whole: str,
    render: Callable[[Turns], str],
    answers: Mapping[str, Sequence[int]],
    think_start: str | None = None,
) -> list[KnownAnswer]:
    """Returns the answers in a conversation whose emitted ids are known, in order and without overlap.

    turns: messages of the conversation, without a prefill. whole: rendered text of the conversation. render: renders
    changed messages. answers: emitted text of an answer -> emitted ids. think_start: mark that may have ended the
    prompt, so that the emitted text begins after the mark.

    A message is located by rendering the conversation with a unique mark in place of the message. A message with tool
    calls or reasoning is known if `answers` has the text at the mark's place; any other if `answers` has its content.
    """
    if not answers:
        return []
    plain = [i for i, turn in enumerate(turns) if _is_answer(turn) and turn.get("content") in answers]
    composed = [i for i, turn in enumerate(turns) if _is_answer(turn) and any(turn.get(part) for part in _PARTS)]
    leads = ("", *((f"{think_start}\n", think_start) if think_start else ()))
    for marked in [sorted({*plain, *composed}), *([plain] if composed else [])]:
        try:
            found = _locate_answers(turns, marked, whole, render, _EmittedAnswers(answers, leads)) if marked else []
        except GenerationError:  # the template misses the tool calls of a result, because marks replace them
            continue
        if found is not None:
            return found
    return []


def _is_answer(turn: Mapping[str, Any]) -> bool:
    return turn.get("role") == "assistant" and isinstance(turn.get("content"), str | None)


class _EmittedAnswers(NamedTuple):
    """Emitted ids by text. leads: possible ends of the prompt, which may precede an emitted text in a message."""

    ids: Mapping[str, Sequence[int]]
    leads: Sequence[str]

    def ids_of_text(self, text: str) -> Sequence[int] | None:
        """Returns the ids of an emitted text, None if the text is unknown. Another thread may remove it at any time."""
        try:
            return self.ids[text]
        except KeyError:
            return None

    def find_in_message(self, text: str, at: int) -> KnownAnswer | None:
        """Returns the known answer that a message's text ends with, else None. at: position of the text."""
        for lead in self.leads:
            if text.startswith(lead) and (ids := self.ids_of_text(text[len(lead) :])) is not None:
                return KnownAnswer(at + len(lead), at + len(text), ids)
        return None


def _locate_answers(
    turns: Turns, marked: Sequence[int], whole: str, render: Callable[[Turns], str], answers: _EmittedAnswers
) -> list[KnownAnswer] | None:
    """Returns the known answers among the messages `marked`; None if the text around the marks differs from `whole`."""
    marks = [f"\ue000answer {i}\ue001" for i in marked]
    parts = _split_at_marks(render(_replace_with_marks(turns, dict(zip(marked, marks, strict=True)))), marks)
    if parts is None or not whole.startswith(parts[0]):
        return None
    found, at = [], len(parts[0])
    for i, part in zip(marked, parts[1:], strict=True):
        ends = (
            _possible_message_ends(whole, part, at)
            if i != marked[-1]
            else [len(whole) - len(part)] * whole.endswith(part)
        )
        end, known = _locate_message(turns[i], whole, at, ends, answers)
        if end is None:
            return None
        found += [known] if known else []
        at = end + len(part)
    return found if at == len(whole) else None


def _replace_with_marks(turns: Turns, marks: Mapping[int, str]) -> Turns:
    return [
        {**{key: value for key, value in turn.items() if key not in _PARTS}, "content": marks[i]}
        if i in marks
        else turn
        for i, turn in enumerate(turns)
    ]


def _split_at_marks(text: str, marks: Sequence[str]) -> list[str] | None:
    """Splits a text at the marks, which must occur in order; returns None if a mark does not occur exactly once."""
    parts = [text]
    for mark in marks:
        if parts[-1].count(mark) != 1:
            return None
        parts += parts.pop().split(mark)
    return parts


def _possible_message_ends(whole: str, part: str, at: int) -> list[int]:
    """Returns possible ends of a message: the first positions from `at` on where `part`, the text after it, begins."""
    ends: list[int] = []
    while len(ends) < _MOST_ENDS and (end := whole.find(part, ends[-1] + 1 if ends else at)) >= 0:
        ends.append(end)
    return ends


def _locate_message(
    turn: Mapping[str, Any], whole: str, at: int, ends: Sequence[int], answers: _EmittedAnswers
) -> tuple[int | None, KnownAnswer | None]:
    """Returns the end of a marked message in `whole`, and the known answer in it; None for each that is not found.

    at: position where the message begins. ends: possible ends of the message.
    """
    if any(turn.get(part) for part in _PARTS):
        known = next((found for end in ends if (found := answers.find_in_message(whole[at:end], at))), None)
        return (known.end if known else next(iter(ends), None)), known
    content = turn["content"]
    end = next((end for end in ends if whole[at:end] in (content, content.strip())), None)
    ids = answers.ids_of_text(content)
    return end, None if end is None or ids is None else KnownAnswer(at, end, ids)
