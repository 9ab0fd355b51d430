"""Streamed text is split into reasoning, text and calls, however it was cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.server.answers import splitter as parts
from mlx_zip.server.answers.answer_deltas import PlacedTokens
from mlx_zip.server.answers.splitter import Splitter
from mlx_zip.server.answers.turn import Reasoning, Text, TokenLogprob, Tool, ToolCall, Turn
from support.tool_templates import KINDS, with_tools

TOOLS = (Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("now"))
TOKENIZERS = {kind: with_tools(kind) for kind in KINDS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OPEN = TOKENIZERS["tags"].encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
CLOSED = TOKENIZERS["tags"].encode("<think>\n\n</think>\n\n", add_special_tokens=False)


def asked(**fields):
    return Turn(messages=[{"role": "user", "content": "hi"}], **{"tools": TOOLS, **fields})


def split(text, kind="tags", turn=None, prompt_ids=(), cuts=(), reason="stop"):
    """(reasoning, text, calls as (name, arguments), the splitter) of a text fed in pieces. reason: why it ended."""
    splitter = Splitter(TOKENIZERS[kind], turn or asked(), prompt_ids)
    edges = [0, *sorted(cuts), len(text)]
    deltas = [
        d for a, b in zip(edges, [*edges[1:], len(text)], strict=True) for d in splitter.feed(text[a:b])
    ] + splitter.finish(reason)
    joined = ["".join(d.text for d in deltas if isinstance(d, one)) for one in (Reasoning, Text)]
    calls = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCall)]
    return *joined, calls, splitter.called


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_a_limit_cuts_off_never_shows_its_marks(kind):
    calls = {
        "tags": CALL,
        "list": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
        "headers": '[TOOL_CALLS]add[ARGS]{"a": 1}',
        "llama": '{"name": "add", "parameters": {"a": 1}}',
        "plain": '{"name": "add", "arguments": {"a": 1}}',
    }
    before = "" if kind in ("llama", "plain") else "Well."
    for end in range(2, len(calls[kind]) + 1):
        thought, text, found, _ = split(before + calls[kind][:end], kind, reason="length")
        assert (thought, text) == ("", before), calls[kind][:end]
        assert found in ([], [("add", {"a": 1})])


def test_what_a_limit_cuts_off_is_text_where_no_call_has_begun():
    for text in ("I said", "a <", "a [1", "a {", "{", "1 < 2"):
        assert split(text, reason="length")[1] == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ("", "hello", [], False)),
        ("<think>\nhm\n</think>\n\nhello", ("hm", "hello", [], False)),
        ("\n<think>hm", ("hm", "", [], False)),
        ("a <think>b</think> c", ("", "a <think>b</think> c", [], False)),
        (CALL, ("", "", [("add", {"a": 1})], True)),
        (f"Well.\n{CALL}\n{OTHER}\n", ("", "Well.", [("add", {"a": 1}), ("now", {})], True)),
        (f"<think>so</think>{CALL} then", ("so", "then", [("add", {"a": 1})], True)),
        (CALL.removesuffix("\n</tool_call>"), ("", "", [("add", {"a": 1})], True)),
        (CALL[:30], ("", CALL[:30], [], False)),
        ("a <tool_call> b </tool_call> c", ("", "a <tool_call> b </tool_call> c", [], False)),
        ("a <tool_c", ("", "a <tool_c", [], False)),
        (CALL.replace("1", "[1"), ("", CALL.replace("1", "[1"), [], False)),
        (CALL.replace("{", "[", 1), ("", CALL.replace("{", "[", 1), [], False)),
        (CALL.replace('{"a": 1}', "7"), ("", CALL.replace('{"a": 1}', "7"), [], False)),
        (CALL.replace("1", '"</tool_call>\\""'), ("", "", [("add", {"a": '</tool_call>"'})], True)),
        (CALL.replace("1", "1e999"), ("", CALL.replace("1", "1e999"), [], False)),
        (CALL.replace("1", "[" * 99999), ("", CALL.replace("1", "[" * 99999), [], False)),
    ],
)
def test_an_answer_is_split(text, expected):
    assert split(text) == expected


@pytest.mark.parametrize(
    ("kind", "text", "calls"),
    [
        ("list", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', 2),
        ("headers", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', 2),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', 1),
        ("llama", ' \n{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', 1),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', 1),
        ("plain", '{"name": "add", "arguments": {"a": 1}}; {"name": "now"}', 2),
    ],
)
def test_calls_of_every_format_are_read(kind, text, calls):
    expected = [("add", {"a": 1}), ("now", {})][:calls]
    assert split(text, kind) == ("", "", expected, True)
    assert split(text, kind, cuts=range(1, len(text))) == ("", "", expected, True)


def test_json_that_only_looks_like_a_call_stays_text():
    for text in ('{"name": "Bob", "arguments": {}}', '{"names": []}', '{"name": "add"', "{}", "[1]", "  {"):
        assert split(text, "llama") == ("", text, [], False)


def test_json_that_is_no_call_is_not_held_back():
    splitter = Splitter(TOKENIZERS["llama"], asked())
    assert splitter.feed('{"answer": 5') == [Text('{"answer": 5')]


def test_without_tools_marks_of_calls_are_text():
    assert split(CALL, turn=asked(tools=())) == ("", CALL, [], False)
    assert split(CALL, turn=asked(tool_choice="none")) == ("", CALL, [], False)


def test_a_prompt_that_opens_the_reasoning_makes_the_answer_begin_in_it():
    assert split("hm\n</think>\n\nhello", prompt_ids=OPEN) == ("hm", "hello", [], False)
    assert split("hm", prompt_ids=OPEN) == ("hm", "", [], False)


def test_a_prompt_that_closes_the_reasoning_leaves_none():
    assert split("<think>x</think>", prompt_ids=CLOSED) == ("", "<think>x</think>", [], False)


def test_a_prefill_may_open_the_reasoning():
    turn = asked(prefill="<think> let me")
    ids = TOKENIZERS["tags"].encode("assistant\n<think> let me", add_special_tokens=False)
    assert split(" see</think>yes", turn=turn, prompt_ids=ids) == ("see", "yes", [], False)


def test_only_one_call_is_made_where_parallel_calls_are_off():
    whole = f"{CALL}\n{OTHER}"
    assert split(whole, turn=asked(parallel_tool_calls=False)) == ("", OTHER, [("add", {"a": 1})], True)


def test_a_call_without_an_end_becomes_text_at_a_bound(monkeypatch):
    monkeypatch.setattr(parts, "MOST_CALL_CHARACTERS", 100)
    splitter, text = Splitter(TOKENIZERS["tags"], asked()), "<tool_call>" + '{"a":"x' * 50
    shown = "".join(d.text for d in splitter.feed(text))
    assert len(text) - len(shown) < 100
    assert split(text) == split(text, cuts=range(1, len(text))) == ("", text, [], False)


def test_text_before_marks_is_shown_at_once():
    splitter = Splitter(TOKENIZERS["tags"], asked())
    assert splitter.feed("hello wor") == [Text("hello wor")]
    assert splitter.feed(" <tool") == []
    assert splitter.feed("box>") == [Text(" <toolbox>")]


def test_reasoning_is_shown_as_it_comes():
    splitter = Splitter(TOKENIZERS["tags"], asked())
    assert splitter.feed("<think>one ") == [Reasoning("one")]
    assert splitter.feed("two</th") == [Reasoning(" two")]
    assert splitter.feed("ink>three", base_tokens=3) == [Text("three")]
    assert splitter.reasoning_tokens == 3


def test_log_probabilities_stay_with_the_text_of_their_tokens():
    tokens, deltas, characters = PlacedTokens(), [], 0
    splitter = Splitter(TOKENIZERS["tags"], asked(), tokens_of=tokens.take)
    for n, piece in enumerate(["<think>", "a", "</think>", "\n\n", "b", " <to", "y>", f"c{CALL}"]):
        characters += len(piece)
        tokens.add(characters, None, TokenLogprob(piece, piece.encode(), -float(n)))
        deltas += splitter.feed(piece)
    found = [(d.text, [one.text for one in d.logprobs]) for d in deltas + splitter.finish() if isinstance(d, Text)]
    assert found == [("b", ["b"]), (" <toy>", [" <to", "y>"]), ("c", [f"c{CALL}"])]


def test_calls_have_ids_of_their_own():
    deltas = Splitter(TOKENIZERS["tags"], asked()).feed(CALL + OTHER)
    ids = [d.id for d in deltas if isinstance(d, ToolCall)]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)


BITS = [CALL, OTHER, "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "add", ', "[ARGS]"]
PIECES = st.lists(
    st.sampled_from([*BITS, *(bit[:7] for bit in BITS), " ", "\n", " " * 70, "x", '"', "\\", "{}", '"a": 1}}', "é"])
)


@given(PIECES.map("".join), st.lists(st.integers(0, 400)), st.sampled_from(KINDS), st.sampled_from([(), OPEN, CLOSED]))
def test_the_parts_do_not_depend_on_how_the_text_was_cut(text, cuts, kind, prompt_ids):
    whole = split(text, kind, prompt_ids=prompt_ids)
    assert split(text, kind, prompt_ids=prompt_ids, cuts=[min(cut, len(text)) for cut in cuts]) == whole
    assert split(text, kind, prompt_ids=prompt_ids, cuts=range(1, len(text))) == whole


@given(PIECES.map("".join), st.lists(st.integers(0, 400)))
def test_a_bound_on_calls_does_not_depend_on_how_the_text_was_cut(text, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST_CALL_CHARACTERS", 20)
        assert split(text, cuts=[min(cut, len(text)) for cut in cuts]) == split(text)


@given(PIECES.map("".join), st.sampled_from(KINDS))
def test_no_text_is_lost_but_marks_calls_and_white_space(text, kind):
    reasoning, shown, calls, _ = split(text, kind)
    if not calls:
        marks = 0 if "<think>" not in text else len("<think></think>")
        assert sum(not c.isspace() for c in text) - sum(not c.isspace() for c in reasoning + shown) <= marks
