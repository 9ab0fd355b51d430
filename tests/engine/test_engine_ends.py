"""How an engine ends, whatever goes wrong then: everybody is told, once, and nothing is kept."""

import gc
import logging
import threading
import time
import weakref
from collections import Counter
from functools import partial

import pytest

from mlx_zip import RowStore
from mlx_zip.engine import Emitted, Failed, Finished, Progress, Submission
from mlx_zip.engine.mlx.mlx_engine import open_engine
from mlx_zip.engine.sessions.store import NoSessions
from mlx_zip.errors import EngineStoppedError, ModelError
from support import tiny
from support.fake_parts import FakePartsEngine, FakeServed
from support.http_server import until
from support.serving import WAIT_S, Broken, Watch, ask, both, tiny_engine


def engine(change=lambda served: None, make_store=None):
    """An engine of fake parts. change: called with what serves before the engine begins."""
    served = FakeServed()
    change(served)
    return FakePartsEngine(lambda: served, "fake", None, make_store)


def running(made, count=3):
    """Submits requests without end; returns their watches when all of them have begun to answer."""
    watches, begun = [], []
    for n in range(count):
        watch, answers = Watch(), threading.Event()

        def deliver(event, watch=watch, answers=answers):
            watch(event)
            if isinstance(event, Emitted):
                answers.set()

        made.submit(Submission([5 + n], -1), deliver)
        watches.append(watch)
        begun.append(answers)
    assert all(answers.wait(WAIT_S) for answers in begun)
    return watches


def raises(*_):
    raise RuntimeError("the device has gone")


# ---- a device that has gone


def test_everybody_is_told_when_even_giving_up_the_caches_fails():
    told = threading.Event()
    made = engine()
    made.call_on_fault(lambda fault: told.set())
    watches = running(made)

    def goes():
        made._scheduler.served.free = raises
        made._scheduler.groups[0].launch_pass = raises

    made._inbox.post(goes)
    for watch in watches:
        assert isinstance(watch.wait().end, Failed)
    assert told.wait(WAIT_S)
    made.close()
    assert not made._open
    ends = [sum(isinstance(event, Finished | Failed) for event in watch.events) for watch in watches]
    assert ends == [1, 1, 1]


@pytest.mark.parametrize(
    "part", ["begin_step", "hand_ids_to_requests", "remove_ended", "launch_pass", "finish_choosing", "split_off_rows"]
)
def test_a_group_that_fails_in_a_part_of_a_step_fails_alone(part):
    made = engine()
    first, second, third = running(made)

    def breaks():
        group = made._scheduler.groups[1]
        setattr(group, part, raises)
        if part == "split_off_rows":
            group.rows_switching_factors = lambda: [0]

    made._inbox.post(breaks)
    assert "the device has gone" in str(second.wait().end.error)
    for watch in (first, third):
        have = len(watch.emitted)
        assert until(lambda watch=watch, have=have: len(watch.emitted) > have + 1)
    made.close()


def test_everybody_is_told_when_a_step_fails_and_its_group_cannot_be_dropped():
    told = threading.Event()
    made = engine()
    made.call_on_fault(lambda fault: told.set())
    watches = running(made)

    def goes():
        first = made._scheduler.groups[0]
        first.begin_step = first.drop_requests = raises

    made._inbox.post(goes)
    assert all(isinstance(watch.wait().end.error, EngineStoppedError) for watch in watches)
    assert told.wait(WAIT_S)
    made.close()


def test_a_store_that_cannot_be_closed_does_not_hide_why_the_engine_ended(caplog):
    class Store(NoSessions):
        def close(self):
            raise OSError("no space left")

    told = []
    made = engine(make_store=lambda served: Store())
    made.call_on_fault(told.append)
    with caplog.at_level(logging.CRITICAL, "mlx_zip"):
        made._inbox.post(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        made._thread.join(WAIT_S)
    assert [type(fault) for fault in told] == [KeyboardInterrupt]


# ---- calls that nobody waits for


def test_a_call_that_fails_and_that_nobody_waits_for_is_in_the_log(caplog):
    with engine() as made, caplog.at_level(logging.ERROR, "mlx_zip"):
        made._inbox.post(raises)
        made.sessions()  # comes after it
    assert "the device has gone" in caplog.text


def test_an_answer_that_the_store_cannot_note_is_not_kept_for_ever():
    class Store(NoSessions):
        def put(self, cache, **facts):
            return "one"

        def note_answer(self, name, key, base_ids):
            raise OSError("no space left")

    with engine(make_store=lambda served: Store()) as made:
        ticket, watch = ask(made, [5], max_tokens=3)
        watch.wait()
        made.sessions()  # the session is there by now
        made.note_answer(ticket, "some text", [1, 1, 1])
        made.sessions()
        assert not made._noted
        assert dict(made.answers()) == {}


# ---- what is left


@both
def test_an_engine_that_has_been_closed_keeps_no_model(kind):
    kept = []
    made = tiny_engine(kind=kind, change=lambda model: kept.append(weakref.ref(model)))
    ask(made, [5, 6, 7], max_tokens=3)[1].wait()
    made.close()
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(EngineStoppedError):
        ask(made, [5])


def test_a_model_that_fails_after_it_was_loaded_leaves_no_thread_and_no_open_store():
    closed = []

    class Store(NoSessions):
        def answers(self):
            raise OSError("the folder has gone")

        def close(self):
            closed.append(True)

    with pytest.raises(OSError, match="the folder has gone"):
        engine(make_store=lambda served: Store())
    assert closed == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "fake"]


# ---- many threads


