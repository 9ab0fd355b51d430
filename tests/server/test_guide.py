"""The guide to serving says which fields have no effect."""

import importlib
import re

import pytest

from mlx_zip.server.fields import Body
from support.places import REPO

GUIDE = (REPO / "docs/guides/serve.md").read_text(encoding="utf-8")
DIALECTS = {
    "chat completions, completions": ("openai.choices", "openai.chat", "openai.completions"),
    "Responses": ("openai.responses_bodies",),
    "Messages": ("anthropic.bodies",),
}


def kinds(of=Body):
    """All classes of bodies and their parts."""
    return {kind for one in of.__subclasses__() for kind in (one, *kinds(one))}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_field_without_effect_is_in_the_guide_and_no_other(dialect):
    modules = {importlib.import_module(f"mlx_zip.server.{name}").__name__ for name in DIALECTS[dialect]}
    harmless = {name for kind in kinds() if kind.__module__ in modules for name in kind.harmless}
    (row,) = (line for line in GUIDE.splitlines() if line.startswith(f"| {dialect} |") and "`" in line.split("|")[2])
    named = set(re.findall(r"`(\w+)`", row))
    assert harmless
    assert named == harmless
