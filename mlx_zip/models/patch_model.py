"""A model over patches (local encoder, causal latent transformer, local autoregressive decoder) and its baseline.

Source: arXiv 2510.15517 §2.2, table 1. A patch is a run of up to S symbols of hierarchical BPE; the mark is the symbol
that ends a patch. Where the paper leaves a choice open, this is done:

- Blocks: mlx-lm's Llama block (RMSNorm first, rotary positions, three-matrix feed-forward part, no biases). The
  paper's parameter counts need three matrices. Positions of the local models count within the patch, from 0.
- Encoder: attention in both directions over the patch's symbols, padding masked. A patch is represented by the
  encoder's state at the patch's last symbol (the mark if there is one), which one matrix projects to the latent width.
  No cross-attention, and no hash embeddings, as in the paper.
- Latent model (equations 2 and 3 of the paper differ here): it reads a learned start vector and then the patches, so
  the latent state that decodes patch t depends on the patches before t only.
- Decoder: its first input, in place of a start symbol, is the latent state projected by one matrix; the patch's
  symbols follow.
- Encoder, decoder and the decoder's head (tied) share one embedding of symbols.
- S symbols without a mark are a valid patch, so the mark has a probability at each of the S places. A patch of the mark
  alone has no bytes; it ends a document.

The folder of a trained model has all that generation needs:

    config.json        model_type, version, sizes, context length of the training, sha256 of the weights, source
    model.safetensors  weights, float32
    table.npz          the patches of the first stage's tokens (`PatchTable`)
    tokenizer.json     the first stage; one of its tokens has no bytes and ends a document

mlx-lm cannot read these folders; `mlx_zip vocab hbpe` does. The files are checked against each other when read.

When text is generated, the large model runs once per patch, the small decoder once per symbol. The decoder may write a
patch that the tokenizer would never make. So that equal bytes always look the same to the model, it then reads the
canonical patch of the same bytes; if the canonical patch is too long, the patch as written.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import file_digest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import ModelArgs, TransformerBlock

import mlx_zip
from mlx_zip.config import MAX_LAYERS
from mlx_zip.errors import ConfigError, DataError, GenerationError, ModelError
from mlx_zip.files import atomic_folder, expand_home, read_json_object, write_json
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.text.prompts import check_unicode
from mlx_zip.vocab.hbpe.measures import Tower
from mlx_zip.vocab.hbpe.patch_merges import FIRST_MERGE, MARK, MAX_MERGES, MAX_PATCH, PatchMerges, check_patch_mode
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.hbpe.patch_text import PatchText, read_hf_tokenizer

NORM_EPS, ROPE_THETA = 1e-5, 10_000.0
START_DEVIATION = 0.02  # standard deviation of the start vector


@dataclass(frozen=True)
class PatchConfig:
    """Sizes of a `PatchModel`; checked when built. Raises `ConfigError` naming the field.

    symbols: 257 plus the number of merges V'. patch_size: S. latent: sizes of the large transformer. local: sizes of
    the encoder, and of the decoder.
    """

    symbols: int
    patch_size: int
    latent: Tower
    local: Tower

    def __post_init__(self) -> None:
        _raise_unless_in_range("symbols", self.symbols, FIRST_MERGE, FIRST_MERGE + MAX_MERGES)
        _raise_unless_in_range("patch_size", self.patch_size, 2, MAX_PATCH)
        _raise_unless_tower("latent", self.latent)
        _raise_unless_tower("local", self.local)

    @classmethod
    def from_dict(cls, values: Any) -> PatchConfig:
        """Returns the config that `to_dict` wrote. Raises `ConfigError` for a key that is unknown or missing."""
        values = _checked_fields("config", values, cls)
        towers = {name: Tower(**_checked_fields(name, values[name], Tower)) for name in ("latent", "local")}
        return cls(values["symbols"], values["patch_size"], **towers)

    def to_dict(self) -> dict[str, Any]:
        """Returns all sizes as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PlainConfig:
    """Sizes of a `PlainModel`; checked when built. Raises `ConfigError` naming the field.

    vocab_size: number of ids. tower: sizes of the transformer.
    """

    vocab_size: int
    tower: Tower

    def __post_init__(self) -> None:
        _raise_unless_in_range("vocab_size", self.vocab_size, 1, (1 << 31) - 1)
        _raise_unless_tower("tower", self.tower)

    def to_dict(self) -> dict[str, Any]:
        """Returns all sizes as plain JSON values."""
        return asdict(self)


