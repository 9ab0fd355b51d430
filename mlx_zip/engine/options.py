"""Options of an engine: `RunOptions` says how the model is run, `ServeOptions` bounds requests and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP_WIRED_S = 600.0
DRAFT_TOKENS = 3  # ids that a draft model proposes per pass, as in mlx-lm


@dataclass(frozen=True)
class RunOptions:
    """How a model is run. kv_bits, kv_group_size, quantized_kv_start: KV cache quantization as in mlx-lm.

    prefill_step_size: prompt ids read per round of the scheduler. alone_step_size: prompt ids read per round if only
    one request runs and none waits, None for `prefill_step_size`. max_kv_size: maximum number of ids in the KV cache of
    a plain model's request, None for no bound. ahead: whether a step begins before the host has read its input id;
    None: on a GPU only. draft: where proposed ids come from, one of `mlx_zip.engine.drafts.DRAFTS`. num_draft_tokens:
    ids that a draft model proposes per pass; not used if `draft` is "auto". draft_exact: whether an id is chosen again
    from a pass over one id if rounding in a pass over several ids may have changed the choice; a request then gets
    drafts only if no other request shares its steps.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prefill_step_size: int = 512
    alone_step_size: int | None = None
    max_kv_size: int | None = None
    ahead: bool | None = None
    draft: str = "off"
    num_draft_tokens: int = DRAFT_TOKENS
    draft_exact: bool = False


@dataclass(frozen=True)
class ServeOptions:
    """Bounds of an engine.

    max_running: maximum number of requests that run at one time. max_waiting: maximum number of requests that wait.
    max_prompt_tokens: maximum base tokens of a prompt, None if only the context limits a prompt. max_kv_bytes: maximum
    bytes of the KV caches of all running requests, None for the engine's default, on MLX half of the memory. run: how
    the model is run. keep_wired_s: seconds for which an idle engine keeps its memory wired on a Mac.
    """

    max_running: int = 8
    max_waiting: int = 64
    max_prompt_tokens: int | None = None
    max_kv_bytes: int | None = None
    run: RunOptions = field(default_factory=RunOptions)
    keep_wired_s: float = KEEP_WIRED_S
