"""Messages of Anthropic's dialect, made of blocks, and the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_zip.server.fields import BodyError, Many, Said

_TEXTS = ("content", "reasoning_content")  # of a message, lists of pieces while messages are made


class SystemText(Said):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ToolUse(Said):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Said):
    """What a tool returned. is_error: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[SystemText] = ""
    is_error: bool = False


class ThinkingBlock(Said):
    """What the model reasoned. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Said):
    """Reasoning of another server, which cannot be read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    SystemText | ToolUse | ToolResult | ThinkingBlock | RedactedThinking,
    Field(discriminator="type"),
]


class Message(Said):
    """A message. Text is the same as one block of text."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


def system_text(content: str | Sequence[SystemText]) -> str:
    """Returns the text of a system prompt, or of what a tool returned; its blocks are paragraphs."""
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def messages_of(given: Sequence[Message]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns messages for chat templates, and how the answer begins if the last message is the model's.

    Messages of one role in a row are joined. Raises `BodyError` for a result without its call, for blocks that do not
    fit the role, and for a beginning that holds more than text.
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
            _add_answer(messages, blocks, f"messages.{i}.content", calls)
        else:
            _add_question(messages, message.role, blocks, f"messages.{i}.content", calls)
    messages = [_joined(message) for message in messages]
    return _without_prefill(messages) if given[-1].role == "assistant" else (messages, None)


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with texts in place of their pieces: joined once, as adding to a long text copies it."""
    return {name: "".join(value) if name in _TEXTS else value for name, value in message.items()}


def _add_answer(messages: list[dict[str, Any]], blocks: Sequence[Any], place: str, calls: set[str]) -> None:
    """Adds a message of the model. place: path of its blocks. calls: ids of the calls so far, extended by its calls."""
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
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
            case ToolResult():
                raise BodyError("a tool_result belongs into a message of the user", f"{place}.{i}")


def _add_question(
    messages: list[dict[str, Any]], role: str, blocks: Sequence[Any], place: str, calls: set[str]
) -> None:
    """Adds the text and the results that a message of the user or the system holds. place: path of its blocks."""
    for i, block in enumerate(blocks):
        match block:
            case SystemText():
                _add_text(messages, role, block.text)
            case ToolResult() if block.tool_use_id not in calls:
                fault = f"there is no tool_use {block.tool_use_id!r} before this tool_result"
                raise BodyError(fault, f"{place}.{i}.tool_use_id")
            case ToolResult() if role == "user":
                text = ("Error: " if block.is_error else "") + system_text(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": [text]})
            case _:
                raise BodyError(f"a message of the {role} cannot hold {block.type!r}", f"{place}.{i}")


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    """Adds text, to the message before if that is of the same role."""
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += ["\n\n", text]
    else:
        messages.append({"role": role, "content": [text]})


def _without_prefill(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the messages without the last, and its text, None if that is empty."""
    last: Mapping[str, Any] = messages[-1]
    if last.keys() != {"role", "content"}:
        raise BodyError(
            "the beginning of an answer can hold text only; results of tools must follow their calls", "messages"
        )
    return messages[:-1], last["content"] or None