class Asking:
    """Threads that submit requests to an engine until it is closed. asked: those taken; ends: last events of each."""

    def __init__(self, made):
        self.made, self.asked, self.ends, self.go = made, [], Counter(), threading.Barrier(5)
        self.threads = [threading.Thread(target=self.submit, args=(n,)) for n in range(4)]
        for thread in self.threads:
            thread.start()
        self.go.wait(WAIT_S)

    def submit(self, n):
        self.go.wait(WAIT_S)
        for i in range(10):
            try:
                ticket = self.made.submit(Submission([5 + n] * (1 + i), -1 if i % 2 else 3), partial(self.end, (n, i)))
            except EngineStoppedError:
                return
            self.asked.append((n, i))
            if i % 3 == 0:
                self.made.cancel(ticket)

    def end(self, key, event):  # in the engine's thread only
        self.ends[key] += isinstance(event, Finished | Failed)


def test_threads_that_submit_cancel_and_close_leave_no_request_without_an_end():
    for seed in range(20):
        made = engine()
        asking = Asking(made)
        made.close(0.001 * seed)
        for thread in asking.threads:
            thread.join(WAIT_S)
        assert +asking.ends == Counter(asking.asked)
        assert not made._open
        assert not made._thread.is_alive()


def test_a_receiver_may_close_the_engine_that_calls_it():
    made = engine()
    watch = Watch()

    def deliver(event):
        watch(event)
        if isinstance(event, Progress):
            made.close()

    made.submit(Submission([5] * 3, -1), deliver)
    assert watch.wait().end.reason == "cancelled"
    made._thread.join(WAIT_S)
    assert not made.alive


# ---- closing, and faults of the thread


@both
def test_closing_lets_requests_go_on_for_a_while(kind):
    engine = tiny_engine(kind=kind)
    _, watch = ask(engine, tiny.base_ids(9), max_tokens=50)
    engine.close(drain_s=30)
    assert watch.end.reason == "length"
    assert not engine.alive
    with pytest.raises(EngineStoppedError):
        ask(engine, tiny.base_ids(9))


@both
def test_closing_cancels_what_is_left(kind):
    engine = tiny_engine(kind=kind, max_running=1)
    asked = [ask(engine, tiny.base_ids(9), max_tokens=-1)[1] for _ in range(3)]
    while not asked[0].emitted:
        time.sleep(0.001)
    engine.close(drain_s=0.05)
    assert [watch.end.reason for watch in asked] == ["cancelled"] * 3
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.sessions()


@both
def test_closing_again_with_less_patience_ends_sooner(kind):
    engine = tiny_engine(kind=kind)
    _, watch = ask(engine, tiny.base_ids(9), max_tokens=-1)
    first = threading.Thread(target=engine.close, args=(600,))
    first.start()
    while engine.alive:
        time.sleep(0.001)
    engine.close()
    first.join(60)
    assert not first.is_alive()
    assert watch.end.reason == "cancelled"


def test_a_request_that_came_just_before_closing_is_answered(monkeypatch):
    asked, go = [], threading.Event()
    engine = tiny_engine()

    def between_two_rounds():
        if go.is_set() and not asked:
            asked.append(ask(engine, tiny.base_ids(9), max_tokens=5)[1])
            engine.close(drain_s=60)

    monkeypatch.setattr(engine._scheduler.served, "free_unused_memory", between_two_rounds)
    go.set()
    engine.sessions()
    engine._thread.join(60)
    assert asked[0].wait().end.reason == "length"


def test_a_function_that_fails_when_told_of_the_end_keeps_nobody_else_from_being_told():
    told = []
    with tiny_engine() as engine:
        engine.call_on_fault(lambda fault: 1 / 0)
        engine.call_on_fault(told.append)
        ask(engine, tiny.base_ids(9), constraint=Broken("mask", 2, KeyboardInterrupt))
        engine._thread.join(60)
    assert [type(fault) for fault in told] == [KeyboardInterrupt]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
def test_a_fault_of_the_thread_ends_all_requests_and_is_told(fault):
    told = []
    with tiny_engine(max_running=3) as engine:
        engine.call_on_fault(told.append)
        ask(engine, tiny.base_ids(9), constraint=Broken("mask", 2, fault))
        others = [ask(engine, tiny.base_ids(9), max_tokens=-1)[1] for _ in range(3)]
        ends = [watch.wait().end for watch in others]
        assert all(isinstance(end.error, EngineStoppedError) for end in ends)
        while not told:
            time.sleep(0.001)
        assert isinstance(told[0], fault)
        assert not engine.alive
        with pytest.raises(EngineStoppedError):
            ask(engine, tiny.base_ids(9))
        late = []
        engine.call_on_fault(late.append)
        assert late == told


def test_a_model_that_cannot_be_loaded_is_told_by_open_engine(tmp_path):
    with pytest.raises(ModelError, match="no such model folder"):
        open_engine(tmp_path / "nothing")


def test_rows_of_a_prompt_whose_reading_is_cut_off_are_kept_when_the_engine_closes():
    store = RowStore()

    def with_store(model):
        model.row_source.store = store

    engine = tiny_engine(
        change=with_store, run={"prefill_step_size": 4}, model={"fingerprint": {"input": "1" * 64, "output": "2" * 64}}
    )
    begun = threading.Event()
    engine.submit(
        Submission(tiny.base_ids(400, 3), max_tokens=4), lambda e: begun.set() if isinstance(e, Progress) else None
    )
    assert begun.wait(30)
    engine.close(0)
    assert not store.take_rows_to_submit()
    store.close()
