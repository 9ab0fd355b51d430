"""`mlx_zip generate`: has the flags and output of mlx_lm.generate and more flags; counts are in base tokens."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlx_zip import named
from mlx_zip.arguments import parse_json_map
from mlx_zip.cli import colours
from mlx_zip.cli import engine_choice as engines
from mlx_zip.cli import row_cache as rows
from mlx_zip.cli.actions import read_standard_input
from mlx_zip.cli.generation_flags import add_arguments, check_kv_size, read_sampling_flags
from mlx_zip.cli.serving.opening import pack_options
from mlx_zip.errors import GenerationError
from mlx_zip.layout import has_hypertokens
from mlx_zip.packs import chosen as chosen_packs

if TYPE_CHECKING:
    from mlx_zip.packs.pack import Pack

__all__ = ["add_arguments", "read_prompt", "run"]

PASSED_FLAGS = (
    "max_tokens",
    "stop",
    "prefill_step_size",
    "max_kv_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "draft",
    "num_draft_tokens",
    "draft_exact",
)


_ROW_ORIGINS = ("encoded", "from_memory", "from_disk")  # counts of a `RowStore`


def run(args: argparse.Namespace) -> int:
    """Generates a text and prints it; returns 0, or 130 after Ctrl-C. Raises `MlxZipError`."""
    if args.model is None and args.prompt_cache_file is None:
        _default_to_bundled_model(args)
    biases = parse_json_map("--logit-bias", args.logit_bias)
    engines.check_engine_flags(args)
    group = engines.connect_machines_of_run(args)
    if group is not None and args.prompt_cache_file is not None:
        raise GenerationError("--prompt-cache-file: its KV cache is of a whole model, not of a share on each machine")
    if group is not None and args.prompt == "-":
        raise GenerationError("--prompt -: mlx.launch does not pass on the end of standard input; give the text itself")
    engines.choose_engine(args, args.model, group=group)
    prompt = read_prompt(args.prompt)
    from mlx_zip.engine.sampling.options import Sampling, parse_logit_bias

    sampling = {**read_sampling_flags(args), "logit_bias": parse_logit_bias(biases)}
    Sampling.from_options(sampling)  # refuses a bias out of range
    if engines.is_torch_engine(args):
        return _generate_on_torch(args, prompt, sampling)

    from mlx_zip.models.machines import lost_machines_as_errors, wait_for_machines, watch_machines

    with lost_machines_as_errors(), watch_machines(group):
        status = _generate_on_mlx(args, prompt, sampling, group)
        if status == 0:
            wait_for_machines(group)
        return status


def _generate_on_mlx(args: argparse.Namespace, prompt: str, sampling: dict[str, Any], group: Any) -> int:
    """Generates a text on MLX and prints it; returns the exit status.

    sampling: fields of `Sampling`. group: the machines of this run, None for one.
    """
    from mlx_zip.engine.mlx.draft_model import load_draft_model
    from mlx_zip.engine.mlx.generate import load, stream_generate
    from mlx_zip.text.tokenizers import add_eos_tokens

    chosen, saved = chosen_packs.read_packs(args.pack), _read_saved_cache(args)
    name: Any = args.model if saved is None else saved.model_for(args.model)
    check_kv_size(args, name)
    with rows.open_row_cache(args) as store:
        model, tokenizer = load(
            name,
            adapter_path=args.adapter_path,
            tokenizer_config={} if saved is None else saved.tokenizer_config,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            canonical=args.canonical,
            row_store=store,
            group=group,
            **pack_options(chosen, args.codebook_size, name, args.revision),
        )
        if chosen is not None:
            chosen_packs.check_pack_fits(chosen, model, tokenizer)
        draft_model = None
        if args.draft_model is not None:
            draft_model = load_draft_model(args.draft_model, tokenizer, args.trust_remote_code)
        if saved is not None:
            from mlx_zip.engine.sessions.mlx_caches import position_settings

            saved.check_positions(position_settings(model))
        add_eos_tokens(tokenizer, args.extra_eos_token)
        responses = stream_generate(
            model,
            tokenizer,
            make_chat_prompt(tokenizer, prompt, args, continues=saved is not None),
            prompt_cache=None if saved is None else saved.cache,
            # without the fingerprint of its tokenizer, which was checked above: --extra-eos-token may have changed it
            pack=None if chosen is None else replace(chosen, tokenizer=None),
            draft_model=draft_model,
            **sampling,
            **{name: getattr(args, name) for name in PASSED_FLAGS},
        )
        record = chosen_packs.pack_record(chosen, model)
        return print_answer(args, name, responses, record, store if has_hypertokens(model) else None, group)


def _generate_on_torch(args: argparse.Namespace, prompt: str, sampling: dict[str, Any]) -> int:
    """Generates a text on PyTorch and prints it; returns the exit status. sampling: fields of `Sampling`."""
    from mlx_zip.engine.responses import stream_answers
    from mlx_zip.models.model_folder import find_model_folder
    from mlx_zip.text.prompts import encode_prompt
    from mlx_zip.text.tokenizers import add_eos_tokens

    chosen, folder = chosen_packs.read_packs(args.pack), find_model_folder(args.model, args.revision)
    with engines.open_torch_engine(
        folder,
        args.engine,
        canonical=args.canonical,
        trust_remote_code=args.trust_remote_code,
        prefill_step_size=args.prefill_step_size,
        draft=args.draft,
        max_running=1,
        sessions=None,
        **pack_options(chosen, args.codebook_size, args.model, args.revision),
    ) as engine:
        pack, record = chosen_packs.choose_request_pack(chosen, engine), {}
        add_eos_tokens(engine.tokenizer, args.extra_eos_token)
        base_ids = encode_prompt(engine.tokenizer, make_chat_prompt(engine.tokenizer, prompt, args))
        answers = stream_answers(engine, [base_ids], [sampling], pack, args.max_tokens, args.stop)
        if size := engine.info.codebook_size:
            record = {"codebook_size": size, "codebook_fingerprint": _pack_fingerprint(chosen, folder)}
        return print_answer(args, args.model, (response for _, response in answers), record)


def _pack_fingerprint(chosen: Pack | None, folder: Path) -> str | None:
    """Returns the fingerprint of the packs of --pack, else of the tuned pack in the model's folder, else None."""
    from mlx_zip.packs.pack import IN_FOLDER, load_pack

    if chosen is not None:
        return chosen.fingerprint
    return load_pack(folder / IN_FOLDER).fingerprint if (folder / IN_FOLDER).exists() else None


