"""What all request bodies share: typed fields, fields without effect, and errors that name the field at fault.

Unknown fields are refused, because a client would not notice that a field was ignored. Fields that many clients send
and that change nothing are accepted; the guide lists them. In the messages of a conversation all unknown fields are
ignored, because clients add fields of their own to the answers that they send back. A tool that this server cannot run
is an error if a call is forced; otherwise it is left out of the prompt and named in the answer.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, from_json

from mlx_zip.server.errors import RequestError

Some = TypeVar("Some", bound=BaseModel)
Item = TypeVar("Item")
MOST_IN_LIST = 10_000
MOST_STOPS = 32
MOST_TOKENS = (1 << 31) - 1
Many = Annotated[list[Item], Field(max_length=MOST_IN_LIST, fail_fast=True)]  # reports only the first wrong item
NonEmptyText = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stops = Annotated[Many[NonEmptyText], Field(max_length=MOST_STOPS)]


def _check_pack_field(given: Any) -> Any:
    """Raises `ValueError` unless `given` is a name or a list; pydantic's own error would mention only one of these."""
    if not isinstance(given, str | list):
        raise ValueError("this must be the name of a pack, or a list of names")
    return given


PackNames = Annotated[
    NonEmptyText | Annotated[list[str], Field(min_length=1, max_length=16)],
    BeforeValidator(_check_pack_field),
]

_UNION_NAMES = frozenset({"str", "constrained-str", "none"})  # pydantic's names of union members, not fields
_BILLING_LINE = re.compile(r"(?m)^x-anthropic-billing-header:.*\n*")
_FAULT_WORDS = {  # pydantic's name of an error -> what a client reads
    "missing": "this field is required",
    "extra_forbidden": "this field is unknown, or not supported by this server",
    "none_required": "this field is not supported by this server",
    "model_type": "this must be an object",
    "model_attributes_type": "this must be an object",
    "dict_type": "this must be an object",
    "list_type": "this must be a list",
    **dict.fromkeys(("too_short", "string_too_short"), "this must not be empty"),  # every minimum length is 1
}


class BodyError(RequestError):
    """A request's body is invalid or not supported. param: path of the field at fault, None for the whole body."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, f"{param}: {message}" if param else message, "invalid_request", param)


class Body(BaseModel):
    """A JSON object in a request. Types are exact, unknown fields are refused, and null counts as a missing field.

    Lists are `Many` and maps use `at_most_fields`, so that a body with many faults takes no longer to check.

    harmless: fields that are accepted with any value and ignored. lenient: whether all unknown fields are ignored too.
    most_prompts: maximum number of prompts, from which the maximum size of the body follows; 0: size not checked.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    harmless: ClassVar[frozenset[str]] = frozenset()
    most_prompts: ClassVar[int] = 0
    lenient: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_fields(cls, given: Any) -> Any:
        """Drops null fields, harmless fields and unknown fields, but keeps the first unknown one unless `lenient`."""
        if not isinstance(given, Mapping):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        fields = {k: given[k] for k in given if k in known and given[k] is not None and k not in cls.harmless}
        if cls.lenient:
            return fields
        accepted = known | cls.harmless
        unknown = next((k for k in given if k not in accepted and given[k] is not None), None)
        return fields if unknown is None else {**fields, unknown: given[unknown]}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the JSON schema of what is accepted: optional fields may be null, and harmless fields are listed."""
        reference = handler(core)
        described = handler.resolve_ref_schema(reference)
        required = described.get("required", ())
        fields = {
            name: field if name in required else {"anyOf": [field, {"type": "null"}]}
            for name, field in described.get("properties", {}).items()
        }
        harmless = {name: {"description": "accepted, without effect"} for name in sorted(cls.harmless)}
        described["properties"] = {**fields, **harmless}
        described["additionalProperties"] = cls.lenient
        return reference


class LenientBody(Body):
    """A part of a conversation. Ignores unknown fields: clients add their own to the answers that they send back."""

    lenient = True


class OtherTool(LenientBody):
    """A tool of a type that this server does not support; it supports only functions, which the client runs."""

    type: str
    name: Any = None

    @property
    def label(self) -> str:
        """Label of the tool for reports: the type, and the name if the tool has one; at most 80 characters."""
        return (f"{self.type} {self.name}" if isinstance(self.name, str) else self.type)[:80]


_KNOWN, _OTHER = "tool[known]", "tool[other]"  # brackets keep these tags out of the paths of fields
Known = Annotated[Item, Tag(_KNOWN)]
Other = Annotated[OtherTool, Tag(_OTHER)]


def known_if(kind: str) -> Discriminator:
    """Returns a discriminator: tools of type `kind` or without a type are `Known`, all others `Other`."""

    def tag(given: Any) -> str:
        found = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
        return _OTHER if isinstance(found, str) and found != kind else _KNOWN

    return Discriminator(tag)


def at_most_fields(count: int) -> BeforeValidator:
    """Returns a validator that refuses a map of more than `count` fields before it validates any of them."""

    def checked(given: Any) -> Any:
        if isinstance(given, Mapping) and len(given) > count:
            raise ValueError(f"this has {len(given)} fields, and at most {count} are allowed")
        return given

    return BeforeValidator(checked)


class PlainText(Body):
    """Allows an answer of any text."""

    type: Literal["text"]


class JsonObject(Body):
    """Demands an answer that is a JSON object, with any fields."""

    type: Literal["json_object"]


class RefusalPart(LenientBody):
    """A piece of a message in which a model refused to answer; it counts as text."""

    type: Literal["refusal"]
    refusal: str


def parse_body(kind: type[Some], given: Any) -> Some:
    """Returns `given`, a request's body, as an instance of `kind`. Raises `BodyError` naming the field at fault."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = [(_field_path(fault["loc"], given), fault) for fault in error.errors(include_url=False)]
    path, fault = max(faults, key=_union_match_quality)
    raise BodyError(_describe_fault(fault), ".".join(path) or None)


