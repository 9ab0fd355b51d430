"""The layout of ids and logits columns: the only file that defines where the ids of hypertokens begin.

A logits row has W = embedding_rows + codebook_size columns, and the column is the id:

    [ base 0 .. V-1 | hyper V .. V+codebook_size-1 | base tail ]

The base tail has one column for each embedding row from row V on; no tokenizer has an id for these rows. A column of
the tail is not an id that a model can read, so the tail is always masked (zip2zip 0.2.0 does not mask it, and fails if
it chooses a column of the tail).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_zip.errors import ConfigError

MODEL_TYPE = "zip2zip"  # `model_type` in config.json of a model with hypertokens


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout. vocab_size: V, number of base ids. codebook_size: number of slots. embedding_rows: >= V."""

    vocab_size: int
    codebook_size: int
    embedding_rows: int

    def __post_init__(self) -> None:
        if self.vocab_size > self.embedding_rows:
            raise ConfigError(
                f"initial_vocab_size {self.vocab_size} lies above the embedding's {self.embedding_rows} rows"
            )

    @property
    def width(self) -> int:
        """Number W of columns of the logits."""
        return self.embedding_rows + self.codebook_size

    @property
    def tail(self) -> int:
        """Number of masked columns after the hyper block."""
        return self.embedding_rows - self.vocab_size

    @property
    def end(self) -> int:
        """One more than the last id that can be read or emitted."""
        return self.vocab_size + self.codebook_size

    def is_hyper(self, ids: Any) -> Any:
        """Returns whether ids are hypertokens, elementwise; ids: an int, a numpy array or an MLX array."""
        return ids >= self.vocab_size

    def slot(self, ids: Any) -> Any:
        """Returns the slots of hypertokens with these ids."""
        return ids - self.vocab_size

    def hyper_id(self, slots: Any) -> Any:
        """Returns the ids of the hypertokens in these slots."""
        return slots + self.vocab_size

    def check_tokenizer(self, token_ids: int) -> None:
        """Raises `ConfigError` if a tokenizer of `token_ids` ids has ids that are hypertokens in this layout."""
        if token_ids > self.vocab_size:
            raise ConfigError(
                f"the tokenizer has {token_ids} ids but hypertokens begin at {self.vocab_size} "
                "(initial_vocab_size); the checkpoint and the tokenizer do not belong together"
            )


def has_hypertokens(model: Any) -> bool:
    """Returns whether a model has hypertokens, that is, a `Layout` as its attribute `layout`."""
    return isinstance(getattr(model, "layout", None), Layout)


def decoder_config(model: Any) -> Mapping[str, Any]:
    """Returns the decoder's config: config.json, or for a plain model the arguments that mlx-lm read from that file."""
    return model.args.config if has_hypertokens(model) else vars(model.args)
