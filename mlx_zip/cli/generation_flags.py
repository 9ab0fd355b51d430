"""The flags of `mlx_zip generate`: those of mlx_lm.generate with their names and defaults, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from mlx_zip.arguments import add_codebook_flags, add_trust_remote_code_flag
from mlx_zip.cli import engine_choice, row_cache
from mlx_zip.engine.draft_sources import MOST_PROPOSED
from mlx_zip.engine.drafts import DRAFT_TOKENS, DRAFTS
from mlx_zip.errors import GenerationError
from mlx_zip.models.model_folder import is_plain_model

ROTATES = "a rotating KV cache forgets ids that the codebook still knows"
_NOT_QUANTIZED = "hypertoken rows are computed from the head's weights, which this flag would replace"
SAMPLING_FLAGS = {  # name of a sampling flag -> (type, default, help); None: off
    "temp": (float, 0.0, "sampling temperature; 0 is greedy"),
    "top_p": (float, 1.0, "nucleus sampling: sample from the likeliest ids that together have this probability"),
    "min_p": (float, 0.0, "drop ids less likely than this fraction of the likeliest id's probability"),
    "top_k": (int, 0, "sample from this many likeliest ids; 0 samples from all"),
    "xtc_probability": (
        float,
        0.0,
        "probability per step that XTC sampling drops the ids above --xtc-threshold, except the least likely of them",
    ),
    "xtc_threshold": (float, 0.1, "probability above which XTC sampling may drop an id"),
    "min_tokens_to_keep": (int, 1, "minimum number of ids that --min-p keeps"),
    "seed": (int, None, "seed of the random numbers (default: none, so sampled texts differ from run to run)"),
    "repetition_penalty": (
        float,
        None,
        "number that divides positive logits of recent base tokens and multiplies negative ones (default: none)",
    ),
    "repetition_context_size": (int, 20, "number of recent base tokens to which --repetition-penalty applies"),
    "presence_penalty": (float, None, "number subtracted from the logits of recent base tokens (default: none)"),
    "presence_context_size": (int, 20, "number of recent base tokens to which --presence-penalty applies"),
    "frequency_penalty": (
        float,
        None,
        "number subtracted from a base token's logit once per recent occurrence of that token (default: none)",
    ),
    "frequency_context_size": (int, 20, "number of recent base tokens to which --frequency-penalty applies"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.generate keep their names and defaults."""
    add = parser.add_argument
    add(
        "--model",
        help="model to run: folder, hub id or bundled model (default: stories, a bundled model of children's stories)",
    )
    engine_choice.add_engine_flag(add)
    add("--revision", help="branch, tag or commit of a hub model (default: main)")
    add_trust_remote_code_flag(add)
    add_adapter_flag(add)
    add_eos_flag(add)
    _add_prompt_flags(add)
    _add_sampling_flags(add)
    _add_template_flags(add)
    _add_cache_flags(add)
    _add_output_flags(add)
    add("--image", nargs="+", action=RefusedFlag, const="the supported models read text only")
    add("--quantize-activations", "-qa", action=RefusedFlag, nargs=0, const=_NOT_QUANTIZED)


def _add_prompt_flags(add: Any) -> None:
    add("--system-prompt", help="system message placed before the prompt; needs a chat template (default: none)")
    add(
        "--prompt",
        "-p",
        default="hello",
        action=_MarkGiven,
        help="user message, or - to read it from standard input as UTF-8 (default: hello, or a request for a "
        "story if --model is not given)",
    )
    add("--prefill-response", help="beginning of the answer, which the model continues (default: none)")


def _add_sampling_flags(add: Any) -> None:
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=100,
        action=_MarkGiven,
        help="maximum number of base tokens to generate (default: 100, or 400 if --model is not given)",
    )
    add("--stop", nargs="+", default=(), help="strings that end the text; they are not printed (default: none)")
    add_sampling_flags(add)
    add(
        "--logit-bias",
        help='JSON map from at most 1000 base ids to numbers added to their logits, for example {"42": -5} '
        "(default: none)",
    )
    add_canonical_flag(add)


def _add_template_flags(add: Any) -> None:
    add(
        "--ignore-chat-template",
        action="store_true",
        help="give the prompt to the model as plain text, without the chat template",
    )
    add_default_template_flag(add)
    add("--chat-template-config", help="JSON map of further arguments for the chat template (default: none)")


def _add_cache_flags(add: Any) -> None:
    add_prefill_flag(add)
    add(
        "--prompt-cache-file",
        help="prompt cache to continue with the prompt, in the format of mlx_lm.cache_prompt (default: none)",
    )
    add_kv_size_flag(add)
    add_engine_flags(add)


def _add_output_flags(add: Any) -> None:
    add(
        "--verbose",
        type=_parse_verbose,
        default=True,
        metavar="BOOL",
        help="True prints the text and figures on speed and memory; False prints the text alone (default: True)",
    )
    add_color_flag(add)
    add("--json", action="store_true", help="print one JSON object with text and figures at the end, not the text")


def add_engine_flags(add: Any) -> None:
    """Declares the flags of codebooks, quantized KV caches, drafts and hyper rows."""
    add_codebook_flags(add)
    add_kv_quantization_flags(add)
    _add_draft_flags(add)
    row_cache.add_row_cache_flags(add)


