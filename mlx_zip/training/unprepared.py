"""Checks the data of `mlx_zip train`; errors for unprepared data name the command that prepares them."""

from __future__ import annotations

import shlex
from pathlib import Path

from mlx_zip.errors import DataError
from mlx_zip.text.hub import is_hub_id
from mlx_zip.training.joined import Joined
from mlx_zip.training.prepare.folder import STATE
from mlx_zip.training.prepare.shards import is_prepared
from mlx_zip.training.settings import RunOptions

SPLITS = ("train.jsonl", "valid.jsonl", "test.jsonl")  # files of a data folder for mlx-lm


def check_prepared(options: RunOptions) -> None:
    """Raises `DataError` for data that are missing or not prepared, naming the command to run first."""
    for folder in (*options.data, *options.valid):
        if is_prepared(folder):
            continue
        if (folder / STATE).is_file():
            raise DataError(f"{folder} is not finished: run the same `mlx_zip prepare` again, which goes on with it")
        if not folder.exists() and not is_hub_id(str(folder)):
            flag = "--data" if folder in options.data else "--valid"
            raise DataError(f"{folder}: no such file or folder; {flag} names a folder that `mlx_zip prepare` made")
        lines = [_command(options, *names) for names in _texts(folder)]
        if not folder.exists():
            raise DataError(
                f"{folder}: no such folder; if it is the name of a data set, prepare it first: {' and '.join(lines)}"
            )
        raise DataError(f"{folder} is not prepared data; prepare it first: {' and '.join(lines)}")


def _texts(path: Path) -> list[tuple[str, str]]:
    """Returns (texts, folder to prepare them in) for each text file in a folder, or for a file or a hub name itself."""
    found = [name for name in SPLITS if (path / name).is_file()]
    if found:
        return [(str(path / name), f"{path.name}-{Path(name).stem}") for name in found]
    return [(str(path), f"{path.name.removesuffix('.gz').partition('.')[0] or 'data'}-prepared")]


def _command(options: RunOptions, data: str, out: str) -> str:
    """Returns the `mlx_zip prepare` command that prepares the texts `data` in the folder `out`."""
    origin = ["--model", options.model] if options.model else ["--tokenizer", str(options.tokenizer or "FOLDER")]
    context = ["--context", str(options.max_seq_length)] if options.max_seq_length else []
    counted = ["--train-on", "all"] if options.mask_prompt is False else []
    return shlex.join(["mlx_zip", "prepare", *origin, "--data", data, *context, *counted, "--out", out])


def check_as_asked(options: RunOptions, data: Joined) -> None:
    """Raises `DataError` if the data were prepared otherwise than --max-seq-length or --mask-prompt ask for."""
    for part in data.parts:
        if options.max_seq_length is not None and part.context > options.max_seq_length:
            raise DataError(
                f"--max-seq-length {options.max_seq_length}: {part.folder} holds windows of {part.context} base ids; "
                f"their length is chosen by `mlx_zip prepare --context {options.max_seq_length}`"
            )
        train_on = (part.index.get("settings") or {}).get("train_on")
        wanted = {None: None, True: "answers", False: "all"}[options.mask_prompt]
        if wanted is not None and train_on not in (None, wanted):
            raise DataError(
                f"--mask-prompt is {str(options.mask_prompt).lower()}, but {part.folder} was prepared with --train-on "
                f"{train_on}; what counts is chosen by `mlx_zip prepare --train-on {wanted}`"
            )
