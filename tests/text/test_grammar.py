"""Grammars over base ids: masks, expansions, ends, tokenizers of every kind, and schemas that are refused."""

import json
import random
import sys

import numpy as np
import pytest

from mlx_zip.errors import GenerationError, InstallationError
from mlx_zip.text import grammar
from mlx_zip.text.grammar import GrammarConstraint, json_rule, literal_rule
from mlx_zip.text.token_facts import bytes_by_id
from mlx_zip.text.tokenizers import Tokenizer, load_tokenizer
from support import tiny_text
from support.places import SHARED

STORIES = load_tokenizer("stories")
TINY = {"bytes": tiny_text.byte_level('{}": a1,'), "spm": tiny_text.sentencepiece(), "naive": tiny_text.naive()}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 11]}}, "required": ["a"], "additionalProperties": False}
FILES = sorted(p for p in (SHARED / "tokenizers").glob("*") if p.name.startswith(("llama2", "mistral", "gpt2.vocab")))
needs_shared = pytest.mark.skipif(not FILES, reason="the published tokenizers are not at hand")


def constraint(schema, tokenizer=STORIES, **options):
    return GrammarConstraint(tokenizer, f"start: {json_rule(schema)}", **options)


def ids(text, tokenizer=STORIES):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TINY)
def test_answers_of_every_kind_of_tokenizer_follow_the_schema(name):
    tokenizer, rng, found = TINY[name], random.Random(0), set()
    for _ in range(20):
        follower, answer = constraint(SCHEMA, tokenizer), []
        while not answer or answer[-1] not in tokenizer.eos_token_ids:
            answer.append(int(rng.choice(np.flatnonzero(follower.mask()))))
            follower.push(answer[-1:])
        found.add(tokenizer.decode(answer[:-1]))
    assert found == {'{"a": 1}', '{"a": 11}'}


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_bytes_of_published_vocabularies_are_their_texts(file):
    tokenizer = load_tokenizer(file)
    spelled = bytes_by_id(tokenizer)
    text = 'a {"naïve": "你好 😀"}\n\tdef f(x): return 12345'
    assert b"".join(spelled[i] for i in ids(text, tokenizer)).decode().lstrip() == text
    tokenizer.eos_token_ids = {0}
    follower = constraint({"type": "string"}, tokenizer)
    follower.push([i for i in range(len(spelled)) if spelled[i] == b'"'][:1])
    assert np.count_nonzero(follower.mask()) > 0.7 * len(spelled)


def test_eos_may_come_only_at_the_end():
    follower, eos = constraint(SCHEMA), STORIES.eos_token_id
    assert not follower.mask()[eos]
    assert not follower.accepts([eos])
    assert not follower.accepts([*ids('{"a":'), eos])
    follower.push(ids('{"a": 1}'))
    assert np.flatnonzero(follower.mask()).tolist() == [eos]
    follower.push([eos])
    assert np.flatnonzero(follower.mask()).tolist() == [eos]
    with pytest.raises(GenerationError, match="left its grammar"):
        follower.push(ids("a"))


def test_what_follows_an_eos_within_an_expansion_does_not_count():
    assert constraint(SCHEMA).accepts([*ids('{"a": 1}'), STORIES.eos_token_id, *ids("more")])


def test_an_expansion_is_accepted_as_a_whole_or_not_at_all():
    follower = constraint(SCHEMA)
    assert follower.accepts(ids('{"a"'))
    assert not follower.accepts(ids('{"b"'))
    assert follower.accepts(ids('{"a": 11}'))
    before = follower.mask().copy()
    with pytest.raises(GenerationError, match="left its grammar"):
        follower.push(ids('{"a": 2'))
    assert (follower.mask() == before).all()
    follower.push(ids('{"a": 1'))


def test_ids_beyond_the_tokenizer_are_never_allowed():
    follower = constraint(SCHEMA, vocab_size=len(STORIES) + 64)
    assert follower.mask().shape == (len(STORIES) + 64,)
    assert not follower.mask()[len(STORIES) :].any()
    assert not follower.accepts([len(STORIES) + 3])
    assert constraint(SCHEMA, vocab_size=1000).mask().shape == (1000,)


def test_special_tokens_are_no_text():
    follower = constraint({"type": "string"})
    follower.push(ids('"a'))
    special = STORIES.convert_tokens_to_ids("<|user|>")
    assert not follower.mask()[special]
    assert not follower.accepts([special])


def test_json_is_written_as_python_writes_it():
    schema = {"type": "object", "properties": {"a": {"const": [1, {"b": "é"}]}, "c": {"type": "null"}}}
    follower = constraint({**schema, "required": ["a", "c"], "additionalProperties": False})
    text = json.dumps({"a": [1, {"b": "é"}], "c": None}, ensure_ascii=False)
    assert follower.accepts([*ids(text), STORIES.eos_token_id])
    assert not follower.accepts(ids(text.replace(": ", ":")))


def test_an_empty_schema_is_any_object():
    follower = constraint({})
    assert follower.accepts([*ids('{"x": [1, {"y": null}]}'), STORIES.eos_token_id])
    assert not follower.accepts(ids("[1]"))


