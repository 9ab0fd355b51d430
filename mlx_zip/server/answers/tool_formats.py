"""The formats in which models write tool calls: their marks, and parsers that return a call's name and arguments.

mlx-lm's wrapper of a tokenizer has the model's marks and parser. Without it the format is found in the chat template:
JSON between tags (Hermes, Qwen), JSON after a mark (Mistral), or JSON as the whole answer (Llama 3 and others).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.turn import Tool, ToolCall
from mlx_zip.text.tokenizers import chat_template

Parser = Callable[[str, Sequence[Mapping[str, Any]]], Any]
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, ArithmeticError, RecursionError)
_HEADER = re.compile(r"\s*([\w.-]+)\s*\[ARGS\]\s*")
_BETWEEN = re.compile(r"[\s;,]*")


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. kind: name of the format. start, end: the marks around a call, "" for none.

    parser: reads the text between the marks. arguments: key of the arguments in JSON. is_json: whether the text between
    the marks is JSON, so that an end mark within a string does not count.
    """

    kind: str
    start: str
    end: str
    parser: Parser
    arguments: str = "arguments"
    is_json: bool = True

    def parse_calls(self, text: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Returns the calls in the text between the marks, [] unless all are valid calls of these tools."""
        try:
            found = self.parser(text, openai_tools(tools))
            calls = [_make_tool_call(one) for one in ([found] if isinstance(found, Mapping) else found)]
        except _FAULTS:
            return []
        return calls if {call.name for call in calls} <= {tool.name for tool in tools} else []


def tool_format(tokenizer: Any) -> ToolFormat:
    """Returns the format of tool calls of a tokenizer's model.

    Raises `GenerationError` if the chat template takes no tools or the format has no parser here.
    """
    template = chat_template(tokenizer)
    parser = getattr(tokenizer, "tool_parser", None)
    if "tools" not in template and parser is None:
        raise GenerationError("tools: the chat template of this model has no tools")
    if callable(parser):
        return _wrapper_format(tokenizer, parser, template)
    if "[TOOL_CALLS]" in template:
        return _mistral_format(template)
    others = ("<arg_key>", "<function=", "<|tool_call>", "<start_function_call>", "<|tool_calls_section_begin|>")
    if found := [mark for mark in others if mark in template]:
        raise GenerationError(f"tools: calls that this model writes with {found[0]} cannot be read here")
    if "<tool_call>" in template:
        return ToolFormat("tags", "<tool_call>", "</tool_call>", _parse_json_calls)
    if "<|python_tag|>" in template or '"parameters":' in template:
        return ToolFormat("llama", "", "", _parse_json_calls, "parameters")
    return ToolFormat("plain", "", "", _parse_json_calls)


def _wrapper_format(tokenizer: Any, parser: Any, template: str) -> ToolFormat:
    """Returns the format given by mlx-lm's wrapper of a tokenizer. parser: the wrapper's parser."""
    kind = str(getattr(parser, "__module__", "")).rpartition(".")[2]
    if kind == "mistral":
        return _mistral_format(template)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end or ""
    if kind == "json_tools":
        return ToolFormat("tags", start, end, _parse_json_calls)
    return ToolFormat(kind, start, end, parser, is_json=False)


def _mistral_format(template: str) -> ToolFormat:
    """Returns Mistral's format: a list of calls or, in newer templates, calls that each have a header."""
    kind = "headers" if "[ARGS]" in template else "list"
    return ToolFormat(kind, "[TOOL_CALLS]", "", _parse_headed_calls if kind == "headers" else _parse_json_calls)


def openai_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns tools in OpenAI's JSON format, which chat templates take."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def messages_for_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns messages in the form that the model's chat template takes.

    Mistral's templates take only call ids of 9 letters and digits; any other call id is replaced by a hash of itself.
    """
    if "[TOOL_CALLS]" not in chat_template(tokenizer):
        return messages
    return [_with_mistral_ids(message) for message in messages]


def _with_mistral_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" in message:
        calls = [{**call, "id": _mistral_call_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _mistral_call_id(message["tool_call_id"])}
    return message


def _mistral_call_id(name: str) -> str:
    return name if len(name) == 9 and name.isalnum() else sha256(name.encode()).hexdigest()[:9]


def _make_tool_call(found: Mapping[str, Any]) -> ToolCall:
    """Returns a parser's result as a call. Raises `ValueError` if the name is not a text or the arguments no map."""
    name, arguments = found["name"], found.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise ValueError("no call")
    return ToolCall(f"call_{uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _parse_json_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the calls in JSON text: objects or lists of objects. Raises `ValueError` if there is no call."""
    found: list[dict[str, Any]] = []
    text, at = text.strip(), 0
    text = text.removeprefix("<|python_tag|>").strip()
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        found += [_parse_name_and_arguments(one) for one in (value if isinstance(value, list) else [value])]
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
    if not found:
        raise ValueError("no call")
    return found


def _parse_name_and_arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the name and arguments of one call in JSON; arguments that are a string are parsed as JSON again."""
    inner = value.get("function")
    value = inner if isinstance(inner, Mapping) else value
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    return {"name": value["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _parse_headed_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the calls in text such as `name[ARGS]{...}`, or in JSON. Raises `ValueError` if the text is neither."""
    if "[ARGS]" not in text:
        return _parse_json_calls(text, tools)
    found, at = [], 0
    while at < len(text.rstrip()):
        header = _HEADER.match(text.replace("[TOOL_CALLS]", " " * 12), at)
        if header is None:
            raise ValueError("no call")
        arguments, at = json.JSONDecoder().raw_decode(text, header.end())
        found.append({"name": header[1], "arguments": arguments})
    return found