class TransformerLayers(nn.Module):
    """The blocks of a transformer (`Tower` holds its sizes) and the final norm."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        args = ModelArgs(
            model_type="llama",
            hidden_size=tower.width,
            num_hidden_layers=tower.layers,
            intermediate_size=tower.ffn,
            num_attention_heads=tower.heads,
            rms_norm_eps=NORM_EPS,
            vocab_size=1,
            rope_theta=ROPE_THETA,
        )
        self.layers = [TransformerBlock(args) for _ in range(tower.layers)]
        self.norm = nn.RMSNorm(tower.width, eps=NORM_EPS)

    def __call__(self, x: mx.array, mask: Any, cache: list[KVCache] | None = None) -> mx.array:
        """Returns the normalized output [N, L, D] of the blocks for x [N, L, D].

        mask: "causal" or bool [N, 1, 1, L], true for keys to attend to. cache: one KV cache per layer, None for none.
        """
        if cache is not None and x.shape[1] == 1:
            mask = None
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, None if cache is None else cache[i])
        return self.norm(x)

    def make_cache(self) -> list[KVCache]:
        """Returns empty KV caches, one per layer."""
        return [KVCache() for _ in self.layers]


class PatchModel(nn.Module):
    """A model that predicts the next patch, symbol by symbol.

    Letters in shapes: B texts, T patches per text, S symbols per patch, N patches of any texts, D latent width, d local
    width.
    """

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        latent, local = config.latent.width, config.local.width
        self.symbols = nn.Embedding(config.symbols, local)
        self.encoder, self.decoder, self.latent = (
            TransformerLayers(config.local),
            TransformerLayers(config.local),
            TransformerLayers(config.latent),
        )
        self.up, self.down = nn.Linear(local, latent, bias=False), nn.Linear(latent, local, bias=False)
        self.start = START_DEVIATION * mx.random.normal((latent,))

    def encode_patches(self, patches: mx.array) -> mx.array:
        """Returns a vector for each patch on its own, e = g(x) (equation 1): patches [N, S], integers -> [N, D]."""
        last = patch_lengths(patches) - 1
        seen = mx.arange(patches.shape[1]) <= last[:, None]
        states = self.encoder(self.symbols(patches), seen[:, None, None, :])
        return self.up(mx.take_along_axis(states, last[:, None, None], axis=1)[:, 0])

    def latent_states(self, e: mx.array) -> mx.array:
        """Returns latent states h = f(e) (equation 2): e [B, T, D] -> [B, T, D]; h[:, t] depends on e[:, :t] only."""
        return self.latent(mx.concatenate([self.start_states(e.shape[0]), e[:, :-1]], axis=1), "causal")

    def start_states(self, batch: int) -> mx.array:
        """Returns the learned start vector as [B, 1, D], which the latent model reads before the first patch."""
        return mx.broadcast_to(self.start, (batch, 1, self.start.size))

    def states(self, h: mx.array, symbols: mx.array) -> mx.array:
        """Returns the decoder's states [N, K + 1, d] for h [N, D] and the first K symbols [N, K] of each patch.

        The state at place s depends on h and the symbols before s, and predicts symbol s.
        """
        x = mx.concatenate([self.down(h)[:, None], self.symbols(symbols)], axis=1)
        return self.decoder(x, "causal")

    def head(self, states: mx.array) -> mx.array:
        """Returns logits [..., symbols] of states [..., d]."""
        return self.symbols.as_linear(states)

    def __call__(self, patches: mx.array) -> mx.array:
        """Returns logits [B, T, S, symbols] of patches [B, T, S] (equation 3).

        The logits for symbol s of patch t depend on the symbols before s in that patch and on the patches before t.
        """
        n, length, size = patches.shape
        flat = patches.reshape(-1, size)
        h = self.latent_states(self.encode_patches(flat).reshape(n, length, -1))
        states = self.states(h.reshape(n * length, -1), flat[:, :-1])
        return self.head(states).reshape(n, length, size, -1)


class PlainModel(nn.Module):
    """The baseline: the latent transformer over ids of plain BPE or bytes, with an embedding tied to the head."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.ids = nn.Embedding(config.vocab_size, config.tower.width)
        self.latent = TransformerLayers(config.tower)
        self.start = START_DEVIATION * mx.random.normal((config.tower.width,))

    def states(self, ids: mx.array) -> mx.array:
        """Returns states [B, T, D] of ids [B, T]; state t depends on a learned start vector and the ids before t."""
        start = mx.broadcast_to(self.start, (ids.shape[0], 1, self.start.size))
        return self.latent(mx.concatenate([start, self.ids(ids[:, :-1])], axis=1), "causal")

    def head(self, states: mx.array) -> mx.array:
        """Returns logits [..., vocab_size] of states [..., D]."""
        return self.ids.as_linear(states)

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns logits [B, T, vocab_size] of ids [B, T]; those at t predict id t from the ids before it."""
        return self.head(self.states(ids))


def patch_lengths(patches: mx.array) -> mx.array:
    """Returns the lengths int32 [...] of patches [..., S]: symbols up to and including the first mark, else S."""
    marked = patches == MARK
    return mx.where(marked.any(axis=-1), marked.argmax(axis=-1) + 1, patches.shape[-1]).astype(mx.int32)


def count_parameters(model: nn.Module) -> int:
    """Returns how many numbers a model's parameters hold."""
    return sum(value.size for _, value in named_arrays(model.parameters()))