def _read_saved_cache(args: argparse.Namespace) -> Any:
    """Returns the `SavedCache` of --prompt-cache-file, None without it. Raises `GenerationError` if it does not fit."""
    from mlx_zip.engine.mlx.prompt_caches import read_prompt_cache

    if args.prompt_cache_file is None:
        return None
    saved = read_prompt_cache(args.prompt_cache_file)
    saved.check_kv_bits(args.kv_bits, args.kv_group_size)
    return saved


def opening_notes(args: argparse.Namespace, model: str, has_hypertokens: bool) -> list[str]:
    """Returns lines to print before the text on a terminal: default model and prompt, and what the colours mean."""
    lines = []
    if not hasattr(args, "given_prompt"):
        lines.append(f"model {Path(model).name}, prompt {args.prompt!r} (choose with --model and --prompt)")
    if has_hypertokens and colours.should_colour(args.color, sys.stdout):
        lines.append(colours.colour_legend())
    return lines


def _default_to_bundled_model(args: argparse.Namespace) -> None:
    """Sets --model in `args` to the bundled model, and --prompt and --max-tokens, unless given, to its defaults."""
    args.model = str(named.bundled_model_folder(named.DEFAULT))  # even if the current folder has one of that name
    if not hasattr(args, "given_prompt"):
        args.prompt = named.PROMPT
    if not hasattr(args, "given_max_tokens"):
        args.max_tokens = named.MAX_TOKENS


