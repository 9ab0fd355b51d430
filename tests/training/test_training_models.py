"""What a run trains, what it leaves alone, and the folder it leaves behind."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as mlx_convert

from mlx_zip import Codebook, ConfigError, load
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.layout import is_zip
from mlx_zip.models.rope import Positions
from mlx_zip.models.whole import NoCache
from mlx_zip.training import run as run_module
from mlx_zip.training import trainer
from mlx_zip.training.adapter import save_adapter
from mlx_zip.training.batches import make_batch
from mlx_zip.training.objective import LossWeights, Trainee
from mlx_zip.training.optimizer import make_optimizer
from mlx_zip.training.run import RunOptions, train
from mlx_zip.training.settings import EncoderOptions, TrainSettings
from mlx_zip.training.shards import Shards, codec_record
from mlx_zip.training.starting_model import start_model
from mlx_zip.training.stepping import Stepper, to_device
from support.checkpoints import BASE, edit_json, write_json, write_tokenizer
from support.converting import convert
from support.tiny_training import (
    CODEC,
    ENCODER,
    PLAIN,
    SMALL,
    TOKENS,
    arrays_of,
    losses,
    make_sample,
    options,
    saved_config,
    settings,
    text_ids,
    write_plain,
    write_shards,
)

IDS = [int(i) for i in Codebook(CODEC).compress(np.array(text_ids(40, 77), np.uint32))]
QUANTIZABLE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WIDE = EncoderOptions(kind="res_latent_attn", num_hidden_layers=1, num_heads=2, size=16, intermediate_size=16)


def logits(model: Any) -> np.ndarray:
    """Of a fixed sequence with hypertokens."""
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `train` is about to save, before LoRA layers are folded in."""
    seen: dict[str, Any] = {}

    def look(write: Any, position: int) -> Any:
        def looking(*args: Any, **named: Any) -> Any:
            model = args[position]
            model.eval()
            seen["model"], seen["weights"] = model, arrays_of(model)
            if is_zip(model):
                seen["logits"] = logits(model)
            return write(*args, **named)

        return looking

    monkeypatch.setattr(run_module, "save_trained", look(run_module.save_trained, 1))
    monkeypatch.setattr(run_module, "save_adapter", look(run_module.save_adapter, 1))
    return seen


def assert_saved_as_trained(out: Path, seen: dict[str, Any], atol: float = 2e-5) -> None:
    model, tokenizer = load(out / "model")
    assert len(tokenizer) == TOKENS
    found, expected = logits(model), seen["logits"]
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("kind", ["lora", "full", "encoders"])
def test_a_plain_model_becomes_zip_capable_and_its_folder_gives_what_was_trained(kind, tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(fine_tune_type=kind, lora_dropout=0.1 if kind == "lora" else 0.0), quiet=True)
    assert_saved_as_trained(run.out, in_memory)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    config = saved_config(run.out / "model")
    assert config["model_type"] == "zip2zip"
    assert config["zip2zip"]["base_model_type"] == "llama"
    assert config["zip2zip"]["source"]["settings"]["fine_tune_type"] == kind


@pytest.mark.parametrize("kind", ["lora", "encoders"])
def test_what_is_frozen_stays_as_it_was_bit_by_bit(kind, tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(fine_tune_type=kind), quiet=True)
    base: Any = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    trained = {name.replace(".linear.", "."): value for name, value in in_memory["weights"].items()}
    for name, value in base.items():
        assert (trained[name] == np.array(value)).all(), name
    if kind == "lora":
        assert all(np.abs(value).max() > 0 for name, value in trained.items() if name.endswith("lora_b"))


def test_full_training_moves_every_weight(tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(fine_tune_type="full"), quiet=True)
    base: Any = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    assert all((in_memory["weights"][name] != np.array(value)).any() for name, value in base.items())


@pytest.mark.parametrize("layers", [1, -1])
def test_lora_goes_into_as_many_of_the_last_blocks_as_asked(layers, tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(lora_layers=layers, iters=1), quiet=True)
    adapted = {name.split(".")[2] for name in in_memory["weights"] if name.endswith("lora_a")}
    assert adapted == ({"1"} if layers == 1 else {"0", "1"})