def _raise_unless_in_range(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _raise_unless_tower(name: str, tower: Any) -> None:
    """Raises `ConfigError` naming the size of the transformer `name` that is out of range."""
    if not isinstance(tower, Tower):
        raise ConfigError(f"{name} must be a Tower, got {tower!r}")
    for size in fields(tower):
        _raise_unless_in_range(
            f"{name}: {size.name}", getattr(tower, size.name), 1, MAX_LAYERS if size.name == "layers" else 1 << 20
        )
    if tower.width % (2 * tower.heads):
        raise ConfigError(f"{name}: width {tower.width} must be {tower.heads} heads of an even width")


def _checked_fields(name: str, values: Any, kind: Any) -> Mapping[str, Any]:
    """Returns `values`. Raises `ConfigError` unless its keys are exactly the fields of the dataclass `kind`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be an object, got {type(values).__name__}")
    known = {field.name for field in fields(kind)}
    if wrong := known.symmetric_difference(values):
        raise ConfigError(f"{name}: unknown or missing: {', '.join(sorted(map(str, wrong)))}")
    return values


# ---- the folder of a trained model

MODEL_TYPE, FORMAT_VERSION = "hbpe", 1
CONFIG_NAME, WEIGHTS_NAME, TABLE_NAME, TOKENIZER_NAME = (
    "config.json",
    "model.safetensors",
    "table.npz",
    "tokenizer.json",
)


@dataclass(frozen=True)
class SavedPatchModel:
    """The content of a patch model's folder.

    text: converts text to patches and back. context: patches per training window. source: a record of the texts and
    steps of the training.
    """

    model: PatchModel
    text: PatchText
    context: int
    source: Mapping[str, Any]


def save_patch_model(folder: Path, saved: SavedPatchModel) -> None:
    """Writes a model's folder, whole or not at all, replacing an older one. Raises `ModelError` if writing fails."""
    try:
        with atomic_folder(folder) as partial:
            mx.save_safetensors(str(partial / WEIGHTS_NAME), dict(named_arrays(saved.model.parameters())))
            saved.text.table.save(partial / TABLE_NAME)
            (partial / TOKENIZER_NAME).write_text(saved.text.tokenizer.to_str(), encoding="utf-8")
            write_json(
                partial / CONFIG_NAME,
                {
                    "model_type": MODEL_TYPE,
                    "version": FORMAT_VERSION,
                    "sizes": saved.model.config.to_dict(),
                    "context": saved.context,
                    "weights_sha256": _sha256_of_file(partial / WEIGHTS_NAME),
                    "source": saved.source,
                    "mlx_zip": mlx_zip.__version__,
                },
            )
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot write {folder}: {error}") from error


def load_patch_model(folder: str | Path) -> SavedPatchModel:
    """Returns the model that `save_patch_model` wrote to a folder.

    Raises `ConfigError`, `DataError` or `ModelError` naming the file that is missing, damaged or of another model.
    """
    folder = expand_home(folder)
    config = _read_patch_config(folder / CONFIG_NAME)
    try:
        sizes = PatchConfig.from_dict(config["sizes"])
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG_NAME}: {error}") from error
    tokenizer, table = read_hf_tokenizer(folder / TOKENIZER_NAME), PatchTable.load(folder / TABLE_NAME)
    try:
        text = PatchText(tokenizer, table)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    merges = text.table.merges
    if (merges.symbols, merges.patch_size) != (sizes.symbols, sizes.patch_size):
        raise ConfigError(
            f"{folder / CONFIG_NAME} describes patches of {sizes.patch_size} out of {sizes.symbols} symbols, "
            f"but {TABLE_NAME} has patches of {merges.patch_size} out of {merges.symbols}"
        )
    model = PatchModel(sizes)
    _load_weights(model, folder / WEIGHTS_NAME, config["weights_sha256"])
    return SavedPatchModel(model, text, config["context"], config["source"])


