"""How a training step is computed: batches added up, recomputed activations, mixed precision, new encoders."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.models.decoder import Positions
from mlx_zip.training import run as run_module
from mlx_zip.training.settings import EncoderOptions
from mlx_zip.training.starting_model import make_starting_model
from mlx_zip.training.steps.batches import make_batch
from mlx_zip.training.steps.forward_pass import NoCache
from mlx_zip.training.steps.objective import LossWeights, Trainee
from mlx_zip.training.steps.stepper import (
    Stepper,
    list_optimizer_parts,
    make_learning_rate_schedule,
    make_optimizer,
)
from support.slow_cases import slow_but
from support.tiny_training import (
    CODEC,
    ENCODER,
    arrays_of,
    make_sample,
    options,
    settings,
    text_ids,
    write_plain,
)

# ---- how a step is computed


def stepper(folder: Path, encoder: EncoderOptions = ENCODER, **changes: Any) -> tuple[Stepper, Any]:
    """A step's machinery on a plain folder made zip-capable, and its batch."""
    chosen = settings(**changes)
    mx.random.seed(0)
    options(folder / "run")
    model, _ = make_starting_model(folder / "plain", None, CODEC, encoder)
    run_module.freeze_and_add_lora(model, chosen)
    trainee = Trainee(model, LossWeights(chosen.reconstruction, chosen.token_type))
    if chosen.grad_checkpoint:
        run_module.recompute_activations(model.layers)
    optimizer = make_optimizer(chosen)
    optimizer.init(trainee.trainable_parameters())
    batch = make_batch([make_sample(CODEC, text_ids(30, seed)) for seed in range(3)], CODEC)
    return Stepper(trainee, optimizer, chosen, mx.distributed.init()), batch


def three_steps(folder: Path, **changes: Any) -> list[tuple[float, float]]:
    machine, batch = stepper(folder, **changes)
    sums = [machine.step([batch], [False]) for _ in range(3)]
    return [(found["nats"] / found["count"], found["grad_norm"]) for found in sums]


def test_batches_added_up_make_the_step_of_one_large_batch(tmp_path):
    machine, _ = stepper(tmp_path, optimizer="sgd", max_grad_norm=0.0)
    samples = [make_sample(CODEC, text_ids(20 + 9 * seed, seed), masked=range(seed * 3)) for seed in range(3)]
    parts, whole = [make_batch(s, CODEC) for s in (samples[:1], samples[1:])], make_batch(samples, CODEC)
    found = machine.step(parts, [False, False])
    weights = arrays_of(machine.trainee)
    machine, _ = stepper(tmp_path, optimizer="sgd", max_grad_norm=0.0)
    assert found == pytest.approx(machine.step([whole], [False]), rel=1e-5)
    for name, value in arrays_of(machine.trainee).items():
        np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("kind", ["lora", "full", "encoders"])
def test_recomputing_activations_changes_no_number(kind, dtype, tmp_path):
    plain = three_steps(tmp_path, fine_tune_type=kind, dtype=dtype)
    again = three_steps(tmp_path, fine_tune_type=kind, dtype=dtype, grad_checkpoint=True)
    np.testing.assert_allclose(again, plain, rtol=1e-5)


def peak_of_a_step(folder: Path) -> int:
    """Bytes that a step after the first adds at most to what lived before it; its encoder is the model's largest part.

    The collector runs first: cycles that other tests left behind, freed within the step, would come off its peak.
    """
    wide = replace(ENCODER, num_hidden_layers=4, intermediate_size=512)
    machine, batch = stepper(folder, encoder=wide, fine_tune_type="full")
    machine.step([batch], [False])
    peaks = []
    for _ in range(4):  # when MLX's threads free what they have done with is a matter of chance
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        machine.step([batch], [False])
        peaks.append(mx.get_peak_memory() - before)
    return min(peaks)


@pytest.mark.slow
def test_the_encoders_activations_do_not_live_through_the_decoders_backward_pass(tmp_path, monkeypatch):
    freed = peak_of_a_step(tmp_path)
    monkeypatch.setattr(mx, "checkpoint", lambda call: call)
    assert freed < 0.8 * peak_of_a_step(tmp_path)


def test_a_step_leaves_nothing_of_its_graph_in_the_encoders(tmp_path):
    machine, batch = stepper(tmp_path)
    machine.step([batch], [False])
    model = machine.trainee.model
    before = dict(tree_flatten(model.output_encoder.parameters()))
    machine.measure_losses(batch, False)
    after = dict(tree_flatten(model.output_encoder.parameters()))
    assert [name for name, value in after.items() if value is not before[name]] == []


