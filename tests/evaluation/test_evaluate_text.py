"""What an evaluation reads: documents up to a limit, and windows of base ids that add up to their bytes."""

import gzip
import json

import numpy as np
import pytest

from mlx_zip.errors import DataError
from mlx_zip.evaluation.bits import choose_prefix_id, cut_scored_windows
from mlx_zip.text.documents import Document, read_corpus
from mlx_zip.text.token_facts import encode_with_bytes
from support import tiny_text

BYTES = tiny_text.byte_level()
PIECES = tiny_text.sentencepiece()
TEXTS = ["once upon a time", "a time 😀 upon a times.\nonce", "a"]


def texts(*args, **options):
    return [document.text for document in read_corpus(*args, **options).documents]


def documents(*found):
    return [Document(text, f"document {i}") for i, text in enumerate(found)]


def without_bos(tokenizer, **tokens):
    twin = tiny_text.byte_level() if tokenizer is BYTES else tokenizer
    for name in ("bos_token", *tokens):
        setattr(twin._tokenizer, name, tokens.get(name))
    return twin


# ---- documents


def test_a_text_file_is_one_document_with_every_byte_of_it(tmp_path):
    (tmp_path / "a.txt").write_text("\n one\n\ntwo \n")
    assert texts([tmp_path / "a.txt"]) == ["\n one\n\ntwo \n"]


def test_a_separator_line_ends_documents_and_belongs_to_none(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<end>\ntwo\nlines\n<end>\n\n<end>\n")
    corpus = read_corpus([tmp_path / "a.txt"], separator="<end>")
    assert ([d.text for d in corpus.documents], corpus.empty) == (["one", "two\nlines"], 1)


def test_json_lines_give_their_text_and_several_files_follow_one_another(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "three", "completion": " four"}))
    assert texts([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]) == ["one", "two", "three four"]


@pytest.mark.parametrize(("limit", "kept"), [(3, ["abc"]), (4, ["abc"]), (7, ["abc", "😀"]), (8, ["abc", "😀", "d"])])
def test_the_limit_cuts_the_last_document_before_the_character_that_would_exceed_it(tmp_path, limit, kept):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "😀"}\n{"text": "def"}\n')
    corpus = read_corpus([tmp_path / "a.jsonl"], limit_bytes=limit)
    assert ([d.text for d in corpus.documents], corpus.cut) == (kept, True)


def test_a_limit_that_all_documents_fit_in_cuts_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert not read_corpus([tmp_path / "a.txt"], limit_bytes=3).cut


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "a.jsonl:2: not valid JSON"),
        ('{"txt": "a"}', "a.jsonl:2: has neither text"),
        ('{"text": 3}', "a.jsonl:2: text is int"),
        ('{"text": "\\ud800"}', "a.jsonl:2: not valid Unicode"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a.jsonl:2: a conversation has no text of its own"),
    ],
)
def test_a_record_that_is_no_text_is_an_error_with_file_and_line(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + line)
    with pytest.raises(DataError, match=reason):
        read_corpus([tmp_path / "a.jsonl"])


def test_bad_requests_for_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text to read"):
        read_corpus([tmp_path / "a.txt"])
    with pytest.raises(DataError, match="--limit-bytes"):
        read_corpus([tmp_path / "a.txt"], limit_bytes=0)
    with pytest.raises(DataError, match="no such file"):
        read_corpus([tmp_path / "b.txt"])


def test_the_record_names_the_text_by_its_hash(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "c.txt").write_text("two")
    hashes = [read_corpus([tmp_path / name]).record()["sha256"] for name in ("a.txt", "b.jsonl", "c.txt")]
    assert hashes[0] == hashes[1] != hashes[2]


# ---- windows


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("context", [1, 3, 7, 100])
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_windows_add_up_to_every_byte_of_the_text(tokenizer, context, pack):
    found = cut_scored_windows(tokenizer, documents(*TEXTS), context, pack)
    assert sum(window.n_bytes for window in found.windows) == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("context", [3, 7, 100])
def test_each_document_begins_a_window_of_its_own(context):
    windows = cut_scored_windows(BYTES, documents(*TEXTS), context).windows
    expected = []
    for text in TEXTS:
        ids = BYTES.encode(text, add_special_tokens=False)
        expected += [ids[i : i + context] for i in range(0, len(ids), context)]
    assert [window.base_ids.tolist() for window in windows] == expected


def test_packed_windows_are_full_and_an_eos_between_documents_is_not_scored():
    windows = cut_scored_windows(BYTES, documents(*TEXTS), 10, fill_windows=True).windows
    ids, scored = (np.concatenate([getattr(w, name) for w in windows]) for name in ("base_ids", "scored"))
    assert {len(window.base_ids) for window in windows[:-1]} == {10}
    assert (ids[~scored] == BYTES.eos_token_id).all()
    assert (~scored).sum() == len(TEXTS) - 1
    assert BYTES.decode(ids[scored]) == "".join(TEXTS)


def test_bytes_are_counted_where_ids_begin_and_a_characters_last_id_has_them():
    _, n_bytes = encode_with_bytes(BYTES, "a😀b")
    assert n_bytes.tolist() == [1, 0, 0, 0, 4, 1]


def test_characters_before_the_first_id_count_as_its_bytes():
    class Trimming:
        is_fast = True

        def __call__(self, text, **options):
            return {"input_ids": [1, 2], "offset_mapping": [(2, 3), (3, 4)]}

    _, n_bytes = encode_with_bytes(Trimming(), "  ab")
    assert n_bytes.tolist() == [3, 1]


def test_a_tokenizer_without_offsets_spreads_the_bytes_evenly():
    class Slow:
        is_fast = False

        def __call__(self, text, **options):
            return {"input_ids": [1, 2, 3]}

    _, n_bytes = encode_with_bytes(Slow(), "a😀bcde")
    assert (n_bytes.sum(), n_bytes.max() - n_bytes.min()) == (9, 0)


def test_a_window_stands_after_bos_or_else_eos():
    assert choose_prefix_id(BYTES) == BYTES.bos_token_id
    assert choose_prefix_id(without_bos(BYTES)) == BYTES.eos_token_id
    neither = without_bos(BYTES, eos_token=None)
    assert choose_prefix_id(neither) == BYTES.eos_token_id  # the model's configuration has named it
    neither._eos_token_ids = set()
    with pytest.raises(DataError, match="neither a bos nor an eos"):
        choose_prefix_id(neither)


def test_packing_needs_an_eos():
    with pytest.raises(DataError, match="no eos token"):
        cut_scored_windows(
            without_bos(BYTES, bos_token="<|bos|>", eos_token=None), documents("a"), 4, fill_windows=True
        )


def test_documents_that_their_ids_do_not_give_back_are_counted():
    assert cut_scored_windows(BYTES, documents(*TEXTS), 9).altered == 0
    assert cut_scored_windows(BYTES, documents("once", "onceX", "😀"), 9).altered == 1


def test_a_document_without_any_token_is_an_error():
    with pytest.raises(DataError, match="document 1: the tokenizer makes no token"):
        cut_scored_windows(BYTES, documents("once", "ONCE"), 9)


def test_a_context_of_no_ids_is_refused():
    with pytest.raises(DataError, match="--context"):
        cut_scored_windows(BYTES, documents("a"), 0)
