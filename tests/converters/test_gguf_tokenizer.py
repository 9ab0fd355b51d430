"""Tokenizers from GGUF metadata: the ids of transformers' own reader and of the published vocabularies' libraries."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip.converters.gguf.gguf_tokenizer import CUTS, GgufTokenizer, read_gguf_tokenizer
from mlx_zip.errors import ConversionError
from mlx_zip.text.formats import read_tokenizer_file
from mlx_zip.text.sentencepiece_file import read_sentencepiece_model
from support import gguf_vocabularies as vocabularies
from support.gguf_vocabularies import LANGUAGES, TEXT, byte_level, pieces
from support.places import SHARED

PUBLISHED = SHARED / "tokenizers"
needs_shared = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tokenizers are not at hand")
TEXTS = (*LANGUAGES, TEXT, "", "a<|im_start|>b <think> c", "a    b     c", "x\n\n\n\ny", "hi <mine> there<mine>x")
GGML = "tokenizer.ggml."


def read(metadata: dict[str, Any], architecture: str = "llama") -> GgufTokenizer:
    return read_gguf_tokenizer(Path("model.gguf"), metadata, architecture, 256)


def ids(tokenizer: GgufTokenizer, text: str, special: bool = False) -> list[int]:
    return tokenizer.library.encode(text, add_special_tokens=special).ids


def transformers_ids(metadata: dict[str, Any], architecture: str, text: str) -> list[int]:
    """Ids of transformers' reader of GGUF tokenizers, which gives what `convert_gguf_tokenizer` makes."""
    module = pytest.importorskip("transformers.integrations.gguf", reason="this transformers reads GGUF otherwise")
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"} | {
        name: name for name in ("tokens", "scores", "token_type", "merges")
    }
    given = {new: metadata[GGML + old] for old, new in names.items() if GGML + old in metadata}
    given = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in given.items()}
    return module.convert_gguf_tokenizer(architecture, given)[0].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", sorted(CUTS.keys() - {"smollm", "phi-2", "dbrx"}))  # these, transformers cuts as GPT-2
def test_byte_level_ids_equal_those_of_transformers_reader(pre, text):
    metadata = byte_level(pre)
    assert ids(read(metadata), text) == transformers_ids(metadata, "llama", text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma", "gemma2", "gemma3"])
def test_ids_of_scored_pieces_equal_those_of_transformers_reader(architecture, text):
    if architecture == "llama" and "<mine>" in text:
        pytest.skip("llama.cpp puts a space behind each added token, and transformers' reader does not")
    metadata = pieces(gemma=architecture.startswith("gemma"))
    assert ids(read(metadata, architecture), text) == transformers_ids(metadata, architecture, text)


@pytest.mark.parametrize("metadata", [byte_level(), byte_level("llama-bpe"), pieces(), pieces(gemma=True)])
def test_ids_give_the_text_back(metadata):
    tokenizer = read(metadata, "gemma" if "<bos>" in metadata[GGML + "tokens"] else "llama")
    for text in LANGUAGES:
        assert tokenizer.library.decode(ids(tokenizer, text)) == text


def test_smollm_cuts_each_digit_off():
    tokens = byte_level("smollm")[GGML + "tokens"]
    assert [tokens[i] for i in ids(read(byte_level("smollm")), " 1234")] == ["Ġ", "1", "2", "3", "4"]


def test_qwen_composes_characters_first():
    tokenizer = read(byte_level("qwen2"))
    assert ids(tokenizer, "e\u0301") == ids(tokenizer, "\u00e9") != ids(read(byte_level("gpt-4o")), "e\u0301")


def test_a_piece_that_is_a_token_is_not_built_by_merges_where_the_vocabulary_says_so():
    metadata = byte_level()
    whole = {**metadata, GGML + "tokens": [*metadata[GGML + "tokens"][:-1], "zqzq"]}
    whole[GGML + "token_type"] = np.array([*metadata[GGML + "token_type"][:-1], vocabularies.NORMAL], np.int32)
    assert len(ids(read(whole), "zqzq")) == 4
    assert ids(read({**whole, GGML + "pre": "llama-bpe"}), "zqzq") == [len(whole[GGML + "tokens"]) - 1]


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        (byte_level(), None),
        (byte_level("llama-bpe"), 1),
        (byte_level("llama-bpe", **{GGML + "add_bos_token": False}), None),
        (byte_level(**{GGML + "add_bos_token": True}), 1),
        (pieces(), 1),
        (pieces(**{GGML + "add_bos_token": False}), None),
    ],
)
def test_a_text_begins_with_the_bos_token_where_the_file_or_its_vocabulary_says_so(metadata, first):
    plain = ids(read(metadata), "Hello")
    assert ids(read(metadata), "Hello", special=True) == ([] if first is None else [first]) + plain


