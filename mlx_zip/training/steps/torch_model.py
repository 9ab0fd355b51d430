"""Rebuilds the model that a run trains in PyTorch: transformers' decoder, LoRA layers, hyper-encoders, training heads.

Weights are copied from the MLX trainee once. Trained weights keep the trainee's names, so that both engines read and
write the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.tuner.lora import LoRALinear
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

from mlx_zip.config import SIDES, ZipConfig
from mlx_zip.cuda.kernels.dispatch import force_implementation
from mlx_zip.cuda.network.encoders import EncoderWeights, make_encoder
from mlx_zip.errors import TrainingError, errors_as
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import ROWS
from mlx_zip.training.steps.objective import Trainee

USE_MLX = "train with --engine mlx"
WEIGHT_FIELDS = ("weight", "bias", "lora_a", "lora_b")
BODY_PREFIX, HEAD_WEIGHT = "model.model.", "model.lm_head.weight"  # names in the MLX trainee
KEYS_NOT_OF_DECODER = ("zip2zip", "quantization", "quantization_config")
PREFIXES_BESIDE_MODEL = ("decoder.", "type_head.", *ROWS)  # parts of a trainee that are not its model


class TorchModel(nn.Module):
    """The model of an MLX trainee as a PyTorch module on a device.

    body: transformers' decoder without the head. head [V, D]: weight of the head, or of the embedding if both are tied.
    parts: weights of the hyper-encoders, the training heads and a pack's rows, by the trainee's names. trained: the
    trained weights, float32, by the trainee's names. zip: codec and encoder, None for a plain model. cap: soft cap of
    logits, or None.
    """

    def __init__(
        self,
        trainee: Trainee,
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        dropout: float = 0.0,
    ) -> None:
        """Copies the trainee's weights. config: the model's config.json. dtype: dtype of frozen weights.

        dropout: dropout rate of LoRA inputs. Raises `TrainingError` if transformers cannot build the model or builds it
        with other tensors.
        """
        super().__init__()
        self._trained_names = {name for name, _ in named_arrays(trainee.trainable_parameters())}
        source = trainee.model
        self.zip: ZipConfig | None = source.config if isinstance(source, Model) else None
        self.device, self.dtype = device, dtype
        self.trained: dict[str, nn.Parameter] = {}
        self.body = _make_transformers_decoder(config, device.type == "cpu" and dtype == torch.bfloat16).to(
            device, dtype
        )
        self.cap: float | None = getattr(self.body.config, "final_logit_softcapping", None)
        self.scale = float(getattr(self.body.embed_tokens, "scalar_embed_scale", 1.0))
        self._copy_body_weights(source.model, dropout)
        beside = (*(f"model.{side}" for side in SIDES), *PREFIXES_BESIDE_MODEL)
        named = named_arrays(trainee.parameters())
        self.parts = {n: self._copy(n, value) for n, value in named if n.startswith(beside)}
        head = getattr(source, "lm_head", None)
        tied = head is None or config.get("tie_word_embeddings") is True
        embedding = self.body.embed_tokens.weight
        self.head = embedding if tied else self._copy(HEAD_WEIGHT, matrix_rows(head, slice(None)))
        if missing := sorted(self._trained_names - self.trained.keys()):
            raise TrainingError(f"--engine torch has no place for {', '.join(missing[:4])}; {USE_MLX}")
        self._cast_weights_on_read()

    def _copy(self, name: str, value: mx.array) -> torch.Tensor:
        """Returns a copy of an MLX array on the device: a float32 parameter in `trained`, or a constant of `dtype`."""
        tensor = to_torch(value).to(self.device)
        if name not in self._trained_names:
            return tensor.to(self.dtype)
        self.trained[name] = nn.Parameter(tensor)
        return self.trained[name]

    def _copy_body_weights(self, source: Any, dropout: float) -> None:
        """Inserts LoRA layers and copies the decoder's weights. Raises `TrainingError` naming a tensor that differs.

        source: MLX's decoder, whose names are PyTorch's.
        """
        modules = {name: module for name, module in source.named_modules() if name and hasattr(module, "parameters")}
        for name, module in modules.items():
            if isinstance(module, LoRALinear):
                parent, _, last = name.rpartition(".")
                lora = Lora(self.body.get_submodule(name), module, dropout)
                setattr(self.body.get_submodule(parent), last, lora)
        arrays = [(path, field) for path, module in modules.items() for field in WEIGHT_FIELDS if field in module]
        parameters = dict(self.body.named_parameters())
        if differ := sorted(parameters.keys() ^ {f"{path}.{field}" for path, field in arrays}):
            raise TrainingError(f"--engine torch: transformers' model differs in {', '.join(differ[:4])}; {USE_MLX}")
        for path, field in arrays:
            name, module = f"{path}.{field}", modules[path]
            value = matrix_rows(module, slice(None)) if field == "weight" else module[field]
            copied = self._copy(BODY_PREFIX + name, value)
            if copied.shape != parameters[name].shape:
                raise TrainingError(f"--engine torch: {name} has shape {list(copied.shape)}, transformers' differs")
            own = copied if isinstance(copied, nn.Parameter) else nn.Parameter(copied, requires_grad=False)
            setattr(self.body.get_submodule(path), field, own)

    def _cast_weights_on_read(self) -> None:
        """Makes layers cast trained weights to `dtype` at every use, also when activations are recomputed.

        Excludes `Lora` layers, which cast their own weights, and the embedding, of which only single rows are cast.
        """
        embedding = self.body.embed_tokens
        modules = [one for one in self.body.modules() if one is not embedding and not isinstance(one, Lora)]
        for module in modules:
            for name, value in list(module.named_parameters(recurse=False)):
                if value.dtype != self.dtype:
                    # unsafe=True allows a dtype that differs from the stored weight's
                    register_parametrization(module, name, _CastOnRead(self.dtype), unsafe=True)

    # ---- the forward pass

    def hidden_states(
        self, arrays: Mapping[str, torch.Tensor], longest: int, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the body's output [B, L, D]. arrays: arrays of a `Batch`. longest: `longest` of that batch.

        rows [R, D]: input rows of the hypertokens in the inputs, None if there are no hypertokens.
        """
        inputs = arrays["inputs"]
        h = functional.embedding(inputs, self.body.embed_tokens.weight).to(self.dtype)
        if rows is not None:
            at = arrays["input_rows"]
            h = torch.where((at >= 0)[..., None], rows.to(h.dtype)[at.clamp(min=0)], h)
        if self.scale != 1.0:
            h = h * torch.tensor(self.scale, dtype=h.dtype, device=h.device)
        places = torch.arange(inputs.shape[1], device=h.device).clamp(max=longest - 1)[None].expand_as(inputs)
        places = arrays.get("index", places)
        mask = torch.ones_like(inputs)  # without a mask, transformers takes jumps in positions for new sequences
        call = {"inputs_embeds": h, "attention_mask": mask, "position_ids": places, "use_cache": False}
        return self.body(**call).last_hidden_state

    def make_hyper_rows(self, arrays: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns input rows [R, D] of the entries that occur in inputs, and output rows [U, D] of all entries."""
        assert self.zip is not None
        tied, one_matrix = self.zip.encoder.tie_encoders, self.head is self.body.embed_tokens.weight
        encoder = self.zip.encoder.prefix_of(SIDES[1])
        output = self.encode_entries(encoder, self.head, arrays["entries"], arrays["lengths"])
        output = self._add_pack_rows("output_rows", output, arrays.get("in_pack"))
        if tied and one_matrix:
            return output[arrays["read"]], output
        entries, lengths = arrays["entries"][arrays["read"]], arrays["lengths"][arrays["read"]]
        read = self.encode_entries(SIDES[0], self.body.embed_tokens.weight, entries, lengths)
        places = arrays["in_pack"][arrays["read"]] if "in_pack" in arrays else None
        return self._add_pack_rows("input_rows", read, places), output

    def _add_pack_rows(self, name: str, rows: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Returns encoder rows [N, D] plus trained rows of pack entries. places [N]: `in_pack` of the rows' entries."""
        if places is None:
            return rows
        own = self.parts[name].to(rows.dtype)
        return rows + torch.cat([own, own.new_zeros(1, own.shape[1])])[places]

    def encode_entries(
        self, side: str, matrix: torch.Tensor, entries: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Returns hyper rows [N, D] of padded entries [N, S] of lengths [N]. side: prefix of the encoder's weights."""
        assert self.zip is not None

        def read_weight(name: str, *shape: int) -> torch.Tensor:
            return self.parts[f"model.{name}"].to(self.dtype)

        with force_implementation("reference"):
            encoder = make_encoder(self.zip.encoder, self.zip.merge_size, EncoderWeights(read_weight, side))
            return encoder(entries, lengths, matrix.to(self.dtype))


class Lora(nn.Module):
    """A linear layer and its LoRA adapter: x W' + bias + scale * (dropout(x) A) B; A [in, r], B [r, out]."""

    def __init__(self, linear: nn.Module, like: LoRALinear, dropout: float) -> None:
        """like: MLX's layer, which gives the scale and the shapes of A and B. The values of A and B are set later."""
        super().__init__()
        self.linear, self.scale, self.dropout = linear, like.scale, dropout
        self.lora_a, self.lora_b = (nn.Parameter(torch.empty(side.shape)) for side in (like.lora_a, like.lora_b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output in x's dtype."""
        z = functional.dropout(x, self.dropout, self.training) if self.dropout else x
        low = z @ self.lora_a.to(x.dtype)
        return self.linear(x) + self.scale * (low @ self.lora_b.to(x.dtype))


class _CastOnRead(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype)


def to_torch(value: mx.array) -> torch.Tensor:
    """Returns a float32 copy of an MLX array as a PyTorch tensor."""
    return torch.from_numpy(np.array(value.astype(mx.float32)))


def to_mlx(tensor: torch.Tensor) -> mx.array:
    """Returns a float32 copy of a PyTorch tensor as an MLX array."""
    return mx.array(tensor.detach().float().cpu().numpy())


def _make_transformers_decoder(config: Mapping[str, Any], eager: bool) -> Any:
    """Returns transformers' decoder for a config.json, with random weights. Raises `TrainingError` if it fails.

    eager: compute attention in plain matrix products, which in bfloat16 are faster on a CPU than fused attention.
    """
    from transformers import AutoConfig, AutoModel

    known = deepcopy({key: value for key, value in config.items() if key not in KEYS_NOT_OF_DECODER})  # it is changed
    known["pad_token_id"] = None  # a pad id would only zero a row of the embedding
    if config["model_type"] == MODEL_TYPE:
        known["model_type"] = config["zip2zip"]["base_model_type"]
    kind = known.pop("model_type")
    attention = "eager" if eager or kind == "gemma2" else "sdpa"  # gemma2 has soft caps on attention scores
    with errors_as(TrainingError, f"transformers cannot build this {kind}", ValueError, TypeError, KeyError):
        body = AutoModel.from_config(AutoConfig.for_model(kind, **known), attn_implementation=attention)
    return body.requires_grad_(False)
