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
    "num_draft_tokens": "it has a meaning only together with --draft-model",
    "image": "the supported models read text only",
    "quantize_activations": "hypertoken rows are computed from the head's weights, which this flag would replace",
}
_COLOURS, _LONGER = {2: "36", 3: "32", 4: "33"}, "35"  # by base tokens: cyan, green, yellow; magenta for longer ones
_NUMBERS = {  # sampling flags: (type, default, help); None is off
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
    add("--revision", help="branch, tag or commit of a hub model (default: main)")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the tokenizer (default: off)",
    )
    add(
        "--adapter-path",
        help="folder of an mlx-lm adapter to load with the model (default: none); merge an adapter of mlx_zip train "
        "with mlx_zip convert instead",
    )
    add(
        "--extra-eos-token",
        nargs="+",
        default=(),
        help="tokens that end the text, in addition to the tokenizer's own (default: none)",
    )
    add("--system-prompt", help="system message placed before the prompt; needs a chat template (default: none)")
    add(
        "--prompt",
        "-p",
        default="hello",
        action=_Given,
        help="user message, or - to read it from standard input as UTF-8 (default: hello, without --model a request "
        "for a story)",
    )
    add("--prefill-response", help="beginning of the answer, which the model continues (default: none)")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=100,
        action=_Given,
        help="maximum number of base tokens to generate (default: 100, without --model 400)",
    )
    add("--stop", nargs="+", default=(), help="strings that end the text; they are not printed (default: none)")
    for name, (kind, default, text) in _NUMBERS.items():
        shown = f" (default: {default:g})" if default is not None else ""
        add("--" + name.replace("_", "-"), type=kind, default=default, help=text + shown)
    add(
        "--logit-bias",
        help='JSON map from at most 1000 base ids to numbers added to their logits, for example {"42": -5} '
        "(default: none)",
    )
    add(
        "--ignore-chat-template",
        action="store_true",
        help="give the prompt to the model as plain text, without the chat template",
    )
    add(
        "--use-default-chat-template",
        action="store_true",
        help="no effect; accepted because mlx_lm.generate has it (the model's own chat template is used)",
    )
    add("--chat-template-config", help="JSON map of further arguments for the chat template (default: none)")
    add(
        "--verbose",
        type=_flag,
        default=True,
        metavar="BOOL",
        help="True prints the text and figures on speed and memory; False prints the text alone (default: True)",
    )
    add(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="maximum number of prompt ids that one model call reads (default: 2048)",
    )
    add(
        "--prompt-cache-file",
        help="prompt cache to continue with the prompt, in the format of mlx_lm.cache_prompt (default: none)",
    )
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        "(default: as in the model's config.json)",
    )
    packs.add_flags(add)
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
        help="number of ids in the KV cache from which on --kv-bits quantizes it (default: 5000)",
    )
    rows.add_flags(add)
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="when to colour hypertokens by their length in base tokens; auto: on a terminal (default: auto)",
    )
    add("--json", action="store_true", help="print one JSON object with text and figures at the end, not the text")
    add("--max-kv-size", type=int, help="refused: " + REFUSED["max_kv_size"])
    add("--draft-model", help="refused: " + REFUSED["draft_model"])
    add("--num-draft-tokens", type=int, help="refused: " + REFUSED["num_draft_tokens"])
    add("--image", nargs="+", help="refused: " + REFUSED["image"])
    add("--quantize-activations", "-qa", action="store_true", help="refused: " + REFUSED["quantize_activations"])


def run(args: argparse.Namespace) -> int:
    """Generates a text and prints it; returns 0, or 130 after Ctrl-C. Raises `MlxZipError`."""
    for name, reason in REFUSED.items():
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise GenerationError(f"--{name.replace('_', '-')} cannot be used: {reason}; mlx_lm.generate has it")
    if args.model == "":
        raise GenerationError("no model: --model is empty")
    if args.model is None and args.prompt_cache_file is None:
        _choose_bundled_model(args)
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
    """Returns the lines printed before the text on a terminal: default model and prompt, and what the colours mean."""
    lines = []
    if not hasattr(args, "given_prompt"):
        lines.append(f"model {Path(model).name}, prompt {args.prompt!r} (choose with --model and --prompt)")
    if has_hypertokens and _coloured(args.color, sys.stdout):
        named = [f"\x1b[{colour}m{n}\x1b[0m" for n, colour in _COLOURS.items()]
        named.append(f"\x1b[{_LONGER}m{max(_COLOURS) + 1} or more\x1b[0m")
        lines.append(f"coloured text took one step for {', '.join(named)} base tokens")
    return lines


