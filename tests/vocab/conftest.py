"""Fixtures of the tests of AdaptBPE, and how many examples the quick tests draw."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.errors import InvalidArgument

from support.adaptbpe_cases import read_fixture, write_head, write_tokenizer

HERE = Path(__file__).parent


@pytest.fixture
def source():
    return read_fixture()


@pytest.fixture
def write(tmp_path):
    return partial(write_tokenizer, tmp_path)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"))


def pytest_collection_modifyitems(config, items):
    """Draws fewer examples where the slow tests are left out: a run of all tests draws Hypothesis's hundred."""
    if "not slow" in config.option.markexpr:
        here = {item.function for item in items if item.path.parent == HERE}
        for function in filter(is_hypothesis_test, here):
            with suppress(InvalidArgument):  # those with settings of their own keep them
                settings(max_examples=25)(function)
