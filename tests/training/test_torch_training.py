"""Training on PyTorch: the numbers of MLX's trainer, step by step, and checkpoints that either trainer goes on from."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.errors import InstallationError, TrainingError
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.zip_model import Model
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.run import choose_stepper, train
from mlx_zip.training.starting_model import freeze_and_add_lora
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import Stepper, make_optimizer
from support.crashing import crash_after
from support.slow_cases import slow_but
from support.tiny import ENCODERS, FAMILIES, base_ids, tiny_config
from support.tiny_training import arrays_of, losses, make_sample, options, random_model, settings, write_shards

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

START = ((5, 6), (6, 7, 8), (9, 9), (30, 31, 32, 33))
STEPS = 20
FEW = 4  # steps, where a model differs and neither the encoders nor what an optimizer keeps
TWO_HEADS = ("llama", "gemma2")  # families with an untied and a tied head


def twins(model: Any, config: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """A stepper of each kind on equal copies of a model."""
    chosen = settings(**{"iters": STEPS, "learning_rate": 3e-4, "lora_rank": 4, "max_grad_norm": 0.5, **changes})
    weights = LossWeights(chosen.reconstruction, chosen.token_type)
    trainees, named = [], tree_flatten(model.parameters())
    for _ in range(2):
        one = Model(ModelArgs.from_dict(config))
        one.load_weights(named)
        mx.random.seed(7)  # of the LoRA layers
        freeze_and_add_lora(one, chosen)
        trainees.append(Trainee(one, weights))
    steppers, before = [], deepcopy(config)
    for trainee, make in zip(trainees, (Stepper, choose_stepper("torch", config)), strict=True):
        mx.random.seed(8)
        trainee.update(Trainee(trainee.model, weights).parameters())
        optimizer = make_optimizer(chosen)
        optimizer.init(trainee.trainable_parameters())
        steppers.append(make(trainee, optimizer, chosen, mx.distributed.init()))
    assert config == before  # transformers writes into the objects of a config
    heads = dict(tree_flatten(trainees[0].parameters()))
    assert all(mx.array_equal(heads[name], value) for name, value in tree_flatten(trainees[1].parameters()))
    return steppers[0], steppers[1]


def batches(model: Model, step: int, availability: str = "causal") -> list[Any]:
    """The two batches of a step; some samples begin with a pack."""
    params = model.config.codec_params
    made = []
    for half in range(2):
        samples = []
        for i in range(3):
            ids = base_ids(10 + 7 * ((step + i) % 4), seed=100 * step + 10 * half + i)
            samples.append(make_sample(params, ids, START[: 1 + i] if i else None, masked=[2, 3 + i]))
        base = model.config.position_mode == "base_token_end"
        canonical = model.config.canonical
        made.append(make_batch(samples, params, availability=availability, base_positions=base, canonical=canonical))
    return made


def assert_alike(
    model: Model,
    config: dict[str, Any],
    availability: str = "causal",
    long: bool = False,
    steps: int = STEPS,
    **changes: Any,
) -> None:
    """Takes steps with both trainers; losses agree within 1e-4 of their size, gradient norms within 1e-2.

    Adam divides gradients by their size, so a norm shows rounding errors of tiny gradients long before a loss does.
    """
    ours, theirs = twins(model, config, availability=availability, **changes)
    for step in range(steps):
        both = batches(model, step, availability)
        expected, found = (one.step(both, [long, long]) for one in (ours, theirs))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-2 if name == "grad_norm" else 1e-4), (step, name)
    theirs.sync_to_trainee()
    trained = dict(tree_flatten(ours.trainee.trainable_parameters()))
    moved = 0.0
    for name, value in tree_flatten(theirs.trainee.trainable_parameters()):
        assert np.abs(np.array(value) - np.array(trained[name])).max() < 2e-3, name
        moved += float(mx.abs(value).sum().item())
    assert moved > 0


# every pair of an encoder, a head that is untied (llama) or tied (gemma2), and one encoder for both sides or two
PAIRS = [
    (family, encoder, (family == "gemma2") == bool(n % 2)) for n, encoder in enumerate(ENCODERS) for family in TWO_HEADS
]


@pytest.mark.parametrize(("family", "encoder", "tie_encoders"), slow_but(PAIRS, PAIRS[0]))
def test_both_trainers_agree_over_twenty_steps_for_every_encoder(family, encoder, tie_encoders):
    config = tiny_config(family, encoder, tie_encoders=tie_encoders)
    assert_alike(random_model(config), config)


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
@pytest.mark.parametrize("family", slow_but(FAMILIES, "phi3"))
def test_both_trainers_agree_for_every_family_and_position_mode(family, mode):
    config = tiny_config(family, "res_latent_attn", position_mode=mode)
    # SGD, because Adam turns rounding errors of gradients near 0, of which a whole model has many, into whole steps
    assert_alike(random_model(config), config, steps=FEW, fine_tune_type="full", optimizer="sgd", learning_rate=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"availability": "legacy"}, FEW),
        ({"reconstruction": 0.3, "token_type": 0.05}, FEW),
        ({"optimizer": "adam", "fine_tune_type": "encoders"}, STEPS),
        ({"optimizer": "muon", "fine_tune_type": "full", "muon_learning_rate": 2e-3, "warmup": 3}, STEPS),
        ({"optimizer": "sgd", "learning_rate": 1e-2, "warmup": 3}, FEW),  # keeps nothing
        ({"encoder_learning_rate": 1e-4, "warmup": 3}, FEW),
        ({"lora_layers": 1, "lora_keys": "self_attn.q_proj", "max_grad_norm": 0.0}, FEW),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_both_trainers_agree_for_every_setting(changes, steps):
    config = tiny_config("llama", "transformer")
    assert_alike(random_model(config), config, steps=steps, **changes)


@pytest.mark.slow
def test_both_trainers_agree_on_longropes_long_factors():
    config = tiny_config("phi3", "transformer") | {"original_max_position_embeddings": 8}
    assert_alike(random_model(config), config, long=True, steps=FEW)


@pytest.mark.slow
def test_both_trainers_agree_on_rows_that_begin_by_side():
    config = tiny_config("llama", "res_latent_attn")
    config["zip2zip"]["encoder"]["residual_by_side"] = True
    assert_alike(random_model(config), config)


@pytest.mark.slow
def test_both_trainers_agree_on_canonical_decoding():
    config = tiny_config("llama", "transformer", canonical=True)
    assert_alike(random_model(config), config, steps=FEW)


def test_a_chunk_of_positions_costs_what_the_whole_costs(monkeypatch):
    import torch

    from mlx_zip.training.steps import torch_stepper as objective

    config = tiny_config("gemma2", "transformer", canonical=True)
    found = []
    for chunk in (256, 5):
        monkeypatch.setitem(objective.CHUNK_POSITIONS, "cpu", chunk)
        model = random_model(config)
        stepper = twins(model, config, fine_tune_type="full", optimizer="sgd")[1]
        sums = stepper.step(batches(model, 0), [False, False])
        found.append((sums, {name: value.detach().clone() for name, value in stepper.parameters.items()}))
    (whole, by_whole), (cut, by_parts) = found
    assert cut == pytest.approx(whole, rel=1e-5)
    assert all(torch.allclose(value, by_whole[name], atol=1e-5) for name, value in by_parts.items())


def test_a_loss_without_training_multiplies_half_as_much():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mlx_zip.training.steps.torch_stepper import JointNats, compute_losses

    arrays = {"weights": torch.ones(2, 7), "targets": torch.arange(14).view(2, 7)}
    h, head = torch.randn(2, 7, 8), torch.randn(20, 8)
    found = []
    for trained in (True, False):
        with FlopCounterMode(display=False) as count:
            nats: Any = JointNats.apply(h.clone().requires_grad_(trained), head, h.new_zeros(0, 8), arrays, None)
        found.append((nats.item(), count.get_total_flops()))
    assert found[1] == (found[0][0], found[0][1] // 2)
    assert found[1][1] > 0
    model: Any = SimpleNamespace(hidden_states=lambda *_: h, head=torch.nn.Parameter(head), zip=None, cap=None)
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        nats = compute_losses(model, LossWeights(), arrays, 7)["nats"]
    assert (nats.item(), count.get_total_flops()) == found[1]


def test_bfloat16_steps_stay_close_to_float32_ones():
    config = tiny_config("llama", "res_latent_attn")
    model = random_model(config)
    for kind in ("lora", "full"):
        ours, theirs = twins(model, config, dtype="bfloat16", fine_tune_type=kind)
        expected, found = (one.step(batches(model, 0), [False, False]) for one in (ours, theirs))
        assert found["nats"] == pytest.approx(expected["nats"], rel=3e-2)


@pytest.mark.parametrize("changes", [{}, {"fine_tune_type": "encoders", "encoder_learning_rate": 1e-3}], ids=str)
def test_a_run_on_pytorch_logs_what_a_run_on_mlx_logs(changes, tmp_path):
    write_shards(tmp_path / "valid", samples=6, seed=3)
    runs = {}
    for engine in ("mlx", "torch"):
        chosen = options(tmp_path / engine, engine=engine, valid=[tmp_path / "valid"])
        train(chosen, settings(iters=4, steps_per_eval=2, **changes), quiet=True)
        runs[engine] = read(chosen.out)
    for theirs, ours in zip(runs["torch"], runs["mlx"], strict=True):
        shared = {"loss", "grad_norm", "learning_rate", "base_bits_per_byte", "val_bits_per_byte", "seen_base_ids"}
        assert {k: theirs[k] for k in theirs.keys() & shared} == pytest.approx(
            {k: ours[k] for k in ours.keys() & shared}, rel=1e-4
        )
    mine, other = (arrays_of_folder(tmp_path / engine / "model") for engine in ("mlx", "torch"))
    assert mine.keys() == other.keys()
    assert all(np.abs(mine[name] - other[name]).max() < 1e-4 for name in mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "muon"}, {"fine_tune_type": "encoders", "encoder_learning_rate": 1e-3}],
    ids=["adamw", "muon", "encoders with a rate of their own"],
)
@pytest.mark.parametrize("first", ["mlx", "torch"])
def test_what_one_trainer_saved_the_other_goes_on_from(first, changes, tmp_path, monkeypatch):
    second, chosen = "torch" if first == "mlx" else "mlx", settings(**changes)
    whole, broken = options(tmp_path / "whole"), options(tmp_path / "broken", engine=first)
    train(whole, chosen, quiet=True)
    with monkeypatch.context() as patch:
        crash_after(patch, 3)
        with pytest.raises(RuntimeError, match="crashed"):
            train(broken, chosen, quiet=True)
    assert [step for step, _ in list_checkpoints(broken.out)] == [2]
    train(replace(broken, engine=second), chosen, quiet=True)
    for found, expected in zip(losses(broken.out), losses(whole.out), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


ELEVEN = settings(iters=11, lora_dropout=0.2, save_every=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eleven steps that nothing stopped."""
    run = options(tmp_path_factory.mktemp("whole") / "run", engine="torch")
    train(run, ELEVEN, quiet=True)
    return run