def print_answer(
    args: argparse.Namespace,
    model: str,
    responses: Iterable[Any],
    codebook: dict[str, Any],
    store: Any = None,
    group: Any = None,
) -> int:
    """Prints each response's text as it arrives, then the figures; returns 0, or 130 after Ctrl-C.

    model: name that the user gave. responses: those of `stream_generate`. codebook: further fields for --json, {} for a
    plain model. store: the `RowStore` whose row counts --json prints, None for no counts. group: the machines of this
    run, of which only the first prints; None for one.
    """
    from mlx_zip.engine.responses import RULE, format_footer

    first = group is None or group.rank() == 0
    with nullcontext(sys.stdout) if first else open(os.devnull, "w", encoding="utf-8") as out:
        framed = args.verbose and not args.json
        if framed and out.isatty():
            print(*opening_notes(args, model, bool(codebook)), sep="\n", file=sys.stderr)
        if framed:
            print(RULE, file=out)
        text, last, status = _print_text(args, responses, out)
        if args.json:
            record = {
                "model": args.model,
                "text": text,
                "finish_reason": "interrupted" if status or last is None else last.finish_reason,
                **({} if last is None else last.figures()),
                **codebook,
                **({} if store is None else {f"rows_{name}": getattr(store, name) for name in _ROW_ORIGINS}),
            }
            print(json.dumps(record, ensure_ascii=False), file=out)
            return status
        print(file=out)
        if framed:
            print(RULE, file=out)
            if not text:
                print("No text generated for this prompt", file=out)
            if last is not None:
                print(format_footer(last), file=out)
        return status


def _print_text(args: argparse.Namespace, responses: Iterable[Any], out: TextIO) -> tuple[str, Any, int]:
    """Prints each response's text as it arrives, unless --json. Returns all text, the last response, exit status."""
    coloured = colours.should_colour(args.color, out)
    text, response = "", None
    try:
        for response in responses:
            text += response.text
            if not args.json:
                out.write(colours.colour_text(response.text, len(response.base_ids)) if coloured else response.text)
                out.flush()
    except KeyboardInterrupt:
        return text, response, 130
    return text, response, 0


def read_prompt(prompt: str) -> str:
    r"""Returns the text of --prompt: `-` reads standard input; backslash-n and backslash-t become newline and tab.

    Raises `GenerationError` if the prompt is empty or not valid Unicode, or standard input is closed or not UTF-8.
    """
    from mlx_zip.text.prompts import check_unicode

    prompt = prompt.replace("\\n", "\n").replace("\\t", "\t")
    if prompt == "-":
        prompt = read_standard_input()
    if not prompt:
        raise GenerationError("the prompt is empty: give text with --prompt, or - to read standard input")
    check_unicode("the prompt", prompt)
    return prompt


def make_chat_prompt(tokenizer: Any, prompt: str, args: argparse.Namespace, continues: bool = False) -> Any:
    """Returns the prompt for `stream_generate`: a `Chat` if a chat template is used, else the text.

    continues: whether a saved prompt cache precedes the prompt; if so and a chat template is used, returns the base ids
    of the rendered conversation from the user's message on.
    """
    from mlx_zip.text.prompts import Chat, encode_text

    if not tokenizer.has_chat_template or args.ignore_chat_template:
        _refuse_chat_template_flags(args)
        return prompt
    options = parse_json_map("--chat-template-config", args.chat_template_config)
    chat = Chat([{"role": "user", "content": prompt}], args.system_prompt, args.prefill_response, options)
    return encode_text(tokenizer, chat.next_turn(tokenizer)) if continues else chat


def _refuse_chat_template_flags(args: argparse.Namespace) -> None:
    """Raises `GenerationError` if a flag was given that only applies to a chat template."""
    chat = {"system_prompt", "prefill_response", "chat_template_config", "use_default_chat_template"}
    if given := sorted(name for name in chat if getattr(args, name)):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise GenerationError(f"{flags} needs a chat template, and this tokenizer has none or it is ignored")
