"""Checks a run's data, joins several prepared folders, and holds out samples for validation."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.text.hub import is_hub_id
from mlx_zip.training.prepare.shards import SETTINGS_FILE, PreparedShards, Sample, can_have_entries, is_prepared_folder
from mlx_zip.training.settings import RunOptions

_SPLITS = ("train.jsonl", "valid.jsonl", "test.jsonl")  # files of a data folder for mlx-lm
_FEWEST_HELD_OUT = 4  # minimum number of samples to hold out, if the data have enough
_ONE_HELD_OUT_IN = 5  # hold out at most one in 5 samples


def open_run_data(options: RunOptions) -> tuple[JoinedFolders, JoinedFolders | None]:
    """Returns the samples to train on, and those in `options.valid`, if any.

    Raises `DataError` if data are missing or not prepared, naming the command to run first, or if they do not match the
    options --max-seq-length and --mask-prompt, or one another.
    """
    _check_data_prepared(options)
    data = JoinedFolders(options.data)
    _check_length_and_mask(options, data)
    valid = JoinedFolders(options.valid) if options.valid else None
    if valid is not None and valid.params != data.params:
        raise DataError(f"{valid} was prepared for another codec than {data}")
    return data, valid


def _check_data_prepared(options: RunOptions) -> None:
    for folder in (*options.data, *options.valid):
        if is_prepared_folder(folder):
            continue
        if (folder / SETTINGS_FILE).is_file():
            raise DataError(f"{folder} is not finished: run the same `mlx_zip prepare` again, which goes on with it")
        if not folder.exists() and not is_hub_id(str(folder)):
            flag = "--data" if folder in options.data else "--valid"
            raise DataError(f"{folder}: no such file or folder; {flag} names a folder that `mlx_zip prepare` made")
        lines = [_prepare_command(options, *names) for names in _list_text_files(folder)]
        if not folder.exists():
            raise DataError(
                f"{folder}: no such folder; if it is the name of a data set, prepare it first: {' and '.join(lines)}"
            )
        raise DataError(f"{folder} is not prepared data; prepare it first: {' and '.join(lines)}")


def _list_text_files(path: Path) -> list[tuple[str, str]]:
    """Returns (texts, name of the folder to prepare) for `path`, or for each of mlx-lm's split files in `path`."""
    found = [name for name in _SPLITS if (path / name).is_file()]
    if found:
        return [(str(path / name), f"{path.name}-{Path(name).stem}") for name in found]
    return [(str(path), f"{path.name.removesuffix('.gz').partition('.')[0] or 'data'}-prepared")]


def _prepare_command(options: RunOptions, data: str, out: str) -> str:
    origin = ["--model", options.model] if options.model else ["--tokenizer", str(options.tokenizer or "FOLDER")]
    context = ["--context", str(options.max_seq_length)] if options.max_seq_length else []
    counted = ["--train-on", "all"] if options.mask_prompt is False else []
    return shlex.join(["mlx_zip", "prepare", *origin, "--data", data, *context, *counted, "--out", out])


def _check_length_and_mask(options: RunOptions, data: JoinedFolders) -> None:
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


class JoinedFolders:
    """Several prepared folders read as one, in the order given.

    Folders prepared without hypertokens (merge size 1 or codebook size 0) may be joined with compressed folders: then
    `params` is the codec of the compressed folders, and the samples of the other folders are marked as plain. Raises
    `DataError` if the codecs differ in any other way.

    lengths, base_ids: number of ids and of base ids in every sample; samples of length 0 are never read. starts: number
    of entries in every sample's starting codebook. These arrays are int64 [len(self)].
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.parts = [PreparedShards(folder) for folder in folders]
        first = next((part for part in self.parts if can_have_entries(part.params)), self.parts[0])
        self.params = first.params
        as_plain = replace(self.params, codebook_size=0, merge_size=1, start=None)
        for part in self.parts:
            if part.params not in (self.params, as_plain):
                raise DataError(f"{part.folder} was prepared for another codec than {first.folder}")
        self._plain = [part.params != self.params for part in self.parts]
        self._ends = list(accumulate(map(len, self.parts)))
        self.lengths = np.concatenate([part.lengths for part in self.parts])
        self.base_ids = np.concatenate([part.base_ids for part in self.parts])
        self.starts = np.concatenate([part.starts for part in self.parts])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Sample:
        number = bisect_right(self._ends, i)
        if not 0 <= i < len(self):
            raise IndexError(i)
        sample = self.parts[number][i - (self._ends[number - 1] if number else 0)]
        return replace(sample, plain=True) if self._plain[number] else sample

    def select_samples(self, chosen: NDArray[np.bool_]) -> JoinedFolders:
        """Returns a copy in which samples outside of `chosen`, bool [len(self)], have length 0. Indices stay."""
        made = copy(self)
        made.lengths, made.base_ids = np.where(chosen, self.lengths, 0), np.where(chosen, self.base_ids, 0)
        return made

    def __str__(self) -> str:
        return ", ".join(str(part.folder) for part in self.parts)


def count_held_out(data: JoinedFolders, share: float, batch_size: int) -> int:
    """Returns how many samples to hold out: `share` of all, but at least 4 and at most a fifth; 0 if `share` is 0.

    At least one batch is left to train on.
    """
    usable = int((data.lengths >= 2).sum())
    if not share:
        return 0
    wanted = min(max(_FEWEST_HELD_OUT, round(share * usable)), usable // _ONE_HELD_OUT_IN)
    return max(0, min(wanted, usable - batch_size))


def split_held_out(data: JoinedFolders, count: int, seed: int) -> tuple[JoinedFolders, JoinedFolders | None]:
    """Returns the samples to train on, and `count` random samples to validate on, None if `count` is 0."""
    if not count:
        return data, None
    drawn = np.random.default_rng([seed, count]).permutation(np.flatnonzero(data.lengths >= 2))[:count]
    held = np.zeros(len(data), np.bool_)
    held[drawn] = True
    return data.select_samples(~held), data.select_samples(held)
