"""`Zip2ZipForCausalLM`: a decoder of vLLM with hyper-encoders. `mlx_zip.vllm.state` holds the state of its requests."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import init_vllm_registered_model

from mlx_zip.config import SIDES
from mlx_zip.cuda.kernels.packed import Packed, unpack
from mlx_zip.cuda.network.checkpoint import make_packed_matrix, read_packing
from mlx_zip.cuda.network.encoders import make_encoders
from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.vllm.config import Zip2ZipConfig
from mlx_zip.vllm.state import Zip2ZipState

WEIGHTS = "model*.safetensors"


class Zip2ZipForCausalLM(nn.Module, SupportsPP):
    """A model with hypertokens. All layers are vLLM's.

    `Zip2ZipState` makes the embeddings of ids and adds the logits of hypertokens. layout: the columns of the logits.
    outputs [N, D]: the body's outputs that were last passed to `compute_logits`. Raises `ConfigError` if an option of
    vLLM does not work with hypertokens.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _refuse_what_is_unsupported(vllm_config)
        config = vllm_config.model_config.hf_config
        assert isinstance(config, Zip2ZipConfig)
        self.hf_config, self.config, self.layout = config, config.zip_config, config.layout
        self.dtype = vllm_config.model_config.dtype
        self.decoder = init_vllm_registered_model(vllm_config, hf_config=config.decoder_config(), prefix=prefix)
        self.config.encoder.check_width(self.decoder.config.hidden_size)
        self.make_empty_intermediate_tensors = self.decoder.make_empty_intermediate_tensors
        self.outputs: torch.Tensor | None = None
        self.allow_patterns_overrides = [WEIGHTS]  # so that vLLM's loader does not read a draft head
        self._folder, revision = Path(vllm_config.model_config.model), vllm_config.model_config.revision
        files = [config.encoder_file] if config.encoder_file else []
        self.secondary_weights = [
            DefaultModelLoader.Source(str(self._folder), revision, allow_patterns_overrides=[file]) for file in files
        ]

    @staticmethod
    def get_model_state_cls() -> type[Zip2ZipState]:
        return Zip2ZipState

    # ---- what vLLM calls

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [N, D] of base ids [N]."""
        return self.decoder.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        return self.decoder(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns logits [N, W + 1], -inf except for base ids; `Zip2ZipState` adds hypertokens' logits per request."""
        low = self.decoder.compute_logits(hidden_states)
        self.outputs = hidden_states
        if low is None:
            return None
        logits = low.new_full((len(low), self.hf_config.vocab_size), -torch.inf)
        logits[:, : self.layout.vocab_size] = low[:, : self.layout.vocab_size]
        return logits

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the tensors of a converted folder or an exported checkpoint; returns the names that were loaded.

        Raises `ModelError` naming the tensor if one is missing or is not part of the model.
        """
        self._encoder_tensors: dict[str, torch.Tensor] = {}
        loaded = self.decoder.load_weights(self._without_encoders(self._dense(weights)))
        self._make_encoders()
        return {f"decoder.{name}" for name in loaded}

    def _without_encoders(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        tied = self.decoder.config.tie_word_embeddings
        for name, tensor in weights:
            if name.startswith(SIDES):
                self._encoder_tensors[name] = tensor
            elif not (tied and name.startswith("lm_head.")) and "rotary_emb.inv_freq" not in name:
                yield name, tensor

    def _dense(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors; unpacks a matrix that MLX has packed as soon as its three tensors have been read."""
        if not self.hf_config.packing:
            yield from weights
            return
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            module, _, kind = name.rpartition(".")
            if kind not in ("scales", "biases") and tensor.dtype != torch.uint32:
                yield name, tensor
                continue
            parts = waiting.setdefault(module, {})
            parts[kind] = tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor
            if len(parts) == 3:
                yield f"{module}.weight", unpack(self._packed(module, waiting.pop(module)), self.dtype)
        for module, parts in waiting.items():
            self._packed(module, parts)  # raises, because a part is missing

    def _packed(self, module: str, parts: dict[str, torch.Tensor]) -> Packed:
        name = f"{module}.weight"
        settings = read_packing(self.hf_config.packing, name, self._folder)
        return make_packed_matrix(
            [parts.get(one) for one in ("weight", "scales", "biases")], *settings, name, self._folder
        )

    def _make_encoders(self) -> None:
        cpu_dtype = self.dtype if self.device.type == "cpu" else None
        self.encoders = make_encoders(self.config, self._take_encoder_tensor, self.sides, cpu_dtype)
        prefixes = tuple(map(self.config.encoder.prefix_of, self.sides))
        if rest := sorted(name for name in self._encoder_tensors if name.startswith(prefixes)):
            raise ModelError(f"{rest[0]} is no part of this model")
        del self._encoder_tensors

    def _take_encoder_tensor(self, name: str, *shape: int) -> torch.Tensor:
        value = self._encoder_tensors.pop(name, None)
        if value is None:
            raise ModelError(f"the tensor {name} is missing")
        if tuple(value.shape) != shape:
            raise ModelError(f"{name} has shape {list(value.shape)}, expected {list(shape)}")
        return value.to(self.device, self.dtype)

    # ---- rows

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.decoder.parameters()).device

    @cached_property
    def sides_are_one(self) -> bool:
        """Whether an entry has one row for input and output."""
        return self.config.encoder.tie_encoders and self.decoder.config.tie_word_embeddings

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """The sides whose rows this worker needs: input if it embeds ids, output if it computes logits."""
        group = get_pp_group()
        if self.sides_are_one:
            return SIDES[:1] if group.is_first_rank or group.is_last_rank else ()
        return SIDES[:1] * group.is_first_rank + SIDES[1:] * group.is_last_rank

    def encode(self, entries: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        """Returns rows [N, D] per side of entries [N, S] int64, padded with the pad id; lengths [N] int64.

        With tensor parallelism every worker must call `encode` with the same entries.
        """
        places = torch.arange(entries.numel(), device=entries.device).view(entries.shape)
        return [
            self.encoders[side](places, lengths, _base_rows(self._table(side), entries.reshape(-1)))
            for side in self.sides
        ]

    def _table(self, side: str) -> VocabParallelEmbedding:
        """Returns the matrix, embedding or head, whose rows the encoder of a side takes."""
        inputs = side == SIDES[0] and get_pp_group().is_first_rank
        return self.decoder.model.embed_tokens if inputs else self.decoder.lm_head


def _base_rows(table: VocabParallelEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """Returns rows [N, D] of a matrix that may be split over workers; `ParallelLMHead` has no method for this."""
    return VocabParallelEmbedding.forward(table, ids)


def _refuse_what_is_unsupported(config: VllmConfig) -> None:
    """Raises `ConfigError` if an option of vLLM does not work, or was never tried, with hypertokens."""
    wrong = {
        "its first model runner, which would give wrong output (VLLM_USE_V2_MODEL_RUNNER=0, or Triton is missing)":
            not config.use_v2_model_runner,
        "LoRA adapters: merge them first (mlx_zip convert)": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "weights that are not read (load_format dummy)": config.load_config.load_format == "dummy",
        "prompt embeddings": config.model_config.enable_prompt_embeds,
        "one of its own quantizations": config.quant_config is not None,
        "batch-sharded sampling": config.parallel_config.enable_batch_sharded_sampling,
        "context parallelism": config.parallel_config.prefill_context_parallel_size > 1
        or config.parallel_config.decode_context_parallel_size > 1,
    }  # fmt: skip
    if found := [what for what, is_on in wrong.items() if is_on]:
        raise ConfigError(f"a model with hypertokens cannot run on vLLM with {found[0]}")
