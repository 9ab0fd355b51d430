"""How likely an engine says that a prompt is: as evaluation scores it, in parts, while other requests run."""

import threading

import numpy as np
import pytest

from mlx_zip.engine import Emitted
from mlx_zip.engine.mlx.scoring import compress_row, score_rows
from mlx_zip.errors import EngineStoppedError, GenerationError, PromptTooLongError
from mlx_zip.packs.pack import Pack
from support import tiny
from support.generating import plain_model
from support.serving import ask, both, tiny_engine

PACK = Pack((tuple(tiny.base_ids(60, 3)[:2]), (3, 4), (5, 6, 7), (9, 9)))
CASES = [("llama", {}), ("qwen3", {}), ("llama", {"canonical": True}), ("phi3", {"position_mode": "base_token_end"})]


def model_of(family, changes):
    return (plain_model() if family == "plain" else tiny.tiny_model(family, **changes)).eval()


@both
@pytest.mark.parametrize("pack", [None, PACK], ids=["", "pack"])
@pytest.mark.parametrize(("family", "changes"), [*CASES, ("plain", {})], ids=str)
def test_a_prompts_ids_are_as_likely_as_evaluation_says(family, changes, pack, kind):
    if family == "plain" and pack is not None:
        return
    model, prompt = model_of(family, changes), tiny.base_ids(60, 3)
    first, rest = np.array(prompt[:1], np.uint32), np.array(prompt[1:], np.uint32)
    row = compress_row(model, first, rest, pack=pack)
    (expected,) = score_rows(model, [row])
    with tiny_engine(family, model=changes, kind=kind, run={"prefill_step_size": 16}) as engine:
        found = list(engine.score_prompt_ids(prompt, 3, pack))
    assert [i for one in found for i in one.base_ids] == prompt
    assert [len(one.base_ids) for one in found] == row.spans.tolist()
    assert (found[0].logprob, found[0].likely) == (None, ())
    np.testing.assert_allclose([one.logprob for one in found[1:]], expected.logprobs, atol=1e-4)
    for one, greedy in zip(found[1:], expected.greedy, strict=True):
        assert len(one.likely) == 3
        assert (one.likely[0].base_ids == one.base_ids) == greedy
        assert one.likely[0].logprob >= one.likely[1].logprob >= one.likely[2].logprob
        for other in one.likely:
            if other.base_ids == one.base_ids:
                assert other.logprob == pytest.approx(one.logprob, abs=1e-6)
    if family != "plain":
        assert len(found) < len(prompt)


@both
def test_other_requests_go_on_between_two_parts(kind):
    with tiny_engine(kind=kind, run={"prefill_step_size": 4}) as engine:
        parts = engine.score_prompt_ids(tiny.base_ids(60, 3))
        first = next(parts)
        ids = ask(engine, tiny.base_ids(9, 1), max_tokens=5)[1].wait().ids
        assert sum(len(one.base_ids) for one in (first, *parts)) == 60
        assert ids == ask(engine, tiny.base_ids(9, 1), max_tokens=5)[1].wait().ids


@both
def test_the_figures_of_requests_are_those_without(kind):
    with tiny_engine(kind=kind) as engine:
        prompt = tiny.base_ids(30, 3)
        before = ask(engine, prompt, max_tokens=8)[1].wait()
        list(engine.score_prompt_ids(prompt))
        after = ask(engine, prompt, max_tokens=8)[1].wait()
        assert [event.id for event in before.events if isinstance(event, Emitted)] == after.ids
        assert engine.figures().requests == 2


@both
def test_what_no_request_may_have_is_refused_before_anything_is_read(kind):
    with tiny_engine(kind=kind, max_prompt_tokens=20) as engine:
        with pytest.raises(PromptTooLongError):
            engine.score_prompt_ids(tiny.base_ids(30, 3))
        with pytest.raises(GenerationError, match="empty"):
            engine.score_prompt_ids([])
        with pytest.raises(GenerationError, match="top_logprobs"):
            engine.score_prompt_ids([3], 1000)
        assert [one.base_ids for one in engine.score_prompt_ids([3])] == [(3,)]
    with pytest.raises(EngineStoppedError):
        engine.score_prompt_ids([3])


def test_an_engine_that_closes_ends_what_reads_a_prompt():
    engine = tiny_engine(run={"prefill_step_size": 4})
    parts = engine.score_prompt_ids(tiny.base_ids(60, 3))
    next(parts), next(parts)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join()
    with pytest.raises(EngineStoppedError):
        list(parts)
