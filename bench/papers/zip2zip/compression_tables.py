"""The tables of the compression report: recorded counts and latencies, and the paper's printed numbers.

Counts come from `bench tokens` (tables 2 and 7 of arXiv 2506.01084), latencies from `codec_latency` (figure 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.records import Cell, Record, Records, make_column_table, median_and_range, table
from mlx_zip.errors import MlxZipError

from .ablation_tables import PAPER_RATES
from .codec_figure import added_latency_percent, latency_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MERGE_SIZE, CODEBOOK_SIZE, RATE_WINDOW = 3, 2048, 2048  # as in the paper (§3.1, table 7), except the codebook size


@dataclass(frozen=True)
class PaperRows:
    """A tokenizer's two rows of the paper's table 2: bytes per token on each of `DOMAINS`.

    name: the tokenizer's name in the paper. ours: the tokenizer's name in our records, None if it was not measured.
    base, compressed: the paper's figures without and with hypertokens.
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


# Source: arXiv 2506.01084, table 2, and table 12 for the shares of its training text.
DOMAINS = ("code", "math", "chat", "multilingual", "web")
SHARES = {"code": 0.25, "math": 0.20, "chat": 0.20, "multilingual": 0.15, "web": 0.20}
TABLE_2 = (
    PaperRows("Llama-3-128K", "llama3", (4.1, 2.7, 5.1, 3.8, 4.6), (6.3, 4.0, 6.4, 4.7, 5.4)),
    PaperRows("Qwen-2-150K", "qwen", (4.0, 2.3, 5.1, 3.7, 4.4), (6.2, 3.7, 6.4, 4.6, 5.2)),
    PaperRows("Phi-4-200K", "o200k_base", (4.1, 2.7, 5.4, 4.6, 4.7), (6.3, 4.1, 6.7, 5.5, 5.4)),
    PaperRows("Gemma-3-256K", None, (3.3, 2.3, 5.0, 4.4, 4.5), (5.6, 3.7, 6.4, 5.4, 5.4)),
)
PHI_35 = "llama2"  # our name of Phi-3.5's tokenizer, for which table 7 gives rates


def paper_rows_of(tokenizer: str) -> PaperRows | None:
    return next((row for row in TABLE_2 if row.ours == tokenizer), None)


# ---- recorded lines


class RecordedCounts:
    """Lines of `bench tokens` by tokenizer and text; only lines without disabled ids.

    Raises `MlxZipError` if two lines have the same tokenizer and text, or a text's content differs between lines.
    """

    def __init__(self, lines: Sequence[Record]) -> None:
        self.lines: dict[tuple[str, str], Record] = {}
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
        self.texts = sorted(texts, key=lambda text: domain_order(domain_of(text)))

    @property
    def windows(self) -> list[int | str]:
        """All measured window sizes, in rising order; whole documents last."""
        found = {row[0] for line in self.lines.values() for row in line["counts"]}
        return sorted(found, key=lambda window: (isinstance(window, str), window))

    def rate(
        self, tokenizer: str, text: str, window: int | str, merge_size: int = MERGE_SIZE, size: int = CODEBOOK_SIZE
    ) -> float | None:
        """Returns the compression rate of a setting: ids divided by base ids; None if not measured.

        size: slots of the codebook. A codebook that is larger than the window counts as one of the window's size.
        """
        line = self.lines.get((tokenizer, text))
        rows = [dict(zip(line["columns"], row, strict=True)) for row in line["counts"]] if line else []
        smaller = lambda slots: slots if isinstance(window, str) else min(slots, window)
        ids = {(row["window"], row["merge_size"], smaller(row["codebook_size"])): row["ids"] for row in rows}
        found = ids.get((window, merge_size, smaller(size)))
        return None if line is None or found is None else found / line["base_ids"]

    def bytes_per_base_id(self, tokenizer: str, text: str) -> float | None:
        """Returns the bytes per base id of a text; None if the text was not measured."""
        line = self.lines.get((tokenizer, text))
        return line["bytes_per_base_id"] if line else None

    def mean_rate_of_mixture(self, tokenizer: str, window: int | str, merge_size: int) -> float | None:
        """Returns the compression rate of a mixture of domains by the paper's `SHARES` of base ids.

        A domain's rate is the mean over its texts. Returns None unless every domain has texts and all were measured.
        """
        total = 0.0
        for domain, share in SHARES.items():
            texts = [text for text in self.texts if domain_of(text) == domain]
            rates = [self.rate(tokenizer, text, window, merge_size) for text in texts]
            known = [rate for rate in rates if rate is not None]
            if not known or len(known) < len(rates):
                return None
            total += share * mean(known)
        return total


def domain_of(text: str) -> str:
    """Returns a text's domain in the paper: the part of its name before the first slash."""
    return text.partition("/")[0]


def domain_order(domain: str) -> int:
    return DOMAINS.index(domain) if domain in DOMAINS else len(DOMAINS)


