"""What the APIs of the server share: a `Turn` says which answer is wanted, and `Delta`s are the parts of the answer.

Each API turns a request's body into a `Turn`, and the deltas of the answer into its own response, streamed or whole.
The field `mlx_zip`, which the answers of all APIs have, is made here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    to merge in this order; None or no names for the default pack. show: whether each `Text` has its tokens, and deltas
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
    pack: str | Sequence[str] | None = None
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


# ---- the field `mlx_zip` of answers, for what the APIs of OpenAI and Anthropic have no field for


def vendor_json(done: Done, counts: Counts | None = None) -> dict[str, Any]:
    """Returns the field `mlx_zip` of an answer: its figures, as in `Counts`, and `vendor_notes`.

    counts: counts of all answers of the response together, None for those of `done`.
    """
    counts = done.counts if counts is None else counts
    names = ("steps", "hypertokens", "prompt_ids", "entries", "codebook_size", "kv_bytes_saved", "proposed", "accepted")
    times = {name: round(getattr(counts, name), 6) for name in ("queued_s", "first_id_s", "total_s")}
    return {name: getattr(counts, name) for name in names} | _rates_json(counts) | times | vendor_notes(done)


def _rates_json(counts: Counts) -> dict[str, float]:
    return {
        "base_tokens_per_step": round(counts.base_tokens / counts.steps, 3) if counts.steps else 0.0,
        "base_tokens_per_pass": round(counts.base_tokens_per_pass, 3),
    }


def vendor_notes(done: Done) -> dict[str, Any]:
    """Returns notes for the field `mlx_zip`: tools left out, and where the prompt differs from a kept conversation."""
    left_out = {"tools_left_out": list(done.left_out)} if done.left_out else {}
    return left_out | ({} if done.differs is None else {"prompt_differs": asdict(done.differs)})


def shown_token_json(token: ShownToken) -> dict[str, Any]:
    """Returns a shown token as JSON: "t" text, "id"; for a hypertoken also "p" parts, "o" origin, "a" `ShownToken.at`.

    "d": true if a draft had proposed the token, "c": true if the token begins in an earlier piece of text.
    """
    found: dict[str, Any] = {"t": token.text, "id": token.id}
    if token.origin:
        found |= {"p": list(token.parts), "o": token.origin, "a": token.at}
    return found | ({"d": True} if token.from_draft else {}) | ({"c": True} if token.continues else {})


def live_counts_json(counts: Counts) -> dict[str, Any]:
    """Returns an answer's counts so far as JSON. seconds: since the request. base_tokens_per_s: since the first id."""
    names = ("base_tokens", "steps", "hypertokens", "entries", "codebook_size", "kv_bytes_saved")
    names += ("proposed", "accepted")
    since_first = counts.total_s - counts.first_id_s if counts.first_id_s else 0.0
    return {
        **{name: getattr(counts, name) for name in names},
        **_rates_json(counts),
        "seconds": round(counts.total_s, 4),
        "base_tokens_per_s": round(counts.base_tokens / since_first, 1) if since_first > 0 else 0.0,
    }
