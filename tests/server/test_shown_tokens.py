"""The tokens that a text consists of: joined they are the text, whatever was held back, cut off or dropped."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_zip.engine import Counted, Counts, Emitted, Finished, Origin, Started
from mlx_zip.packs.pack import Pack
from mlx_zip.server.answers.answer_deltas import AnswerDeltas
from mlx_zip.server.answers.turn import Done, LearnedEntries, Reasoning, Text, Tool, ToolCall, Turn
from mlx_zip.server.options import Options
from mlx_zip.text.token_facts import TokenTexts
from mlx_zip.text.tokenizers import REPLACEMENT
from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, serving
from support.tool_templates import with_tools

USER = [{"role": "user", "content": "hi"}]
TOOLS = (Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
TAGS = with_tools("tags")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [
    "hello",
    " wörld",
    "😀",
    "<think>",
    "</think>",
    "\n",
    " ",
    CALL,
    CALL[:20],
    "الم",
    "<tool_c",
    "END",
    "EN",
    "x",
]


def asked(**fields):
    return Turn(messages=USER, show=True, **fields)


def answered(vocab, turn, expansions, reason="length"):
    """The deltas of an answer whose ids expand to these base ids; those of several are hypertokens."""
    answering = AnswerDeltas(vocab, turn, (), TokenTexts(vocab))
    deltas = answering.add_event(Started(5, 0, 5))
    for nth, base_ids in enumerate(expansions):
        one = base_ids[0] if len(base_ids) == 1 else len(vocab) + nth
        origin = Origin("answer", 5 + nth) if len(base_ids) > 1 else None
        deltas += answering.add_event(Emitted(one, tuple(base_ids), origin=origin, learned=((5, 6),)))
    return [*deltas, *answering.add_event(Finished(reason, Counts()))]


def cut(ids, sizes):
    """Base ids in expansions of these sizes, in turn."""
    at, out = 0, []
    while at < len(ids):
        size = sizes[len(out) % len(sizes)]
        out.append(ids[at : at + size])
        at += size
    return out


def texts(deltas):
    return [delta for delta in deltas if isinstance(delta, Text)]


def check(deltas, vocab, expansions):
    """Asserts that tokens make up their texts, and come in the order of the ids."""
    for delta in texts(deltas):
        assert "".join(token.text for token in delta.tokens) == delta.text
    tokens = [token for delta in texts(deltas) for token in delta.tokens]
    whole = [token.id for token in tokens if not token.continues]
    ids = [one[0] if len(one) == 1 else len(vocab) + nth for nth, one in enumerate(expansions)]
    left = iter(ids)
    assert all(one in left for one in whole)  # in order, each at most once
    return tokens, ids


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from([(), ("END",), ("\n\n", "ld"), ("<tool_call>x",)]),
    st.booleans(),
    st.booleans(),
)
def test_tokens_joined_are_the_text(pieces, sizes, stop, with_tool, ends):
    ids = TAGS.encode("".join(pieces), add_special_tokens=False)
    expansions = cut([*ids, *([TAGS.eos_token_id] if ends else [])], sizes)
    deltas = answered(TAGS, asked(stop=stop, tools=TOOLS if with_tool else ()), expansions)
    check(deltas, TAGS, expansions)
    plain = answered(
        TAGS, Turn(messages=USER, stop=stop, tools=TOOLS if with_tool else ()), [tuple(one) for one in expansions]
    )
    same = Text | Reasoning
    assert [d.text for d in deltas if isinstance(d, same)] == [d.text for d in plain if isinstance(d, same)]


@settings(max_examples=100)
@given(st.data())
def test_random_ids_make_up_their_text_with_incomplete_characters(data):
    vocab = tokenizer()
    ids = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=25))
    expansions = cut(ids, data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    check(answered(vocab, asked(), expansions), vocab, expansions)


def test_every_id_of_a_plain_text_is_shown_with_its_parts():
    vocab = tokenizer()
    expansions = cut(vocab.encode("Once upon a time there was a boat.", add_special_tokens=False), [1, 2, 3])
    tokens, ids = check(answered(vocab, asked(), expansions), vocab, expansions)
    assert [token.id for token in tokens] == ids
    hyper = [token for token in tokens if token.parts]
    assert ["".join(token.parts) for token in hyper] == [token.text for token in hyper]
    assert all((token.origin != "") == (len(one) > 1) for token, one in zip(tokens, expansions, strict=True))


def test_the_bytes_of_a_character_that_never_ends_are_the_last_token_s():
    vocab = tokenizer()
    ids = vocab.encode("\U0001f600", add_special_tokens=False)
    deltas = answered(vocab, asked(), [[one] for one in ids[:-1]])
    tokens, _ = check(deltas, vocab, [[one] for one in ids[:-1]])
    assert tokens[-1].text.endswith(REPLACEMENT)
    ended = answered(vocab, asked(), [*([one] for one in ids[:-1]), [vocab.eos_token_id]])
    assert "".join(token.text for token in check(ended, vocab, [[one] for one in ids[:-1]])[0]).endswith(REPLACEMENT)


def test_an_eos_inside_a_hypertoken_is_not_among_its_parts():
    vocab = tokenizer()
    ids = vocab.encode("Once upon", add_special_tokens=False)
    tokens, _ = check(answered(vocab, asked(), [[*ids, vocab.eos_token_id]]), vocab, [[*ids, vocab.eos_token_id]])
    assert len(tokens) == 1
    assert tokens[0].text == "Once upon"
    assert len(tokens[0].parts) == len(ids)


def test_a_token_in_two_texts_says_that_it_goes_on():
    ids = TAGS.encode("a EN", add_special_tokens=False)
    deltas = answered(TAGS, asked(stop=["END"]), [ids])
    tokens = [token for delta in texts(deltas) for token in delta.tokens]
    assert [(token.text, token.continues) for token in tokens] == [("a ", False), ("EN", True)]


def test_reasoning_and_calls_have_no_tokens():
    ids = TAGS.encode(f"<think>so</think>{CALL}", add_special_tokens=False)
    deltas = answered(TAGS, asked(tools=TOOLS), cut(ids, [3]))
    assert texts(deltas) == []
    assert {type(d) for d in deltas} >= {Reasoning, ToolCall}


def test_entries_and_figures_come_beside_the_text_when_they_are_wanted():
    vocab = tokenizer()
    deltas = answered(vocab, asked(), [[5, 6], [7]])
    assert next(delta for delta in deltas if isinstance(delta, LearnedEntries)).entries[0] == tuple(
        TokenTexts(vocab)[(one,)][0] for one in (5, 6)
    )
    assert isinstance(deltas[-2], Counted)
    assert isinstance(deltas[-1], Done)
    plain = answered(vocab, Turn(messages=USER), [[5, 6], [7]])
    assert not any(isinstance(delta, LearnedEntries | Counted) for delta in plain)
    assert all(delta.tokens == () for delta in texts(plain))


# ---- over HTTP


def test_a_client_that_asks_gets_tokens_in_chunks_and_in_the_whole_answer():
    with serving(FakeEngine()) as served:
        whole = served.chat(mlx_zip={"tokens": True}).json
        chunks = events(served.chat(mlx_zip={"tokens": True}, stream=True).body)[:-1]
    text = whole["choices"][0]["message"]["content"]
    tokens = whole["mlx_zip"]["tokens"]
    assert "".join(token["t"] for token in tokens) == text
    assert {token["o"] for token in tokens if "o" in token} == {"pack", "prompt", "answer"}
    assert all(len(token["p"]) == 2 and ("a" in token) for token in tokens if "p" in token)
    assert "steps" in whole["mlx_zip"]
    shown = [chunk for chunk in chunks if "tokens" in chunk.get("mlx_zip", {})]
    for chunk in shown:
        assert "".join(one["t"] for one in chunk["mlx_zip"]["tokens"]) == chunk["choices"][0]["delta"]["content"]
    assert [one for chunk in shown for one in chunk["mlx_zip"]["tokens"]] == tokens
    json.dumps(whole)


def test_nobody_else_gets_tokens_and_the_engine_is_not_asked_for_them():
    engine = FakeEngine()
    with serving(engine) as served:
        assert "tokens" not in served.chat().json["mlx_zip"]
        assert b'tokens": [' not in served.chat(stream=True).body
    assert [one.show for one in engine.told.submissions] == [False, False]


@pytest.mark.parametrize("fields", [{"mlx_zip": {"token": True}}, {"mlx_zip": {"tokens": True}, "n": 2}])
def test_a_wrong_wish_is_refused_by_name(fields):
    with serving(FakeEngine()) as served:
        answer = served.chat(**fields)
    assert answer.status == 400
    assert "mlx_zip.token" in answer.json["error"]["message"]


def test_the_wish_is_described_for_clients():
    with serving(FakeEngine()) as served:
        found = served.ask("GET", "/openapi.json").json
    body = found["components"]["schemas"]["ChatBody"]["properties"]["mlx_zip"]
    wish = found["components"]["schemas"]["VendorFields"]
    assert "VendorFields" in json.dumps(body)
    assert "tokens" in wish["properties"]
    assert "which tokens its text consists of" in wish["description"]
    answer = json.dumps(found["paths"]["/v1/chat/completions"]["post"])
    assert "mlx_zip.tokens" in answer


# ---- packs


PACKS = {"a": Pack(((5, 6), (7, 8))), "b": Pack(((9, 10),)), "wrong": Pack(((10**6, 1),))}


def test_several_packs_are_merged_in_their_order_and_once():
    engine = FakeEngine()
    with serving(engine, Options(packs=PACKS)) as served:
        for names in (["a", "b"], ["a", "b"], ["b", "a"], "a"):
            assert served.chat(pack=names).status == 200
        refused = served.chat(pack=["a", "c"])
    first, again, other, alone = (one.pack for one in engine.told.submissions)
    assert first.entries == ((5, 6), (9, 10), (7, 8))
    assert first is again
    assert other.entries == ((9, 10), (5, 6), (7, 8))
    assert alone is PACKS["a"]
    assert (refused.status, "'c'" in refused.json["error"]["message"]) == (400, True)


def test_packs_that_cannot_be_merged_are_a_request_s_error():
    packs = {"x": Pack(((5, 6),), "1" * 64), "y": Pack(((5, 7),), "2" * 64)}
    with serving(FakeEngine(Script()), Options(packs=packs)) as served:
        answer = served.chat(pack=["x", "y"])
    assert answer.status == 400
    assert "different tokenizers" in answer.json["error"]["message"]
