"""How text is cut before merges apply: our C against the pre-tokenizers of the `tokenizers` library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from mlx_zip.vocab.adaptbpe.merge_list import cut_into_pieces
from mlx_zip.vocab.adaptbpe.pieces import PATTERNS, piece_rule_of
from mlx_zip.vocab.first_stage import BYTE_OF, CHAR_OF, bytes_to_spelled, spelled_to_bytes

SPLITTERS = {name: pre_tokenizers.Split(Regex(pattern), "isolated") for name, pattern in PATTERNS.items()}
kinds = pytest.mark.parametrize("kind", PATTERNS)
telling = st.text(st.sampled_from("aé字ſ1½٣ '\n\r\t\u00a0\u0085\u2028.,-sStTrReElLvVmMdD\u0301😀"), max_size=60)


def expected(kind, text):
    return [piece.encode() for piece, _ in SPLITTERS[kind].pre_tokenize_str(text)]


@kinds
@given(telling)
def test_telling_characters_are_cut_as_by_the_pattern(kind, text):
    assert cut_into_pieces(text.encode(), kind) == expected(kind, text)


@kinds
@given(st.text(max_size=60))
def test_any_text_is_cut_as_by_the_pattern(kind, text):
    assert cut_into_pieces(text.encode(), kind) == expected(kind, text)


@kinds
def test_characters_of_every_block_are_cut_as_by_the_pattern(kind):
    points = [point for point in range(0, 0x11000, 5) if not 0xD800 <= point < 0xE000]
    text = "".join(f"a{chr(point)}1{chr(point)} {chr(point)}'{chr(point)}\n" for point in points)
    assert cut_into_pieces(text.encode(), kind) == expected(kind, text)


@kinds
@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\xc3", b"\xe2\x82 x", b"\xf0\x9f\x98", b"\x80abc\xc0\x80", b""])
def test_bytes_that_are_no_text_are_all_in_some_piece(kind, data):
    pieces = cut_into_pieces(data, kind)
    assert b"".join(pieces) == data
    assert all(pieces)


def test_the_spelling_of_bytes_is_that_of_byte_level_vocabularies():
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert spelled_to_bytes("Ġé".replace("é", CHAR_OF[0xC3] + CHAR_OF[0xA9])) == " é".encode()
    assert spelled_to_bytes(bytes_to_spelled(bytes(range(256)))) == bytes(range(256))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern, **other):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | other


@pytest.mark.parametrize(
    ("pre_tokenizer", "kind"),
    [
        (BYTE_LEVEL | {"use_regex": True}, "gpt2"),
        (BYTE_LEVEL, "whole"),
        (BYTE_LEVEL | {"add_prefix_space": True}, "tokenizers"),
        ({"type": "Sequence", "pretokenizers": [split(PATTERNS["cl100k"]), BYTE_LEVEL]}, "cl100k"),
        ({"type": "Sequence", "pretokenizers": [split(PATTERNS["digits"]), BYTE_LEVEL]}, "digits"),
        ({"type": "Sequence", "pretokenizers": [split(r"\w+"), BYTE_LEVEL]}, "tokenizers"),
        ({"type": "Sequence", "pretokenizers": [split(PATTERNS["cl100k"], invert=True), BYTE_LEVEL]}, "tokenizers"),
        ({"type": "Whitespace"}, None),
        (None, None),
    ],
)
def test_what_is_known_is_cut_in_c_and_the_rest_by_the_library(pre_tokenizer, kind):
    assert piece_rule_of(pre_tokenizer) == kind
