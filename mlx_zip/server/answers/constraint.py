"""Turns JSON schemas and forced tool calls into a `Constraint` on the answer, for the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.splitter import ReasoningStart, reasoning_start
from mlx_zip.server.answers.tool_formats import ToolFormat, tool_format
from mlx_zip.server.answers.turn import Tool, Turn
from mlx_zip.text.grammar import (
    GrammarConstraint,
    json_rule,
    literal_rule,
    mark_rule,
    rules_until_mark,
    terminal_without_mark,
)
from mlx_zip.text.prompts import encode_text
from mlx_zip.text.tokenizers import thinking_marks

MOST_CALLS = 16  # maximum calls in one answer whose calls are forced
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_EMPTY_OBJECT = {"type": "object", "properties": {}, "required": []}
_NOTES = frozenset({"title", "description", "$schema", "$id", "$comment"})


def make_grammar_constraint(
    tokenizer: Any, turn: Turn, prompt_ids: Sequence[int] = (), vocab_size: int | None = None
) -> GrammarConstraint | None:
    """Returns the constraint on the answer to a turn, None if any text is allowed.

    A schema, required calls and strict tools constrain the answer, from the end of its reasoning on. prompt_ids: base
    ids of the prompt, whose end shows whether the reasoning has begun. vocab_size: number of the model's base ids, None
    for that of the tokenizer. Raises `GenerationError` if the schema is not supported, the model's format of calls
    cannot be forced, or the prefill breaks the constraint; `InstallationError` if llguidance is not installed.
    """
    body = _body_rules(tokenizer, turn)
    if body is None:
        return None
    reasons = reasoning_start(tokenizer, turn, prompt_ids, prefilled=False)
    grammar = "\n".join([*_start_rules(tokenizer, reasons), *body])
    constraint = GrammarConstraint(tokenizer, grammar, vocab_size)
    if turn.prefill:
        _push_prefill(constraint, tokenizer, turn.prefill)
    return constraint


def _push_prefill(constraint: GrammarConstraint, tokenizer: Any, prefill: str) -> None:
    ids = encode_text(tokenizer, prefill.rstrip())
    if not constraint.accepts(ids):
        raise GenerationError("the beginning of the answer does not fit the schema or the tools that are asked for")
    constraint.push(ids)


def _start_rules(tokenizer: Any, reasons: ReasoningStart) -> list[str]:
    """Returns the rule `start`, for the reasoning, if any, followed by the rule `body`; and the rules it needs."""
    marks = thinking_marks(tokenizer)
    if reasons is ReasoningStart.NO or marks is None:
        return ["start: body"]
    thought = 'thought ("\\n" | "\\n\\n")?'
    begun = thought if reasons is ReasoningStart.BEGUN else f"({mark_rule(tokenizer, marks[0])} {thought})?"
    return [f"start: {begun} body", rules_until_mark(tokenizer, "thought", marks[1])]


def _body_rules(tokenizer: Any, turn: Turn) -> list[str] | None:
    """Returns the rule `body`, for the text after the reasoning, with the rules it needs; None to allow any text."""
    tools = turn.tools if turn.tool_choice != "none" else ()
    forced, strict = bool(tools) and turn.tool_choice != "auto", any(tool.strict for tool in tools)
    schema = None if turn.schema is None or forced else f"answer: {json_rule(turn.schema)}"
    if schema is None and not (forced or strict):
        return None
    if schema is not None and not tools:
        return ["body: answer", schema]
    form = tool_format(tokenizer)
    if not (form.is_json or form.kind == MARKED):
        raise _format_error(form, forced or strict)
    chosen = tools if turn.tool_choice in ("auto", "required") else _tools_named(tools, turn.tool_choice)
    calls = _calls_rules(tokenizer, form, chosen, turn.parallel_tool_calls and turn.tool_choice in ("auto", "required"))
    if forced:
        return ["body: calls", *calls]
    if schema is not None:
        return ["body: answer | calls", schema, *calls]
    return [*_free_text_rules(tokenizer, form, turn.parallel_tool_calls), *calls]


def _format_error(form: ToolFormat, forced: bool) -> GenerationError:
    if not forced:
        return GenerationError(f"a schema and tools cannot go together in this model's format of calls, {form.kind}")
    return GenerationError(
        f"tools: this model writes calls in the format {form.kind}, which cannot be forced; leave tool_choice at "
        "auto and strict off"
    )


def _tools_named(tools: Sequence[Tool], name: str) -> list[Tool]:
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise GenerationError(f"tool_choice names the tool {name!r:.80}, which is not among the tools")
    return found


def _calls_rules(tokenizer: Any, form: ToolFormat, tools: Sequence[Tool], several: bool) -> list[str]:
    """Returns the rule `calls`, for one call or, if `several`, up to `MOST_CALLS`; and the rules it needs.

    One of them is `after_start`, for the text after a start mark.
    """
    start = mark_rule(tokenizer, form.start) if form.start else ""
    most = MOST_CALLS if several and form.start else 1
    calls = f"{start} after_start"
    if most > 1 and form.kind != "list":
        between = '"\\n"' if form.kind in _TAGGED else ""
        calls = f"({calls}) ({between} {calls}){{0,{most - 1}}}"
    choices = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = [f"calls: {calls}", f"after_start: {_after_start_rule(tokenizer, form, most)}", f"call: {choices}"]
    return rules + [rule for i, tool in enumerate(tools) for rule in _call_rules(tokenizer, form, tool, f"call_{i}")]


def _after_start_rule(tokenizer: Any, form: ToolFormat, most: int) -> str:
    """Returns the rule for the text after a start mark. most: maximum number of calls there."""
    if form.kind in _TAGGED:
        return f'"\\n" call "\\n" {mark_rule(tokenizer, form.end)}'
    if form.kind == "list":
        more = f'(", " call){{0,{most - 1}}}' if most > 1 else ""
        return f'" "? "[" call {more} "]"'
    return "call"


def _call_rules(tokenizer: Any, form: ToolFormat, tool: Tool, name: str) -> list[str]:
    """Returns the rule called `name` for a call of a tool, without the marks around the call, and the rules it needs.

    If the tool is not strict, unknown keywords of its schema are ignored, and an object whose schema lists properties
    can have no other properties.
    """
    if form.kind == MARKED:
        return _marked_call_rules(form.end, tool, name)
    arguments = json_rule(_arguments_schema(tool), lenient=not tool.strict)
    if form.kind == "headers":
        return [f"{name}: {literal_rule(tool.name)} {mark_rule(tokenizer, '[ARGS]')} {arguments}"]
    begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{form.arguments}": '
    return [f'{name}: {literal_rule(begin)} {arguments} "}}"']


def _arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments. Raises `GenerationError` if its type is not object.

    A tool takes no arguments if its schema is empty, or if it is not strict and its schema says no more than that
    there are no properties.
    """
    parameters = dict(tool.parameters)
    said = {**_EMPTY_OBJECT, **{key: value for key, value in parameters.items() if key not in _NOTES}}
    if not parameters or ("properties" in parameters and said == _EMPTY_OBJECT and not tool.strict):
        return _NO_ARGUMENTS
    if parameters.setdefault("type", "object") != "object":
        raise GenerationError(f"the parameters of the tool {tool.name!r:.80} must be an object")
    return parameters


