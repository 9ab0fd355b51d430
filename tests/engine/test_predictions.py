"""Predictions: a text that the answer will probably have is proposed, and changes nothing but the number of passes."""

from functools import partial

import numpy as np
import pytest

from mlx_zip.engine import Submission
from mlx_zip.engine.draft_sources import PredictionSource
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import GenerationError
from support import tiny
from support.serving import Watch, ask, at_once, tiny_engine
from support.slow_cases import slow_but

PROMPT = tiny.base_ids(20) * 3
LONG = 40


def source_after(prediction, answer):
    """Returns a source of this prediction that has heard of this answer, id by id."""
    source = PredictionSource(prediction)
    for one in answer:
        source.append([one])
    return source


# ---- what is proposed


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], [1, 2, 3]),  # from the beginning on
        ([1, 2], [3, 4, 5]),  # along with the answer
        ([1, 2, 9], []),  # after a difference nothing
        ([1, 2, 9, 4, 5], []),  # two ids in common may be chance
        ([1, 2, 9, 4, 5, 6], [7, 8, 4]),  # three are not
        ([1, 9, 9, 2, 3, 4], [5, 6, 7]),  # something was put in
        ([1, 2, 3, 4, 8, 4, 5], [9]),  # something was left out: most of the last ids stand there
        ([1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 9], []),  # the end
        ([9, 9, 9, 1, 2, 3], [4, 5, 6]),  # words of the model before it
    ],
)
def test_the_prediction_goes_on_where_the_answer_is(answer, expected):
    prediction = [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 9]
    source = source_after(prediction, answer)
    assert source.propose(3).tolist() == expected
    assert (source.acceptance_share() > 0) == bool(expected)
    whole = PredictionSource(np.array(prediction, np.uint32))
    whole.append(answer)
    assert whole.propose(3).tolist() == expected


def test_of_several_places_the_next_one_behind_the_difference_is_taken():
    lines = [5, 6, 7, 11, 5, 6, 7, 12, 5, 6, 7, 13]
    assert source_after(lines, [5, 6, 7, 11, 5, 9, 5, 6, 7]).propose(1).tolist() == [12]
    assert source_after(lines, [5, 6, 7, 11, 5, 6, 7, 12, 9, 5, 6, 7]).propose(1).tolist() == [13]
    assert source_after(lines, [*lines, 5, 6, 7]).propose(1).tolist() == [13]  # none is behind: the last one


def test_a_prediction_that_was_refused_is_less_sure_the_next_time():
    source = source_after([1, 2, 3, 4, 5, 6], [])
    before = source.acceptance_share()
    source.propose(4)
    source.note_draft(4, 0)
    assert source.acceptance_share() < before
    for one in range(50):
        source.append([100 + one])
    assert source.acceptance_share() == 0


# ---- what is emitted


def edited(answer):
    """Returns a prediction from which the answer differs: ids are put in, left out and replaced."""
    return [*answer[:9], 7, 7, *answer[9:20], *answer[24:29], 3, *answer[30:]]


SAMPLED = {"temp": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.1}


CASES = [
    (family, draft, sampling)
    for family in ("llama", "phi3", "qwen3", "plain")
    for draft, sampling in (("lookup", {}), ("lookup", SAMPLED), ("auto", {}))
]


@pytest.mark.parametrize(
    ("family", "draft", "sampling"),
    slow_but(CASES, ("llama", "lookup", SAMPLED), ("llama", "auto", {}), ("plain", "lookup", {})),
)
def test_an_answer_is_the_same_with_any_prediction(family, draft, sampling):
    prompt = tiny.base_ids(40, 3)
    with tiny_engine(family) as engine:
        alone = ask(engine, prompt, max_tokens=LONG, sampling=sampling)[1].wait()
    predictions = [alone.base_ids, edited(alone.base_ids), tiny.base_ids(80, 9), [1], []]
    with tiny_engine(family, run={"draft": draft}) as engine:
        for prediction in predictions:
            watch = ask(engine, prompt, max_tokens=LONG, sampling=sampling, prediction=prediction)[1].wait()
            assert watch.ids == alone.ids
            assert watch.base_ids == alone.base_ids


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_right_prediction_saves_passes_and_is_counted_in_ids_and_base_tokens(family):
    with tiny_engine(family) as engine:
        alone = ask(engine, PROMPT, max_tokens=LONG)[1].wait()
    with tiny_engine(family, run={"draft": "lookup"}) as engine:
        watch = ask(engine, PROMPT, max_tokens=LONG, prediction=alone.base_ids)[1].wait()
        counts, figures = watch.end.counts, engine.figures()
    assert watch.base_ids == alone.base_ids
    assert counts.accepted > counts.steps // 2
    assert counts.accepted == sum(one.from_draft for one in watch.emitted)
    assert counts.accepted_tokens == sum(len(one.base_ids) for one in watch.emitted if one.from_draft)
    assert counts.accepted <= counts.proposed
    assert counts.accepted_tokens <= counts.proposed_tokens
    assert counts.proposed <= counts.proposed_tokens
    assert counts.passes == counts.steps - counts.accepted
    assert counts.base_tokens_per_pass == counts.base_tokens / counts.passes
    assert (figures.proposed, figures.accepted, figures.passes) == (counts.proposed, counts.accepted, counts.passes)


