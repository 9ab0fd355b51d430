"""One app for all tests of this folder, one browser per file, and a fresh tab per test that must end without a flaw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_zip.bench.browser import browser, missing
from support.browsing import App, Tab, running

WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 780}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where no browser can be driven, with the reason."""
    if (reason := missing()) is None:
        return
    for item in items:
        if "apps/browser" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Gives `mlx_zip app` with the bundled model, in a process of its own."""
    with running(App(tmp_path_factory.mktemp("home"))) as made:
        yield made


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """Gives a browser without a window."""
    with browser() as made:
        yield made


@pytest.fixture
def open_tab(chrome: Any) -> Iterator[Callable[..., Tab]]:
    """Gives a function that opens a tab with an app; every such tab must end without errors, dialogs and strangers."""
    contexts, tabs = [], []

    def opened(app: App, beside: Tab | None = None, path: str = "", **options: Any) -> Tab:
        if beside is None:
            options = {"viewport": WIDE, "reduced_motion": "reduce", "color_scheme": "light", **options}
            contexts.append(chrome.new_context(permissions=["clipboard-read", "clipboard-write"], **options))
        context = contexts[-1] if beside is None else beside.page.context
        tabs.append(Tab(context.new_page(), app))
        return tabs[-1].open(path)

    yield opened
    for tab in tabs:
        assert (tab.noted, tab.violations()) == (type(tab.noted)(), [])
    for context in contexts:
        context.close()


@pytest.fixture
def tab(open_tab: Callable[..., Tab], app: App) -> Tab:
    """Gives a tab with a new conversation."""
    return open_tab(app)
