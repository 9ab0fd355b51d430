"""One app for all tests of this folder, one browser per file, a tab per test that remembers nothing and has no flaw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.browsers import missing_browser_requirement, running_browser
from support.browsing import App, Tab, running

WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 780}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder slow, and skips them where no browser can be driven, with the reason."""
    reason = missing_browser_requirement()
    for item in items:
        if "apps/browser" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Gives `mlx_zip app` with the bundled model, in a process of its own."""
    with running(App(tmp_path_factory.mktemp("home"))) as made:
        yield made


# Not for longer than a file: while a browser is driven, its event loop is in the way of other tests' loops. The folder
# is no package, so a fixture of that scope would last for the whole session.
@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """Gives a browser without a window."""
    with running_browser() as made:
        yield made


@pytest.fixture(scope="module")
def contexts(chrome: Any) -> Callable[..., Any]:
    """Gives a function that returns the browser's context with some options: the same one for the same options."""
    made: dict[str, Any] = {}

    def context(**options: Any) -> Any:
        options = {"viewport": WIDE, "reduced_motion": "reduce", "color_scheme": "light", **options}
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = chrome.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        return made[key]

    return context


@pytest.fixture
def open_tab(contexts: Callable[..., Any]) -> Iterator[Callable[..., Tab]]:
    """Gives a function that opens a tab with an app; every such tab must end without errors, dialogs and strangers.

    The browser has the page's files from the tab before, and nothing else of it, but for a tab `beside` another one.
    """
    tabs: list[Tab] = []

    def opened(app: App, beside: Tab | None = None, path: str = "", **options: Any) -> Tab:
        tabs.append(Tab((contexts(**options) if beside is None else beside.page.context).new_page(), app))
        return (tabs[-1].forget() if beside is None else tabs[-1]).open(path)

    yield opened
    flaws = [(tab.noted, tab.violations()) for tab in tabs]
    for tab in tabs:
        tab.page.close()
    assert flaws == [(type(tab.noted)(), []) for tab in tabs]


@pytest.fixture
def tab(open_tab: Callable[..., Tab], app: App) -> Tab:
    """Gives a tab with a new conversation."""
    return open_tab(app)


@pytest.fixture(scope="session")
def stories() -> dict[str, Any]:
    """Gives a place for exports of conversations, by what was asked in them."""
    return {}


@pytest.fixture
def told(tab: Tab, stories: dict[str, Any], request: pytest.FixtureRequest) -> Tab:
    """Gives a tab with a conversation of its own: the file's `STORY`, asked once for all tests, with its answer."""
    story = request.module.STORY
    if story in stories:
        return tab.copied(stories[story])
    (newest,) = tab.send(story).api("GET", "conversations?limit=1")["conversations"]
    stories[story] = tab.api("GET", f"conversations/{newest['id']}/export?format=json")
    return tab
