"""`prepare`: what is in the samples, their codec and the codebooks that they begin with."""

import json

import pytest

from mlx_zip.codec import Codebook
from mlx_zip.errors import DataError
from mlx_zip.packs.entries import write_entries
from support import tiny_text
from support.prepared import (
    BOS,
    EOS,
    PACK,
    PAD,
    entries_of,
    expanded,
    ids_of,
    prepared,
    stories,
    stream_of,
    texts,
    tokenizer_folder,
)

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


def test_a_fixed_starting_codebook_is_there_before_the_first_id(tmp_path, data):
    write_entries(tmp_path / "pack.json", entries_of(*PACK), 3)
    shards = prepared(tmp_path / "out", data, pack=tmp_path / "pack.json")
    assert shards.params.start == entries_of(*PACK)
    assert expanded(shards) == expanded(prepared(tmp_path / "plain", data))
    sto = shards.params.vocab_size + PACK.index("sto")
    assert shards[0].ids[1] == sto


def test_drawn_starting_codebooks_differ_by_sample_and_come_from_the_seed(tmp_path, data):
    write_entries(tmp_path / "pack.json", entries_of(*PACK), 3)
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
    write_entries(tmp_path / "pack.json", pack, 4)
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "out", data, pack=tmp_path / "pack.json", **options)
