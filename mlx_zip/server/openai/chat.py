"""OpenAI's chat completions API, streamed and whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.server.answers.turn import (
    Delta,
    Done,
    Reasoning,
    Text,
    TokenLogprob,
    Tool,
    ToolCall,
    Turn,
    Waiting,
    shown_token_json,
    vendor_json,
)
from mlx_zip.server.core import Core
from mlx_zip.server.fields import (
    Body,
    BodyError,
    JsonObject,
    Known,
    LenientBody,
    Many,
    Other,
    PlainText,
    RefusalPart,
    Size,
    check_tools,
    join_system_messages,
    known_if,
    left_out_labels,
    parse_arguments,
    template_call,
    thinking_options,
)
from mlx_zip.server.http import (
    BodyRoute,
    json_response,
    run_unless_client_gone,
    stream_response,
)
from mlx_zip.server.openai.choices import (
    Answers,
    CompletionFields,
    completion_frames,
    gather_deltas,
    logprobs_json,
    whole_completion,
)


def chat_routes(core: Core) -> list[Route]:
    """Returns the routes of chat completions."""

    async def chat_completions(request: Request, asked: ChatBody) -> Response:
        """Answers a conversation, as OpenAI's chat completions do; mlx_zip.tokens: true adds the answer's tokens."""
        answers = core.answers(asked.turns(core))
        if asked.stream:
            head = ("chatcmpl", "chat.completion.chunk")
            frames = completion_frames(core, asked, head, answers, partial(_chunk_fields, asked, Counter()))
            return await stream_response(request, core, frames)
        return json_response(await run_unless_client_gone(request, _whole_chat_completion(core, asked, answers)))

    paths = ("/v1/chat/completions", "/chat/completions")
    return [BodyRoute(core, path, ChatBody, chat_completions) for path in paths]


async def _whole_chat_completion(core: Core, asked: ChatBody, answers: Answers) -> dict[str, Any]:
    gathered = await gather_deltas(answers, asked.n)
    choices = [_chat_choice_json(asked, i, deltas) for i, deltas in enumerate(gathered)]
    found = whole_completion(core, asked, ("chatcmpl", "chat.completion"), choices, gathered)
    if asked.mlx_zip.tokens:
        texts = [delta for delta in gathered[0] if isinstance(delta, Text)]
        found["mlx_zip"]["tokens"] = [shown_token_json(token) for text in texts for token in text.tokens]
    return found


def _chat_choice_json(asked: ChatBody, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns a choice that is not streamed. deltas: the whole answer."""
    texts = [delta for delta in deltas if isinstance(delta, Text)]
    thoughts = [delta.text for delta in deltas if isinstance(delta, Reasoning)]
    calls = [_tool_call_json(delta) for delta in deltas if isinstance(delta, ToolCall)]
    content = "".join(text.text for text in texts) if texts or not calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    logprobs = _chat_logprobs_json(asked, [one for text in texts for one in text.logprobs])
    reason = next(delta.reason for delta in deltas if isinstance(delta, Done))
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _chat_logprobs_json(asked: ChatBody, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": logprobs_json(found), "refusal": None} if asked.logprobs else None


def _tool_call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chunk_fields(asked: ChatBody, calls: Counter[int], index: int, delta: Delta) -> dict[str, Any] | str | None:
    """Returns what `completion_frames` sends for a delta. calls: number of calls of each choice so far."""
    part: dict[str, Any] = {}
    logprobs, reason, more = None, None, {}
    match delta:
        case Waiting() if delta.total:
            return f"reading the prompt {delta.read}/{delta.total}"
        case Waiting() if delta.waits_for:
            return "waiting for another model's answers to end"
        case Waiting():
            part = {"role": "assistant", "content": ""}
        case Text():
            part, logprobs = {"content": delta.text}, _chat_logprobs_json(asked, delta.logprobs)
            if delta.tokens:
                more = {"mlx_zip": {"tokens": [shown_token_json(token) for token in delta.tokens]}}
        case Reasoning():
            part = {"reasoning_content": delta.text}
        case ToolCall():
            part = {"tool_calls": [{"index": calls[index], **_tool_call_json(delta)}]}
            calls[index] += 1
        case Done():
            reason, more = delta.reason, {"mlx_zip": vendor_json(delta)}
        case _:
            return None
    return {"choices": [{"index": index, "delta": part, "logprobs": logprobs, "finish_reason": reason}], **more}


# ---- request bodies, and the `Turn` made of a body

_RESERVED_OPTIONS = frozenset(
    {
        "tools",
        "chat_template",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    }
)
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(LenientBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class CalledFunction(LenientBody):
    """The function that a model called. arguments: JSON text of an object."""

    name: str
    arguments: str


class Call(LenientBody):
    """A call of a tool in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Message(LenientBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] = ""
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Many[Call] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def check_role_fields(self, place: str) -> None:
        """Raises `BodyError` if the role lacks a field or cannot have one that is set. place: path of the message."""
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise BodyError(f"a message of the role {self.role} needs this field", f"{place}.content")
        for name in ("tool_calls", "reasoning_content", "refusal"):
            if getattr(self, name) and self.role != "assistant":
                raise BodyError(f"a message of the role {self.role} does not have this field", f"{place}.{name}")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise BodyError("messages of the role tool have this field, and no others", f"{place}.tool_call_id")

    def as_template_message(self, place: str) -> dict[str, Any]:
        """Returns the message in the form that chat templates take. Raises `BodyError`. place: path of the message."""
        self.check_role_fields(place)
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": self._joined_text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [
                _call_for_template(call, f"{place}.tool_calls.{i}") for i, call in enumerate(self.tool_calls)
            ]
        return turn

    @property
    def _joined_text(self) -> str:
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class FunctionTool(Body):
    """A function that the model may call, in the form of chat completions."""

    harmless = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


AnyTool = Annotated[Known[FunctionTool] | Other, known_if("function")]


class ChosenFunction(Body):
    """The name of the function to call."""

    name: str


class ChosenTool(Body):
    """Forces a call of one function."""

    type: Literal["function"]
    function: ChosenFunction


class NamedSchema(Body):
    """A JSON schema. The answer follows the schema whether `strict` is set or not."""

    name: Name
    description: str = ""
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class JsonSchema(Body):
    """Demands an answer in JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class Prediction(Body):
    """Text that the answer will probably consist of, for example the file that is to be edited."""

    type: Literal["content"]
    content: str | Many[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class VendorFields(Body):
    """The field `mlx_zip` of a request. tokens: whether the answer says which tokens its text consists of."""

    tokens: bool = False


class ChatBody(CompletionFields):
    """A request for a chat completion."""

    harmless = CompletionFields.harmless | {"verbosity", "context_management"}
    most_prompts = 2  # the prompt, and a prediction that is at most as long

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Size | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[AnyTool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | ChosenTool = "auto"
    functions: list[None] = Field(default_factory=list, max_length=0)
    function_call: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    response_format: Format | None = None
    prediction: Prediction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: Many[Literal["text"]] = Field(default_factory=lambda: ["text"])
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mlx_zip: VendorFields = Field(default_factory=VendorFields)

    def check(self, core: Core) -> None:
        """Raises `RequestError` if the model is unknown, `BodyError` if fields contradict each other or the model."""
        super().check(core)
        if self.top_logprobs is not None and not self.logprobs:
            raise BodyError("this field needs logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BodyError("this field and max_completion_tokens say different numbers", "max_tokens")
        if self.mlx_zip.tokens and self.n > 1:
            raise BodyError("only one answer can show its tokens, so n must be 1", "mlx_zip.tokens")
        check_tools([tool.function.name for tool in self._function_tools], self._tool_choice_name)

    @property
    def _function_tools(self) -> list[FunctionTool]:
        return [tool for tool in self.tools if isinstance(tool, FunctionTool)]

    @property
    def _tool_choice_name(self) -> str:
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name

    def turns(self, core: Core) -> list[Turn]:
        """Returns one turn for each of the `n` answers. Raises what `check` and `as_template_message` raise."""
        self.check(core)
        messages = join_system_messages(
            [one.as_template_message(f"messages.{i}") for i, one in enumerate(self.messages)]
        )
        return [self._make_turn(core, messages, choice) for choice in range(self.n)]

    def _make_turn(self, core: Core, messages: Sequence[Mapping[str, Any]], choice: int) -> Turn:
        given = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return Turn(
            messages=messages,
            tools=[Tool(**tool.function.model_dump()) for tool in self._function_tools],
            left_out=left_out_labels(self.tools, self._tool_choice_name),
            tool_choice=self._tool_choice_name,
            parallel_tool_calls=self.parallel_tool_calls,
            schema=_response_schema(self.response_format),
            max_tokens=core.answer_max_tokens(given, tools=bool(self.tools)),
            sampling=self.sampling(choice),
            stop=self.stops,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_options=thinking_options(self.reasoning_effort)
            | _checked_template_options(self.chat_template_kwargs),
            pack=self.pack,
            show=self.mlx_zip.tokens,
            prediction="" if self.prediction is None else self.prediction.text,
        )


def _checked_template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments in chat_template_kwargs. Raises `BodyError` if a request must not set one of them."""
    if taken := sorted(given.keys() & _RESERVED_OPTIONS):
        raise BodyError(f"{taken[0]} cannot be set here", "chat_template_kwargs")
    return dict(given)


def _response_schema(form: PlainText | JsonObject | JsonSchema | None) -> dict[str, Any] | None:
    if isinstance(form, JsonSchema):
        return form.json_schema.json_schema
    return {} if isinstance(form, JsonObject) else None


def _call_for_template(call: Call, place: str) -> dict[str, Any]:
    """Returns a call in the form that chat templates take. Raises `BodyError` if its arguments are no JSON object."""
    arguments = parse_arguments(call.function.arguments, f"{place}.function.arguments")
    return template_call(call.id, call.function.name, arguments)
