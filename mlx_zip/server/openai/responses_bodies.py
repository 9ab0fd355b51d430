"""Request bodies of OpenAI's Responses API: items of a conversation, other fields, and the `Turn` made of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_zip.server.answers.turn import Tool, Turn
from mlx_zip.server.fields import (
    Body,
    BodyError,
    Fraction,
    JsonObject,
    Known,
    LenientBody,
    Many,
    Other,
    PackNames,
    PlainText,
    RefusalPart,
    Size,
    at_most_fields,
    check_tools,
    join_system_messages,
    known_if,
    left_out_labels,
    new_prefixed_id,
    parse_arguments,
    template_call,
    thinking_options,
)

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(LenientBody):
    """A piece of a message's text. Its annotations and log-probabilities are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Message(LenientBody):
    """A message of the user, the system, the developer or the model. A developer's message counts as the system's."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Many[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]
    id: str | None = None
    status: Status | None = None


class FunctionCall(LenientBody):
    """A call that the model made. arguments: JSON text of an object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(LenientBody):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextPart]
    id: str | None = None
    status: Status | None = None


class SummaryText(LenientBody):
    """A piece of the model's reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(LenientBody):
    """The model's reasoning. Encrypted content from another server is ignored."""

    type: Literal["reasoning"]
    summary: Many[SummaryText] = Field(default_factory=list)
    content: Many[SummaryText] = Field(default_factory=list)
    id: str | None = None
    status: Status | None = None


class ItemReference(LenientBody):
    """The id of an item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _set_default_item_type(given: Any) -> Any:
    """Returns an item with its type, which is "message" if the item has none."""
    return {**given, "type": "message"} if isinstance(given, Mapping) and given.get("type") is None else given


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | ReasoningItem | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(_set_default_item_type),
]


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def item_with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request's item in the form of a response's item: with an id, a status, and content in parts."""
    named = {"id": new_prefixed_id(_PREFIXES.get(item["type"], "item")), "status": "completed", **item}
    if isinstance(item.get("content"), str):
        notes = {"annotations": []} if item["role"] == "assistant" else {}
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        named["content"] = [{"type": kind, "text": item["content"], **notes}]
    return named


def items_to_template_messages(items: Sequence[Mapping[str, Any]], before: int = 0) -> list[dict[str, Any]]:
    """Returns items as messages for chat templates. Reasoning and the text and calls after it become one message.

    before: number of items from earlier responses. Raises `BodyError` if an output has no call before it, or a call's
    arguments are not a JSON object.
    """
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, item in enumerate(items):
        kind, place = item["type"], f"input.{i - before}"
        if kind == "message":
            _add_message(messages, item)
        elif kind == "reasoning":
            pieces = item.get("content") or item.get("summary") or []
            messages.append({"role": "assistant", "reasoning_content": _join_content_text(pieces, "\n"), "content": ""})
        elif kind == "function_call":
            calls.add(item["call_id"])
            _add_call(messages, item, f"{place}.arguments")
        elif item["call_id"] not in calls:
            raise BodyError(f"there is no call {item['call_id']!r} before this output", f"{place}.call_id")
        else:
            text = _join_content_text(item["output"], "\n")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Adds a message. Text of the model is added to the message of the reasoning before it, if there is one."""
    if item["role"] != "assistant":
        role = "user" if item["role"] == "user" else "system"
        messages.append({"role": role, "content": _join_content_text(item["content"], "\n")})
        return
    text = _join_content_text(item["content"], "")
    if messages and messages[-1].keys() == {"role", "reasoning_content", "content"} and not messages[-1]["content"]:
        messages[-1]["content"] = text
    else:
        messages.append({"role": "assistant", "content": text})


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Adds a call to the last message, or to a new one if the last is not the model's. place: path for errors."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = template_call(item["call_id"], item["name"], parse_arguments(item["arguments"], place))
    messages[-1].setdefault("tool_calls", []).append(call)


def _join_content_text(content: str | Sequence[Mapping[str, Any]], between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


LOGPROBS = "message.output_text.logprobs"
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class FunctionTool(Body):
    """A function that the model may call."""

    harmless = frozenset({"defer_loading", "allowed_callers", "output_schema"})

    type: Literal["function"]
    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The function in the form that `Turn.tools` takes."""
        return Tool(self.name, self.description, self.parameters, self.strict)