def test_a_trained_model_can_be_trained_further(tmp_path, in_memory):
    run = options(tmp_path / "run")
    train(run, settings(), quiet=True)
    before = in_memory["logits"]
    again = options(tmp_path / "again", model=str(run.out / "model"))
    train(again, settings(learning_rate=1e-9, min_learning_rate=0.0), quiet=True)
    assert_saved_as_trained(again.out, in_memory)
    np.testing.assert_allclose(in_memory["logits"], before, atol=1e-3)


def test_lora_on_a_quantized_base_leaves_what_was_trained(tmp_path, in_memory):
    write_plain(tmp_path / "float", **QUANTIZABLE)
    mlx_convert(str(tmp_path / "float"), str(tmp_path / "plain"), quantize=True, q_group_size=32, q_bits=4)
    assert saved_config(tmp_path / "plain")["quantization"]["bits"] == 4
    run = options(tmp_path / "run", encoder=WIDE, adapted_bits="none")
    train(run, settings(lora_layers=1), quiet=True)
    assert "scales" in in_memory["model"].model.embed_tokens
    assert_saved_as_trained(run.out, in_memory, atol=1e-4)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.scales" in saved
    assert "model.layers.1.self_attn.q_proj.scales" not in saved  # rounding again would undo what was learnt


def quantized_plain(home: Path, bits: int = 4, dtype: str | None = None) -> None:
    """Writes `plain`, a quantized model, next to the runs of a test."""
    write_plain(home / "float", **QUANTIZABLE)
    mlx_convert(
        str(home / "float"), str(home / "plain"), quantize=True, q_group_size=32, q_bits=bits, dtype=dtype or "float32"
    )


def layer_bits(folder: Path) -> dict[str, int]:
    """Bits per weight of the quantized layers of a saved model, as mlx-lm loads them."""
    model: Any = load(folder)[0]
    return {name: module.bits for name, module in model.named_modules() if hasattr(module, "bits")}


@pytest.mark.parametrize(("bits", "found", "atol"), [(None, 8, 0.2), ("6", 6, 1.0), ("base", 4, 5.0)])
def test_layers_that_had_adapters_are_quantized_again_on_a_quantized_base(bits, found, atol, tmp_path, in_memory):
    quantized_plain(tmp_path)
    run = options(tmp_path / "run", encoder=WIDE, **({} if bits is None else {"adapted_bits": bits}))
    train(run, settings(lora_layers=1), quiet=True)
    assert_saved_as_trained(run.out, in_memory, atol=atol)
    bits_of = layer_bits(run.out / "model")
    assert {bits_of[name] for name in bits_of if name.startswith("model.layers.1.")} == {found}
    assert {bits_of[name] for name in bits_of if not name.startswith("model.layers.1.")} == {4}
    assert {name.removesuffix(".linear") for name in bits_of} >= {"model.embed_tokens", "model.layers.1.mlp.up_proj"}


def test_a_model_trained_on_a_quantized_base_is_saved_in_the_type_it_had(tmp_path):
    quantized_plain(tmp_path, dtype="bfloat16")
    size = (tmp_path / "plain" / "model.safetensors").stat().st_size
    run = options(tmp_path / "run", data=[write_shards(tmp_path / "data", PLAIN)], adapted_bits="base")
    train(run, settings(iters=1), quiet=True)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert {value.dtype for value in saved.values()} == {mx.uint32, mx.bfloat16}
    assert saved_config(run.out / "model")["torch_dtype"] == "bfloat16"
    assert (run.out / "model" / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.05)


def test_quantized_encoders_are_trained_as_floats_and_quantized_again(tmp_path, in_memory):
    first = options(tmp_path / "first", encoder=replace(WIDE, size=64, intermediate_size=64))
    write_plain(tmp_path / "other", **QUANTIZABLE)
    train(replace(first, model=str(tmp_path / "other")), settings(iters=1), quiet=True)
    small = convert(first.out / "model", tmp_path / "small", quantize=True, q_group_size=32)
    encoders = {name: bits for name, bits in layer_bits(small).items() if "encoder" in name}
    assert set(encoders.values()) == {8}
    run = options(tmp_path / "run", model=str(small))
    train(run, settings(fine_tune_type="encoders"), quiet=True)
    before = load(small)[0]
    for name, module in before.named_modules():
        if name in encoders:
            trained = in_memory["weights"][f"{name}.weight"]
            assert trained.dtype == np.float32
            old = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            assert np.abs(trained - np.array(old.astype(mx.float32))).max() > 1e-4, name
    assert {name: bits for name, bits in layer_bits(run.out / "model").items() if "encoder" in name} == encoders
    assert_saved_as_trained(run.out, in_memory, atol=0.5)


