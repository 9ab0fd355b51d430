"""The engines `torch-zip` and `torch-base`: mlx_zip on PyTorch and Triton, with and without hypertokens.

Both run the same code over the same weights, on a GPU if torch finds one, else on the CPU. They need no MLX. They take
decoding steps of one sequence without the scheduler around them, so that it can be measured what the scheduler adds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import compress_next
from mlx_zip.codec.ids import as_ids
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.devices import find_device
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.engine.sampling.exclusions import CanonicalIds
from mlx_zip.errors import GenerationError, MlxZipError, ModelError
from mlx_zip.layout import MODEL_TYPE, Layout
from mlx_zip.models.model_folder import find_model_folder, read_model_config
from mlx_zip.packs.pack import PackOrEntries
from mlx_zip.text.tokenizers import load_tokenizer

from .device_clock import EngineOnTorch, wait_for_device
from .interface import Run, compress_prompt_and_text
from .random_folder import random_folder
from .shape_table import GROUP_SIZE, SHAPES, Models, ZipOptions, config_with_hypertokens

NAMES = ("torch-zip", "torch-base")
CHUNK = 2048  # ids of a prompt in one prefill pass
Emitted = tuple[int, tuple[int, ...]]  # an id, and the base ids that it stands for


# ---- models


def torch_models_from_flags(
    shape: str | None, precision: str, model: str | None, base: str | None, tokenizer: str, options: Any
) -> Models:
    """Returns `Models` from the flags, like `models_from_shape` and `models_from_folders`, but makes no models in MLX.

    Raises `MlxZipError` if the flags name no model, a folder cannot be read, `model` has no hypertokens, or the
    tokenizer has more ids than the model.
    """
    if shape is not None:
        return torch_models_of_shape(shape, precision, load_tokenizer(tokenizer), options)
    folders = [None if one is None else find_model_folder(one) for one in (model, base)]
    first = next((one for one in folders if one is not None), None)
    if first is None:
        raise MlxZipError("name a model with --model or --base, or a shape with --shape")
    config = read_model_config(first)
    if folders[0] is not None and config["model_type"] != MODEL_TYPE:
        raise MlxZipError(f"--model {model} has no hypertokens; a plain model is named with --base")
    made = {"plain": raise_mlx_needed, "zipped": raise_mlx_needed if folders[0] else None}
    return Models(
        first.name,
        "as stored",
        "trained",
        config,
        load_tokenizer(first),
        **made,
        folder=folders[1],
        zip_folder=folders[0],
    )


def torch_models_of_shape(name: str, precision: str, tokenizer: Any, options: ZipOptions) -> Models:
    config = SHAPES[name]
    Layout(config["vocab_size"], 0, config["vocab_size"]).check_tokenizer(len(tokenizer))
    return Models(name, precision, "random", config, tokenizer, raise_mlx_needed, raise_mlx_needed, options=options)


def raise_mlx_needed() -> Any:
    raise MlxZipError("these models were described for the engines on PyTorch only")


def shared_cuda_model(models: Models) -> CudaModel:
    if "cuda" not in models.opened:
        models.opened["cuda"] = load_cuda_model(models)
    return models.opened["cuda"]


def load_cuda_model(models: Models) -> CudaModel:
    folder = models.zip_folder or models.folder
    if folder is not None:
        return open_model(folder)
    if models.options is None:
        raise MlxZipError("torch-zip and torch-base need the model as a folder (--model, --base), or a shape (--shape)")
    device = find_device(None)
    config = config_with_hypertokens(models.base_config, models.options)
    bits = int(models.precision) if models.precision in ("8", "4") else None
    dtype = torch.float32 if models.precision == "float32" else torch.bfloat16
    made = random_folder(config, device, dtype, bits, GROUP_SIZE, kernels=device.type == "cuda")
    return CudaModel(made, made.zip)


# ---- engines


class TorchEngine(EngineOnTorch):
    """The engine `torch-zip`, or `torch-base` without hypertokens. Keeps one batch, to reuse its CUDA graphs."""

    def __init__(self, name: str, models: Models) -> None:
        """Raises `MlxZipError` if the engine cannot run these models."""
        whole = shared_cuda_model(models)
        if name == "torch-zip" and not whole.has_hypertokens:
            raise MlxZipError("torch-zip needs a model with hypertokens: --model or --shape")
        self.name, self.tokenizer = name, models.tokenizer
        self.model = whole if name == "torch-zip" else whole.without_hypertokens()
        if name == "torch-base" and models.folder is not None and models.zip_folder is not None:
            self.model = open_model(models.folder, hypertokens=False)
        self.torch_device, self.weight_bytes = self.model.device, self.model.step_weight_bytes
        self.kv_bytes = self.model.folder.decoder.kv_bytes_per_id(self.model.dtype)
        self.kv_dtype = str(self.model.dtype).removeprefix("torch.")
        self.batch: Batch | None = None

    def forget_encoded_rows(self) -> None:
        """Empties the row store."""
        if self.model.store is not None:
            self.model.store.clear()

    def start_conversation(self) -> list[Batch]:
        """Returns the state of a new conversation: an empty list, to which the first run adds its batch."""
        return []

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. Waits for the device to be idle before the clock starts and after the run."""
        batch = self.ready(len(prompt) + tokens + 1) if held is None else conversation_batch(self.model, held)
        wait_for_device(self.model.device)
        before = reset_peak_memory(self.model.device)
        run = self._run(batch, prompt, tokens, replay)
        wait_for_device(self.model.device)
        run.peak_bytes = peak_memory_bytes(self.model, before)
        return run

    def ready(self, capacity: int) -> Batch:
        """Returns the kept batch, or a new one if it has no room for `capacity` ids, with one new, empty sequence."""
        if self.batch is None or self.batch.capacity < capacity:
            self.batch = None  # frees the smaller batch first
            self.batch = Batch(self.model, 1, capacity)
        while len(self.batch):
            self.batch.remove(0)
        self.batch.add()
        return self.batch

    def _run(self, batch: Batch, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None) -> Run:
        forced = None if replay is None else compress_prompt_and_text(batch.book(0), prompt, replay)[1]
        detokenizer, ends = self.tokenizer.detokenizer, frozenset(self.tokenizer.eos_token_ids)
        begun = time.perf_counter()
        ids = compress_next(batch.book(0), as_ids(prompt))
        run = Run(len(ids))
        prefill_in_chunks(batch, 0, ids)
        steps = GreedySteps(batch, tokens, ends) if forced is None else ReplayedSteps(batch, tokens, forced)
        for emitted, expanded in steps:
            base_ids = cut_after_eos(expanded, tokens - len(run.base_ids), ends)
            for one in base_ids:
                if one not in ends:
                    detokenizer.add_token(one)
            run.step(time.perf_counter() - begun, [emitted], base_ids)
        detokenizer.finalize()
        run.text_bytes = len(detokenizer.text.encode())
        run.kv_ids, run.row_bytes = batch.book(0).mark(), installed_row_bytes(batch)
        return run


