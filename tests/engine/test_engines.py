"""Several engines on one machine: their answers take turns, and one other model is open at a time."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from mlx_zip.engine import Failed, Finished, Held, Started, Submission
from mlx_zip.engine.engines import Engines, OtherModel, make_other_models
from mlx_zip.errors import EngineError, EngineStoppedError, ModelError
from support import tiny
from support.fake_engine import FakeEngine, Script
from support.serving import WAIT_S, Watch, ask, tiny_engine

SLOW = Script(text="one two three four five six seven eight nine ten", delay_s=0.1)


def fake(name, script=SLOW):
    engine = FakeEngine(script)
    engine.info = type(engine.info)(name, *list(vars(engine.info).values())[1:])
    return engine


def other(name, open_model=None, opened=None):
    """A model that can be opened. opened: gets its engines."""

    def make():
        engine = (open_model or (lambda: fake(name)))()
        if opened is not None:
            opened.append(engine)
        return engine

    return OtherModel(name, "model", make, name)


@contextmanager
def used(engines, name):
    engine = engines.acquire(name)
    try:
        yield engine
    finally:
        engines.release(engine)


def submitted(engine, **fields):
    watch = Watch()
    return engine.submit(Submission([1, 2, 3], **fields), watch), watch


def test_importing_it_imports_no_mlx():
    code = "import sys, mlx_zip.engine.engines; print('mlx.core' in sys.modules or 'mlx_lm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_answers_of_two_engines_never_run_at_once_and_come_in_their_order():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        watches = [submitted(engine)[1] for engine in (engines.main, engines.main, b, engines.main)]
        for watch in watches:
            assert isinstance(watch.wait().end, Finished)
    spans = [
        (next(t for t, e in zip(w.times, w.events, strict=True) if isinstance(e, Started)), w.times[-1])
        for w in watches
    ]
    assert spans[1][0] < spans[0][1]  # of one engine, together
    assert spans[2][0] >= max(spans[0][1], spans[1][1])
    assert spans[3][0] >= spans[2][1]


@pytest.mark.slow
def test_a_request_that_waits_for_another_engine_is_told_so_at_once():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        submitted(engines.main)
        watch = submitted(b)[1]
        assert watch.events == [Held("main")]
        assert isinstance(watch.wait().events[1], Started)


def test_a_held_request_can_be_cancelled():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        first = submitted(engines.main)[1]
        ticket, watch = submitted(b)
        b.cancel(ticket)
        assert watch.end.reason == "cancelled"
        third = submitted(engines.main)[1].wait()
        first.wait()
        assert b.inner.told.submissions == []
        assert isinstance(third.end, Finished)


@pytest.mark.slow
def test_a_receiver_may_cancel_as_soon_as_it_is_held():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        submitted(engines.main)
        watch = Watch(raise_at=0)
        b.submit(Submission([1, 2, 3]), watch)
        assert watch.events == [Held("main")]
        assert isinstance(submitted(b)[1].wait().end, Finished)
        assert len(b.inner.told.submissions) == 1


@pytest.mark.slow
def test_what_an_engine_refuses_of_a_held_request_is_delivered():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        submitted(engines.main)
        watch = submitted(b, sampling={"top_k": 10**9})[1].wait()
        assert isinstance(watch.end, Failed)
        assert isinstance(submitted(engines.main)[1].wait().end, Finished)


def test_a_receiver_that_fails_does_not_hold_the_others_up():
    with Engines(fake("main"), [other("b")]) as engines, used(engines, "b") as b:
        engines.main.submit(Submission([1, 2, 3]), Watch(raise_at=2))
        assert isinstance(submitted(b)[1].wait().end, Finished)


def test_one_other_model_is_open_at_a_time_and_the_last_used_is_closed_first():
    opened = []
    with Engines(fake("main"), [other("b", opened=opened), other("c", opened=opened)]) as engines:
        with used(engines, "b"), used(engines, "b"):
            assert engines.loaded == ("main", "b")
        assert engines.loaded == ("main", "b")
        with used(engines, "c"):
            assert engines.loaded == ("main", "c")
            assert [engine.alive for engine in opened] == [False, True]
        with used(engines, "main") as main:
            assert main is engines.main
    assert len(opened) == 2
    assert not any(engine.alive for engine in opened)
    assert engines.main.alive
    with pytest.raises(EngineStoppedError):
        engines.acquire("b")


def test_a_model_in_use_is_not_closed_until_it_is_given_back():
    with Engines(fake("main"), [other("b"), other("c")]) as engines:
        b = engines.acquire("b")
        found = []
        thread = threading.Thread(target=lambda: found.append(engines.acquire("c")))
        thread.start()
        time.sleep(0.05)
        assert not found
        assert b.alive
        engines.release(b)
        thread.join(WAIT_S)
        assert found[0].alive
        assert not b.alive
        engines.release(found[0])


@pytest.mark.parametrize("error", [ModelError("no such model"), RuntimeError("out of memory\nsecond line")])
def test_a_model_that_fails_to_open_gives_one_error_and_leaves_the_others_usable(error):
    def fails():
        raise error

    with Engines(fake("main"), [other("b"), other("broken", fails)]) as engines:
        with used(engines, "b"):
            pass
        for _ in range(2):
            with pytest.raises(
                (EngineError, ModelError), match=r"no such model|broken cannot be opened.*out of memory"
            ):
                engines.acquire("broken")
        with used(engines, "b") as b:
            assert isinstance(submitted(b)[1].wait().end, Finished)
        assert isinstance(submitted(engines.main)[1].wait().end, Finished)
        with pytest.raises(EngineError, match="there is no model 'x'"):
            engines.acquire("x")


def test_many_threads_open_and_ask_without_a_second_engine_at_once():
    opened, most = [], []
    others = [other(name, lambda: fake("?", Script("a b")), opened) for name in "bcd"]
    errors = []

    def work(n, engines):
        try:
            for i in range(5):
                with used(engines, ["main", "b", "c", "d"][(n + i) % 4]) as engine:
                    most.append(sum(one.alive for one in list(opened)))
                    assert isinstance(submitted(engine)[1].wait().end, Finished)
        except BaseException as error:
            errors.append(error)

    with Engines(fake("main", Script("a b")), others) as engines:
        threads = [threading.Thread(target=work, args=(n, engines)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not errors
    assert max(most) <= 1


# ---- the same weights without hypertokens


def test_off_says_what_the_model_says_when_it_may_not_use_hypertokens():
    from mlx_zip.engine.sampling.processors import base_ids_only

    with tiny_engine() as main, Engines(main, make_other_models(main, fake)) as engines, used(engines, "off") as off:
        assert off.info.codebook_size == 0
        assert off.info.fingerprint != main.info.fingerprint
        watches = [ask(off, tiny.base_ids(9, i), max_tokens=15)[1] for i in range(3)]
        ids = [watch.wait().ids for watch in watches]
        again = ask(engines.main, tiny.base_ids(9))[1].wait()
    assert all(one < 40 for found in ids for one in found)
    assert again.end.counts.hypertokens > 0
    assert watches[0].end.counts.steps == watches[0].end.counts.base_tokens == 15
    assert ids[0] == greedy(tiny.tiny_model().eval(), base_ids_only, tiny.base_ids(9), 15)


def greedy(model, base_ids_only, prompt, n):
    """n ids that a model chooses when it may choose base ids only; the prompt is not compressed."""
    import mlx.core as mx

    cache, ids, out, forbid = model.make_cache(), prompt, [], base_ids_only(model)
    for _ in range(n):
        logits = forbid(None, model(mx.array([ids]), cache=cache)[:, -1][0])
        out.append(int(mx.argmax(logits).item()))
        ids = out[-1:]
    return out


def test_off_has_no_weights_of_its_own():
    with tiny_engine() as main:
        off = main.without_hypertokens("off")
        mine, its = (engine._scheduler.served.model for engine in (main, off))
        assert its.model is mine
        off.close()


def test_a_plain_model_cannot_be_run_without_hypertokens():
    with tiny_engine("plain") as main:
        assert make_other_models(main, fake) == []
        with pytest.raises(EngineError, match="cannot be run without"):
            main.without_hypertokens("off")


def test_the_bundled_model_is_compared_with_its_base_a_named_one_and_itself():
    found = make_other_models(fake("stories"), fake, "some/model")
    assert [(one.name, one.kind) for one in found] == [
        ("stories-base", "control"),
        ("some/model", "model"),
        ("off", "off"),
    ]
    assert "0.711 bits per byte" in found[0].quality
    assert found[1].quality is None


def test_quality_figures_are_those_of_the_readme():
    from mlx_zip.named import QUALITY
    from support.places import REPO

    table = (REPO / "README.md").read_text()
    assert f"| `stories-base`, no hypertokens | 1.000 | {QUALITY['stories-base'].split()[0]} |" in table
    row = next(line for line in table.splitlines() if line.startswith("| `stories` | "))
    assert QUALITY["stories"].split()[0] in row
    assert QUALITY["stories"].split()[7] in row
    report = (REPO / "docs/reports/smollm2.md").read_text()
    chat = next(line for line in report.splitlines() if line.startswith("| chat | ")).split("|")
    assert QUALITY["smollm2-base"].split()[0] == chat[3].strip()
    assert f"{QUALITY['smollm2'].split()[0]} (+{QUALITY['smollm2'].split()[7]}%)" == chat[6].strip()
