"""The request bodies of the app's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mlx_zip.server.fields import Body, Fraction, Many, Size

MOST_PACKS = 100


def _check_unicode(text: str) -> str:
    """Returns `text`. Raises `ValueError` if `text` has an unpaired surrogate, which UTF-8 cannot encode."""
    text.encode()
    return text


Words = Annotated[str, AfterValidator(_check_unicode)]
Title = Annotated[Words, Field(max_length=500)]
Folder = Annotated[Words, Field(max_length=100)]
Name = Annotated[Words, Field(min_length=1, max_length=1000)]
PackNames = Annotated[Many[Name], Field(max_length=MOST_PACKS)]


class SamplingBody(Body):
    """How an answer is sampled. A field that is left out takes the value that the app was started with."""

    temp: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    max_tokens: Size | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None

    @property
    def fields_set(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        return self.model_dump(exclude_none=True)


class ConversationBody(Body):
    """The fields of a new conversation; the base class of `ChangeBody`."""

    title: Title | None = None
    model: Name | None = None
    system: Words | None = None
    packs: PackNames | None = None
    sampling: SamplingBody | None = None

    @property
    def fields_set(self) -> dict[str, Any]:
        """The fields that are not None, by name, as `Store.create` and `Store.change` take them."""
        return self.model_dump(exclude_none=True)


class ChangeBody(ConversationBody):
    """Changes to a stored conversation. A field that is None is not changed."""

    draft: Words | None = None
    leaf: Name | None = None
    pinned: bool | None = None
    folder: Folder | None = None


class FitBody(Body):
    """A prompt for which the app suggests a pack. packs: names of the packs that the prompt's conversation uses."""

    text: Annotated[Words, Field(min_length=1)]
    packs: PackNames = Field(default_factory=list)


class AnswerBody(Body):
    """A request for an answer. parent: id of the message that the new messages follow. text: new user message to
    answer; None: answer `parent`. continue: extend the answer `parent` instead of starting a new one.
    """

    parent: Name | None = None
    text: Annotated[Words, Field(min_length=1)] | None = None
    continues: bool = Field(default=False, alias="continue")
    model: Name | None = None


class ModelBody(Body):
    """A model to open: the name of one of the app's models, a folder or a hub id."""

    name: Name


class RaceMessage(Body):
    """A message of a race without a stored conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[Words, Field(min_length=1)]


class RaceBody(Body):
    """A request that two models answer: first the main model, then the model named `base`.

    messages: the whole request; None: answer the user message `leaf` of the stored conversation `conversation`.
    """

    conversation: Name | None = None
    leaf: Name | None = None
    messages: Annotated[Many[RaceMessage], Field(min_length=1)] | None = None
    base: Name
    sampling: SamplingBody | None = None
    max_tokens: Size | None = None