def add_adapter_flag(add: Any) -> None:
    """Declares --adapter-path."""
    add(
        "--adapter-path",
        help="folder of an mlx-lm adapter to load with the model (default: none); for an adapter that mlx_zip train "
        "saved, use mlx_zip convert, which merges it into the model",
    )


def add_eos_flag(add: Any) -> None:
    """Declares --extra-eos-token."""
    add(
        "--extra-eos-token",
        nargs="+",
        default=(),
        help="tokens that end the text, in addition to the tokenizer's own (default: none)",
    )


def add_default_template_flag(add: Any) -> None:
    """Declares --use-default-chat-template."""
    add(
        "--use-default-chat-template",
        action="store_true",
        help="no effect; accepted because mlx-lm has it (the model's own chat template is used)",
    )


def add_sampling_flags(add: Any, names: Iterable[str] = SAMPLING_FLAGS, note: str = "") -> None:
    """Declares sampling flags. names: keys of `SAMPLING_FLAGS`. note: text after the purpose in each help."""
    for name in names:
        kind, default, text = SAMPLING_FLAGS[name]
        shown = f" (default: {default:g})" if default is not None else ""
        add("--" + name.replace("_", "-"), type=kind, default=default, help=text + note + shown)


def read_sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling flags in `args` by name. Raises `GenerationError` if one is out of range."""
    from mlx_zip.engine.sampling.options import Sampling

    found = {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}
    Sampling.from_options(found)
    return found


def add_canonical_flag(add: Any, default: str = "as in the model's config.json") -> None:
    """Declares --canonical and --no-canonical. default: text that describes the default."""
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        f"(default: {default})",
    )


def add_prefill_flag(add: Any) -> None:
    """Declares --prefill-step-size."""
    add(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="maximum number of prompt ids that one model call reads (default: 2048)",
    )


def add_color_flag(add: Any) -> None:
    """Declares --color."""
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to colour hypertokens by their length in base tokens; auto: on a terminal (default: auto)",
    )


def add_kv_quantization_flags(add: Any) -> None:
    """Declares the flags of KV cache quantization."""
    add("--kv-bits", type=int, help="bits per number in a quantized KV cache (default: not quantized)")
    add(
        "--kv-group-size",
        type=int,
        default=64,
        help="number of values that share a scale in a quantized KV cache (default: 64)",
    )
    add(
        "--quantized-kv-start",
        type=int,
        default=5000,
        help="number of ids that the KV cache must hold before --kv-bits quantizes it (default: 5000)",
    )


def _add_draft_flags(add: Any) -> None:
    """Declares the flags for drafts, next ids that are proposed for the model to check."""
    add(
        "--draft",
        choices=DRAFTS,
        default="off",
        help="propose several next ids, which the model checks at once; the answer stays the same. lookup: propose "
        "what followed when the same words came before, in the prompt or the answer; head: propose what the model's "
        "draft head guesses, if it has one; auto: like lookup and head, but only as many ids as save time on this "
        "machine, perhaps none; off: propose nothing, except by --draft-model (default: "
        "off)",
    )
    add(
        "--draft-model",
        metavar="MODEL",
        help="smaller model with the same vocabulary that proposes next ids, also without --draft: folder, hub id or "
        "bundled model, plain or with hypertokens; bounds of the KV caches do not count its own (default: none)",
    )
    add(
        "--num-draft-tokens",
        metavar="N",
        type=int,
        default=DRAFT_TOKENS,
        help=f"ids that --draft-model proposes per pass, 1 to {MOST_PROPOSED}; --draft auto chooses the number itself "
        f"(default: {DRAFT_TOKENS})",
    )
    add(
        "--draft-exact",
        action="store_true",
        help="where --draft finds two candidates for the next id almost equally likely, choose again by a model call "
        "over one id, which rounds as generation without drafts does (default: off)",
    )


def add_kv_size_flag(add: Any) -> None:
    """Declares --max-kv-size."""
    add(
        "--max-kv-size",
        type=int,
        help="maximum number of ids in the KV cache of a plain model, of which the first 4 are always kept; refused "
        f"for a model with hypertokens, because {ROTATES} (default: no maximum)",
    )


def check_kv_size(args: argparse.Namespace, model: str) -> None:
    """Raises `GenerationError` if --max-kv-size is given and the model has hypertokens. model: its name."""
    if args.max_kv_size is not None and not is_plain_model(model, getattr(args, "revision", None)):
        raise GenerationError(f"--max-kv-size cannot be used: {ROTATES}; a model without hypertokens can have one")


class RefusedFlag(argparse.Action):
    """A flag of mlx-lm that cannot work here. const: the reason. Raises `GenerationError` if the flag is given."""

    def __init__(self, *names: Any, const: str, nargs: Any = None, **options: Any) -> None:
        super().__init__(*names, nargs=nargs, const=const, help=f"refused: {const}", **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Raises the error."""
        raise GenerationError(f"{self.option_strings[0]} cannot be used: {self.const}; mlx-lm has it")


class _MarkGiven(argparse.Action):
    """Stores a flag's value, and sets `given_<name>` to True, which shows that the value is not the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"given_{self.dest}", True)


def _parse_verbose(text: str) -> bool:
    """Returns the value of --verbose: False for "false" or "f" in any case, else True, as in mlx_lm."""
    return text.lower() not in ("false", "f")
