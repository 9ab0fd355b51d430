"""The flags of `mlx_zip chat`: those of mlx_lm.chat, by their names and defaults, and a few of ours."""

from __future__ import annotations

import argparse

from mlx_zip.cli import packs, rows
from mlx_zip.cli.generation_flags import NUMBERS, add_kv_size
from mlx_zip.cli.serving_flags import add_kv, add_model, add_sessions, add_wired

REFUSED = {  # flags of mlx_lm.chat that cannot work here, and why
    "pipeline": "a chat runs on one machine; `mlx_zip serve` runs on several",
}
MAX_TOKENS = 256
SEED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.chat keep their names and defaults."""
    add = parser.add_argument
    add_model(add, "model to chat with")
    add(
        "--extra-eos-token",
        nargs="+",
        default=(),
        help="tokens that end an answer, in addition to the tokenizer's own (default: none)",
    )
    add("--system-prompt", help="system message of the conversation; /system changes it (default: none)")
    add(
        "--max-tokens",
        "-m",
        type=int,
        help=f"maximum number of base tokens of an answer (default: {MAX_TOKENS}, without --model 400)",
    )
    for name, (kind, default, text) in NUMBERS.items():
        if name == "seed":
            default, text = SEED, "seed of the first answer's random numbers; each further answer has the next one"
        shown = f" (default: {default:g})" if default is not None else ""
        add("--" + name.replace("_", "-"), type=kind, default=default, help=text + shown)
    add(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="maximum number of prompt ids that one model call reads (default: 2048)",
    )
    add("--plain", action="store_true", help="print answers as they are, without rendering Markdown (default: off)")
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to colour hypertokens by their length in base tokens; auto: on a terminal (default: auto)",
    )
    add("--no-history", action="store_true", help="neither read nor keep what is typed (default: kept in a file)")
    add_wired(add)
    add_sessions(add)
    packs.add_flags(add)
    add_kv_size(add)
    add_kv(add)
    rows.add_flags(add)
    add("--pipeline", action="store_true", default=None, help="refused: " + REFUSED["pipeline"])
    parser.set_defaults(decode_concurrency=1, max_waiting=1, max_prompt_tokens=None)
