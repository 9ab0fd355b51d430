"""Which hypertokens a conversation's answers consist of, and how often each one was used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mlx_zip.progress import counted
from mlx_zip.text.token_texts import TokenTexts

MOST_LISTED = 20
_VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})


class Use(NamedTuple):
    """One use of a hypertoken. base_ids: its parts. learned: where, "pack", "prompt" or "answer"."""

    base_ids: tuple[int, ...]
    learned: str


def vocabulary_lines(uses: Sequence[Use], tokenizer: Any) -> Iterator[str]:
    """Yields a heading, and a line for each of the hypertokens used most: its uses, where it was learned, its parts.

    uses: of all answers, the first one first. Of two hypertokens with as many uses the longer one comes first, then the
    one used first. A hypertoken that was learned in several places is shown with the place of its last use.
    """
    found = _counted(uses)
    if not found:
        yield "no hypertokens yet; answers from a loaded file are not counted"
        return
    most = sorted(found, key=lambda base_ids: (-found[base_ids][0], -len(base_ids)))[:MOST_LISTED]
    total = counted(len(found), "hypertoken")
    yield f"the {len(most)} most used of {total} in this conversation: uses, where learned, parts"
    texts = TokenTexts(tokenizer)
    for base_ids in most:
        count, learned = found[base_ids]
        yield f"{count:>7,}x  {learned:6}  {_parts(texts, base_ids)}"


def _counted(uses: Iterable[Use]) -> dict[tuple[int, ...], tuple[int, str]]:
    """Returns for each hypertoken, in the order of the first uses, its number of uses and where it was learned last."""
    found: dict[tuple[int, ...], tuple[int, str]] = {}
    for base_ids, learned in uses:
        found[base_ids] = found.get(base_ids, (0, ""))[0] + 1, learned
    return found


def _parts(texts: TokenTexts, base_ids: Sequence[int]) -> str:
    """Returns the texts of base ids with bars between them; spaces and line ends are shown by marks."""
    return " | ".join(texts[(one,)][0].translate(_VISIBLE) for one in base_ids)
