"""lm-evaluation-harness over HTTP: log-likelihoods of a server are those of the model itself."""

import pytest

from mlx_zip import load
from mlx_zip.engine.mlx.mlx_engine import open_engine
from support.http_server import serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("tenacity", reason="lm-eval[api] is not installed")

PAIRS = [
    ("Once upon a time there was a little girl named", " Lily. She loved to play outside."),
    ("The dog was very happy. The dog was very", " happy"),
    ("The dog was very happy. The dog was very", " sad and he was very"),
    ("One day", ", a boy named Tim went to the park. One day, a boy named Tim went to the park."),
]


@pytest.mark.slow
def test_log_likelihoods_over_http_are_those_of_the_model():
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # pyright: ignore[reportMissingImports]

    from mlx_zip.evaluation.lm_eval_model import ZipLM
    from mlx_zip.named import bundled_model_folder

    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    # a canonical model lets any id follow a context, and a server does not know where the context ends
    model, tokenizer = load("stories", canonical=False)
    expected = ZipLM(model, tokenizer).loglikelihood(asked)
    with open_engine("stories", canonical=False) as engine, serving(engine) as served:
        client = LocalCompletionsAPI(
            base_url=f"{served.url}/v1/completions",
            model="stories",
            tokenizer=str(bundled_model_folder("stories")),
            tokenizer_backend="huggingface",
            add_bos_token=True,
            batch_size=2,
        )
        found = client.loglikelihood(asked)
    for (logprob, greedy), (other, best) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(other, abs=1e-3)
        assert greedy == best
