"""Draft models: what a second model proposes changes how many passes an answer takes, and nothing else."""

import copy
import functools
import json
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip import cli
from mlx_zip.codec import compress
from mlx_zip.engine import Failed
from mlx_zip.engine.draft_sources import LookupSource
from mlx_zip.engine.drafts import Drafter, choose_drafts
from mlx_zip.engine.mlx.draft_model import DraftModel, DraftModelSource, load_draft_model
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.mlx_engine import MlxEngine, ServeOptions, open_engine
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.pass_costs import WEIGH_EVERY, PassCosts
from mlx_zip.errors import EngineError, GenerationError
from mlx_zip.named import bundled_model_folder
from support import tiny, tiny_text
from support.generating import ENDLESS, plain_model
from support.serving import ask, at_once
from support.slow_cases import slow_but

PROMPT = tiny.base_ids(20) * 2
SEEDED = {"temp": 0.9, "top_p": 0.95, "seed": 5}


def model_of(family, **changes):
    return plain_model() if family == "plain" else tiny.tiny_model(family, **changes).eval()


def other_plain_model():
    """A plain model with the same vocabulary and other weights: nearly all of its proposals are wrong."""
    mx.random.seed(1)
    config = {**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40}
    return llama.Model(llama.ModelArgs.from_dict(config))


def answer_of(model, prompt=PROMPT, max_tokens=30, **options):
    return list(stream_generate(model, ENDLESS, prompt, max_tokens, **options))


def ids_of(responses):
    return [one.token for one in responses]


def source_of(model, base_ids, width=3, vocab_size=tiny.VOCAB):
    return DraftModelSource(DraftModel(model), base_ids, width, vocab_size)


def greedy(model, base_ids, most):
    """The base ids that a model goes on with, read anew for each of its ids."""
    found, cache = [], make_prompt_cache(model)
    for response in stream_generate(model, ENDLESS, list(base_ids), max_tokens=most, prompt_cache=cache):
        found += response.base_ids
    return found[:most]


# ---- what is proposed


def test_a_source_proposes_what_its_model_would_write_after_any_text():
    model = model_of("plain")
    source, text = source_of(model, PROMPT), list(PROMPT)
    for taken, accepted in ((5, 3), (1, 1), (4, 0), (6, 6), (2, 1)):
        proposed = list(source.propose(taken))
        assert proposed == greedy(model, text, taken)
        emitted = [*proposed[:accepted], (proposed[-1] + 1) % tiny.VOCAB]
        source.append(emitted)
        text += emitted


@pytest.mark.parametrize("family", slow_but(["llama", "phi3", "gemma2", "qwen3"], "llama"))
def test_a_source_with_hypertokens_goes_on_after_what_was_refused(family):
    model = model_of(family)
    source, text = source_of(model, PROMPT), list(PROMPT)
    for taken, accepted in ((9, 3), (1, 1), (4, 0), (6, 6), (2, 1)):
        proposed = [one for _, one in zip(range(taken), source.propose(99), strict=False)]
        assert len(proposed) == taken
        if len(text) == len(PROMPT):
            assert proposed == greedy(model, text, taken)
        emitted = [*proposed[:accepted], (proposed[-1] + 1) % tiny.VOCAB]
        source.append(emitted)
        text += emitted
        next(source.propose(1))
        read = source._reader._state.books[0].base_ids().tolist()
        assert read == text[: len(read)]
        assert {entry.offset for entry in source._reader.kv} == {source._reader._state.offset}


def test_a_next_request_goes_on_from_what_the_last_one_read(monkeypatch):
    model, read = model_of("plain"), []
    drafts, real = DraftModel(model), type(model).__call__

    def counting(self, ids, **options):
        read.append(ids.shape[1])
        return real(self, ids, **options)

    first = DraftModelSource(drafts, PROMPT, 3, tiny.VOCAB)
    expected = list(first.propose(2))
    monkeypatch.setattr(type(model), "__call__", counting)
    beside = DraftModelSource(drafts, PROMPT, 3, tiny.VOCAB)
    assert list(beside.propose(2)) == expected  # it has a cache of its own
    assert sum(read) > len(PROMPT)
    del first, beside, read[:]
    later = DraftModelSource(drafts, [*PROMPT, *expected[:1]], 3, tiny.VOCAB)
    assert next(later.propose(1)) == expected[1]
    assert sum(read) < 3


