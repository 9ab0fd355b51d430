"""`prepare`: what is in the samples, and that the folder is the same however the work was done."""

import errno
import json
import shutil

import numpy as np
import pytest

from mlx_zip.codec import Codebook
from mlx_zip.codec.pack import write_pack
from mlx_zip.errors import DataError
from mlx_zip.text import sources
from mlx_zip.text.sources import Source
from mlx_zip.training import sharding
from mlx_zip.training.prepare import PrepareOptions, prepare
from mlx_zip.training.shards import Shards
from support import tiny_text
from support.prepared import (
    BOS,
    EOS,
    PAD,
    expanded,
    ids_of,
    prepared,
    stories,
    texts,
    tokenizer_folder,
    tree,
    write_lines,
)


@pytest.fixture
def data(tmp_path):
    """Forty stories as JSON lines."""
    return texts(tmp_path / "data.jsonl", stories(40))


def stream_of(documents):
    return [x for text in documents for x in [*ids_of(text), EOS]]


# ---- what a sample is


def test_packed_windows_hold_all_documents_in_order_each_ended_by_eos(tmp_path, data):
    samples = expanded(prepared(tmp_path / "out", data))
    assert [x for ids in samples for x in ids[1:]] == stream_of(stories(40))
    assert {ids[0] for ids in samples} == {BOS}
    assert {len(ids) for ids in samples[:-1]} == {32}


def test_without_packing_each_document_has_samples_of_its_own_and_long_ones_are_counted(tmp_path):
    documents = ["a short one.", "a much longer one, which does not fit into a single window.", "end."]
    shards = prepared(tmp_path / "out", texts(tmp_path / "d.jsonl", documents), fill_windows=False)
    wanted = [[*ids_of(text), EOS] for text in documents]
    windows = [[BOS, *ids[at : at + 31]] for ids in wanted for at in range(0, len(ids), 31)]
    assert expanded(shards) == windows
    assert shards.index["windowed"] == 1


def test_a_tokenizer_that_adds_no_bos_gets_none(tmp_path, data):
    samples = expanded(prepared(tmp_path / "out", data, tokenizer=str(tokenizer_folder(bos=False))))
    assert [x for ids in samples for x in ids] == stream_of(stories(40))


def test_a_bos_that_the_text_brings_is_not_doubled(tmp_path):
    text = tiny_text.SPECIALS[0] + "the cat."
    assert expanded(prepared(tmp_path / "out", texts(tmp_path / "d.jsonl", [text]))) == [
        [BOS, *ids_of("the cat."), EOS]
    ]


def test_no_id_is_an_entry_that_is_not_installed_yet_and_hypertokens_do_occur(tmp_path, data):
    shouts = texts(tmp_path / "a.jsonl", ["aaaaaaaaaaaaaaaaaaaa!" * 9])  # LZW itself would use an entry as it makes it
    shards = prepared(tmp_path / "out", shouts, data, context=256)
    for i in range(len(shards)):
        book = Codebook(shards.params)
        for x in shards[i].ids.tolist():
            assert x < shards.params.vocab_size + len(book)
            book.push(x)
    assert shards.index["totals"]["ids"] < 0.9 * shards.index["totals"]["base_ids"]


@pytest.mark.parametrize("sizes", [{"merge_size": 1}, {"codebook_size": 0}])
def test_a_control_without_codebook_keeps_the_base_ids(tmp_path, data, sizes):
    shards = prepared(tmp_path / "out", data, **sizes)
    assert [x for i in range(len(shards)) for x in shards[i].ids[1:].tolist()] == stream_of(stories(40))
    assert all(shards[i].base_ids == len(shards[i].ids) for i in range(len(shards)))


def test_base_ids_and_bytes_of_a_sample_are_those_of_its_text(tmp_path):
    shards = prepared(tmp_path / "out", texts(tmp_path / "d.jsonl", [tiny_text.EMOJI * 20]), context=11)
    assert [shards[i].base_ids for i in range(len(shards))] == [11] * 8 + [2]
    assert [shards[i].n_bytes for i in range(len(shards))] == [10] * 8 + [0]  # a window may end inside a character


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece, space kept"])
@pytest.mark.parametrize("text", ["once upon a times.", f"a {tiny_text.EMOJI}\n\nb", " a", "ünknown €"])
def test_bytes_add_up_to_the_texts_for_every_kind_of_tokenizer(tmp_path, kind, text):
    folder = str(tokenizer_folder(kind))
    shards = prepared(tmp_path / "out", texts(tmp_path / "d.jsonl", [text, text]), tokenizer=folder, context=4)
    assert shards.index["totals"]["bytes"] == 2 * len(text.encode())


