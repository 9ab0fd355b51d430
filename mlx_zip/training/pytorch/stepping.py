"""Takes optimizer steps on PyTorch for a run whose data, checkpoints and log are those of the MLX trainer.

The MLX model stays the owner of names, checkpoints, fingerprints and the saved folder; trained weights and the
optimizer's moments are copied back when a checkpoint is written. So either engine goes on from the other's checkpoint,
at the price of a second copy of the base's weights in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import torch
from mlx.utils import tree_unflatten

from mlx_zip.errors import TrainingError
from mlx_zip.training.batches import Batch
from mlx_zip.training.objective import Trainee
from mlx_zip.training.optimizer import peak_of, schedule, single_of
from mlx_zip.training.pytorch.model import TorchModel, to_mlx, to_torch
from mlx_zip.training.pytorch.objective import losses, plain_losses
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.stepping import READ

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # MLX's names of Adam's moments, and PyTorch's


class TorchStepper:
    """Takes the steps of one run; has the interface of `mlx_zip.training.stepping.Stepper`.

    Trained weights and the optimizer's state live in PyTorch between `publish` calls, which write them back into the
    MLX trainee and optimizer, where checkpoints are made from. device: an NVIDIA card if there is one, else the CPU.
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
        """config: the model's config.json. Raises `TrainingError` for what this trainer cannot do."""
        if group.size() > 1:
            raise TrainingError("--engine torch trains on one machine; train on several with --engine mlx")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.trainee, self.mlx_optimizer, self.settings = trainee, optimizer, settings
        self.model = TorchModel(trainee, config, self.device, DTYPES[settings.dtype], settings.lora_dropout)
        if settings.grad_checkpoint:
            self.model.body.activation_checkpointing_enable({"use_reentrant": False})
        self.weights = trainee.loss_weights
        self.parameters = self.model.trained
        self.optimizer = _make_optimizer(settings, self.parameters)
        self._take_state()

    def _take_state(self) -> None:
        """Takes the optimizer's state from the MLX optimizer, which a checkpoint may have filled."""
        done: Any = single_of(self.mlx_optimizer, self.settings, "").step
        self.steps = int(done.item())
        if not self.steps or self.settings.optimizer == "sgd":
            return
        for name, parameter in self.parameters.items():
            mine = _at(single_of(self.mlx_optimizer, self.settings, name).state, name)
            moments = {theirs: to_torch(mine[ours]).to(self.device) for ours, theirs in MOMENTS.items()}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.steps)), **moments}

    def publish(self) -> None:
        """Writes trained weights and the optimizer's state back into the MLX trainee and optimizer."""
        named = [(name, to_mlx(value)) for name, value in self.parameters.items()]
        self.trainee.update(tree_unflatten(named))
        for name, parameter in self.parameters.items():
            if found := self.optimizer.state.get(parameter):
                _at(single_of(self.mlx_optimizer, self.settings, name).state, name).update(
                    {ours: to_mlx(found[theirs]) for ours, theirs in MOMENTS.items() if theirs in found}
                )
        mx.eval(self.trainee.trainable_parameters(), self.mlx_optimizer.state)

    def step(self, batches: list[Batch], long: list[bool], stop: bool = False) -> dict[str, float]:
        """Trains one step on its batches; arguments and result are those of `Stepper.step`."""
        self.model.train()
        torch.manual_seed(hash((self.settings.seed, self.steps)) & 0xFFFFFFFF)  # of dropout: the same after a restart
        sums: dict[str, float] = {}
        for batch in batches:
            found = losses(self.model, self.weights, self._to_device(batch), batch.longest)
            self._total(found).backward()
            sums = {name: sums.get(name, 0.0) + value.item() for name, value in found.items()}
        norm = self._update(sums["count"])
        counts = {name: float(sum(getattr(batch, name) for batch in batches)) for name in READ}
        samples = float(sum(len(batch.samples) for batch in batches))
        return {**sums, **counts, "samples": samples, "stop": float(stop), "grad_norm": norm}

    def losses(self, batch: Batch, long: bool) -> dict[str, float]:
        """Returns the sums of the losses on one batch, without training."""
        self.model.eval()
        with torch.no_grad():
            found = losses(self.model, self.weights, self._to_device(batch), batch.longest)
        return {name: float(value) for name, value in found.items()}

    def base_nats(self, batch: Batch, long: bool) -> float:
        """Returns the summed nats of a batch of base ids."""
        self.model.eval()
        with torch.no_grad():
            return float(plain_losses(self.model, self._to_device(batch), batch.longest)["nats"])

    def _total(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the weighted sum of the losses, as `Trainee.total`."""
        added = [name for name in ("reconstruction", "token_type") if name in sums]
        return sum((getattr(self.weights, name) * sums[name] for name in added), sums["nats"])

    def _update(self, count: float) -> float:
        """Applies the gradients, divided by the `count` positions; returns their norm before clipping."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(max(count, 1.0))
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if (limit := self.settings.max_grad_norm) and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = float(schedule(self.settings, group["peak"])(mx.array(self.steps)).item())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        for group in self.optimizer.param_groups:
            known = {"step": mx.array(self.steps, mx.uint64), "learning_rate": mx.array(group["lr"])}
            single_of(self.mlx_optimizer, self.settings, group["name"]).state.update(known)
        return norm

    def _to_device(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns a batch's arrays as tensors, whole numbers as int64."""
        tensors = {name: torch.from_numpy(value) for name, value in batch.arrays.items()}
        return {
            name: value.to(self.device, value.dtype if value.is_floating_point() else torch.int64)
            for name, value in tensors.items()
        }


def _make_optimizer(settings: TrainSettings, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Returns the run's optimizer, with a group of parameters for each peak learning rate.

    A group holds its `peak` and the `name` of one of its weights. Raises `TrainingError` for an optimizer that only
    MLX's trainer has.
    """
    groups: dict[float, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        peak = peak_of(settings, name)
        groups.setdefault(peak, {"params": [], "peak": peak, "name": name})["params"].append(parameter)
    made, rate = list(groups.values()), settings.learning_rate
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(made, rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=settings.weight_decay)
    if settings.optimizer == "adam":
        return torch.optim.Adam(made, rate, betas=(0.9, 0.999), eps=1e-8)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(made, rate)
    raise TrainingError(f"--engine torch has no optimizer {settings.optimizer}; it has adamw, adam and sgd")


def _at(tree: Any, name: str) -> dict[str, Any]:
    """Returns the branch of a tree of dicts and lists that a name with dots leads to."""
    for part in name.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree
