"""Prompts of megabytes: refused by their size, encoded in pieces, given up when nobody waits for them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, any_role
from support.http_server import post, read_all, serving, until

LONG = "Once upon a time there was a boat. " * 10_000  # six pieces
USER, HI = [{"role": "user", "content": LONG}], [{"role": "user", "content": "Hi"}]
ANTHROPIC = {"model": "stories", "max_tokens": 5}
ASKED = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/responses/input_tokens": {"input": LONG},
    "/v1/messages": {**ANTHROPIC, "messages": USER},
    "/v1/messages/count_tokens": {"model": "stories", "messages": USER},
}


class Held:
    """A tokenizer that notes the lengths of the texts it gets, and waits at the second long one until `go_on`."""

    def __init__(self, inner):
        self.inner, self.lengths = inner, []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text, **options):
        self.lengths.append(len(text))
        if len(text) > 10_000 and self.long == 2:
            self.begun.set()
            assert self.go_on.wait(20)
        return self.inner.encode(text, **options)

    @property
    def long(self):
        """How many long texts were encoded."""
        return sum(length > 10_000 for length in self.lengths)

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def made(most=None, template=None):
    engine = FakeEngine(vocab=Held(any_role()))
    if template is not None:
        engine.tokenizer.inner._tokenizer.chat_template = template
    engine.info = replace(engine.info, max_prompt_tokens=most)
    return engine, engine.tokenizer


def refused(answer):
    """Asserts that an answer is the one by which clients know that they must shorten the conversation."""
    error = answer.json["error"]
    assert answer.status == 400
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert "maximum context length is 6001 tokens" in error["message"]
    assert "prompt is too long: " in error["message"]
    assert "tokens > 6000 maximum" in error["message"]


@pytest.fixture(scope="module")
def bounded():
    """A server that takes 6000 tokens, for tests of what it refuses."""
    engine, _ = made(6000)
    with serving(engine) as served:
        yield served


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_of_too_many_bytes_is_never_given_to_the_tokenizer(path, bounded):
    refused(bounded.ask("POST", path, ASKED[path]))
    engine = bounded.core.engine
    assert engine.tokenizer.long == 0
    assert engine.told.tickets == []


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/v1/completions"])  # which may have many prompts
def test_a_body_that_is_too_large_for_its_prompt_is_refused_before_it_is_sent(path, bounded):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with bounded.raw(f"{head}Content-Length: 3000000\r\n\r\n".encode()) as connection:
        answer = b""
        while b"tokens > 6000 maximum" not in answer and (more := connection.recv(10_000)):
            answer += more
    assert b"tokens > 6000 maximum" in answer
    assert answer.startswith(b"HTTP/1.1 400 ")
    refused(bounded.ask("POST", path, {"stop": "x" * 3_000_000}))


def test_a_large_body_that_may_be_within_its_bound_is_read():
    engine, _ = made(6000)
    with serving(engine) as served:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"x": "x" * 900_000}}
        assert served.ask("POST", "/v1/chat/completions", asked).status == 200
        asked = {"prompt": ["Hi", "there"], "metadata": {"x": "x" * 3_000_000}}
        assert served.ask("POST", "/v1/completions", asked).status == 200


def test_what_is_refused_by_its_bytes_is_not_rendered_either():
    engine, tokenizer = made(6000)
    tokenizer.inner._tokenizer.chat_template = "{{ raise_exception('rendered') }}"
    with serving(engine) as served:
        refused(served.ask("POST", "/v1/chat/completions", {"messages": USER}))


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_that_is_being_encoded_is_given_up_when_its_client_goes(path):
    engine, tokenizer = made()
    with serving(engine) as served:
        connection = served.raw(post(path, ASKED[path]))
        assert tokenizer.begun.wait(20)
        connection.close()
        assert until(lambda: not served.server.server_state.tasks)
        tokenizer.go_on.set()
        served.core._long_prompts_pool.submit(lambda: None).result(20)  # the only thread for long prompts is free again
    assert tokenizer.long == 2
    assert engine.told.tickets == []


def test_a_prompt_that_is_being_encoded_is_given_up_when_the_server_ends():
    engine, tokenizer = made()
    with serving(engine, Options(drain_s=0.2)) as served:
        connection = served.raw(post("/v1/completions", {"prompt": LONG}))
        assert tokenizer.begun.wait(20)
        served.server.should_exit = True
        assert until(lambda: not engine.alive)
        tokenizer.go_on.set()
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"message":"the server is stopping' in answer
        connection.close()
    assert tokenizer.long == 2


@pytest.mark.slow
def test_a_prompt_that_waits_for_another_one_is_not_rendered_any_more_when_its_client_has_gone(monkeypatch):
    engine, tokenizer = made()
    with serving(engine) as served:
        first = served.raw(post("/v1/completions", {"prompt": LONG}))
        assert tokenizer.begun.wait(20)
        second = served.raw(post("/v1/chat/completions", {"messages": USER}))
        assert until(lambda: served.core._long_prompts_pool._work_queue.qsize() == 1)
        rendered = []
        monkeypatch.setattr(
            "mlx_zip.server.core.messages_for_template", lambda _, said: rendered.append(said) or [*said]
        )
        second.close()
        assert until(lambda: len(served.server.server_state.tasks) == 1)
        tokenizer.go_on.set()
        assert served.core._long_prompts_pool.submit(lambda: None).result(20) is None
        assert first.recv(100).startswith(b"HTTP/1.1 ")
        first.close()
    assert rendered == []


TOOL = {"name": "shell", "description": LONG, "parameters": {"type": "object"}}
NAMES = {"name": "shell", "parameters": {"type": "object", "properties": {LONG: {"type": "string"}}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": NAMES}]}),
        ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"more": LONG}}),
        ("/v1/messages", {**ANTHROPIC, "messages": [*HI, {"role": "assistant", "content": LONG}]}),
    ],
    ids=["prompt", "a tool's description", "a tool's fields", "a template's argument", "the answer's beginning"],
)
def test_a_short_prompt_does_not_wait_for_long_ones(path, body):
    engine, tokenizer = made(template="{{ tools }}{{ more }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(engine) as served:
        connections = [served.raw(post(path, body)) for _ in range(6)]
        assert tokenizer.begun.wait(20)
        assert served.chat().status == 200
        assert tokenizer.long == 2
        for connection in connections:
            connection.close()
        assert until(lambda: not served.server.server_state.tasks)
        tokenizer.go_on.set()