# ---- decoding steps


def generate_greedily(
    model: CudaModel,
    base_ids: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int] = (),
    *,
    pack: PackOrEntries | None = None,
    chunk: int = CHUNK,
    batch: Batch | None = None,
) -> Iterator[Emitted]:
    """Yields greedily chosen ids that follow a prompt of base ids, each with the base ids that it stands for.

    max_tokens: base ids to emit; the last hypertoken may exceed this number. eos_ids: base ids that end the text. pack:
    see `CudaModel.sequence_start`. chunk: ids per prefill pass. batch: an empty batch of this model, whose CUDA graphs
    are reused and which is empty again at the end; None makes a batch. Raises `GenerationError` if the prompt is empty,
    `ModelError` if `batch` is not empty or another model's, and `CodecError`.
    """
    if not len(base_ids):
        raise GenerationError("the prompt is empty; give at least one id")
    if batch is None:
        batch = Batch(model, 1, len(base_ids) + max_tokens)
    if len(batch) or batch.model is not model:
        raise ModelError("the batch holds a sequence, or is another model's")
    row = batch.add(pack)
    try:
        prefill_in_chunks(batch, row, compress_next(batch.book(row), as_ids(base_ids)), chunk)
        yield from GreedySteps(batch, max_tokens, eos_ids)
    finally:
        batch.remove(row)


