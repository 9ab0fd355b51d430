"""Tables of patches: look-up, saving, loading; and the tokens of first-stage tokenizers as byte strings."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.errors import CodecError, DataError
from mlx_zip.vocab.first_stage import BYTE_OF
from mlx_zip.vocab.hbpe.patch_merges import MARK, PatchMerges, learn_merges
from mlx_zip.vocab.hbpe.patch_table import PatchTable, tokens_fingerprint
from mlx_zip.vocab.hbpe.patch_text import read_text_encoder, read_token_bytes
from support.tiny_vocabularies import SIZE, TEXT, letters, tokens, write_folder, write_pair, write_ranks

BYTE_LEVEL = b'"decoder": {"type": "ByteLevel"}'
WORDS = [b"a", b"", b"banana", b" ban", b"nana nana", b"\xff\x00"]


@pytest.fixture
def table():
    return PatchTable.learn(WORDS, 4)


def altered(path, **fields):
    """The file again with some fields exchanged, or left out where None."""
    with np.load(path) as archive:
        held = {name: archive[name] for name in archive.files}
    held = {name: value for name, value in {**held, **fields}.items() if value is not None}
    np.savez(path, **held)
    return path


# ---- the table


def test_a_row_is_the_patch_filled_with_the_mark(table):
    assert table.rows.dtype == np.uint16
    assert table.rows.shape == (len(WORDS), 4)
    for row, word, n in zip(table.rows.tolist(), WORDS, table.lengths.tolist(), strict=True):
        assert row[:n] == table.merges.encode(word)
        assert row[n:] == [MARK] * (4 - n)


def test_looking_up_and_reading_gives_the_bytes_of_the_ids(table):
    ids = [3, 2, 0, 1, 5, 4]
    patches = table.encode(ids)
    assert patches.shape == (6, 4)
    assert table.decode(patches) == b"".join(WORDS[i] for i in ids)
    assert table.tokens == tuple(WORDS)
    assert table.encode(2).tolist() == [table.rows[2].tolist()]


def test_a_patch_without_a_mark_is_all_of_its_symbols(table):
    assert table.decode(np.array([[97, 98, 99, 100], [97, MARK, 98, 99]])) == b"abcda"


def test_an_id_of_another_tokenizer_is_refused(table):
    with pytest.raises(CodecError, match="id 6 at index 1 is not below 6"):
        table.encode([0, 6])


def test_a_token_that_does_not_fit_is_named():
    with pytest.raises(CodecError, match=r"token 1 b'abcdef' takes 7 symbols, more than 4"):
        PatchTable.build(learn_merges([b"xxxx"], 4).merges, [b"a", b"abcdef"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.full((2, 4), 97, np.uint16), "id 0 has no end mark"),
        (np.array([[97, MARK, MARK, MARK], [97, 9999, MARK, MARK]], np.uint16), "id 1"),
        (np.array([[97, MARK, 98, MARK]], np.uint16), "after its end mark"),
        (np.full((2, 5), MARK, np.uint16), r"uint16 \[V, 4\]"),
        (np.full((2, 4), MARK, np.int64), r"uint16 \[V, 4\]"),
    ],
)
def test_rows_that_are_no_patches_are_refused(rows, message):
    with pytest.raises(CodecError, match=message):
        PatchTable(PatchMerges(4, ()), rows)


def test_full_mode_makes_patches_of_short_tokens_shorter():
    words = [b"aaaaaaa", b"aa", b"b"]
    stop, full = PatchTable.learn(words, 4), PatchTable.learn(words, 4, "full")
    assert (stop.merges, stop.tokens) == (full.merges, full.tokens)
    assert stop.lengths[1:].tolist() == [3, 2]
    assert full.lengths[1:].tolist() == [2, 2]


def test_a_table_belongs_to_one_tokenizer(table):
    table.check_tokens(WORDS)
    for others in (WORDS[::-1], WORDS[:-1], [*WORDS, b""], [b"ab", *WORDS[1:]]):
        with pytest.raises(DataError, match="another tokenizer"):
            table.check_tokens(others)


def test_fingerprints_tell_where_one_token_ends():
    assert tokens_fingerprint([b"ab", b"c"]) != tokens_fingerprint([b"a", b"bc"])
    assert tokens_fingerprint([b"ab"]) != tokens_fingerprint([b"ab", b""])


# ---- files


@given(st.lists(st.binary(max_size=20), max_size=12), st.integers(2, 8), st.sampled_from(["stop", "full"]))
def test_a_saved_table_loads_to_an_equal_one(tmp_path_factory, words, size, mode):
    path = tmp_path_factory.mktemp("table") / "t.npz"
    table = PatchTable.learn(words, size, mode)
    table.save(path)
    loaded = PatchTable.load(path)
    assert (loaded.merges, loaded.mode, loaded.tokens) == (table.merges, mode, tuple(words))
    assert (loaded.rows == table.rows).all()
    assert loaded.fingerprint == tokens_fingerprint(words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": np.array(2)}, "version 2; .* reads version 1"),
        ({"version": None}, "version None; .* reads version 1"),
        ({"mode": None}, "must hold .*mode"),
        ({"more": np.array(1)}, "must hold"),
        ({"patch_size": np.array(5)}, "damaged"),
        ({"mode": np.array("full")}, "damaged"),
        ({"fingerprint": np.array("0" * 64)}, "damaged"),
        ({"checksum": np.array("0" * 64)}, "damaged"),
        ({"rows": np.zeros((6, 4), np.uint16)}, "damaged"),
        ({"merges": np.array([[object(), 1]])}, "cannot be read"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, table, change, message):
    table.save(tmp_path / "t.npz")
    with pytest.raises(DataError, match=rf"t\.npz.*{message}"):
        PatchTable.load(altered(tmp_path / "t.npz", **change))


def test_a_file_that_is_cut_off_or_missing_is_refused(tmp_path, table):
    path = tmp_path / "t.npz"
    with pytest.raises(DataError, match="cannot be read"):
        PatchTable.load(path)
    table.save(path)
    data = path.read_bytes()
    for n in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(DataError, match=r"t\.npz"):
            PatchTable.load(path)


def test_a_right_checksum_over_wrong_content_does_not_help(tmp_path, table):
    from mlx_zip.vocab.hbpe.patch_table import _table_checksum

    path = tmp_path / "t.npz"
    for change, message in (
        ({"rows": np.full((6, 4), 97, np.uint16)}, "no end mark"),
        ({"merges": np.array([[97, 300]], np.uint16)}, "merge 0"),
        ({"merges": np.array([1, 2], np.uint16)}, "not a patch table"),
        ({"merges": np.array([[97.5, 98]])}, "merges must be uint16, got float64"),
        ({"rows": table.rows[::-1].copy()}, "fingerprint"),
    ):
        table.save(path)
        with np.load(path) as archive:
            fields = {name: archive[name] for name in archive.files if name != "checksum"} | change
        with pytest.raises(DataError, match=message):
            PatchTable.load(altered(path, **change, checksum=np.array(_table_checksum(fields))))


def test_another_suffix_is_refused_before_anything_is_written(tmp_path, table):
    with pytest.raises(DataError, match=r"\.npz"):
        table.save(tmp_path / "t.bin")
    assert list(tmp_path.iterdir()) == []


# ---- first-stage tokenizers


def in_gpt2s_order():
    """The tokens as a merge list alone numbers them: bytes in the order of their letters, then the merges."""
    return [*(bytes([byte]) for byte in BYTE_OF.values()), *tokens()[256:]]


def test_letters_are_gpt2s():
    spelled = {letter: byte for byte, letter in enumerate(letters())}
    assert spelled == BYTE_OF
    assert list(BYTE_OF)[:2] == ["!", '"']


def test_tokens_are_read_from_every_kind_of_file(tmp_path):
    listed = tmp_path / "tokens.json"
    listed.write_text(json.dumps([token.hex() for token in tokens()]))
    folder, merges = write_folder(tmp_path / "mini"), write_pair(tmp_path).with_name("vocab.bpe")
    zipped = tmp_path / "merges.txt.gz"
    zipped.write_bytes(gzip.compress(merges.read_bytes()))
    assert read_token_bytes(write_ranks(tmp_path)) == tokens()
    assert read_token_bytes(write_ranks(tmp_path, "mini.tiktoken.gz")) == tokens()
    assert read_token_bytes(listed) == tokens()
    assert read_token_bytes(merges) == read_token_bytes(zipped) == in_gpt2s_order()
    assert (
        read_token_bytes(folder) == read_token_bytes(folder / "tokenizer.json") == [*tokens(), b""]
    )  # <end> is no text


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.bpe"])
def test_ids_of_a_text_are_those_whose_tokens_spell_it(tmp_path, kind):
    path = write_folder(tmp_path / "mini") if kind == "tokenizer.json" else write_pair(tmp_path).with_name(kind)
    table, ids = PatchTable.learn(read_token_bytes(path), 4), list(read_text_encoder(path)(TEXT))
    assert table.decode(table.encode(ids)) == TEXT.encode()
    assert len(ids) < len(TEXT)


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    folder = write_folder(tmp_path / "mini")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["added_tokens"].append({"id": SIZE + 3, "content": "né", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert read_token_bytes(folder)[SIZE:] == [b"", b"", b"", "né".encode()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tiktoken", b"YQ== 0\nYg=\n", "line 2"),
        ("a.tiktoken", b"YQ== 1\n", "not 0, 1, 2"),
        ("vocab.bpe", b"#version: 0.2\na b\nab\n", "merge 1 "),
        ("vocab.bpe", "a b\nab €\n".encode(), "merge 1 "),
        ("vocab.bpe", b"", "is empty"),
        ("merges.txt.gz", b"not zipped", "cannot be read"),
        ("tokens.json", b"[]", "has no token that stands for a byte"),
        ("tokens.json", b'[""]', "has no token that stands for a byte"),
        ("tokens.json", b'["61", "6"]', "hex"),
        ("tokens.json", b"[61]", "hex"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}}', "no byte-level"),
        ("tokenizer.json", b"[", "not valid JSON"),
        ("tokenizer.json", b'{"model": 3}', "no byte-level"),
        ("tokenizer.json", b'{"model": {"vocab": {}}, "added_tokens": [{}], %s}' % BYTE_LEVEL, "added_tokens"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -1}}, %s}' % BYTE_LEVEL, "integer from 0"),
        ("tokenizer.model", b"", "tokens are read from"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        read_token_bytes(tmp_path / name)


def test_byte_level_files_with_other_letters_are_refused(tmp_path):
    state = {"model": {"vocab": {"a▁b": 0}}, "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="a▁b"):
        read_token_bytes(tmp_path)


def test_what_does_not_say_how_text_is_split_encodes_none(tmp_path):
    with pytest.raises(DataError, match="how a text is split"):
        read_text_encoder(write_ranks(tmp_path))
    with pytest.raises(DataError, match=r"none\.json cannot be read: No such file"):
        read_text_encoder(tmp_path / "none.json")
