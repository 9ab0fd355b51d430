"""Engines that call a PyTorch model's `generate`: transformers, and the published zip2zip package.

They run on a GPU if torch finds one, else on the CPU. A step ends when `generate` emits its id; ids are detokenized
then, as in the other engines. Replay raises the score of the next id above all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from mlx_zip.bench.machine import describe_mlx_device
from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.config import SIDES
from mlx_zip.cuda.kernels.packed import Packed, unpack
from mlx_zip.cuda.network.checkpoint import read_tensor_folder
from mlx_zip.errors import MlxZipError
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.model_folder import read_model_config

from .device_clock import EngineOnTorch
from .interface import Run, compress_prompt_and_text, kv_bytes_per_id
from .shape_table import Models

HAS_MLX = find_spec("mlx") is not None
DTYPES = {"float32": torch.float32, "16": torch.bfloat16, "as stored": "auto"}
OWN_DTYPES = {"hf-float32": torch.float32, "hf-bfloat16": torch.bfloat16}  # engines with a fixed dtype


class _GenerateEngine(EngineOnTorch):
    """Base class of the engines: times the ids that a model's `generate` emits."""

    def __init__(self, models: Models, model: Any, decoder: Any) -> None:
        """model: the model whose `generate` is called. decoder: the decoder inside `model`, which a step runs."""
        self.tokenizer, self.model, self.torch_device = models.tokenizer, model.eval(), decoder.device
        self.weight_bytes = weight_bytes_per_step(decoder)
        self.kv_bytes = kv_bytes_per_id(models.base_config, next(decoder.parameters()).element_size())
        self.kv_dtype = str(next(decoder.parameters()).dtype).removeprefix("torch.")

    @property
    def device(self) -> dict[str, Any]:
        """See `Engine.device`. On a CPU, MLX's description if MLX is installed, as for the MLX engines."""
        return super().device if self.torch_device.type == "cuda" or not HAS_MLX else describe_mlx_device()

    def _generate(
        self, run: Run, begun: float, ids: Sequence[int], steps: int, watch: _StepRecorder, **options: Any
    ) -> Run:
        """Runs `generate` for at most `steps` ids, fills `run` and returns it.

        begun: when the request began, by `time.perf_counter`. ids: the conversation so far and the new prompt. watch:
        receives the emitted ids. options: further arguments of `generate`.
        """
        from transformers import LogitsProcessorList, StoppingCriteriaList

        inputs = torch.tensor([list(ids)], device=self.torch_device)
        if self.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        watch.run, watch.begun, watch.read = run, begun, len(ids)
        with torch.inference_mode():
            self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=steps,
                eos_token_id=sorted(self.tokenizer.eos_token_ids) or None,
                pad_token_id=0,
                streamer=watch,
                stopping_criteria=StoppingCriteriaList([watch.has_enough_base_ids]),
                logits_processor=LogitsProcessorList([watch.force_next_id] if watch.forced is not None else []),
                **options,
            )
        run.text_bytes = len(watch.text().encode())
        run.kv_ids = len(ids) + len(run.ids) - 1
        if self.torch_device.type == "cuda":
            run.peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        return run


@dataclass
class _StepRecorder:
    """The streamer of `generate`, also its logits processor (`force_next_id`) and stopping criterion.

    expand: returns the base ids of an emitted id. tokens: most base ids to emit. forced: ids to replay, None for free
    generation. read: number of ids before the first emitted id.
    """

    detokenizer: Any
    eos: Container[int]
    expand: Callable[[int], Sequence[int]]
    tokens: int
    forced: Sequence[int] | None = None
    run: Run = field(default_factory=lambda: Run(0))
    begun: float = 0.0
    read: int = 0
    _pieces: list[Sequence[int]] = field(default_factory=list)
    _seen_prompt: bool = False

    def put(self, ids: torch.Tensor) -> None:
        """Records the step of an emitted id. The first call passes the prompt and is ignored."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        emitted, at = int(ids.flatten()[0]), len(self.run.ids)
        base_ids = list(self._expand_emitted(at, emitted))[: self.tokens - len(self.run.base_ids)]
        for one in base_ids:
            if one not in self.eos:
                self.detokenizer.add_token(one)
        self.run.step(time.perf_counter() - self.begun, [emitted], base_ids)

    def _expand_emitted(self, at: int, emitted: int) -> Sequence[int]:
        if at == len(self._pieces):
            self._pieces.append(self.expand(emitted))
        return self._pieces[at]

    def end(self) -> None:
        self.detokenizer.finalize()

    def text(self) -> str:
        return self.detokenizer.text

    def force_next_id(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores [1, W] with the score of the next forced id set to infinity. ids: all ids so far [1, n]."""
        assert self.forced is not None
        scores[:, self.forced[min(ids.shape[1] - self.read, len(self.forced) - 1)]] = torch.inf
        return scores

    def has_enough_base_ids(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Returns whether the emitted ids stand for at least `tokens` base ids, as bool [1]. ids: all ids [1, n]."""
        self._expand_emitted(ids.shape[1] - self.read - 1, int(ids[0, -1]))
        return torch.full((1,), sum(map(len, self._pieces)) >= self.tokens, device=ids.device)


class TransformersEngine(_GenerateEngine):
    """Runs the plain model through transformers' `generate`, eager."""

    def __init__(self, models: Models, name: str) -> None:
        """Raises `MlxZipError` if transformers cannot load the plain model."""
        self.name = name
        model = load_transformers_model(models, name)
        super().__init__(models, model, model)

    def start_conversation(self) -> dict[str, Any]:
        """Returns the state of a new conversation: its ids so far and their KV cache, both empty."""
        return {"ids": [], "cache": None}

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`."""
        from transformers import DynamicCache

        held = self.start_conversation() if held is None else held
        watch = _StepRecorder(
            self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, lambda one: (one,), tokens, replay
        )
        begun = time.perf_counter()
        held["cache"] = held["cache"] or DynamicCache()
        ids = [*held["ids"], *prompt]
        run = self._generate(Run(len(prompt)), begun, ids, tokens, watch, past_key_values=held["cache"])
        held["ids"] = [*ids, *run.base_ids]
        return run


class PublishedZip2zipEngine(_GenerateEngine):
    """Runs the published zip2zip package.

    The prompts are compressed by our codec, which gives the same ids as the package's; the compression is timed too.
    """

    name = "zip2zip"

    def __init__(self, models: Models, folder: str | None) -> None:
        """folder: a checkpoint of the package. Raises `MlxZipError` if it is None, missing or another model."""
        if folder is None:
            raise MlxZipError("zip2zip needs --published, a checkpoint as `mlx_zip export` writes it")
        if not Path(folder).is_dir():
            raise MlxZipError(f"--published {folder}: no such folder")
        from zip2zip.model import Zip2ZipModel  # type: ignore[import-not-found]

        model: Any = Zip2ZipModel.from_pretrained(folder, dtype="auto", attn_implementation="eager").to(
            default_torch_device()
        )
        super().__init__(models, model, model.base_model)
        check_checkpoint_sizes(folder, model.base_model.config, models.base_config)
        manager, sizes = model.codebook_manager, model.zip2zip_config.compression
        self.params = CodecParams(
            sizes.initial_vocab_size,
            sizes.max_codebook_size,
            sizes.max_subtokens,
            tuple(sizes.disabled_ids),
            manager.pad_token_id,
        )
        end, width = self.params.vocab_size + self.params.codebook_size, model.base_model.config.vocab_size
        # ids that the package may emit but cannot expand
        self.barred = list(range(end, width + self.params.codebook_size))

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. `held` is ignored: this engine cannot continue a conversation."""
        book = Codebook(self.params)
        forced = None if replay is None else compress_prompt_and_text(book, prompt, replay)[1].tolist()
        begun = time.perf_counter()
        ids, _ = compress(self.params, np.asarray(prompt, np.uint32))
        book.push(ids)

        def expand(one: int) -> list[int]:
            book.push(one)
            return book.expand([one]).tolist()

        watch = _StepRecorder(self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, expand, tokens, forced)
        return self._generate(Run(len(ids)), begun, ids.tolist(), tokens, watch, suppress_tokens=self.barred or None)


def check_checkpoint_sizes(folder: str, config: Any, wanted: Mapping[str, Any]) -> None:
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
        found, asked = getattr(config, name, None), wanted.get(name)
        if None not in (found, asked) and found != asked:
            raise MlxZipError(f"--published {folder} is another model: its {name} is {found}, not {asked}")


def load_transformers_model(models: Models, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    if name not in OWN_DTYPES and models.precision not in DTYPES:
        raise MlxZipError(f"{name} runs float32 and 16 bit only, not {models.precision} bit")
    dtype: Any = OWN_DTYPES.get(name) or DTYPES[models.precision]
    folder = models.folder or models.zip_folder
    if folder is None:
        return make_random_decoder(models.base_config, torch.float32 if dtype == "auto" else dtype)
    config = read_model_config(folder)
    if config["model_type"] != MODEL_TYPE and "quantization" not in config:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return loaded.to(default_torch_device())
    if dtype == "auto":
        raise MlxZipError(f"{name} cannot read {folder}, which is packed or has hypertokens: name hf-float32")
    return load_unpacked_decoder(folder, dtype)


def load_unpacked_decoder(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the decoder in an mlx_zip or mlx-lm folder as a transformers model with dense weights, on the CPU.

    Raises `MlxZipError` if the folder and the model do not have the same tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    read = read_tensor_folder(folder, "cpu", torch.float32, skipped_prefixes=SIDES)
    fields = {key: value for key, value in read.config.items() if key not in ("model_type", "zip2zip", "quantization")}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(read.decoder.kind, **fields), dtype=dtype)
    weights = {
        name: unpack(value, torch.float32) if isinstance(value, Packed) else value
        for name, value in read.tensors.items()
    }
    missing, unknown = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not (read.decoder.tied and name == "lm_head.weight")]
    if missing or unknown:
        raise MlxZipError(f"{folder} is not transformers' {read.decoder.kind}: missing {missing}, unknown {unknown}")
    model.tie_weights()
    return model


def make_random_decoder(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns a random transformers decoder, on the GPU if torch finds one. config: the decoder's config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = deepcopy({key: value for key, value in config.items() if key != "model_type"})  # it is changed
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the defaults may exceed the vocabulary
    with torch.device(default_torch_device()):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)


def default_torch_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weight_bytes_per_step(decoder: Any) -> int:
    """Returns the bytes of weights that a step reads: all weights except an untied embedding."""
    embedding = decoder.get_input_embeddings()
    tied = decoder.get_output_embeddings().weight is getattr(embedding, "weight", None)
    skipped = 0 if tied else sum(value.nbytes for value in embedding.parameters(recurse=False))
    return sum(value.nbytes for value in decoder.parameters()) - skipped