def _union_match_quality(found: tuple[list[str], Any]) -> tuple[int, bool]:
    """Returns how well the union member with this fault fits: the fault's depth, and whether the value's type fits."""
    return len(found[0]), not found[1]["type"].endswith("_type")


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of a tool in the form that chat templates take."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(text: str, param: str) -> dict[str, Any]:
    """Returns the JSON object in a text, {} for no text. param: path of the text in the body.

    Raises `BodyError` if the text is no JSON object.
    """
    try:
        value = from_json(text or "{}")
    except ValueError as error:
        raise BodyError(f"the arguments are not JSON: {error}", param) from error
    if not isinstance(value, dict):
        raise BodyError("the arguments must be a JSON object", param)
    return value


def check_tools(names: Sequence[str], choice: str) -> None:
    """Raises `BodyError` if two tools have the same name or no tool fits `choice`, a value of `Turn.tool_choice`."""
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise BodyError(f"there are two tools named {twice[0]!r}", "tools")
    if choice == "required" and not names:
        raise BodyError("a tool must be called, but no tools are given", "tool_choice")
    if choice not in ("auto", "none", "required", *names):
        raise BodyError(f"there is no tool named {choice!r}", "tool_choice")


def left_out_labels(tools: Sequence[Body], choice: str) -> tuple[str, ...]:
    """Returns the labels of the tools that this server cannot run and that are left out of the prompt.

    Raises `BodyError` if there is one and `choice` forces a call, because the client may want that tool to be called.
    """
    others = [(i, tool) for i, tool in enumerate(tools) if isinstance(tool, OtherTool)]
    if others and choice not in ("auto", "none"):
        i, tool = others[0]
        raise BodyError(f"the type {tool.type!r:.80} is not supported where a call is forced", f"tools.{i}.type")
    return tuple(tool.label for _, tool in others)


def join_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages with the leading system messages joined into one: most chat templates take only one.

    Removes billing lines (`_BILLING_LINE`), which change with every request: with them no prompt would begin with an
    earlier conversation.
    """
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [_BILLING_LINE.sub("", message["content"]) for message in messages[:count]]
    texts = [text for text, message in zip(texts, messages, strict=False) if text or not message["content"]]
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *messages[count:]]


def thinking_options(effort: str | None) -> dict[str, Any]:
    """Returns the options of the chat template that set how much a model reasons. effort: None for its default."""
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def new_prefixed_id(prefix: str) -> str:
    """Returns a new random id such as "resp_5f3a..."."""
    return f"{prefix}_{secrets.token_hex(24)}"


def _describe_fault(fault: Any) -> str:
    context = fault.get("ctx", {})
    if fault["type"] == "union_tag_invalid":
        return f"the type {context['tag']!r} is not supported by this server; supported: {context['expected_tags']}"
    if fault["type"] == "union_tag_not_found":
        return "this must be an object with a type"
    if fault["type"] == "literal_error":
        return f"this must be {context['expected']}, got {str(fault['input'])[:80]!r}"
    if fault["type"] in ("too_long", "string_too_long"):
        unit = "characters" if isinstance(fault["input"], str) else "items"
        return f"this has {len(fault['input'])} {unit}, and at most {context['max_length']} are allowed"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return _FAULT_WORDS.get(fault["type"], message[:1].lower() + message[1:])


def _field_path(place: Sequence[str | int], given: Any) -> list[str]:
    """Returns a field's path, such as ["input", "0", "content"], without pydantic's names for members of a union.

    place: the path that pydantic reports, with these names. given: the whole body.
    """
    path, of_type = [], False
    for i, step in enumerate(place):
        if isinstance(step, int):
            path, given, of_type = [*path, str(step)], given[step] if isinstance(given, list) else None, False
        elif not isinstance(given, Mapping) or _is_union_member_name(step):
            continue
        elif not of_type and given.get("type") == step and not _ends_field_name(place[i + 1 :]):
            of_type = True
        elif step in given or i == len(place) - 1:
            path, given, of_type = [*path, step], given.get(step), False
    return path


def _is_union_member_name(step: str) -> bool:
    return "[" in step or step in _UNION_NAMES


def _ends_field_name(rest: Sequence[str | int]) -> bool:
    """Returns whether `rest` is empty or begins with an index or a union member: then the step before it is a field."""
    return not rest or isinstance(rest[0], int) or _is_union_member_name(rest[0])
