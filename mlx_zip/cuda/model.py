"""A model on PyTorch: decoder, embedding, joint head, hyper-encoders, row store, and the packs of requests."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import CodecParams
from mlx_zip.config import SIDES, ZipConfig, parse_zip_section
from mlx_zip.cuda.devices import find_device, tensor_bytes
from mlx_zip.cuda.hyper_rows import STORE_BYTES, RowStore
from mlx_zip.cuda.kernels.head import HeadOutput, joint_head
from mlx_zip.cuda.kernels.hyper_rows import hyper_embedding
from mlx_zip.cuda.kernels.packed import Matrix
from mlx_zip.cuda.network.checkpoint import TensorFolder, folder_fingerprint, read_tensor_folder
from mlx_zip.cuda.network.cpu_decoder import CpuDecoder, joint_head_on_cpu
from mlx_zip.cuda.network.decoder import Decoder
from mlx_zip.cuda.network.encoders import make_encoders
from mlx_zip.cuda.network.linear import HalfMatrix, Linear
from mlx_zip.errors import ModelError
from mlx_zip.layout import Layout
from mlx_zip.models.model_folder import codebook_config_changes, load_model_tokenizer, read_eos_ids
from mlx_zip.packs.pack import Pack, PackOrEntries, resolve_pack, use_pack_in_folder
from mlx_zip.text.tokenizers import Tokenizer

MAX_KEPT_PACKS = 16  # maximum number of packs named by requests whose rows stay on the device
NO_HYPERTOKENS = "this model has no hypertokens, so no request can begin with a pack"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def open_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    hypertokens: bool = True,
    *,
    pack: PackOrEntries | None = None,
    codebook_size: int | None = None,
    canonical: bool | None = None,
    store_bytes: int = STORE_BYTES,
    kernels: bool | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> CudaModel:
    """Returns a converted zip2zip model or a plain model.

    path: a folder, a bundled model's name or a hub id. device: None for the current GPU, else the CPU. dtype: see
    `read_tensor_folder`. hypertokens: False loads the decoder without hyper-encoders, as a plain model. pack: that of
    requests that name none; None for the tuned pack in the folder, else the entries in config.json. A plain model takes
    only a pack whose rows were tuned for that model. codebook_size: number of slots; canonical: whether decoding is
    canonical; None for the values in config.json. store_bytes: maximum bytes of the encoded rows that all requests
    share. kernels: see `TensorFolder`; None for True on a GPU and False on a CPU. trust_remote_code, chat_template: see
    `load_model_tokenizer`. Raises `ModelError`, `ConfigError`, `DataError` or `CodecError` if a file or the pack is
    invalid, the pack does not fit the model, or memory is too small.
    """
    where = find_device(device)
    kernels = where.type == "cuda" if kernels is None else kernels
    folder = read_tensor_folder(path, where, dtype, () if hypertokens else SIDES, kernels)
    start = None if pack is None else resolve_pack(pack)
    if changes := codebook_config_changes(folder.config, codebook_size, start):
        folder.config |= changes
        folder.zip = parse_zip_section(folder.config["zip2zip"])
    config = folder.zip if hypertokens else None
    if config is not None and canonical is not None:
        config = replace(config, canonical=canonical)
    model = CudaModel(folder, config, store_bytes, trust_remote_code, chat_template)
    if hypertokens and start is not None:
        model.use_pack(start)
    elif config is not None:
        use_pack_in_folder(folder.path, config.start, lambda: model.tokenizer, model.use_pack)
    return model


@dataclass(frozen=True, eq=False)
class SequenceStart:
    """What sequences with the same pack begin with.

    params: the codec's parameters, start entries included. rows: tuned rows [P, sides, D] of the start entries, on the
    device, or None. pack: the pack or entries that the start was made from, held so that its `id()` is not reused.
    """

    params: CodecParams
    rows: torch.Tensor | None
    pack: Any

    @property
    def entry_count(self) -> int:
        """The number of start entries."""
        return len(self.params.start or ())

    @property
    def tuned_count(self) -> int:
        """The number of start entries with tuned rows: all start entries or none."""
        return 0 if self.rows is None else len(self.rows)


class CudaModel:
    """A model's weights on a device, and the options that the model was opened with.

    `mlx_zip.cuda.batch` runs requests on the model. config: the zip2zip settings, None for a model without hypertokens.
    params: the codec's parameters; without hypertokens the codec has no slots, and a codebook only logs base ids.
    store: encoded rows of entries, None without hypertokens.
    """

    def __init__(
        self,
        folder: TensorFolder,
        config: ZipConfig | None,
        store_bytes: int = STORE_BYTES,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Takes the tensors out of `folder`. Raises `ConfigError` if the hyper-encoder does not fit the model.

        trust_remote_code, chat_template: see `load_model_tokenizer`. Raises `ModelError`, naming file and tensor, if a
        tensor is missing, unexpected or of a wrong shape.
        """
        decoder = folder.decoder
        self.folder, self.config = folder, config
        self.device, self.dtype, self.width = folder.device, folder.dtype, decoder.width
        self._take_embedding_and_head()
        self.decoder = Decoder(folder) if folder.kernels else CpuDecoder(folder)
        vocab = decoder.rows if folder.zip is None else folder.zip.vocab_size
        self.layout = Layout(vocab, 0 if config is None else config.codebook_size, decoder.rows)
        self.params = CodecParams(vocab, 0, 1) if config is None else config.codec_params
        self._take_hyper_encoders(config)
        self._raise_if_tensors_left()
        self._eos_ids = read_eos_ids(folder.path, folder.config)
        self._tokenizer_options = (trust_remote_code, chat_template)
        self.store = None if config is None else RowStore(self.sides, self.width, self.dtype, self.device, store_bytes)
        self.default_start = SequenceStart(self.params, None, None)
        self._starts_by_pack: dict[int, SequenceStart] = {}

    def _take_embedding_and_head(self) -> None:
        """Takes embedding and head out of the folder; without kernels, also prepares the head's matrix for a CPU.

        Raises `ModelError` if a tensor is missing or has another shape.
        """
        folder, decoder = self.folder, self.folder.decoder
        low = folder.take_weight(EMBEDDING, decoder.rows, decoder.width)
        high = low if decoder.tied else folder.take_weight(HEAD, decoder.rows, decoder.width)
        self.head_product = None if folder.kernels else Linear(high).prepare_for_cpu(folder.dtype)
        self.embedding: Matrix = folder.to_lookup_table(low)
        self.head_matrix: Matrix = self.embedding if decoder.tied else folder.to_lookup_table(high)

    def _take_hyper_encoders(self, config: ZipConfig | None) -> None:
        self.sides = 2
        if config is None:
            return
        config.encoder.check_width(self.width)
        self.sides = 1 if config.encoder.tie_encoders and self.folder.decoder.tied else 2
        cpu_dtype = None if self.folder.kernels else self.dtype
        self._encoders = make_encoders(config, self.folder.take_weight, SIDES, cpu_dtype)

    def _raise_if_tensors_left(self) -> None:
        """Raises `ModelError` if an unknown tensor is left; without hypertokens, hyper-encoders may be left."""
        ignored = () if self.has_hypertokens else SIDES
        if rest := sorted(name for name in self.folder.tensors if not name.startswith(ignored)):
            raise ModelError(f"{self.folder.path / self.folder.files[rest[0]]}: {rest[0]} is no part of this model")

    def __repr__(self) -> str:
        return f"<CudaModel {self.folder.path.name}: {self.folder.decoder.kind} in {self.dtype} on {self.device}>"

    def without_hypertokens(self) -> CudaModel:
        """Returns a model on the same weights that reads and emits base ids only."""
        plain = copy(self)
        plain.config, plain.store, plain._starts_by_pack = None, None, {}
        plain.layout = replace(self.layout, codebook_size=0)
        plain.params, plain.sides = CodecParams(self.layout.vocab_size, 0, 1), 2
        plain.default_start = SequenceStart(plain.params, None, None)
        return plain

    @property
    def by_base(self) -> bool:
        """Whether positions count base ids (`ZipConfig.by_base`)."""
        return self.config is not None and self.config.by_base

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: layers, norms and the head."""
        values: list[Any] = [self.head_matrix if self.head_product is None else self.head_product, self.decoder.norm]
        for layer in self.decoder.layers:
            values += [getattr(layer, each.name) for each in fields(layer)]
        linear = [one for one in values if isinstance(one, Linear)]
        half = sum(one.weight.nbytes for one in linear if isinstance(one.weight, HalfMatrix))
        return half + tensor_bytes([*values, *((one.weight, one.bias) for one in linear)])

    # ---- packs of requests

    @property
    def has_hypertokens(self) -> bool:
        """Whether the model has hypertokens."""
        return self.config is not None

    @property
    def pack(self) -> Pack | None:
        """The default pack of requests, None if that pack has no tuned rows."""
        given = self.default_start.pack
        return given if isinstance(given, Pack) and given.rows is not None else None

    def use_pack(self, pack: PackOrEntries) -> None:
        """Makes `pack` the default pack of requests.

        Raises `ModelError` if the model has no hypertokens, `ConfigError` if an entry does not fit, and what
        `sequence_start` raises.
        """
        found = resolve_pack(pack)
        if self.config is None:
            raise ModelError(NO_HYPERTOKENS)
        config = replace(self.config, start=found.entries)
        self.default_start, self.config = self.sequence_start(found), config

    def sequence_start(self, pack: PackOrEntries | None) -> SequenceStart:
        """Returns what sequences that begin with `pack` share; None for the model's default pack.

        pack: the path of a pack, a `Pack`, or entries (sequences of base ids); `()` for no entries. Raises `ModelError`
        if the pack's rows were tuned for another model or the model has no hypertokens, `CodecError` if an entry does
        not fit, `DataError` if the pack cannot be read.
        """
        if pack is None or pack is self.default_start.pack:
            return self.default_start
        if self.config is None:
            raise ModelError(NO_HYPERTOKENS)
        found = self._starts_by_pack.get(id(pack))
        if found is None:  # each `SequenceStart` holds its pack, so no other object can have that pack's id()
            found = self._make_sequence_start(pack)
            if len(self._starts_by_pack) >= MAX_KEPT_PACKS:
                self._starts_by_pack.pop(next(iter(self._starts_by_pack)))
            self._starts_by_pack[id(pack)] = found
        return found

    def _make_sequence_start(self, pack: PackOrEntries) -> SequenceStart:
        found = resolve_pack(pack)
        params, rows = self.params.with_start(found), found.rows
        if rows is None:
            if self.is_plain:
                raise ModelError("this model has no hyper-encoder: it can begin with a pack of rows tuned for it only")
            return SequenceStart(params, None, pack)
        rows.check_model(self.fingerprint, self.sides == 1, self.width)
        sides = np.stack((rows.output, rows.input)[: self.sides], axis=1)
        return SequenceStart(params, torch.from_numpy(sides).to(self.device, self.dtype), pack)

    @property
    def is_plain(self) -> bool:
        """Whether this is a plain model: one without a hyper-encoder, even if it has a pack tuned for it."""
        section = self.folder.config.get("zip2zip")
        return section is None or bool(section.get("plain"))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the weights; packs with rows tuned for this model record this fingerprint."""
        return folder_fingerprint(self.folder.path, self.folder.decoder.tied)

    # ---- the parts of a model call

    def embed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [B, L, D] of ids [B, L] int64; rows [B, C, D]: the input rows of each sequence's slots."""
        return hyper_embedding(ids, self.embedding, rows, self.layout.vocab_size)

    def head(self, h: torch.Tensor, rows: torch.Tensor, installed: torch.Tensor, logits: bool = False) -> HeadOutput:
        """Returns the best ids and, if `logits` is True, logits for the body's outputs h [B, D].

        rows [B, C, D]: the output rows of each sequence's slots. installed [B, C] bool: which slots hold an entry.
        """
        if self.head_product is not None:
            return joint_head_on_cpu(h, self.head_product, rows, installed, self.layout.vocab_size, logits)
        return joint_head(h, self.head_matrix, rows, installed, self.layout.vocab_size, logits)

    def base_logits(self, h: torch.Tensor) -> torch.Tensor:
        """Returns the float32 logits [N, V] of base ids for the body's outputs h [N, D]."""
        product = Linear(self.head_matrix) if self.head_product is None else self.head_product
        return product(h)[:, : self.layout.vocab_size].float()

    def encode_entries(self, entries: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns rows [N, sides, D] of entries [N, S] int64, which are padded with the pad id.

        lengths [N] int64: base ids of each entry. sides: the output row, then the input row unless one row serves for
        both.
        """
        outputs = self._encoders[SIDES[1]](entries, lengths, self.head_matrix)
        if self.sides == 1:
            return outputs[:, None]
        return torch.stack([outputs, self._encoders[SIDES[0]](entries, lengths, self.embedding)], dim=1)

    # ---- text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, with the config's ids that end a text. Raises `DataError`, `ConfigError`."""
        found = load_model_tokenizer(self.folder.path, self._eos_ids, *self._tokenizer_options)
        self.layout.check_tokenizer(len(found))
        return found
