"""Paths of a checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent
DOCS = REPO / "docs"
GOLDEN = TESTS / "golden"
GOLDEN_MODELS = GOLDEN / "models"
# larger data next to the checkout; tests that need them are skipped where they are absent
SHARED = REPO.parent / "shared"