class _Given(argparse.Action):
    """Stores a flag's value, and sets `given_<name>` to True to tell a given value from the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"given_{self.dest}", True)


def _choose_bundled_model(args: argparse.Namespace) -> None:
    """Sets the bundled model in `args`, and its own default prompt and length unless the user gave them."""
    args.model = str(bundled.bundled_model(bundled.DEFAULT))  # even if a folder of that name is here
    if not hasattr(args, "given_prompt"):
        args.prompt = bundled.PROMPT
    if not hasattr(args, "given_max_tokens"):
        args.max_tokens = bundled.MAX_TOKENS


def show(
    responses: Any, args: argparse.Namespace, out: TextIO, store: Any = None, codebook: dict[str, Any] | None = None
) -> int:
    """Prints each response's text as it arrives, then the figures; returns 0, or 130 after Ctrl-C.

    responses: those of `stream_generate`. store: the `RowStore` whose row counts --json prints, None for no counts.
    codebook: further fields for --json.
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
    """Returns the object that --json prints. *_tokens count base tokens; steps and prompt_ids count ids.

    last: the final response, None if Ctrl-C came before the first. status: not 0 if Ctrl-C ended the text.
    """
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
    """Returns the number of hypertoken rows by origin: encoded, from memory, from disk; {} without a store."""
    names = () if store is None else ("encoded", "from_memory", "from_disk")
    return {f"rows_{name}": getattr(store, name) for name in names}


def read_prompt(prompt: str) -> str:
    r"""Returns the text of --prompt: `-` reads standard input; backslash-n and backslash-t become newline and tab.

    Raises `GenerationError` for an empty prompt or one that is not UTF-8.
    """
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
    """Returns the prompt for `stream_generate`: a `Chat` if a chat template is used, else the text.

    continues: whether a saved prompt cache precedes the prompt. The result is then the base ids of the rendered
    conversation from the user's message on.
    """
    from mlx_zip.text.prompts import Chat, encode_text

    if not tokenizer.has_chat_template or args.ignore_chat_template:
        _refuse_chat_flags(args)
        return prompt
    options = _json_map("--chat-template-config", args.chat_template_config)
    chat = Chat([{"role": "user", "content": prompt}], args.system_prompt, args.prefill_response, options)
    return encode_text(tokenizer, chat.next_turn(tokenizer)) if continues else chat


def _refuse_chat_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` if a flag was given that only a chat template can use."""
    chat = {"system_prompt", "prefill_response", "chat_template_config", "use_default_chat_template"}
    if given := sorted(name for name in chat if getattr(args, name)):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise GenerationError(f"{flags} needs a chat template, and this tokenizer has none or it is ignored")


def _add_eos(tokenizer: Any, tokens: list[str]) -> None:
    """Makes tokens, each a token's text or an id in digits, end the text. Raises `GenerationError`."""
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary and not (token.isdecimal() and len(token) < 10 and int(token) < len(tokenizer)):
            raise GenerationError(f"--extra-eos-token {token!r} is not a token of this tokenizer")
        tokenizer.add_eos_token(token)


def _read_cache(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Returns the prompt cache of --prompt-cache-file and its metadata.

    Raises `GenerationError` for a file that is no prompt cache, and for flags that contradict what was saved.
    """
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
    """Returns a flag's value, parsed as a JSON object; {} if it was not given. Raises `GenerationError`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise GenerationError(f"{flag} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise GenerationError(f"{flag} must be a JSON map")
    return value


def _logit_bias(text: str | None) -> dict[int, float]:
    """Returns the value of --logit-bias as base id -> number. Raises `GenerationError`."""
    biases = _json_map("--logit-bias", text)
    for key, value in biases.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise GenerationError(f"--logit-bias: {key!r}: {value!r} is not a base id with a number")
    try:
        return {int(key): float(value) for key, value in biases.items()}
    except (ValueError, OverflowError) as error:  # digits beyond what Python converts
        raise GenerationError(f"--logit-bias: a number is too long: {error}") from error


def _coloured(choice: str, out: TextIO) -> bool:
    """Returns whether to colour what is written to `out`. choice: the value of --color."""
    return choice == "always" or (choice == "auto" and out.isatty() and not os.environ.get("NO_COLOR"))


def _paint(response: Any) -> str:
    """Returns a response's text in the colour of its number of base tokens; newlines stay uncoloured."""
    length = len(response.base_ids)
    if length < 2 or not response.text:
        return response.text
    colour = _COLOURS.get(length, _LONGER)
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in response.text.split("\n"))


def _flag(text: str) -> bool:
    """Returns the value of --verbose: False for "false" or "f" in any case, else True, as in mlx_lm."""
    return text.lower() not in ("false", "f")
