"""AdaptBPE against the golden cases: every swap, every token (`golden/adaptbpe.json`; GPT-2's list where it is)."""

import hashlib
import json
from collections import Counter

import pytest

from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.adaptbpe.learn import adapt_merges, most_frequent_merges
from mlx_zip.vocab.adaptbpe.merge_list import BpeEncoder, MergeList, Schedule, cut_into_pieces
from mlx_zip.vocab.first_stage import spelled_to_bytes
from support import adaptbpe_twin as twin
from support.adaptbpe_cases import ADAPTBPE, GPT2, HEAD, corpus_of, golden_merges, keeping, needs_gpt2, symbols
from support.slow_cases import slow_but

cases = pytest.mark.parametrize("case", ADAPTBPE["cases"], ids=[case["name"] for case in ADAPTBPE["cases"]])
ROWS = ADAPTBPE["gpt2"]["rows"]


def adapted(case):
    settings = {name: case[name] for name in ("margin", "max_swaps", "tie")}
    return adapt_merges(golden_merges(case["name"]), corpus_of(case), case["N"], **settings)


def encoders(merges, n, virtual, promoted):
    """By the names of the golden file."""
    arguments = len(merges), n, virtual, promoted
    return {
        "replay": BpeEncoder(merges, Schedule.replay(*arguments), "whole"),
        "final_rule": BpeEncoder(merges, Schedule.final(*arguments), "whole"),
        "first_k": BpeEncoder(merges, Schedule.plain(len(merges), n), "whole"),
    }


def spelled(encoder, word):
    return [encoder.merges.tokens[token].decode("latin-1") for token in encoder.encode(symbols(word))]


def size(encoder, corpus):
    return sum(len(encoder.encode(word)) * count for word, count in corpus.items())


def digest(value):
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


@cases
def test_the_swaps_are_the_recorded_ones(case):
    found, expected = adapted(case), case["expected"]
    assert (found.virtual, found.promoted, len(found.swaps)) == tuple(
        expected[name] for name in ("virtual", "promoted", "swaps")
    )


def trace_of(case):
    merges = golden_merges(case["name"])
    gone, trace = set(), []
    for swap in adapted(case).swaps:
        gone.add(256 + swap.p)
        parts = [merges.tokens[t].decode("latin-1") for t in twin.split([256 + swap.p], merges, 256 + swap.p, gone)]
        trace.append(
            {
                "p": swap.p,
                "freq_p": swap.p_count,
                "parts": parts,
                "q": swap.q,
                "freq_q": swap.q_count,
                "size": swap.n_tokens,
            }
        )
    return trace


@pytest.mark.parametrize("case", [c for c in ADAPTBPE["cases"] if "trace" in c["expected"]], ids=lambda c: c["name"])
def test_each_swap_has_the_recorded_counts_parts_and_size(case):
    assert trace_of(case) == case["expected"]["trace"]


@pytest.mark.parametrize(
    "case", [c for c in ADAPTBPE["cases"] if "trace" not in c["expected"]], ids=lambda c: c["name"]
)
def test_long_traces_begin_end_and_digest_as_recorded(case):
    trace, expected = trace_of(case), case["expected"]
    assert trace[: len(expected["trace_head"])] == expected["trace_head"]
    assert trace[-len(expected["trace_tail"]) :] == expected["trace_tail"]
    assert digest(trace) == expected["trace_sha256"]


@cases
def test_new_words_are_encoded_as_recorded_by_each_rule(case):
    found = adapted(case)
    rules = encoders(golden_merges(case["name"]), case["N"], found.virtual, found.promoted)
    for test in case["expected"]["tests"]:
        assert {name: spelled(encoder, test["word"]) for name, encoder in rules.items()} == {
            name: test[name] for name in rules
        }


