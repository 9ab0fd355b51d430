"""The MLX engine: each request gets what `stream_generate` gives, alone and in company."""

import pytest

from mlx_zip.engine import Finished, Started
from support import tiny
from support.serving import alone, ask, prompts, same, tiny_engine


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "plain"])
def test_one_request_gets_the_ids_of_stream_generate(family):
    from support.generating import plain_model

    model = plain_model() if family == "plain" else tiny.tiny_model(family).eval()
    prompt = tiny.base_ids(50)
    with tiny_engine(family) as engine:
        _, watch = ask(engine, prompt)
        same(watch.wait(), alone(model, prompt))
        assert isinstance(watch.events[0], Started)
        assert isinstance(watch.end, Finished)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "plain"])
def test_requests_in_company_get_the_ids_that_they_get_alone(family):
    from support.generating import plain_model

    model = plain_model() if family == "plain" else tiny.tiny_model(family).eval()
    with tiny_engine(family) as engine:
        watches = [ask(engine, prompt, max_tokens=20 + 5 * i)[1] for i, prompt in enumerate(prompts(5))]
        for i, (watch, prompt) in enumerate(zip(watches, prompts(5), strict=True)):
            same(watch.wait(), alone(model, prompt, max_tokens=20 + 5 * i))