def test_special_tokens_have_no_bytes(tmp_path):
    text = f"the {tiny_text.SPECIALS[1]} cat"
    shards = prepared(tmp_path / "out", texts(tmp_path / "d.jsonl", [text]))
    assert shards.index["totals"]["bytes"] == len("the  cat")


# ---- the codec


def test_special_tokens_and_the_pad_id_never_merge_unless_other_ids_are_disabled(tmp_path, data):
    assert prepared(tmp_path / "a", data).params.disabled_ids == (BOS, EOS, PAD)
    assert prepared(tmp_path / "b", data, disable=(7,)).params.disabled_ids == (PAD, 7)


def test_protected_digits_and_ids_are_in_no_hypertoken(tmp_path):
    data = texts(tmp_path / "d.jsonl", ["12 12 12 ab ab ab 12 12 cd cd cd cd ab ab ab"])
    digits, a = set(ids_of("0123456789")), ids_of("a")[0]
    shards = prepared(tmp_path / "out", data, protect=("digits", f"{a}, {PAD}"), context=64)
    assert set(shards.params.disabled_ids) == {BOS, EOS, PAD, a, *digits}
    (sample,) = (shards[i] for i in range(len(shards)))
    book = Codebook(shards.params)
    book.push(sample.ids)
    assert not any({a, *digits} & set(entry) for _, entry in book.entries)
    assert len(sample.ids) < sample.base_ids


def test_a_zip2zip_model_brings_its_codec_and_flags_change_it(tmp_path, data):
    model = tiny_text.converted("llama_transformer_tied_lora")
    compression = json.loads((model / "config.json").read_text())["zip2zip"]["compression"]
    own = prepared(tmp_path / "a", data, model=str(model), codebook_size=None).params
    assert (own.vocab_size, own.codebook_size) == (compression["initial_vocab_size"], compression["max_codebook_size"])
    assert set(compression["disabled_ids"]) <= set(own.disabled_ids)
    assert prepared(tmp_path / "b", data, model=str(model), merge_size=2, codebook_size=5).params.merge_size == 2


def test_a_plain_model_sets_the_boundary_by_its_embedding(tmp_path, data):
    folder = tokenizer_folder(template=None)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 96}))
    assert prepared(tmp_path / "out", data, model=str(folder)).params.vocab_size == 96


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path, data):
    folder = tokenizer_folder("sentencepiece", template=None)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 96}))
    with pytest.raises(DataError, match=r"ids up to 266, the model base ids up to 95"):
        prepared(tmp_path / "out", data, model=str(folder))
    assert not (tmp_path / "out").exists()


# ---- starting codebooks


def entries_of(*words):
    return tuple(tuple(ids_of(word)) for word in words)


PACK = ("the", "cat", "dog", "mat", "on ", "sat", "and", "sto")


def test_a_fixed_starting_codebook_is_there_before_the_first_id(tmp_path, data):
    write_pack(tmp_path / "pack.json", entries_of(*PACK), 3)
    shards = prepared(tmp_path / "out", data, pack=tmp_path / "pack.json")
    assert shards.params.start == entries_of(*PACK)
    assert expanded(shards) == expanded(prepared(tmp_path / "plain", data))
    sto = shards.params.vocab_size + PACK.index("sto")
    assert shards[0].ids[1] == sto


def test_drawn_starting_codebooks_differ_by_sample_and_come_from_the_seed(tmp_path, data):
    write_pack(tmp_path / "pack.json", entries_of(*PACK), 3)
    options = {"pack": tmp_path / "pack.json", "start_draw": 3}
    shards = prepared(tmp_path / "a", data, **options)
    drawn = [shards[i].start for i in range(len(shards))]
    assert all(len(set(start)) == 3 and set(start) <= set(entries_of(*PACK)) for start in drawn)
    assert len(set(drawn)) > 3
    assert expanded(shards) == expanded(prepared(tmp_path / "plain", data))
    again, other = prepared(tmp_path / "b", data, **options), prepared(tmp_path / "c", data, seed=1, **options)
    assert [again[i].start for i in range(len(again))] == drawn
    assert [other[i].start for i in range(len(other))] != drawn


