"""Bodies and requests that were made to cost much more than they weigh, or to reach where they should not."""

from __future__ import annotations

import json
import os

import pytest
from pydantic import ValidationError

from mlx_zip.server.anthropic.bodies import MessagesBody
from mlx_zip.server.anthropic.bodies import make_messages_turn as message_turn
from mlx_zip.server.errors import RequestError
from mlx_zip.server.fields import BodyError, check_tools, parse_body
from mlx_zip.server.openai.chat import ChatBody
from mlx_zip.server.openai.completions import CompletionBody
from mlx_zip.server.openai.responses_bodies import ResponseBody
from mlx_zip.server.openai.responses_store import ResponseStore
from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine
from support.http_server import post, read_all, serving

USER = [{"role": "user", "content": "Hi"}]
MANY = 200_000
PATH = "/v1/chat/completions"
SESSIONS = "/v1/mlx_zip/sessions"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(FakeEngine(), Options(session_files=tmp_path_factory.mktemp("files"))) as server:
        yield server


FLOODS = {  # made by the tests: all of them take a second
    "ids below zero": (CompletionBody, lambda: {"prompt": [-1] * MANY}),
    "lists of ids below zero": (CompletionBody, lambda: {"prompt": [[-1]] * MANY}),
    "unknown fields": (ChatBody, lambda: {"messages": USER, **{f"k{i}": 1 for i in range(MANY)}}),
    "messages without fields": (ChatBody, lambda: {"messages": [{}] * MANY}),
    "biases that are text": (ChatBody, lambda: {"messages": USER, "logit_bias": {str(i): "x" for i in range(MANY)}}),
    "stop strings": (ChatBody, lambda: {"messages": USER, "stop": [1] * MANY}),
    "items without fields": (ResponseBody, lambda: {"input": [{}] * MANY}),
    "metadata": (ResponseBody, lambda: {"input": "Hi", "metadata": {str(i): 1 for i in range(MANY)}}),
    "messages that are numbers": (MessagesBody, lambda: {"model": "m", "max_tokens": 1, "messages": [1] * MANY}),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_body_full_of_faults_costs_no_more_than_one_with_a_few(name):
    kind, make = FLOODS[name]
    body = make()
    with pytest.raises(BodyError):
        parse_body(kind, body)
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4


def test_more_messages_than_a_list_may_have_are_refused_by_their_number():
    with pytest.raises(BodyError, match="10000"):
        parse_body(ChatBody, {"messages": USER * 10_001})


def test_a_prompt_of_ids_may_be_as_long_as_a_context():
    assert len(parse_body(CompletionBody, {"prompt": [1] * MANY}).prompt) == MANY


def test_names_of_very_many_tools_are_compared_in_one_pass():
    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str(self) == other

        __hash__ = str.__hash__

    check_tools([Name(i) for i in range(MANY)], "auto")
    assert Name.compared <= MANY


@pytest.mark.slow
def test_a_message_of_very_many_pieces_is_joined_once():
    pieces = [{"type": "text", "text": "x" * 2000}] * 9000
    body = parse_body(
        MessagesBody, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": pieces}] * 9}
    )
    (message,) = message_turn(body).messages
    assert message["content"] == "\n\n".join(["x" * 2000] * 81_000)


def test_a_stored_response_is_read_once_however_many_items_refer_to_it(monkeypatch):
    store = ResponseStore(5, 1 << 20)
    store.add({"id": "r", "output": [{"id": "a"}, {"id": "b"}]}, [])
    reads, get = [], store.get
    monkeypatch.setattr(store, "get", lambda name, *more: reads.append(name) or get(name, *more))
    given = [{"type": "item_reference", "id": name} for name in "abab" * 100]
    assert store.resolve_references(given) == [{"id": name} for name in "abab" * 100]
    assert reads == ["r"]


def test_an_error_quotes_no_more_than_a_beginning_of_what_was_sent(served):
    answer = served.ask("POST", PATH, {"messages": USER, "model": "x" * 500_000})
    assert (answer.status, len(answer.body) < 3000) == (404, True)
    answer = served.ask("POST", PATH, {"messages": USER, "x" * 500_000: 1})
    assert (answer.status, len(answer.body) < 3000) == (400, True)
    assert len(json.dumps(RequestError(400, "x" * 500_000).body("anthropic"))) < 3000


def test_a_body_whose_length_is_told_in_two_ways_is_refused_and_the_connection_closed(served):
    data = post(PATH, {"messages": USER}, "Transfer-Encoding: chunked") + post(PATH, {"messages": USER})
    with served.raw(data) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_host_with_half_a_bracket_is_no_name_of_this_machine(served):
    assert served.ask("GET", "/v1/models", headers={"Host": "[::1"}).status == 403
    assert served.ask("GET", "/v1/models", headers={"Host": "[::1]:8080"}).status == 200


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
@pytest.mark.parametrize("route", ["load", "save"])
def test_a_session_file_must_be_an_ordinary_file(served, tmp_path, kind, route):
    served.core.engine.load_session(_written(tmp_path / "session"))
    file = served.core.options.session_files / f"{kind}-{route}.safetensors"
    target = _written(tmp_path / "outside") if kind == "link" else tmp_path / "nowhere"
    {"folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}.get(kind, lambda: file.symlink_to(target))()
    answer = served.ask(
        "POST", f"{SESSIONS}/{route}", {"file": file.name, **({"session": "a"} if route == "save" else {})}
    )
    assert (answer.status, answer.json["error"]["param"]) == (400, "file")
    assert not (tmp_path / "nowhere").exists()


def _written(file):
    file.write_text("a")
    return file


def test_the_description_tells_bounds_of_lists_and_types_of_answers(served):
    described = served.ask("GET", "/openapi.json").json
    assert list(described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert described["components"]["schemas"]["ChatBody"]["properties"]["messages"]["maxItems"] == 10_000


def test_objects_of_one_name_in_several_dialects_are_described_each_with_what_it_accepts(served):
    described = served.ask("GET", "/openapi.json").json["components"]["schemas"]

    def accepted(reference):
        return described[reference["$ref"].rpartition("/")[2]]

    chat = accepted(described["ChatBody"]["properties"]["messages"]["items"])
    assert described["ChatBody"]["properties"]["verbosity"] == {"description": "accepted, without effect"}
    assert (described["ChatBody"]["additionalProperties"], chat["additionalProperties"]) == (False, True)
    assert {"type": "null"} in chat["properties"]["name"]["anyOf"]
    names = {name for name in described if name.rpartition("__")[2] == "Message"}
    fields = [set(described[name]["properties"]) for name in names]
    assert len(names) == 3
    assert {frozenset(one & {"tool_calls", "status"}) for one in fields} == {
        frozenset({"tool_calls"}),
        frozenset({"status"}),
        frozenset(),
    }
