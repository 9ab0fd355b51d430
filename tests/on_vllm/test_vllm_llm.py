"""`LLM` answers prompts on vLLM. In a file of its own: an engine that closes ends any other one in its process."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

from mlx_zip.errors import GenerationError
from mlx_zip.vllm.llm import LLM
from support.on_vllm import CPU_ARGS

PROMPT = "Once upon a time there was a little girl. The little girl had a dog."


def test_texts_go_in_and_come_out():
    with LLM("stories", dtype="float32", max_running=4, vllm_args=CPU_ARGS) as llm:
        first, second = llm.generate([PROMPT, "One day"], max_tokens=12)
        assert first.counts.base_tokens == len(first.base_ids) == 12
        assert first.text == llm.engine.tokenizer.decode(list(first.base_ids))
        assert second.text != first.text
        assert (
            llm.generate(PROMPT, max_tokens=12) == [first] or llm.generate(PROMPT, max_tokens=12)[0].text == first.text
        )
        with pytest.raises(GenerationError, match="penalties"):
            llm.generate(PROMPT, repetition_penalty=1.5)
