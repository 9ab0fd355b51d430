"""`GenerationResponse`: one emitted id with its text and figures, and the lines that tell them at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RULE = "=" * 10  # the line that `generate(verbose=True)` prints before and after the text, as mlx-lm does


@dataclass(frozen=True)
class GenerationResponse:
    """One emitted id, and the figures up to and including it.

    text: the next piece of text, possibly empty. token: the emitted id. base_ids: the base ids of `token`, without
    those after an eos, a stop string or the limit. logprobs [W]: the log-probabilities that `token` was chosen from;
    None from an engine.
    prompt_tokens, generation_tokens: base tokens of the prompt and of the output so far; prompt_ids, steps: the same
    counted in ids. hypertokens: emitted ids that are hypertokens. *_tps: base tokens per second. bytes: UTF-8 bytes of
    text so far. peak_memory: GB. finish_reason: None, or in the last response "stop" or "length". cached_tokens: base
    tokens of a conversation that the prompt cache held already; they are not among prompt_tokens.
    """

    text: str
    token: int
    base_ids: tuple[int, ...]
    logprobs: Any
    prompt_tokens: int
    prompt_ids: int
    prompt_tps: float
    generation_tokens: int
    steps: int
    hypertokens: int
    generation_tps: float
    bytes: int
    peak_memory: float
    finish_reason: str | None = None
    cached_tokens: int = 0

    @property
    def base_tokens_per_step(self) -> float:
        """Base tokens per emitted id."""
        return self.generation_tokens / self.steps

    @property
    def hyper_share(self) -> float:
        """Share of the emitted ids that are hypertokens."""
        return self.hypertokens / self.steps

    def figures(self) -> dict[str, Any]:
        """Returns the figures by name, with units. *_tokens count base tokens; steps and prompt_ids count ids."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_ids": self.prompt_ids,
            "prompt_tokens_per_s": self.prompt_tps,
            "generation_tokens": self.generation_tokens,
            "steps": self.steps,
            "hypertokens": self.hypertokens,
            "base_tokens_per_step": self.base_tokens_per_step,
            "hyper_share": self.hyper_share,
            "generation_tokens_per_s": self.generation_tps,
            "text_bytes": self.bytes,
            "peak_memory_gb": self.peak_memory,
        }


def footer(response: GenerationResponse) -> str:
    """Returns four lines of figures: mlx-lm's three, in base tokens, and one about hypertokens."""
    last = response
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB\n"
        f"Hypertokens: {last.generation_tokens} base tokens in {last.steps} steps "
        f"({last.base_tokens_per_step:.3f} per step), {last.hyper_share:.1%} of steps hypertokens; "
        f"prompt {last.prompt_tokens} base tokens in {last.prompt_ids} ids"
    )