def test_recomputing_activations_is_a_matter_of_one_model(tmp_path):
    machine, _ = stepper(tmp_path, grad_checkpoint=True)
    other, _ = make_starting_model(tmp_path / "plain", None, CODEC, ENCODER)
    block = machine.trainee.model.layers[0]
    assert type(block).__name__ == type(other.layers[0]).__name__
    assert type(block).__call__ is not type(other.layers[0]).__call__


def test_a_compiled_step_gives_the_same_losses(tmp_path):
    plain = three_steps(tmp_path, lora_layers=1)
    np.testing.assert_allclose(three_steps(tmp_path, lora_layers=1, compile="on"), plain, rtol=1e-4)


@pytest.mark.parametrize("kind", slow_but(["lora", "full"], "full"))
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights(kind, tmp_path):
    machine, batch = stepper(tmp_path, dtype="bfloat16", fine_tune_type=kind)
    seen = []
    losses_of = Trainee.losses
    with pytest.MonkeyPatch.context() as patch:

        def looking(self: Trainee, *args: Any) -> Any:
            seen.append(self.model.layers[0](mx.zeros((1, 2, 16), mx.bfloat16), None, Cache()).dtype)
            return losses_of(self, *args)

        patch.setattr(Trainee, "losses", looking)
        low = [machine.step([batch], [False])["nats"] for _ in range(3)]
    assert set(seen) == {mx.bfloat16}
    assert {value.dtype for _, value in tree_flatten(machine.trainee.parameters())} == {mx.float32}
    high = [nats for nats, _ in three_steps(tmp_path, fine_tune_type=kind)]
    np.testing.assert_allclose(np.array(low) / batch.arrays["weights"].sum(), high, rtol=0.02)
    assert low[-1] < low[0]


class Cache(NoCache):
    offset = Positions()


def test_recomputing_activations_in_mixed_precision_rounds_no_weight(tmp_path):
    still = {"optimizer": "sgd", "learning_rate": 0.0, "fine_tune_type": "full"}
    machine, batch = stepper(tmp_path, dtype="bfloat16", grad_checkpoint=True, **still)
    before = arrays_of(machine.trainee)
    machine.step([batch], [False])
    for name, value in arrays_of(machine.trainee).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize(("least", "last"), [(1e-5, 0.1), (1e-4, 1.0), (1e-3, 1.0)])
def test_the_learning_rate_of_every_part_ends_at_its_share_of_the_peak_and_never_above_the_peak(least, last):
    own = {"encoder_learning_rate": 1e-6, "pack_rows": True, "pack_learning_rate": 1e-2}
    chosen = settings(iters=12, warmup=2, learning_rate=1e-4, min_learning_rate=least, **own)
    peaks = [part.peak for part in list_optimizer_parts(chosen)]
    assert peaks == [1e-6, 1e-2, 1e-4]
    for peak in peaks:
        rate = make_learning_rate_schedule(chosen, peak)
        found = [float(rate(mx.array(step))) for step in range(14)]  # mlx-lm counts the last warm-up step twice
        assert found[0] == 0
        assert max(found) == pytest.approx(peak)
        assert found[-1] == pytest.approx(last * peak)


# ---- new encoders


@pytest.mark.parametrize("size", [None, 8])
def test_a_new_residual_encoder_begins_as_the_first_base_row(size, tmp_path):
    folder = write_plain(tmp_path / "plain")
    encoder = EncoderOptions(kind="res_latent_attn", num_heads=2, size=size)
    model, _ = make_starting_model(folder, None, CODEC, encoder)
    entries, lengths = np.array([[5, 6, 2], [9, 8, 7]], np.uint32), np.array([2, 3])
    rows = model.encode_rows(entries, lengths)
    for found, matrix in zip(rows, (model.model.embed_tokens, model.lm_head), strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(matrix.weight[mx.array([5, 9])]))


def test_the_rows_of_a_new_transformer_have_the_scale_of_the_matrix_they_are_made_from(tmp_path):
    model, _ = make_starting_model(write_plain(tmp_path / "plain"), None, CODEC, ENCODER)
    rows = np.array(model.encode_rows(np.array([[5, 6, 2], [9, 8, 7]], np.uint32), np.array([2, 3]))[0])
    scale = np.sqrt((np.array(model.model.embed_tokens.weight) ** 2).mean())
    assert 0.3 * scale < np.sqrt((rows**2).mean()) < 1.5 * scale
