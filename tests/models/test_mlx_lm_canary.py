"""What we use of mlx-lm beyond its documented interface, one test per name: a new release fails here first, by name."""

import inspect
import json
from dataclasses import is_dataclass
from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache

import mlx_zip  # registers the model type and the cache class, before mlx_lm is imported  # noqa: F401
from mlx_zip.models.decoder_options import FAMILIES
from mlx_zip.models.rows.zip_state import ZipState
from support.places import GOLDEN

SIZES = {
    "model_type": "any",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 8,
}
MODULES = sorted({family.module for family in FAMILIES.values()})


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def block(name: str):
    module = import_module(f"mlx_lm.models.{name}")
    args = module.ModelArgs.from_dict(SIZES)
    made = module.TransformerBlock(args, 0) if name == "gemma3_text" else module.TransformerBlock(args)
    made.self_attn.rope = lambda x, offset: x
    return made


class Cache:
    """The least a block may ask of a cache."""

    offset = SimpleNamespace(name="where the ids stand")

    def update_and_fetch(self, keys, values):
        return keys, values


# ---- the blocks our decoders are made of


@pytest.mark.parametrize("name", MODULES)
def test_attention_rotates_queries_and_keys_with_the_cache_s_own_offset(name):
    offsets, layer = [], block(name)
    layer.self_attn.rope = lambda x, offset: offsets.append(offset) or x
    layer(mx.ones((1, 1, 16)), None, Cache())
    assert [offset is Cache.offset for offset in offsets] == [True, True]


@pytest.mark.parametrize("name", MODULES)
def test_a_block_asks_no_more_of_a_cache_than_offset_and_update_and_fetch(name):
    assert block(name)(mx.ones((1, 1, 16)), None, Cache()).shape == (1, 1, 16)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "gemma2"])
def test_a_block_takes_the_causal_mask_by_name(name):
    assert block(name)(mx.ones((1, 3, 16)), "causal", Cache()).shape == (1, 3, 16)


@pytest.mark.parametrize("name", MODULES)
def test_a_block_takes_a_boolean_mask(name):
    mask = mx.tril(mx.ones((3, 3), mx.bool_))
    assert block(name)(mx.ones((1, 3, 16)), mask, Cache()).shape == (1, 3, 16)


def test_attention_sees_that_a_cache_is_quantized_by_its_bits_and_group_size():
    from mlx_lm.models.base import scaled_dot_product_attention

    source = inspect.getsource(scaled_dot_product_attention)
    assert [part for part in ('hasattr(cache, "bits")', "cache.group_size", "cache.bits") if part not in source] == []


# ---- caches


@pytest.mark.parametrize("name", ["KVCache", "QuantizedKVCache", "BatchKVCache"])
def test_every_cache_makes_masks_for_a_window(name):
    from mlx_lm.models import cache

    made = cache.BatchKVCache([0]) if name == "BatchKVCache" else getattr(cache, name)()
    mask = made.make_mask(3, window_size=2, return_array=True)
    assert mask.squeeze().tolist() == [[True, False, False], [True, True, False], [False, True, True]]


def test_a_kv_cache_counts_its_ids_in_offset_and_forgets_the_last_ones():
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 5, 8)), mx.ones((1, 1, 5, 8)))
    assert (cache.offset, cache.trim(2), cache.offset) == (5, 2, 3)


def test_a_batch_cache_counts_its_columns_in_idx():
    from mlx_lm.models.cache import BatchKVCache

    cache = BatchKVCache([0, 2])
    cache.update_and_fetch(mx.ones((2, 1, 5, 8)), mx.ones((2, 1, 5, 8)))
    assert cache._idx == 5


def test_saved_caches_are_rebuilt_by_class_name_in_the_cache_module():
    from mlx_lm.models import cache

    assert cache.ZipState is ZipState


def test_the_prompt_cache_is_the_model_s_own():
    from mlx_lm.models.cache import make_prompt_cache

    assert make_prompt_cache(SimpleNamespace(make_cache=lambda: "ours")) == "ours"


def test_kv_quantization_passes_over_entries_without_to_quantized():
    from mlx_lm.generate import maybe_quantize_kv_cache

    entries = [object()]
    kept = entries[0]
    maybe_quantize_kv_cache(entries, quantized_kv_start=0, kv_group_size=64, kv_bits=4)
    assert entries[0] is kept


# ---- loading and generating


def test_the_loader_looks_our_model_up_by_its_type():
    from mlx_lm.utils import _get_classes

    assert _get_classes({"model_type": "zip2zip"})[0] is import_module("mlx_zip.models.zip_model").Model


def test_generate_step_takes_what_we_pass():
    from mlx_lm.generate import generate_step

    assert {
        "max_tokens",
        "sampler",
        "logits_processors",
        "prompt_cache",
        "prefill_step_size",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "prompt_progress_callback",
    } <= parameters(generate_step)


def test_generation_runs_on_a_stream_and_under_a_wired_limit_of_mlx_lm():
    from mlx_lm.generate import generation_stream, wired_limit

    with wired_limit(nn.Module(), [generation_stream]):
        assert mx.ones(1, stream=generation_stream).item() == 1


def test_load_takes_what_we_pass():
    from mlx_lm.utils import load

    assert {"adapter_path", "tokenizer_config", "model_config", "lazy", "trust_remote_code"} <= parameters(load)


def test_the_arguments_of_a_plain_model_are_a_dataclass():
    from mlx_lm.utils import _get_classes

    assert is_dataclass(_get_classes({"model_type": "llama"})[1])


