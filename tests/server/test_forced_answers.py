"""Forced calls and answers by a schema from the bundled model, through engine and server: what ends by itself is valid.

Set MLX_ZIP_FORCED to the number of requests; a few by default.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_zip.engine.mlx.mlx_engine import MlxEngine, ServeOptions
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.models.loading import load
from mlx_zip.server.options import Options
from support import http_server
from support.schemas import follows, random_object, random_schema
from support.tool_templates import template

REQUESTS = int(os.environ.get("MLX_ZIP_FORCED", "8"))
WORDS = "the dog ran to the park and the dog ran to the tree"
SLOW_S = 120  # for an answer on a machine that does something else too


@pytest.fixture(scope="module")
def served():
    def loaded():
        model, tokenizer = load("stories")
        tokenizer._tokenizer.chat_template = template("tags", thinks=False)
        return model, tokenizer

    def store(made):
        return open_session_store(made.model, made.tokenizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "WAIT_S", SLOW_S)
        with http_server.serving(MlxEngine(loaded, "stories", ServeOptions(), store), Options()) as running:
            yield running


def tool(name, parameters, strict):
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def asked(seed):
    """The fields of a request, and a function that says whether its choice is valid."""
    rng = random.Random(seed)
    fields = {"temperature": 1.0, "seed": seed, "max_tokens": 250}
    if seed % 2:
        schema = random_schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {**fields, "response_format": form}, lambda m: follows(json.loads(m["content"]), schema)
    schemas = {f"tool_{n}": random_object(rng) for n in range(3)}
    tools = [tool(name, schema, seed % 4 == 0) for name, schema in schemas.items()]
    choice = rng.choice(["required", {"type": "function", "function": {"name": "tool_1"}}])
    return {**fields, "tools": tools, "tool_choice": choice}, lambda m: calls_follow(m, schemas, choice)


def calls_follow(message, schemas, choice):
    calls = [call["function"] for call in message["tool_calls"]]
    named = {call["name"] for call in calls}
    valid = all(follows(json.loads(call["arguments"]), schemas[call["name"]]) for call in calls)
    return bool(calls) and not message["content"] and valid and (choice == "required" or named == {"tool_1"})


@pytest.mark.slow
def test_forced_answers_that_end_by_themselves_are_valid(served):
    questions = [asked(seed) for seed in range(REQUESTS)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: served.chat(WORDS, **question[0]), questions))
    ended = [0, 0]
    hypertokens = 0
    for seed, (answer, (_, is_valid)) in enumerate(zip(answers, questions, strict=True)):
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        hypertokens += answer.json["mlx_zip"]["hypertokens"] if "mlx_zip" in answer.json else 0
        if choice["finish_reason"] != "length":
            assert choice["finish_reason"] == ("stop" if seed % 2 else "tool_calls")
            assert is_valid(choice["message"]), choice["message"]
            ended[seed % 2] += 1
    print(f"{sum(ended)} of {REQUESTS} ended by themselves, {hypertokens} hypertokens")
    assert min(ended) > REQUESTS / 4


@pytest.mark.slow
def test_a_streamed_call_is_the_call_of_the_whole_answer(served):
    fields, _ = asked(2)
    whole = served.chat("hi", **fields).json["choices"][0]["message"]["tool_calls"]
    lines = served.chat("hi", stream=True, **fields).body.decode().splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    joined = [call for call in calls if call.get("name")]
    assert [call["name"] for call in joined] == [call["function"]["name"] for call in whole]
    assert "".join(c["arguments"] for c in calls) == "".join(call["function"]["arguments"] for call in whole)


@pytest.mark.slow
def test_the_turn_after_a_call_reuses_the_ids_emitted_for_it(served):
    fields, _ = asked(4)
    first = {"role": "user", "content": "a question that nobody asked before " * 3}
    body = {"model": "stories", "messages": [first], **fields}
    answer = served.ask("POST", "/v1/chat/completions", body).json
    message = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message["tool_calls"]]
    body["messages"] = [first, message, *results]
    usage = served.ask("POST", "/v1/chat/completions", body).json["usage"]
    before = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 40


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "not"),
        ({"tools": [tool("t", {"type": "array"}, True)], "tool_choice": "required"}, "object"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_its_reason(served, fields, reason):
    answer = served.chat(**fields)
    assert answer.status == 400
    assert reason in answer.json["error"]["message"]
