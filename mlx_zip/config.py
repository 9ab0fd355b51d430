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
MAX_LAYERS = 4096  # far above any real model; layers are built before their tensors are read
SELF_CONTAINED = "."  # format 2: the base model is in the checkpoint's own folder

_COMMON = {"hidden_size", "tie_encoders", "position_encoding"}
_BLOCK = {"num_hidden_layers", "intermediate_size", "num_heads"}
ENCODER_FIELDS = {
    "averaging": _COMMON,
    "attention": _COMMON | {"num_heads"},
    "transformer": _COMMON | _BLOCK,
    "res_latent_attn": _COMMON | _BLOCK | {"model_hidden_size", "causal", "residual"},
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
    """The options of a hyper-encoder: `kind` is one of `ENCODER_FIELDS`; the other fields are zip2zip 0.2.0's.

    hidden_size: width of the encoder (H). model_hidden_size: width of the model (D) when it differs from H, then
    the encoder projects in and out (`res_latent_attn` only). tie_encoders: one set of weights reads both the
    embedding and the head matrix.
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

    def __post_init__(self) -> None:
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"encoder: num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}")
        if self.kind == "transformer" and self.position_encoding not in (None, "learnable"):
            raise ConfigError(f"encoder: position_encoding {self.position_encoding!r} is not null or 'learnable'")

    @property
    def model_size(self) -> int:
        """Width D of the rows that the encoder reads and makes."""
        return self.model_hidden_size or self.hidden_size

    @property
    def has_positions(self) -> bool:
        """Whether the encoder has a `pos_embed.weight [merge_size, H]`."""
        if self.kind == "transformer":
            return self.position_encoding == "learnable"
        return self.kind in ("attention", "res_latent_attn")

    @classmethod
    def from_dict(cls, kind: Any, fields: Any) -> EncoderConfig:
        """The encoder of `encoder_type` and `encoder` in `zip2zip_config.json`. Raises `ConfigError`."""
        if not isinstance(kind, str) or kind not in ENCODER_FIELDS:
            raise ConfigError(f"encoder_type {kind!r} is not one of {', '.join(sorted(ENCODER_FIELDS))}")
        fields = _object("encoder", fields)
        _refuse_unknown("encoder", fields, ENCODER_FIELDS[kind])
        needed = {"hidden_size"} | (ENCODER_FIELDS[kind] & {"num_hidden_layers", "num_heads"})
        values: dict[str, Any] = {name: _integer("encoder", fields, name, low=1) for name in sorted(needed)}
        if values.get("num_hidden_layers", 1) > MAX_LAYERS:
            raise ConfigError(f"encoder: num_hidden_layers is {values['num_hidden_layers']}, at most {MAX_LAYERS}")
        for name in {"intermediate_size", "model_hidden_size"} & fields.keys():
            if fields[name] is not None:
                values[name] = _integer("encoder", fields, name, low=1)
        for name in {"tie_encoders", "causal", "residual"} & fields.keys():
            values[name] = _flag("encoder", fields, name)
        return cls(kind=kind, position_encoding=fields.get("position_encoding"), **values)

    def to_dict(self) -> dict[str, Any]:
        """The `encoder` object of `zip2zip_config.json`."""
        return {name: getattr(self, name) for name in sorted(ENCODER_FIELDS[self.kind])}


@dataclass(frozen=True)
class ZipConfig:
    """The config of a zip2zip checkpoint beyond its decoder's own.

    vocab_size: number of base ids, and the id of the first hypertoken (upstream's `initial_vocab_size`).
    codebook_size, merge_size: upstream's `max_codebook_size` and `max_subtokens`. pad_id: the tokenizer's pad
    token, else its eos; it never merges, and it pads short entries. start: the pack that the model begins with, entries
    that exist before the first id and take the first slots; not in upstream. canonical: whether decoding is canonical
    (`mlx_zip.canonical`); not in upstream. policy: what a full codebook does (`CodecParams`); upstream has freeze only.
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
        _flag("zip2zip config", vars(self), "canonical")
        if self.canonical and self.policy != "freeze":
            raise ConfigError(f"zip2zip config: canonical decoding needs policy freeze, not {self.policy}")
        object.__setattr__(self, "codec_params", params)
        object.__setattr__(self, "start", params.start)

    @classmethod
    def from_dict(cls, data: Any, pad_id: int | None = None) -> ZipConfig:
        """The config that a parsed `zip2zip_config.json` and a pad id describe, or `to_dict()`'s result.

        Raises `ConfigError` naming the key that is unknown, missing or out of range.
        """
        data = _object("zip2zip config", data)
        _refuse_unknown("zip2zip config", data, _TOP | {"pad_token_id", "start", "canonical"})
        version = _integer("zip2zip config", {"format_version": 1, **data}, "format_version", low=1)
        if version > 2:
            raise ConfigError(f"format_version {version} is newer than the formats 1 and 2 known here")
        part = _object("compression", data.get("compression"))
        _refuse_unknown("compression", part, _COMPRESSION)
        pad_id = data.get("pad_token_id") if pad_id is None else pad_id
        if isinstance(pad_id, bool) or not isinstance(pad_id, int):
            raise ConfigError("no pad id: the tokenizer has neither a pad nor an eos token")
        return cls(
            vocab_size=_integer("compression", part, "initial_vocab_size", low=1),
            codebook_size=_integer("compression", part, "max_codebook_size", low=0, high=1 << 20),
            merge_size=_integer("compression", part, "max_subtokens", low=1, high=16),
            disabled_ids=_ids(part.get("disabled_ids")),
            pad_id=pad_id,
            encoder=EncoderConfig.from_dict(data.get("encoder_type"), data.get("encoder")),
            position_mode=data.get("position_mode", "compressed"),
            format_version=version,
            base_model=data.get("base_model_name_or_path"),
            start=_start(data.get("start")),
            canonical=data.get("canonical", False),
            policy=part.get("policy", "freeze"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The config in upstream's layout, with `pad_token_id` and our own keys where they are set; for `from_dict`."""
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


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _refuse_unknown(where: str, fields: Mapping[str, Any], known: Iterable[str]) -> None:
    if unknown := fields.keys() - set(known):
        raise ConfigError(f"{where}: unknown key {', '.join(sorted(map(str, unknown)))}")


def _integer(where: str, fields: Mapping[str, Any], name: str, low: int, high: int = (1 << 31) - 1) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{where}: {name} must be an integer from {low} to {high}, got {value!r}")
    return value


def _flag(where: str, fields: Mapping[str, Any], name: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} must be true or false, got {value!r}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError("compression: disabled_ids must be a non-empty list (at least the special tokens)")
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 32 for v in value):
        raise ConfigError("compression: disabled_ids must all be integers from 0 to 4294967295")
    if len(set(value)) != len(value):
        raise ConfigError("compression: disabled_ids has an id twice")
    return tuple(sorted(value))


def _start(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(entry, list | tuple) for entry in value):
        raise ConfigError("zip2zip config: start must be a list of entries, each a list of base ids")
    return tuple(tuple(entry) for entry in value)
