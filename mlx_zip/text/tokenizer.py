"""A tokenizer as every engine needs it: one of transformers, with its chat template, ends of text and streamed text.

It has the names of mlx-lm's `TokenizerWrapper`, so code that is given either works with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.text.detokenizer import Detokenizer

_THINKING = ("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|channel>", "<channel|>")


def as_tokenizer(tokenizer: Any) -> Any:
    """Returns our `Tokenizer` or mlx-lm's `TokenizerWrapper` as given, and a bare tokenizer of transformers wrapped.

    Raises `GenerationError` for anything else.
    """
    if hasattr(tokenizer, "detokenizer"):
        return tokenizer
    if not hasattr(tokenizer, "eos_token_id") or not hasattr(tokenizer, "encode"):
        raise GenerationError(f"tokenizer must be the one that load returns, not {type(tokenizer).__name__}")
    return Tokenizer(tokenizer)


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
        vocabulary = self._tokenizer.get_vocab()
        return any(begin in vocabulary and end in vocabulary for begin, end in _THINKING)

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
