"""An answer while it streams: it grows, can be stopped, and survives a server that dies."""

import signal

import pytest

from support.browsing import App, running

WORDS = "The sea was calm and the boat was small. The boy and his boat went out to the sea. "
LATER = "n => document.querySelector('[data-role=assistant] [data-testid=message-text]').textContent.length > n"


def slow_app(home):
    """Returns the app with an engine that writes 60 base tokens of a long text per second, with a key of its own."""
    (home / "text.txt").write_text(WORDS * 60)
    words = [
        "support.replayed_app",
        "--text",
        "text.txt",
        "--speed",
        "60",
        "--data",
        "kept.db",
        "--token",
        "k" * 40,
    ]
    return App(home, words)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The slow app, on a port of its own."""
    with running(slow_app(tmp_path_factory.mktemp("slow"))) as app:
        yield app


def expected(tab, *texts):
    """Takes the lines with these texts off what the tab's console has said."""
    tab.noted.console = [line for line in tab.noted.console if not any(text in line for text in texts)]


def test_an_answer_grows_while_it_streams_and_the_message_box_is_small_again(slow, open_tab):
    tab = open_tab(slow)
    height = tab["input"].bounding_box()["height"]
    tab["input"].fill("Three\nlines\nof text")
    assert tab["input"].bounding_box()["height"] > 2 * height
    tab.send("Tell me\na story.", whole=False)
    assert tab["input"].bounding_box()["height"] == height
    assert tab["stop"].is_visible()
    tab.page.wait_for_function(LATER, arg=len(tab.text()) + 40)
    tab["stop"].click()
    tab.answered()


def test_a_stopped_answer_keeps_what_had_come(slow, open_tab):
    tab = open_tab(slow).send("Tell me a story.", whole=False)
    tab["stop"].click()
    text = tab.answered().text()
    assert tab["message-state"].inner_text() == "Stopped"
    assert WORDS.startswith(text[:30])
    tab.page.reload()
    tab.ready()
    assert tab.answered().text().strip() == text.strip()


def test_the_escape_key_stops_an_answer(slow, open_tab):
    tab = open_tab(slow).send("Tell me a story.", whole=False)
    tab.page.keyboard.press("Escape")
    assert tab.answered()["message-state"].inner_text() == "Stopped"


def test_the_line_of_figures_moves_while_an_answer_streams(slow, open_tab):
    tab = open_tab(slow).send("Tell me a story.", whole=False)
    tab["live-saved"].wait_for()
    before = tab["live-codebook"].inner_text()
    tab.page.wait_for_function(
        "before => document.querySelector('[data-testid=live-codebook]').innerText !== before", arg=before
    )
    tab["stop"].click()
    tab.answered()


def test_the_page_says_that_the_server_died_and_finds_it_again(slow, open_tab):
    tab = open_tab(slow).send("Tell me a story.", whole=False)
    slow.end(signal.SIGKILL)
    tab["banner"].get_by_text("The server stopped in the middle of the answer").wait_for()
    text = tab.answered().text()
    assert tab["message-state"].inner_text().startswith("Cut off")
    slow.start()
    tab["banner"].wait_for(state="hidden")
    assert tab.text() == text
    assert tab["message-state"].inner_text().startswith("Cut off")
    tab.send("Go on.", whole=False)["stop"].click()
    tab.answered()
    expected(tab, "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")


def test_what_had_come_when_the_app_died_is_there_after_a_new_start(open_tab, tmp_path):
    app = slow_app(tmp_path)  # the bundled model may be done before it can be ended
    with running(app):
        tab = open_tab(app).send("Tell me a story about a long journey.", whole=False)
        app.end(signal.SIGKILL)
        tab["banner"].wait_for()
        app.start()
        tab.page.goto("about:blank")
        tab.open()
        tab["conversation-link"].first.click()
        tab.page.locator("[data-testid=message][data-role=assistant][data-state=cut]").wait_for()
        assert WORDS.startswith(tab.text()[:9])
        assert tab["continue"].is_visible()
        expected(tab, "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "401")
