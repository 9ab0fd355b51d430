"""Clients that leave, clients that do not read, and a server that stops: no request goes on that nobody waits for."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import product

import pytest

from mlx_zip.errors import EngineStoppedError
from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, Script
from support.http_server import events, post, read_all, serving, until
from support.slow_cases import slow_but

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Tell me a story."}]
ENDLESS = Script(text="Once upon a time. " * 400, delay_s=0.05)


def body(**fields):
    return {"messages": USER, "max_tokens": 1500, **fields}


CASES = list(product([PATH, "/v1/completions"], [{"stream": True}, {}, {"n": 3}, {"n": 3, "stream": True}]))
QUICK = (CASES[0], CASES[2], CASES[5], CASES[7])  # every two of a path, a number of answers and a way to send them


@pytest.mark.parametrize(("path", "fields"), slow_but(CASES, *QUICK))
def test_a_client_that_leaves_ends_the_engines_request(path, fields):
    engine = FakeEngine(ENDLESS)
    asked = {"prompt": "A story", "max_tokens": 1500} if path == "/v1/completions" else body()
    with serving(engine) as served:
        connection = served.raw(post(path, {**asked, **fields}))
        assert until(lambda: len(engine.told.tickets) == fields.get("n", 1))
        time.sleep(0.1)
        assert not any(ticket.cancelled.is_set() for ticket in engine.told.tickets)
        connection.close()
        assert until(lambda: all(ticket.cancelled.is_set() for ticket in engine.told.tickets))


REQUEST = post(PATH, body())
MORE = list(product([{"stream": True}, {}], [b"\r\n", REQUEST]))


@pytest.mark.parametrize(
    ("fields", "more"),
    slow_but(MORE, ({"stream": True}, b"\r\n"), ({}, REQUEST)),
    ids=lambda value: {b"\r\n": "a line break", REQUEST: "a request"}[value] if isinstance(value, bytes) else None,
)
def test_a_client_that_has_sent_more_and_leaves_ends_the_engines_request(fields, more):
    engine = FakeEngine(ENDLESS)
    with serving(engine) as served:
        connection = served.raw(post(PATH, body(**fields)))
        assert until(lambda: engine.told.tickets)
        connection.sendall(more)
        time.sleep(0.1)
        connection.close()
        assert until(lambda: engine.told.tickets[0].cancelled.is_set(), 5)


def test_a_client_that_sends_without_end_behind_a_request_is_not_read_without_end():
    engine = FakeEngine(ENDLESS)
    with serving(engine) as served:
        connection = served.raw(post(PATH, body()))
        assert until(lambda: engine.told.tickets)
        (held,) = served.server.server_state.connections
        connection.settimeout(0.5)

        def send():
            for _ in range(1000):
                connection.sendall(b"x" * 100_000)

        with pytest.raises(TimeoutError):
            send()
        assert len(held.conn.trailing_data[0]) < 1_000_000
        connection.close()


def test_a_client_that_leaves_while_its_prompt_is_rendered_asks_the_engine_for_nothing():
    engine, begun, go_on = FakeEngine(ENDLESS), threading.Event(), threading.Event()

    def answers():
        begun.set()
        go_on.wait(10)
        return {}

    engine.answers = answers
    with serving(engine) as served:
        connection = served.raw(post(PATH, body()))
        assert begun.wait(10)
        connection.close()
        assert until(lambda: not served.server.server_state.tasks)
        go_on.set()
        assert served.chat(max_tokens=1).status == 200
    assert len(engine.told.tickets) == 1


def test_a_client_that_leaves_while_its_prompt_is_submitted_leaves_no_request():
    engine, begun, go_on = FakeEngine(ENDLESS), threading.Event(), threading.Event()
    submit = engine.submit

    def submitted(*args):
        begun.set()
        go_on.wait(10)
        return submit(*args)

    engine.submit = submitted
    with serving(engine) as served:
        connection = served.raw(post(PATH, body()))
        assert begun.wait(10)
        connection.close()
        time.sleep(0.5)
        go_on.set()
        assert until(lambda: engine.told.tickets and engine.told.tickets[0].cancelled.is_set())


def test_prompts_to_be_scored_are_bounded_and_those_of_clients_that_left_do_not_count():
    engine, begun, go_on = FakeEngine(), threading.Event(), threading.Event()
    engine.info, scored = replace(engine.info, max_requests=2), engine.score_prompt_ids

    def slow(*args):
        begun.set()
        go_on.wait(10)
        return scored(*args)

    engine.score_prompt_ids = slow
    asked = {"prompt": "A story", "echo": True, "logprobs": 0, "max_tokens": 0}
    with serving(engine) as served:
        first, second = (served.raw(post("/v1/completions", asked)) for _ in range(2))
        assert begun.wait(10)
        assert until(lambda: len(served.server.server_state.tasks) == 2)
        assert until(lambda: served.ask("POST", "/v1/completions", asked | {"logprobs": None}).status == 200)
        refused = served.ask("POST", "/v1/completions", asked)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        second.close()
        assert until(lambda: len(served.server.server_state.tasks) == 1)
        go_on.set()
        assert served.ask("POST", "/v1/completions", asked).status == 200
        first.close()


@pytest.mark.slow
def test_a_stream_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr("mlx_zip.server.running.STALL_S", 0.5)
    engine = FakeEngine(Script(text="Once upon a time. " * 400))
    with serving(engine) as served:
        fields = {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        with served.raw(post(PATH, body(**fields))):
            assert until(lambda: served.server.server_state.connections)
            assert until(lambda: not served.server.server_state.connections)
        assert until(lambda: all(ticket.cancelled.is_set() for ticket in engine.told.tickets))


def test_a_slow_reader_gets_the_whole_stream():
    engine = FakeEngine(Script(text="Once upon a time. " * 100))
    with serving(engine) as served, served.raw(post(PATH, body(stream=True), "Connection: close")) as connection:
        found = b""
        while data := connection.recv(2000):
            found += data
            time.sleep(0.0005)
    assert b"data: [DONE]" in found


def test_answers_under_way_end_before_the_server_stops():
    engine = FakeEngine(Script(delay_s=0.05))
    with serving(engine, Options(drain_s=10)) as served:
        connection = served.raw(post(PATH, body(stream=True)))
        assert until(lambda: engine.told.tickets)
        served.server.should_exit = True
        answer = read_all(connection)
    assert b"data: [DONE]" in answer
    assert b'"finish_reason":"stop"' in answer


def test_no_thread_stays_when_the_server_has_ended():
    before = set(threading.enumerate())
    with serving(FakeEngine()) as served:
        assert served.chat().status == 200
        assert served.chat("Tell me of the boat. " * 20_000).status == 400
    assert until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize(
    ("path", "fields", "error", "end"),
    [
        (PATH, body(), b'"code":"stopped"', b"[DONE]"),
        ("/v1/completions", {"prompt": "A story", "max_tokens": 1500}, b'"code":"stopped"', b"[DONE]"),
        ("/v1/responses", {"input": "A story"}, b"event: response.failed\n", b"event: response.completed\n"),
        ("/v1/messages", body(model="default_model"), b"event: error\n", b"event: message_stop\n"),
    ],
)
def test_answers_that_take_too_long_end_with_an_error_when_the_server_stops(path, fields, error, end):
    engine = FakeEngine(ENDLESS)
    with serving(engine, Options(drain_s=0.3)) as served:
        streamed, whole = served.raw(post(path, {**fields, "stream": True})), served.raw(post(path, fields))
        assert until(lambda: len(engine.told.tickets) == 2)
        served.server.should_exit = True
        answers = read_all(streamed), read_all(whole)
    assert error in answers[0]
    assert b"the server is stopping" in answers[0]
    assert end not in answers[0]
    assert answers[1].startswith(b"HTTP/1.1 503 ")


def test_the_last_answer_before_the_engine_stops_is_whole():
    engine = FakeEngine()

    def note(*_):
        raise EngineStoppedError("the engine has stopped")

    engine.note_answer = note
    with serving(engine) as served:
        assert served.chat().status == 200


def test_the_engines_death_ends_the_server():
    engine = FakeEngine()
    with serving(engine) as served:
        assert served.ask("GET", "/health").json == {"status": "ok"}
        engine.die()
        assert until(lambda: not served.server.server_state.connections)
    assert isinstance(served.server.fault, RuntimeError)


def test_a_dead_engine_is_told_in_the_health_and_as_503():
    engine = FakeEngine()
    with serving(engine) as served:
        engine._alive = False
        assert served.ask("GET", "/health").status == 503
        assert served.chat().status == 503
    assert events(b"data: 1\n\n") == [1]
