"""Plain byte pair encoding over base ids: the control for packs that are learned by use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.codec.ids import Uint32s

FIRST = 0x10000  # the code point that stands for base id 0: above all surrogates
MOST = 0x110000 - FIRST  # number of base ids that have a code point


class Bpe:
    """Byte pair encoding with `size` merges over base ids, learned from texts that are cut into windows.

    texts: base ids of each text. window: base ids per window; no merge crosses a window's border or a disabled id.
    longest: most base ids in a merge; None: no limit. Each base id is a character to the trainer, so a vocabulary of
    more than `MOST` base ids raises ValueError.
    """

    def __init__(
        self, params: CodecParams, texts: Sequence[Uint32s], size: int, window: int, longest: int | None = None
    ) -> None:
        from tokenizers import Tokenizer, models, trainers

        if params.vocab_size > MOST:
            raise ValueError(f"{params.vocab_size} base ids have no characters of their own, {MOST} have")
        self.disabled = params.disabled_ids
        windows = [text[start : start + window] for text in texts for start in range(0, len(text), window)]
        words = [word for piece in windows for word in self._words(piece)]
        self.tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=len(set().union(*words)) + size,
            min_frequency=2,
            max_token_length=None if longest is None else longest + 1,  # the trainer's bound is exclusive
            show_progress=False,
        )
        self.tokenizer.train_from_iterator(words, trainer)

    def _words(self, ids: Uint32s) -> Iterator[str]:
        """Yields the runs of ids between disabled ids, each run as a string with one character per id."""
        for run in np.split(ids, np.flatnonzero(np.isin(ids, self.disabled))):
            if word := "".join(chr(FIRST + int(i)) for i in run if i not in self.disabled):
                yield word

    def entries(self) -> list[tuple[int, ...]]:
        """Returns the base ids of every merge, in the order in which they were learned."""
        tokens = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [tuple(ord(character) - FIRST for character in token) for token, _ in tokens if len(token) > 1]

    def count(self, ids: Uint32s) -> int:
        """Returns the number of tokens that base ids are merged into; an id that learning never met is one token."""
        words = list(self._words(ids))
        found = [self.tokenizer.encode(word).tokens for word in words]
        known = sum(len(token) for tokens in found for token in tokens)
        return sum(map(len, found)) + len(ids) - known