def _free_text_rules(tokenizer: Any, form: ToolFormat, several: bool) -> list[str]:
    """Returns the rule `body`, for text that may hold calls, and the rules it needs, without those for the calls."""
    if not form.start:
        return ["body: calls | TEXT?", "TEXT: /[ \\t\\n]*[^ \\t\\n{\\[](.|\\n)*/"]
    one = "before after_start"
    ends = form.kind == "list" or not several
    body = f"body: TEXT | {one}" if ends else f"body: TEXT | ({one})+ TEXT"
    return [body, rules_until_mark(tokenizer, "before", form.start), terminal_without_mark("TEXT", form.start)]


# ---- calls that write each argument between marks, as in XML, instead of one JSON object
#
# String arguments are written without quotes, other values as JSON.

MARKED = "qwen3_coder"  # the only such format that can be forced; its name is that of the parser in mlx-lm
_TAGGED = ("tags", MARKED)  # formats with a mark and a line break before and after each call
_CLOSE = "\n</parameter>\n"
MOST_LENGTH = 10_000  # upper bound of minLength and maxLength in a schema
_NAME = re.compile(r"[^\s<>\"'&]+")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema", "$id", "$comment", "deprecated"})
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})


def _marked_call_rules(end: str, tool: Tool, name: str) -> list[str]:
    """Returns the rule called `name` for a call of a tool, and the rules it needs. end: the mark after the call.

    Raises `GenerationError` if no grammar of this format can be made for the tool's parameters.
    """
    schema = _marked_arguments_schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    whole, rules = [literal_rule(f"<function={tool.name}>\n")], list[str]()
    for i, (key, argument_schema) in enumerate(properties.items()):
        argument = f"{name}_{i}"
        whole.append(argument if key in required else f"{argument}?")
        begin = literal_rule(f"<parameter={key}>\n")
        if _is_text_argument(tool, key, argument_schema):
            rules += [
                f"{argument}: {begin} {argument}_text",
                *_text_argument_rules(end, tool, argument_schema, argument),
            ]
        else:
            value = json_rule({**argument_schema, **shared}, lenient=not tool.strict)
            rules.append(f"{argument}: {begin} {value} {literal_rule(_CLOSE)}")
    return [f"{name}: {' '.join(whole)} {literal_rule('</function>')}", *rules]