@pytest.mark.parametrize(
    ("pack", "options", "words"),
    [
        (entries_of(*PACK), {"start_draw": 9}, r"start_draw 9 is more than .*\(8\)"),
        (entries_of(*PACK), {"start_draw": 3, "codebook_size": 2}, "codebook slots"),
        (((5, EOS),), {}, r"pack.json: start entry 0 .*disabled"),
        (((5, 999),), {"start_draw": 1}, r"pack.json: start entry 0"),
        (((5, 6, 7, 8),), {}, "start entry 0 has 4 ids"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused(tmp_path, data, pack, options, words):
    write_pack(tmp_path / "pack.json", pack, 4)
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "out", data, pack=tmp_path / "pack.json", **options)


# ---- the same folder, however it was made


def test_the_folder_does_not_depend_on_the_number_of_workers(tmp_path, data):
    one = prepared(tmp_path / "one", data, shard_samples=4)
    prepared(tmp_path / "two", data, shard_samples=4, workers=2)
    assert len(one.index["shards"]) > 3
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


@pytest.mark.parametrize("stage", ["make", "write_json"])
def test_a_run_that_was_stopped_anywhere_is_completed_to_the_same_bytes(tmp_path, data, monkeypatch, stage):
    write_pack(tmp_path / "pack.json", entries_of(*PACK), 3)
    options = {"shard_samples": 4, "limit": 60, "pack": tmp_path / "pack.json", "start_draw": 2}
    prepared(tmp_path / "whole", data, **options)
    place = sharding.ShardMaker if stage == "make" else sharding
    real, calls = getattr(place, stage), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 3:  # before the shard's arrays are written, or behind them
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(place, stage, stop)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", data, **options)
    (tmp_path / "out" / ".shard-00002.ids.npy.partial-1").write_bytes(b"half")
    with pytest.raises(DataError, match="unfinished"):
        Shards(tmp_path / "out")
    monkeypatch.setattr(place, stage, real)
    makes = []
    make = sharding.ShardMaker.make
    monkeypatch.setattr(
        sharding.ShardMaker, "make", lambda self, chunk: makes.append(chunk.number) or make(self, chunk)
    )
    prepared(tmp_path / "out", data, **options)
    assert min(makes) == 2  # the finished ones are kept
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_run_stopped_after_the_index_is_tidied_and_not_repeated(tmp_path, data, monkeypatch):
    before = tree_after(tmp_path / "out", data)
    (tmp_path / "out" / "shard-00000.json").write_text("{}")
    (tmp_path / "out" / "shard-00009.ids.npy").write_bytes(b"left over")
    monkeypatch.setattr(sharding.ShardMaker, "make", None)
    assert tree_after(tmp_path / "out", data) == before


def tree_after(out, data):
    prepared(out, data)
    return tree(out)


def test_other_settings_for_a_begun_folder_are_refused_and_named(tmp_path, data):
    prepared(tmp_path / "out", data)
    with pytest.raises(DataError, match=r"context 32, which is now 64"):
        prepared(tmp_path / "out", data, context=64)
    texts(tmp_path / "data.jsonl", stories(41))
    with pytest.raises(DataError, match=r"sources\.0\.sha256\.\S*data\.jsonl"):
        prepared(tmp_path / "out", data)


def test_a_folder_with_other_content_is_left_alone(tmp_path, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="holds other files"):
        prepared(tmp_path / "out", data)
    assert tree(tmp_path / "out") == {"letter.txt": b"dear"}


def test_an_out_that_cannot_be_a_folder_is_one_clear_line(tmp_path, data):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        prepared(tmp_path / "file", data)
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        prepared(tmp_path / "file" / "out", data)


def test_a_full_disk_leaves_the_finished_shards_and_the_run_can_go_on(tmp_path, data, monkeypatch):
    prepared(tmp_path / "whole", data, shard_samples=4)
    real, calls = np.save, []

    def save(file, *args, **kwargs):
        calls.append(file)
        if len(calls) == 13:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, *args, **kwargs)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(DataError, match="No space left on device; the shards written so far stay"):
        prepared(tmp_path / "out", data, shard_samples=4)
    assert not [name for name in tree(tmp_path / "out") if "partial" in name]
    monkeypatch.setattr(np, "save", real)
    prepared(tmp_path / "out", data, shard_samples=4)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("limit", [1, 5, 17])
def test_a_limit_keeps_the_first_samples_exactly(tmp_path, data, limit):
    whole = prepared(tmp_path / "whole", data, shard_samples=4)
    cut = prepared(tmp_path / "cut", data, shard_samples=4, limit=limit)
    assert expanded(cut) == expanded(whole)[:limit]
    assert cut.index["totals"]["base_ids"] == sum(map(len, expanded(cut)))


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1}, "context must be an integer of 2 or more"),
        ({"limit": 0}, "limit must be"),
        ({"start_draw": 2}, r"name it with pack \(--pack\)"),
        ({"train_on": "questions"}, "train_on"),
        ({"model": "a", "tokenizer": "b"}, "either a model or a tokenizer"),
        ({"protect": ("letters",)}, "protect 'letters'"),
        ({"protect": ("9999",)}, "id 9999"),
        ({"merge_size": 17}, "merge_size 17"),
    ],
)
def test_options_out_of_range_are_refused_by_name(tmp_path, data, options, words):
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "out", data, **options)


