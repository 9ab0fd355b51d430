"""Turns JSON schemas and forced tool calls into a `Constraint` on the answer, for the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers import marked_calls
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
_ANNOTATIONS = frozenset({"title", "description", "$schema", "$id", "$comment"})


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
    forced = bool(tools) and turn.tool_choice != "auto"
    schema = None if turn.schema is None or forced else f"answer: {json_rule(turn.schema)}"
    if not (forced or any(tool.strict for tool in tools)):
        return None if schema is None else _schema_rules(tokenizer, schema, tools, turn.parallel_tool_calls)
    form = tool_format(tokenizer)
    if not form.can_force:
        raise GenerationError(
            f"tools: this model writes calls in the format {form.kind}, which cannot be forced; leave tool_choice at "
            "auto and strict off"
        )
    chosen = tools if turn.tool_choice in ("auto", "required") else _tools_named(tools, turn.tool_choice)
    calls = _calls_rules(tokenizer, form, chosen, turn.parallel_tool_calls and turn.tool_choice in ("auto", "required"))
    if forced:
        return ["body: calls", *calls]
    if schema is not None:
        return ["body: answer | calls", schema, *calls]
    return [*_free_text_rules(tokenizer, form, turn.parallel_tool_calls), *calls]


def _schema_rules(tokenizer: Any, schema: str, tools: Sequence[Tool], several: bool) -> list[str]:
    """Returns the rules for an answer that follows a schema or, if there are tools, consists of tool calls.

    schema: the rule `answer`. several: whether to allow more than one call.
    """
    if not tools:
        return ["body: answer", schema]
    form = tool_format(tokenizer)
    if not form.can_force:
        raise GenerationError(f"a schema and tools cannot go together in this model's format of calls, {form.kind}")
    return ["body: answer | calls", schema, *_calls_rules(tokenizer, form, tools, several)]


def _tools_named(tools: Sequence[Tool], name: str) -> list[Tool]:
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise GenerationError(f"tool_choice names the tool {name!r:.80}, which is not among the tools")
    return found


def _calls_rules(tokenizer: Any, form: ToolFormat, tools: Sequence[Tool], several: bool) -> list[str]:
    """Returns the rule `calls`, for one call or, if `several`, up to `MOST_CALLS`; and the rules it needs."""
    start = mark_rule(tokenizer, form.start) if form.start else ""
    most = MOST_CALLS if several and form.start else 1
    between = '"\\n"' if form.kind == "tags" else _text_before_call_rule(form)
    if _groups_calls(form):
        calls = f"{start} {_after_start_rule(tokenizer, form, most)}"
    else:
        calls = (
            f"({start} after_start) ({between} {start} after_start){{0,{most - 1}}}"
            if most > 1
            else f"{start} after_start"
        )
    return [f"calls: {calls}", *_after_start_rules(tokenizer, form, tools, most)]


def _after_start_rules(tokenizer: Any, form: ToolFormat, tools: Sequence[Tool], most: int) -> list[str]:
    """Returns the rule `after_start`, for the text after a start mark, and the rules it needs. most: maximum calls."""
    choices = " | ".join(f"call_{i}" for i in range(len(tools)))
    calls = [rule for i, tool in enumerate(tools) for rule in _call_rules(tokenizer, form, tool, f"call_{i}")]
    return [f"after_start: {_after_start_rule(tokenizer, form, most)}", f"call: {choices}", *calls]


def _after_start_rule(tokenizer: Any, form: ToolFormat, most: int) -> str:
    """Returns the rule for the text after a start mark. most: maximum number of calls there."""
    if form.kind == "tags":
        return f'"\\n" call "\\n" {mark_rule(tokenizer, form.end)}'
    if form.kind == "list":
        more = _repeat_rule('", " call', most - 1)
        return f'" "? "[" call {more} "]"'
    if form.kind in marked_calls.FORMATS:
        more = _repeat_rule("call", most - 1) if _groups_calls(form) else ""
        return f"{_text_before_call_rule(form)} call {more} {mark_rule(tokenizer, form.end)}"
    return "call"


def _groups_calls(form: ToolFormat) -> bool:
    marked = marked_calls.FORMATS.get(form.kind)
    return form.kind == "list" if marked is None else marked.grouped


def _text_before_call_rule(form: ToolFormat) -> str:
    """Returns the rule for the text before a call in a format with marked arguments, "" if there is none."""
    return marked_calls.rule_before_first_call(form.kind) if form.kind in marked_calls.FORMATS else ""


def _repeat_rule(rule: str, most: int) -> str:
    return f"({rule}){{0,{most}}}" if most else ""


def _call_rules(tokenizer: Any, form: ToolFormat, tool: Tool, name: str) -> list[str]:
    """Returns the rule called `name` for a call of a tool, without the marks around the call, and the rules it needs.

    If the tool is not strict, unknown keywords of its schema are ignored, and an object whose schema lists properties
    can have no other properties.
    """
    if form.kind in marked_calls.FORMATS:
        return marked_calls.marked_call_rules(tokenizer, form.kind, form.end, tool, name)
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
    said = {**_EMPTY_OBJECT, **{key: value for key, value in parameters.items() if key not in _ANNOTATIONS}}
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
