"""The page's modules that need no browser, in node's test runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.places import REPO

PAGE = REPO / "apps/chat/page"
TESTS = Path(__file__).parent / "page"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("file", sorted(TESTS.glob("*.test.mjs")), ids=lambda file: file.name.partition(".")[0])
def test_the_page_s_modules_do_what_their_tests_say(file):
    done = subprocess.run([str(NODE), "--test", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_script_or_style_stands_inside_the_page():
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|https?://", page) == []


def led_to(first: Path) -> set[Path]:
    """Returns the files that a module imports, and those that the page's modules among them import in turn."""
    found, waiting = set(), [first]
    while waiting:
        text = waiting.pop().read_text(encoding="utf-8")
        names = re.findall(r'^(?:import|export)\b[^;]*?"(\.[^"]+)";', text, re.M)
        fresh = {(PAGE / name).resolve() for name in names} - found
        found |= fresh
        waiting += [path for path in fresh if path.parent == PAGE]
    return found


def test_every_module_is_fetched_at_once_and_no_other_file_is():
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'<link rel="modulepreload" href="([^"]+)"', page)
    assert len(named) == len(set(named))
    assert {(PAGE.parent / name).resolve() for name in named} == led_to(PAGE / "main.js")


@pytest.mark.parametrize("file", sorted(PAGE.glob("*.js")), ids=lambda file: file.name)
def test_no_module_turns_text_into_elements_but_by_the_sanitizer(file):
    code = file.read_text(encoding="utf-8")
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", code)
        == []
    )
    assert ".sanitize(" not in code or file.name == "safe.js"


def test_every_test_id_that_the_page_promises_is_given_by_a_module():
    promised = re.search(
        r"Stable data-testid attributes(.*?)-->", (PAGE / "index.html").read_text(encoding="utf-8"), re.S
    )
    assert promised
    names = re.sub(
        r"\([^)]*\)|^ *[\w ]+:|a hypertoken.*|in a$|\blane: ", " ", promised[1].partition("\n")[2], flags=re.M
    )
    code = "\n".join(file.read_text(encoding="utf-8") for file in [*PAGE.glob("*.js"), PAGE / "index.html"])
    code = code.replace(promised[0], "")
    wanted = set(re.findall(r"(?<![\w<-])[a-z]+(?:-[a-z]+)*(?![\w<>-])", names)) - {"tokens", "race", "conversation"}
    assert {name for name in wanted if not _given(name, code)} == set()


def _given(name: str, code: str) -> bool:
    """Whether a module writes this name, or makes it of a prefix and a name, as in `live-${name}`."""
    prefix, _, rest = name.partition("-")
    return f'"{name}"' in code or (f"`{prefix}-${{" in code and f'"{rest}"' in code.lower())
