"""Long texts in pieces: the same base ids as those of the whole text, and an end as soon as they are too many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlx_zip.errors import PromptTooLongError
from mlx_zip.named import bundled_model_folder
from mlx_zip.text import long_texts
from mlx_zip.text.long_texts import LongEncoding, LongTexts
from mlx_zip.text.prompts import encode_text
from mlx_zip.text.token_facts import longest_token_bytes
from mlx_zip.text.tokenizers import Tokenizer, load_tokenizer
from support.tiny_vocabularies import letters

GPT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
MERGES = [("a", "b"), ("Ġ", "ab"), ("Ġ", "Ġ"), ("b", "a"), ("ab", "ba"), ("Ċ", "Ċ"), ("c", "c"), (".", "Ċ"), ("Ġ", "c")]
SPELLED = "ab cab  ba\n\ncc. é"


def wrapped(backend):
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def byte_level(pattern, merges=MERGES):
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *letters()])}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, list(merges)))
    split = [pre_tokenizers.Split(_regex(pattern), "isolated")] if pattern else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def _regex(pattern):
    from tokenizers import Regex

    return Regex(pattern)


def prepending():
    """A tokenizer like Llama 2's, which puts a space in front of each text and does not cut texts into words."""
    merges = [(left.replace("Ġ", "▁"), right) for left, right in MERGES if "Ċ" not in left + right and right != "Ġ"]
    names = ["<s>", "</s>", "▁", "a", "b", "c", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [left + right for left, right in merges]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return wrapped(backend)


TOKENIZERS = {
    "bundled": load_tokenizer(bundled_model_folder("stories")),
    "gpt": byte_level(GPT),
    "llama": byte_level(LLAMA),
    "without words": byte_level(None),
    "prepending": prepending(),
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE", 7)


class Seen:
    """A tokenizer that notes which texts it gets."""

    def __init__(self, inner):
        self.inner, self.texts = inner, []

    def encode(self, text, **options):
        self.texts.append(text)
        return self.inner.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.usefixtures("small")
@given(text=st.text(st.sampled_from(SPELLED), max_size=80), special=st.booleans())
@settings(max_examples=80)
def test_pieces_have_the_base_ids_of_the_whole_text(name, text, special):
    tokenizer = TOKENIZERS[name]
    encode = LongEncoding(LongTexts(tokenizer, None), lambda: None)
    assert encode(tokenizer, text, special) == encode_text(tokenizer, text, special)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.usefixtures("small")
def test_words_are_given_to_the_tokenizer_a_few_at_a_time(name):
    seen = Seen(TOKENIZERS[name])
    texts = LongTexts(seen, None)
    assert texts._skip_between_pieces == (1 if name == "prepending" else 0)
    seen.texts.clear()
    LongEncoding(texts, lambda: None)(seen, "ab cab " * 50)
    assert len(seen.texts) > 20
    assert max(map(len, seen.texts)) < 20


@pytest.mark.usefixtures("small")
def test_a_tokenizer_with_tokens_of_several_words_gets_the_text_whole():
    tokenizer = byte_level(None, [("a", "Ġ"), ("aĠ", "b")])
    assert LongTexts(tokenizer, None)._skip_between_pieces is None
    assert list(LongTexts(tokenizer, None).pieces("a b " * 50)) == [("a b " * 50, False)]


def test_a_text_without_words_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(long_texts, "PIECE", 7)
    monkeypatch.setattr(long_texts, "LONGEST_PIECE", 30)
    pieces = [piece for piece, _ in LongTexts(TOKENIZERS["llama"], None).pieces("c" * 100)]
    assert "".join(pieces) == "c" * 100
    assert max(map(len, pieces)) == 30


@pytest.mark.parametrize(
    "text",
    ["c" * 100, "今日は" * 40, "a\nb\n" * 30, "\n" * 100, "1 2 " * 30],
    ids=["letters", "no spaces", "lines", "line breaks", "digits"],
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_is_cut_in_the_middle_of_a_word_stays_as_it_is(monkeypatch, name, text):
    monkeypatch.setattr(long_texts, "PIECE", 7)
    monkeypatch.setattr(long_texts, "LONGEST_PIECE", 30)
    seen = Seen(TOKENIZERS[name])
    encode = LongEncoding(LongTexts(seen, None), lambda: None)
    ids, whole = encode(seen, text), encode_text(TOKENIZERS[name], text)
    assert max(map(len, seen.texts)) <= 31
    assert TOKENIZERS[name].decode(ids) == TOKENIZERS[name].decode(whole)


def test_a_text_that_has_too_many_bytes_is_not_encoded():
    seen, longest = Seen(TOKENIZERS["bundled"]), longest_token_bytes(TOKENIZERS["bundled"])
    encode = LongEncoding(LongTexts(seen, 100), lambda: None)
    with pytest.raises(PromptTooLongError, match=r"is too long: 101 tokens > 100 maximum.* length is 101 tokens"):
        encode(seen, "x" * (100 * longest + 1))
    assert seen.texts == []
    assert encode(seen, "x" * (100 * longest))


@pytest.mark.usefixtures("small")
def test_a_text_is_encoded_only_until_it_has_too_many_tokens():
    seen = Seen(TOKENIZERS["bundled"])
    texts = LongTexts(seen, 100)
    with pytest.raises(PromptTooLongError, match="> 100 maximum"):
        LongEncoding(texts, lambda: None)(seen, "a cat " * 200)
    assert "".join(seen.texts).count("cat") < 120


@pytest.mark.usefixtures("small")
def test_nothing_more_is_encoded_once_nobody_waits():
    seen, left = Seen(TOKENIZERS["bundled"]), [3]
    texts = LongTexts(seen, None)
    assert texts._skip_between_pieces == 0
    seen.texts.clear()

    def check():
        left[0] -= 1
        if left[0] < 0:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        LongEncoding(texts, check)(seen, "a cat " * 200)
    assert len(seen.texts) == 2


@pytest.mark.parametrize("text", ["a cat. ", "今日は ", "\n\n  \t", "é<s>", "0123"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_token_stands_for_more_bytes_than_the_longest(name, text):
    tokenizer = TOKENIZERS[name]
    assert len((text * 20).encode()) <= len(encode_text(tokenizer, text * 20)) * longest_token_bytes(tokenizer)


def test_where_white_space_is_left_out_there_is_no_longest_token():
    tokenizer = byte_level(GPT)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    assert longest_token_bytes(tokenizer) is None
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    assert longest_token_bytes(tokenizer) == 4 * longest_token_bytes(byte_level(GPT))
