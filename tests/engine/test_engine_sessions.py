"""What an engine keeps of its requests, for later turns to read only what is new."""

import time

import pytest

from mlx_zip.engine import Finished
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import EngineError
from support import tiny
from support.serving import ask, both, prompts, tiny_engine

WHOLE = 18  # base tokens, after which the first prompt's answer does not end inside a hypertoken


@both
def test_the_second_turn_reads_only_what_is_new(kind):
    first = tiny.base_ids(60)
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        one = ask(engine, first, max_tokens=WHOLE)[1].wait()
        second = [*first, *one.base_ids, 9, 8, 7, 6]
        two = ask(engine, second, max_tokens=WHOLE)[1].wait()
        assert two.end.counts.cached_tokens >= len(second) - 4 - len(one.emitted[-1].base_ids)
        assert two.events[0].cached_tokens == two.end.counts.cached_tokens
        (session,) = engine.sessions()
        unread = 0 if kind == "cuda" else len(two.emitted[-1].base_ids)  # there a step begins before its id is known
        assert session.base_tokens == len(second) + len(two.base_ids) - unread
        assert engine.figures().sessions == 1


@both
def test_a_request_is_told_where_its_prompt_differs_from_the_best_session(kind):
    first = tiny.base_ids(60)
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        one = ask(engine, first, max_tokens=WHOLE)[1].wait()
        assert one.events[0].differing is None
        assert ask(engine, [*first, *one.base_ids, 9, 8], max_tokens=8)[1].wait().events[0].differing is None
        found = ask(engine, [*first[:30], 39, 38, 37], max_tokens=8)[1].wait().events[0].differing
    assert (found.at, found.now, found.kept[0]) == (30, (39, 38, 37), first[30])


@pytest.mark.parametrize("family", ["llama", "plain"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_session_never_holds_more_than_was_delivered(family, ahead):
    with tiny_engine(family, sessions=SessionOptions(), run={"ahead": ahead}) as engine:
        asked = [ask(engine, prompt, max_tokens=300) for prompt in prompts(3)]
        for ticket, watch in asked:
            while len(watch.emitted) < 5:
                time.sleep(0.001)
            engine.cancel(ticket)
        for _, watch in asked:
            watch.wait()
        held = sorted(session.base_tokens for session in engine.sessions())
        assert all(watch.end.reason == "cancelled" for _, watch in asked)
        assert held == sorted(
            len(prompt) + len(watch.base_ids) for prompt, (_, watch) in zip(prompts(3), asked, strict=True)
        )


@both
def test_a_request_that_is_not_to_be_kept_leaves_the_sessions_as_they_were(kind):
    prompt = tiny.base_ids(60)
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        ask(engine, prompt, max_tokens=8)[1].wait()
        before = engine.sessions()
        watch = ask(engine, [*prompt, 5], max_tokens=8, keep=False)[1].wait()
        assert watch.end.counts.cached_tokens
        after = engine.sessions()
    assert [(one.name, one.base_tokens) for one in after] == [(one.name, one.base_tokens) for one in before]


@both
def test_answers_can_be_noted_during_and_after_a_request(kind):
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        ticket, watch = ask(engine, tiny.base_ids(30), max_tokens=60)
        engine.note_answer(ticket, "early", [5, 6])
        assert engine.answers()["early"] == (5, 6)
        watch.wait()
        engine.note_answer(ticket, "late", [7])
        engine.sessions()
        assert dict(engine.answers()) == {"early": (5, 6), "late": (7,)}
        assert engine.purge_sessions() == 1
        assert dict(engine.answers()) == {}


@both
def test_several_requests_continue_one_session_at_a_time(kind):
    first = tiny.base_ids(60)
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        one = ask(engine, first, max_tokens=12)[1].wait()
        second = [*first, *one.base_ids, 9, 8, 7, 6]
        asked = [ask(engine, [*second, extra], max_tokens=12)[1] for extra in (5, 6, 7)]
        assert asked[0].wait().end.counts.cached_tokens > 60
        assert len(asked[1].wait().base_ids) == len(asked[2].wait().base_ids) == 12


def test_sessions_on_disk_are_there_for_the_next_engine(tmp_path):
    first = tiny.base_ids(60)
    with tiny_engine(sessions=SessionOptions(folder=tmp_path / "kept")) as engine:
        one = ask(engine, first)[1].wait()
        while not list((tmp_path / "kept").glob("*.safetensors")):  # soon, and not only at the end
            time.sleep(0.01)
    with tiny_engine(sessions=SessionOptions(folder=tmp_path / "kept")) as engine:
        assert engine.figures().disk_bytes
        two = ask(engine, [*first, *one.base_ids, 9, 8])[1].wait()
        assert two.end.counts.cached_tokens >= 90
        (session,) = engine.sessions()
        engine.save_session(session.name, tmp_path / "one.safetensors")
        engine.drop_session(session.name)
        assert engine.sessions() == []
        assert engine.load_session(tmp_path / "one.safetensors").base_tokens == session.base_tokens
        with pytest.raises(EngineError, match="no session"):
            engine.drop_session("nobody")


@both
def test_a_purge_forgets_the_sessions_of_requests_under_way_too(kind):
    with tiny_engine(kind=kind, sessions=SessionOptions()) as engine:
        first = ask(engine, tiny.base_ids(30), max_tokens=20)[1].wait()
        again = [*tiny.base_ids(30), *first.base_ids, 5]
        _, running = ask(engine, again, max_tokens=400)
        _, fresh = ask(engine, tiny.base_ids(20, 9), max_tokens=400)
        while not (running.emitted and fresh.emitted):
            time.sleep(0.001)
        engine.purge_sessions()
        assert not isinstance(running.end, Finished)
        running.wait()
        fresh.wait()
        assert engine.sessions() == []
        later = ask(engine, tiny.base_ids(30), max_tokens=5)[1].wait()
        assert later.end.counts.cached_tokens == 0
        assert len(engine.sessions()) == 1
