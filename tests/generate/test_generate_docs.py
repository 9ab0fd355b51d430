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
def page():
    """What the examples have defined so far, and the numbers of those that ran, in this process."""
    return {}, []


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_api_page_runs(number, folder, page, monkeypatch, capsys):
    names, ran = page
    monkeypatch.chdir(folder)
    for one in range(len(ran), number + 1):  # also those before it that another process ran
        ran.append(one)
        exec(compile(EXAMPLES[one], f"api.md, example {one}", "exec"), names)
    assert number in ran


def test_there_are_examples():
    assert len(EXAMPLES) > 5