AnyTool = Annotated[Known[FunctionTool] | Other, known_if("function")]


class NamedFunction(Body):
    """Names one function."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Allows calls of some functions only. mode: "required" forces a call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedFunction]


class JsonSchema(Body):
    """Demands an answer in JSON that follows a schema, whether `strict` is set or not."""

    harmless = frozenset({"strict", "description"})

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")


class TextConfig(Body):
    """Settings of the answer's text. `verbosity` has no effect."""

    harmless = frozenset({"verbosity"})

    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] = PlainText(type="text")

    @property
    def schema_followed(self) -> Mapping[str, Any] | None:
        """The schema that the text must follow, {} for any object, None for text."""
        if isinstance(self.format, JsonSchema):
            return self.format.schema_
        return {} if isinstance(self.format, JsonObject) else None


class ReasoningConfig(Body):
    """How much the model reasons. The answer holds the whole reasoning, whatever summary is requested."""

    harmless = frozenset({"summary", "generate_summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class StreamOptions(Body):
    """Options of a stream. Nothing is obfuscated."""

    harmless = frozenset({"include_obfuscation"})


class ResponseBody(Body):
    """A request for a response. Fields in `harmless` have no effect; unknown fields are refused."""

    harmless = frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "service_tier",
            "client_metadata",
            "context_management",
        }
    )
    most_prompts = 1

    model: str = "default_model"
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Many[AnyTool] = Field(default_factory=list)
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]
    ) = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    max_output_tokens: Size | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Fraction | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    pack: PackNames | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most_fields(16)
    ] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    moderation: None = None

    @property
    def items(self) -> list[Any]:
        """The items of the input; a text counts as one message of the user."""
        if isinstance(self.input, list):
            return [item.model_dump(exclude_none=True) for item in self.input]
        return [{"type": "message", "role": "user", "content": self.input}]

    @property
    def logprobs(self) -> int | None:
        """Number of likely tokens to report per token, None for no log-probabilities at all."""
        return self.top_logprobs or 0 if self.top_logprobs is not None or LOGPROBS in self.include else None

    @property
    def choice(self) -> str:
        """The value of `Turn.tool_choice`."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else self.tool_choice.mode

    @property
    def functions(self) -> list[Tool]:
        """All functions of the request, without tools of other types."""
        return [tool.tool for tool in self.tools if isinstance(tool, FunctionTool)]

    @property
    def allowed_tools(self) -> list[Tool]:
        """The functions that `tool_choice` allows. Raises `BodyError` if one of them does not exist."""
        if not isinstance(self.tool_choice, AllowedTools):
            return self.functions
        names = [tool.name for tool in self.tool_choice.tools]
        for name in names:
            check_tools([tool.name for tool in self.functions], name)
        return [tool for tool in self.functions if tool.name in names]


def make_response_turn(body: ResponseBody, items: Sequence[Mapping[str, Any]], before: int = 0) -> Turn:
    """Returns the turn that a body asks for. items: the conversation, which ends with the body's items.

    before: number of items before those of the body. Raises `BodyError` if items are in a wrong order, or tools
    contradict each other or the tool choice.
    """
    check_tools([tool.name for tool in body.functions], body.choice)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    sampling = {"temp": body.temperature, "top_p": body.top_p}
    return Turn(
        messages=join_system_messages([*system, *items_to_template_messages(items, before)]),
        tools=body.allowed_tools,
        left_out=left_out_labels(body.tools, body.choice),
        tool_choice=body.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        schema=body.text.schema_followed,
        max_tokens=-1 if body.max_output_tokens is None else body.max_output_tokens,
        sampling={name: value for name, value in sampling.items() if value is not None},
        logprobs=body.logprobs,
        template_options=thinking_options(body.reasoning.effort),
        pack=body.pack,
    )
