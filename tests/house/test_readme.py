"""README and CONTRIBUTING: the example runs, the tree is the tree, and every make target exists."""

import re
import subprocess
import sys

import pytest

from support.command_line import WITHOUT_TORCH
from support.places import REPO

README, CONTRIBUTING = ((REPO / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
MOST_WORDS = 1_100  # of the README, so that it stays a first page


@pytest.mark.slow
def test_the_example_generates_text(tmp_path):
    (tmp_path / "tests").symlink_to(REPO / "tests")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    words = [sys.executable, "-c", WITHOUT_TORCH + code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=300)
    assert done.stdout.strip()


def tree() -> set[str]:
    """Paths named in the annotated tree, relative to the repository."""
    section = CONTRIBUTING.split("## The tree")[1].split("\n## ")[0]
    paths, above = set(), []  # above: the folders that a line stands in
    for indent, name in re.findall(r"^    ( *)([\w./]+)", section, re.MULTILINE):
        above = [*above[: len(indent) // 2], name]
        paths.add("".join(above))
    return paths


def test_everything_in_the_tree_exists():
    assert [path for path in sorted(tree()) if not (REPO / path).exists()] == []


def test_every_room_of_the_package_is_in_the_tree():
    rooms = [p for p in (REPO / "mlx_zip").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    minor = {"__init__.py", "__main__.py", "errors.py"}
    named = {f"mlx_zip/{p.name}" + "/" * p.is_dir() for p in rooms if p.name not in minor}
    assert named - tree() == set()


def test_every_make_target_in_the_text_exists():
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)\b", README + CONTRIBUTING, re.MULTILINE)) <= targets


def test_the_readme_is_short():
    assert len(README.split()) <= MOST_WORDS
