"""Streamed text: our own detokenizer gives what `decode` gives, and plain models print exactly what mlx-lm prints."""

import random
from functools import cache

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as mlx_load_tokenizer

from mlx_zip.bench.engines.workloads import read_tokenizer
from mlx_zip.text.stream import TextStream
from mlx_zip.text.tokenizers import Detokenizer, load_tokenizer
from support import tiny_text
from support.places import GOLDEN_MODELS, SHARED
from support.slow_cases import slow_but

PUBLISHED = SHARED / "tokenizers"
FILES = sorted(path for path in PUBLISHED.glob("*") if "LICENSE" not in path.name and "encoder" not in path.name)
SMALL = [path for path in FILES if not path.name.startswith(("cl100k", "llama3", "o200k", "qwen"))]
needs_shared = pytest.mark.skipif(not FILES, reason="the published tokenizers are not at hand")
GOLDEN = sorted(path.parent for path in GOLDEN_MODELS.glob("*/base/tokenizer.json"))
TINY = {"bytes": tiny_text.byte_level(), "spm": tiny_text.sentencepiece(), "kept": tiny_text.sentencepiece(False)}
TEXT = "once upon a times 😀😀.\n  once, naïve  你好\n\n\tit's 12345 👩‍👩‍👧 end "


published = cache(read_tokenizer)  # the largest takes seconds


def streamed(detokenizer, ids):
    """The pieces of text that come with each id, and at the end."""
    pieces = []
    for i in ids:
        detokenizer.add_token(i)
        pieces.append(detokenizer.last_segment)
    detokenizer.finalize()
    return [*pieces, detokenizer.last_segment]


def check_decoding(tokenizer, ids):
    pieces = streamed(Detokenizer(tokenizer), ids)
    expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == expected
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@pytest.mark.parametrize("kind", TINY)
def test_text_is_streamed_as_decode_gives_it(kind):
    tokenizer = TINY[kind]._tokenizer
    check_decoding(tokenizer, tokenizer.encode("once upon a times 😀😀.\n once", add_special_tokens=False))


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.parent.name)
def test_golden_tokenizers_stream_text_as_they_decode_it(folder):
    tokenizer = load_tokenizer(folder)
    check_decoding(tokenizer._tokenizer, tokenizer.encode(TEXT, add_special_tokens=False))


@needs_shared
@pytest.mark.parametrize("file", slow_but(FILES, *SMALL), ids=lambda path: path.name.split(".")[0])
def test_published_tokenizers_stream_text_as_they_decode_it(file):
    tokenizer = published(file)._tokenizer
    check_decoding(tokenizer, tokenizer.encode(TEXT, add_special_tokens=False))


def test_an_incomplete_character_comes_at_the_end():
    tokenizer = TINY["bytes"]._tokenizer
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    assert streamed(Detokenizer(tokenizer), ids) == ["a", "", "", "", "\ufffd"]


def check_as_mlx_lm(tokenizer, seed):
    """What `TextStream` shows of random ids is what mlx-lm's loop prints of them."""
    ids = random.Random(seed).choices(range(len(tokenizer)), k=60)
    ids = [i for i in ids if i not in tokenizer.eos_token_ids]
    stream = TextStream(tokenizer, max_tokens=len(ids))
    assert "".join(stream.feed([i]).text for i in ids) == "".join(streamed(tokenizer.detokenizer, ids))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.parent.name)
def test_a_golden_model_prints_what_mlx_lm_prints(folder, seed):
    check_as_mlx_lm(mlx_load_tokenizer(folder), seed)


@needs_shared
@pytest.mark.parametrize("file", slow_but(FILES, *SMALL), ids=lambda path: path.name.split(".")[0])
def test_a_published_tokenizer_prints_what_mlx_lm_prints(file):
    tokenizer = published(file)
    assert isinstance(tokenizer, TokenizerWrapper)
    for seed in range(3):
        check_as_mlx_lm(tokenizer, seed)


def test_a_bare_tokenizer_of_transformers_can_be_streamed():
    tokenizer = TINY["bytes"]._tokenizer
    ids = tokenizer.encode("once upon", add_special_tokens=False)
    stream = TextStream(tokenizer, max_tokens=100)
    assert "".join(stream.feed([i]).text for i in ids) == "once upon"
    assert stream.feed([tokenizer.eos_token_id]).finish_reason == "stop"
