"""The models that come with the package: a small storyteller with hypertokens, and its baseline without them."""

from __future__ import annotations

from pathlib import Path

from mlx_zip import named
from mlx_zip.errors import ModelError
from mlx_zip.files import at_home

FOLDER = Path(__file__).parent / "bundle"
NAMES = {
    "stories": "tells children's stories on request; the default of `mlx_zip generate`",
    "stories-base": "the baseline: an equally trained model without hypertokens",
}
KNOWN = (*NAMES, *named.NAMES)  # all names that stand for a model
PARTNERS = {  # a model with hypertokens and its baseline; of stories, each was trained as much as the other
    "stories": "stories-base",
    "stories-base": "stories",
    "smollm2": "smollm2-base",
    "smollm2-base": "smollm2",
}
LABELS = {  # what a partner is to its partner
    "stories": "an equally trained model with hypertokens",
    "stories-base": "an equally trained model without hypertokens",
    "smollm2": "this model, taught hypertokens",
    "smollm2-base": "the model that it was made from, without hypertokens",
}
QUALITY = {  # as in README.md and docs/reports/smollm2.md
    "stories": "0.760 bits per byte of held-out stories, 6.8 % more than stories-base",
    "stories-base": "0.711 bits per byte of held-out stories",
    "smollm2": "0.709 bits per byte of held-out conversations, 52.8 % more than an equally trained control",
    "smollm2-base": "0.588 bits per byte of held-out conversations, untrained on such",
}
DEFAULT = "stories"
PROMPT = "Tell me a story about a boy and his boat."  # the prompt if neither a model nor a prompt is named
MAX_TOKENS = 400  # base tokens; a story has about 200


def bundled_model(name: str) -> Path:
    """Returns the folder of a bundled model. Raises `ModelError` for an unknown name or a model not installed."""
    if name not in NAMES:
        raise ModelError(f"{name} is not a bundled model; there are {', '.join(NAMES)}")
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the bundled model {name} is not in this installation; name a model folder or a hub id with --model, "
            "or make it: make model DATA=DIR (docs/stories.md)"
        )
    return folder


def here_or_bundled(name: str | Path) -> Path:
    """Returns the path itself, or the folder of the model that a name of `KNOWN` stands for.

    A local model folder of that name takes precedence. A model of `named.NAMES` is made if need be. Raises `ModelError`
    if the bundled model is not installed, and for a path that the system cannot look up, for example one that is too
    long; `MlxZipError` if a named model cannot be made.
    """
    path = at_home(name)
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"{name!s:.80}: no such model folder ({error.strerror or error})") from error
    if str(name) not in KNOWN or (path / "config.json").is_file():
        return path
    return bundled_model(str(name)) if str(name) in NAMES else named.named_model(str(name))
