"""What is refused is not lost: the message stands in the box again, and nothing half-made stays behind."""

import json

import pytest

from support.browsing import App, running

STORY = "Tell me a story about a wolf."
TOO_LONG = " ".join(str(7919 * i) for i in range(3000))  # numbers: hypertokens make no short prompt of them


def refused(tab, text):
    """Sends a message that is refused, and waits until the page has said why."""
    tab["input"].fill(text)
    tab["input"].press("Enter")
    tab["banner"].wait_for()
    tab.page.wait_for_function("() => document.querySelector('[data-testid=input]').value !== ''")
    tab.noted.console = [line for line in tab.noted.console if "status of 400" not in line]
    return tab


def test_a_message_that_is_too_long_stands_in_the_box_again(tab):
    before = tab.api("GET", "conversations")["total"]
    refused(tab, TOO_LONG)
    assert tab["input"].input_value() == TOO_LONG.strip()
    assert tab["empty"].is_visible()
    assert tab.page.url.endswith("#/")
    assert tab.api("GET", "conversations")["total"] == before


def test_a_refused_message_is_there_after_a_reload(tab):
    refused(tab, TOO_LONG)
    tab.page.reload()
    tab.ready()
    assert tab["input"].input_value() == TOO_LONG.strip()


def test_a_message_refused_in_a_conversation_stands_in_the_box_and_the_conversation_goes_on(tab):
    tab.send(STORY)
    refused(tab, TOO_LONG)
    assert tab["input"].input_value() == TOO_LONG.strip()
    assert tab["message"].count() == 2
    tab.send("Tell me another one.")
    assert tab["message"].count() == 4


def test_the_reason_goes_when_the_next_message_is_taken(tab):
    refused(tab, TOO_LONG)
    tab.send(STORY)
    assert not tab["banner"].is_visible()


def test_the_reason_goes_when_another_conversation_is_shown(tab):
    tab.send(STORY)
    refused(tab, TOO_LONG)
    tab["new-chat"].click()
    tab["empty"].wait_for()
    assert not tab["banner"].is_visible()


def test_a_message_whose_system_prompt_is_refused_stands_in_the_box_again(tab):
    reason = {"error": {"message": "this model takes no system message"}}
    answer = {"status": 400, "content_type": "application/json", "body": json.dumps(reason)}
    posted = lambda route: route.fulfill(**answer) if route.request.method == "POST" else route.continue_()
    tab.page.route("**/app/api/conversations", posted)
    refused(tab, STORY)
    assert tab["input"].input_value() == STORY
    tab.page.unroute_all()


def test_an_edit_that_is_refused_stands_in_its_box_again(tab):
    tab.send(STORY)
    tab["edit"].click()
    tab["edit-input"].fill(TOO_LONG)
    tab["edit-send"].click()
    tab["banner"].wait_for()
    tab["edit-input"].wait_for()
    assert tab["edit-input"].input_value() == TOO_LONG.strip()
    tab.noted.console = [line for line in tab.noted.console if "status of 400" not in line]


@pytest.mark.parametrize("begun", [False, True], ids=["new conversation", "conversation with messages"])
def test_a_message_stays_in_the_box_while_the_server_is_gone_and_after(open_tab, tmp_path, begun):
    (tmp_path / "text.txt").write_text("The sea was calm.")
    words = ["mlx_zip.apps.replayed_app", "--text", "text.txt", "--data", "kept.db", "--token", "k" * 40]
    app = App(tmp_path, words)
    with running(app):
        tab = open_tab(app)
        if begun:
            tab.send(STORY)
        app.end()
        refused(tab, "Are you there?")
        assert tab["input"].input_value() == "Are you there?"
        app.start()
        tab["banner"].wait_for(state="hidden")
        assert tab["input"].input_value() == "Are you there?"
        assert tab.api("GET", "conversations")["total"] == int(begun)
        tab["input"].press("Enter")
        tab.answered(int(begun))
    ours = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    tab.noted.console = [line for line in tab.noted.console if not any(text in line for text in ours)]
