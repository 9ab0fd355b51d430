"""`zip2zip_config.json`, formats 1 and 2, and the `zip2zip` section of a converted model's `config.json`.

Source: zip2zip 0.2.0 (`Zip2ZipConfig`, `CompressionConfig`, the encoder configs). Parsing is strict: an unknown
key raises `ConfigError`, because a misspelt option must never fall back silently to a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.errors import CodecError, ConfigError

SIDES = ("input_encoder.", "output_encoder.")  # prefixes of the hyper-encoders' tensors
POSITION_MODES = ("compressed", "base_token_end")
AVAILABILITY = ("causal", "legacy")  # where an entry can be predicted: once installed; anywhere in the window
MAX_LAYERS = 4096  # far above any real model; layers are built before their tensors are read
RECORD_KEYS = ("base_model_type", "source", "fingerprint", "plain")  # section keys unknown to `ZipConfig`
SELF_CONTAINED = "."  # format 2: the base model is in the checkpoint's own folder

_COMMON = {"hidden_size", "tie_encoders", "position_encoding"}
_BLOCK = {"num_hidden_layers", "intermediate_size", "num_heads"}
ENCODER_FIELDS = {
    "averaging": _COMMON,
    "attention": _COMMON | {"num_heads"},
    "transformer": _COMMON | _BLOCK,
    "res_latent_attn": _COMMON | _BLOCK | {"model_hidden_size", "causal", "residual", "residual_by_side"},
}
_TOP = {
    "format_version",
    "base_model_name_or_path",
    "position_mode",
    "encoder_type",
    "encoder",
    "compression",
}
_COMPRESSION = {"initial_vocab_size", "max_codebook_size", "max_subtokens", "disabled_ids", "policy"}


@dataclass(frozen=True)
class EncoderConfig:
    """The options of a hyper-encoder; the fields other than `kind` are named as in zip2zip 0.2.0.

    kind: one of the keys of `ENCODER_FIELDS`. hidden_size: width H of the encoder. model_hidden_size: width D of the
    model if it differs from H, else None; the encoder then projects from D to H and back (`res_latent_attn` only).
    tie_encoders: whether one encoder makes both input rows (from the embedding) and output rows (from the head).
    position_encoding: for `transformer` None or "learnable". causal: whether a position attends to earlier ones only.
    residual, residual_by_side: which base row is added to a hyper row (see `residual_row_kind`). causal and residual
    are for `res_latent_attn`; residual_by_side is not in zip2zip.
    """

    kind: str
    hidden_size: int
    tie_encoders: bool = False
    position_encoding: str | None = None
    num_hidden_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 1
    model_hidden_size: int | None = None
    causal: bool = False
    residual: bool = True
    residual_by_side: bool = False

    def __post_init__(self) -> None:
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"encoder: num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}")
        if self.kind == "transformer" and self.position_encoding not in (None, "learnable"):
            raise ConfigError(f"encoder: position_encoding {self.position_encoding!r} is not null or 'learnable'")
        if self.residual_by_side and (self.tie_encoders or not self.residual):
            raise ConfigError(
                "encoder: residual_by_side needs residual, and an encoder for each side (tie_encoders false)"
            )

    def residual_row_kind(self, side: str) -> str | None:
        """Returns "first", "last", "mean" or None: the base row that `res_latent_attn` adds to an entry's hyper row.

        side: one of `SIDES`. None without `residual`. With `residual_by_side`, "last" for input rows, because the text
        continues after the last base id, and "mean" for output rows, which stand for all base ids. Otherwise "first".
        """
        if not self.residual:
            return None
        return "first" if not self.residual_by_side else "last" if side == SIDES[0] else "mean"

    @property
    def model_size(self) -> int:
        """Width D of the base rows that the encoder reads and of the hyper rows that it makes."""
        return self.model_hidden_size or self.hidden_size

    def check_width(self, width: int) -> None:
        """Raises `ConfigError` unless `width` is the width of the rows. width: D of the model's embedding."""
        if width != self.model_size:
            raise ConfigError(f"the encoder makes rows of width {self.model_size}, the model's are {width}")

    def prefix_of(self, side: str) -> str:
        """Returns how the tensor names of the encoder begin that makes the rows of a side, one of `SIDES`."""
        return SIDES[0] if self.tie_encoders else side

    @property
    def has_positions(self) -> bool:
        """Whether the encoder has learned positions, the tensor `pos_embed.weight` [merge_size, H]."""
        if self.kind == "transformer":
            return self.position_encoding == "learnable"
        return self.kind in ("attention", "res_latent_attn")

    @classmethod
    def from_dict(cls, kind: Any, fields: Any) -> EncoderConfig:
        """Returns the options in a `zip2zip_config.json`. kind: its `encoder_type`. fields: its `encoder`.

        Raises `ConfigError` naming the option that is unknown, missing or out of range.
        """
        if not isinstance(kind, str) or kind not in ENCODER_FIELDS:
            raise ConfigError(f"encoder_type {kind!r} is not one of {', '.join(sorted(ENCODER_FIELDS))}")
        fields = _require_object("encoder", fields)
        _refuse_unknown_keys("encoder", fields, ENCODER_FIELDS[kind])
        needed = {"hidden_size"} | (ENCODER_FIELDS[kind] & {"num_hidden_layers", "num_heads"})
        values: dict[str, Any] = {name: _read_integer("encoder", fields, name, low=1) for name in sorted(needed)}
        if values.get("num_hidden_layers", 1) > MAX_LAYERS:
            raise ConfigError(f"encoder: num_hidden_layers is {values['num_hidden_layers']}, at most {MAX_LAYERS}")
        for name in {"intermediate_size", "model_hidden_size"} & fields.keys():
            if fields[name] is not None:
                values[name] = _read_integer("encoder", fields, name, low=1)
        for name in {"tie_encoders", "causal", "residual", "residual_by_side"} & fields.keys():
            values[name] = _read_boolean("encoder", fields, name)
        return cls(kind=kind, position_encoding=fields.get("position_encoding"), **values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the `encoder` object of `zip2zip_config.json`."""
        named = ENCODER_FIELDS[self.kind] - (set() if self.residual_by_side else {"residual_by_side"})
        return {name: getattr(self, name) for name in sorted(named)}


@dataclass(frozen=True)
class ZipConfig:
    """The config of a zip2zip checkpoint without the keys of its decoder.

    vocab_size: number of base ids, and the id of the first hypertoken (upstream's `initial_vocab_size`). codebook_size:
    number of slots; merge_size: maximum base ids of an entry (upstream's `max_codebook_size` and `max_subtokens`).
    disabled_ids: ids that never merge. pad_id: the tokenizer's pad token, or its eos token if it has no pad token; pads
    short entries and never merges. position_mode: one of `POSITION_MODES` (`mlx_zip.models.call_inputs`). start: the
    entries that every request begins with, in the first slots; not in upstream. canonical: whether decoding is
    canonical (`mlx_zip.engine.sampling.canonical`); not in upstream. policy: what happens when the codebook is full
    (`CodecParams`); upstream has freeze only.
    """

    vocab_size: int
    codebook_size: int
    merge_size: int
    disabled_ids: tuple[int, ...] = field(repr=False)
    pad_id: int
    encoder: EncoderConfig
    position_mode: str = "compressed"
    format_version: int = 1
    base_model: str | None = None
    start: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    canonical: bool = False
    policy: str = "freeze"
    codec_params: CodecParams = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.position_mode not in POSITION_MODES:
            raise ConfigError(f"position_mode {self.position_mode!r} is not one of {', '.join(POSITION_MODES)}")
        if not 0 <= self.pad_id < self.vocab_size:
            raise ConfigError(f"pad id {self.pad_id} is not a base id (below {self.vocab_size})")
        if high := [i for i in self.disabled_ids if i >= self.vocab_size]:
            raise ConfigError(
                f"compression: disabled id {high[0]} is not below the first hypertoken "
                f"(initial_vocab_size {self.vocab_size}); one of the two is wrong"
            )
        try:
            params = CodecParams(
                self.vocab_size,
                self.codebook_size,
                self.merge_size,
                self.disabled_ids,
                self.pad_id,
                self.start,
                self.policy,
            )
        except CodecError as error:
            raise ConfigError(f"zip2zip config: {error}") from error
        _read_boolean("zip2zip config", vars(self), "canonical")
        if self.canonical and self.policy != "freeze":
            raise ConfigError(f"zip2zip config: canonical decoding needs policy freeze, not {self.policy}")
        object.__setattr__(self, "codec_params", params)
        object.__setattr__(self, "start", params.start)

    @property
    def by_base(self) -> bool:
        """Whether positions count base ids, so that an id has the position of its last base id."""
        return self.position_mode == "base_token_end"

    @classmethod
    def from_dict(cls, data: Any, pad_id: int | None = None) -> ZipConfig:
        """Returns the config in a parsed `zip2zip_config.json`, or in what `to_dict` returned.

        pad_id: the tokenizer's pad id; None takes `pad_token_id` in `data`, which only `to_dict` writes. Raises
        `ConfigError` naming the key that is unknown, missing or out of range.
        """
        data = _require_object("zip2zip config", data)
        _refuse_unknown_keys("zip2zip config", data, _TOP | {"pad_token_id", "start", "canonical"})
        version = _read_integer("zip2zip config", {"format_version": 1, **data}, "format_version", low=1)
        if version > 2:
            raise ConfigError(f"format_version {version} is newer than the formats 1 and 2 known here")
        part = _require_object("compression", data.get("compression"))
        _refuse_unknown_keys("compression", part, _COMPRESSION)
        pad_id = data.get("pad_token_id") if pad_id is None else pad_id
        if isinstance(pad_id, bool) or not isinstance(pad_id, int):
            raise ConfigError("no pad id: the tokenizer has neither a pad nor an eos token")
        return cls(
            vocab_size=_read_integer("compression", part, "initial_vocab_size", low=1),
            codebook_size=_read_integer("compression", part, "max_codebook_size", low=0, high=1 << 20),
            merge_size=_read_integer("compression", part, "max_subtokens", low=1, high=16),
            disabled_ids=_read_disabled_ids(part.get("disabled_ids")),
            pad_id=pad_id,
            encoder=EncoderConfig.from_dict(data.get("encoder_type"), data.get("encoder")),
            position_mode=data.get("position_mode", "compressed"),
            format_version=version,
            base_model=data.get("base_model_name_or_path"),
            start=_read_start_entries(data.get("start")),
            canonical=data.get("canonical", False),
            policy=part.get("policy", "freeze"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the config in upstream's layout, plus `pad_token_id`, and `canonical`, `start`, `policy` if set."""
        ours: dict[str, Any] = {"canonical": True} if self.canonical else {}
        if self.start is not None:
            ours["start"] = [list(entry) for entry in self.start]
        return {
            "format_version": self.format_version,
            "base_model_name_or_path": self.base_model,
            "position_mode": self.position_mode,
            "encoder_type": self.encoder.kind,
            "encoder": self.encoder.to_dict(),
            "compression": {
                "initial_vocab_size": self.vocab_size,
                "max_codebook_size": self.codebook_size,
                "max_subtokens": self.merge_size,
                "disabled_ids": list(self.disabled_ids),
                **({} if self.policy == "freeze" else {"policy": self.policy}),
            },
            "pad_token_id": self.pad_id,
            **ours,
        }


def parse_zip_section(section: Mapping[str, Any]) -> ZipConfig:
    """Returns the `ZipConfig` in the `zip2zip` section of a config.json. Raises `ConfigError` if a key is wrong."""
    return ZipConfig.from_dict({key: value for key, value in section.items() if key not in RECORD_KEYS})


def _require_object(where: str, value: Any) -> Mapping[str, Any]:
    """Returns `value`. Raises `ConfigError` unless `value` is a JSON object. where: the section, for the message."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _refuse_unknown_keys(where: str, fields: Mapping[str, Any], known: Iterable[str]) -> None:
    if unknown := fields.keys() - set(known):
        raise ConfigError(f"{where}: unknown key {', '.join(sorted(map(str, unknown)))}")


def _read_integer(where: str, fields: Mapping[str, Any], name: str, low: int, high: int = (1 << 31) - 1) -> int:
    """Returns the field `name`. Raises `ConfigError` unless the field is an integer from `low` to `high`."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{where}: {name} must be an integer from {low} to {high}, got {value!r}")
    return value


def _read_boolean(where: str, fields: Mapping[str, Any], name: str) -> bool:
    """Returns the field `name`. Raises `ConfigError` unless the field is true or false."""
    value = fields[name]
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} must be true or false, got {value!r}")
    return value


def _read_disabled_ids(value: Any) -> tuple[int, ...]:
    """Returns the disabled ids, sorted. Raises `ConfigError` unless `value` lists one or more distinct 32-bit ids."""
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError("compression: disabled_ids must be a non-empty list (at least the special tokens)")
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 32 for v in value):
        raise ConfigError("compression: disabled_ids must all be integers from 0 to 4294967295")
    if len(set(value)) != len(value):
        raise ConfigError("compression: disabled_ids has an id twice")
    return tuple(sorted(value))


def _read_start_entries(value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns the start entries, or None if `value` is None. Raises `ConfigError` unless `value` is a list of lists."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(entry, list | tuple) for entry in value):
        raise ConfigError("zip2zip config: start must be a list of entries, each a list of base ids")
    return tuple(tuple(entry) for entry in value)