def test_a_tokenizer_without_eos_and_pad_is_refused(tmp_path, data):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer_folder() / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="neither a pad nor an eos token"):
        prepared(tmp_path / "out", data, tokenizer=str(folder / "tokenizer.json"))


def test_a_context_that_the_ids_before_every_text_would_fill_is_refused(tmp_path, data):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = tokenizer["post_processor"]["single"][0]
    tokenizer["post_processor"]["single"].insert(0, bos)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert expanded(prepared(tmp_path / "out", data, tokenizer=str(folder), context=3))[0][:2] == [BOS, BOS]
    with pytest.raises(DataError, match="context 2 leaves no room after the 2 ids"):
        prepared(tmp_path / "none", data, tokenizer=str(folder), context=2)
    assert not (tmp_path / "none").exists()


def test_workers_and_sources_are_checked(tmp_path, data):
    options = PrepareOptions((Source((data,)),), tmp_path / "out", tokenizer=str(tokenizer_folder()))
    with pytest.raises(DataError, match="workers must be 1 or more"):
        prepare(options, workers=0)
    with pytest.raises(DataError, match="no data"):
        PrepareOptions((), tmp_path / "out", tokenizer="t")


def test_a_long_document_is_read_in_parts_that_stay_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 40)
    lines = [f"line {i} of a long text." for i in range(20)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    parts = list(sources.Reader(Source((str(tmp_path / "long.txt"),))))
    assert len(parts) > 5
    assert [part.continues for part in parts] == [True] * (len(parts) - 1) + [False]
    samples = expanded(prepared(tmp_path / "out", str(tmp_path / "long.txt")))
    assert [x for ids in samples for x in ids[1:]] == [*ids_of("\n".join(lines)), EOS]


def test_wrong_and_empty_records_are_reported_counted_and_skipped(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a."}, "{", {"text": " "}, {"words": "b"}, {"text": "c."}])
    lines: list[str] = []
    shards = prepared(tmp_path / "out", data, report=lines.append)
    assert expanded(shards) == [[BOS, *stream_of(["a.", "c."])]]
    assert [line.split(": ")[0] for line in lines] == [f"skipped {data}:2", f"skipped {data}:4"]
    assert shards.index["skipped"] == {"wrong": 2, "empty": 1, "unlearnable windows": 0}
    assert shards.index["records"] == 5


def test_wrong_records_that_are_too_many_to_name_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "NOTED", 2)
    data = write_lines(tmp_path / "d.jsonl", ["{", {"text": "a."}, "{", "{", "{"])
    lines: list[str] = []
    prepared(tmp_path / "out", data, report=lines.append)
    assert [line.split(": ")[0] for line in lines] == [
        f"skipped {data}:1",
        f"skipped {data}:3",
        "skipped 2 more wrong records after these",
    ]


def test_more_wrong_records_than_allowed_are_an_error_that_names_the_first(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a."}, "{", "{", "{"])
    with pytest.raises(DataError, match=r"3 wrong records, more than max_skipped .* 2; the first: \S*d.jsonl:2: not"):
        prepared(tmp_path / "out", data, max_skipped=2)
    assert prepared(tmp_path / "other", data, max_skipped=3).index["skipped"]["wrong"] == 3


@pytest.mark.parametrize("records", [[], [{"text": ""}], ["{"]])
def test_data_without_a_sample_are_an_error_and_leave_no_folder(tmp_path, records):
    data = write_lines(tmp_path / "d.jsonl", records)
    with pytest.raises(DataError, match=r"d.jsonl gives no sample to train on"):
        prepared(tmp_path / "out", data)
    assert not (tmp_path / "out").exists()