def test_a_quantized_model_is_not_trained_in_full(tmp_path):
    write_plain(tmp_path / "float", **QUANTIZABLE)
    mlx_convert(str(tmp_path / "float"), str(tmp_path / "plain"), quantize=True, q_group_size=32, q_bits=4)
    with pytest.raises(TrainingError, match="quantized"):
        train(options(tmp_path / "run", encoder=WIDE), settings(fine_tune_type="full"), quiet=True)


def scratch(home: Path, **changes: Any) -> RunOptions:
    write_json(home / "new.json", {**BASE, **SMALL})
    (home / "tokenizer").mkdir()
    write_tokenizer(home / "tokenizer", TOKENS)
    write_shards(home / "data", changes.pop("codec", CODEC))
    return RunOptions(
        data=[home / "data"],
        out=home / "run",
        scratch=home / "new.json",
        tokenizer=home / "tokenizer",
        encoder=ENCODER,
        **changes,
    )


def test_a_zip_model_from_scratch_learns_and_loads(tmp_path, in_memory):
    run = scratch(tmp_path)
    train(run, settings(fine_tune_type="full", optimizer="muon", iters=10), quiet=True)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    assert_saved_as_trained(run.out, in_memory)


def test_a_plain_model_from_scratch_learns_and_loads(tmp_path, in_memory):
    run = scratch(tmp_path, codec=PLAIN)
    train(run, settings(fine_tune_type="full", iters=10), quiet=True)
    assert losses(run.out)[-1][1] < losses(run.out)[0][1]
    model, _ = load(run.out / "model")
    assert not is_zip(model)
    ids = mx.array([text_ids(20, 1)])
    np.testing.assert_allclose(np.array(model(ids)), np.array(in_memory["model"](ids)), atol=2e-5)


def test_a_new_plain_model_has_the_rope_settings_of_its_config_as_when_it_is_loaded(tmp_path, in_memory):
    run = scratch(tmp_path, codec=PLAIN)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    edit_json(tmp_path / "new.json", rope_theta=None, rope_parameters=rope)
    train(run, settings(fine_tune_type="full", iters=1), quiet=True)
    ids = mx.array([text_ids(40, 1)])
    found, expected = (np.array(model(ids)) for model in (load(run.out / "model")[0], in_memory["model"]))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(("key", "value"), [("model_type", None), ("hidden_size", None), ("hidden_size", "wide")])
def test_a_new_models_config_that_lacks_what_is_needed_is_refused_by_name(key, value, tmp_path):
    run = scratch(tmp_path)
    edit_json(tmp_path / "new.json", **{key: value})
    with pytest.raises(ConfigError, match=key):
        train(run, settings(fine_tune_type="full"), quiet=True)
    assert not run.out.exists()


def test_saved_types_are_as_asked_and_further_ends_of_text_are_kept(tmp_path):
    run = options(tmp_path / "run", save_dtype="bfloat16")
    write_json(tmp_path / "plain" / "generation_config.json", {"eos_token_id": [1, 9]})
    edit_json(tmp_path / "plain" / "config.json", dtype="float32", auto_map={"AutoModel": "x"})
    train(run, settings(iters=1), quiet=True)
    saved: Any = mx.load(str(run.out / "model" / "model.safetensors"))
    assert {value.dtype for value in saved.values()} == {mx.bfloat16}
    config = saved_config(run.out / "model")
    assert config["torch_dtype"] == "bfloat16"
    assert config.keys().isdisjoint({"dtype", "auto_map"})
    assert load(run.out / "model")[1].eos_token_ids == {1, 9}


# ---- how a step is computed


