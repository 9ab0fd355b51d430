"""Requests that no server should fall over: each gets its status and an error as JSON, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import select
import time

import pytest

from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, Script
from support.http_server import post, read_all, serving, until

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Tell me a story."}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("http.BODY_S", "running.HEAD_S"):
            patch.setattr(f"mlx_zip.server.{limit}", 1.0)
        with serving(FakeEngine(), Options(max_body_bytes=100_000)) as server:
            yield server


def with_message(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


ADD = {"type": "function", "function": {"name": "add"}}
BODIES = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [1]}, "messages.0"),
    (with_message(role="robot"), "messages.0.role"),
    (with_message(content=7), "messages.0.content"),
    (with_message(content=None), "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages.0.content"),
    (with_message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content.0"),
    (with_message(content=[{"type": "input_audio", "input_audio": {}}]), "messages.0.content.0"),
    (with_message(content=[{"type": "text"}]), "messages.0.content.0.text"),
    (with_message(tool_call_id="1"), "messages.0.tool_call_id"),
    (with_message(function_call={"name": "f"}), "messages.0.function_call"),
    ({"messages": [{"role": "tool", "content": "7"}]}, "messages.0.tool_call_id"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"n": 9}, "n"),
    ({"n": 0}, "n"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop": {}}, "stop"),
    ({"seed": 0.5}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0667": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tools": [{"type": "code_interpreter"}, ADD], "tool_choice": "required"}, "tools.0.type"),
    ({"tools": [{"type": "code_interpreter"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": 5}]}, "tools.0.type"),
    ({"tools": [5]}, "tools.0"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"colour": "red"}, "colour"),
    ({"pack": ""}, "pack"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"content": "text"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image", "text": "x"}]}}, "prediction.content.0.type"),
    ({"prediction": {"type": "content", "content": "text", "colour": 1}}, "prediction.colour"),
]


@pytest.mark.parametrize(("fields", "param"), BODIES, ids=[json.dumps(fields)[:60] for fields, _ in BODIES])
def test_a_field_that_is_wrong_or_unsupported_is_refused_by_name(served, fields, param):
    answer = served.ask("POST", PATH, {"messages": USER, **fields} if fields else {})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["message"]


def test_fields_without_effect_are_accepted(served):
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": False}
    harmless |= {"service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y", "verbosity": "high"}
    harmless |= {"context_management": {"edits": []}, "ignore_eos": False, "functions": [], "function_call": "none"}
    harmless |= {"colour": None}
    assert served.ask("POST", PATH, {"messages": USER, **harmless, "stop": None, "logit_bias": None}).status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"temperature": 1e999}', "invalid_json"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b"[" * 50_000 + b"]" * 50_000, "too_deep"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "too_deep"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(served, body, code):
    answer = served.ask("POST", PATH, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, code)


def test_a_body_in_which_a_field_has_no_value_is_refused_with_the_field(served):
    answer = served.ask("POST", PATH, b'{"messages": [], "temperature": , "seed": 1}')
    assert answer.json["error"]["message"].endswith(', the value of "temperature"')


def test_a_key_that_comes_twice_is_no_error(served):
    body = json.dumps({"messages": USER}).encode()
    assert served.ask("POST", PATH, b'{"messages": [],' + body[1:]).status == 200


def test_half_a_surrogate_pair_is_refused_as_it_is_no_text(served):
    answer = served.ask("POST", PATH, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    assert answer.status == 400
    assert "Unicode" in answer.json["error"]["message"]
    answer = served.ask("POST", PATH, b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}')
    assert answer.status == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_a_body_of_another_type_is_refused(served, headers):
    answer = served.ask("POST", PATH, json.dumps({"messages": USER}).encode(), headers)
    assert answer.status == 415
    assert answer.json["error"]["message"]


def test_too_many_stop_strings_are_refused_by_their_number(served):
    assert served.ask("POST", PATH, {"messages": USER, "stop": [f"end {i}" for i in range(32)]}).status == 200
    for path, fields in ((PATH, {"stop": ["a"] * 33}), ("/v1/messages", {"stop_sequences": ["a"] * 33})):
        answer = served.ask("POST", path, {"model": "stories", "max_tokens": 5, "messages": USER, **fields})
        assert answer.json["error"]["message"].endswith("this has 33 items, and at most 32 are allowed")


@pytest.mark.parametrize(("metadata", "length", "most"), [({"a" * 65: "b"}, 65, 64), ({"a": "é" * 513}, 513, 512)])
def test_a_text_that_is_too_long_is_refused_by_its_characters(served, metadata, length, most):
    answer = served.ask("POST", "/v1/responses", {"input": "Hi", "metadata": metadata})
    message = f"this has {length} characters, and at most {most} are allowed"
    assert (answer.status, answer.json["error"]["message"].endswith(message)) == (400, True)


@pytest.mark.parametrize("pack", [{}, 7, True])
def test_what_is_no_pack_is_told_what_a_pack_is(served, pack):
    answer = served.ask("POST", PATH, {"messages": USER, "pack": pack})
    assert answer.json["error"]["message"] == "pack: this must be the name of a pack, or a list of names"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/mlx_zip/sessions", "DELETE, GET, HEAD"),
        ("POST", "/v1/responses/x", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(served, method, path, allowed):
    answer = served.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", PATH, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_an_unknown_route_and_a_wrong_method_are_told_as_json(served, method, path, status):
    answer = served.ask(method, path)
    assert answer.status == status
    assert answer.json["error"]["message"]


def test_errors_of_the_messages_route_are_told_in_its_dialect(served):
    answer = served.ask("GET", "/v1/messages/none")
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "not_found_error"


def test_another_model_is_not_found(served):
    answer = served.ask("POST", PATH, {"messages": USER, "model": "gpt"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(served):
    assert served.ask("POST", PATH, b" " * 200_000).status == 413
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with served.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + 4 * chunk + b"0\r\n\r\n") as connection:
        assert b" 413 " in read_all(connection).split(b"\r\n")[0]


def test_a_sender_that_asks_first_is_told_before_it_sends(served):
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served.raw(head.encode() + b"Expect: 100-continue\r\nContent-Length: 999999999999\r\n\r\n") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


@pytest.mark.slow
def test_a_body_that_does_not_arrive_is_given_up(served):
    data = post(PATH, {"messages": USER})
    with served.raw(data[:-10]) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_a_head_that_does_not_arrive_is_given_up(served):
    with served.raw(b"POST / HT") as connection, contextlib.suppress(ConnectionResetError):
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET /" + b"a" * 70_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a" * 70_000, 431),
    ],
)
def test_what_is_no_http_is_told_so_as_json(served, data, status):
    with served.raw(data) as connection:
        answer = read_all(connection)
    error = json.loads(answer.split(b"\r\n\r\n")[1])["error"]
    assert (answer.split()[1], error["code"]) == (str(status).encode(), "invalid_http")
    assert ("too large" in error["message"]) == (status == 431)


@pytest.mark.parametrize(
    "data",
    [
        post("/v1/messages", {}).replace(b"HTTP/1.1", b"HTTP/x"),
        post("/v1/messages", {}, "Host: localhost"),
        post("/v1/messages", {}, "Content-Length: -1"),
        post("/v1/messages", {}).replace(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"zz\r\n",
        post(PATH, {}) + post("/v1/messages", {}, "Host: localhost"),
    ],
)
def test_what_is_no_http_is_told_so_in_the_dialect_of_its_path(served, data):
    with served.raw(data) as connection:
        answer = read_all(connection)
    error = json.loads(answer[answer.rindex(b"\r\n\r\n") :])
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"1;" + b"a" * 70_000, b"0\r\nA: " + b"a" * 70_000], ids=len)
def test_nonsense_after_a_head_does_not_reach_the_app(served, chunks):
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"too large" not in answer


def test_a_client_that_closes_its_sending_side_still_reads_a_quick_answer(served):
    with served.raw(post(PATH, {"messages": []})) as connection:
        connection.shutdown(1)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 3000000\r\n".encode()
UNREAD = {  # requests that are refused before they are read
    400: b"hello\r\n\r\n",
    431: b"GET /" + b"a" * 70_000,
    403: HEAD.replace(b"localhost", b"elsewhere") + b"\r\n",
    404: HEAD.replace(PATH.encode(), b"/nowhere") + b"\r\n",
    413: HEAD + b"Expect: 100-continue\r\nContent-Type: application/json\r\n\r\n",
    415: HEAD + b"Content-Type: text/plain\r\n\r\n",
}


@pytest.mark.parametrize("status", UNREAD)
def test_what_a_refused_client_still_sends_does_not_cost_it_its_answer(served, status):
    with served.raw(UNREAD[status]) as connection:
        assert select.select([connection], [], [], 20)[0]  # the answer is there
        for _ in range(10):
            connection.sendall(b"x" * 100_000)
            time.sleep(0.01)
        assert read_all(connection).startswith(f"HTTP/1.1 {status} ".encode())


LAST = post(PATH, {"messages": []}, "Connection: close")


@pytest.mark.parametrize(
    "data",
    [LAST + b"x", LAST + b"x" * 3_000_000, b"hello\r\n\r\n"],
    ids=["the last request", "much behind it", "no HTTP"],
)
def test_what_follows_the_end_of_a_connection_does_not_cost_it_its_answer(served, data):
    with served.raw(data) as connection:
        assert select.select([connection], [], [], 20)[0]  # the answer is there
        for _ in range(10):
            connection.sendall(b"x" * 100_000)
            time.sleep(0.01)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_an_offer_of_another_protocol_is_passed_over_without_a_word(served, caplog):
    offer = ("Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    with caplog.at_level("WARNING"), served.raw(post(PATH, {"messages": USER}, *offer)) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


@pytest.mark.parametrize(("bound", "most"), [("LINGER_S", 0.1), ("LINGER_BYTES", 100_000)])
def test_a_refused_client_that_goes_on_sending_is_cut_off(served, monkeypatch, bound, most):
    monkeypatch.setattr("mlx_zip.server.running.LINGER_S", 1000)
    monkeypatch.setattr("mlx_zip.server.running.LINGER_BYTES", 1 << 40)
    monkeypatch.setattr(f"mlx_zip.server.running.{bound}", most)

    def send():
        for _ in range(2000):
            connection.sendall(b"x" * 1000)
            time.sleep(0.005)

    with served.raw(UNREAD[415]) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        send()


def test_a_refused_client_that_leaves_is_forgotten(served):
    with served.raw(UNREAD[415]) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 415 ")
        assert served.server.server_state.connections
    assert until(lambda: not served.server.server_state.connections, 1.5)


def test_requests_on_one_connection_are_answered_in_turn(served):
    with served.raw(post(PATH, {"messages": []}) + post(PATH, {"messages": USER}, "Connection: close")) as connection:
        answers = read_all(connection)
    assert answers.index(b"HTTP/1.1 400 ") < answers.index(b"HTTP/1.1 200 ")


def test_the_server_goes_on_after_all_that(served):
    assert served.chat().status == 200
    assert until(lambda: all(ticket.ended.is_set() for ticket in served.core.engine.told.tickets))


def test_a_fault_nobody_expected_is_told_without_its_words(caplog):
    engine = FakeEngine(Script())
    engine.answers = lambda: 1 / 0
    with serving(engine) as served:
        answer = served.chat()
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        assert "division" not in answer.body.decode()
        assert served.ask("GET", "/health").status == 200
