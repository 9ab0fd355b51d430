"""Bodies of Anthropic's Messages: the turns that they ask for, and those that are refused."""

from dataclasses import replace

import pytest

from mlx_zip.server.answers.turn import Tool, Turn
from mlx_zip.server.anthropic.bodies import CountBody, MessagesBody, make_messages_turn
from mlx_zip.server.fields import BodyError, parse_body

USER = {"role": "user", "content": "Hi"}
ADD = {"name": "add", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "3"}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def turn(**fields):
    return make_messages_turn(parse_body(MessagesBody, {"model": "m", "max_tokens": 7, "messages": [USER]} | fields))


def messages(*given):
    return list(turn(messages=list(given)).messages)


def test_text_is_the_same_as_one_block():
    assert turn() == Turn(messages=[USER], max_tokens=7, tools=[])
    assert messages({"role": "user", "content": [text("Hi", cache_control={"type": "ephemeral"})]}) == [USER]


@pytest.mark.parametrize("system", ["A\n\nB", [text("A"), text("B", cache_control={"type": "ephemeral", "ttl": "1h"})]])
def test_the_system_prompt_is_text_or_blocks(system):
    assert turn(system=system).messages == [{"role": "system", "content": "A\n\nB"}, USER]


def test_calls_results_and_reasoning_become_messages_of_chat_templates():
    got = messages(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I add.", citations=None),
                USE,
                USE | {"id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT,
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("no"), text("way")]},
                text("Go on"),
            ],
        },
    )
    calls = [{"id": i, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}} for i in ("t1", "t2")]
    assert got == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\n\nway"},
        {"role": "user", "content": "Go on"},
    ]


def test_messages_of_one_role_in_a_row_are_joined():
    assert messages(USER, USER, {"role": "assistant", "content": "A"}, USER) == [
        {"role": "user", "content": "Hi\n\nHi"},
        {"role": "assistant", "content": "A"},
        USER,
    ]


def test_a_message_of_the_model_at_the_end_begins_the_answer():
    got = turn(messages=[USER, {"role": "assistant", "content": [text("The "), text("answer")]}])
    assert (got.messages, got.prefill) == ([USER], "The answer")


def test_options_reach_the_turn():
    got = turn(
        tools=[ADD | {"description": "Adds.", "type": "custom", "strict": True}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
    )
    assert got == Turn(
        messages=[USER],
        tools=[Tool("add", "Adds.", {"type": "object"}, strict=True)],
        tool_choice="add",
        parallel_tool_calls=False,
        schema={"type": "object"},
        max_tokens=7,
        stop=("END",),
        sampling={"temp": 0.5, "top_p": 0.9, "top_k": 4},
        template_options={"enable_thinking": True, "reasoning_effort": "low"},
    )


@pytest.mark.parametrize(
    ("choice", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", "add")]
)
def test_a_choice_of_tools_has_its_own_words(choice, expected):
    named = {"name": "add"} if choice == "tool" else {}
    assert turn(tools=[ADD], tool_choice={"type": choice, **named}).tool_choice == expected


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        (None, {}),
        ({"type": "adaptive"}, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True, "thinking_budget": 2000}),
    ],
)
def test_thinking_is_an_option_of_the_chat_template(thinking, options):
    assert turn(thinking=thinking).template_options == options


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"user_id": "me"}},
        {"service_tier": "auto"},
        {"cache_control": {"type": "ephemeral"}},
        {"inference_geo": "us"},
        {"speed": "fast"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"container": None},
        {"mcp_servers": []},
        {"top_k": None},
        {"tools": None, "tool_choice": None, "stream": None, "stop_sequences": None},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_without_effect_is_accepted(field):
    assert turn(**field) == turn()


def answer(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def question(*blocks):
    return {"role": "user", "content": list(blocks)}


def test_unknown_fields_of_what_was_said_are_passed_over():
    said = [
        USER | {"id": "msg_1", "metadata": {"a": 1}},
        answer(USE | {"caller": {"type": "direct"}, "provider_specific_fields": None}),
        question(RESULT | {"cache_control": {}, "toolset_name": "t"}, text("Go on", color="red")),
    ]
    assert messages(*said) == messages(USER, answer(USE), question(RESULT, text("Go on")))


def test_tools_that_the_server_cannot_run_are_left_out_and_named():
    got = turn(tools=[WEB, ADD])
    assert (got, got.left_out) == (
        replace(turn(tools=[ADD]), left_out=got.left_out),
        ("web_search_20250305 web_search",),
    )
    assert turn(tools=[WEB], tool_choice={"type": "none"}).tools == []


def test_the_line_about_billing_is_no_part_of_the_prompt():
    lines = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;", "You help. x-anthropic-billing-header: no"
    plain = turn(system=[text(lines[1])])
    assert turn(system=[text(lines[0]), text(lines[1])]) == plain
    assert turn(system=f"{lines[0]}\n{lines[1]}") == plain
    assert turn(system=[text(lines[0])]) == turn()


def test_context_management_and_metadata_have_no_effect():
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    assert turn(context_management={"edits": edits}, metadata={"user_id": "u", "more": 1}) == turn()


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [question()]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [question(IMAGE)]}, "messages.0.content.0"),
    ({"messages": [question({"type": "text"})]}, "messages.0.content.0.text"),
    ({"messages": [question(RESULT)]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [USER, answer(USE), question(RESULT | {"content": [IMAGE]})]}, "messages.2.content.0.content.0.type"),
    ({"messages": [question(USE)]}, "messages.0.content.0"),
    ({"messages": [USER, answer(USE), {"role": "system", "content": [RESULT]}]}, "messages.2.content.0"),
    ({"messages": [USER, answer(USE), answer(RESULT)]}, "messages.2.content.0"),
    ({"messages": [USER, answer(USE)]}, "messages"),
    ({"messages": [USER, answer(USE | {"input": "{}"})]}, "messages.1.content.0.input"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system.0.type"),
    ({"tools": [ADD, WEB], "tool_choice": {"type": "any"}}, "tools.1.type"),
    ({"tools": [WEB | {"type": 5}]}, "tools.0.type"),
    ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"stop": "x"}, "stop"),
    ({"stream": 1}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
def test_a_body_that_cannot_be_met_is_refused_naming_the_field(fields, param):
    with pytest.raises(BodyError) as refused:
        turn(**fields)
    assert refused.value.param == param
    assert len(str(refused.value)) < 400


def test_what_is_refused_is_called_by_its_name():
    for fields, name in [
        ({"messages": [question(IMAGE)]}, "image"),
        ({"messages": [USER, answer(USE), question(RESULT | {"content": [IMAGE]})]}, "image"),
        ({"tools": [ADD, WEB], "tool_choice": {"type": "any"}}, "web_search_20250305"),
    ]:
        with pytest.raises(BodyError, match=name):
            turn(**fields)


def test_counting_needs_no_limit_and_takes_none():
    body = {"model": "m", "messages": [USER], "tools": [ADD], "system": "A"}
    got = make_messages_turn(parse_body(CountBody, body))
    assert (got.max_tokens, got.messages[0]["content"], got.tools[0].name) == (-1, "A", "add")
    with pytest.raises(BodyError, match="max_tokens"):
        parse_body(CountBody, body | {"max_tokens": 5})