def _read_patch_config(path: Path) -> dict[str, Any]:
    """Returns a patch model's config.json, its keys and types checked. Raises `ConfigError`."""
    inner = path.parent / "model"  # `mlx_zip vocab hbpe fit RUN` writes the model to RUN/model
    hint = f"; the model's folder may be {inner}" if inner.is_dir() else ""
    config = read_json_object(path, hint, raises=ConfigError)
    if (kind := config.get("model_type")) != MODEL_TYPE:
        raise ConfigError(f"{path} is not the config of a patch model: its model_type is {kind!r}, not {MODEL_TYPE!r}")
    if (version := config.get("version")) != FORMAT_VERSION or isinstance(version, bool):
        raise ConfigError(f"{path} has version {version!r}, this mlx_zip reads {FORMAT_VERSION}")
    kinds = {"sizes": dict, "context": int, "weights_sha256": str, "source": dict}
    if wrong := [name for name, kind in kinds.items() if type(config.get(name)) is not kind]:
        raise ConfigError(f"{path}: {', '.join(wrong)} missing or of another type")
    if config["context"] < 1:
        raise ConfigError(f"{path}: context must be at least 1, got {config['context']}")
    return config


def _load_weights(model: PatchModel, path: Path, digest: str) -> None:
    """Loads a weights file into a model. Raises `ModelError` unless it has this sha256 and exactly the model's tensors.

    digest: the sha256 as hex, from config.json.
    """
    try:
        if _sha256_of_file(path) != digest:
            raise ModelError(f"{path} is damaged, or not the file that {CONFIG_NAME} in the folder was written with")
        weights: Any = mx.load(str(path))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    wanted = {name: value.shape for name, value in named_arrays(model.parameters())}
    if found := wanted.items() ^ {name: value.shape for name, value in weights.items()}.items():
        raise ModelError(f"{path} does not hold the weights that {CONFIG_NAME} describes: {sorted(found)[0][0]}")
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


# ---- generating text

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
