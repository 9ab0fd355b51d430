"""Pictures of the page for people to look at, in build/screens, light and wide, dark and narrow; one for the README."""

import pytest

from support.browsing import App, Tab, running
from support.places import REPO

FOLDER = REPO / "build/screens"
SIZES = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 390, "height": 780}}
STORIES = [
    "Tell me a story about a boy and his boat.",
    "Tell me a story with a gentle dog named Spot and a ball in it.",
]


@pytest.fixture(scope="module")
def told(tmp_path_factory, chrome):
    """An app of its own with two conversations."""
    with running(App(tmp_path_factory.mktemp("screens"))) as app:
        page = chrome.new_page()
        tab = Tab(page, app).open()
        for story in reversed(STORIES):
            tab["new-chat"].click()
            tab["empty"].wait_for()
            tab.send(story)
        page.close()
        FOLDER.mkdir(parents=True, exist_ok=True)
        yield app


def shown(tab: Tab, name: str) -> None:
    """Writes a picture of what the tab shows."""
    tab.page.evaluate("document.fonts.ready")
    tab.page.screenshot(path=FOLDER / f"{name}.png", animations="disabled", caret="hide")
    assert (FOLDER / f"{name}.png").stat().st_size > 5_000


@pytest.mark.parametrize(("theme", "size"), [("light", "wide"), ("dark", "narrow")])
def test_every_part_of_the_page_is_pictured(told, open_tab, theme, size):
    tab = open_tab(told, color_scheme=theme, viewport=SIZES[size])

    def picture(name: str) -> None:
        shown(tab, f"{name}-{theme}-{size}")

    picture("new")
    if size == "narrow":
        tab["sidebar-toggle"].click()
        picture("sidebar")
    tab["conversation-link"].first.click()
    tab.page.locator("[data-role=assistant] .tok").first.wait_for()
    picture("conversation")
    for panel in ("vocabulary-open", "settings-open"):
        tab[panel].click()
        picture(panel.partition("-")[0])
        tab["panel-close"].click()
    tab["shortcuts" if size == "wide" else "chat-menu"].click()
    picture("dialog" if size == "wide" else "menu")
    tab.page.keyboard.press("Escape")
    tab["race-open"].click()
    tab.raced()
    picture("race")


def test_the_picture_of_the_readme_shows_an_answer_and_its_vocabulary(told, open_tab):
    tab = open_tab(told, color_scheme="light", viewport={"width": 1180, "height": 700}, device_scale_factor=1.3)
    tab["conversation-link"].first.click()
    tab["vocabulary-open"].click()
    tab["entry"].first.wait_for()
    tokens = tab.page.locator("[data-role=assistant] .tok.l4")
    tokens.nth(tokens.count() - 3).hover()
    tab["token-popover"].wait_for()
    shown(tab, "readme")
    assert (FOLDER / "readme.png").stat().st_size < 300_000