def test_nothing_is_proposed_beyond_the_draft_models_context_and_of_ids_that_a_model_does_not_know():
    model = model_of("plain")
    full = source_of(model, tiny.base_ids(512))
    assert full.acceptance_share() == 0
    nearly_full = source_of(model, tiny.base_ids(510))
    assert len(list(nearly_full.propose(5))) == 2
    assert source_of(model, [*PROMPT, 40]).acceptance_share() == 0
    written = list(source_of(model, PROMPT).propose(8))
    known = max(written)
    assert list(source_of(model, PROMPT, vocab_size=known).propose(8)) == written[: written.index(known)]


def test_the_surest_source_proposes_and_each_has_its_own_number_of_ids():
    text = [*PROMPT, *PROMPT]
    source = source_of(model_of("plain"), text, width=2)
    drafter = Drafter([LookupSource(text), source])

    def proposed():
        [(source, width)] = choose_drafts([drafter], [100], 0)
        return drafter.propose(source, text[-1], None, width)

    draft = proposed()
    assert len(draft.ids) == 7  # a match of so many ids is surer than a model
    for _ in range(12):
        draft.end()
    draft = proposed()
    assert len(draft.ids) == 2
    for _ in range(40):
        draft.end()
    assert len(proposed().ids) == 1  # lookup again, which was refused last


def test_what_proposing_takes_counts_in_the_choice_of_the_width():
    costs = PassCosts()
    for width in (1, 2, 4, 8):
        costs.note_pass(width, 100, 1.0, known=True)
    costs.note_pass(1, 100, 1.0)
    widths = [costs.choose_draft_length([0.7], 100, 15, seconds) for seconds in (0.0, 0.1, 0.5, 0.9)]
    assert widths == [15, 3, 1, 0]
    assert costs.draft_pays([0.7], 100, 15, 0.1)
    assert not costs.draft_pays([0.7], 100, 15, 0.9)


def test_a_first_draft_waits_for_passes_that_pay_for_it():
    costs, widths = PassCosts(), []
    drafter = Drafter([source_of(model_of("plain"), PROMPT)], costs)
    for _ in range(200):
        widths.append(choose_drafts([drafter], [15], 100)[0][1])
        costs.note_pass(1, 100, 0.01)
    assert 100 < widths.index(1) < 160 + WEIGH_EVERY


# ---- what is emitted


SAMPLING = {"greedy": {}, "seeded": SEEDED}
CASES = [
    (family, drafts, draft, sampling)
    for family in ("plain", "llama", "phi3", "gemma2", "qwen3")
    for i, drafts in enumerate(("same", "plain", "llama"))
    for j, draft in enumerate(("off", "lookup", "auto"))
    for k, sampling in enumerate(SAMPLING)
    if family in ("plain", "llama") or (i + j + k) % 2 == 0  # all of two families; every two values of the others
]
QUICK = [
    ("plain", "same", "off", "greedy"),
    ("plain", "same", "lookup", "seeded"),
    ("plain", "same", "auto", "greedy"),
    ("llama", "same", "off", "seeded"),
    ("llama", "same", "lookup", "greedy"),
    ("llama", "same", "auto", "seeded"),
]


@functools.cache
def answer_without_a_draft_model(family, sampling):
    """An answer computed once; each test drafts with a model of its own."""
    return answer_of(model_of(family), **SAMPLING[sampling])


@pytest.mark.parametrize(("family", "drafts", "draft", "sampling"), slow_but(CASES, *QUICK))
def test_ids_are_those_without_a_draft_model(family, drafts, draft, sampling):
    model, alone = model_of(family), answer_without_a_draft_model(family, sampling)
    other = {"same": lambda: model_of(family), "plain": other_plain_model, "llama": partial(model_of, "llama")}
    drafted = answer_of(model, draft=draft, draft_model=other[drafts](), **SAMPLING[sampling])
    assert ids_of(drafted) == ids_of(alone)
    assert "".join(one.text for one in drafted) == "".join(one.text for one in alone)
    assert drafted[-1].finish_reason == alone[-1].finish_reason
    if drafts == "same" and draft == "off" and sampling == "greedy":
        assert drafted[-1].accepted > len(alone) // 4


