"""Names of vLLM that its documentation does not promise: one that goes or changes fails here first, by name."""

from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("vllm")

from vllm import RequestOutput
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.logprobs import Logprob
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import init_vllm_registered_model
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from mlx_zip.vllm.config import DECODERS
from mlx_zip.vllm.state import Zip2ZipState


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name", ["add_request", "remove_request", "prepare_inputs", "prepare_dummy_inputs", "custom_sampler", "__init__"]
)
def test_a_hook_of_model_states_has_the_parameters_that_ours_has(name):
    assert parameters(getattr(DefaultModelState, name)) == parameters(getattr(Zip2ZipState, name))


def test_a_state_has_the_sizes_that_ours_reads():
    text = inspect.getsource(DefaultModelState.__mro__[1].__init__)
    for name in ("max_num_reqs", "max_num_tokens", "dtype", "device"):
        assert f"self.{name} =" in text


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (NewRequestData, ["req_id", "prefill_token_ids", "num_computed_tokens", "sampling_params"]),
        (
            InputBatch,
            [
                "req_ids", "idx_mapping", "query_start_loc_np", "num_computed_tokens_np", "num_tokens",
                "num_tokens_after_padding", "input_ids",
            ],
        ),
        (Logprob, ["logprob", "rank"]),
        (CompletionOutput, ["token_ids", "logprobs", "finish_reason"]),
        (ParallelConfig, ["enable_batch_sharded_sampling"]),
        (ParallelConfig, ["prefill_context_parallel_size", "decode_context_parallel_size"]),
        (ModelConfig, ["enable_prompt_embeds", "max_model_len", "hf_config", "dtype", "revision"]),
        (VllmConfig, ["lora_config", "speculative_config", "quant_config"]),
    ],
)  # fmt: skip
def test_what_requests_batches_and_configs_tell_is_there(kind, names):
    fields = kind.__dataclass_fields__
    assert [name for name in names if name not in fields] == []


def test_other_names_that_are_used_are_there():
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert isinstance(NewRequestData.prompt_len, property)
    assert {"get_head_size", "get_total_num_kv_heads"} <= set(dir(ModelConfig))
    assert {"vllm_config", "hf_config", "prefix"} <= set(parameters(init_vllm_registered_model))
    assert {"model_or_path", "revision", "allow_patterns_overrides"} <= set(parameters(DefaultModelLoader.Source))
    assert issubclass(ParallelLMHead, VocabParallelEmbedding)
    assert parameters(Sampler.__call__) == ["self", "logits", "input_batch"]
    engine_names = {"add_request", "abort_request", "step", "has_unfinished_requests", "from_engine_args"}
    assert engine_names | {"reset_prefix_cache"} <= set(dir(LLMEngine))
    assert {"request_id", "outputs", "finished", "num_cached_tokens"} <= set(parameters(RequestOutput.__init__))
    for client in (InprocClient, SyncMPClient):
        assert callable(client.shutdown)


def test_the_thread_that_ends_with_a_core_in_another_process_is_there():
    text = inspect.getsource(SyncMPClient)
    assert "self.output_queue_thread = Thread(" in text
    assert "outputs = self.outputs_queue.get()" in text
    assert issubclass(EngineDeadError, Exception)


def test_the_loader_asks_a_model_for_its_files():
    text = inspect.getsource(DefaultModelLoader)
    for name in ("allow_patterns_overrides", "secondary_weights"):
        assert re.search(rf'getattr\(\s*model,\s*"{name}"', text)


def test_logits_are_made_right_before_they_are_sampled():
    """The sampler adds to the logits what belongs to the outputs that `compute_logits` saw last."""
    text = inspect.getsource(GPUModelRunner.sample)
    assert text.index("self.model.compute_logits(") < text.index("self.sampler(logits, input_batch)")
    assert text.count("compute_logits(") == 1


def test_the_decoders_are_vllms_own():
    from vllm import ModelRegistry

    assert set(DECODERS.values()) <= set(ModelRegistry.get_supported_archs())
