"""Bodies of OpenAI's Responses: what a request may hold, and the `Turn` that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_zip.server.bodies import Size
from mlx_zip.server.fields import (
    KNOWN,
    OTHER,
    Body,
    JsonObject,
    Many,
    OtherTool,
    PackNames,
    PlainText,
    as_turn_pack,
    at_most,
    check_tools,
    joined_system,
    left_out,
    other_than,
    thinking_options,
)
from mlx_zip.server.responses_items import Item, messages_of
from mlx_zip.server.turn import Tool, Turn

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
        """The function as a `Turn` takes it."""
        return Tool(self.name, self.description, self.parameters, self.strict)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag(KNOWN)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(other_than("function"))
]


class NamedFunction(Body):
    """A choice of one function."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """A choice among some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedFunction]


class JsonSchema(Body):
    """JSON that follows a schema. The schema is followed whether or not `strict` is set."""

    harmless = frozenset({"strict", "description"})

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")


class TextConfig(Body):
    """How the text is written. verbosity has no effect."""

    harmless = frozenset({"verbosity"})

    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] = PlainText(type="text")

    @property
    def schema_followed(self) -> Mapping[str, Any] | None:
        """The schema that the text must follow, {} for any object, None for text."""
        if isinstance(self.format, JsonSchema):
            return self.format.schema_
        return {} if isinstance(self.format, JsonObject) else None


class ReasoningConfig(Body):
    """How much the model shall reason. The answer holds all of its reasoning, whatever summary is asked for."""

    harmless = frozenset({"summary", "generate_summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class StreamOptions(Body):
    """Options of a stream. Nothing is obfuscated."""

    harmless = frozenset({"include_obfuscation"})


class ResponseBody(Body):
    """A request for a response. Fields of `harmless` have no effect; others that are not here are refused."""

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
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    pack: PackNames | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(16)
    ] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    moderation: None = None

    @property
    def items(self) -> list[Any]:
        """The input's items; text is one message of the user."""
        if isinstance(self.input, list):
            return [item.model_dump(exclude_none=True) for item in self.input]
        return [{"type": "message", "role": "user", "content": self.input}]

    @property
    def logprobs(self) -> int | None:
        """How many likely tokens to report per token, None for no log-probabilities at all."""
        return self.top_logprobs or 0 if self.top_logprobs is not None or LOGPROBS in self.include else None

    @property
    def choice(self) -> str:
        """The choice of tools as a `Turn` takes it."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else self.tool_choice.mode

    @property
    def functions(self) -> list[Tool]:
        """The tools that can be called."""
        return [tool.tool for tool in self.tools if isinstance(tool, FunctionTool)]

    @property
    def allowed(self) -> list[Tool]:
        """The tools that may be called."""
        if not isinstance(self.tool_choice, AllowedTools):
            return self.functions
        names = [tool.name for tool in self.tool_choice.tools]
        for name in names:
            check_tools([tool.name for tool in self.functions], name)
        return [tool for tool in self.functions if tool.name in names]


def turn_of(body: ResponseBody, items: Sequence[Mapping[str, Any]], before: int = 0) -> Turn:
    """Returns the turn that a body asks for. items: the conversation, of which the last are the body's; before: how
    many of them precede those of the body.

    Raises `BodyError` for items that do not follow each other, and for tools that contradict each other.
    """
    check_tools([tool.name for tool in body.functions], body.choice)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    sampling = {"temp": body.temperature, "top_p": body.top_p}
    return Turn(
        messages=joined_system([*system, *messages_of(items, before)]),
        tools=body.allowed,
        left_out=left_out(body.tools, body.choice),
        tool_choice=body.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        schema=body.text.schema_followed,
        max_tokens=-1 if body.max_output_tokens is None else body.max_output_tokens,
        sampling={name: value for name, value in sampling.items() if value is not None},
        logprobs=body.logprobs,
        template_options=thinking_options(body.reasoning.effort),
        pack=as_turn_pack(body.pack),
    )