TOKENIZERS = ("llama3", "qwen", "o200k_base", "gpt2", "llama2", "mistral_v3")  # each has a table


# ---- table 2


def bytes_per_token_table(counts: RecordedCounts, tokenizer: str) -> str:
    """Returns table 2 for one tokenizer: bytes per token by text and window.

    If the paper measured this tokenizer, the paper's figures are added.
    """
    paper = paper_rows_of(tokenizer)
    windows = [f"{window:,} ids" if isinstance(window, int) else "documents" for window in counts.windows]
    theirs = ["paper: base", "paper: with"] if paper else []
    rows = []
    for text in counts.texts:
        if (base := counts.bytes_per_base_id(tokenizer, text)) is not None:
            cells = [_rate_cell(base, counts.rate(tokenizer, text, window)) for window in counts.windows]
            rows.append([text, f"{base:.2f}", *cells, *(_paper_cells(paper, domain_of(text)) if paper else [])])
    return table(["text", "base", *windows, *theirs], rows)


def paper_only_table(counts: RecordedCounts) -> str:
    rows = []
    for row in TABLE_2:
        if row.ours not in counts.tokenizers:
            rows.append([row.name, *(f"{value:.1f}" for value in row.base)])
            rows.append(["with hypertokens", *(_paper_cells(row, domain)[1] for domain in DOMAINS)])
    return table(["tokenizer", *DOMAINS], rows)


def _rate_cell(base: float, rate: float | None) -> str:
    return "-" if rate is None else f"{base / rate:.2f} ({1 / rate - 1:+.1%})"


def _paper_cells(paper: PaperRows, domain: str) -> list[str]:
    gain = paper.gain(domain)
    if gain is None:
        return ["-", "-"]
    i = DOMAINS.index(domain)
    return [f"{paper.base[i]:.1f}", f"{paper.compressed[i]:.1f} ({gain:+.0%})"]


# ---- table 7, figure 4


def merge_sizes_table(counts: RecordedCounts) -> str:
    """Returns table 7: ids divided by base ids, in percent, by merge size M, with the tokenizer of Phi-3.5."""
    rows = []
    for m, paper in PAPER_RATES.items():
        ours: list[float | None] = [1.0] * (len(counts.texts) + 1)
        if m > 1:
            ours = [counts.rate(PHI_35, text, RATE_WINDOW, m) for text in counts.texts]
            ours.append(counts.mean_rate_of_mixture(PHI_35, RATE_WINDOW, m))
        rows.append([str(m), *("-" if rate is None else f"{100 * rate:.2f}" for rate in ours), f"{paper:.2f}"])
    return table(["M", *counts.texts, "mixture", "paper"], rows)


def _latency_columns() -> Iterator[tuple[str, Cell]]:
    """Yields the columns of figure 4: milliseconds of a tokenizer alone and with each codec, by bytes of text."""
    codecs = {"mlx_zip": "with_ours", "zip2zip-compression": "with_upstream"}
    yield "tokenizer", lambda line: line["data"].split("; ")[-1]
    yield "library", "{setting[library]}"
    yield "bytes", "{bytes:,}"
    for head, of in {"tokenizer alone": "tokenizer", **{f"with {name}": of for name, of in codecs.items()}}.items():
        yield f"{head}, ms", lambda line, of=of: median_and_range(line[of], 2, " to ", 1e3) or "-"
    for name, of in codecs.items():
        yield (
            f"added by {name}",
            lambda line, of=of: f"{median(added_latency_percent(line, of)):+.1f}%" if line[of] else "-",
        )
    yield "load average", "{load_average}"


def texts_table(counts: RecordedCounts) -> str:
    rows = []
    for text in counts.texts:
        lines = [line for key, line in counts.lines.items() if key[1] == text]
        found = lines[0]["text"]
        cut = ", the first of them" if found["cut_by_limit"] else ""
        checked = ", ".join(sorted({str(line["checked_against"] or "nothing") for line in lines}))
        rows.append([text, ", ".join(found["files"]), f"{found['documents']:,}{cut}", f"{found['bytes']:,}", checked])
    return table(["text", "files", "documents", "bytes", "ids checked against"], rows)


def table_from_records(make: Callable[..., str], *args: Any) -> Callable[[Records], str]:
    return lambda records: make(RecordedCounts(records.lines("tokens")), *args)


LATENCY = tuple(_latency_columns())
TABLES: dict[str, Callable[[Records], str]] = {
    **{f"tokens-{name}": table_from_records(bytes_per_token_table, name) for name in TOKENIZERS},
    "tokens-paper": table_from_records(paper_only_table),
    "tokens-rates": table_from_records(merge_sizes_table),
    "tokens-texts": table_from_records(texts_table),
    "codec-latency": make_column_table("codec-figure4", LATENCY),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/compression-figure4.svg": lambda records: latency_figure(records.lines("codec-figure4"))
}
