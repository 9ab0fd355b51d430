"""Figures of a chat's answers, for /stats and for the line after each answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_zip.engine import Counts
from mlx_zip.progress import counted

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass
class Totals:
    """Sums over the answers of a chat. last: figures of the last one."""

    answers: int = 0
    base_tokens: int = 0
    steps: int = 0
    last: Counts = field(default_factory=Counts)

    def add(self, counts: Counts) -> None:
        """Counts an answer."""
        self.answers += 1
        self.base_tokens += counts.base_tokens
        self.steps += counts.steps
        self.last = counts

    def line(self) -> str:
        """Returns the last answer's figures in one line that fits into a terminal."""
        last = self.last
        rate = f" ({last.base_tokens / last.steps:.2f} per step)" if last.steps else ""
        cached = f", {last.cached_tokens:,} of {last.prompt_tokens:,} cached" * bool(last.cached_tokens)
        return f"{counted(last.base_tokens, 'base token')}, {counted(last.steps, 'step')}{rate}{cached}"

    def lines(self) -> Iterator[str]:
        """Yields all figures, one line each: the last answer, all answers, prompt, codebook, KV cache."""
        if not self.answers:
            yield "no answer yet"
            return
        last = self.last
        yield f"last answer: {_steps(last.base_tokens, last.steps)}"
        if (seconds := last.total_s - last.first_id_s) > 0 and last.steps > 1:
            steps_per_s = (last.steps - 1) / seconds  # the time is from the first id on
            tokens_per_s = steps_per_s * last.base_tokens / last.steps
            yield f"its speed: {tokens_per_s:,.0f} base tokens/s, {steps_per_s:,.0f} steps/s"
        yield f"{counted(self.answers, 'answer')}: {_steps(self.base_tokens, self.steps)}"
        yield f"last prompt: {counted(last.prompt_tokens, 'base token')}, {last.cached_tokens:,} of them cached"
        if last.codebook_size:
            yield f"codebook: {last.entries:,} of {counted(last.codebook_size, 'entry')}"
            yield f"KV cache: {_size(last.kv_bytes_saved)} saved"


def _steps(base_tokens: int, steps: int) -> str:
    """Returns in words: base tokens, steps, their ratio, and the steps saved."""
    rate = f" ({base_tokens / steps:.2f} per step)" if steps else ""
    saved = f", {counted(base_tokens - steps, 'step')} saved" if base_tokens > steps else ""
    return f"{counted(base_tokens, 'base token')} in {counted(steps, 'step')}{rate}{saved}"


def _size(count: int) -> str:
    """Returns a number of bytes in the unit that suits it."""
    return next((f"{count / unit:.1f} {name}" for unit, name in _UNITS if count >= unit), counted(count, "byte"))
