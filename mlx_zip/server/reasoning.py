"""Where an answer stands in a model's reasoning when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from mlx_zip.server.turn import Turn
from mlx_zip.text.tokenizer import think_marks

_TAIL_IDS = 64  # base ids of the prompt's end in which a mark is looked for


class Reasons(Enum):
    """NO: no reasoning will come. BEGUN: the prompt ends with the start mark. MAYBE: the answer may begin with it."""

    NO = "no"
    BEGUN = "begun"
    MAYBE = "maybe"


def reasoning_at(tokenizer: Any, turn: Turn, prompt_ids: Sequence[int] = (), prefilled: bool = True) -> Reasons:
    """Returns where the answer stands. prompt_ids: the prompt, of which only the end is looked at.

    prefilled: whether the answer goes on after `turn.prefill`, which the prompt ends with; False to say where the
    prefill itself begins.
    """
    marks = think_marks(tokenizer)
    if marks is None or turn.prompt is not None:
        return Reasons.NO
    tail = tokenizer.decode(list(prompt_ids)[-_TAIL_IDS:], skip_special_tokens=False) if len(prompt_ids) else ""
    prefill = (turn.prefill or "").strip()
    before = _where(tail.rstrip().removesuffix(prefill).rstrip(), *marks)
    if not (prefill and prefilled):
        return before
    begun = before is Reasons.BEGUN or prefill.startswith(marks[0])
    return Reasons.BEGUN if begun and marks[1] not in prefill else Reasons.NO


def _where(text: str, start: str, end: str) -> Reasons:
    if text.endswith(start):
        return Reasons.BEGUN
    return Reasons.NO if text.endswith(end) else Reasons.MAYBE