@pytest.mark.parametrize("ids", [1, 2, 15])
def test_a_model_that_drafts_for_itself_saves_all_passes_that_the_number_of_ids_allows(ids):
    drafted = answer_of(model_of("plain"), draft_model=model_of("plain"), num_draft_tokens=ids)
    passes = len(drafted) - drafted[-1].accepted
    assert passes == 1 + -(-29 // (1 + ids))  # the prompt's pass gives one id


def test_a_stop_and_a_limit_inside_a_draft_end_the_answer_there():
    model, same = model_of("plain"), model_of("plain")
    alone = answer_of(model)
    for limit in range(1, 8):
        drafted = answer_of(model, max_tokens=limit, draft_model=same)
        assert ids_of(drafted) == ids_of(alone)[:limit]
        assert drafted[-1].finish_reason == "length"
    stop = alone[6].text
    assert [one.text for one in answer_of(model, stop=stop, draft_model=same)] == [
        one.text for one in answer_of(model, stop=stop)
    ]


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_a_callers_cache_holds_what_was_yielded_and_the_next_turn_is_the_same(family):
    model, drafts = model_of(family), model_of(family)
    turns = []
    for options in ({}, {"draft_model": drafts}):
        cache = make_prompt_cache(model)
        made = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=cache, **options)
        first = [next(made).token for _ in range(6)]
        between = copy.deepcopy(cache)
        made.close()
        held = [entry.size() for entry in cache]
        later = [ids_of(answer_of(model, [5, 6, 7], 12, prompt_cache=one, **options)) for one in (cache, between)]
        assert later[0] == later[1]
        turns.append((first, held, later))
    assert turns[0] == turns[1]


@pytest.mark.parametrize("family", ["llama", "plain"])
@pytest.mark.parametrize("call", [1, 4, 9])
def test_an_interrupt_in_a_draft_leaves_the_callers_cache_with_what_was_yielded(family, call):
    model, drafts, calls, found = model_of(family), plain_model(), [], []
    kind = type(drafts)

    class Interrupted(kind):
        def __call__(self, *args, **options):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            return super().__call__(*args, **options)

    drafts.__class__ = Interrupted
    cache = make_prompt_cache(model)
    made = stream_generate(model, ENDLESS, PROMPT, 60, prompt_cache=cache, draft_model=drafts)
    with pytest.raises(KeyboardInterrupt):
        found.extend(response.token for response in made)
    read = len(compress(model.config.codec_params, PROMPT)[0]) if family == "llama" else len(PROMPT)
    assert {entry.size() for entry in cache} == {read + len(found)}


# ---- engines


def engine_of(family, drafts, change=None, **run):
    def load():
        made = model_of(family), ENDLESS
        if drafts is None:
            return made
        draft_model = model_of(drafts)
        if change is not None:
            change(draft_model)
        return *made, draft_model

    return MlxEngine(load, "tiny", ServeOptions(run=RunOptions(**run)))


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


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_constraints_sessions_and_company_are_those_without_a_draft_model(family):
    def ids(engine):
        with engine:
            found = [ask(engine, PROMPT, max_tokens=20, constraint=EvenThenOdd(), sampling=SEEDED)[1].wait()]
            found += [ask(engine, PROMPT, max_tokens=20)[1].wait()]
            goes_on = [*PROMPT, *found[-1].base_ids, 5, 6]
            found += [ask(engine, goes_on, max_tokens=20)[1].wait()]
            together = [ask(engine, tiny.base_ids(12, seed), max_tokens=12)[1] for seed in (1, 2, 3)]
            return [watch.wait().ids for watch in (*found, *together)], found[1].end.counts.accepted

    alone, none = ids(engine_of(family, None))
    drafted, accepted = ids(engine_of(family, family, draft="lookup"))
    assert drafted == alone
    assert accepted > none == 0


def test_a_draft_model_that_fails_for_one_row_of_a_batch_leaves_the_others_their_answers():
    failing, prompts = [], [tiny.base_ids(12, seed) for seed in (1, 2, 3)]
    with engine_of("plain", None) as engine:
        expected = [ask(engine, prompt, max_tokens=15)[1].wait().ids for prompt in prompts]

    def fail_once(self, most, real=DraftModelSource.propose):
        if failing and self._text[:12].tolist() == prompts[1]:
            raise EngineError("the draft model failed")
        return real(self, most)

    with pytest.MonkeyPatch.context() as patch, engine_of("plain", "plain") as engine:
        patch.setattr(DraftModelSource, "propose", fail_once)
        failing.append(True)
        watches = at_once(engine, lambda: [ask(engine, prompt, max_tokens=15)[1] for prompt in prompts])
        assert [watch.wait().ids for watch in (watches[0], watches[2])] == [expected[0], expected[2]]
        assert isinstance(watches[1].wait().end, Failed)
        assert watches[0].end.counts.accepted > 0


