"""Which setting is best and which worst, in the paper's tables and in ours: the orderings that are to be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .ablation_results import PAPER_ENCODERS, PAPER_SIZES, PAPER_TEXTS, Results, Sweep


@dataclass(frozen=True)
class Question:
    """A question to a sweep: which of some keys is best or worst by bits per byte.

    sizes: whether it is about merge sizes, else about encoders. keys: those to choose from. pick: `min` for the best
    key, `max` for the worst.
    """

    text: str
    sizes: bool
    keys: tuple[Any, ...]
    pick: Callable[..., float]

    def answer(self, values: Mapping[Any, float]) -> tuple[Any, ...]:
        """Returns the best (or worst) key, or several that are equal; () unless `values` has a value for every key."""
        if not all(key in values for key in self.keys):
            return ()
        wanted = self.pick(values[key] for key in self.keys)
        return tuple(key for key in self.keys if values[key] == wanted)


_COMPRESSED = (2, 3, 4, 5)
QUESTIONS = (
    Question("best merge size, 1 being no compression", True, (1, *_COMPRESSED), min),
    Question("best merge size that compresses", True, _COMPRESSED, min),
    Question("worst merge size that compresses", True, _COMPRESSED, max),
    Question("best encoder", False, tuple(PAPER_ENCODERS), min),
    Question("worst encoder", False, tuple(PAPER_ENCODERS), max),
)


@dataclass(frozen=True)
class Answers:
    """The answers to one question.

    label: returns a key in words. paper: the paper's answer on each of its texts. ours: for each of our texts, the
    number of seeds by answer; empty where not measured.
    """

    question: Question
    label: Callable[[Any], str]
    paper: tuple[tuple[Any, ...], ...]
    ours: Mapping[str, Counter[Any]]

    def shown(self, answer: Sequence[Any]) -> str:
        """Returns an answer in words; keys that are equally good are joined by "or"."""
        return " or ".join(self.label(key) for key in answer)

    @property
    def of_paper(self) -> str:
        """The paper's answers in words, each with the number of texts on which it holds."""
        counts = Counter(self.shown(answer) for answer in self.paper)
        return "; ".join(f"{answer} ({n} of {len(self.paper)} texts)" for answer, n in counts.items())

    def of_text(self, text: str) -> str:
        """Returns our answer on one text in words; where seeds disagree, each answer with its number of seeds."""
        counts = self.ours[text]
        if len(counts) < 2:
            return self.label(next(iter(counts))) if counts else "not measured"
        return ", ".join(f"{self.label(key)} ({n} of {counts.total()} seeds)" for key, n in counts.most_common())

    def strange(self, text: str) -> list[Any]:
        """Returns our answers on one text that the paper gives on none of its texts."""
        known = {key for answer in self.paper for key in answer}
        return [key for key in self.ours[text] if key not in known]


def answers(results: Results) -> list[Answers]:
    """Returns the answers to all questions, by the paper's tables and by our lines."""
    found = []
    for question in QUESTIONS:
        sweep = results.sizes if question.sizes else results.encoders
        columns = range(len(PAPER_TEXTS))
        paper = tuple(question.answer({key: row[i] for key, row in sweep.paper.items()}) for i in columns)
        ours = {text: Counter(_per_seed(question, sweep, text, results.seeds)) for text in results.texts}
        found.append(Answers(question, sweep.label, paper, ours))
    return found


def _per_seed(question: Question, sweep: Sweep, text: str, seeds: Sequence[int]) -> Iterator[Any]:
    """Yields the answer of each seed on one text; several if keys are equal, none if a key was not measured."""
    for seed in seeds:
        values = {
            key: line["texts"][text]["bits_per_byte"]
            for key, lines in sweep.found.items()
            for line in lines
            if line["setting"]["seed"] == seed
        }
        yield from question.answer(values)


def cost_of_compression(results: Results, text: str) -> list[float]:
    """Returns for each seed how many more bits per byte merge size 3 needs than merge size 1, as a fraction.

    Seeds for which one of the two was not measured are left out.
    """
    by_seed = [
        {line["setting"]["seed"]: line["texts"][text]["bits_per_byte"] for line in results.sizes.found.get(m, [])}
        for m in (1, 3)
    ]
    return [by_seed[1][seed] / by_seed[0][seed] - 1 for seed in by_seed[0] if seed in by_seed[1]]


def paper_cost() -> list[float]:
    """Returns how many more bits per byte merge size 3 needs than 1 in the paper's table 7, as a fraction, per text.

    Bits per byte are the logarithm of byte-perplexity.
    """
    pairs = zip(PAPER_SIZES[3], PAPER_SIZES[1], strict=True)
    return [math.log(third) / math.log(first) - 1 for third, first in pairs]
