"""Where entries were learned: what the engine says is what a replay of the id log by the plain Python codec says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.engine import Counted, Emitted
from mlx_zip.engine.request import Origins
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.packs.pack import Pack
from support import codec_twin as twin
from support import tiny
from support.serving import NEEDS_TORCH, ask, both, prompts, tiny_engine
from support.slow_cases import slow_but

V = 6
PARAMS = st.builds(
    CodecParams,
    st.just(V),
    st.integers(2, 12),
    st.integers(2, 4),
    policy=st.sampled_from(["freeze", "lru", "use-count"]),
    start=st.sampled_from([None, ((1, 2), (3, 4))]),
)


def legal_ids(params, seed, n):
    """n random ids that a model may emit, hypertokens that install themselves included."""
    rng, book = random.Random(seed), twin.Codebook(params)
    for _ in range(n):
        while True:
            known = len(book.entries)
            one = rng.choice([rng.randrange(V), V + rng.randrange(known + 1)])
            try:
                book.push([one])
            except ValueError:
                continue
            break
    return book.ids


def replayed(params, ids, prompt_ids):
    """Per id after the prompt: (origin and place, or None), and the entries that the id installs."""
    book, places, out, prompt = twin.Codebook(params), {}, [], 0
    for nth, one in enumerate(ids):
        installed = book.push([one])
        read = sum(map(len, book.runs))
        if nth < prompt_ids:
            prompt = read
        at = places.get(one, read if any(code == one for code, _, _ in installed) else -1)
        kind = "pack" if at == -1 else "prompt" if at <= prompt else "answer"
        out.append(((kind, at) if one >= params.vocab_size else None, tuple(entry for _, entry, _ in installed)))
        places |= {code: read for code, _, _ in installed}
    return out[prompt_ids:]


@settings(max_examples=100)
@given(PARAMS, st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 40), st.integers(0, 20))
def test_origins_are_those_of_a_replay_by_the_plain_python_codec(params, seed, prompt, answer, rewound):
    ids = legal_ids(params, seed, prompt + answer)
    book = Codebook(params)
    book.push(ids[:prompt])
    book.push(ids[prompt : prompt + rewound])
    book.rewind(prompt)
    found, origins = [], Origins(book)
    for one in ids[prompt:]:
        origin = origins.origin_of_next_id(
            book, one, len(book.expand(one)) if one < V + len(book) else length(book, one)
        )
        book.push(one)
        found.append((origin and tuple(origin), origins.installed(book)))
    assert found == replayed(params, ids, prompt)


def length(book, one):
    """Base ids of a hypertoken that installs its own entry."""
    book = book.copy()
    book.push(one)
    return int(book.logged_base_ids(book.mark() - 1)[1][0])


@settings(max_examples=30)
@given(PARAMS, st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_ids_may_be_delivered_before_they_are_read(params, seed, read):
    ids, book, learned = legal_ids(params, seed, 10 + sum(read)), Codebook(params), []
    book.push(ids[:10])
    origins, done = Origins(book), 10
    for n in read:
        for one in ids[done : done + n]:
            book.push(one)
        done += n
        if done < len(ids):
            one = ids[done]
            origin = origins.origin_of_next_id(
                book, one, len(book.expand(one)) if one < V + len(book) else length(book, one)
            )
            assert (origin and tuple(origin)) == replayed(params, ids, 10)[done - 10][0]
        learned += origins.installed(book)
    assert tuple(learned) == sum((entries for _, entries in replayed(params, ids, 10)), ())


# ---- the engine


@pytest.fixture
def logs(monkeypatch):
    """Per request: its codec and the ids that its codebook has read when the answer begins, newest last."""
    found = []

    def recorded(book):
        found.append((book.params, book.ids.tolist()))
        return Origins(book)

    monkeypatch.setattr("mlx_zip.engine.request.Origins", recorded)
    return found


def said(watch):
    """What a request's events say: per id, where its entry was learned, and the entries that it installs."""
    return [(one.origin and tuple(one.origin), one.learned) for one in watch.emitted]


def compression(policy):
    return {
        **tiny.tiny_config()["zip2zip"]["compression"],
        "max_codebook_size": 64 if policy == "freeze" else 24,
        "policy": policy,
    }


def agrees(watch, log, late=False):
    """late: whether what an id installs may be told with the next id."""
    params, prompt = log
    expected = replayed(params, [*prompt, *watch.ids], len(prompt))
    last = [(expected[-1][0], said(watch)[-1][1])]  # the last id may never be read
    if not late:
        assert said(watch) == [*expected[:-1], *last]
        return
    (origins, learned), (wanted, installed) = zip(*said(watch), strict=True), zip(*[*expected[:-1], *last], strict=True)
    assert origins == wanted
    assert sum(learned, ()) == sum(installed, ())


