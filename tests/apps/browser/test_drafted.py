"""Drafted tokens on the page: marked beside hypertokens, explained in words, counted, and there again from the file."""

import pytest

from support.browsing import App, running
from support.chat_app import chatting
from support.fake_engine import FakeEngine, Script, tokenizer

STORY = "Once upon a time there was a boat. The boat was small and the sea was calm."
DRAFTED = (3, 4, 5, 8, 9)
MARKED = "[data-testid=message-text] .tok.drafted"  # not the samples of the legends
DECORATION = "one => getComputedStyle(one).textDecorationLine + ' ' + getComputedStyle(one).textDecorationStyle"


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """The app with two conversations in its file: an answer with drafts, hypertokens among them, and one without."""
    home = tmp_path_factory.mktemp("drafted")
    base = tokenizer().encode(STORY, add_special_tokens=False)
    ids = [base[:1], base[1:2], base[2:4], base[4:6], *([one] for one in base[6:])]
    engine = FakeEngine(Script(ids=ids))
    with chatting(engine, file=home / "kept.db") as chat:
        chat.said(chat.create()["id"], "Without drafts.")
        engine.script = Script(ids=ids, drafted=DRAFTED, refused=3)
        chat.said(chat.create()["id"], "With drafts.")
    (home / "text.txt").write_text(STORY)
    with running(App(home, ["support.replayed_app", "--text", "text.txt", "--data", "kept.db"])) as app:
        yield app


@pytest.fixture
def told(drafted, open_tab):
    """A tab with the answer that has drafts."""
    tab = open_tab(drafted)
    tab["conversation-link"].get_by_text("With drafts.").click()
    tab.page.locator(MARKED).first.wait_for()
    return tab


def test_drafted_tokens_are_marked_beside_hypertokens_and_after_a_reload_too(told):
    for _ in range(2):
        marked = told.page.locator(MARKED)
        assert [int(one.get_attribute("data-t")) for one in marked.all()] == list(DRAFTED)
        assert told.page.locator(".tok.l2:not(.drafted):visible").count() >= 1
        assert marked.first.evaluate(DECORATION) == "underline dotted"
        assert "l2" in marked.first.get_attribute("class")
        assert "l1" in marked.last.get_attribute("class")
        told.page.reload()
        told.ready().page.locator(MARKED).first.wait_for()
    told["tint-toggle"].click()
    assert told.page.locator(MARKED).first.evaluate(DECORATION).startswith("none")
    told["tint-toggle"].click()


def test_what_the_marks_mean_is_said_in_words_and_reached_with_the_keyboard(told):
    assert "drafted no pass of its own" in " ".join(told["text-legend"].inner_text().split())
    told["inspect"].click()
    told["token-popover"].wait_for()
    said = []
    for _ in range(len(DRAFTED) + 1):
        said.append(told["token-popover"].inner_text())
        told.page.keyboard.press("ArrowRight")
    assert "Drafted" not in said[0]
    assert all("Drafted: proposed ahead and accepted" in one for one in said[1:])
    assert "1 base token, one step" in said[-1]
    assert told["inspect"].get_attribute("aria-label") == "Step through the hypertokens and drafted tokens"


def test_the_line_of_figures_and_the_panel_count_drafts(told):
    assert told["live-accepted"].inner_text().split() == ["63%", "drafted"]
    assert told["live-wasted"].inner_text().split()[0] == "3"
    assert float(told["live-per-pass"].inner_text().split()[0]) > float(told["live-per-step"].inner_text().split()[0])
    told["vocabulary-open"].click()
    told["drafts"].wait_for()
    assert told["drafts"].inner_text().startswith("5 of 8 drafted ids accepted (63%) · 3 wasted · ")
    told["panel-close"].click()


def test_an_answer_without_drafts_says_nothing_of_them(told):
    told["conversation-link"].get_by_text("Without drafts.").click()
    told.page.locator(MARKED).first.wait_for(state="detached")
    assert told["live-per-step"].is_visible()
    assert not any(told[f"live-{name}"].is_visible() for name in ("per-pass", "accepted", "wasted"))
    told["vocabulary-open"].click()
    told["entries"].wait_for()
    assert not told["drafts"].is_visible()
    told["panel-close"].click()
