"""Bodies of the shape that agents and their libraries send: keys, types and sizes are theirs, the words are not."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest

from mlx_zip.engine import Differing, EngineInfo
from mlx_zip.server.answers.answer_deltas import mask_letters_and_digits
from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, Script
from support.http_server import serving
from support.tool_templates import with_tools

SHELL = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what to run"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}


def words(n):
    return ("word " * n)[:n]


def responses(*items, **fields):
    """What Codex sends."""
    function = {"type": "function", "name": "shell", "description": words(80), "strict": False, "parameters": SHELL}
    inner = {"type": "function", "name": "wait", "description": words(90), "strict": False, "parameters": SHELL}
    others = [
        {"type": "namespace", "name": "agents", "description": words(40), "tools": [inner]},
        {"type": "custom", "name": "patch", "description": words(50), "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ]
    part = {"type": "input_text", "text": words(300)}
    said = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [part]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [part]},
    ]
    return "/v1/responses", {
        "model": "stories",
        "stream": True,
        "input": [*said, *items],
        "tools": [function, *others],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": words(36),
        "client_metadata": {"session_id": words(36), "x-codex-turn-metadata": words(300)},
        "text": {"verbosity": "low"},
        "context_management": [{"type": "compaction", "compact_threshold": 100}],
        **fields,
    }


def messages(*said, header="cch=1;", **fields):
    """What Claude Code sends."""
    kept = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; {header}"},
        {"type": "text", "text": words(60), **kept},
        {"type": "text", "text": words(200), **kept},
    ]
    reminder = {"type": "text", "text": words(300)}
    return "/v1/messages?beta=true", {
        "model": "stories",
        "messages": [
            {"role": "user", "content": [reminder, {"type": "text", "text": "Hi", **kept}]},
            {"role": "system", "content": words(90)},
            *said,
        ],
        "system": system,
        "tools": [
            {"name": "shell", "description": words(200), "input_schema": SHELL},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": words(150), "device": None},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **fields,
    }


def chat(*said, **fields):
    """What opencode, Cline, aider and litellm send."""
    function = {"name": "shell", "description": words(100), "parameters": SHELL}
    return "/v1/chat/completions", {
        "model": "stories",
        "messages": [{"role": "system", "content": words(900)}, {"role": "user", "content": "Hi"}, *said],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


ANSWERED = {
    "type": "message",
    "id": "msg_3",
    "role": "assistant",
    "status": "completed",
    "phase": "final_answer",
    "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c",
    "name": "shell",
    "arguments": "{}",
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": words(116)}
USE = {"type": "tool_use", "id": "t", "name": "shell", "input": {"command": "ls"}, "caller": {"type": "direct"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "a b", "is_error": False, "cache_control": {}}
OF_LITELLM = {
    "role": "assistant",
    "content": None,
    "tool_calls": [CALLED | {"index": 0, "provider_specific_fields": None}],
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
    "refusal": None,
    "annotations": [],
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
    "reasoning": "Hm.",
    "reasoning_details": [],
    "id": "m1",
    "metadata": {},
}
SENT = {
    "Codex's first turn": responses(),
    "Codex's next turn": responses(
        ANSWERED,
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
        CALL | {"namespace": None},
        OUTPUT,
    ),
    "Claude Code's first turn": messages(),
    "Claude Code's next turn": messages(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "Go on", "cache_control": {}}]},
    ),
    "opencode's next turn": chat(
        {"role": "assistant", "content": "", "tool_calls": [CALLED], "reasoning_content": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "a b"},
        max_tokens=8192,
    ),
    "opencode's title": chat(tools=None, tool_choice=None),
    "Cline's next turn": chat(
        {"role": "assistant", "content": [{"type": "text", "text": "Well.", "cache_control": {}}]},
        {"role": "user", "content": [{"type": "text", "text": words(80)}, {"type": "text", "text": words(90)}]},
        temperature=0,
        verbosity="low",
    ),
    "aider's turn": chat({"role": "assistant", "content": "Ok."}, temperature=0, tools=None, tool_choice=None),
    "litellm's next turn": chat(
        OF_LITELLM,
        {"role": "tool", "tool_call_id": "call_1", "name": "shell", "content": "a b", "cache_control": {}},
        functions=[],
        ignore_eos=False,
    ),
}


@contextmanager
def serving_tools():
    engine = FakeEngine(Script(text="Well."), vocab=with_tools())
    engine.info = EngineInfo("stories", len(engine.tokenizer), 100_000, 2, 64, "0123456789abcdef0123")
    with serving(engine) as server:
        yield server


@pytest.fixture
def served():
    with serving_tools() as server:
        yield server


@pytest.fixture(scope="module")
def shared():
    """A server for tests that only ask; it remembers which tools it has named in its log."""
    with serving_tools() as server:
        yield server


@pytest.mark.parametrize("name", SENT)
def test_what_agents_send_is_answered(shared, name):
    path, body = SENT[name]
    answer = shared.ask("POST", path, body)
    assert answer.status == 200, answer.body
    ends = ("response.completed", "end_turn", '"finish_reason":"stop"')
    assert any(end in answer.body.decode() for end in ends)


def figures(served, path, body):
    """The field mlx_zip of a whole answer."""
    return served.ask("POST", path, body | {"stream": False, "stream_options": None}).json["mlx_zip"]


def test_tools_that_are_left_out_are_named_in_the_answer_and_once_in_the_log(served, caplog):
    with caplog.at_level(logging.WARNING):
        found = [figures(served, *responses(parallel_tool_calls=False)) for _ in range(2)]
        assert figures(served, *messages())["tools_left_out"] == ["web_search_20250305 web_search"]
    names = ["namespace agents", "custom patch", "web_search", "image_generation"]
    assert [one["tools_left_out"] for one in found] == [names, names]
    assert "tools_left_out" not in figures(served, *chat())
    assert sum("namespace agents" in record.getMessage() for record in caplog.records) == 1


def test_the_log_names_a_bounded_number_of_tools_that_are_left_out(served, caplog):
    path, body = responses(stream=False)
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            many = [{"type": "custom", "name": f"tool {n}.{i}"} for i in range(60)]
            assert len(figures(served, path, body | {"tools": many})["tools_left_out"]) == 60
    names = [name for record in caplog.records for name in record.getMessage().split("'") if "tool " in name]
    assert len(names) == len(set(names)) == 100


def test_a_model_is_not_told_of_tools_that_are_left_out(served):
    served.ask(*("POST", *responses()))
    prompt = served.core.engine.tokenizer.decode(served.core.engine.told.submissions[-1].base_ids)
    assert '"name": "shell"' in prompt
    assert "namespace" not in prompt
    assert "patch" not in prompt


def test_a_header_that_changes_with_every_request_does_not_change_the_prompt(served):
    for header in ("cch=1;", "cch=2; cc_is_subagent=true;"):
        served.ask(*("POST", *messages(header=header)))
    first, second = (list(one.base_ids) for one in served.core.engine.told.submissions[-2:])
    assert first == second
    path, body = chat()
    lines = [f"x-anthropic-billing-header: cch={n};\nYou help." for n in range(2)]
    for line in lines:
        served.ask("POST", path, body | {"messages": [{"role": "system", "content": line}, *body["messages"]]})
    first, second = (list(one.base_ids) for one in served.core.engine.told.submissions[-2:])
    assert first == second


@pytest.mark.parametrize(("show", "kept", "now"), [(False, "xxx x00!", "xxx é0"), (True, "abc d12!", "xyz é7")])
def test_an_answer_and_the_log_say_where_the_prompt_differs_and_hide_the_words(show, kept, now, caplog):
    now = now.replace("é", "x" if not show else "é")
    engine = FakeEngine(Script(text="Well."), vocab=with_tools())
    ids = [tuple(engine.tokenizer.encode(text, add_special_tokens=False)) for text in ("abc d12!", "xyz é7")]
    engine.script.differing = Differing(17, *ids)
    with serving(engine, Options(show_text=show)) as served, caplog.at_level(logging.INFO):
        for path, body in (responses(), messages(), chat()):
            found = figures(served, path, body)["prompt_differs"]
            assert {key: str(value).strip() for key, value in found.items()} == {"at": "17", "kept": kept, "now": now}
        assert now in served.ask("POST", *chat()).body.decode()
    told = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert len(told) == 4
    assert all("token 17" in line and kept in line and now in line for line in told)


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_input_is_answered_with_nothing_and_without_the_model(served, stream):
    before = len(served.core.engine.told.submissions)
    path, body = responses(input=[], instructions="Help.", stream=stream)
    answer = served.ask("POST", path, body)
    assert answer.status == 200
    assert "completed" in answer.body.decode()
    assert len(served.core.engine.told.submissions) == before
    assert served.ask("POST", "/v1/responses/input_tokens", body).json["input_tokens"] == 0


def test_nothing_but_punctuation_and_space_is_left_of_a_hidden_text():
    assert mask_letters_and_digits("Ab_c 19:30 <é😀न\u0941٣>") == "xx_x 00:00 <xxxxx>"
