"""Grammars for formats of tool calls that write each argument between marks, as in XML, instead of one JSON object.

String arguments are written without quotes, other values as JSON. A format has the name of the parser in mlx-lm that
reads its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.turn import Tool
from mlx_zip.text.grammar import grammar_vocabulary, json_rule, literal_rule, mark_rule, terminal_without_mark
from mlx_zip.text.tokenizers import single_token_id

MOST_LENGTH = 10_000  # upper bound of minLength and maxLength in a schema
_NAME = re.compile(r"[^\s<>\"'&]+")
_MARK = re.compile(r"(</?[a-z_]+>)")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema", "$id", "$comment", "deprecated"})
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})


@dataclass(frozen=True)
class MarkedFormat:
    """The fixed texts of a call between its start mark and its end mark, in order.

    lead: before the first call. begin, named: before and after the tool's name. key, value: before and after an
    argument's name. close: after an argument's value. end: after the last argument. avoid: text that a string argument
    must not contain. grouped: whether several calls stand between one start mark and one end mark.
    """

    lead: str
    begin: str
    named: str
    key: str
    value: str
    close: str
    end: str
    avoid: str
    grouped: bool = False


FORMATS = {  # name of mlx-lm's parser -> format
    "qwen3_coder": MarkedFormat(
        "\n", "<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n", "</parameter>"
    ),
    "glm47": MarkedFormat("", "", "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "", "</arg_value>"),
    "minimax_m2": MarkedFormat(
        "\n",
        '<invoke name="',
        '">\n',
        '<parameter name="',
        '">',
        "</parameter>\n",
        "</invoke>\n",
        "</parameter>",
        grouped=True,
    ),
    "minicpm5": MarkedFormat("", '"', '">', '<param name="', '">', "</param>", "", "<"),
}


def marked_call_rules(tokenizer: Any, kind: str, end: str, tool: Tool, name: str) -> list[str]:
    """Returns the rule called `name` for a call of a tool, and the rules it needs. kind: key of `FORMATS`.

    end: the mark after the call. Raises `GenerationError` if no grammar of this format can be made for the
    tool's parameters.
    """
    form, schema = FORMATS[kind], _marked_arguments_schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    whole, rules = [_literal_with_marks(tokenizer, form.begin + tool.name + form.named)], list[str]()
    for i, (key, argument_schema) in enumerate(properties.items()):
        argument = f"{name}_{i}"
        whole.append(argument if key in required else f"{argument}?")
        begin = _literal_with_marks(tokenizer, form.key + key + form.value)
        if _is_text_argument(tool, key, argument_schema):
            rules += [
                f"{argument}: {begin} {argument}_text",
                *_text_argument_rules(tokenizer, form, end, tool, argument_schema, argument),
            ]
        else:
            value = json_rule({**argument_schema, **shared}, lenient=not tool.strict)
            rules.append(f"{argument}: {begin} {value} {_literal_with_marks(tokenizer, form.close)}")
    return [f"{name}: {' '.join(filter(None, [*whole, _literal_with_marks(tokenizer, form.end)]))}", *rules]


def rule_before_first_call(kind: str) -> str:
    """Returns the rule for the text between the start mark and the first call, "" if there is none."""
    return literal_rule(FORMATS[kind].lead) if FORMATS[kind].lead else ""


def _marked_arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments. Raises `GenerationError` if no marked format has a grammar for it.

    Keywords other than `_OBJECT_KEYWORDS` are an error if the tool is strict; otherwise they are ignored.
    """
    schema = tool.parameters
    properties = schema.get("properties", {})
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise _unforceable_error(tool, "they are no object with properties")
    if more := sorted(schema.keys() - _OBJECT_KEYWORDS - _ANNOTATIONS) if tool.strict else ():
        raise _unforceable_error(tool, f"{more[0]} is not supported")
    if missing := [key for key in schema.get("required", ()) if key not in properties]:
        raise _unforceable_error(tool, f"{missing[0]!r:.80} is required and not among the properties")
    if wrong := [key for key in properties if not _NAME.fullmatch(key)]:
        raise _unforceable_error(tool, f"{wrong[0]!r:.80} cannot be written as a name")
    return schema


def _is_text_argument(tool: Tool, key: str, argument_schema: Any) -> bool:
    """Returns whether an argument is a string. Raises `GenerationError` if no grammar can be made for its schema.

    That is so if the schema does not have exactly one type, or if a strict tool's string has unsupported keywords.
    """
    kind = argument_schema.get("type") if isinstance(argument_schema, Mapping) else None
    if kind not in _TYPES:
        raise _unforceable_error(tool, f"{key!r:.80} needs exactly one type")
    if kind != "string":
        return False
    if more := sorted(argument_schema.keys() - _TEXT_KEYWORDS - _ANNOTATIONS) if tool.strict else ():
        raise _unforceable_error(tool, f"{more[0]} of {key!r:.80} is not supported")
    return True


def _unforceable_error(tool: Tool, reason: str) -> GenerationError:
    return GenerationError(f"the parameters of the tool {tool.name!r:.80} cannot be forced in this format: {reason}")


def _text_argument_rules(
    tokenizer: Any, form: MarkedFormat, end: str, tool: Tool, schema: Mapping[str, Any], argument: str
) -> list[str]:
    """Returns the rule for a string argument and the mark that closes it, and the rules it needs.

    The string neither begins nor ends with white space, which parsers drop, and is not "null", which parsers read as no
    value. end: the mark after the call.
    """
    rule, terminal = f"{argument}_text", f"{argument}_body".upper()
    if (choices := _enum_texts(schema)) is not None:
        avoid = (form.avoid, end)
        known = [one for one in choices if one == one.strip() and one.lower() != "null"]
        known = [literal_rule(one) for one in known if not any(mark in one for mark in avoid)]
        if not known:
            raise _unforceable_error(tool, "no text of an enum can be written")
        return [f"{rule}: ({' | '.join(known)}) {_literal_with_marks(tokenizer, form.close)}"]
    body = [f"{terminal}_IN: {_length_pattern(tool, schema)} & /(\\S((.|\\n)*\\S)?)?/ & ~/[nN][uU][lL][lL]/"]
    body += [terminal_without_mark(f"{terminal}_CLOSE", form.avoid), terminal_without_mark(f"{terminal}_END", end)]
    body.append(f"{terminal}: {terminal}_IN & {terminal}_CLOSE & {terminal}_END")
    if single_token_id(tokenizer, form.close) in grammar_vocabulary(tokenizer).special_token_ids:
        return [f"{rule}: {terminal} {mark_rule(tokenizer, form.close)}", *body]
    return [f"{rule}[suffix={literal_rule(form.close)}]: {terminal}", *body]


def _enum_texts(schema: Mapping[str, Any]) -> list[str] | None:
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if given is None else [one for one in given if isinstance(one, str)]


def _length_pattern(tool: Tool, schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", MOST_LENGTH)
    if not all(type(n) is int and 0 <= n <= MOST_LENGTH for n in (least, most)):
        raise _unforceable_error(tool, f"lengths of texts must be integers from 0 to {MOST_LENGTH}")
    return f"/(.|\\n){{{least},{most}}}/" if least or "maxLength" in schema else "/(.|\\n)*/"


def _literal_with_marks(tokenizer: Any, text: str) -> str:
    """Returns the rule for a fixed text, "" for an empty text. A mark that is one token is written as this token."""
    parts = [part for part in _MARK.split(text) if part]
    return " ".join(mark_rule(tokenizer, part) if _MARK.fullmatch(part) else literal_rule(part) for part in parts)
