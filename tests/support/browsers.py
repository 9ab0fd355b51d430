"""A Chromium that is on this machine, driven by Playwright; none is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_zip.errors import MlxZipError, missing_library_error

if TYPE_CHECKING:
    from playwright.sync_api import Browser  # pyright: ignore[reportMissingImports]

VARIABLE = "MLX_ZIP_CHROMIUM"  # names the browser's program
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the first takes least time
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = ("--force-color-profile=srgb", "--font-render-hinting=none", "--disable-dev-shm-usage")


def find_chromium() -> str | None:
    """Returns the path of Chromium or Chrome, None if there is none. MLX_ZIP_CHROMIUM goes before all others."""
    given = os.environ.get(VARIABLE)
    if given:
        return shutil.which(given)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (str(MAC) if MAC.is_file() else None)


def missing_browser_requirement() -> str | None:
    if find_spec("playwright") is None:
        return "needs Playwright (PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 pip install -e '.[browser]')"
    if find_chromium() is None:
        return f"needs Chromium (Debian: apt install chromium-headless-shell, or chromium), or its path in {VARIABLE}"
    return None


@contextmanager
def running_browser(*flags: str) -> Iterator[Browser]:
    """Starts a browser without a window and ends it after the `with` statement. flags: further flags for it.

    Raises `InstallationError` without Playwright and `MlxZipError` without a browser.
    """
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise missing_library_error("the browser", "playwright", extra="browser") from error
    program = find_chromium()
    if program is None:
        raise MlxZipError(f"a browser is needed: {missing_browser_requirement()}")
    own = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium refuses to run as root in its sandbox
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=[*FLAGS, *own, *flags])
        try:
            yield started
        finally:
            started.close()
