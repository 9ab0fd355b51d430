"""The examples of docs/hbpe.md run, in a folder that holds a merge list; what the page points to is there."""

import re

import pytest

from support.places import DOCS
from support.tiny_vocabularies import write_pair

PAGE = DOCS / "hbpe.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    write_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    for example in EXAMPLES:
        exec(compile(example, "hbpe.md", "exec"), {})
    assert (tmp_path / "gpt2-10.npz").is_file()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()))
def test_what_the_page_points_to_is_there(link):
    assert (PAGE.parent / link).is_file()
