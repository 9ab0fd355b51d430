"""What the APIs of the server share: a `Turn` says which answer is wanted, and `Delta`s are the parts of the answer.

Each API turns a request's body into a `Turn`, and the deltas of the answer into its own response, streamed or whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_zip.engine import Counted, Counts


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of the arguments. strict: whether it is enforced."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class Turn:
    """A request for one answer.

    messages: the conversation, as chat templates take it ("role", "content" text; an assistant's "tool_calls" with
    {"id", "type": "function", "function": {"name", "arguments": map}} and "reasoning_content"; a tool's
    "tool_call_id"). prompt: text or base ids, in place of messages, for plain completions. prefill: text that the
    answer begins with. tools: tools that the model may call. tool_choice: "auto", "none", "required" or the name of the
    tool to call. left_out: labels of further tools that the client has given and this server cannot run.
    parallel_tool_calls: whether the answer may have several calls. schema: JSON schema that the answer must follow; {}
    for any JSON object. max_tokens: maximum base tokens, -1 for the rest of the context. sampling: fields of
    `Sampling`. stop: stop strings. logprobs: number of likely tokens to report per token, None for no
    log-probabilities. template_options: further arguments of the chat template. pack: name of a pack, or names of packs
    to merge in this order; None for the model's own pack. show: whether each `Text` has its tokens, and deltas
    `LearnedEntries` and `Counted` are sent. prediction: likely text of the answer, used for drafts; it never changes
    the answer.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    prefill: str | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    left_out: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    schema: Mapping[str, Any] | None = None
    max_tokens: int = -1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    logprobs: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    pack: str | tuple[str, ...] | None = None
    show: bool = False
    prediction: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer (a hypertoken counts as one): its text, its UTF-8 bytes and its log-probability.

    likely: the most likely tokens at this step, as (text, bytes, log-probability).
    """

    text: str
    bytes: bytes
    logprob: float
    likely: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True)
class Waiting:
    """Progress before the answer's first text. read: prompt ids read so far. total: all prompt ids.

    prompt_tokens, cached_tokens: the prompt's base tokens, and those of them that were cached; 0 if not known yet.
    waits_for: name of the model whose answers must end first, "" for none.
    """

    read: int
    total: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waits_for: str = ""


@dataclass(frozen=True)
class ShownToken:
    """An emitted id in a text. text: the part of the text that the id stands for, "" if it only begins a character.

    parts: texts of a hypertoken's base ids, () for a base id. origin: where the hypertoken's entry was learned: "pack",
    "prompt" or "answer", "" for a base id. at: base tokens of prompt and answer that had been read when the entry was
    installed, -1 for a pack's entry and for a base id. from_draft: whether a draft had proposed the id, so that it took
    no pass of the model. continues: whether the token begins in an earlier `Text`.
    """

    text: str
    id: int
    parts: tuple[str, ...] = ()
    origin: str = ""
    at: int = -1
    from_draft: bool = False
    continues: bool = False


@dataclass(frozen=True)
class Text:
    """A piece of the answer's text. logprobs: log-probabilities of its tokens, if `Turn.logprobs` asks for them.

    tokens: if `Turn.show`, the tokens of this piece; their texts joined are `text`.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[ShownToken, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning, found by the reasoning marks of its chat template."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call of a tool. id: unique in the conversation. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class LearnedEntries:
    """Entries that the codebook has just learned, each as the texts of its base ids."""

    entries: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PromptDifference:
    """Where a prompt first differs from the kept conversation that shares the longest beginning with it.

    at: number of base tokens shared. kept, now: the next text of the conversation and of the prompt, shortened.
    """

    at: int
    kept: str
    now: str


@dataclass(frozen=True)
class Done:
    """The end of an answer. reason: "stop", "length" or "tool_calls". stopped_by: the stop string that ended the text.

    reasoning_tokens: number of base tokens of the reasoning. left_out: labels of tools that this server cannot run.
    differs: None if the prompt continues a kept conversation, or shares no beginning with one. unshown: if
    `Turn.logprobs` asks for them, log-probabilities of the last tokens that added no text: an eos, part of a character.
    """

    reason: str
    counts: Counts
    stopped_by: str | None = None
    reasoning_tokens: int = 0
    left_out: tuple[str, ...] = ()
    differs: PromptDifference | None = None
    unshown: tuple[TokenLogprob, ...] = ()


Delta = Waiting | Text | Reasoning | ToolCall | LearnedEntries | Counted | Done
