"""Tokenizers whose chat templates have tools and reasoning, in each format of calls that can be forced."""

from __future__ import annotations

import importlib
from copy import deepcopy
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_zip.text.tokenizers import Tokenizer, load_tokenizer

_HEAD = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content or '' }}"
)
_TAIL = (
    "{%- if not (loop.last and continue_final_message) %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if thinking == 'begun' %}{{ '<think>\n' }}"
    "{%- elif enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_CALLS = {
    "tags": (
        "{%- for tool_call in message.tool_calls or [] %}"
        "{% if not loop.first or message.content %}{{ '\n' }}{% endif %}"
        "{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
        '{{ \'<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
        "{{ tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    ),
    "list": (
        "{%- if message.tool_calls %}{{ '[TOOL_CALLS][' }}{% for tool_call in message.tool_calls %}"
        "{{ tool_call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}"
    ),
    "headers": (
        "{%- for tool_call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' }}"
        "{{ tool_call.function.arguments | tojson }}{% endfor %}"
    ),
    "llama": (
        '{%- for tool_call in message.tool_calls or [] %}{{ \'{"name": "\' + tool_call.function.name }}'
        "{{ '\", \"parameters\": ' }}{{ tool_call.function.arguments | tojson }}{{ '}' }}{% endfor %}"
    ),
    "plain": ("{%- for tool_call in message.tool_calls or [] %}{{ tool_call.function | tojson }}{% endfor %}"),
}
KINDS = tuple(_CALLS)
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


def template(kind: str, thinks: bool = True) -> str:
    """A ChatML template that writes calls in a format. thinks: whether it has marks of reasoning."""
    whole = _HEAD + _CALLS[kind] + _TAIL
    return whole if thinks else whole.replace("<think>", "").replace("</think>", "").replace("is false", "== 5")


def with_tools(kind: str = "tags", marks: str = "text", name: str = "stories") -> Tokenizer:
    """A tokenizer, the bundled model's unless named, with such a template.

    marks: "text" to spell the marks with the vocabulary's own tokens, so that the model knows every id; "plain" or
    "special" to add a token per mark.
    """
    inner = deepcopy(_loaded(name))
    inner.chat_template = template(kind)
    if marks != "text":
        inner.add_tokens(list(MARKS), special_tokens=marks == "special")
    return Tokenizer(inner)


@cache
def _loaded(name: str) -> Any:
    """The tokenizer of transformers, read once for all of a process: a copy takes a thirtieth of that time."""
    return load_tokenizer(name)._tokenizer


def wrapped(name: str, chat_template: str = "{{ tools }}[ARGS]") -> TokenizerWrapper:
    """A tokenizer in mlx-lm's wrapper, with one of mlx-lm's parsers."""
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    inner = with_tools()._tokenizer
    inner.chat_template = chat_template
    return TokenizerWrapper(
        inner,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )
