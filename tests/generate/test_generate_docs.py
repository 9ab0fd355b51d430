"""The examples of docs/reference/api.md run, from top to bottom, in a folder that holds a published checkpoint."""

import re
import shutil

import pytest

from support.places import DOCS, GOLDEN_MODELS

PAGE = DOCS / "reference" / "api.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("api")
    shutil.copytree(GOLDEN_MODELS / "llama_transformer_tied_lora", home / "checkpoint")
    return home


@pytest.fixture(scope="module")
def names():
    """What the examples have defined so far."""
    return {}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_api_page_runs(number, folder, names, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(compile(EXAMPLES[number], f"api.md, example {number}", "exec"), names)


def test_there_are_examples():
    assert len(EXAMPLES) > 5