def test_a_failure_of_the_draft_model_is_one_clear_error_of_its_request():
    failing = []

    def change(model):
        kind = type(model)

        class Failing(kind):
            def __call__(self, *args, **options):
                if failing:
                    raise RuntimeError("no such luck\nand more")
                return super().__call__(*args, **options)

        model.__class__ = Failing

    with engine_of("plain", "plain", change) as engine:
        wanted = ask(engine, PROMPT, max_tokens=15)[1].wait()
        failing.append(True)
        watch = ask(engine, PROMPT)[1].wait()
        assert isinstance(watch.end, Failed)
        assert str(watch.end.error) == "the draft model (--draft-model) failed: RuntimeError: no such luck"
        assert watch.ids == wanted.ids[: len(watch.ids)]
        failing.clear()
        assert ask(engine, PROMPT, max_tokens=15)[1].wait().ids == wanted.ids


# ---- what is refused


@pytest.mark.parametrize("number", [0, 16, 10_000, 2.0, True])
@pytest.mark.parametrize(
    "call", [partial(stream_generate, plain_model(), ENDLESS, "a"), partial(open_engine, "nowhere")]
)
def test_a_number_of_ids_that_cannot_be_is_refused_in_one_line(number, call):
    said = r"^num_draft_tokens \(--num-draft-tokens\) must be an integer from 1 to 15, got .*$"
    with pytest.raises(GenerationError, match=said):
        call(num_draft_tokens=number)


@pytest.mark.slow
def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_is_served():
    name = str(bundled_model_folder("stories-base"))
    with pytest.raises(GenerationError, match=r"^draft_model \(--draft-model\): .* has another vocabulary"):
        load_draft_model(name, tiny_text.byte_level())


def test_a_loaded_draft_model_with_many_more_ids_is_refused():
    config = {**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40 + 2000}
    larger = llama.Model(llama.ModelArgs.from_dict(config))
    with pytest.raises(GenerationError, match="it has a vocabulary of 2040 ids, the model that it would draft for"):
        answer_of(plain_model(), draft_model=larger)


def test_a_model_that_forgets_its_text_reads_the_next_one_anew():
    served = Served(plain_model(), ENDLESS, RunOptions(), plain_model())
    source = DraftModelSource(served.draft_model, PROMPT, 3, tiny.VOCAB)
    assert list(source.propose(2))
    served.clear_draft_cache()
    del source
    assert len(served.draft_model.reader_for(served)._plain_ids) == 0


def test_passes_over_quantized_caches_have_costs_of_their_own():
    model = plain_model()
    costs = [Served(model, ENDLESS, RunOptions(kv_bits=bits)).pass_costs for bits in (None, 4, None)]
    assert costs[0] is costs[2]
    assert costs[0] is not costs[1]


@pytest.mark.parametrize("given", ["stories-base", 3, ENDLESS])
def test_what_is_no_loaded_model_is_refused_as_a_draft_model(given):
    with pytest.raises(GenerationError, match="draft_model must be a loaded model"):
        answer_of(plain_model(), draft_model=given)


def test_a_draft_model_whose_caches_cannot_be_trimmed_is_refused(monkeypatch):
    from mlx_lm.models.cache import RotatingKVCache

    model = plain_model()
    model.make_cache = lambda: [RotatingKVCache(max_size=8) for _ in model.layers]
    with pytest.raises(GenerationError, match=r"RotatingKVCache\) cannot be trimmed"):
        answer_of(plain_model(), draft_model=model)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "draft_model"), [("stories", "stories-base"), ("stories-base", "stories")])
def test_the_command_writes_the_same_story_with_a_draft_model(model, draft_model, capsys):
    def written(*flags):
        assert cli.main(["generate", "--model", model, "--max-tokens", "60", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    alone, drafted = written(), written("--draft-model", draft_model, "--num-draft-tokens", "5")
    assert drafted["text"] == alone["text"]
    assert drafted["accepted"] > 0