def test_two_answers_by_one_grammar_do_not_meet():
    one, other = constraint(SCHEMA), constraint(SCHEMA)
    one.push(ids('{"a'))
    assert other.accepts(ids('{"a'))
    assert not one.accepts(ids('{"a'))


def test_a_tokenizer_without_an_end_is_refused():
    bare = tiny_text.byte_level()._tokenizer
    bare.eos_token = None
    with pytest.raises(GenerationError, match="eos token"):
        constraint(SCHEMA, Tokenizer(bare))


def nested(depth, inner):
    return inner if depth == 0 else {"type": "object", "properties": {"a": nested(depth - 1, inner)}}


def field(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


LOOPS = {
    f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i - 1}"}, {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2}]}
    for i in range(1, 25)
}
BAD = {
    "unknown keyword": (field({"not": {"type": "null"}}), "Unimplemented"),
    "no type": (field({"type": "strng"}), "Invalid type"),
    "type of a type": ({"type": 5}, "type must be"),
    "properties": ({"type": "object", "properties": 5}, "properties"),
    "reference to nothing": (field({"$ref": "#/nope"}), "nope"),
    "reference elsewhere": (field({"$ref": "http://127.0.0.1:9/x.json"}), "127.0.0.1"),
    "reference to itself": ({"$ref": "#"}, "no answer satisfies it"),
    "broken pattern": (field({"type": "string", "pattern": "(["}), "regex|pattern|class"),
    "look-ahead": (field({"type": "string", "pattern": "(?=a)b"}), "look-around|regex"),
    "huge enum": (field({"enum": [f"value{i}" for i in range(100_000)]}), "too large"),
    "huge number": (field({"type": "integer", "maximum": 10**400}), "number out of range|"),
    "not a number": (field({"const": float("nan")}), "."),
    "too deep": (nested(400, {}), "recursion"),
    "much too deep": (nested(900, {}), "recursion"),
    "exponential": (
        {"$defs": {"a0": field({"type": "integer"}), **LOOPS}, "allOf": [{"$ref": "#/$defs/a24"}]},
        "too large",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_schema_is_refused_with_its_reason(name):
    schema, reason = BAD[name]
    with pytest.raises(GenerationError, match=reason) as caught:
        constraint(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


COSTLY = {
    "repeated repetition": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "repeated class": {"type": "string", "pattern": "(?:[)(]{2,300}\\\\({300}|b){9}"},
    "repeated in names": {"type": "object", "patternProperties": {"^((a{99}){99}){99}$": {}}},
    "multiple": {"type": "integer", "multipleOf": 999983, "minimum": -(10**15), "maximum": 10**15},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_schema_is_refused_before_it_costs(name):
    schema = COSTLY[name]
    if name == "repeated class":
        json_rule(field(schema))
        schema = {**schema, "pattern": schema["pattern"].replace("{9}", "{90}")}
    with pytest.raises(GenerationError, match=r"repeats too much|multipleOf"):
        json_rule(field(schema))


def test_patterns_that_people_write_are_taken():
    byte = "[0-9a-fA-F]{1,4}"
    for pattern in (
        f"^({byte}:){{7}}{byte}$",
        "^\\d{4}-\\d{2}-\\d{2}$",
        "^.{0,5000}$",
        "^[a-z]{8}(-[a-z]{4}){3}$",
        "({)}",
    ):
        json_rule(field({"type": "string", "pattern": pattern}))


HARD = {
    "much to remember": {"type": "string", "pattern": "^(.*a.{500}.*b.{500})$"},
    "long text": {"type": "string", "maxLength": 10**9},
    "long list": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
}


def follow(schema, steps=30):
    """Follows a schema with ids chosen at random among the allowed ones."""
    rng, follower = random.Random(0), constraint(field(schema))
    follower.push(ids('{"a": '))
    for _ in range(steps):
        follower.push([int(rng.choice(np.flatnonzero(follower.mask())))])


@pytest.mark.parametrize("limit", ["step_lexer_fuel", "max_lexer_states"])
@pytest.mark.parametrize("name", HARD)
def test_a_hard_schema_is_followed_unless_a_step_needs_more_work_than_the_limits_allow(name, limit, monkeypatch):
    follow(HARD[name])
    monkeypatch.setattr(grammar, "_compile_grammar", grammar._compile_grammar.__wrapped__)
    assert limit in grammar._LIMITS
    monkeypatch.setitem(grammar._LIMITS, limit, 1)
    with pytest.raises(GenerationError, match="too many"):
        follow(HARD[name])


def test_a_literal_is_exactly_its_text():
    text = 'say "\\n" é\n'
    follower = GrammarConstraint(STORIES, f"start: {literal_rule(text)}")
    assert follower.accepts([*ids(text), STORIES.eos_token_id])


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InstallationError, match=r"needs llguidance, which is not installed: .*\[serve\]"):
        GrammarConstraint(load_tokenizer("stories"), "start: /a/")
