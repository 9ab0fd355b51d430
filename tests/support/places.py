"""Where things lie in a checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent
DOCS = REPO / "docs"
GOLDEN = TESTS / "golden"
GOLDEN_MODELS = GOLDEN / "models"
SHARED = REPO.parent / "shared"  # large data that a checkout may lie beside; tests that need it are skipped without
