"""Everybody can use the page: with the keyboard alone, on a narrow screen, with a screen reader."""

import pytest

from support.browsing import Tab

NARROW = {"width": 390, "height": 780}
STORY = "Tell me a story about a goat."
LINE = """() => {
  const line = document.querySelector('[data-testid=live]');
  const shown = [...line.children].filter((one) => one.getClientRects().length);
  const rows = new Set(shown.map((one) => Math.round(one.getBoundingClientRect().top)));
  return [rows.size, shown.length, line.scrollWidth <= line.clientWidth];
}"""
# Puts figures into the line that are as wide as they get.
WIDEST = """() => {
  const widest = {speed: ['1,234'], 'per-step': ['2.99'], saved: ['12,345'], codebook: ['2,048', '/ 2,048'],
    memory: ['99.9 MB'], ceiling: ['100%']};
  for (const [name, texts] of Object.entries(widest)) {
    const figure = document.querySelector(`[data-testid=live-${name}]`);
    figure.hidden = false;
    texts.forEach((text, i) => { figure.querySelectorAll('b')[i].textContent = text; });
  }
}"""
THEMES = ["light", "dark"]
PANELS = ["conversation", "vocabulary-open", "settings-open", "race-open", "shortcuts", "conversation-menu", "edit"]


def focused(tab: Tab) -> str:
    """The test id of the element that has the focus."""
    return tab.page.evaluate("document.activeElement?.dataset.testid ?? ''")


def test_everything_important_is_done_with_the_keyboard_alone(tab):
    keys = tab.page.keyboard
    assert focused(tab) == "input"
    keys.type("Tell me a story about a hen.")
    keys.press("Enter")
    tab.answered()
    keys.press("Control+Shift+E")
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    tab.answered()
    keys.press("Control+k")
    assert focused(tab) == "search"
    keys.press("Control+Shift+O")
    tab["empty"].wait_for()
    keys.press("Alt+ArrowDown")
    tab.answers().first.wait_for()
    keys.press("Control+i")
    assert tab["panel"].is_visible()
    keys.press("Control+i")
    assert not tab["panel"].is_visible()
    keys.press("Control+Shift+Y")
    assert focused(tab) == "race-prompt"
    keys.press("Escape")
    assert tab["input"].is_visible()


def test_the_last_message_is_edited_with_the_arrow_key(tab):
    keys = tab.page.keyboard
    tab.send("Tell me a story about an owl.")
    tab["input"].focus()
    keys.press("ArrowUp")
    assert focused(tab) == "edit-input"
    keys.press("Control+A")
    keys.type("Tell me a story about a fox.")
    keys.press("Enter")
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    tab.answered()


def test_menus_and_dialogs_give_the_focus_back(told):
    tab = told
    tab["conversation-menu"].first.focus()
    tab.page.keyboard.press("Enter")
    tab["menu"].wait_for()
    assert tab["menu"].bounding_box()["width"] < 260
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Escape")
    assert focused(tab) == "conversation-menu"
    tab["shortcuts"].focus()
    tab.page.keyboard.press("Enter")
    tab["dialog"].wait_for()
    tab.page.keyboard.press("Escape")
    tab["dialog"].wait_for(state="detached")
    assert focused(tab) == "shortcuts"


def test_what_has_the_focus_can_be_seen(tab):
    tab.page.keyboard.press("Shift+Tab")
    ring = "one => [getComputedStyle(one).outlineStyle, getComputedStyle(one).boxShadow]"
    assert tab.page.evaluate_handle("document.activeElement").evaluate(ring) != ["none", "none"]


def test_the_line_of_figures_keeps_to_one_line_or_to_two_on_a_narrow_screen(told):
    told["settings-open"].click()
    lines = {}
    for width in (1600, 1280, 1180, 1110, 1000, 920, 840, 800, 390, 360):
        told.page.set_viewport_size({"width": width, "height": 800})
        lines[width] = told.page.evaluate(LINE)
        assert "base tokens/s" in told["live-speed"].inner_text()
    told.page.set_viewport_size({"width": 1280, "height": 800})
    told["panel-close"].click()
    shown = lines[1600][1]
    assert shown >= 5
    assert lines == {width: [1 if width > 800 and width != 1110 else 2, shown, True] for width in lines}


def test_the_line_has_room_for_the_widest_figures(told):
    told.page.evaluate(WIDEST)
    lines = {}
    for width in (1600, 1180, 1000, 920, 840, 800, 520, 420, 390, 375, 360, 320):
        told.page.set_viewport_size({"width": width, "height": 800})
        lines[width] = told.page.evaluate(LINE)
    told.page.set_viewport_size({"width": 1280, "height": 800})
    assert {width: line[1:] for width, line in lines.items()} == {width: [6, True] for width in lines}


def brief(tab: Tab) -> Tab:
    """Begins a conversation with short answers: most of a check's time goes into their tokens, which are all alike."""
    made = tab.api("POST", "conversations", {"sampling": {"max_tokens": 40}})["id"]
    tab.page.evaluate("id => { location.hash = `#/c/${id}`; dispatchEvent(new Event('focus')); }", made)
    tab.page.locator(f"[data-testid=conversation].current[data-id='{made}']").wait_for(state="attached")
    return tab


def opened(tab: Tab, panel: str) -> None:
    """Shows a part of the page."""
    if panel != "conversation":
        tab[panel].first.click()


@pytest.mark.parametrize("theme", THEMES)
def test_a_screen_reader_finds_nothing_serious(app, open_tab, theme):
    tab = open_tab(app, color_scheme=theme)
    found = tab.flaws()
    brief(tab).send(STORY)
    for panel in PANELS:
        opened(tab, panel)
        found += [f"{panel}: {flaw}" for flaw in tab.flaws()]
        tab.page.keyboard.press("Escape")
    assert found == []


def test_the_narrowest_screen_shows_the_figures_without_scrolling_sideways(app, open_tab):
    tab = open_tab(app, viewport={"width": 320, "height": 640}).send("Tell me a story about a goose.")
    assert tab["live-saved"].is_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("theme", THEMES)
def test_a_narrow_screen_shows_everything_without_scrolling_sideways(app, open_tab, theme):
    tab = brief(open_tab(app, viewport=NARROW, color_scheme=theme)).send("Tell me a story about a duck.")
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert tab.page.evaluate(wide)
    found = tab.flaws()
    for panel in ("settings-open", "vocabulary-open", "race-open"):
        tab[panel].click()
        assert tab.page.evaluate(wide), panel
        found += [f"{panel}: {flaw}" for flaw in tab.flaws()]
        tab["race-close" if panel == "race-open" else "panel-close"].click()
    tab["sidebar-toggle"].click()
    tab["conversation-link"].first.click()
    assert tab["input"].is_visible()
    assert found == []
