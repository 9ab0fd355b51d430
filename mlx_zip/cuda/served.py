"""The model that an engine serves on PyTorch, with what the engine knows of it. Used in the engine's thread only."""

from __future__ import annotations

from typing import Any

import torch

from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.group import CudaGroup
from mlx_zip.cuda.kv import kv_bytes
from mlx_zip.cuda.memory import check_room, free_bytes, host_bytes
from mlx_zip.cuda.model import CudaModel
from mlx_zip.cuda.sampling import BasePenalties, Draws
from mlx_zip.cuda.seats import Seat, Seats
from mlx_zip.engine.options import ServeOptions
from mlx_zip.engine.submissions import ModelFacts, engine_info, start_check
from mlx_zip.errors import ModelError
from mlx_zip.sampling_options import Sampling
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

SHARE = 0.7  # of a card's free memory, for the KV caches of all requests
SHARE_OF_HOST = 0.25  # of a CPU's memory; caches take what their ids fill
LEAST = 16  # ids that a request must have room for


class CudaServed:
    """A loaded model and the batch that its requests are rows of. The names are those of `mlx_zip.engine.parts.Served`.

    Raises `ModelError` if there is no memory for the KV caches, and what a model that cannot run raises.
    """

    machines, batches, long_context = None, False, None

    def __init__(self, model: CudaModel, tokenizer: Any, name: str, options: ServeOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options.run
        config, decoder = model.config, model.folder.decoder
        self.hyper = config is not None
        self.by_base = config is not None and config.position_mode == "base_token_end"
        self.canonical = config is not None and config.canonical
        self.vocab_size = model.layout.vocab_size
        self.kv_bytes_per_id = kv_bytes(decoder, 1, 1, model.dtype)
        trained: int | None = model.folder.config.get("max_position_embeddings")
        capacity = self._capacity(options, trained)
        self.context = trained if self.by_base else min(capacity, trained or capacity)
        self.never_excluded = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self.seats = Seats(Batch(model, options.max_running, capacity))
        self.group = CudaGroup(self.seats, 0 if config is None else config.pad_id)
        self.weight_bytes = 0  # groups are never merged, which this figure is for
        self.facts = self._facts()
        self.info = engine_info(name, model.fingerprint, self.facts)
        self._try_out()

    def _capacity(self, options: ServeOptions, context: int | None) -> int:
        """Returns how many ids each request has room for. Raises `ModelError` if they are too few."""
        free, most = free_bytes(self.model.device), options.max_running
        room = int(SHARE_OF_HOST * host_bytes() if free is None else SHARE * free)
        room = room if options.max_kv_bytes is None else options.max_kv_bytes
        capacity = room // (most * self.kv_bytes_per_id)
        if capacity < LEAST:
            needed = LEAST * most * self.kv_bytes_per_id
            raise ModelError(f"KV caches of {most} requests: {needed} bytes needed at least, there is room for {room}")
        capacity = capacity if context is None else min(capacity, context)
        check_room("KV caches", most * capacity * self.kv_bytes_per_id, self.model.device)
        return capacity

    def _try_out(self) -> None:
        """Takes a step: a model that cannot run fails when it is loaded, and the first requests find it warm.

        On a card that is done with 1, 2, 4, ... requests, each of which has kernels and CUDA graphs of its own.
        """
        batch, seats = self.seats.batch, list[Seat]()
        for count in range(1, 1 + (batch.most if self.model.device.type == "cuda" else 1)):
            seats.append(self.new_cache(None))
            batch.read(seats[-1].row, [(self.vocab_size // 2 + count) % self.vocab_size])  # so each makes a new entry
            if count == batch.most or not count & (count - 1):
                batch.choose(lambda head: head.best)  # with logits
                batch.choose()
                batch.begin()
                batch.follow(batch.ids())
        for seat in seats:
            self.free(seat)

    def _facts(self) -> ModelFacts:
        model, config = self.model, self.model.config
        return ModelFacts(
            vocab_size=self.vocab_size,
            width=model.layout.width,
            context=self.context,
            by_base=self.by_base,
            params=None if config is None else model.begin.params,
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            check_start=start_check(model.fingerprint, model.sides == 1, model.width),
            kv_bytes_per_id=self.kv_bytes_per_id,
        )

    # ---- what the engine's thread asks for

    def new_cache(self, start: Any) -> Seat:
        """Returns the seat of a new request. start: what its codebook begins with, None for the model's own."""
        return self.seats.add(start)

    def state_of(self, cache: Seat) -> Seat:
        """Returns what has the codebook: the seat itself."""
        return cache

    def make_draws(self, options: Sampling, state: torch.Tensor | None) -> Draws:
        """Returns a request's sampler. state: random state to go on from if the options have no seed."""
        return Draws(options, self.never_excluded, self.model.device, state)

    def make_penalties(self, options: Sampling, state: Seat) -> list[Any]:
        """Returns a request's penalties and biases."""
        return [BasePenalties(options, state, 0)] if options.has_penalties else []

    def free(self, cache: Seat) -> None:
        """Gives up a request's row."""
        self.seats.leave(cache)

    def free_unused(self) -> None:
        """Does nothing: the batch has all its memory from the beginning."""

    def settle(self) -> None:
        """Does nothing: nothing is left to do in the engine's thread."""