@pytest.mark.parametrize("policy", slow_but(["freeze", "lru", "use-count"], "lru"))
@pytest.mark.parametrize(
    ("kind", "ahead"), [("mlx", False), ("mlx", True), pytest.param("cuda", None, marks=NEEDS_TORCH)]
)
def test_an_engine_says_where_entries_were_learned_after_sessions_and_rewinds(policy, kind, ahead, logs):
    model = {"compression": compression(policy)}
    with tiny_engine(kind=kind, sessions=SessionOptions(), run={"ahead": ahead}, model=model) as engine:
        first = tiny.base_ids(40)
        watch = ask(engine, first, show=True)[1].wait()
        agrees(watch, logs[-1])
        again = [*first, *watch.base_ids, *tiny.base_ids(9, 3)]
        resumed = ask(engine, again, show=True)[1].wait()
        assert resumed.end.counts.cached_tokens >= len(first)
        agrees(resumed, logs[-1])
        branch = ask(engine, [*again[:50], *tiny.base_ids(20, 5)], show=True)[1].wait()
        assert branch.end.counts.cached_tokens > 0
        agrees(branch, logs[-1])
        kinds = {one.origin.kind for w in (watch, resumed, branch) for one in w.emitted if one.origin}
        assert "prompt" in kinds
        assert policy == "freeze" or "answer" in kinds


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("border", slow_but([20, 21, 22, 23], 21, 22))
def test_it_says_so_after_the_context_was_read_again_for_longrope(policy, border, logs):
    def change(model):
        model.traits = type(model.traits)(**{**vars(model.traits), "long_context": border})

    with tiny_engine("phi3", change=change, model={"compression": compression(policy)}) as engine:
        watch = ask(engine, tiny.base_ids(20), show=True, max_tokens=50)[1].wait()
        agrees(watch, logs[-1], late=True)


@both
def test_an_entry_of_a_pack_is_said_to_be_from_the_pack(kind, logs):
    with tiny_engine(kind=kind) as engine:
        pack = Pack(tuple((one, 3 + one % 9) for one in range(3, 40)))
        watch = ask(engine, tiny.base_ids(30), show=True, pack=pack, sampling={"temp": 1.5, "seed": 1})[1].wait()
        agrees(watch, logs[-1])
        assert ("pack", -1) in [origin for origin, _ in said(watch)]


@both
def test_rows_of_a_batch_say_it_too(kind, logs):
    with tiny_engine(kind=kind, model={"compression": compression("lru")}) as engine:
        watches = [ask(engine, prompt, show=True, max_tokens=12 + 5 * i)[1] for i, prompt in enumerate(prompts(4))]
        for watch in watches:
            watch.wait()
        for watch, prompt in zip(watches, prompts(4), strict=True):
            params = logs[0][0]
            log = next(ids for _, ids in logs if read_by(params, ids) == list(prompt))
            agrees(watch, (params, log))


def read_by(params, ids):
    book = Codebook(params)
    book.push(ids)
    return book.base_ids().tolist()


@both
def test_a_request_that_does_not_ask_is_told_no_origins(kind):
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, tiny.base_ids(30))[1].wait()
        assert {one.origin for one in watch.emitted} == {None}
        assert not any(isinstance(event, Counted) for event in watch.events)


def test_a_request_that_asks_is_told_its_figures_at_most_ten_times_per_second():
    with tiny_engine() as engine:
        watch = ask(engine, tiny.base_ids(30), show=True, max_tokens=200)[1].wait()
    told = [
        (time, event.counts)
        for time, event in zip(watch.times, watch.events, strict=True)
        if isinstance(event, Counted)
    ]
    assert told
    assert told[0][1].steps == 1
    assert len(told) <= 2 + (watch.times[-1] - watch.times[0]) / 0.1
    assert sum(isinstance(event, Emitted) for event in watch.events) == watch.end.counts.steps


@both
def test_a_plain_model_has_no_origins(kind):
    with tiny_engine("plain", kind=kind) as engine:
        watch = ask(engine, tiny.base_ids(30), show=True)[1].wait()
        assert {one.origin for one in watch.emitted} == {None}
        assert watch.end.counts.hypertokens == 0


@pytest.mark.parametrize("policy", slow_but(["freeze", "lru", "use-count"], "lru"))
@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_origins_are_right_after_longrope_has_the_context_read_again(mode, policy, logs):
    changes = {"position_mode": mode, "compression": compression(policy)}
    with tiny_engine("phi3", model=changes, run={"prefill_step_size": 7}) as engine:
        for prompt in (tiny.base_ids(20), tiny.base_ids(26, 1)):
            watch = ask(engine, prompt, show=True, max_tokens=90)[1].wait()
            params, read = logs.pop()
            expected = replayed(params, [*read, *watch.ids], len(read))
            assert [one.origin and tuple(one.origin) for one in watch.emitted] == [origin for origin, _ in expected]
            told = [entry for one in watch.emitted for entry in one.learned]
            made = [entry for _, entries in expected for entry in entries]
            assert told in (made, made[: len(made) - len(expected[-1][1])])  # the last id may never be read
