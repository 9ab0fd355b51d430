"""`mlx_zip generate`: mlx_lm.generate's flags and output, with counts in base tokens, and a few flags of ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from mlx_zip import bundled
from mlx_zip.cli import packs, rows
from mlx_zip.errors import GenerationError, MlxZipError
from mlx_zip.layout import is_zip

REFUSED = {  # flags of mlx_lm.generate that cannot work here, and why
    "max_kv_size": "a rotating KV cache forgets ids that the codebook still knows",
    "draft_model": "a draft model proposes base ids, and hypertokens cannot be verified against them",
    "num_draft_tokens": "it belongs to --draft-model",
    "image": "the supported models read text only",
    "quantize_activations": "hypertoken rows are computed from the head's own weights, which it replaces",
}
_COLOURS, _LONGER = {2: "36", 3: "32", 4: "33"}, "35"  # by base tokens: cyan, green, yellow; magenta for longer ones
_NUMBERS = {  # sampling flags: (type, default, help); None is off
    "temp": (float, 0.0, "sampling temperature; 0 is greedy"),
    "top_p": (float, 1.0, "nucleus sampling: keep the likeliest ids up to this probability"),
    "min_p": (float, 0.0, "drop ids less likely than this fraction of the likeliest id's probability"),
    "top_k": (int, 0, "keep the k likeliest ids; 0 keeps all"),
    "xtc_probability": (
        float,
        0.0,
        "probability per step that XTC sampling drops all but the least likely of the top choices",
    ),
    "xtc_threshold": (float, 0.1, "probability that a candidate needs for XTC"),
    "min_tokens_to_keep": (int, 1, "minimum number of ids that min-p keeps"),
    "seed": (int, None, "seed of the random numbers"),
    "repetition_penalty": (float, None, "divide the logits of recent base tokens by this"),
    "repetition_context_size": (int, 20, "number of recent base tokens that the repetition penalty sees"),
    "presence_penalty": (float, None, "subtract this from the logits of recent base tokens"),
    "presence_context_size": (int, 20, "number of recent base tokens that the presence penalty sees"),
    "frequency_penalty": (float, None, "subtract this once per occurrence among recent base tokens"),
    "frequency_context_size": (int, 20, "number of recent base tokens that the frequency penalty sees"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.generate keep their names and defaults."""
    add = parser.add_argument
    add("--model", help="model folder, hub id or bundled model (default: stories, which tells children's stories)")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code of its own")
    add("--adapter-path", help="folder of an mlx-lm adapter; an adapter of mlx_zip train is merged by mlx_zip convert")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--system-prompt", help="system message in front of the prompt; needs a chat template")
    add(
        "--prompt",
        "-p",
        default="hello",
        action=_Given,
        help="user message (default: hello); - reads standard input as UTF-8",
    )
    add("--prefill-response", help="text that the answer begins with; it becomes part of the prompt")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=100,
        action=_Given,
        help="base tokens to generate at most (default: 100, without --model 400)",
    )
    add("--stop", nargs="+", default=(), help="strings that end the text; they are not printed")
    for name, (kind, default, text) in _NUMBERS.items():
        shown = f" (default: {default:g})" if default is not None else ""
        add("--" + name.replace("_", "-"), type=kind, default=default, help=text + shown)
    add(
        "--logit-bias",
        help='JSON map of base ids to what is added to their logits, at most 1000, for example {"42": -5}',
    )
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="accepted as in mlx_lm; the model's template is used")
    add("--chat-template-config", help="JSON map of further arguments for the chat template")
    add("--verbose", type=_flag, default=True, metavar="BOOL", help="False prints only the text")
    add("--prefill-step-size", type=int, default=2048, help="prompt ids that one model call reads (default: 2048)")
    add("--prompt-cache-file", help="prompt cache in the format of mlx_lm.cache_prompt; the prompt continues it")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        "(default: as in the model's config.json)",
    )
    packs.add_flags(add)
    add("--kv-bits", type=int, help="bits of a quantized KV cache (default: not quantized)")
    add("--kv-group-size", type=int, default=64, help="group size of a quantized KV cache (default: 64)")
    add("--quantized-kv-start", type=int, default=5000, help="ids before the KV cache is quantized (default: 5000)")
    rows.add_flags(add)
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour hypertokens by their length in base tokens (default: auto, on a terminal)",
    )
    add("--json", action="store_true", help="print one JSON object at the end instead of the text")
    add("--max-kv-size", type=int, help="refused: " + REFUSED["max_kv_size"])
    add("--draft-model", help="refused: " + REFUSED["draft_model"])
    add("--num-draft-tokens", type=int, help="refused: " + REFUSED["num_draft_tokens"])
    add("--image", nargs="+", help="refused: " + REFUSED["image"])
    add("--quantize-activations", "-qa", action="store_true", help="refused: " + REFUSED["quantize_activations"])