def test_without_drafts_a_prediction_is_taken_and_not_used():
    with tiny_engine("plain") as engine:
        alone = ask(engine, PROMPT, max_tokens=20)[1].wait()
        watch = ask(engine, PROMPT, max_tokens=20, prediction=alone.base_ids)[1].wait()
    assert watch.ids == alone.ids
    assert (watch.end.counts.proposed, watch.end.counts.accepted) == (0, 0)


def test_a_prediction_that_never_matches_is_proposed_once():
    prompt = tiny.base_ids(40, 3)
    with tiny_engine("plain", run={"draft": "lookup"}) as engine:
        without = ask(engine, prompt, max_tokens=LONG, keep=False)[1].wait()
        never = [next(one for one in range(tiny.VOCAB) if one not in without.base_ids)] * 500
        watch = ask(engine, prompt, max_tokens=LONG, keep=False, prediction=never)[1].wait()
    assert watch.ids == without.ids
    assert watch.end.counts.proposed - without.end.counts.proposed <= 7


def test_requests_with_predictions_that_run_together_get_their_own_answers():
    prompts = [tiny.base_ids(20, i) * 2 for i in range(3)]
    with tiny_engine("llama") as engine:
        alone = [ask(engine, prompt, max_tokens=20)[1].wait().base_ids for prompt in prompts]
    with tiny_engine("llama", run={"draft": "lookup"}) as engine:
        submit = lambda: [
            ask(engine, prompt, max_tokens=20, prediction=alone[i - 1])[1] for i, prompt in enumerate(prompts)
        ]
        assert [watch.wait().base_ids for watch in at_once(engine, submit)] == alone


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_request_cancelled_in_the_middle_of_a_draft_keeps_what_it_has_emitted(family):
    class Leaving(Watch):
        """Cancels the request at the `at`-th id that a draft had proposed."""

        def __init__(self, at):
            super().__init__()
            self.at = at

        def submit_to(self, engine, asked):
            self.engine, self.ticket = engine, engine.submit(asked, self)

        def __call__(self, event):
            super().__call__(event)
            if sum(one.from_draft for one in self.emitted) == self.at:
                self.engine.cancel(self.ticket)

    with tiny_engine(family) as without:
        alone = ask(without, PROMPT, max_tokens=LONG)[1].wait()
        asked = Submission(PROMPT, LONG, prediction=alone.base_ids)
        for at in (1, 2, 4):
            with tiny_engine(family, run={"draft": "lookup"}, sessions=SessionOptions()) as engine:
                watch = Leaving(at)
                at_once(engine, partial(watch.submit_to, engine, asked))
                emitted, counts = watch.wait().base_ids, watch.end.counts
                assert watch.end.reason == "cancelled"
                assert len(emitted) < len(alone.base_ids)
                assert emitted == alone.base_ids[: len(emitted)]
                assert counts.base_tokens == len(emitted)
                assert counts.accepted == sum(one.from_draft for one in watch.emitted)
                onward = ask(engine, [*PROMPT, *emitted, 5], max_tokens=8)[1].wait()
                assert onward.end.counts.cached_tokens >= len(PROMPT)
            assert ask(without, [*PROMPT, *emitted, 5], max_tokens=8)[1].wait().base_ids == onward.base_ids


# ---- what is refused


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ([5, tiny.VOCAB], f"prediction id {tiny.VOCAB} at index 1 is not a base id"),
        ([-1], "the prediction: "),
        ([0.5], "the prediction: "),
    ],
)
def test_a_prediction_of_what_are_no_base_ids_is_refused(prediction, said):
    with tiny_engine("plain") as engine, pytest.raises(GenerationError) as caught:
        ask(engine, PROMPT, prediction=prediction)
    assert str(caught.value).startswith(said)


def test_a_prediction_longer_than_any_answer_is_refused_in_one_line():
    with tiny_engine("plain") as engine:
        most = engine.info.max_prompt_tokens
        assert ask(engine, PROMPT, max_tokens=1, prediction=[5] * most)[1].wait().ids
        with pytest.raises(GenerationError) as caught:
            ask(engine, PROMPT, prediction=[5] * (most + 1))
    said = f"prediction: it has more than the {most} base tokens that an answer can have; shorten it"
    assert str(caught.value) == said
