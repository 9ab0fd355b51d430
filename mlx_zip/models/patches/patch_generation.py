"""Generates text with a patch model: the large model runs once per patch, the small decoder once per symbol.

The decoder may write a patch that the tokenizer would never make. So that equal bytes always look the same to the
model, it then reads the canonical patch of the same bytes; if the canonical patch is too long, the patch as written.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_zip.errors import GenerationError
from mlx_zip.models.patches.patch_model import PatchModel, SavedPatchModel
from mlx_zip.text.prompts import check_unicode
from mlx_zip.vocab.hbpe.patch_merges import MARK, PatchMerges, check_patch_mode

_PART = 512  # patches of a prompt that the large model reads per call; memory grows with their square
COLDEST = 1e-30  # smallest temperature used: as good as greedy; dividing by less would overflow float32


def generate_patches(
    model: PatchModel,
    merges: PatchMerges,
    prompt: Iterable[Sequence[int]] = (),
    max_patches: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    mode: str = "stop",
) -> Iterator[list[int]]:
    """Yields patches as the decoder writes them, each a list of symbols; `merges.decode` gives their bytes.

    prompt: patches to continue, as `merges.encode` or a table makes them. Ends after `max_patches` patches, or after
    yielding the patch that is only the end mark, which ends a document. temperature: sampling temperature; 0 is greedy.
    mode: the mode of the table that the model was trained with. Raises `GenerationError` if the merges are of another
    model, a patch of the prompt is too long, or a number is out of range.
    """
    config = model.config
    if (merges.symbols, merges.patch_size) != (config.symbols, config.patch_size):
        raise GenerationError(
            f"the model reads patches of {config.patch_size} out of {config.symbols} symbols; "
            f"these merges make patches of {merges.patch_size} out of {merges.symbols}"
        )
    if max_patches < 1 or not 0 <= temperature < math.inf:
        raise GenerationError("max_patches must be at least 1, temperature a finite number of 0 or more")
    if not 0 <= seed < 1 << 64:
        raise GenerationError(f"seed must be an integer from 0 to 2^64-1, got {seed}")
    rows = [pad_patch(patch, config.patch_size) for patch in prompt]
    if wrong := [symbol for row in rows for symbol in row if not 0 <= symbol < config.symbols]:
        raise GenerationError(f"symbol {wrong[0]} of the prompt is not below {config.symbols}")
    check_patch_mode(mode)
    return _generate_checked(model, merges, rows, max_patches, temperature, mx.random.key(seed), mode)


@dataclass(frozen=True)
class WrittenPatch:
    """A patch that a model wrote, and the characters of text that became complete with this patch.

    In the last `WrittenPatch`, the patch may be empty; its text then stands for bytes that never became a character.
    """

    text: str
    patch: list[int]


def generate_text(
    saved: SavedPatchModel, prompt: str = "", max_patches: int = 100, temperature: float = 0.0, seed: int = 0
) -> Iterator[WrittenPatch]:
    """Yields text patch by patch, after a prompt or, without a prompt, from the beginning of a document.

    The other arguments are those of `generate_patches`. Bytes of an incomplete character are held back until the
    character is complete; at the end they become U+FFFD. Raises `GenerationError` if a number is out of range or the
    prompt is not valid Unicode.
    """
    check_unicode("the prompt", prompt)
    table = saved.text.table
    patches = generate_patches(
        saved.model, table.merges, saved.text.patches(prompt), max_patches, temperature, seed, table.mode
    )
    return _written_patches(patches, table.merges)


def _written_patches(patches: Iterable[list[int]], merges: PatchMerges) -> Iterator[WrittenPatch]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for patch in patches:
        yield WrittenPatch(decoder.decode(merges.decode(patch)), patch)
    if held := decoder.decode(b"", final=True):
        yield WrittenPatch(held, [])


def canonical_patch(merges: PatchMerges, patch: Sequence[int], mode: str = "stop") -> list[int]:
    """Returns the patch to read after writing `patch`: the canonical patch of its bytes if that fits, else `patch`."""
    canonical = merges.encode(merges.decode(patch), mode)
    return canonical if len(canonical) <= merges.patch_size else list(patch)


def pad_patch(patch: Sequence[int], size: int) -> list[int]:
    """Returns a patch as `size` symbols, filled up with `MARK`. Raises `GenerationError` if it is empty or too long."""
    if not 1 <= len(patch) <= size:
        raise GenerationError(f"a patch has 1 to {size} symbols, its mark counted, got {len(patch)}")
    return [*map(int, patch), *[MARK] * (size - len(patch))]


def _generate_checked(
    model: PatchModel,
    merges: PatchMerges,
    rows: list[list[int]],
    max_patches: int,
    temperature: float,
    key: mx.array,
    mode: str,
) -> Iterator[list[int]]:
    """Yields patches after the prompt's rows; arguments as in `generate_patches`, already checked."""
    cache = model.latent.make_cache()
    parts = [mx.array(rows[at : at + _PART]) for at in range(0, len(rows), _PART)]
    x = mx.concatenate([model.start_states(1), *(model.encode_patches(part)[None] for part in parts)], axis=1)
    while x.shape[1] > _PART:
        mx.eval(model.latent(x[:, :_PART], "causal", cache))
        x = x[:, _PART:]
    for _ in range(max_patches):
        h = model.latent(x, "causal", cache)[:, -1]
        key, own = mx.random.split(key)
        patch = _generate_patch(model, h, temperature, own)
        yield patch
        if patch == [MARK]:
            return
        x = model.encode_patches(mx.array([pad_patch(canonical_patch(merges, patch, mode), merges.patch_size)]))[None]


def _generate_patch(model: PatchModel, h: mx.array, temperature: float, key: mx.array) -> list[int]:
    """Returns a patch that the decoder writes from the state h [1, D]: symbols up to the end mark, S at most."""
    cache, patch = model.decoder.make_cache(), list[int]()
    x = model.down(h)[:, None]
    while len(patch) < model.config.patch_size and patch[-1:] != [MARK]:
        logits = model.head(model.decoder(x, "causal", cache))[0, -1]
        if temperature:
            key, own = mx.random.split(key)
            chosen: Any = mx.random.categorical(logits / max(temperature, COLDEST), key=own).item()
        else:
            chosen = logits.argmax().item()
        patch.append(chosen)
        x = model.symbols(mx.array([[patch[-1]]]))
    return patch
