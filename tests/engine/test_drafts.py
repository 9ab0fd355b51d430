"""Drafts: several proposed ids per pass, and what is emitted is what it would be without them."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_zip.codec import compress
from mlx_zip.engine import Failed, Finished
from mlx_zip.engine.draft_sources import Lookup, LookupSource
from mlx_zip.engine.drafts import Drafter, choose_drafts
from mlx_zip.engine.mlx.drafted import DraftedPass
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.pass_costs import PassCosts
from mlx_zip.engine.request import propose_drafts
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import GenerationError, ModelError
from support import plain_families, tiny
from support.generating import ENDLESS, never_ending, plain_model
from support.serving import ask, at_once, tiny_engine
from support.slow_cases import slow_but
from support.steps import decode_steps

PROMPT = tiny.base_ids(20) * 3


class Oracle:
    """Proposes the ids of an answer that is known, with every `wrong`-th of them replaced; in place of `Lookup`."""

    answer: Sequence[int] = ()
    wrong = 0

    def __init__(self, base_ids=()):
        self.at = 0

    def append(self, base_ids):
        self.at += len(base_ids)

    def match_length(self):
        return self.propose(0)[1]

    def propose(self, most):
        found = self.answer[self.at : self.at + most]
        if self.wrong:
            found = [(one + 1) % tiny.VOCAB if (self.at + i) % self.wrong == 0 else one for i, one in enumerate(found)]
        return np.array(found, np.uint32), 9 if self.at < len(self.answer) else 0


@pytest.fixture
def oracle(monkeypatch):
    class Own(Oracle):
        pass

    monkeypatch.setattr("mlx_zip.engine.draft_sources.Lookup", Own)
    return Own


def answer_of(model, prompt=PROMPT, max_tokens=40, **options):
    return list(stream_generate(model, ENDLESS, prompt, max_tokens, **options))


def assert_equal_answers(drafted, alone):
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert "".join(one.text for one in drafted) == "".join(one.text for one in alone)
    assert drafted[-1].finish_reason == alone[-1].finish_reason
    for one, other in zip(drafted, alone, strict=True):
        np.testing.assert_array_equal(np.isfinite(one.logprobs), np.isfinite(other.logprobs))
        finite = np.isfinite(np.array(one.logprobs))
        np.testing.assert_allclose(
            np.array(one.logprobs)[finite], np.array(other.logprobs)[finite], rtol=1e-5, atol=5e-5
        )


# ---- the text that is looked up


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, ([3, 4], 2)),
        ([7, 8, 1, 7, 8, 2, 7, 8], 1, ([2], 2)),  # the last occurrence
        ([5, 1, 2, 3, 9, 4, 1, 2, 3, 8, 5, 1, 2, 3], 1, ([9], 4)),  # the longest one
        ([1, 2, 1, 2], 5, ([1, 2, 1, 2, 1], 2)),  # beyond the end it goes on from the occurrence
        ([1, 2, 3], 4, ([], 0)),
        ([], 4, ([], 0)),
        ([1], 4, ([], 0)),
        ([6] * 100, 3, ([6, 6, 6], 32)),
    ],
)
def test_what_followed_the_longest_common_run_is_proposed(text, most, expected):
    lookup = Lookup()
    for one in text:
        lookup.append([one])
    found, match = lookup.propose(most)
    assert (found.tolist(), match) == expected
    whole, match = Lookup(text).propose(most)
    assert (whole.tolist(), match) == expected


def test_fewer_ids_are_proposed_after_a_refusal_and_more_after_a_draft_that_was_right():
    drafter = Drafter([LookupSource([1, 2, 3, 4, 5] * 8)])
    [(source, width)] = choose_drafts([drafter], [100], 0)
    draft, widths = drafter.propose(source, 1, None, width), []
    for proposed, accepted in [(7, 7), (14, 14), (15, 2), (3, 0), (1, 1), (2, 2)]:
        assert len(draft.ids) == proposed
        draft.taken = accepted
        draft.end()
        [(source, width)] = choose_drafts([drafter], [100], 0)
        draft = drafter.propose(source, 1, None, width)
        widths.append(len(draft.ids))
    assert widths == [14, 15, 3, 1, 2, 4]
    assert drafter.proposed == 42 + 4


# ---- what is emitted


def models(family, **changes):
    return plain_model() if family == "plain" else tiny.tiny_model(family, **changes).eval()


OPTIONS = {
    "greedy": {},
    "sampled": {"temp": 0.8, "seed": 3},
    "filtered": {"temp": 1.1, "top_k": 9, "min_p": 0.02, "top_p": 0.9, "seed": 4},
    "penalized": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 2.0}},
}
MODES = {"plain": ["none"]}  # a plain model has no position mode


@functools.cache
def answer_without_a_draft(family, mode="compressed", options="greedy"):
    """The answer to PROMPT of such a model, computed once; each test drafts with a model of its own."""
    return answer_of(model_of(family, mode), **OPTIONS[options])


def model_of(family, mode="compressed"):
    return models(family) if family == "plain" else models(family, position_mode=mode)


CASES = [
    (family, mode, wrong, options)
    for family in ("llama", "phi3", "gemma2", "qwen3", "plain")
    for i, mode in enumerate(MODES.get(family, ["compressed", "base_token_end"]))
    for j, wrong in enumerate((0, 5))
    for k, options in enumerate(OPTIONS)
    if family in ("plain", "llama") or (i + j + k) % 2 == 0  # all of two families; every two values of the others
]
QUICK = [  # llama and plain models with each of the options, which also meet each `wrong`
    ("llama", "compressed", 0, "greedy"),
    ("llama", "base_token_end", 5, "greedy"),
    ("llama", "base_token_end", 0, "sampled"),
    ("llama", "compressed", 5, "filtered"),
    ("llama", "compressed", 0, "penalized"),
    ("plain", "none", 0, "greedy"),
    ("plain", "none", 5, "sampled"),
    ("plain", "none", 0, "filtered"),
    ("plain", "none", 5, "penalized"),
]


@pytest.mark.parametrize(("family", "mode", "wrong", "options"), slow_but(CASES, *QUICK))
def test_ids_and_log_probabilities_are_those_without_a_draft(family, mode, wrong, options, oracle):
    model, alone = model_of(family, mode), answer_without_a_draft(family, mode, options)
    oracle.answer, oracle.wrong = [one for response in alone for one in response.base_ids], wrong
    drafted = answer_of(model, draft="lookup", **OPTIONS[options])
    assert_equal_answers(drafted, alone)
    if not wrong and family == "plain":
        assert drafted[-1].accepted > len(alone) // 2
    assert sum(one.from_draft for one in drafted) == drafted[-1].accepted


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_bodies_that_run_ahead_take_turns_with_drafts(family, oracle):
    model, alone = models(family), answer_without_a_draft(family)
    oracle.answer, oracle.wrong = [one for response in alone for one in response.base_ids], 7
    ids = PROMPT if family == "plain" else compress(model.config.codec_params, PROMPT)[0]
    cache = make_prompt_cache(model)
    made = decode_steps(
        model,
        np.array(ids),
        cache,
        sampler=make_sampler(0),
        max_steps=len(alone),
        ahead=True,
        draft="lookup",
    )
    assert [one for one, _ in made] == [one.token for one in alone]


def test_ids_with_hypertokens_are_looked_up_as_base_ids():
    model, sampler = models("llama"), make_sampler(0)
    ids = compress(model.config.codec_params, PROMPT)[0]
    assert max(ids) >= tiny.VOCAB
    alone, drafted = (
        [
            one
            for one, _ in decode_steps(model, ids, make_prompt_cache(model), sampler=sampler, max_steps=30, draft=draft)
        ]
        for draft in ("off", "lookup")
    )
    assert drafted == alone


def test_canonical_decoding_excludes_the_same_ids(oracle):
    model = models("llama")
    model.row_source.config = replace(model.config, canonical=True)
    alone = answer_of(model, temp=0.7, seed=1)
    oracle.answer, oracle.wrong = [one for response in alone for one in response.base_ids], 6
    assert_equal_answers(answer_of(model, temp=0.7, seed=1, draft="lookup"), alone)


@pytest.mark.parametrize("policy", ["lru", "use-count"])
def test_codebooks_that_evict_take_drafts(policy, oracle):
    sizes = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 24, "max_subtokens": tiny.MERGE}
    model = models("llama", compression={**sizes, "disabled_ids": [0, 1, 2], "policy": policy})
    alone = answer_of(model, max_tokens=90)
    oracle.answer = [one for response in alone for one in response.base_ids]
    assert_equal_answers(answer_of(model, max_tokens=90, draft="lookup"), alone)


@pytest.mark.parametrize("start", slow_but([10, 70, 75, 5000], 10, 70, 5000))
def test_kv_caches_are_quantized_after_the_same_id(start, oracle):
    model = wide_plain_model()
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    alone = answer_of(model, **options)
    oracle.answer = [one for response in alone for one in response.base_ids]
    drafted = answer_of(model, draft="lookup", **options)
    assert_equal_answers(drafted, alone)
    assert drafted[-1].accepted > 0


def wide_plain_model():
    mx.random.seed(0)
    config = {**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40, "head_dim": 32}
    return llama.Model(llama.ModelArgs.from_dict(config))


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_no_id_is_proposed_where_longropes_factors_would_change(mode, oracle):
    model = models("phi3", position_mode=mode)
    border, reached = model.traits.long_context, []
    assert border is not None
    for before in range(2, 26, 3):
        prompt = tiny.base_ids(border - before, seed=before)
        alone = answer_of(model, prompt, max_tokens=before + 8)
        oracle.answer = [one for response in alone for one in response.base_ids]
        rooms = []

        def noted(requests, last, most, rooms=rooms):
            [draft], request, book = propose_drafts(requests, last, most), requests[0], requests[0].book.copy()
            found = [] if draft is None else draft.ids
            book.push([last[0], *found])
            end = book.mark() if mode == "compressed" else book.base_length
            rooms.append(not found or request.needs_long_factors_for(last[0]) or end <= border)
            return [draft]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mlx_zip.engine.mlx.group.propose_drafts", noted)
            answer_of(model, prompt, max_tokens=before + 8, draft="lookup")
        assert all(rooms)
        reached += rooms
    assert reached


def test_auto_tries_a_draft_where_steps_begin_ahead(oracle):
    model = models("plain")
    oracle.answer = [one.token for one in answer_without_a_draft("plain")]
    assert answer_of(model, draft="auto")[-1].accepted > 0


def test_nothing_is_kept_of_requests_whose_prompts_failed_together():
    prompts, broken = [tiny.base_ids(20, seed) for seed in (1, 2)], []

    def change(model):
        kind, real = type(model), type(model).__call__

        def call(self, ids, *args, **options):
            logits = real(self, ids, *args, **options)
            if self is model and broken and ids.shape[0] > 1:
                broken.clear()
                raise ModelError("broken")
            return logits

        undo.setattr(kind, "__call__", call)

    with pytest.MonkeyPatch.context() as undo, tiny_engine(change=change, sessions=SessionOptions()) as engine:
        wanted = ask(engine, [*prompts[0], 5], max_tokens=5, keep=False)[1].wait()
        broken.append(True)
        for watch in at_once(engine, lambda: [ask(engine, prompt, max_tokens=5)[1] for prompt in prompts]):
            assert isinstance(watch.wait().end, Failed)
        assert not broken
        again = ask(engine, [*prompts[0], 5], max_tokens=5)[1].wait()
        assert again.end.counts.cached_tokens == 0
        assert again.ids == wanted.ids


# ---- ends, caches and engines


def test_a_stop_an_eos_and_a_limit_inside_a_draft_end_the_answer_there(oracle):
    model, whole = models("plain"), answer_without_a_draft("plain")
    oracle.answer = [one.token for one in whole]
    for limit in range(1, 12):
        drafted = answer_of(model, max_tokens=limit, draft="lookup")
        assert [one.token for one in drafted] == oracle.answer[:limit]
        assert drafted[-1].finish_reason == "length"
    stop = whole[6].text
    assert stop
    drafted = answer_of(model, stop=stop, draft="lookup")
    assert [one.text for one in drafted] == [one.text for one in answer_of(model, stop=stop)]
    tokenizer = never_ending()
    tokenizer._eos_token_ids = {oracle.answer[5]}
    ends = [
        [one.token for one in stream_generate(model, tokenizer, PROMPT, 40, draft=draft)] for draft in ("off", "lookup")
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_an_answer_that_ends_inside_a_draft_counts_every_accepted_id(family, oracle):
    with tiny_engine(family) as engine:
        oracle.answer = ask(engine, PROMPT, max_tokens=30)[1].wait().base_ids
    with tiny_engine(family, run={"draft": "lookup"}) as engine:
        for limit in range(2, 20, 3):
            watch = ask(engine, PROMPT, max_tokens=limit)[1].wait()
            assert watch.base_ids == oracle.answer[:limit]
            assert watch.end.counts.accepted == sum(one.from_draft for one in watch.emitted)
            assert watch.end.counts.accepted <= watch.end.counts.proposed


def test_an_interrupt_between_two_layers_of_a_drafted_pass_leaves_the_layers_of_a_plain_cache_equal(
    oracle, monkeypatch
):
    model = models("plain")
    oracle.answer = [one.token for one in answer_without_a_draft("plain")]
    cache, found, real = make_prompt_cache(model), [], llama.TransformerBlock.__call__

    def interrupted(self, x, *args, **options):
        if self is model.layers[1] and 1 < x.shape[1] <= 16:
            raise KeyboardInterrupt
        return real(self, x, *args, **options)

    monkeypatch.setattr(llama.TransformerBlock, "__call__", interrupted)
    made = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=cache, draft="lookup")
    with pytest.raises(KeyboardInterrupt):
        found.extend(response.token for response in made)
    assert {entry.size() for entry in cache} == {len(PROMPT) + len(found)}


class EvenThenOdd:
    """A constraint: even and odd base ids take turns."""

    def __init__(self):
        self.count = 0

    def mask(self):
        return np.arange(tiny.VOCAB) % 2 == self.count % 2

    def accepts(self, base_ids):
        return all(one % 2 == (self.count + i) % 2 for i, one in enumerate(base_ids))

    def push(self, base_ids):
        self.count += len(base_ids)


@pytest.mark.parametrize("sampling", [{}, {"temp": 0.9, "seed": 2}])
@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_constraint_and_the_likeliest_ids_are_those_without_a_draft(family, sampling, oracle):
    def answer(draft):
        with tiny_engine(family, run={"draft": draft}) as engine:
            asked = {"constraint": EvenThenOdd(), "sampling": sampling, "top_logprobs": 3}
            return ask(engine, PROMPT, max_tokens=30, **asked)[1].wait()

    alone = answer("off")
    oracle.answer = alone.base_ids
    drafted = answer("lookup")
    assert drafted.ids == alone.ids
    assert drafted.end.counts.accepted > drafted.end.counts.steps // 2
    for one, other in zip(drafted.emitted, alone.emitted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=5e-5)
        assert [likely.base_ids for likely in one.likely] == [likely.base_ids for likely in other.likely]


CALLS = [(family, call) for family in ("llama", "plain") for call in range(3, 8)]


@pytest.mark.parametrize(
    ("family", "call"), slow_but(CALLS, ("llama", 3), ("plain", 4), ("llama", 5), ("plain", 6), ("llama", 7))
)
def test_an_interrupt_in_a_pass_leaves_the_callers_cache_with_what_was_yielded(family, call, oracle, monkeypatch):
    model = models(family)
    oracle.answer = [one for response in answer_without_a_draft(family) for one in response.base_ids]
    cache, calls, found, real = make_prompt_cache(model), [], [], type(model).__call__

    def interrupted(self, *args, **options):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(type(model), "__call__", interrupted)
    made = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=cache, draft="lookup")
    with pytest.raises(KeyboardInterrupt):
        found.extend(response.token for response in made)
    read = len(compress(model.config.codec_params, PROMPT)[0]) if family == "llama" else len(PROMPT)
    assert {entry.size() for entry in cache} == {read + len(found)}


STOPS = [(family, stops_after) for family in ("llama", "plain") for stops_after in (1, 3, 6, 14)]


@pytest.mark.parametrize(
    ("family", "stops_after"), slow_but(STOPS, ("llama", 1), ("plain", 3), ("llama", 6), ("plain", 14))
)
def test_a_callers_cache_holds_what_was_yielded_and_nothing_more(family, stops_after, oracle):
    model, alone = models(family), answer_without_a_draft(family)
    oracle.answer = [one for response in alone for one in response.base_ids]
    cache, other = make_prompt_cache(model), make_prompt_cache(model)
    made = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=cache, draft="lookup")
    for _ in range(stops_after):
        next(made)
    between = copy.deepcopy(cache)
    made.close()
    plain = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=other)
    for _ in range(stops_after):
        next(plain)
    plain.close()
    for one in (cache, between):
        assert [entry.size() for entry in one] == [entry.size() for entry in other]
    goes_on = [
        [one.token for one in stream_generate(model, ENDLESS, [5, 6, 7], 8, prompt_cache=held)]
        for held in (other, cache, between)
    ]
    assert goes_on[0] == goes_on[1] == goes_on[2]


def test_rows_that_a_draft_has_encoded_are_not_encoded_again(oracle):
    model, encoded, alone = models("phi3"), [], answer_without_a_draft("phi3")
    oracle.answer = [one for response in alone for one in response.base_ids]

    class Counting(DraftedPass):
        def add_chosen_to_cache(self, chosen):
            found = super().add_chosen_to_cache(chosen)
            if found:
                encoded.append(self._state.has_all_output_rows())
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_zip.engine.mlx.group.DraftedPass", Counting)
        answer_of(model, draft="lookup")
    assert encoded
    assert all(encoded)


def test_an_engine_gives_the_same_with_drafts_alone_and_in_company():
    prompts = [tiny.base_ids(20, i) * 3 for i in range(4)]
    with tiny_engine("plain") as engine:
        expected = [ask(engine, prompt, max_tokens=30)[1].wait().ids for prompt in prompts]
    with tiny_engine("plain", run={"draft": "lookup"}) as engine:
        first = ask(engine, prompts[0], max_tokens=30)[1].wait()
        assert first.ids == expected[0]
        assert isinstance(first.end, Finished)
        assert 0 < first.end.counts.accepted <= first.end.counts.proposed
        assert sum(one.from_draft for one in first.emitted) == first.end.counts.accepted
        watches = at_once(engine, lambda: [ask(engine, prompt, max_tokens=30)[1] for prompt in prompts])
        assert [watch.wait().ids for watch in watches] == expected
        later = ask(engine, prompts[1], max_tokens=30)[1]
        same_again = ask(engine, prompts[2], max_tokens=20)[1]
        assert later.wait().ids == expected[1]
        assert same_again.wait().ids == expected[2][:20]


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_auto_proposes_by_what_passes_cost_and_emits_the_same(family, oracle, monkeypatch):
    model, alone = models(family), answer_without_a_draft(family)
    oracle.answer = [one for response in alone for one in response.base_ids]
    accepted = []
    for curve in ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}):
        monkeypatch.setattr(PassCosts, "ratios", lambda self, held, rows, curve=curve: curve)
        drafted = answer_of(model, draft="auto")
        assert_equal_answers(drafted, alone)
        accepted.append(drafted[-1].accepted)
    assert accepted[0] > accepted[1]
    assert accepted[1] <= 7  # a trial


def test_passes_of_an_answer_are_timed_by_their_width(oracle):
    model = models("plain")
    oracle.answer = [one.token for one in answer_without_a_draft("plain")]
    answer_of(model, draft="auto")
    answer_of(model, draft="lookup")
    served = Served(model, ENDLESS, RunOptions())
    assert {1, 8, 16} <= served.pass_costs.ratios(100).keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": "magic"}, "draft (--draft) must be one of off, lookup, head, auto, got 'magic'"),
        ({"draft": None}, "draft (--draft) must be one of off, lookup, head, auto, got None"),
    ],
)
def test_drafts_that_cannot_be_are_refused(options, said):
    with pytest.raises(GenerationError, match="draft") as caught:
        answer_of(plain_model(), **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", slow_but(list(plain_families.FAMILIES), "qwen2", "gemma3", "qwen3_next"))
def test_answers_of_every_kind_of_cache_are_those_without_a_draft(name, oracle):
    model = plain_families.plain_family(name)
    alone = answer_of(model, max_tokens=24)
    oracle.answer, oracle.wrong = [one.token for one in alone], 7
    drafted = answer_of(model, max_tokens=24, draft="lookup")
    assert_equal_answers(drafted, alone)
    assert (drafted[-1].accepted > 0) == (name in ("llama", "qwen2"))


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_request_that_outgrows_the_kv_caches_ends_after_the_same_id(family, oracle):
    per_id = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width of a head, float32
    ends = []
    for draft in ("off", "lookup"):
        with tiny_engine(family, run={"draft": draft}, max_kv_bytes=120 * per_id) as engine:
            ends.append(ask(engine, PROMPT, max_tokens=-1)[1].wait())
            oracle.answer = ends[0].base_ids
    assert ends[0].ids == ends[1].ids
    assert ends[1].end.counts.accepted > 0


def test_caches_that_cannot_be_trimmed_get_no_draft():
    model = plain_model()
    options = {"max_kv_size": 32, "prompt": PROMPT}
    drafted, alone = answer_of(model, draft="lookup", **options), answer_of(model, **options)
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert drafted[-1].accepted == 0