def _marked_arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments. Raises `GenerationError` if there is no grammar for it.

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


def _text_argument_rules(end: str, tool: Tool, schema: Mapping[str, Any], argument: str) -> list[str]:
    """Returns the rule for a string argument and the mark that closes it, and the rules it needs.

    The string neither begins nor ends with white space, which the parser drops, and is not "null", which the parser
    reads as no value. end: the mark after the call.
    """
    rule, terminal = f"{argument}_text", f"{argument}_body".upper()
    avoid = (_CLOSE.strip(), end)
    if (choices := _enum_texts(schema)) is not None:
        known = [one for one in choices if one == one.strip() and one.lower() != "null"]
        known = [literal_rule(one) for one in known if not any(mark in one for mark in avoid)]
        if not known:
            raise _unforceable_error(tool, "no text of an enum can be written")
        return [f"{rule}: ({' | '.join(known)}) {literal_rule(_CLOSE)}"]
    return [
        f"{rule}[suffix={literal_rule(_CLOSE)}]: {terminal}",
        f"{terminal}_IN: {_length_pattern(tool, schema)} & /(\\S((.|\\n)*\\S)?)?/ & ~/[nN][uU][lL][lL]/",
        *(terminal_without_mark(f"{terminal}_{i}", mark) for i, mark in enumerate(avoid)),
        f"{terminal}: {terminal}_IN & {terminal}_0 & {terminal}_1",
    ]


def _enum_texts(schema: Mapping[str, Any]) -> list[str] | None:
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if given is None else [one for one in given if isinstance(one, str)]


def _length_pattern(tool: Tool, schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", MOST_LENGTH)
    if not all(type(n) is int and 0 <= n <= MOST_LENGTH for n in (least, most)):
        raise _unforceable_error(tool, f"lengths of texts must be integers from 0 to {MOST_LENGTH}")
    return f"/(.|\\n){{{least},{most}}}/" if least or "maxLength" in schema else "/(.|\\n)*/"