def test_samplers_take_what_we_pass_in_this_order():
    from mlx_lm.sample_utils import make_sampler

    assert list(inspect.signature(make_sampler).parameters)[:8] == [
        "temp",
        "top_p",
        "min_p",
        "min_tokens_to_keep",
        "top_k",
        "xtc_probability",
        "xtc_threshold",
        "xtc_special_tokens",
    ]


def test_logits_processors_take_what_we_pass_in_this_order():
    from mlx_lm.sample_utils import make_logits_processors

    assert list(inspect.signature(make_logits_processors).parameters)[:7] == [
        "logit_bias",
        "repetition_penalty",
        "repetition_context_size",
        "presence_penalty",
        "presence_context_size",
        "frequency_penalty",
        "frequency_context_size",
    ]


def test_each_detokenizer_asked_for_is_a_new_one():
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(GOLDEN / "models/phi3_reslatent_mean_untied_v2")
    first = tokenizer.detokenizer
    first.add_token(71)
    first.finalize()
    assert (first.text, tokenizer.detokenizer.text) == ("a", "")


# ---- converting


def test_the_quantizer_takes_a_predicate_and_a_mode():
    from mlx_lm.utils import quantize_model

    assert {"mode", "quant_predicate"} <= parameters(quantize_model)


def test_the_mixed_recipes_are_those_we_offer():
    from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

    from mlx_zip.converters.quantization import RECIPES

    assert tuple(sorted(QUANT_RECIPES)) == tuple(sorted(RECIPES))
    assert list(inspect.signature(mixed_quant_predicate_builder).parameters)[:3] == ["recipe", "model", "group_size"]


# ---- training


def blocks(count: int = 2) -> nn.Module:
    """A model of some blocks, which is all that training asks of one here."""
    model = nn.Module()
    model.layers = [block("llama") for _ in range(count)]
    return model


def test_a_cosine_schedule_rises_over_warmup_steps_and_ends_at_its_last_argument():
    from mlx_lm.tuner.utils import build_schedule

    rate = build_schedule({"name": "cosine_decay", "arguments": [0.5, 10, 0.1], "warmup": 5})
    found = [float(rate(mx.array(step))) for step in (0, 5, 16)]
    assert found == pytest.approx([0.0, 0.5, 0.1], abs=1e-6)


def test_lora_layers_are_put_into_the_last_blocks_and_by_name():
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import linear_to_lora_layers

    def adapted(**options) -> set[str]:
        model = blocks()
        linear_to_lora_layers(model, 1, {"rank": 2, "scale": 3.0, "dropout": 0.0, **options})
        return {name for name, module in model.named_modules() if isinstance(module, LoRALinear)}

    attention = {f"layers.1.self_attn.{name}_proj" for name in "qkvo"}
    assert adapted() == attention | {f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert adapted(keys=["self_attn.q_proj"]) == {"layers.1.self_attn.q_proj"}


@pytest.mark.parametrize("quantized", [False, True])
def test_a_lora_layer_adds_its_scaled_product_and_fuses_to_the_same(quantized):
    from mlx_lm.tuner.lora import LoRALinear

    linear = nn.Linear(64, 32, bias=False)
    layer = LoRALinear.from_base(linear.to_quantized(64, 8) if quantized else linear, r=2, scale=3.0)
    layer.lora_b = mx.random.normal((2, 32))
    assert (layer.lora_a.shape, layer.lora_b.shape, layer.scale) == ((64, 2), (2, 32), 3.0)
    x = mx.random.normal((5, 64))
    wanted = layer.linear(x) + 3.0 * (x @ layer.lora_a) @ layer.lora_b
    assert mx.allclose(layer(x), wanted, atol=1e-5)
    fused = layer.fuse(dequantize=True)
    assert type(fused) is nn.Linear
    assert mx.allclose(fused(x), wanted, atol=1e-4)
    assert isinstance(layer.fuse(), nn.QuantizedLinear) == quantized


def test_adapters_are_loaded_from_two_files_by_layer_name(tmp_path):
    from mlx_lm.tuner.utils import load_adapters

    lora = {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "layers.1.self_attn.q_proj.lora_b"
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: mx.ones((2, 16))})
    model = load_adapters(blocks(), str(tmp_path))
    assert mx.array_equal(dict(tree_flatten(model.parameters()))[name], mx.ones((2, 16)))


def test_a_causal_mask_of_a_window_is_true_where_a_position_may_look():
    from mlx_lm.models.base import create_causal_mask

    assert create_causal_mask(3, window_size=2).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]


def test_a_small_model_is_saved_as_one_file_with_an_index(tmp_path):
    from mlx_lm.utils import save_model

    save_model(tmp_path / "out", nn.Linear(4, 3))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(mx.load(str(tmp_path / "out" / "model.safetensors"))) == ["bias", "weight"]


def test_a_dequantized_model_has_float_layers_of_the_same_values():
    from mlx_lm.utils import dequantize_model

    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32))
    nn.quantize(model, group_size=32, bits=8)
    before = model(mx.arange(8))
    made = dequantize_model(model)
    assert [type(layer) for layer in made.layers] == [nn.Embedding, nn.Linear]
    assert mx.allclose(made(mx.arange(8)), before, atol=1e-4)


def test_a_batch_cache_replaces_its_offset_and_never_changes_it_in_place():
    """Layers share one offset array (`mlx_zip.models.call_inputs.set_plain_offsets`)."""
    caches, keys = [BatchKVCache([0, 1]), BatchKVCache([0, 1])], mx.zeros((2, 1, 1, 4))
    caches[0].offset = caches[1].offset = shared = mx.array([5, 4])
    caches[0].update_and_fetch(keys, keys)
    assert (shared.tolist(), caches[1].offset.tolist(), caches[0].offset.tolist()) == ([5, 4], [5, 4], [6, 5])
    caches[0].trim(1)
    assert shared.tolist() == [5, 4]
