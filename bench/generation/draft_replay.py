"""Texts of five kinds, and a replay, without a model, of the passes in which a model would write them with drafts.

The emitted ids are always the text's, so a proposed id is accepted if it is the text's next id. The replay gives base
tokens per pass and the host's work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.workloads import Turn, Workload
from mlx_zip.codec import Codebook
from mlx_zip.engine.draft_sources import MOST_PROPOSED, LookupSource
from mlx_zip.engine.drafts import Drafter, choose_drafts, expects_draft
from mlx_zip.engine.pass_costs import PassCosts
from mlx_zip.text.prompts import encode_prompt
from mlx_zip.text.tokenizers import chat_template

TEXTS = Path(__file__).parents[1] / "texts"
KINDS = {
    "edit": "a file with ten changed lines",
    "document": "an answer from a document",
    "dialogue": "a dialogue goes on",
    "story": "a story",
    "code": "a module goes on",
}
ROW_BY_ROW = {1: 1.0, 16: 16.0}  # a pass over n ids costs n times a pass over one


def read_workloads(kinds: Sequence[str], tokenizer: Any, mode: str) -> Iterator[Workload]:
    """Yields a workload per text of these kinds. The text's last message, an answer, is written; the others are read.

    mode: "free" lets the model write a greedy answer, at most as long as the text's; any other mode replays the text's.
    """
    for kind in kinds:
        for window, file in enumerate(sorted(TEXTS.glob(f"{kind}-*.txt"))):
            *asked, answer = read_messages(file)
            text = tuple(tokenizer.encode(answer["content"], add_special_tokens=False))
            whole = "\n".join(message["content"] for message in asked)
            prompt = tuple(encode_prompt(tokenizer, asked if chat_template(tokenizer) else whole))
            turn = Turn(prompt, len(text), None if mode == "free" else text)
            yield Workload(kind, mode, file.stem, (turn,), window)


def read_messages(file: Path) -> list[dict[str, str]]:
    """Returns the messages of a file, the last one an answer. A line `@user` or `@assistant` begins each message."""
    messages: list[dict[str, str]] = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.strip() in ("@user", "@assistant"):
            messages.append({"role": line.strip()[1:], "content": ""})
        else:
            messages[-1]["content"] += line
    return messages


@dataclass(frozen=True)
class ForcedText:
    """A text in a model's ids. prompt: ids to read. ids: ids to write. pieces: base ids of each id to write.

    book: the codebook after the prompt, None for a plain model.
    """

    prompt: list[int]
    ids: list[int]
    pieces: list[list[int]]
    book: Codebook | None = None


def force_text(turn: Turn, book: Codebook | None) -> ForcedText:
    """Returns prompt and text of `turn` as a model's ids. book: a new request's codebook, None for a plain model."""
    text = list(turn.text or ())
    if book is None:
        return ForcedText(list(turn.prompt), text, [[one] for one in text])
    prompt, ids = compress_prompt_and_text(book, turn.prompt, text)
    book = book.copy()
    book.push(prompt)
    whole = book.copy()
    whole.push(ids)
    rows, lengths = whole.logged_base_ids(book.mark())
    pieces = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    return ForcedText(prompt.tolist(), ids.tolist(), pieces, book)


@dataclass(frozen=True)
class Replay:
    """The passes that wrote a text, after its first id. widths: number of ids in each pass. cost: cost of all passes.

    host_s: processor seconds of proposing drafts and recording their results.
    """

    widths: list[int]
    cost: float
    host_s: float


def replay(turn: Turn, book: Codebook | None, ahead: bool = False, curve: Mapping[int, float] | None = None) -> Replay:
    """Replays the passes in which a model writes the turn's text, as an engine runs them for one request.

    curve: None proposes drafts as `draft="lookup"` does; else as "auto" does on a machine where a pass over n ids costs
    curve[n], interpolated linearly. book: a new request's codebook, None for a plain model. ahead: whether a step
    begins before the host has read the last id, unless a draft is expected, as engines do with plain models.
    """
    forced = force_text(turn, book)
    ids, pieces, book, limit = forced.ids, forced.pieces, forced.book, len(turn.text or ())
    costs = None if curve is None else PassCosts()
    curve = curve or {1: 1.0, MOST_PROPOSED + 1: 1.0}
    cost_of = np.interp(range(MOST_PROPOSED + 2), list(curve), list(curve.values())).tolist()
    drafter, widths = Drafter([LookupSource(turn.prompt)], costs), list[int]()
    held, at, written, waits = len(forced.prompt), 0, len(pieces[0]), not ahead
    begun = time.thread_time()
    drafter.append(pieces[0])
    while at + 1 < len(ids):
        draft = None
        if waits:  # otherwise the step has already begun
            room = min(MOST_PROPOSED, limit - max(written, at + 1) - 1)
            [(source, width)] = choose_drafts([drafter], [room], held)
            draft = None if source is None else drafter.propose(source, ids[at], book, width)
        proposed = [] if draft is None else draft.ids
        widths.append(1 + len(proposed))
        if costs is not None:
            costs.note_pass(widths[-1], held, cost_of[widths[-1]])
        accepted = common_prefix_length(proposed, ids[at + 1 : at + 1 + len(proposed)])
        end = min(at + 2 + accepted, len(ids))
        waits = not ahead or bool(proposed) or expects_draft([drafter], held)
        if book is not None:
            book.push(ids[at : end - 1])
        for piece in pieces[at + 1 : end]:
            drafter.append(piece)
            written += len(piece)
        if draft is not None:
            draft.taken = accepted
            draft.end()
        held, at = held + end - 1 - at, end - 1
    return Replay(widths, sum(cost_of[width] for width in widths), time.thread_time() - begun)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