@cases
def test_the_corpus_has_the_recorded_tokens_and_utility(case):
    found, expected, corpus = adapted(case), case["expected"], corpus_of(case)
    rules = encoders(golden_merges(case["name"]), case["N"], found.virtual, found.promoted)
    sizes = {name: size(encoder, corpus) for name, encoder in rules.items()}
    assert sizes == {name: expected[f"size_{name}"] for name in rules}
    units = sum(len(word) * count for word, count in corpus.items())
    for name in ("first_k", "replay"):
        assert (units - sizes[name]) / units == pytest.approx(expected[f"cu_{name}"], abs=1e-12)
    tokens = [spelled(rules["replay"], word) for word, _ in case["corpus"]]
    if "corpus_tokens" in expected:
        assert tokens == expected["corpus_tokens"]
    else:
        assert digest(tokens) == expected["corpus_tokens_sha256"]


@cases
def test_top_k_keeps_and_encodes_what_is_recorded(case):
    merges, expected = golden_merges(case["name"]), case["expected"]["top_k"]
    kept = most_frequent_merges(merges, corpus_of(case), case["N"])
    encoder = BpeEncoder(merges, keeping(len(merges), kept), "whole")
    assert kept == expected["kept"]
    assert size(encoder, corpus_of(case)) == expected["size"]
    assert [spelled(encoder, test["word"]) for test in expected["tests"]] == [t["tokens"] for t in expected["tests"]]


def test_the_head_of_gpt2s_list_is_adapted_as_by_the_reference():
    merges = MergeList.from_byte_pairs([tuple(map(spelled_to_bytes, line.split(" "))) for line in HEAD["merges"]])
    train, test = (
        Counter(cut_into_pieces(ADAPTBPE["gpt2"][name].encode()[: HEAD["bytes"]], "gpt2"))
        for name in ("train_text", "test_text")
    )
    found = adapt_merges(merges, train, HEAD["n"])
    assert (found.virtual, found.promoted) == (HEAD["virtual"], HEAD["promoted"])
    rules = encoders(merges, HEAD["n"], found.virtual, found.promoted) | {
        "whole_list": BpeEncoder(merges, None, "whole")
    }
    for name, corpus in (("train", train), ("test", test)):
        assert {rule: size(encoder, corpus) for rule, encoder in rules.items()} == HEAD[name]


@needs_gpt2
@pytest.mark.parametrize("row", slow_but(ROWS, ROWS[0], ROWS[2]), ids=lambda row: f"{row['N']}-{row['tie']}")
def test_gpt2s_list_is_adapted_to_python_source_as_recorded(row):
    assert hashlib.sha256(GPT2.read_bytes()).hexdigest() == ADAPTBPE["gpt2"]["vocab_bpe_sha256"]
    merges = read_base_vocabulary(GPT2).merges
    train, test = (
        Counter(cut_into_pieces(ADAPTBPE["gpt2"][name].encode(), "gpt2")) for name in ("train_text", "test_text")
    )
    found = adapt_merges(merges, train, row["N"], tie=row["tie"])
    assert len(found.swaps) == row["swaps"]
    assert (digest(found.promoted), digest(found.virtual)) == (row["promoted_sha256"], row["virtual_sha256"])
    head = [[rank, merges.tokens[256 + rank].decode("latin-1")] for rank in found.promoted]
    assert head[: len(row["promoted_head"])] == row["promoted_head"]
    rules = {
        ("adapt_" + name if name != "first_k" else name): encoder
        for name, encoder in encoders(merges, row["N"], found.virtual, found.promoted).items()
    }
    kept = keeping(len(merges), most_frequent_merges(merges, train, row["N"]))
    rules |= {"top_k": BpeEncoder(merges, kept, "whole"), "full_vocabulary": BpeEncoder(merges, None, "whole")}
    for name, corpus in (("train", train), ("test", test)):
        expected = {key: count for key, count in row[name].items() if key != "bytes"}
        assert {rule: size(encoder, corpus) for rule, encoder in rules.items()} == expected
        assert sum(len(word) * count for word, count in corpus.items()) == row[name]["bytes"]
