"""FLOPs, fertility and bits per byte of hierarchical BPE, against the recorded numbers and the paper's."""

import json

import pytest

from mlx_zip.bench.papers.hbpe.patches import LOCAL, SMALL, plain_flops
from mlx_zip.vocab.hbpe.measures import (
    Tower,
    bits_per_byte,
    fertility,
    hierarchical_flops,
    transformer_flops,
    word_count,
)
from support.places import GOLDEN

NUMBERS = json.loads((GOLDEN / "hbpe.json").read_text())["numbers"]


@pytest.mark.parametrize("case", NUMBERS["latent_only_flops"], ids=lambda case: f"p={case['p']}")
def test_flops_of_a_plain_model_are_those_recorded(case):
    tower = Tower(case["layers"], case["d"], case["ffw"], case["heads"])
    assert plain_flops(case["Y"], case["p"], tower, case["V"]) == pytest.approx(case["flops"], rel=1e-12)


def test_flops_of_plain_bpe_are_the_papers_562_billion():
    row = NUMBERS["paper_table2_bpe_row"]
    billions = plain_flops(row["Y"], row["p"], SMALL, 50257) / 1e9
    assert billions == pytest.approx(row["gflops"], rel=1e-12)
    assert round(billions) == row["paper_gflops"] == 562


def test_most_of_what_patches_save_is_the_softmax():
    plain, without = plain_flops(8192, 4.13, SMALL, 50257), plain_flops(8192, 4.13, SMALL, 0)
    assert (plain - without) / 1e9 == pytest.approx(153.1, abs=0.05)


def test_the_papers_hierarchical_and_character_rows_do_not_follow_from_its_formula():
    assert hierarchical_flops(8192, 4.13, SMALL, LOCAL, 0) / 1e9 == pytest.approx(563.8, abs=0.05)  # printed: 554
    assert transformer_flops(8192, SMALL, 256) / 1e9 == pytest.approx(3588, abs=0.5)  # printed: 4214


def test_the_local_models_read_patches_of_the_length_that_is_given():
    sizes = (8192, 4.13, SMALL, LOCAL, 240)
    assert hierarchical_flops(*sizes, 4.13) == hierarchical_flops(*sizes)
    assert hierarchical_flops(*sizes, 4.83) > hierarchical_flops(*sizes)


@pytest.mark.parametrize("case", NUMBERS["bits_per_byte"], ids=lambda case: f"{case['bytes']} bytes")
def test_bits_per_byte_are_those_recorded(case):
    assert bits_per_byte(case["nll_nats"], case["bytes"]) == pytest.approx(case["bpb"], rel=1e-12)


def test_fertility_is_tokens_per_word():
    assert fertility(6, word_count("one  two\nthree,four")) == 2