def stepper(folder: Path, encoder: EncoderOptions = ENCODER, **changes: Any) -> tuple[Stepper, Any]:
    """A step's machinery on a plain folder made zip-capable, and its batch."""
    chosen = settings(**changes)
    mx.random.seed(0)
    options(folder / "run")
    model, _ = start_model(folder / "plain", None, CODEC, encoder)
    run_module.freeze(model, chosen)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "full", "encoders"])
def test_recomputing_activations_changes_no_number(kind, dtype, tmp_path):
    plain = three_steps(tmp_path, fine_tune_type=kind, dtype=dtype)
    again = three_steps(tmp_path, fine_tune_type=kind, dtype=dtype, grad_checkpoint=True)
    np.testing.assert_allclose(again, plain, rtol=1e-5)


def peak_of_a_step(folder: Path) -> int:
    """Bytes that a step behind the first adds at most to what lived before it; its encoder is the model's largest part.

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


def test_the_encoders_activations_do_not_live_through_the_decoders_backward_pass(tmp_path, monkeypatch):
    freed = peak_of_a_step(tmp_path)
    monkeypatch.setattr(mx, "checkpoint", lambda call: call)
    assert freed < 0.8 * peak_of_a_step(tmp_path)


def test_a_step_leaves_nothing_of_its_graph_in_the_encoders(tmp_path):
    machine, batch = stepper(tmp_path)
    machine.step([batch], [False])
    model = machine.trainee.model
    before = dict(tree_flatten(model.output_encoder.parameters()))
    machine.losses(batch, False)
    after = dict(tree_flatten(model.output_encoder.parameters()))
    assert [name for name, value in after.items() if value is not before[name]] == []


def test_recomputing_activations_is_a_matter_of_one_model(tmp_path):
    machine, _ = stepper(tmp_path, grad_checkpoint=True)
    other, _ = start_model(tmp_path / "plain", None, CODEC, ENCODER)
    block = machine.trainee.model.layers[0]
    assert type(block).__name__ == type(other.layers[0]).__name__
    assert type(block).__call__ is not type(other.layers[0]).__call__


def test_a_compiled_step_gives_the_same_losses(tmp_path):
    plain = three_steps(tmp_path, lora_layers=1)
    np.testing.assert_allclose(three_steps(tmp_path, lora_layers=1, compile="on"), plain, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "full"])
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


# ---- new encoders


@pytest.mark.parametrize("size", [None, 8])
def test_a_new_residual_encoder_begins_as_the_first_base_row(size, tmp_path):
    folder = write_plain(tmp_path / "plain")
    encoder = EncoderOptions(kind="res_latent_attn", num_heads=2, size=size)
    model, _ = start_model(folder, None, CODEC, encoder)
    entries, lengths = np.array([[5, 6, 2], [9, 8, 7]], np.uint32), np.array([2, 3])
    rows = model.rows(entries, lengths)
    for found, matrix in zip(rows, (model.model.embed_tokens, model.lm_head), strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(matrix.weight[mx.array([5, 9])]))


def test_the_rows_of_a_new_transformer_have_the_scale_of_the_matrix_they_are_made_from(tmp_path):
    model, _ = start_model(write_plain(tmp_path / "plain"), None, CODEC, ENCODER)
    rows = np.array(model.rows(np.array([[5, 6, 2], [9, 8, 7]], np.uint32), np.array([2, 3]))[0])
    scale = np.sqrt((np.array(model.model.embed_tokens.weight) ** 2).mean())
    assert 0.3 * scale < np.sqrt((rows**2).mean()) < 1.5 * scale


# ---- adapter and encoders


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_layers": 1, "lora_scale": 1.7}, {"fine_tune_type": "encoders"}],
    ids=["lora", "one block", "encoders"],
)
def test_an_adapter_folder_is_read_back_onto_its_base(changes, tmp_path, in_memory):
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(**changes), quiet=True)
    assert not (run.out / "model").exists()
    section = json.loads((run.out / "adapter" / "zip2zip_config.json").read_text())
    assert section["format_version"] == 1
    assert section["base_model_name_or_path"] == str((tmp_path / "plain").resolve())
    model, _ = load(convert(run.out / "adapter", tmp_path / "back"))
    np.testing.assert_allclose(logits(model), in_memory["logits"], atol=2e-5)


def test_an_adapter_folder_holds_no_tensor_of_the_base(tmp_path):
    run = options(tmp_path / "run", save="adapter", save_dtype="bfloat16")
    train(run, settings(lora_layers=1), quiet=True)
    adapter: Any = mx.load(str(run.out / "adapter" / "adapter_model.safetensors"))
    encoders: Any = mx.load(str(run.out / "adapter" / "zip2zip_encoders.safetensors"))
    assert all(name.startswith("base_model.model.model.layers.1.") and ".lora_" in name for name in adapter)
    assert all(name.startswith(("input_encoder.", "output_encoder.")) for name in encoders)
    assert {value.dtype for value in [*adapter.values(), *encoders.values()]} == {mx.bfloat16}
    config = json.loads((run.out / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["layers_to_transform"]) == (2, 2.0, [1])


def test_a_plain_models_adapter_has_nothing_of_zip2zip(tmp_path):
    write_shards(tmp_path / "data", PLAIN)
    run = options(tmp_path / "run", save="adapter")
    train(run, settings(), quiet=True)
    assert sorted(path.name for path in (run.out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    convert(run.out / "adapter", tmp_path / "back", lora_only=True)


def test_a_run_whose_result_is_no_adapter_is_refused_before_it_begins(tmp_path):
    with pytest.raises(TrainingError, match="all weights"):
        train(options(tmp_path / "run", save="adapter"), settings(fine_tune_type="full"), quiet=True)
    (tmp_path / "new").mkdir()
    with pytest.raises(TrainingError, match="all weights"):
        train(scratch(tmp_path / "new", save="adapter"), settings(), quiet=True)
    train(options(tmp_path / "first"), settings(iters=1), quiet=True)
    further = options(tmp_path / "run", save="adapter", model=str(tmp_path / "first" / "model"))
    with pytest.raises(TrainingError, match="zip2zip model already"):
        train(further, settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_cannot_be_written_is_one_clear_error(tmp_path):
    model, _ = start_model(write_plain(tmp_path / "plain"), None, CODEC, ENCODER)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write"):
        save_adapter(tmp_path / "file" / "adapter", model, "base", TrainSettings())


# ---- what does not fit together


def test_data_of_another_codec_than_the_zip_models_are_refused(tmp_path):
    first = options(tmp_path / "first")
    train(first, settings(iters=1), quiet=True)
    other = write_shards(tmp_path / "other", replace(CODEC, merge_size=2))
    with pytest.raises(TrainingError, match="another codec"):
        train(options(tmp_path / "run", model=str(first.out / "model"), data=[other]), settings(), quiet=True)


def test_a_zip_model_takes_over_the_codebook_size_and_longer_entries_of_its_data(tmp_path):
    first = options(tmp_path / "first")
    train(first, settings(iters=1), quiet=True)
    larger = replace(CODEC, merge_size=CODEC.merge_size + 1, codebook_size=CODEC.codebook_size + 8)
    other = write_shards(tmp_path / "other", larger)
    before, _ = start_model(first.out / "model", None, CODEC, ENCODER)
    after, config = start_model(first.out / "model", None, larger, ENCODER)
    assert after.config.codec_params == larger
    assert config["zip2zip"]["compression"]["max_subtokens"] == larger.merge_size
    old, new = arrays_of(before), arrays_of(after)
    assert old.keys() == new.keys()
    for name, value in new.items():
        np.testing.assert_array_equal(value[: len(old[name])], old[name])
        if name.endswith("pos_embed.weight"):
            np.testing.assert_array_equal(value[CODEC.merge_size :], old[name][-1:])
    train(options(tmp_path / "run", model=str(first.out / "model"), data=[other]), settings(iters=1), quiet=True)
    assert saved_config(tmp_path / "run" / "model")["zip2zip"]["compression"]["max_codebook_size"] == 56


def test_a_run_makes_a_model_canonical_or_keeps_what_it_is(tmp_path, monkeypatch):
    seen = []
    making = trainer.make_batch
    monkeypatch.setattr(trainer, "make_batch", lambda *a, **k: seen.append(made := making(*a, **k)) or made)
    first = options(tmp_path / "first", canonical=True)
    train(first, settings(iters=1), quiet=True)
    assert saved_config(first.out / "model")["zip2zip"]["canonical"] is True
    start = {"model": str(first.out / "model")}
    for name, canonical, expected in (("kept", None, True), ("without", False, False)):
        seen.clear()
        train(options(tmp_path / name, canonical=canonical, **start), settings(iters=1), quiet=True)
        assert saved_config(tmp_path / name / "model")["zip2zip"].get("canonical", False) is expected
        assert all(("excluded" in batch.arrays) is expected for batch in seen)
        assert seen


def test_canonical_decoding_needs_a_codebook_and_a_format_that_knows_it(tmp_path):
    plain = write_shards(tmp_path / "no-codebook", PLAIN)
    with pytest.raises(TrainingError, match="prepared without one"):
        train(options(tmp_path / "run", data=[plain], canonical=True), settings(), quiet=True)
    with pytest.raises(TrainingError, match="no place for canonical decoding"):
        train(options(tmp_path / "run", save="adapter", canonical=True), settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_are_refused(tmp_path):
    write_shards(tmp_path / "data", tokenizer={"fingerprint": "0" * 64, "size": TOKENS})
    with pytest.raises(DataError, match=r"another tokenizer than the one in .*plain"):
        train(options(tmp_path / "run"), settings(), quiet=True)


def test_data_folders_of_different_codecs_are_not_read_as_one(tmp_path):
    folders = [write_shards(tmp_path / "a"), write_shards(tmp_path / "b", replace(CODEC, codebook_size=47))]
    with pytest.raises(DataError, match="another codec"):
        train(options(tmp_path / "run", data=folders), settings(), quiet=True)


def test_windows_longer_than_the_models_context_are_refused(tmp_path):
    write_plain(tmp_path / "plain", max_position_embeddings=32)
    with pytest.raises(TrainingError, match=r"64 base ids, the model's context is 32"):
        train(options(tmp_path / "run"), settings(), quiet=True)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("model.layers.0.extra", np.zeros(3, np.float32), "has tensors the decoder has no place for"),
        ("model.norm.weight", None, "lacks tensors of the decoder"),
    ],
)
def test_a_base_that_lacks_a_tensor_or_has_one_too_many_is_refused(tmp_path, name, tensor, match):
    write_plain(tmp_path / "plain", tensors={name: tensor})
    with pytest.raises(TrainingError, match=f"{match}: {re.escape(name)}"):
        train(options(tmp_path / "run"), settings(), quiet=True)


@pytest.mark.parametrize(
    ("encoder", "match"),
    [
        (EncoderOptions(kind="gru"), "gru"),
        (EncoderOptions(kind="transformer", size=8), "as wide as the model"),
        (EncoderOptions(num_heads=3), "num_heads 3"),
        (EncoderOptions(size=0), "hidden_size must be"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(encoder, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        train(options(tmp_path / "run", encoder=encoder), settings(), quiet=True)


def test_a_run_that_would_train_nothing_is_refused(tmp_path):
    averaging = options(tmp_path / "run", encoder=EncoderOptions(kind="averaging"))
    with pytest.raises(TrainingError, match="nothing to train"):
        train(averaging, settings(fine_tune_type="encoders"), quiet=True)


def test_samples_are_read_with_the_codebook_they_were_prepared_with_and_not_with_the_models(tmp_path):
    start = ((5, 6), (6, 7, 8))
    params = replace(CODEC, start=start)
    write_shards(tmp_path / "data", params, codec={**codec_record(params), "start": start})
    run = options(tmp_path / "run")
    train(run, settings(iters=1), quiet=True)
    assert saved_config(run.out / "model")["zip2zip"]["start"] == [list(entry) for entry in start]
    empty = Shards(write_shards(tmp_path / "empty", samples=4))  # its first slot holds another entry
    further = options(tmp_path / "further", model=str(run.out / "model"), data=[empty.folder])
    train(further, settings(iters=1), quiet=True)
    trainee = Trainee(load(run.out / "model")[0], LossWeights())
    sums = trainee.losses(to_device(make_batch([empty[i] for i in range(4)], CODEC)))
    assert losses(further.out)[0][1] == pytest.approx(sums["nats"].item() / sums["count"].item(), rel=1e-5)
