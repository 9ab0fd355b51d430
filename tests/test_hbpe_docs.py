"""The example of docs/hbpe.md runs, in a folder that holds a merge list; what the page points to is there."""

import re
from pathlib import Path

import pytest
from tiny_vocabularies import write_pair

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hbpe.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    write_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    (example,) = EXAMPLES
    exec(compile(example, "hbpe.md", "exec"), {})
    assert (tmp_path / "gpt2-10.npz").is_file()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()))
def test_what_the_page_points_to_is_there(link):
    assert (PAGE.parent / link).is_file()
