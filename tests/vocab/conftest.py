"""Fixtures of the tests of AdaptBPE."""

from functools import partial

import pytest

from support.adaptbpe_cases import read_fixture, write_head, write_tokenizer


@pytest.fixture
def source():
    return read_fixture()


@pytest.fixture
def write(tmp_path):
    return partial(write_tokenizer, tmp_path)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"))