def prefill_in_chunks(batch: Batch, row: int, ids: np.ndarray, chunk: int = CHUNK) -> None:
    """Reads a prompt's ids into a sequence, `chunk` ids per pass."""
    for begin in range(0, len(ids), chunk):
        batch.read(row, ids[begin : begin + chunk], more=begin + chunk < len(ids))


class GreedySteps:
    """Iterates over the ids that the only sequence of a batch emits. max_tokens, eos_ids: as in `generate_greedily`.

    While the caller handles an id, the device runs the decoder's layers over the next id. After a complete iteration,
    the batch has read every emitted id.
    """

    def __init__(self, batch: Batch, max_tokens: int, eos_ids: Collection[int] = ()) -> None:
        self._batch, self._left, self._ends = batch, max_tokens, frozenset(eos_ids)
        config = batch.model.config
        self._canonical = CanonicalIds(batch.book(0)) if config is not None and config.canonical else None
        self._pad = 0 if config is None else config.pad_id

    def __iter__(self) -> Iterator[Emitted]:
        going = self._begin_step()
        while going:
            [emitted] = self._batch.wait_for_ids()
            for error in self._batch.update_codebooks([emitted]).values():
                raise error
            base_ids = tuple(self._batch.book(0).base_ids(self._batch.book(0).mark() - 1).tolist())
            self._left -= len(base_ids) if self._ends.isdisjoint(base_ids) else self._left
            going = self._begin_step()
            yield emitted, base_ids

    def _begin_step(self) -> bool:
        """Starts the next step and returns True; returns False if the text has ended or the caches are full."""
        if self._left <= 0 or not self._batch.room_left(0):
            return False
        self._choose_id()
        self._batch.start_body()
        return True

    def _choose_id(self) -> None:
        """Chooses the best id, or the best canonical id if the model's config requires canonical decoding."""
        excluded = [] if self._canonical is None else self._canonical.excluded()
        choose = lambda head: exclude_ids(head.logits, [excluded], self._pad).argmax(1)
        self._batch.choose_ids(choose if excluded else None)


class ReplayedSteps(GreedySteps):
    """Emits given compressed ids [n] in order, each after the model's own choice has been computed."""

    def __init__(self, batch: Batch, tokens: int, ids: Any) -> None:
        super().__init__(batch, tokens)
        self.forced = torch.from_numpy(ids.astype("int64")).to(batch.model.device)
        self.at = 0

    def _choose_id(self) -> None:
        at = self.at = min(self.at + 1, len(self.forced))
        self._batch.choose_ids(lambda head: self.forced[at - 1 : at], logits=False)


def conversation_batch(model: CudaModel, held: list[Batch]) -> Batch:
    """Returns a conversation's batch. A new batch has room for as many ids as the model has positions, at most 4096."""
    if not held:
        held.append(Batch(model, 1, min(model.folder.decoder.positions, 4096)))
        held[0].add()
    return held[0]


def cut_after_eos(ids: Sequence[int], limit: int, ends: Collection[int]) -> list[int]:
    """Returns at most the first `limit` ids, cut after the first id in `ends`."""
    found = next((at for at, one in enumerate(ids) if one in ends), len(ids))
    return list(ids[: min(limit, found + 1)])


# ---- bytes and devices


def installed_row_bytes(batch: Batch) -> int:
    """Returns the bytes of the output rows of all installed entries of the only sequence in `batch`."""
    model = batch.model
    return len(batch.book(0)) * model.width * model.dtype.itemsize if model.has_hypertokens else 0


def reset_peak_memory(device: torch.device) -> int:
    """Resets a GPU's peak memory counter and returns the bytes in use; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory_bytes(model: CudaModel, before: int) -> int | None:
    """Returns a run's peak bytes: `step_weight_bytes` plus the bytes allocated beyond `before`; None on a CPU."""
    if model.device.type != "cuda":
        return None
    return model.step_weight_bytes + max(0, torch.cuda.max_memory_allocated(model.device) - before)