def run(args: argparse.Namespace) -> int:
    """Generates and prints; 0, or 130 after Ctrl-C. Raises `MlxZipError`."""
    for name, reason in REFUSED.items():
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise GenerationError(f"--{name.replace('_', '-')} cannot be used: {reason}; mlx_lm.generate has it")
    if args.model == "":
        raise GenerationError("no model: --model is empty")
    if args.model is None and args.prompt_cache_file is None:
        _tell_a_story(args)
    options = {name: getattr(args, name) for name in _NUMBERS}
    options["logit_bias"] = _logit_bias(args.logit_bias)
    prompt = read_prompt(args.prompt)

    from mlx_zip.generate import load, stream_generate

    chosen = packs.read(args)
    cache, metadata = (None, {}) if args.prompt_cache_file is None else _read_cache(args)
    name = args.model or metadata["model"]
    plain = (chosen is not None or args.codebook_size is not None) and packs.is_plain(name, args.revision)
    if plain and args.codebook_size is not None:
        raise GenerationError(f"--codebook-size: {name} is a plain model, whose codebook is its pack or none")
    with rows.open_store(args) as store:
        model, tokenizer = load(
            name,
            adapter_path=args.adapter_path,
            tokenizer_config=json.loads(metadata.get("tokenizer_config", "{}")),
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            canonical=args.canonical,
            row_store=store,
            **packs.load_options(args, chosen, plain),
        )
        if chosen is not None:
            packs.check(chosen, model, tokenizer)
        _add_eos(tokenizer, args.extra_eos_token)
        responses = stream_generate(
            model,
            tokenizer,
            read_chat(tokenizer, prompt, args, continues=cache is not None),
            max_tokens=args.max_tokens,
            stop=args.stop,
            prompt_cache=cache,
            pack=None if chosen is None else chosen.merged.start,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            **options,
        )
        if sys.stdout.isatty() and args.verbose and not args.json:
            print(*notes(args, name, is_zip(model)), sep="\n", file=sys.stderr)
        return show(responses, args, sys.stdout, store if is_zip(model) else None, packs.record(chosen, model))


def notes(args: argparse.Namespace, model: str, has_hypertokens: bool) -> list[str]:
    """Returns the lines that a terminal gets before the text: defaults that were taken, and what the colours mean."""
    told = []
    if not hasattr(args, "given_prompt"):
        told.append(f"model {Path(model).name}, prompt {args.prompt!r} (choose with --model and --prompt)")
    if has_hypertokens and _coloured(args.color, sys.stdout):
        named = [f"\x1b[{colour}m{n}\x1b[0m" for n, colour in _COLOURS.items()]
        named.append(f"\x1b[{_LONGER}m{max(_COLOURS) + 1} or more\x1b[0m")
        told.append(f"coloured text took one step for {', '.join(named)} base tokens")
    return told


class _Given(argparse.Action):
    """Stores a value, and that it was given: as `given_<name>`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"given_{self.dest}", True)


def _tell_a_story(args: argparse.Namespace) -> None:
    """Without a model the bundled one is meant; a prompt and a length that suit it go with it unless they are given."""
    args.model = str(bundled.bundled_model(bundled.DEFAULT))  # not what a folder here of that name holds
    if not hasattr(args, "given_prompt"):
        args.prompt = bundled.PROMPT
    if not hasattr(args, "given_max_tokens"):
        args.max_tokens = bundled.MAX_TOKENS


def show(
    responses: Any, args: argparse.Namespace, out: TextIO, store: Any = None, codebook: dict[str, Any] | None = None
) -> int:
    """Prints the text as it comes and the figures after it; Ctrl-C ends both cleanly.

    store: the `RowStore` used. codebook: what --json says of it.
    """
    from mlx_zip.generate import RULE, footer

    framed, coloured = args.verbose and not args.json, _coloured(args.color, out)
    text, response, status = "", None, 0
    if framed:
        print(RULE, file=out)
    try:
        for response in responses:
            text += response.text
            if not args.json:
                out.write(_paint(response) if coloured else response.text)
                out.flush()
    except KeyboardInterrupt:
        status = 130
    if args.json:
        record = _record(args, text, response, status) | (codebook or {}) | _rows(store)
        print(json.dumps(record, ensure_ascii=False), file=out)
        return status
    print(file=out)
    if framed:
        print(RULE, file=out)
        if not text:
            print("No text generated for this prompt", file=out)
        if response is not None:
            print(footer(response), file=out)
    return status


def _record(args: argparse.Namespace, text: str, last: Any, status: int) -> dict[str, Any]:
    """What --json prints. Counts are base tokens, but for steps and prompt_ids."""
    record = {"model": args.model, "text": text, "finish_reason": "interrupted" if status else last.finish_reason}
    if last is None:
        return record
    return record | {
        "prompt_tokens": last.prompt_tokens,
        "prompt_ids": last.prompt_ids,
        "prompt_tokens_per_s": last.prompt_tps,
        "generation_tokens": last.generation_tokens,
        "steps": last.steps,
        "hypertokens": last.hypertokens,
        "base_tokens_per_step": last.base_tokens_per_step,
        "hyper_share": last.hyper_share,
        "generation_tokens_per_s": last.generation_tps,
        "text_bytes": last.bytes,
        "peak_memory_gb": last.peak_memory,
    }


def _rows(store: Any) -> dict[str, int]:
    """How many hyper rows were encoded, and how many were there already."""
    names = () if store is None else ("encoded", "from_memory", "from_disk")
    return {f"rows_{name}": getattr(store, name) for name in names}


def read_prompt(prompt: str) -> str:
    r"""The prompt's text: `\n` and `\t` written out are replaced as in mlx_lm, `-` reads standard input."""
    prompt = prompt.replace("\\n", "\n").replace("\\t", "\t")
    if prompt == "-":
        if sys.stdin is None:
            raise GenerationError("standard input is closed")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise GenerationError(f"standard input is not valid UTF-8 at byte {error.start}") from error
    if not prompt:
        raise GenerationError("the prompt is empty: give text with --prompt, or - to read standard input")
    return prompt


