"""The models that an installation brings along: a small storyteller with hypertokens, and its base without."""

from __future__ import annotations

from pathlib import Path

from mlx_zip.errors import ModelError

FOLDER = Path(__file__).parent / "bundle"
NAMES = {
    "stories": "tells children's stories on request; the default of `mlx_zip generate`",
    "stories-base": "the same base after as much training, without hypertokens",
}
DEFAULT = "stories"
PROMPT = "Tell me a story about a boy and his boat."  # of a call that names neither a model nor a prompt
MAX_TOKENS = 400  # base tokens; a story has about 200


def bundled_model(name: str) -> Path:
    """The folder of a bundled model. Raises `ModelError` for a name that is none, or when it is not installed."""
    if name not in NAMES:
        raise ModelError(f"{name} is no bundled model: they are {', '.join(NAMES)}")
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the bundled model {name} is not in this installation; name a model folder or a hub id with --model, "
            "or make it: make model DATA=DIR (docs/stories.md)"
        )
    return folder


def here_or_bundled(name: str | Path) -> Path:
    """The path itself; for a bundled model's name the bundled folder, unless a model lies at that path.

    Raises `ModelError` when that model is not installed.
    """
    path = Path(name).expanduser()
    return bundled_model(str(name)) if str(name) in NAMES and not (path / "config.json").is_file() else path