def test_a_text_ends_with_the_eos_token_where_the_file_says_so():
    tokenizer = read(byte_level(**{GGML + "add_eos_token": True}))
    assert ids(tokenizer, "Hello", special=True) == [*ids(tokenizer, "Hello"), 2]


def test_phi3s_control_tokens_take_the_white_space_to_their_right():
    tokenizer = read(pieces(), "phi3")
    plain = ids(tokenizer, "a<end_of_turn>b")
    assert ids(tokenizer, "a<end_of_turn> \n b") == plain
    assert ids(read(pieces(), "llama"), "a<end_of_turn> \n b") != plain


def test_ids_that_end_a_text_are_the_files_and_those_known_to_end_a_turn():
    assert read(pieces(gemma=True), "gemma").eos_ids == (1, len(pieces(gemma=True)[GGML + "tokens"]) - 2)
    assert read(byte_level(**{GGML + "eot_token_id": 5})).eos_ids == (2, 5, 0)


def test_settings_name_the_special_tokens_and_hold_the_template():
    settings = read(byte_level()).settings
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert settings["chat_template"] == vocabularies.CHATML
    assert settings["model_max_length"] == 256


def test_further_templates_are_kept_by_name():
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    found = {one["name"]: one["template"] for one in read(byte_level(**named)).settings["chat_template"]}
    assert found == {"default": vocabularies.CHATML, "tool_use": "tools"}


@pytest.mark.parametrize("missing", [-1, 0xFFFFFFFF])
def test_an_id_that_stands_for_none_is_none(missing):
    assert "bos_token" not in read(byte_level(**{GGML + "bos_token_id": missing})).settings


@pytest.mark.parametrize(
    ("culprit", "changes"),
    [
        (r"tokenizer\.ggml\.pre 'glm4' is not supported; supported: gpt-2, ", {GGML + "pre": "glm4"}),
        (r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2, llama", {GGML + "model": "bert"}),
        (r"unknown keys: tokenizer\.ggml\.strange", {GGML + "strange": 1}),
        (r"add_space_prefix is true", {GGML + "add_space_prefix": True}),
        (r"escape_whitespaces is False", {GGML + "escape_whitespaces": False}),
        (r"eos_token_id is 386, and there are 386 tokens", {GGML + "eos_token_id": 386}),
    ],
)
def test_what_is_not_known_is_refused_by_name(culprit, changes):
    with pytest.raises(ConversionError, match=culprit):
        read(byte_level(**changes))


def of_library(library: Any, pre: str) -> dict[str, Any]:
    """The metadata that a byte-level vocabulary gets in a GGUF file."""
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return {GGML + "model": "gpt2", GGML + "pre": pre, GGML + "tokens": tokens, GGML + "merges": merges}


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize(
    ("name", "pre"),
    [("gpt2.vocab.bpe.gz", "gpt-2"), ("llama3.tiktoken.gz", "llama-bpe")],
)
def test_published_byte_level_vocabularies_keep_their_ids(name, pre):
    library = read_tokenizer_file(PUBLISHED / name)
    tokenizer = read(of_library(library, pre))
    for text in LANGUAGES:
        assert ids(tokenizer, text) == library.encode(text, add_special_tokens=False).ids


@needs_shared
@pytest.mark.parametrize("name", ["llama2.model.gz", "mistral_v3.model.gz"])
def test_published_scored_vocabularies_have_the_ids_of_sentencepiece(name):
    sentencepiece = pytest.importorskip("sentencepiece", reason="the ids of reference need sentencepiece")
    model = read_sentencepiece_model(PUBLISHED / name)
    texts, scores, kinds = zip(*model.pieces, strict=True)
    metadata = {
        GGML + "model": "llama",
        GGML + "tokens": list(texts),
        GGML + "scores": np.array(scores, np.float32),
        GGML + "token_type": np.array(kinds, np.int32),
        GGML + "bos_token_id": 1,
    }
    tokenizer = read(metadata)
    reference = sentencepiece.SentencePieceProcessor(model_proto=gzip.decompress((PUBLISHED / name).read_bytes()))
    for text in (*LANGUAGES, "  two leading"):
        assert ids(tokenizer, text) == reference.encode(text), text
