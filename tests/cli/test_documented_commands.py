"""Every command on a page, in a code block or in a sentence, exists and has the flags that are given to it."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from mlx_zip.bench.pages import command_parser_of
from mlx_zip.errors import MlxZipError
from support.places import DOCS, REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "bench/papers/README.md", *sorted(DOCS.rglob("*.md"))]
WORDS = {"vocab": 3, "bench": 2}  # words of a command; others have one
COMMAND = re.compile(r"(?:^|-- |=\S+ )mlx_zip (\S.*)")


def lines(page: Path) -> list[str]:
    """Lines of a page's code blocks, continued ones joined, and its pieces of code in sentences, each as one line."""
    block = r"```(?:sh)?\n(.*?)```"
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(block, text, re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [*map(str.strip, blocks.splitlines()), *(" ".join(one.split()) for one in inline)]


def commands(page: Path) -> list[list[str]]:
    """The page's commands of mlx_zip as words, from the command's name on; those that name no command are left out."""
    found = [COMMAND.search(line) for line in lines(page)]
    split = [shlex.split(hit[1], comments=True) for hit in found if hit]
    return [words for words in split if re.fullmatch("[a-z]+", words[0])]


@cache
def flags(command: str) -> set[str]:
    """Flags of a command, old names included. Raises `MlxZipError` if there is no such command."""
    return set(command_parser_of(command)._option_string_actions)


def is_wrong(words: list[str]) -> bool:
    """Whether the command does not exist or lacks one of the flags. A method alone, as `vocab hbpe`, is right."""
    named = words[: WORDS.get(words[0], 1)]
    if words[0] in WORDS and len(words) < WORDS[words[0]]:
        return False
    try:
        known = flags(" ".join(named))
    except MlxZipError:
        return "NAME" not in named and "..." not in named
    return not {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_command_on_a_page_exists_with_its_flags(page):
    assert [" ".join(words) for words in commands(page) if is_wrong(words)] == []


def test_a_command_that_does_not_exist_and_a_misspelled_flag_are_seen():
    assert is_wrong(["vocab", "adapt", "model"])
    assert is_wrong(["generate", "--prmpt", "hello"])
    assert not is_wrong(["generate", "-p", "hello"])


def test_the_pages_have_commands():
    assert sum(len(commands(page)) for page in PAGES) > 150
