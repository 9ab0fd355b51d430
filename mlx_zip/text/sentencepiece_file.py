"""Reads SentencePiece model files as `tokenizers.Tokenizer` objects, without the library sentencepiece.

Source of the format: sentencepiece_model.proto (ModelProto: pieces 1, trainer_spec 2, normalizer_spec 3).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.vocab.first_stage import read_uncompressed

UNIGRAM, BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
SPACE = "▁"
MAX_PIECE_LENGTH = 1024  # characters of a piece of BPE; each is tried as a border between two pieces
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a model file.

    pieces: (text, score, kind) per id. algorithm: `UNIGRAM` or `BPE`. charsmap: compiled replacement rules, b"" for
    none. dummy_prefix: whether a space is put before the text. single_spaces: whether to collapse runs of spaces.
    """

    path: Path
    pieces: tuple[tuple[str, float, int], ...]
    algorithm: int
    charsmap: bytes
    dummy_prefix: bool
    single_spaces: bool

    def build_tokenizer(self) -> Any:
        """Returns the `tokenizers.Tokenizer` with these ids. Raises `DataError` if it cannot be built."""
        from tokenizers import AddedToken, Tokenizer

        if self.algorithm not in (UNIGRAM, BPE):
            raise DataError(f"{self.path}: a SentencePiece model of words or characters, which is not read here")
        tokenizer = Tokenizer(self._build_bpe() if self.algorithm == BPE else self._build_unigram())
        tokenizer.normalizer = self._build_normalizer()
        tokenizer.decoder = self._build_decoder()
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER: False}
        added = [(text, kinds[kind]) for text, _, kind in self.pieces if kind in kinds]
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, special in added if special])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text, special in added if not special])
        return tokenizer

    @property
    def _unknown_piece(self) -> str | None:
        return next((text for text, _, kind in self.pieces if kind == _UNKNOWN), None)

    @property
    def _has_byte_pieces(self) -> bool:
        return any(kind == _BYTE for _, _, kind in self.pieces)

    def _build_bpe(self) -> Any:
        """Returns the BPE model. Two pieces may merge if they spell a third; the highest score merges first.

        Raises `DataError` if a piece is longer than `MAX_PIECE_LENGTH`.
        """
        from tokenizers import models

        ids = {text: i for i, (text, _, _) in enumerate(self.pieces)}
        normal = {text: score for text, score, kind in self.pieces if kind == _NORMAL}
        if (longest := max(map(len, normal), default=0)) > MAX_PIECE_LENGTH:
            raise DataError(f"{self.path}: a piece has {longest} characters; at most {MAX_PIECE_LENGTH} are supported")
        merges = [
            (text[:i], text[i:])
            for text in sorted(normal, key=lambda text: (-normal[text], ids[text]))
            for i in range(1, len(text))
            if text[:i] in normal and text[i:] in normal
        ]
        return models.BPE(
            ids, merges, unk_token=self._unknown_piece, fuse_unk=True, byte_fallback=self._has_byte_pieces
        )

    def _build_unigram(self) -> Any:
        from tokenizers import models

        unknown = next((i for i, piece in enumerate(self.pieces) if piece[2] == _UNKNOWN), None)
        scores = [(text, score) for text, score, _ in self.pieces]
        return models.Unigram(scores, unknown, self._has_byte_pieces)

    def _build_normalizer(self) -> Any:
        from tokenizers import Regex, normalizers

        steps: list[Any] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.single_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def _build_decoder(self) -> Any:
        from tokenizers import decoders

        steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if self.dummy_prefix else steps)


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Reads a model file. Raises `DataError` if the file is not a SentencePiece model."""
    try:
        fields = list(_iterate_fields(read_uncompressed(path)))
        pieces = tuple(_parse_piece(dict(_iterate_fields(value))) for number, value in fields if number == 1)
        trainer, normalizer = (dict(_iterate_fields(_field_value(dict(fields), number, b""))) for number in (2, 3))
        if not pieces:
            raise ValueError("it has no pieces")
        return SentencePieceModel(
            path,
            pieces,
            _field_value(trainer, 3, UNIGRAM),
            _field_value(normalizer, 2, b""),
            bool(_field_value(normalizer, 3, 1)),
            bool(_field_value(normalizer, 4, 1)),
        )
    except (ValueError, IndexError, TypeError, struct.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: no SentencePiece model: {error}") from error


def _parse_piece(fields: dict[int, Any]) -> tuple[str, float, int]:
    score = struct.unpack("<f", _field_value(fields, 2, b"\0\0\0\0"))[0]
    if not math.isfinite(score):
        raise ValueError(f"a piece has the score {score}")
    return _field_value(fields, 1, b"").decode("utf-8"), score, _field_value(fields, 3, _NORMAL)


def _field_value(fields: dict[int, Any], number: int, default: Any) -> Any:
    """Returns a field's value, or `default` if the field is missing. Raises `ValueError` if the types differ."""
    value = fields.get(number, default)
    if type(value) is not type(default):
        raise ValueError(f"field {number} has the wrong type")
    return value


def _iterate_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (field number, value) for each field of a protobuf message; a value is an integer, or bytes.

    Raises `ValueError` or `IndexError` if `data` is not a protobuf message.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"byte {at} begins no field")
            value, at = data[at : at + size], at + size
        if at > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the variable-length integer that begins at byte `at`, and the index of the byte after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError(f"byte {at} is within a number that is too long")
