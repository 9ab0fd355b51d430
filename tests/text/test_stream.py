"""Base ids to text as it streams, and prompts to base ids."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.errors import GenerationError
from mlx_zip.text.prompts import encode_prompt
from mlx_zip.text.stream import StopMatcher, TextStream
from support import tiny_text

BYTES = tiny_text.byte_level()
EOS = 1
KINDS = {
    "byte level": BYTES,
    "sentencepiece": tiny_text.sentencepiece(),
    "sentencepiece, space kept": tiny_text.sentencepiece(trim=False),
    "naive": tiny_text.naive(),
}
TEXT = f"once upon a times {tiny_text.EMOJI}{tiny_text.EMOJI}.\n once"


def ids_of(text, tokenizer=BYTES):
    return tokenizer.encode(text, add_special_tokens=False)


def stream(expansions, tokenizer=BYTES, **options):
    """The pieces of a whole stream, fed until it ends."""
    text, pieces = TextStream(tokenizer, **options), []
    for expansion in expansions:
        pieces.append(text.feed(expansion))
        if pieces[-1].finish_reason:
            break
    return pieces


def joined(pieces):
    return "".join(piece.text for piece in pieces)


def cut(ids, sizes):
    """Ids in groups of the given sizes, over and over."""
    groups, at = [], 0
    while at < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[at : at + size])
        at += size
    return groups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (5, 2, 1)])
def test_the_text_is_the_tokenizers_own_however_ids_are_grouped_into_hypertokens(kind, sizes):
    tokenizer = KINDS[kind]
    ids = ids_of(TEXT, tokenizer)
    pieces = stream(cut(ids, sizes), tokenizer, max_tokens=len(ids))
    assert joined(pieces) == tokenizer.decode(ids)


@given(st.lists(st.integers(3, 258), min_size=1, max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_grouping_never_changes_text_even_when_bytes_are_not_utf8(ids, sizes):
    tokenizer = KINDS["sentencepiece"]
    one_by_one = stream([[i] for i in ids], tokenizer, max_tokens=len(ids))
    assert joined(stream(cut(ids, sizes), tokenizer, max_tokens=len(ids))) == joined(one_by_one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_split_over_two_hypertokens_is_shown_when_it_is_complete(kind):
    tokenizer = KINDS[kind]
    emoji = ids_of(tiny_text.EMOJI, tokenizer)[-4:]
    pieces = stream([emoji[:3], emoji[3:]], tokenizer)
    assert [piece.text for piece in pieces] == ["", tiny_text.EMOJI]


def test_a_character_that_stays_incomplete_is_shown_as_replacement_at_the_end():
    ids = ids_of("a" + tiny_text.EMOJI)[:3]
    assert joined(stream([ids], max_tokens=3)) == "a\ufffd"


def test_ids_beyond_the_tokenizer_give_no_text():
    assert joined(stream([ids_of("ab"), [len(BYTES)], ids_of("c")])) == "abc"


# ---- where the text ends


def test_an_eos_inside_an_expansion_ends_the_text_there():
    (piece,) = stream([[*ids_of("ab"), EOS, *ids_of("c")]])
    assert (piece.text, piece.finish_reason) == ("ab", "stop")


def test_the_eos_counts_and_what_follows_it_does_not():
    (piece,) = stream([[*ids_of("ab"), EOS, *ids_of("c")]])
    assert piece.base_ids == (*ids_of("ab"), EOS)


def test_max_tokens_cuts_inside_an_expansion():
    pieces = stream([ids_of("ab"), ids_of("cde")], max_tokens=4)
    assert (joined(pieces), pieces[-1].base_ids) == ("abcd", tuple(ids_of("cd")))


def test_reaching_max_tokens_is_reported_as_length():
    assert [p.finish_reason for p in stream([ids_of("ab"), ids_of("cd")], max_tokens=4)] == [None, "length"]


def test_an_eos_at_the_limit_is_reported_as_stop():
    assert stream([[*ids_of("ab"), EOS]], max_tokens=3)[-1].finish_reason == "stop"


def test_the_last_possible_id_ends_the_text_as_length():
    piece = TextStream(BYTES).feed(ids_of("ab"), last=True)
    assert (piece.text, piece.finish_reason) == ("ab", "length")


# ---- stop strings


def test_a_stop_string_across_hypertokens_ends_the_text_before_it():
    pieces = stream([ids_of("one "), ids_of("sto"), ids_of("p it")], stop=["stop"])
    assert (joined(pieces), pieces[-1].finish_reason) == ("one ", "stop")


def test_what_may_become_a_stop_string_is_held_back_and_then_shown():
    pieces = stream([ids_of("a sto"), ids_of("re")], stop=["stop"])
    assert [piece.text for piece in pieces] == ["a ", "store"]


def test_base_ids_after_the_one_that_completed_a_stop_string_do_not_count():
    (piece,) = stream([ids_of("abcd")], stop=["b"])
    assert piece.base_ids == tuple(ids_of("ab"))


def test_held_back_text_is_shown_at_the_end():
    assert joined(stream([ids_of("a sto")], stop=["stop"], max_tokens=5)) == "a sto"


def test_a_stop_string_completed_only_by_the_last_flush_is_cut_too():
    pieces = stream([ids_of("a ")], stop=[" "], max_tokens=2)  # the detokenizer holds a lone space back
    assert (joined(pieces), pieces[-1].finish_reason) == ("a", "stop")


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_stop_strings_do_not_depend_on_how_the_text_was_cut(text, stops, sizes):
    def shown(parts):
        matcher, out = StopMatcher(stops), ""
        for part in parts:
            out += matcher.feed(part)
            if matcher.matched:
                return out, True
        return out + matcher.flush(), False

    assert shown(cut(text, sizes)) == shown(text)


def test_the_stop_string_that_is_complete_first_wins():
    assert StopMatcher(["abc", "b"]).feed("abc") == "a"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(GenerationError, match="--stop"):
        StopMatcher(["a", ""])


# ---- prompts


@pytest.mark.parametrize("make", [list, tuple, np.array, mx.array])
def test_base_ids_are_taken_as_they_are(make):
    assert encode_prompt(BYTES, make([3, 4, 5])) == [3, 4, 5]


def test_text_is_encoded_with_the_tokenizers_special_tokens():
    calls = []
    spy = SpyTokenizer(calls)
    encode_prompt(spy, "ab")
    assert calls == [True]


def test_text_that_begins_with_the_bos_token_gets_no_second_one():
    calls = []
    encode_prompt(SpyTokenizer(calls), "<|bos|>ab")
    assert calls == [False]


def test_text_that_continues_a_conversation_gets_no_special_tokens():
    calls = []
    encode_prompt(SpyTokenizer(calls), "ab", continues=True)
    assert calls == [False]


class SpyTokenizer:
    bos_token = "<|bos|>"

    def __init__(self, calls):
        self.calls = calls

    def encode(self, text, add_special_tokens):
        self.calls.append(add_special_tokens)
        return [3]

    def apply_chat_template(self, messages, **options):
        self.calls.append(options)
        return messages[0]["content"]


MESSAGES = [{"role": "user", "content": "a"}]


def test_chat_messages_go_through_the_chat_template_and_get_no_further_specials():
    calls = []
    assert encode_prompt(SpyTokenizer(calls), MESSAGES) == [3]
    assert calls == [{"tokenize": False, "add_generation_prompt": True}, False]


def test_chat_messages_are_a_whole_conversation_also_when_a_cache_holds_its_beginning():
    calls = []
    assert encode_prompt(SpyTokenizer(calls), MESSAGES, continues=True) == [3]
    assert calls == [{"tokenize": False, "add_generation_prompt": True}, False]


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{% if", None])
def test_a_chat_template_that_refuses_or_is_missing_is_a_generation_error(template):
    tokenizer = tiny_text.byte_level()
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(GenerationError, match="chat template cannot render"):
        encode_prompt(tokenizer, MESSAGES)


def test_chat_messages_that_are_not_unicode_are_refused():
    with pytest.raises(GenerationError, match="not valid Unicode"):
        encode_prompt(SpyTokenizer([]), [{"role": "user", "content": "a\udcff"}])


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(GenerationError, match="empty"):
        encode_prompt(BYTES, prompt)


@pytest.mark.parametrize("prompt", [[[1, 2]], [1.5], [True], 7, None])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(GenerationError, match="a prompt is"):
        encode_prompt(BYTES, prompt)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(GenerationError, match="not valid Unicode at character 1"):
        encode_prompt(BYTES, "a\udcff")
