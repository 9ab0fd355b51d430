"""Every link between the pages leads to a file, and to a heading where it names one."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.places import REPO

PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPO / "docs").rglob("*.md")),
    *sorted((REPO / "recipes").rglob("*.md")),
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of a page's links within the repository, as they are written."""
    found = re.findall(r"\]\(([^()\s]+)\)", CODE.sub("``", page.read_text(encoding="utf-8")))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (target.suffix == ".md" and bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert [link for link in links(page) if leads_nowhere(page, link)] == []


def test_every_page_can_be_reached_from_the_index():
    reached, waiting = set(), [REPO / "docs/index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
    assert {page for page in PAGES if page.is_relative_to(REPO / "docs")} - reached == set()
