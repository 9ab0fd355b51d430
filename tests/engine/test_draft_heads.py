"""Draft heads: a trained layer proposes ids, hypertokens too, and what is emitted is what it would be without."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_zip.codec import compress
from mlx_zip.engine import Finished
from mlx_zip.engine.drafts import Drafter, choose_drafts
from mlx_zip.engine.mlx.draft_model import HeadSource
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.pass_costs import WIDTHS, PassCosts
from mlx_zip.errors import GenerationError
from mlx_zip.models.draft_head import DraftHead, HeadedModel, Proposer, _OutputRows
from mlx_zip.models.rows.zip_state import find_zip_state
from support import tiny
from support.chip_costs import CHIPS
from support.generating import ENDLESS, plain_model
from support.serving import ask, at_once, tiny_engine
from support.slow_cases import slow_but
from support.steps import decode_steps

PROMPT = tiny.base_ids(20) * 3


def give_head(model):
    mx.random.seed(1)
    head = DraftHead(HeadedModel(model).width, 32)
    model.draft_head = SimpleNamespace(head=head, head_for=lambda model: head)
    return model


def model_with_head(family, **changes):
    return give_head(plain_model() if family == "plain" else tiny.tiny_model(family, **changes).eval())


def answer_of(model, prompt=PROMPT, max_tokens=40, **options):
    return list(stream_generate(model, ENDLESS, prompt, max_tokens, **options))


@pytest.fixture
def oracle(monkeypatch):
    """Proposes the ids of an answer that is known, every `wrong`-th of them replaced, in place of a head's guesses.

    greedy: whether each id was chosen because it has the largest logit, so that the state that a head gets is checked.
    """

    class Oracle:
        answer, wrong, first, greedy, calls = (), 0, 0, True, 0

    def propose(self, h, last, cache, most):
        Oracle.calls += 1
        at = cache[0].offset - Oracle.first  # of the last id in the answer
        assert Oracle.answer[at] == last
        rows = _OutputRows(self.model, find_zip_state(cache))
        if Oracle.greedy and last < rows.end:
            assert int(mx.argmax(rows.logits(h)).item()) == last
        found = list(Oracle.answer[at + 1 : at + 1 + most])
        if Oracle.wrong:
            found = [(one + 1) % tiny.VOCAB if (at + i) % Oracle.wrong == 0 else one for i, one in enumerate(found)]
        return found, [1.0] * len(found)

    monkeypatch.setattr(Proposer, "propose", propose)
    return Oracle


def follow(oracle, model, alone, prompt=PROMPT):
    oracle.answer = [one.token for one in alone]
    hyper = hasattr(model, "row_source")
    oracle.first = len(compress(model.config.codec_params, prompt)[0]) if hyper else len(prompt)


CASES = [
    (family, mode, wrong, options)
    for family in ("llama", "phi3", "gemma2", "plain")
    for mode in (["none"] if family == "plain" else ["compressed", "base_token_end"])  # a plain model has no mode
    for wrong in (0, 4)
    for options in ({}, {"temp": 0.8, "seed": 3})
]
QUICK = [case for case in CASES if case[:3] in [("llama", "base_token_end", 4), ("plain", "none", 4)]]


@pytest.mark.parametrize(("family", "mode", "wrong", "options"), slow_but(CASES, *QUICK))
def test_ids_are_those_without_a_head(family, mode, wrong, options, oracle):
    model = model_with_head(family, **({} if family == "plain" else {"position_mode": mode}))
    alone = answer_of(model, **options)
    follow(oracle, model, alone)
    oracle.wrong, oracle.greedy = wrong, not options
    drafted = answer_of(model, draft="head", **options)
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert drafted[-1].accepted == sum(one.from_draft for one in drafted)
    assert drafted[-1].accepted > len(alone) * (0.3 if wrong else 0.6)


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_ids_are_those_without_a_head_where_steps_begin_ahead(family, oracle):
    model = model_with_head(family)
    alone = answer_of(model)
    follow(oracle, model, alone)
    oracle.wrong = 5
    ids = PROMPT if family == "plain" else compress(model.config.codec_params, PROMPT)[0]
    how = {"sampler": make_sampler(0), "max_steps": len(alone), "ahead": True, "draft": "head"}
    made = decode_steps(model, np.array(ids), make_prompt_cache(model), **how)
    assert [one for one, _ in made] == oracle.answer
    assert oracle.calls > 5


def test_a_step_that_began_ahead_gives_the_head_its_state(oracle, monkeypatch):
    model = model_with_head("llama")
    alone = answer_of(model, max_tokens=60)
    follow(oracle, model, alone)
    turns = iter(range(1000))
    monkeypatch.setattr("mlx_zip.engine.mlx.group.expects_draft", lambda drafters, held: next(turns) % 2 == 0)
    ids = compress(model.config.codec_params, PROMPT)[0]
    how = {"sampler": make_sampler(0), "max_steps": len(alone), "ahead": True, "draft": "head"}
    made = decode_steps(model, np.array(ids), make_prompt_cache(model), **how)
    assert [one for one, _ in made] == oracle.answer
    assert oracle.calls > 5


def test_canonical_decoding_excludes_the_same_ids(oracle):
    model = model_with_head("llama")
    model.row_source.config = replace(model.config, canonical=True)
    alone = answer_of(model, temp=0.7, seed=1)
    follow(oracle, model, alone)
    oracle.greedy = False
    drafted = answer_of(model, temp=0.7, seed=1, draft="head")
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert drafted[-1].accepted > 0


@pytest.mark.parametrize("policy", ["lru", "use-count"])
def test_ids_that_a_codebook_has_evicted_are_not_read(policy, oracle):
    sizes = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 24, "max_subtokens": tiny.MERGE}
    model = model_with_head("llama", compression={**sizes, "disabled_ids": [0, 1, 2], "policy": policy})
    alone = answer_of(model, max_tokens=70)
    follow(oracle, model, alone)
    oracle.wrong, oracle.greedy = 3, False
    drafted = answer_of(model, max_tokens=70, draft="head")
    assert [one.token for one in drafted] == [one.token for one in alone]


HEADED = [(family, draft) for family in ("llama", "plain") for draft in ("head", "auto")]


@pytest.mark.parametrize(("family", "draft"), slow_but(HEADED, ("llama", "head"), ("plain", "auto")))
def test_a_head_of_random_weights_changes_nothing(family, draft, monkeypatch):
    monkeypatch.setattr("mlx_zip.engine.mlx.draft_model.LEAST_LIKELY", 0)
    model = model_with_head(family)
    for options in ({}, {"temp": 0.9, "seed": 5}):
        alone, drafted = (answer_of(model, max_tokens=25, draft=one, **options) for one in ("off", draft))
        assert [one.token for one in drafted] == [one.token for one in alone]


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_session_goes_on_as_without_a_head(family, monkeypatch):
    monkeypatch.setattr("mlx_zip.engine.mlx.draft_model.LEAST_LIKELY", 0)

    def turns(draft):
        with tiny_engine(family, run={"draft": draft}, change=give_head) as engine:
            first = ask(engine, PROMPT, max_tokens=20)[1].wait()
            prompt = [*PROMPT, *first.base_ids, 5, 6, 7]
            second = ask(engine, prompt, max_tokens=20)[1].wait()
            together = at_once(engine, lambda: [ask(engine, [*PROMPT, 3 + i], max_tokens=9 + i)[1] for i in range(3)])
            found = [first, second, *(watch.wait() for watch in together)]
            assert all(isinstance(one.end, Finished) for one in found)
            return [one.ids for one in found], sum(one.end.counts.proposed for one in found)

    alone, drafted = turns("off"), turns("head")
    assert drafted[0] == alone[0]
    assert drafted[1] > 0 == alone[1]


def test_lookup_never_asks_a_head(oracle):
    model = model_with_head("llama")
    answer_of(model, draft="lookup")
    assert oracle.calls == 0


def test_auto_asks_a_head_where_its_ids_are_worth_their_pass(oracle, monkeypatch):
    model = model_with_head("plain")
    alone = answer_of(model)
    follow(oracle, model, alone)
    accepted = []
    for curve in ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}):
        monkeypatch.setattr(PassCosts, "ratios", lambda self, held, rows, curve=curve: curve)
        monkeypatch.setattr("mlx_zip.engine.mlx.draft_model.HeadSource.seconds_per_id", lambda self: 0.0)
        monkeypatch.setattr("mlx_zip.engine.draft_sources.LookupSource.acceptance_share", lambda self: 0.0)
        drafted = answer_of(model, draft="auto")
        assert [one.token for one in drafted] == oracle.answer
        accepted.append(drafted[-1].accepted)
    assert accepted[0] > len(alone) // 2
    assert accepted[1] < 8


def rates_of_answers(monkeypatch, curve, head_s, are_right, kept):
    """Simulates answers of 75 passes, of 9 ms over one id; returns the ids per second of each, 1 without drafts.

    head_s: how long the head takes per id. are_right: per answer, whether its ids are accepted. kept: whether an
    earlier run has found what passes cost.
    """
    now, costs, rates = [0.0], PassCosts(), []
    monkeypatch.setattr("mlx_zip.engine.mlx.draft_model.time.perf_counter", lambda: now[0])

    def propose(h, last, cache, most):
        now[0] += head_s * most
        return [5] * most, [1.0] * most

    for width in WIDTHS[:4] if kept else ():
        for length in range(8, 28):
            costs.note_pass(width, 1 << length, 0.009 * curve[width], known=True)
    for is_right in are_right:
        head, began, ids = HeadSource(SimpleNamespace(propose=propose), costs), now[0], 0
        drafter = Drafter([], costs, head)
        drafter.note_body_output(mx.zeros(1), 5, ())
        for _ in range(75):
            [(source, width)] = choose_drafts([drafter], [15], 100)
            draft = None if source is None else drafter.propose(source, 5, None, width)
            proposed = 0 if draft is None else len(draft.ids)
            now[0] += 0.009 * curve[1 + proposed]
            costs.note_pass(1 + proposed, 100, 0.009 * curve[1 + proposed])
            if draft is not None:
                draft.taken = proposed * is_right
                draft.end()
            ids += 1 + proposed * is_right
        rates.append(0.009 * ids / (now[0] - began))
    return rates


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_trials_of_a_head_are_paid_for_where_its_ids_are_not_worth_their_pass(is_right, kept, monkeypatch):
    rates = rates_of_answers(monkeypatch, {1: 1.0, 2: 1.9, 4: 3.6, 8: 7.2}, 0.005, [is_right] * 6, kept)
    assert rates[0] == pytest.approx(1.0)
    assert all(np.mean(rates[: n + 1]) > 0.985 for n in range(6))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("chip", [one for one in CHIPS if not one.startswith("M3")])  # where two ids cost two passes
def test_a_head_whose_ids_are_worth_their_pass_is_used_from_the_third_answer_on(chip, kept, monkeypatch):
    curve = CHIPS[chip]
    rates = rates_of_answers(monkeypatch, curve, 0.0005, [True] * 6, kept)
    assert all(rate > 0.9 * 4 / (curve[4] + 3 / 18) for rate in rates[2:])


def test_a_head_that_is_seldom_right_is_left_alone_and_tried_again_later(monkeypatch):
    rates = rates_of_answers(monkeypatch, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}, 0.0005, [False] * 40 + [True] * 40, True)
    assert np.mean(rates[:10]) > 0.99
    assert all(rate > 0.995 for rate in rates[1:40])
    assert all(rate > 2 for rate in rates[40:])


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_model_without_a_head_refuses_to_use_one(family):
    model = plain_model() if family == "plain" else tiny.tiny_model(family).eval()
    with pytest.raises(GenerationError, match="this model has no draft head") as caught:
        answer_of(model, draft="head")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma2", "plain"])
def test_a_head_proposes_the_ids_that_its_states_say(family):
    model = model_with_head(family)
    headed, cache = HeadedModel(model), make_prompt_cache(model)
    ids = np.array(PROMPT if family == "plain" else compress(model.config.codec_params, PROMPT)[0])
    logits, h = headed.read(mx.array(ids[None].astype(np.int32)), cache)
    last, head = int(mx.argmax(logits[0, -1]).item()), model.draft_head.head
    rows = np.array(headed.matrix.weight)[: headed.vocab_size]
    if family != "plain":
        book = cache[-1].books[0]
        rows = np.concatenate([rows, np.array(model.encode_rows(*book.padded_entries(0, len(book)))[1])])
    state, one, wanted = h[0, -1], last, []
    for _ in range(4):
        state = head(state, mx.array(rows[one]))
        one = int((rows @ np.array(state)).argmax())
        wanted.append(one)
    found, shares = Proposer(head, headed).propose(h[:, -1:], last, cache, 4)
    assert found == wanted
    assert all(0 < share <= 1 for share in shares)
