"""Takes optimizer steps on PyTorch for a run whose data, checkpoints and log are handled by the MLX trainer.

Checkpoints, fingerprints and the saved folder are made from the MLX model. Trained weights and the optimizer's moments
are copied back to MLX when a checkpoint is written. So either engine can continue from the other's checkpoint. The
base's weights are in memory twice.

The losses are those of `mlx_zip.training.steps.objective`, computed chunk by chunk, because logits over tens of
thousands of base ids would be too large for a whole batch. For each chunk of positions, logits, loss and the loss's
gradient are computed in the forward pass; the backward pass only scales these gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import torch
from mlx.utils import tree_unflatten
from torch.nn import functional

from mlx_zip.config import SIDES
from mlx_zip.engine.sampling.exclusions import MAX_EXCLUDED_SHARE
from mlx_zip.errors import TrainingError
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.steps.batches import Batch, sum_batch_counts
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import (
    OptimizerPart,
    list_optimizer_parts,
    list_single_optimizers,
    make_learning_rate_schedule,
)
from mlx_zip.training.steps.torch_model import TorchModel, to_mlx, to_torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_BATCH_WORKERS = 6  # with a GPU: 24 windows take 0.2 s per step on an H200, and 0.3 s to make as a batch
ADAM_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # MLX's name -> PyTorch's name
MOMENTS = {"adamw": ADAM_MOMENTS, "adam": ADAM_MOMENTS, "muon": {"v": "momentum"}, "sgd": {}}  # of the optimizers here


class TorchStepper:
    """Takes the steps of one run; has the interface of `mlx_zip.training.steps.stepper.Stepper`.

    Trained weights and the optimizer's state live in PyTorch. `sync_to_trainee` copies them to the MLX trainee and
    optimizer, from which checkpoints are written. device: "cuda" if there is an NVIDIA GPU, else "cpu".
    """

    traces = 0  # nothing is compiled

    def __init__(
        self,
        trainee: Trainee,
        optimizer: optim.Optimizer,
        settings: TrainSettings,
        group: mx.distributed.Group,
        *,
        config: Mapping[str, Any],
    ) -> None:
        """config: the model's config.json. Raises `TrainingError` if settings or model are not supported here."""
        if group.size() > 1:
            raise TrainingError("--engine torch trains on one machine; train on several with --engine mlx")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_workers = min(MOST_BATCH_WORKERS, (os.cpu_count() or 1) // 2) if self.device == "cuda" else 0
        self.trainee, self.mlx_optimizer, self.settings = trainee, optimizer, settings
        self.model = TorchModel(
            trainee, config, torch.device(self.device), DTYPES[settings.dtype], settings.lora_dropout
        )
        if settings.grad_checkpoint:
            self.model.body.activation_checkpointing_enable({"use_reentrant": False})
        self.weights = trainee.loss_weights
        self.parameters = self.model.trained
        self.optimizers = _make_optimizers(settings, self.parameters, optimizer)
        done: Any = self.optimizers[0].mlx.step
        self.steps = int(done.item())
        if self.steps:
            for one in self.optimizers:
                one.load_from_mlx(self.parameters, self.steps)

    def sync_to_trainee(self) -> None:
        """Copies trained weights and the optimizer's state to the MLX trainee and optimizer."""
        named = [(name, to_mlx(value)) for name, value in self.parameters.items()]
        self.trainee.update(tree_unflatten(named))
        for one in self.optimizers:
            one.save_to_mlx(self.parameters)
        mx.eval(self.trainee.trainable_parameters(), self.mlx_optimizer.state)

    def step(self, batches: list[Batch], long: list[bool], stop: bool = False) -> dict[str, float]:
        """Trains one step on its batches. Arguments and result: see `Stepper.step`."""
        self.model.train()
        torch.manual_seed(hash((self.settings.seed, self.steps)) & 0xFFFFFFFF)  # for dropout, equal after a restart
        count, sums = float(sum(batch.arrays["weights"].sum() for batch in batches)), dict[str, Any]()
        for batch in batches:
            found = compute_losses(self.model, self.weights, self._to_device(batch), batch.longest)
            (self.weights.total_loss(found) / max(count, 1.0)).backward()
            sums = {name: sums.get(name, 0.0) + value.detach() for name, value in found.items()}
        norm = self._apply_gradients()
        sums = {name: value.item() for name, value in sums.items()}
        counts = {name: float(count) for name, count in sum_batch_counts(batches).items()}
        return {**sums, **counts, "stop": float(stop), "grad_norm": norm}

    def measure_losses(self, batch: Batch, long: bool) -> dict[str, float]:
        """Returns the sums of the losses on one batch, without training."""
        self.model.eval()
        with torch.no_grad():
            found = compute_losses(self.model, self.weights, self._to_device(batch), batch.longest)
        return {name: float(value) for name, value in found.items()}

    def _apply_gradients(self) -> float:
        trained = [p for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if self.settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(trained, self.settings.max_grad_norm, norm)
        for one in self.optimizers:
            one.step(make_learning_rate_schedule(self.settings, one.part.peak)(mx.array(self.steps)), self.steps + 1)
        self.steps += 1
        return norm.item()

    def _to_device(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns a batch's arrays as tensors on the device; integers and booleans become int64."""
        tensors = {name: torch.from_numpy(value) for name, value in batch.arrays.items()}
        return {
            name: value.to(self.device, value.dtype if value.is_floating_point() else torch.int64)
            for name, value in tensors.items()
        }


@dataclass(frozen=True)
class _PartOptimizer:
    """The optimizer of one part of the weights. names: names of these weights. mlx: MLX's optimizer of the same part.

    MLX's optimizer updates nothing; checkpoints are written from its state.
    """

    part: OptimizerPart
    names: list[str]
    torch: torch.optim.Optimizer
    mlx: optim.Optimizer

    def step(self, rate: mx.array, number: int) -> None:
        """Updates the weights from their gradients, which are then dropped. number: steps done after this step."""
        current: Any = rate.item()
        self.torch.param_groups[0]["lr"] = float(current)
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)
        self.mlx.state.update({"step": mx.array(number, mx.uint64), "learning_rate": rate})

    def load_from_mlx(self, parameters: Mapping[str, torch.Tensor], steps: int) -> None:
        """Copies the state of MLX's optimizer after `steps` steps, if the optimizer keeps one."""
        for name in self.names if MOMENTS[self.part.kind] else ():
            mine, parameter = _get_subtree(self.mlx.state, name), parameters[name]
            moments = {
                theirs: to_torch(mine[ours]).to(parameter.device) for ours, theirs in MOMENTS[self.part.kind].items()
            }
            self.torch.state[parameter] = {"step": torch.tensor(float(steps)), **moments}

    def save_to_mlx(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copies the state to MLX's optimizer."""
        for name in self.names:
            if found := self.torch.state.get(parameters[name]):
                moments = {ours: to_mlx(found[theirs]) for ours, theirs in MOMENTS[self.part.kind].items()}
                _get_subtree(self.mlx.state, name).update(moments)


def _make_optimizers(
    settings: TrainSettings, parameters: Mapping[str, torch.Tensor], mlx: optim.Optimizer
) -> list[_PartOptimizer]:
    """Returns an optimizer for each part of the weights, see `list_optimizer_parts`; some parts may hold no weights.

    mlx: the MLX optimizer of all parts. Raises `TrainingError` if only the MLX engine has the optimizer.
    """
    parts = list_optimizer_parts(settings)
    named: list[list[str]] = [[] for _ in parts]
    for name, parameter in parameters.items():
        named[next(i for i, part in enumerate(parts) if part.holds(name, parameter))].append(name)
    return [
        _PartOptimizer(part, names, _make_single_optimizer(settings, part, [parameters[name] for name in names]), one)
        for part, names, one in zip(parts, named, list_single_optimizers(mlx), strict=True)
    ]


def _make_single_optimizer(
    settings: TrainSettings, part: OptimizerPart, weights: list[torch.Tensor]
) -> torch.optim.Optimizer:
    parameters = [{"params": weights}]  # a group may be empty, an optimizer may not
    if part.kind == "muon":
        return Muon(parameters, part.peak)
    if part.kind == "adamw":
        return torch.optim.AdamW(parameters, part.peak, betas=(0.9, 0.95), eps=1e-8, weight_decay=settings.weight_decay)
    if part.kind == "adam":
        return torch.optim.Adam(parameters, part.peak, betas=(0.9, 0.999), eps=1e-8)
    if part.kind == "sgd":
        return torch.optim.SGD(parameters, part.peak)
    raise TrainingError(f"--engine torch has no optimizer {part.kind}; it has adamw, adam, muon and sgd")


def _get_subtree(tree: Any, name: str) -> dict[str, Any]:
    for part in name.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


MUON_MOMENTUM, MUON_ROUNDS = 0.95, 5
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon


class Muon(torch.optim.Optimizer):
    """Muon with the numbers of MLX's `optim.Muon`; `torch.optim.Muon` computes in bfloat16, so its losses differ.

    Moves each matrix along its averaged gradient with all singular values near 1; Nesterov momentum, no decay.
    """

    def __init__(self, parameters: Iterable[dict[str, Any]], rate: float) -> None:
        """parameters: groups of matrices, as PyTorch's optimizers take them.

        rate: learning rate; a matrix with more rows than columns has a larger one.
        """
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates all matrices that have a gradient. Those of one shape are computed together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for (rows, columns), matrices in shapes.items():
                update = orthogonalize(torch.stack([self._add_momentum(matrix) for matrix in matrices]))
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                for matrix, one in zip(matrices, update, strict=True):
                    matrix.sub_(one, alpha=rate)

    def _add_momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - MUON_MOMENTUM)
        return matrix.grad.lerp(state["momentum"], MUON_MOMENTUM)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Returns matrices [N, R, C] with the same singular vectors, and singular values near 1.

    By five Newton-Schulz iterations, which bring singular values above 0.01 of the matrix's norm to between 0.68 and
    1.2; smaller ones stay smaller.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(MUON_ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


# ---- the objective

CHUNK_POSITIONS = {"cpu": 256, "cuda": 2048}  # maximum number of positions per chunk
CHUNK_LOGITS = 100_000_000  # maximum number of logits per chunk, except that a chunk has at least 256 positions
Arrays = Mapping[str, torch.Tensor]


def compute_losses(model: TorchModel, weights: LossWeights, arrays: Arrays, longest: int) -> dict[str, torch.Tensor]:
    """Returns float32 sums over the positions to predict: `nats`, `count`, and each auxiliary loss with a weight.

    arrays: arrays of a `Batch`; without a codebook its ids are base ids, and there are no auxiliary losses. longest:
    `longest` of that batch.
    """
    if model.zip is None or "entries" not in arrays:
        return _sum_joint_nats(model, model.hidden_states(arrays, longest, None), None, arrays)
    read, written = model.make_hyper_rows(arrays)
    h = model.hidden_states(arrays, longest, read)
    sums = _sum_joint_nats(model, h, written, arrays)
    if weights.reconstruction:
        sums["reconstruction"] = _reconstruction_loss(model, weights, written, arrays) * sums["count"]
    if weights.token_type:
        sums["token_type"] = _token_type_loss(model, h, arrays)
    return sums


def _sum_joint_nats(
    model: TorchModel, h: torch.Tensor, rows: torch.Tensor | None, arrays: Arrays
) -> dict[str, torch.Tensor]:
    """Returns `nats` and `count`. h [B, L, D]: the body's output. rows [U, D]: output rows of all entries, or None."""
    vocab = len(model.head) if model.zip is None else model.zip.vocab_size
    rows = h.new_zeros(0, h.shape[-1]) if rows is None else rows
    nats = JointNats.apply(h, model.head[:vocab], rows, arrays, model.cap, torch.is_grad_enabled())
    return {"nats": nats, "count": arrays["weights"].sum()}


class JointNats(torch.autograd.Function):
    """Autograd function: the summed cross entropy over base ids and available entries (arXiv 2506.01084 eq. 2).

    The logits have V + U columns: V base ids, then the U distinct entries of the whole batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        head: torch.Tensor,
        rows: torch.Tensor,
        arrays: Arrays,
        cap: float | None,
        for_training: bool = True,
    ) -> torch.Tensor:
        """Returns the summed nats, a float32 scalar. h [B, L, D], head [V, D], rows [U, D]: output rows of all entries.

        for_training: whether gradients may be asked for. `ctx.needs_input_grad` does not tell, because it is also true
        for a slice of a trained matrix in validation.
        """
        wanted = for_training and any(ctx.needs_input_grad)
        flat, table, vocab = h.flatten(0, 1), torch.cat([head.to(h.dtype), rows.to(h.dtype)]), len(head)
        grad_h, grad_rows = torch.zeros_like(flat), torch.zeros_like(rows, dtype=torch.float32)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        total = h.new_zeros((), dtype=torch.float32)
        size = min(CHUNK_POSITIONS[h.device.type], max(256, CHUNK_LOGITS // len(table)))
        for chunk in _split_into_chunks(arrays, vocab, len(rows), size):
            read = flat[chunk.at]
            nats, gradient = _loss_and_gradient((read @ table.mT).float(), chunk, vocab, cap)
            total += nats
            if not wanted:
                continue
            gradient = gradient.to(h.dtype)
            grad_h[chunk.at] = gradient @ table
            grad_rows += gradient[:, vocab:].mT @ read
            if grad_head is not None:
                grad_head += gradient[:, :vocab].mT @ read
        ctx.save_for_backward(grad_h.view_as(h), grad_rows, grad_head)
        ctx.dtypes = rows.dtype, head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        grad_h, grad_rows, grad_head = ctx.saved_tensors
        of_rows, of_head = ctx.dtypes
        by_head = None if grad_head is None else (grad_head * outer[0]).to(of_head)
        return (grad_h * outer[0]).to(grad_h.dtype), by_head, (grad_rows * outer[0]).to(of_rows), None, None, None


@dataclass(frozen=True)
class _Chunk:
    """N positions of a batch. at [N]: row * L + column of each. targets [N]: column of each target in the logits.

    weights [N]: as in `Batch`. closed [N, U] bool: whether an entry may not be predicted at a position. excluded: rows
    and columns, [X] each, of the logits of ids that are excluded under canonical decoding.
    """

    at: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    closed: torch.Tensor | None
    excluded: tuple[torch.Tensor, torch.Tensor] | None


def _split_into_chunks(arrays: Arrays, vocab: int, entries: int, size: int) -> Iterator[_Chunk]:
    """Yields the positions whose loss counts, up to `size` at a time. entries: U, the number of distinct entries."""
    length = arrays["targets"].shape[1]
    weights, targets = arrays["weights"].flatten(), arrays["targets"].flatten()
    counting = torch.nonzero(weights > 0)[:, 0]
    samples = counting // length
    targets, slot_of_entry = targets[counting], None
    if entries:
        slots = arrays["slots"]
        targets = _find_logit_columns(targets, samples, slots, vocab)
        slot_of_entry = slots.new_full((len(slots), entries + 1), torch.iinfo(torch.int64).max)
        order = torch.arange(slots.shape[1], device=slots.device).expand_as(slots)
        installed = order < arrays["available"].amax(1, keepdim=True)  # other slots are padding
        slot_of_entry.scatter_(1, torch.where(installed, slots, entries), order)
        available = arrays["available"].flatten()[counting]
    ends: list[int] = []
    if "excluded_at" in arrays:
        at = arrays["excluded_at"]  # ascending; padded with the position after the last
        columns = _find_logit_columns(arrays["excluded"], (at // length).clamp(max=len(slots) - 1), slots, vocab)
        ends = torch.searchsorted(at, torch.cat([counting[::size], at.new_tensor([weights.numel()])])).tolist()
    for number, begin in enumerate(range(0, len(counting), size)):
        chosen, excluded, closed = slice(begin, begin + size), None, None
        at_these = counting[chosen]
        if slot_of_entry is not None:
            closed = slot_of_entry[samples[chosen], :entries] >= available[chosen, None]
        if ends:
            pairs = slice(ends[number], ends[number + 1])
            excluded = torch.searchsorted(at_these, at[pairs]), columns[pairs]
        yield _Chunk(at_these, targets[chosen], weights[at_these], closed, excluded)


def _find_logit_columns(ids: torch.Tensor, samples: torch.Tensor, slots: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns the logit column [N] of each id [N]. samples [N]: each id's sample. slots [B, K]: see `Samples`."""
    entry = slots[samples, (ids - vocab).clamp(0, slots.shape[1] - 1)]
    return torch.where(ids < vocab, ids, vocab + entry)


def _loss_and_gradient(
    logits: torch.Tensor, chunk: _Chunk, vocab: int, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's summed nats and the gradient for `logits`, float32 [N, V + U]. Overwrites `logits`."""
    if cap is not None:
        logits.div_(cap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(cap)
    if chunk.closed is not None:
        logits[:, vocab:].masked_fill_(chunk.closed, -torch.inf)
    normaliser = logits.logsumexp(1)
    nats = normaliser - logits.gather(1, chunk.targets[:, None])[:, 0]
    share = logits.sub_(normaliser[:, None]).exp_()
    kept = torch.ones_like(nats)
    if chunk.excluded is not None:
        kept = _remove_excluded(share, *chunk.excluded)
        nats = nats + kept.log()
    share.scatter_add_(1, chunk.targets[:, None], -kept[:, None])
    share *= (chunk.weights / kept)[:, None]
    if cap is not None:
        share *= slope
    return (nats * chunk.weights).sum(), share


def _remove_excluded(share: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Sets the probabilities of excluded ids in `share` [N, V + U] to 0, in place; returns the remaining sums [N].

    row, column [X]: positions and ids to exclude. At a position where these ids together hold over half the
    probability, nothing is excluded.
    """
    theirs = share[row, column]
    held = share.new_zeros(len(share)).index_add_(0, row, theirs)
    held = torch.where(held <= MAX_EXCLUDED_SHARE, held, 0.0)
    share[row, column] = torch.where(held[row] > 0, 0.0, theirs)
    return 1 - held


def _token_type_loss(model: TorchModel, h: torch.Tensor, arrays: Arrays) -> torch.Tensor:
    assert model.zip is not None
    weight, bias = (model.parts[f"type_head.{name}"].to(h.dtype) for name in ("weight", "bias"))
    logits = functional.linear(h, weight, bias)[..., 0].float()
    is_hyper = (arrays["targets"] >= model.zip.vocab_size).float()
    loss = functional.binary_cross_entropy_with_logits(logits, is_hyper, reduction="none")
    return (loss * arrays["weights"]).sum()


def _reconstruction_loss(
    model: TorchModel, weights: LossWeights, written: torch.Tensor, arrays: Arrays
) -> torch.Tensor:
    assert model.zip is not None
    size = len(arrays["entries"])
    n = min(weights.reconstruct_entries, size)
    chosen = torch.arange(n, device=written.device) * size // n
    entries, lengths = arrays["entries"][chosen], arrays["lengths"][chosen]
    real = (torch.arange(entries.shape[1], device=written.device) < lengths[:, None]) & (lengths[:, None] > 1)
    matrix = model.body.embed_tokens.weight
    read = model.encode_entries(SIDES[0], matrix, entries, lengths)
    both = [
        _reconstruction_nats(model, written[chosen], model.head, entries),
        _reconstruction_nats(model, read, matrix, entries),
    ]
    return sum((nats * real).sum() for nats in both) / (2 * real.sum().clamp(min=1))


def _reconstruction_nats(
    model: TorchModel, rows: torch.Tensor, matrix: torch.Tensor, entries: torch.Tensor
) -> torch.Tensor:
    """Returns nats [N, S] of the base ids of `entries` [N, S], predicted from `rows` [N, D] with the head `matrix`."""
    weight, bias = (model.parts[f"decoder.{name}"].to(rows.dtype) for name in ("weight", "bias"))
    guesses = functional.linear(rows, weight, bias).view(*entries.shape, -1)
    logits = (guesses @ matrix.to(rows.dtype).mT).float()
    return functional.cross_entropy(logits.flatten(0, 1), entries.flatten(), reduction="none").view(entries.shape)
