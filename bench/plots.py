"""Pictures by matplotlib; equal figures give equal bytes, so that `pages --check` detects an outdated picture."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import missing_library_error

from .records import Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported when a picture is drawn

Pictures = dict[str, Callable[[Records], Figure]]  # path in the checkout -> function that draws the picture
STABLE: dict[Any, Any] = {"svg.hashsalt": "mlx_zip", "svg.fonttype": "none"}  # fixed ids; text is not drawn as paths


def new_figure(width: float = 10, height: float = 4) -> Figure:
    """Returns an empty figure of width x height inches. Raises `InstallationError` if matplotlib is missing."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise missing_library_error("a picture", "matplotlib", extra="bench") from error
    return figure.Figure(figsize=(width, height), layout="constrained")


def render_figure(figure: Figure, suffix: str) -> bytes:
    """Returns the figure as the bytes of an .svg or .png file; equal figures give equal bytes."""
    import matplotlib

    out = BytesIO()
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context(STABLE):
        figure.savefig(out, format=suffix[1:], dpi=120, metadata=metadata)
    return out.getvalue()
