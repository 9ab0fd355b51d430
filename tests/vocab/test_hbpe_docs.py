"""The H-BPE examples of docs/guides/vocabularies.md run, in a folder with a merge list; the files it links to exist."""

import re

import pytest

from support.places import DOCS
from support.tiny_vocabularies import write_pair

PAGE = DOCS / "guides" / "vocabularies.md"
SECTION = PAGE.read_text().partition("\n## Hierarchical BPE")[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.S)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    write_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        exec(compile(example, PAGE.name, "exec"), {})
    assert (tmp_path / "gpt2-10.npz").is_file()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", PAGE.read_text()))
def test_what_the_page_points_to_is_there(link):
    assert (PAGE.parent / link).resolve().is_file()
