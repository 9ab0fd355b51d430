"""Defines the options of `prepare` and makes a plan from them: tokenizer, codec, settings that a rerun must match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.errors import CodecError, DataError, errors_as
from mlx_zip.files import expand_home
from mlx_zip.models.model_folder import read_model_codec, read_model_config
from mlx_zip.packs.entries import Entry
from mlx_zip.packs.pack import load_pack
from mlx_zip.text.formats import is_tokenizer_file
from mlx_zip.text.sources import Source, source_files
from mlx_zip.text.token_facts import digit_ids, leading_special_ids, special_ids
from mlx_zip.text.tokenizers import load_tokenizer, tokenizer_folder
from mlx_zip.training.prepare.encoding import TRAIN_ON
from mlx_zip.training.prepare.shards import is_prepared_folder, make_codec_record
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

_MERGE_SIZE, _CODEBOOK_SIZE = 3, 2048


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, from which texts.

    sources: one source, or all sources of a mixture. out: the folder to write. model: folder or hub id of a model, from
    which the tokenizer and, for a zip2zip model, the codec are taken. tokenizer: instead of `model`, folder, file or
    hub id of a tokenizer. context: maximum base ids per window. merge_size, codebook_size: None: the zip2zip model's,
    else 3 and 2048; merge size 1 or codebook size 0 leaves base ids uncompressed. disable: ids that never merge; None:
    the zip2zip model's, else the special ids. protect: further ids that never merge: "digits", or ids separated by
    commas. pack: file of the pack that codebooks begin with; None: the model's own. empty_start: begin codebooks
    without entries. start_draw: number of pack entries to draw at random for each sample; None: all entries, without
    drawing. fill_windows: put several records into one window; None: yes for documents, no for conversations.
    train_on: see `RecordEncoder`. shard_samples: approximate samples per shard. seed: random seed of the drawing.
    limit: maximum number of samples; None: no limit. max_skipped: maximum number of invalid records that are skipped
    before an error. Raises `DataError` if an option has an invalid value or contradicts another option.
    """

    sources: tuple[Source, ...]
    out: Path
    model: str | None = None
    tokenizer: str | None = None
    context: int = 1024
    merge_size: int | None = None
    codebook_size: int | None = None
    disable: tuple[int, ...] | None = None
    protect: tuple[str, ...] = ()
    pack: Path | None = None
    empty_start: bool = False
    start_draw: int | None = None
    fill_windows: bool | None = None
    train_on: str = "answers"
    shard_samples: int = 1024
    seed: int = 0
    limit: int | None = None
    max_skipped: int = 100
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("no data: name files or data sets")
        if (self.model is None) == (self.tokenizer is None):
            raise DataError("name either a model or a tokenizer")
        if self.train_on not in TRAIN_ON:
            raise DataError(f"train_on {self.train_on!r} is not one of {', '.join(TRAIN_ON)}")
        if self.pack is not None and self.empty_start:
            raise DataError("pack (--pack) and empty_start (--empty-start) exclude each other")
        if self.start_draw is not None and self.pack is None:
            raise DataError("start_draw (--start-draw) draws from a pack: name it with pack (--pack)")
        for name, least in (
            ("context", 2),
            ("start_draw", 1),
            ("shard_samples", 1),
            ("seed", 0),
            ("limit", 1),
            ("max_skipped", 0),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise DataError(f"{name} must be an integer of {least} or more, got {value!r}")


@dataclass(frozen=True)
class PreparationPlan:
    """What all shards of a `prepare` run are made with. tokenizer: its file or folder. params: the codec.

    pool: entries from which each sample's starting codebook is drawn, None for no drawing.
    """

    options: PrepareOptions
    tokenizer: Path
    params: CodecParams
    pool: tuple[Entry, ...] | None = None


def make_preparation_plan(options: PrepareOptions, pads: bool = True) -> tuple[PreparationPlan, Any]:
    """Returns the plan and the tokenizer. Writes nothing.

    pads: False if samples are never padded, so that the tokenizer needs no pad or eos token. Raises `DataError` if an
    input cannot be read or the options do not fit the model or tokenizer.
    """
    for source in options.sources:
        source.check()
        if done := [name for name in source.data if is_prepared_folder(Path(name))]:
            raise DataError(f"{done[0]} is prepared already; `mlx_zip train --data {done[0]}` trains on it")
    folder = expand_home(options.tokenizer or "")
    is_file = folder.is_file() and is_tokenizer_file(folder) and folder.name != "tokenizer.json"
    if options.model is not None or not is_file:
        folder = tokenizer_folder(options.model or options.tokenizer or "", options.trust_remote_code)
    tokenizer = load_tokenizer(folder, options.trust_remote_code)
    config = read_model_config(folder) if options.model is not None else {}
    if options.context <= (lead := len(leading_special_ids(tokenizer))):
        raise DataError(f"context {options.context} leaves no room after the {lead} ids that begin every sample")
    params = _choose_codec(options, tokenizer, config, pads)
    pool = None
    if options.start_draw is not None:
        pool, params = _read_entry_pool(options, params, tokenizer), replace(params, start=None)
    return PreparationPlan(options, folder, params, pool), tokenizer


def _choose_codec(options: PrepareOptions, tokenizer: Any, config: Mapping[str, Any], pads: bool = True) -> CodecParams:
    """Returns the codec. Each value is the option's if given, else the zip2zip model's own, else a default.

    config: the model's config.json, empty without a model. pads: whether samples are padded and so need a pad id.
    Raises `DataError` if the values do not fit together.
    """
    own = read_model_codec(config)
    tokens = 1 + max(tokenizer.get_vocab().values())
    vocab_size = own.vocab_size if own is not None else _read_embedding_rows(config) or tokens
    if tokens > vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {tokens - 1}, the model base ids up to {vocab_size - 1}: "
            "they do not belong together"
        )
    pad_id = own.pad_id if own is not None else _choose_pad_id(tokenizer, pads)
    disabled = set(options.disable if options.disable is not None else own.disabled_ids if own else ())
    if options.disable is None and own is None:
        disabled = special_ids(tokenizer)
    disabled |= _parse_protected_ids(options.protect, tokenizer)
    if high := [i for i in disabled if not 0 <= i < vocab_size]:
        raise DataError(f"id {high[0]}, which must never merge, is not a base id (0 to {vocab_size - 1})")
    sizes = (
        options.codebook_size if options.codebook_size is not None else own.codebook_size if own else _CODEBOOK_SIZE,
        options.merge_size if options.merge_size is not None else own.merge_size if own else _MERGE_SIZE,
    )
    if own is not None and own.policy != "freeze":
        raise DataError(
            f"the model's codebook has the policy {own.policy!r}; data can be prepared, and packs "
            "learned, for freeze only: `mlx_zip convert --policy freeze` makes such a model"
        )
    start = None if own is None or options.empty_start else own.start
    if options.pack is not None:
        start = _read_pack_entries(options.pack, tokenizer) if options.start_draw is None else None
    with errors_as(DataError, str(options.pack or "the codec"), CodecError):
        return CodecParams(vocab_size, *sizes, disabled, pad_id, start)


