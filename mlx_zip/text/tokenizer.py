"""A tokenizer as every engine needs it: one of transformers, with its chat template, ends of text and streamed text.

It has the names of mlx-lm's `TokenizerWrapper`, so code that is given either works with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.text.detokenizer import Detokenizer

_THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
)
_FULL_MARKS = {"<|channel>": "<|channel>thought"}  # where the mark is more than its token


def as_tokenizer(tokenizer: Any) -> Any:
    """Returns our `Tokenizer` or mlx-lm's `TokenizerWrapper` as given, and a bare tokenizer of transformers wrapped.

    Raises `GenerationError` for anything else.
    """
    if hasattr(tokenizer, "detokenizer"):
        return tokenizer
    if not hasattr(tokenizer, "eos_token_id") or not hasattr(tokenizer, "encode"):
        raise GenerationError(f"tokenizer must be the one that load returns, not {type(tokenizer).__name__}")
    return Tokenizer(tokenizer)


def think_marks(tokenizer: Any) -> tuple[str, str] | None:
    """Returns the texts that mark the beginning and end of a model's reasoning, None for a model without such marks.

    tokenizer: our `Tokenizer`, or mlx-lm's wrapper, whose own marks come first. Else a pair of marks counts if both are
    tokens, or if both stand in the chat template.
    """
    begin, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    if isinstance(begin, str) and isinstance(end, str):
        return begin, end
    template = chat_template(tokenizer)
    pair = _thinking_tokens(tokenizer) or next((p for p in _THINKING if p[0] in template and p[1] in template), None)
    return pair and (_FULL_MARKS.get(pair[0], pair[0]), pair[1])


def token_id(tokenizer: Any, text: str) -> int | None:
    """Returns the id of the token that is exactly this text, None if there is none."""
    found = tokenizer.convert_tokens_to_ids(text)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == text else None


def chat_template(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat template, "" without one; of several, the one for tools or the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) else ""


def _thinking_tokens(tokenizer: Any) -> tuple[str, str] | None:
    """Returns the pair of tokens that mark thinking, None for a vocabulary without one."""
    has = lambda text: token_id(tokenizer, text) is not None
    return next((pair for pair in _THINKING if has(pair[0]) and has(pair[1])), None)


class Tokenizer:
    """Wraps a tokenizer of the transformers library; every other attribute is that tokenizer's.

    eos_token_ids: ids that end a text, the tokenizer's own eos included.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = {*eos_token_ids, *own}

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._tokenizer.chat_template is not None

    @property
    def has_thinking(self) -> bool:
        """Whether the vocabulary has tokens that mark the beginning and end of thinking."""
        return _thinking_tokens(self._tokenizer) is not None

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer."""
        return Detokenizer(self._tokenizer)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], tokenize: bool = True, **options: Any) -> Any:
        """Renders chat messages to ids, or to text with tokenize=False. options: further arguments of the template.

        As in mlx-lm, `enable_thinking` is `has_thinking` unless `options` has it.
        """
        options = {"enable_thinking": self.has_thinking, "return_dict": False} | options
        return self._tokenizer.apply_chat_template(list(messages), tokenize=tokenize, **options)

    def add_eos_token(self, token: str) -> None:
        """Adds a token, or an id in digits, to `eos_token_ids`."""
        token_id = int(token) if token.isdecimal() else self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None:
            raise ValueError(f"{token!r} is not a token of this tokenizer")
        self.eos_token_ids.add(token_id)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __repr__(self) -> str:
        return f"Tokenizer({self._tokenizer.name_or_path or type(self._tokenizer).__name__}, {len(self)} tokens)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def add_eos_tokens(tokenizer: Any, tokens: Iterable[str]) -> None:
    """Makes further tokens end a text: each a token's text, or an id in digits.

    tokenizer: a `Tokenizer`, or mlx-lm's wrapper. Raises `GenerationError` for one that is no token.
    """
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary and not (token.isdecimal() and len(token) < 10 and int(token) < len(tokenizer)):
            raise GenerationError(f"--extra-eos-token {token!r} is not a token of this tokenizer")
        tokenizer.add_eos_token(token)
