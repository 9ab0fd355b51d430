"""Recorded counts of `bench tokens`, sorted by tokenizer and text, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.errors import MlxZipError

MERGE_SIZE, CODEBOOK_SIZE, RATE_WINDOW = 3, 2048, 2048  # as in the paper (§3.1, table 7), except the codebook size
Line = dict[str, Any]


@dataclass(frozen=True)
class Printed:
    """A tokenizer's two rows of the paper's table 2: bytes per token on each of `DOMAINS`.

    name: the tokenizer's name in the paper; ours: its name in our records, None if it was not measured. base: without
    hypertokens; compressed: with them.
    """

    name: str
    ours: str | None
    base: tuple[float, ...]
    compressed: tuple[float, ...]

    def gain(self, domain: str) -> float | None:
        """Returns the printed gain of hypertokens on a domain, compressed / base - 1; None if the paper lacks it."""
        if domain not in DOMAINS:
            return None
        i = DOMAINS.index(domain)
        return self.compressed[i] / self.base[i] - 1

    def bounds(self, domain: str) -> tuple[float, float]:
        """Returns the least and the greatest gain on a domain that rounding to one decimal leaves possible."""
        i = DOMAINS.index(domain)
        low, high = (self.compressed[i] + step for step in (-0.05, 0.05))
        return low / (self.base[i] + 0.05) - 1, high / (self.base[i] - 0.05) - 1


# Source: arXiv 2506.01084, table 2, and table 12 for the shares of its training text.
DOMAINS = ("code", "math", "chat", "multilingual", "web")
SHARES = {"code": 0.25, "math": 0.20, "chat": 0.20, "multilingual": 0.15, "web": 0.20}
TABLE_2 = (
    Printed("Llama-3-128K", "llama3", (4.1, 2.7, 5.1, 3.8, 4.6), (6.3, 4.0, 6.4, 4.7, 5.4)),
    Printed("Qwen-2-150K", "qwen", (4.0, 2.3, 5.1, 3.7, 4.4), (6.2, 3.7, 6.4, 4.6, 5.2)),
    Printed("Phi-4-200K", "o200k_base", (4.1, 2.7, 5.4, 4.6, 4.7), (6.3, 4.1, 6.7, 5.5, 5.4)),
    Printed("Gemma-3-256K", None, (3.3, 2.3, 5.0, 4.4, 4.5), (5.6, 3.7, 6.4, 5.4, 5.4)),
)
PHI_35 = "llama2"  # our name of Phi-3.5's tokenizer, with which table 7's rates were measured


def printed_of(tokenizer: str) -> Printed | None:
    """Returns the paper's rows of one of our tokenizers; None if the paper does not have it."""
    return next((row for row in TABLE_2 if row.ours == tokenizer), None)


# ---- recorded lines


class Counts:
    """Lines of `bench tokens` by tokenizer and text, only those without disabled ids.

    Raises `MlxZipError` for two lines of the same tokenizer and text, and for a text whose content differs by line.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines: dict[tuple[str, str], Line] = {}
        texts: dict[str, str] = {}
        for line in lines:
            if line["bench"] != "tokens" or line["disabled"] != "none":
                continue
            tokenizer, text = key = line["tokenizer"]["name"], line["domain"]
            if key in self.lines:
                raise MlxZipError(f"{tokenizer} on {text} was measured twice; keep one of the lines")
            if texts.setdefault(text, line["text"]["sha256"]) != line["text"]["sha256"]:
                raise MlxZipError(f"{text} is not the same text in every line; its figures do not compare")
            self.lines[key] = line
        self.tokenizers = list(dict.fromkeys(tokenizer for tokenizer, _ in self.lines))
        self.texts = sorted(texts, key=lambda text: _order(domain_of(text)))

    @property
    def windows(self) -> list[int | str]:
        """All window sizes that were measured, in rising order, whole documents last."""
        found = {row[0] for line in self.lines.values() for row in line["counts"]}
        return sorted(found, key=lambda window: (isinstance(window, str), window))

    def row(
        self, tokenizer: str, text: str, window: int | str, merge_size: int = MERGE_SIZE, size: int = CODEBOOK_SIZE
    ) -> Mapping[str, int] | None:
        """Returns the counts of one setting by column, or None if it was not measured.

        size: slots of the codebook. All codebooks that are at least as large as the window have the same counts.
        """
        line = self.lines.get((tokenizer, text))
        for values in line["counts"] if line else ():
            row = dict(zip(line["columns"], values, strict=True)) if line else {}
            no_end = isinstance(window, int) and size >= window and row["codebook_size"] >= window
            if (row["window"], row["merge_size"]) == (window, merge_size) and (row["codebook_size"] == size or no_end):
                return row
        return None

    def rate(self, tokenizer: str, text: str, window: int | str, **setting: int) -> float | None:
        """Returns the compression rate of a setting: ids over base ids; None if it was not measured."""
        row = self.row(tokenizer, text, window, **setting)
        return row["ids"] / self.lines[tokenizer, text]["base_ids"] if row else None

    def base(self, tokenizer: str, text: str) -> float | None:
        """Returns the bytes per base id of a text; None if it was not measured."""
        line = self.lines.get((tokenizer, text))
        return line["bytes_per_base_id"] if line else None

    def of_domain(
        self, tokenizer: str, domain: str, window: int | str, column: str = "ids", **setting: int
    ) -> float | None:
        """Returns a count divided by base ids, the mean over a domain's texts; None unless all of them were measured.

        column: which count, for example "ids".
        """
        texts = [text for text in self.texts if domain_of(text) == domain]
        rows = [(self.row(tokenizer, text, window, **setting), text) for text in texts]
        parts = [row[column] / self.lines[tokenizer, text]["base_ids"] for row, text in rows if row]
        return sum(parts) / len(parts) if parts and len(parts) == len(texts) else None

    def mixed(self, tokenizer: str, window: int | str, column: str, **setting: int) -> float | None:
        """Returns a count divided by base ids in a mixture of domains by the paper's `SHARES` of the base ids.

        column: which count, for example "ids". None unless every domain has texts and all of them were measured.
        """
        total = 0.0
        for domain, share in SHARES.items():
            part = self.of_domain(tokenizer, domain, window, column, **setting)
            if part is None:
                return None
            total += share * part
        return total


def domain_of(text: str) -> str:
    """Returns a text's domain in the paper: the part of its name before the first slash."""
    return text.partition("/")[0]


def _order(domain: str) -> int:
    """Returns the place of a domain in `DOMAINS`; that after the last for any other."""
    return DOMAINS.index(domain) if domain in DOMAINS else len(DOMAINS)
