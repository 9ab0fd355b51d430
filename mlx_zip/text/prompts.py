"""Prompts as base ids: text, chat messages through the tokenizer's template, or ids as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.errors import GenerationError


def encode_prompt(tokenizer: Any, prompt: Any, continues: bool = False) -> list[int]:
    """A prompt to base ids: text, a list of chat messages ({"role", "content"}), or base ids as they are.

    Text gets the tokenizer's special tokens unless it already begins with the bos token or `continues` a cached
    conversation. Raises `GenerationError` for an empty prompt, text that is not valid Unicode, messages that the chat
    template refuses, and messages that are to continue a cache.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt, continues)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        if continues:  # a template writes a whole conversation, with its beginning
            raise GenerationError("chat messages cannot continue a cache: give the text or the ids of the next turn")
        text = render_chat(tokenizer, prompt, add_generation_prompt=True)
        ids = _encode_text(tokenizer, text, continues=True)  # the template writes its own special tokens
    else:
        ids = _plain_ids(prompt)
    if not ids:
        raise GenerationError("the prompt is empty: give at least one token")
    return list(ids)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Chat messages to text; `options` go to the chat template.

    Raises `GenerationError` with the template's words, or when what it makes is not valid Unicode.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        # no template, or what its code raises for options that it cannot take
        raise GenerationError(f"the chat template cannot render the messages: {error}") from error
    check_unicode("what the chat template makes of the messages", text)
    return text


def check_unicode(what: str, text: str) -> None:
    """Raises `GenerationError` for half of a surrogate pair, as the command line has for a byte that is no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerationError(f"{what} is not valid Unicode at character {error.start}") from error


def _encode_text(tokenizer: Any, text: str, continues: bool) -> list[int]:
    check_unicode("the prompt", text)
    if not text:
        return []
    bos = tokenizer.bos_token
    special = not continues and (bos is None or not text.startswith(bos))
    return tokenizer.encode(text, add_special_tokens=special)


def _plain_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise GenerationError("a prompt is a string, a list of chat messages or a flat list of base ids")
    return list(ids)
