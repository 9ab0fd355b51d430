"""What is refused is not lost: the message stands in the box again, and nothing half-made stays behind."""

import pytest

from support.browsing import App, running

STORY = "Tell me a story about a wolf."
TOO_LONG = " ".join(str(7919 * i) for i in range(3000))  # numbers: hypertokens make no short prompt of them

# Fills the browser's storage of the page, so that less than n characters have room.
FILL = """n => {
  for (let size = 5 * 2 ** 20; ; size -= n >> 1) {
    try {
      return localStorage.setItem('full', 'x'.repeat(size));
    } catch {
      // still too large
    }
  }
}"""


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


def test_a_refused_message_that_the_browser_has_no_room_to_keep_stands_in_the_box_again(tab):
    tab.page.evaluate(FILL, len(TOO_LONG))
    refused(tab, TOO_LONG)
    assert tab["input"].input_value() == TOO_LONG.strip()


def test_a_refused_message_stands_in_the_box_of_the_new_conversation_that_was_begun_meanwhile(tab):
    waiting = []
    tab.page.route("**/answer", lambda route: waiting.append(route))
    tab["input"].fill(TOO_LONG)
    with tab.page.expect_request("**/answer"):
        tab["input"].press("Enter")
    tab["new-chat"].click()
    tab["input"].fill("Something else")
    waiting[0].continue_()
    tab["banner"].wait_for()
    tab.page.wait_for_function("() => document.querySelector('[data-testid=input]').value.length > 100")
    assert tab["input"].input_value() == f"{TOO_LONG.strip()}\n\nSomething else"
    tab.noted.console = [line for line in tab.noted.console if "status of 400" not in line]


def test_a_message_whose_system_prompt_is_refused_stands_in_the_box_again_until_it_is_sent_without(open_tab, tmp_path):
    (tmp_path / "text.txt").write_text("The sea was calm.")
    words = ["support.replayed_app", "--text", "text.txt", "--data", "kept.db", "--token", "k" * 40]
    any_role = ["--chat-template", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"]
    with running(App(tmp_path, [*words, *any_role])) as app:
        made = open_tab(app).api("POST", "conversations", {"system": "Be brief."})["id"]
    with running(App(tmp_path, words)) as app:  # with another model, whose template takes no system message
        tab = open_tab(app)
        tab.page.evaluate("id => { location.hash = `#/c/${id}`; }", made)
        tab.page.locator(f"[data-testid=conversation].current[data-id='{made}']").wait_for()
        refused(tab, STORY)
        assert "the stories model knows the roles user and assistant only" in tab["banner"].inner_text()
        assert tab["input"].input_value() == STORY
        tab["settings-open"].click()
        assert tab["system"].is_disabled()
        tab["system-remove"].click()
        tab["input"].press("Enter")
        tab.answered()
        assert not tab["banner"].is_visible()


def test_the_banner_of_a_foreign_file_goes_when_a_conversation_is_shown(tab):
    tab["import-file"].set_input_files({"name": "a.json", "mimeType": "", "buffer": b"no JSON"})
    tab["banner"].get_by_text("a.json is not JSON").wait_for()
    tab["new-chat"].click()
    tab["banner"].wait_for(state="hidden")


@pytest.mark.parametrize("where", ["this tab", "this tab, after a reload", "another tab"])
def test_a_page_whose_key_is_not_valid_goes_on_when_the_printed_address_is_opened(open_tab, app, where):
    tab = open_tab(app)
    tab.page.evaluate("() => localStorage.setItem('key', 'wrong')")
    if "reload" in where:
        tab.page.reload()
    else:
        tab["input"].fill(STORY)
        tab["input"].press("Enter")
    tab["banner"].get_by_text("no valid key").wait_for()
    if where == "another tab":
        open_tab(app, beside=tab)
    else:
        tab.page.goto(app.url)
    tab["banner"].wait_for(state="hidden")
    tab.ready()
    assert tab["input"].input_value() == ("" if "reload" in where else STORY)
    tab.noted.console = [line for line in tab.noted.console if "status of 401" not in line]


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
    words = ["support.replayed_app", "--text", "text.txt", "--data", "kept.db", "--token", "k" * 40]
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


def test_a_message_that_cannot_be_stored_stands_in_the_box_again_with_the_reason(open_tab, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time")
    words = ["support.replayed_app", "--text", "text.txt", "--data", str(tmp_path / "kept.db")]
    with running(App(tmp_path, words)) as app:
        tab = open_tab(app)
        tab.send(STORY)
        for path in tmp_path.glob("kept.db*"):
            path.unlink()
        tab["input"].fill("Another one.")
        tab["input"].press("Enter")
        tab["banner"].get_by_text("kept.db has been removed or replaced").wait_for()
        tab.page.wait_for_function("() => document.querySelector('[data-testid=input]').value === 'Another one.'")
        tab.noted.console = [line for line in tab.noted.console if "status of 500" not in line]
        assert tab["message"].count() == 2
