"""`mlx_zip cache-prompt`: has the flags and output of mlx_lm.cache_prompt and more flags; counts are in base tokens."""

from __future__ import annotations

import argparse
import sys
import time

from mlx_zip import named
from mlx_zip.arguments import add_codebook_flags, add_trust_remote_code_flag
from mlx_zip.cli import row_cache
from mlx_zip.cli.engine_choice import ENGINE_NAMES, MLX, is_torch_engine
from mlx_zip.cli.generation import read_prompt
from mlx_zip.cli.generation_flags import add_kv_quantization_flags, add_kv_size_flag, check_kv_size
from mlx_zip.device import set_device_from_environment
from mlx_zip.errors import GenerationError
from mlx_zip.files import check_writable, expand_home
from mlx_zip.packs.chosen import read_packs

NO_FILES = "on PyTorch a prompt that was read is saved by a server, mlx_zip serve --session-files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; those of mlx_lm.cache_prompt keep their names and defaults."""
    add = parser.add_argument
    add("--model", help="model to run: folder, hub id or bundled model (default: stories, a bundled model)")
    add("--revision", help="branch, tag or commit of a hub model (default: main)")
    add("--adapter-path", help="folder of an mlx-lm adapter to load with the model (default: none)")
    add_trust_remote_code_flag(add)
    add("--eos-token", help="end-of-sequence token of the tokenizer (default: the tokenizer's own)")
    add("--prompt-cache-file", required=True, help=".safetensors file to write; an existing file is replaced")
    add("--prompt", required=True, help="text to read, or - to read it from standard input as UTF-8")
    add_codebook_flags(add)
    add_kv_quantization_flags(add)
    row_cache.add_row_cache_flags(add)
    add(
        "--engine",
        choices=ENGINE_NAMES,
        default=MLX,
        help=f"mlx or auto; torch and cuda are refused: {NO_FILES} (default: mlx)",
    )
    add_kv_size_flag(add)


def run(args: argparse.Namespace) -> int:
    """Runs the model over the prompt, writes the prompt cache and prints figures; returns 0. Raises `MlxZipError`."""
    if is_torch_engine(args):
        raise GenerationError(f"--engine {args.engine} cannot be used: {NO_FILES}")
    if args.engine != MLX:  # auto: only MLX writes such files, and its device has not been chosen yet
        set_device_from_environment()
    file = expand_home(args.prompt_cache_file)
    check_writable(file, "a prompt cache", ".safetensors")  # generate and servers read no other name
    prompt, chosen = read_prompt(args.prompt), read_packs(args.pack)
    name = str(named.bundled_model_folder(named.DEFAULT)) if args.model is None else args.model
    check_kv_size(args, name)

    import mlx.core as mx

    from mlx_zip.engine.mlx.generate import cache_prompt
    from mlx_zip.engine.mlx.served import PREFILL_STEP_SIZE
    from mlx_zip.engine.options import RunOptions
    from mlx_zip.engine.sessions.store import SessionOptions
    from mlx_zip.models.loading import load
    from mlx_zip.text.prompts import encode_shared_prompt

    config = {"trust_remote_code": args.trust_remote_code}
    if args.eos_token is not None:
        _check_eos_token(args, name)
        config["eos_token"] = args.eos_token
    with row_cache.open_row_cache(args) as store:
        model, tokenizer = load(
            name,
            adapter_path=args.adapter_path,
            tokenizer_config=config,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            row_store=store,
            pack=chosen,
            codebook_size=args.codebook_size,
        )
        kv = (args.kv_bits, args.kv_group_size, args.quantized_kv_start)
        how = RunOptions(*kv, PREFILL_STEP_SIZE, max_kv_size=args.max_kv_size)
        options = SessionOptions(model_name=name, tokenizer_config=config)
        sessions, info = cache_prompt(
            model, tokenizer, encode_shared_prompt(tokenizer, prompt), options, how, _ProgressLine()
        )
        print(file=sys.stderr)
        print(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
        print("Saving...")
        sessions.save(info.name, file)
    print(f"Prompt: {info.base_tokens} base tokens in {info.ids} ids; the file has {file.stat().st_size} bytes")
    return 0


def _check_eos_token(args: argparse.Namespace, name: str) -> None:
    """Raises `GenerationError` if --eos-token is not a token of the tokenizer.

    transformers would add an unknown token to the vocabulary, and the model has no row for it.
    """
    from mlx_zip.models.model_folder import find_model_folder
    from mlx_zip.text.tokenizers import load_tokenizer, single_token_id

    tokenizer = load_tokenizer(find_model_folder(name, args.revision), args.trust_remote_code)
    if single_token_id(tokenizer, args.eos_token) is None:
        raise GenerationError(f"--eos-token {args.eos_token!r} is not a token of this tokenizer")


class _ProgressLine:
    """Prints how many base tokens have been read, in mlx-lm's format."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, read: int) -> None:
        speed = read / max(time.monotonic() - self._started_s, 1e-9)
        print(f"\rProcessed {read:6d} tokens ({speed:6.2f} tok/s)", end="", flush=True, file=sys.stderr)