def _read_embedding_rows(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    rows = config.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
    if config and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise DataError(f"config.json: vocab_size must be a positive integer, got {rows!r}")
    return rows


def _choose_pad_id(tokenizer: Any, needed: bool) -> int | None:
    """Returns the tokenizer's pad id, else its eos id, else None. Raises `DataError` instead of None if `needed`."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    if not needed:
        return None
    raise DataError("the tokenizer has neither a pad nor an eos token; name one in its tokenizer_config.json")


def _parse_protected_ids(protect: tuple[str, ...], tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for what in protect:
        if what == "digits":
            found |= digit_ids(tokenizer)
            continue
        parts = [part.strip() for part in what.split(",")]
        if not all(part.isdecimal() and len(part) < 12 for part in parts):
            raise DataError(f"protect {what!r} is neither digits nor a list of ids with commas between")
        found |= set(map(int, parts))
    return found


def _read_pack_entries(path: Path, tokenizer: Any) -> tuple[Entry, ...]:
    pack = load_pack(path)
    pack.check_made_for(tokenizer, str(path))
    return pack.entries


def _read_entry_pool(options: PrepareOptions, params: CodecParams, tokenizer: Any) -> tuple[Entry, ...]:
    """Returns the entries of --pack, from which --start-draw draws. Raises `DataError` if they do not fit the codec."""
    path, draw = options.pack, options.start_draw or 0
    assert path is not None
    pool = _read_pack_entries(path, tokenizer)
    if not draw <= min(len(pool), params.codebook_size):
        raise DataError(
            f"start_draw {draw} is more than {path} has entries ({len(pool)}) or the codebook slots "
            f"({params.codebook_size})"
        )
    with errors_as(DataError, str(path), CodecError):
        replace(params, codebook_size=len(pool), start=pool)
    return pool


def make_settings_record(plan: PreparationPlan, tokenizer: Any) -> dict[str, Any]:
    """Returns everything that the result depends on, as values for JSON, with digests in place of long lists.

    Raises `DataError` if a source cannot be read.
    """
    options, entries = plan.options, plan.params.start if plan.pool is None else plan.pool
    tokens = 1 + max(tokenizer.get_vocab().values())
    return {
        "sources": [_make_source_record(source) for source in options.sources],
        "codec": make_codec_record(plan.params),
        "tokenizer": {"fingerprint": tokenizer_fingerprint(tokenizer), "size": tokens},
        "chat_template": sha256(str(tokenizer.chat_template).encode("utf-8")).hexdigest(),
        "context": options.context,
        "start": None if entries is None else sha256(str(entries).encode("utf-8")).hexdigest(),
        "start_draw": options.start_draw,
        "pack": options.fill_windows,  # an older name, kept so that existing folders can be continued
        "train_on": options.train_on,
        "shard_samples": options.shard_samples,
        "seed": options.seed,
        "limit": options.limit,
    }


def _make_source_record(source: Source) -> dict[str, Any]:
    digests = {}
    for name in (file for one in source.data for file in source_files(one)):
        with errors_as(DataError, f"{name} cannot be read", OSError), open(name, "rb") as file:
            digests[name] = file_digest(file, "sha256").hexdigest()
    return {**asdict(source), "data": list(source.data), "subsets": list(source.subsets), "sha256": digests}