def read_chat(tokenizer: Any, prompt: str, args: argparse.Namespace, continues: bool) -> Any:
    """Returns the prompt for `stream_generate`: a conversation where there is a chat template, else the text.

    continues: whether a saved cache holds what comes before, so that only the message and what follows it is read.
    """
    from mlx_zip.text.prompts import Chat, encode_text

    if not tokenizer.has_chat_template or args.ignore_chat_template:
        _refuse_chat_flags(args)
        return prompt
    options = _json_map("--chat-template-config", args.chat_template_config)
    chat = Chat([{"role": "user", "content": prompt}], args.system_prompt, args.prefill_response, options)
    return encode_text(tokenizer, chat.next_turn(tokenizer)) if continues else chat


def _refuse_chat_flags(args: argparse.Namespace) -> None:
    chat = {"system_prompt", "prefill_response", "chat_template_config", "use_default_chat_template"}
    if given := sorted(name for name in chat if getattr(args, name)):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise GenerationError(f"{flags} needs a chat template, and this tokenizer has none or it is ignored")


def _add_eos(tokenizer: Any, tokens: list[str]) -> None:
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary and not (token.isdecimal() and len(token) < 10 and int(token) < len(tokenizer)):
            raise GenerationError(f"--extra-eos-token {token!r} is not a token of this tokenizer")
        tokenizer.add_eos_token(token)


def _read_cache(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """The saved prompt cache and its metadata. Raises `GenerationError` when it cannot be used as asked."""
    from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache

    file = args.prompt_cache_file
    if not Path(file).is_file():
        raise GenerationError(f"--prompt-cache-file {file}: no such file")
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        metadata = dict(metadata)
        json.loads(metadata.get("tokenizer_config", "{}"))
    except MlxZipError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GenerationError(f"--prompt-cache-file {file} is not a saved prompt cache: {error}") from error
    known = metadata.get("model")
    if not args.model and known is None:
        raise GenerationError(f"--prompt-cache-file {file} does not name its model; give it with --model")
    if args.model is not None and known is not None and args.model != known:
        raise GenerationError(f"--model {args.model} is not the model that made the prompt cache ({known})")
    if args.kv_bits is not None and isinstance(cache[0], QuantizedKVCache):
        saved = (cache[0].bits, cache[0].group_size)
        if saved != (args.kv_bits, args.kv_group_size):
            raise GenerationError(f"--kv-bits, --kv-group-size: the saved cache has {saved[0]} and {saved[1]}")
    return cache, metadata


def _json_map(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise GenerationError(f"{flag} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise GenerationError(f"{flag} must be a JSON map")
    return value


def _logit_bias(text: str | None) -> dict[int, float]:
    biases = _json_map("--logit-bias", text)
    for key, value in biases.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise GenerationError(f"--logit-bias: {key!r}: {value!r} is not a base id with a number")
    try:
        return {int(key): float(value) for key, value in biases.items()}
    except (ValueError, OverflowError) as error:  # digits beyond what Python converts
        raise GenerationError(f"--logit-bias: a number is too long: {error}") from error


def _coloured(choice: str, out: TextIO) -> bool:
    return choice == "always" or (choice == "auto" and out.isatty() and not os.environ.get("NO_COLOR"))


def _paint(response: Any) -> str:
    """The text, coloured by how many base tokens its id stands for; newlines stay outside the colour."""
    length = len(response.base_ids)
    if length < 2 or not response.text:
        return response.text
    colour = _COLOURS.get(length, _LONGER)
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in response.text.split("\n"))


def _flag(text: str) -> bool:
    return text.lower() not in ("false", "f")
