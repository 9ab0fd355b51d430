"""Turns with reasoning and tools through both dialects, from the model's text to the client and back."""

import json

import pytest

from support.clients import anthropic_client, openai_client
from support.fake_engine import FakeEngine, Script
from support.http_server import serving
from support.tool_templates import with_tools

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = f"<think>\nI add them.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def served():
    with serving(FakeEngine(Script(text=SAID), vocab=with_tools())) as server:
        yield server


def test_a_turn_of_openais_client_with_tools_streams_and_goes_on(served):
    responses = openai_client(served).responses
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    asked = {
        "model": "stories",
        "input": "1 and 2?",
        "tools": tools,
        "instructions": "Add.",
        "reasoning": {"effort": "low"},
    }
    whole = responses.create(**asked)
    with responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        reasoning, message, first, second = response.output
        assert (reasoning.summary[0].text, message.content[0].text) == ("I add them.", "Let me see.")
        assert json.loads(first.arguments) == {"a": 1}
        assert first.call_id != second.call_id
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in streamed.output
        if item.type == "function_call"
    ]
    responses.create(**asked | {"input": results, "previous_response_id": streamed.id})
    goes_on(served)


def test_a_turn_of_anthropics_client_with_tools_streams_and_goes_on(served):
    messages = anthropic_client(served).messages
    user = {"role": "user", "content": "1 and 2?"}
    asked = {"model": "stories", "max_tokens": 200, "system": "Add.", "messages": [user]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    tools = {"tools": [{"name": "add", "input_schema": SCHEMA}], "thinking": thinking}
    whole = messages.create(**asked, **tools)
    with messages.stream(**asked, **tools) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        thinking, text, first, second = message.content
        assert (thinking.thinking, text.text, first.input) == ("I add them.", "Let me see.", {"a": 1})
        assert first.id != second.id
        assert message.stop_reason == "tool_use"
        assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in streamed.content
        if block.type == "tool_use"
    ]
    history = [user, streamed.to_param(), {"role": "user", "content": results}]
    messages.create(**asked | {"messages": history}, **tools)
    goes_on(served)


def goes_on(served):
    """Asserts that the last prompt begins with the prompt before and its answer, so that a session is found."""
    engine = served.core.engine
    before, last = (list(submission.base_ids) for submission in engine.told.submissions[-2:])
    text = engine.tokenizer.decode(last)
    assert last[: len(before)] == before
    assert text.startswith(engine.tokenizer.decode(before) + SAID)
    assert text.count("<tool_response>\n3\n</tool_response>") == 2