@pytest.mark.parametrize("step", slow_but(range(1, 11), 5))
def test_a_run_that_was_stopped_at_any_point_ends_with_the_same_bits(step, whole, tmp_path, monkeypatch):
    broken = options(tmp_path / "broken", engine="torch")
    with monkeypatch.context() as patch:
        crash_after(patch, step)
        with pytest.raises(RuntimeError, match="crashed"):
            train(broken, ELEVEN, quiet=True)
    train(broken, ELEVEN, quiet=True)
    assert losses(broken.out) == losses(whole.out)
    mine, other = (arrays_of_folder(one.out / "model") for one in (whole, broken))
    assert all(np.array_equal(mine[name], other[name]) for name in mine)


CELLS = [(kind, dtype) for kind in ("lora", "full") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), slow_but(CELLS, ("lora", "float32"), ("full", "bfloat16")))
def test_activations_can_be_computed_again_for_the_same_result(kind, dtype, tmp_path):
    runs = []
    for again in (False, True):
        chosen = options(tmp_path / f"again-{again}", engine="torch")
        train(chosen, settings(iters=3, grad_checkpoint=again, fine_tune_type=kind, dtype=dtype), quiet=True)
        runs.append(losses(chosen.out))
    assert runs[1] == [pytest.approx(line, rel=1e-5) for line in runs[0]]


def test_an_optimizer_that_only_mlx_has_is_refused_by_name(tmp_path):
    with pytest.raises(TrainingError, match="adafactor"):
        train(options(tmp_path / "run", engine="torch"), settings(optimizer="adafactor"), quiet=True)


def test_a_missing_pytorch_is_one_line_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("mlx_zip.training.run.find_spec", lambda name: None)
    with pytest.raises(
        InstallationError, match=r"torch, transformers, which are not installed: .*pip install .*\[torch\]"
    ):
        train(options(tmp_path / "run", engine="torch"), settings(), quiet=True)


def read(out: Path) -> list[dict[str, Any]]:
    from mlx_zip.training.run_folder import read_metrics

    return read_metrics(out)


def arrays_of_folder(folder: Path) -> dict[str, np.ndarray]:
    from mlx_lm.utils import load_model

    return arrays_of(load_model(folder, lazy=False)[0])
