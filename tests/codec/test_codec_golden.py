"""The codec against recorded behaviour of zip2zip-compression 0.3.4 (`golden/lzw_public.json`)."""

import json

import pytest

from mlx_zip import Codebook, CodecError, CodecParams, compress
from support.places import GOLDEN

CASES = json.loads((GOLDEN / "lzw_public.json").read_text())["cases"]

# Upstream answers these, but installs a hypertoken under an id that is not the next one (its bugs 2, 3 and 4).
UNLAWFUL = {"unknown_gap", "unknown_past_end", "unknown_prev_max"}
# Upstream panics on these (its bug 1).
PANICS = {"unknown_first", "unknown_after_disabled", "unknown_when_full"}
# Upstream's manager skips a call of the pad id alone, so it contradicts its own whole-sequence reading (its bug 6).
SKIPS_PAD = {"pad_inside", "random_5", "random_11", "vocab_32064", "pad_inside_stream"}
# The manager's side was not recorded.
NO_MANAGER = {"empty", "bytes_string", "bytes_digits_disabled"}
# Not reproduced: it loses the ids pending at each chunk border (its bug 7).
LOSES_IDS = {"continuous_padded", "continuous_unpadded_min"}


def cases(kind, without=frozenset()):
    chosen = [case for case in CASES if case["kind"] == kind and case["name"] not in without]
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


def params_of(case):
    config = case["config"]
    sizes = (config["initial_vocab_size"], config["max_codebook_size"], config["max_subtokens"])
    return CodecParams(*sizes, config["disabled_ids"], config["pad_token_id"])


def as_lists(entries):
    return [[code, list(run)] for code, run in entries]


@cases("encode")
def test_compressing_gives_upstreams_ids_and_codebook(case):
    ids, entries = compress(params_of(case), case["input_ids"])
    assert ids.tolist() == case["encoded_ids"]
    assert as_lists(entries) == case["codebook_after_encode"]


@cases("encode")
def test_reading_compressed_ids_gives_upstreams_codebook_and_expansion(case):
    book = Codebook(params_of(case))
    book.push(case["encoded_ids"])
    assert as_lists(book.entries) == case["codebook_after_decode"]
    assert book.expand(case["encoded_ids"]).tolist() == case["decoded_ids"]


@cases("decode", UNLAWFUL | PANICS)
def test_reading_what_a_sampler_can_emit_gives_upstreams_codebook_and_expansion(case):
    book = Codebook(params_of(case))
    book.push(case["encoded_ids"])
    assert as_lists(book.entries) == case["codebook_after_decode"]
    assert book.expand(case["encoded_ids"]).tolist() == case["decoded_ids"]


@pytest.mark.parametrize("case", [c for c in CASES if c["name"] in UNLAWFUL | PANICS], ids=lambda c: c["name"])
def test_unlawful_ids_are_refused_and_change_nothing(case):
    assert (case["decode_error"] is not None) == (case["name"] in PANICS)
    book = Codebook(params_of(case))
    with pytest.raises(CodecError):
        book.push(case["encoded_ids"])
    assert book.mark() == 0
    assert len(book) == 0


def manager_cases(without=frozenset()):
    without = without | UNLAWFUL | PANICS | NO_MANAGER
    chosen = [case for case in CASES if case["kind"] in ("encode", "decode") and case["name"] not in without]
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


@manager_cases()
def test_a_whole_push_installs_what_upstreams_manager_reports(case):
    book = Codebook(params_of(case))
    (call,) = case["manager_whole"]["calls"]
    new = book.push(case["encoded_ids"])
    assert [[slot, list(run)] for slot, (_, run) in zip(new.slots.tolist(), new, strict=True)] == call["new"]


@manager_cases(SKIPS_PAD)
def test_pushing_one_by_one_installs_what_upstreams_manager_reports(case):
    book = Codebook(params_of(case))
    pushes = [book.push(x) for x in case["encoded_ids"]]
    got = [[[int(new.slots[0]), list(new[0][1])]] if new else [] for new in pushes]
    assert got == [call["new"] for call in case["manager_one_by_one"]["calls"]]


@pytest.mark.parametrize("case", [c for c in CASES if c["name"] in SKIPS_PAD], ids=lambda c: c["name"])
def test_a_pad_id_separates_also_when_it_is_pushed_alone(case):
    whole, one_by_one = Codebook(params_of(case)), Codebook(params_of(case))
    whole.push(case["encoded_ids"])
    for x in case["encoded_ids"]:
        one_by_one.push(x)
    assert as_lists(one_by_one.entries) == as_lists(whole.entries) == case["codebook_after_decode"]
    upstream = [entry for call in case["manager_one_by_one"]["calls"] for entry in call["new"]]
    assert upstream != [entry for call in case["manager_whole"]["calls"] for entry in call["new"]]


@cases("batch_encode")
def test_rows_of_batches_are_compressed_like_upstreams(case):
    args, params = case["args"], params_of(case)
    cut = args.get("max_length") if args.get("truncation") or "padding" not in args else None
    for row, encoded, mask in zip(case["input_ids"], case["encoded_ids"], case["attention_mask"], strict=True):
        got = compress(params, row)[0][:cut].tolist()
        padding = len(encoded) - len(got)
        assert [params.pad_id] * padding + got == encoded
        assert [0] * padding + [1] * len(got) == mask


def test_the_batch_manager_case_holds_for_separate_codebooks():
    (case,) = [case for case in CASES if case["kind"] == "manager_batch"]
    books = [Codebook(params_of(case)) for _ in case["codebooks"]]
    for call, result in zip(case["calls"], case["results"], strict=True):
        for row, (book, ids) in enumerate(zip(books, call, strict=True)):
            if ids != [case["config"]["pad_token_id"]]:  # a finished row: its padding is not read
                assert book.push(ids).slots.tolist() == result["updates_indices"][row]
    assert [as_lists(book.entries) for book in books] == case["codebooks"]


def test_every_recorded_case_is_accounted_for():
    names = {case["name"]: case for case in CASES}
    assert names.keys() >= UNLAWFUL | PANICS | SKIPS_PAD | NO_MANAGER | LOSES_IDS
    kinds = {case["kind"] for case in CASES if case["name"] not in LOSES_IDS}
    assert kinds == {"encode", "decode", "batch_encode", "manager_batch"}
    assert {c["name"] for c in CASES if c["kind"] == "continuous_encode"} == LOSES_IDS
    assert {c["name"] for c in CASES if "encoded_ids" in c and "manager_whole" not in c} >= NO_MANAGER
