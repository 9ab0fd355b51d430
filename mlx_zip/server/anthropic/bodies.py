"""Request bodies of Anthropic's Messages API, whose messages consist of blocks, and the `Turn` made of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_zip.server.answers.turn import Tool, Turn
from mlx_zip.server.fields import (
    Body,
    BodyError,
    Fraction,
    Known,
    LenientBody,
    Many,
    Other,
    PackNames,
    Size,
    Stops,
    check_tools,
    join_system_messages,
    known_if,
    left_out_labels,
    template_call,
    thinking_options,
)

_TEXTS = ("content", "reasoning_content")  # fields of a message that are lists of pieces until `_join_pieces`


class SystemText(LenientBody):
    """A block of text."""

    type: Literal["text"]
    text: str


class ToolUse(LenientBody):
    """A block with a tool call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(LenientBody):
    """A block with what a tool returned. is_error: whether the content describes an error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[SystemText] = ""
    is_error: bool = False


class ThinkingBlock(LenientBody):
    """A block of the model's reasoning. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(LenientBody):
    """A block of encrypted reasoning from another server; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    SystemText | ToolUse | ToolResult | ThinkingBlock | RedactedThinking,
    Field(discriminator="type"),
]


class Message(LenientBody):
    """A message. content: blocks, or a string, which stands for one block of text."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


def join_text_blocks(content: str | Sequence[SystemText]) -> str:
    """Returns the text of a system prompt or of a tool's result. Blocks become paragraphs."""
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def split_template_messages(given: Sequence[Message]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns messages for chat templates, and the answer's prefill, None for none.

    A last message of the assistant is the prefill. Adjacent messages of one role are joined. Raises `BodyError` if a
    tool's result has no call before it, a block does not fit the role of its message, or the prefill is not only text.
    """
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, message in enumerate(given):
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [SystemText(type="text", text=blocks)]
        if not blocks and message.role == "user":
            raise BodyError("a message of the user must not be empty", f"messages.{i}.content")
        if message.role == "assistant":
            _add_assistant_blocks(messages, blocks, f"messages.{i}.content", calls)
        else:
            _add_user_blocks(messages, message.role, blocks, f"messages.{i}.content", calls)
    messages = [_join_pieces(message) for message in messages]
    return _split_prefill(messages) if given[-1].role == "assistant" else (messages, None)


def _join_pieces(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with its pieces of text joined; adding them one by one would copy a long text each time."""
    return {name: "".join(value) if name in _TEXTS else value for name, value in message.items()}


def _add_assistant_blocks(messages: list[dict[str, Any]], blocks: Sequence[Any], place: str, calls: set[str]) -> None:
    """Adds blocks of the model's message. place: path of `blocks`. calls: ids of calls so far; new ones are added."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    answer = messages[-1]
    for i, block in enumerate(blocks):
        match block:
            case SystemText():
                answer["content"].append(block.text)
            case ThinkingBlock():
                answer.setdefault("reasoning_content", []).append(block.thinking)
            case ToolUse():
                calls.add(block.id)
                answer.setdefault("tool_calls", []).append(template_call(block.id, block.name, block.input))
            case ToolResult():
                raise BodyError("a tool_result belongs into a message of the user", f"{place}.{i}")


def _add_user_blocks(
    messages: list[dict[str, Any]], role: str, blocks: Sequence[Any], place: str, calls: set[str]
) -> None:
    """Adds texts and tool results of a user or system message. place: path of `blocks`. calls: ids of known calls."""
    for i, block in enumerate(blocks):
        match block:
            case SystemText():
                _add_text_message(messages, role, block.text)
            case ToolResult() if block.tool_use_id not in calls:
                fault = f"there is no tool_use {block.tool_use_id!r} before this tool_result"
                raise BodyError(fault, f"{place}.{i}.tool_use_id")
            case ToolResult() if role == "user":
                text = ("Error: " if block.is_error else "") + join_text_blocks(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": [text]})
            case _:
                raise BodyError(f"a message of the {role} cannot hold {block.type!r}", f"{place}.{i}")


def _add_text_message(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += ["\n\n", text]
    else:
        messages.append({"role": role, "content": [text]})


def _split_prefill(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    last: Mapping[str, Any] = messages[-1]
    if last.keys() != {"role", "content"}:
        raise BodyError(
            "the beginning of an answer can hold text only; results of tools must follow their calls", "messages"
        )
    return messages[:-1], last["content"] or None


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
        """The tool in the form that `Turn.tools` takes."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


AnyTool = Annotated[Known[CustomTool] | Other, known_if("custom")]


class ToolChoice(Body):
    """Which tools the model must or may call. name: name of the tool to call if the type is "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Whether the model reasons. budget_tokens: passed to the chat template, and not enforced otherwise.

    display: "omitted" leaves the text of the reasoning out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the chat template; {} for "adaptive", which leaves the choice to the model."""
        budget = {} if self.budget_tokens is None else {"thinking_budget": self.budget_tokens}
        return {} if self.type == "adaptive" else {"enable_thinking": self.type == "enabled", **budget}


class OutputSchema(Body):
    """Demands an answer in JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Settings of the answer. effort: how much the model reasons. format: schema of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountBody(Body):
    """A request to count tokens. Fields in `harmless` have no effect; unknown fields are refused."""

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
        """The tools that the model can call, without tools of types that this server cannot run."""
        return [tool.tool for tool in self.tools if isinstance(tool, CustomTool)]

    @property
    def choice(self) -> str:
        """The value of `Turn.tool_choice`."""
        choice = self.tool_choice
        return {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)


class MessagesBody(CountBody):
    """A request for a message."""

    harmless = CountBody.harmless | {"service_tier", "inference_geo", "diagnostics"}

    max_tokens: Size
    stream: bool = False
    stop_sequences: Stops = Field(default_factory=list)
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: int | None = Field(None, ge=0)
    container: None = None


def make_messages_turn(body: CountBody) -> Turn:
    """Returns the turn that a body asks for.

    Raises `BodyError` if a block is in a wrong place or the tools contradict each other or the tool choice.
    """
    check_tools([tool.name for tool in body.callable_tools], body.choice)
    messages, prefill = split_template_messages(body.messages)
    output = body.output_format or body.output_config.format
    thinking = body.thinking.options if body.thinking else {}
    return Turn(
        messages=join_system_messages([*_system_messages(body.system), *messages]),
        prefill=prefill,
        tools=body.callable_tools,
        left_out=left_out_labels(body.tools, body.choice),
        tool_choice=body.choice,
        parallel_tool_calls=not body.tool_choice.disable_parallel_tool_use,
        schema=output.schema_ if output else None,
        template_options=thinking_options(body.output_config.effort) | thinking,
        pack=body.pack,
        **(_limits_and_sampling(body) if isinstance(body, MessagesBody) else {}),
    )


def _system_messages(system: str | Sequence[SystemText] | None) -> list[dict[str, Any]]:
    text = join_text_blocks(system or "")
    return [{"role": "system", "content": text}] if text else []


def _limits_and_sampling(body: MessagesBody) -> dict[str, Any]:
    sampling = {"temp": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }
