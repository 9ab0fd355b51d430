"""The engines on PyTorch: transformers, eager and compiled, and the published zip2zip package; each by its `generate`.

They run where torch finds a GPU, else on the CPU. Times are taken where `generate` hands an id out; the ids are
detokenized there by the same code as in the other engines. Replay raises the score of the next id above all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.errors import MlxZipError

from . import machine
from .engines import Engine, Run, kv_bytes, zip_ids
from .shapes import Models

DTYPES = {"float32": torch.float32, "16": torch.bfloat16, "as stored": "auto"}


def make_torch_engine(name: str, models: Models, published: str | None) -> Engine:
    """`hf`, `hf-compiled` or `zip2zip`, the last of a checkpoint in the published format (`mlx_zip export` writes it).

    Raises `MlxZipError` for a model that the engine cannot have.
    """
    if name == "zip2zip":
        if published is None:
            raise MlxZipError("zip2zip needs --published, a checkpoint as `mlx_zip export` writes it")
        return Published(models, published)
    return Transformers(models, compiled=name == "hf-compiled")


class _TorchEngine(Engine):
    """What these engines share: `generate`, watched from outside. model: whose `generate` is called."""

    def __init__(self, models: Models, model: Any, decoder: Any) -> None:
        self.tokenizer, self.model, self.torch_device = models.tokenizer, model.eval(), decoder.device
        self.weight_bytes = _weight_bytes(decoder)
        self.kv_bytes = kv_bytes(models.base_config, next(decoder.parameters()).element_size())

    @property
    def device(self) -> dict[str, Any]:
        """What torch runs on."""
        gpu = self.torch_device.type == "cuda"
        found = {"device": "cuda", "chip": torch.cuda.get_device_name(self.torch_device)} if gpu else {}
        return {**super().device, **found}

    def bandwidth(self) -> float:
        """By torch where it has a GPU, else by MLX: the CPU is one."""
        if self.torch_device.type != "cuda":
            return super().bandwidth()
        matrix = torch.ones((machine.BANDWIDTH_SIDE, machine.BANDWIDTH_SIDE), device=self.torch_device)
        vector = matrix[0].clone()

        def read() -> None:
            torch.mv(matrix, vector)
            torch.cuda.synchronize(self.torch_device)

        return matrix.nbytes / machine.fastest(read)

    def _generate(self, run: Run, begun: float, ids: Sequence[int], steps: int, watch: _Watch, **options: Any) -> Run:
        """ids: all that the conversation holds and the new prompt. Fills `run` and gives it back."""
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
                stopping_criteria=StoppingCriteriaList([watch.full]),
                logits_processor=LogitsProcessorList([watch.force] if watch.forced is not None else []),
                **options,
            )
        run.text_bytes = len(watch.text().encode())
        run.kv_ids = len(ids) + len(run.ids) - 1
        if self.torch_device.type == "cuda":
            run.peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        return run


@dataclass
class _Watch:
    """Stands where `generate` asks for a streamer, a processor of scores and a criterion to stop.

    expand: the base ids of an emitted id; asked once per id, in order. read: ids before the first one.
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
        """The prompt at first, then each id."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        emitted, at = int(ids.flatten()[0]), len(self.run.ids)
        base_ids = list(self._piece(at, emitted))[: self.tokens - len(self.run.base_ids)]
        for one in base_ids:
            if one not in self.eos:
                self.detokenizer.add_token(one)
        self.run.step(time.perf_counter() - self.begun, [emitted], base_ids)

    def _piece(self, at: int, emitted: int) -> Sequence[int]:
        if at == len(self._pieces):
            self._pieces.append(self.expand(emitted))
        return self._pieces[at]

    def end(self) -> None:
        """Nothing more comes."""
        self.detokenizer.finalize()

    def text(self) -> str:
        """All text so far."""
        return self.detokenizer.text

    def force(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, W] in which the next forced id is the highest, for ids [1, n] so far."""
        assert self.forced is not None
        scores[:, self.forced[min(ids.shape[1] - self.read, len(self.forced) - 1)]] = torch.inf
        return scores

    def full(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """[1] bool: whether ids [1, n] stand for as many base tokens as were asked for."""
        self._piece(ids.shape[1] - self.read - 1, int(ids[0, -1]))
        return torch.full((1,), sum(map(len, self._pieces)) >= self.tokens, device=ids.device)


class Transformers(_TorchEngine):
    """transformers' `generate` on the plain model; compiled: with a static cache, its forward pass by torch.compile."""

    def __init__(self, models: Models, compiled: bool) -> None:
        self.name = "hf-compiled" if compiled else "hf"
        model = _plain(models, self.name)
        super().__init__(models, model, model)
        self.options: dict[str, Any] = {}
        if compiled:
            from transformers import CompileConfig

            config: Any = CompileConfig()
            config._compile_all_devices = True
            self.options = {"cache_implementation": "static", "compile_config": config}

    def start(self) -> dict[str, Any]:
        """Ids read so far, and transformers' cache of them."""
        return {"ids": [], "cache": None}

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`."""
        from transformers import DynamicCache

        held = self.start() if held is None else held
        watch = _Watch(self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, lambda one: (one,), tokens, replay)
        options, begun = dict(self.options), time.perf_counter()
        if not options:
            held["cache"] = held["cache"] or DynamicCache()
            options["past_key_values"] = held["cache"]
        ids = [*held["ids"], *prompt]
        run = self._generate(Run(len(prompt)), begun, ids, tokens, watch, **options)
        held["ids"] = [*ids, *run.base_ids]
        return run


class Published(_TorchEngine):
    """The zip2zip package. Prompts are compressed by our codec, inside the clock: both give the same ids."""

    name = "zip2zip"

    def __init__(self, models: Models, folder: str) -> None:
        from zip2zip.model import Zip2ZipModel  # type: ignore[import-not-found]

        if not Path(folder).is_dir():
            raise MlxZipError(f"--published {folder}: no such folder")
        model: Any = Zip2ZipModel.from_pretrained(folder, dtype="auto", attn_implementation="eager").to(_device())
        super().__init__(models, model, model.base_model)
        manager, sizes = model.codebook_manager, model.zip2zip_config.compression
        self.params = CodecParams(
            sizes.initial_vocab_size,
            sizes.max_codebook_size,
            sizes.max_subtokens,
            tuple(sizes.disabled_ids),
            manager.pad_token_id,
        )
        end, width = self.params.vocab_size + self.params.codebook_size, model.base_model.config.vocab_size
        self.barred = list(range(end, width + self.params.codebook_size))  # ids that the package cannot read back

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`; a conversation it cannot hold."""
        fresh = Codebook(self.params)
        forced = None if replay is None else zip_ids(fresh, prompt, replay)[1].tolist()
        begun = time.perf_counter()
        ids, _ = compress(self.params, np.asarray(prompt, np.uint32))
        fresh.push(ids)

        def expand(one: int) -> list[int]:
            fresh.push(one)
            return fresh.expand([one]).tolist()

        watch = _Watch(self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, expand, tokens, forced)
        return self._generate(Run(len(ids)), begun, ids.tolist(), tokens, watch, suppress_tokens=self.barred or None)


def _plain(models: Models, name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if models.precision not in DTYPES:
        raise MlxZipError(f"{name} runs float32 and 16 bit only, not {models.precision} bit")
    dtype: Any = DTYPES[models.precision]
    if models.folder is not None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(models.folder, dtype=dtype)
        return loaded.to(_device())
    if models.weights != "random":
        raise MlxZipError(f"{name} needs the plain model as a folder: --base")
    fields = {key: value for key, value in models.base_config.items() if key != "model_type"}
    config = AutoConfig.for_model(models.base_config["model_type"], **fields)
    with torch.device(_device()):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _weight_bytes(decoder: Any) -> int:
    """What a step reads: all but an embedding that is not the head too."""
    embedding = decoder.get_input_embeddings()
    tied = decoder.get_output_embeddings().weight is getattr(embedding, "weight", None)
    skipped = 0 if tied else sum(value.nbytes for value in embedding.parameters(recurse=False))
    return sum(value.nbytes for value in decoder.parameters()) - skipped
