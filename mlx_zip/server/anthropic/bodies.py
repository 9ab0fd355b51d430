"""Bodies of Anthropic's Messages: what a request may hold, and the `Turn` that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_zip.server.anthropic_blocks import Message, SystemText, messages_of, system_text
from mlx_zip.server.bodies import Size, Stops
from mlx_zip.server.fields import (
    KNOWN,
    OTHER,
    Body,
    Many,
    OtherTool,
    PackNames,
    as_turn_pack,
    check_tools,
    joined_system,
    left_out,
    other_than,
    thinking_options,
)
from mlx_zip.server.turn import Tool, Turn


class CustomTool(Body):
    """A tool that the model may call."""

    harmless = frozenset(
        {"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples"}
    )

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The tool as a `Turn` takes it."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


AnyTool = Annotated[
    Annotated[CustomTool, Tag(KNOWN)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(other_than("custom"))
]


class ToolChoice(Body):
    """Which tools are called. name: of the tool that type "tool" chooses."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model reasons. The budget is passed to the chat template; nothing else enforces it.

    display: "omitted" leaves the text of the reasoning out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options by which chat templates know it; adaptive leaves it to the model."""
        budget = {} if self.budget_tokens is None else {"thinking_budget": self.budget_tokens}
        return {} if self.type == "adaptive" else {"enable_thinking": self.type == "enabled", **budget}


class OutputSchema(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountBody(Body):
    """A request to count tokens. Fields of `harmless` have no effect; others that are not here are refused."""

    harmless = frozenset(
        {"cache_control", "speed", "user_profile_id", "workspace_id", "betas", "context_management", "metadata"}
    )
    most_prompts = 1

    model: str
    messages: Many[Message] = Field(min_length=1)
    system: str | Many[SystemText] | None = None
    tools: Many[AnyTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputSchema | None = None
    pack: PackNames | None = None
    mcp_servers: list[None] = Field(default_factory=list, max_length=0)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that can be called."""
        return [tool.tool for tool in self.tools if isinstance(tool, CustomTool)]

    @property
    def choice(self) -> str:
        """The choice of tools as a `Turn` takes it."""
        choice = self.tool_choice
        return {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)


class MessagesBody(CountBody):
    """A request for a message."""

    harmless = CountBody.harmless | {"service_tier", "inference_geo", "diagnostics"}

    max_tokens: Size
    stream: bool = False
    stop_sequences: Stops = Field(default_factory=list)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    container: None = None


def turn_of(body: CountBody) -> Turn:
    """Returns the turn that a body asks for, or whose prompt's tokens it wants counted.

    Raises `BodyError` for blocks that do not follow each other, and for tools that contradict each other.
    """
    check_tools([tool.name for tool in body.callable_tools], body.choice)
    messages, prefill = messages_of(body.messages)
    output = body.output_format or body.output_config.format
    thinking = body.thinking.options if body.thinking else {}
    return Turn(
        messages=joined_system([*_system(body.system), *messages]),
        prefill=prefill,
        tools=body.callable_tools,
        left_out=left_out(body.tools, body.choice),
        tool_choice=body.choice,
        parallel_tool_calls=not body.tool_choice.disable_parallel_tool_use,
        schema=output.schema_ if output else None,
        template_options=thinking_options(body.output_config.effort) | thinking,
        pack=as_turn_pack(body.pack),
        **(_limits(body) if isinstance(body, MessagesBody) else {}),
    )


def _system(system: str | Sequence[SystemText] | None) -> list[dict[str, Any]]:
    """Returns the system prompt as a list of at most one message."""
    text = system_text(system or "")
    return [{"role": "system", "content": text}] if text else []


def _limits(body: MessagesBody) -> dict[str, Any]:
    """Returns a turn's limits and sampling options."""
    sampling = {"temp": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }
