"""What is kept: conversations, drafts, titles; found again, taken out, brought back, deleted."""

import json

STORY = "Tell me a story about a whale."


def renamed(tab, title):
    """Gives the newest conversation a title."""
    tab["conversation-menu"].first.click()
    tab["rename"].click()
    tab["rename-input"].fill(title)
    tab["rename-input"].press("Enter")
    tab.page.get_by_test_id("conversation-link").get_by_text(title, exact=True).wait_for()
    return tab


def test_a_reload_shows_the_same_conversation(told):
    before = told.text()
    told.page.reload()
    told.ready()
    assert told.answered().text() == before
    assert "token=" not in told.page.url


def test_a_draft_is_there_after_a_reload(told):
    with told.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        told["input"].fill("half a thought")
    told.page.reload()
    told.ready()
    assert told["input"].input_value() == "half a thought"


def test_a_new_title_is_kept(told):
    renamed(told, "The whale's tale")
    told.page.reload()
    told.ready()
    assert told["conversation"].first.inner_text().startswith("The whale's tale")


def test_a_pinned_conversation_stands_first_until_it_is_unpinned(told):
    renamed(told, "Keep me here")
    told["conversation-menu"].first.click()
    told["pin"].click()
    told.page.get_by_role("region", name="Pinned").get_by_text("Keep me here").wait_for()
    told.send("Tell me a story about a cow.")
    told["new-chat"].click()
    told.send("Tell me a story about a sheep.")
    told.page.reload()
    told.ready()
    assert told["conversation"].first.inner_text().startswith("Keep me here")
    told["conversation-menu"].first.click()
    told["unpin"].click()
    told.page.get_by_role("region", name="Pinned").wait_for(state="detached")
    assert not told["conversation"].first.inner_text().startswith("Keep me here")


def test_a_conversation_is_put_into_a_folder_that_can_be_closed_and_taken_out_again(told):
    renamed(told, "In a folder")
    told["conversation-menu"].first.click()
    told["move"].click()
    told["dialog-input"].fill("Whales & co")
    told["dialog-confirm"].click()
    link = told["folder"].get_by_text("In a folder")
    link.wait_for()
    told["folder"].get_by_text("Whales & co").click()
    assert not link.is_visible()
    told.page.reload()
    told.ready()
    told["folder"].get_by_text("Whales & co").wait_for()
    assert not link.is_visible()
    told["folder"].get_by_text("Whales & co").click()
    told["folder"].get_by_test_id("conversation-menu").click()
    told["take-out"].click()
    told["folder"].wait_for(state="detached")


def test_a_folder_that_is_closed_is_kept_so_at_once(told):
    told["conversation-menu"].first.click()
    told["move"].click()
    told["dialog-input"].fill("At once")
    told["dialog-confirm"].click()
    told["folder"].get_by_text("At once").wait_for()
    pressed = "folder => { folder.querySelector('summary').click(); return localStorage.getItem('folders:closed'); }"
    assert json.loads(told["folder"].evaluate(pressed)) == ["At once"]
    assert json.loads(told["folder"].evaluate(pressed)) == []
    told["folder"].get_by_test_id("conversation-menu").click()
    told["take-out"].click()
    told["folder"].wait_for(state="detached")


def test_words_of_an_answer_find_their_conversation(told):
    word = max(told.text().replace(".", " ").replace(",", " ").split(), key=len)
    renamed(told, "Found by its words")
    told["search"].fill(word)
    told.page.locator("mark").first.wait_for()
    assert any(one.startswith("Found by its words") for one in told["conversation"].all_inner_texts())
    told["search"].fill("no such words anywhere")
    told.page.get_by_text("Nothing found").wait_for()


def test_a_deleted_conversation_is_gone(told):
    renamed(told, "To be deleted")
    told["conversation-menu"].first.click()
    told["delete"].click()
    told["dialog-confirm"].click()
    told["empty"].wait_for()
    told.page.reload()
    told.ready()
    assert "To be deleted" not in told["conversations"].inner_text()


def exported(tab, kind):
    """Saves the newest conversation and returns the file's name and its text."""
    tab["conversation-menu"].first.click()
    with tab.page.expect_download() as saved:
        tab[f"export-{kind}"].click()
    return saved.value.suggested_filename, saved.value.path().read_text(encoding="utf-8")


def test_an_exported_conversation_comes_back_whole(told, tmp_path):
    renamed(told, "Out and in again")
    text = told.text()
    name, content = exported(told, "json")
    assert name.endswith(".json")
    (tmp_path / "in.json").write_text(content)
    told["new-chat"].click()
    told["empty"].wait_for()
    told["import-file"].set_input_files(tmp_path / "in.json")
    told.page.get_by_text("1 conversation imported").wait_for()
    assert told.answered().text() == text
    titles = [one.splitlines()[0] for one in told["conversation"].all_inner_texts()]
    assert titles.count("Out and in again") == 2


def test_a_conversation_is_exported_as_markdown(told):
    name, content = exported(told, "md")
    assert name.endswith(".md")
    assert STORY in content
    assert told.text().split()[-1] in content


def test_a_foreign_file_is_refused_with_its_reason_and_nothing_is_lost(told, tmp_path):
    before = told.api("GET", "conversations")["total"]
    for content in ["no JSON at all", "[]", json.dumps({"messages": "x"}), json.dumps({"conversations": [{"id": 3}]})]:
        (tmp_path / "in.json").write_text(content)
        told["import-file"].set_input_files(tmp_path / "in.json")
        told["banner"].wait_for()
        assert len(told["banner"].inner_text()) > 20, content
        assert told.api("GET", "conversations")["total"] == before, content
        told["banner"].get_by_label("Close").click()
    told.noted.console = [line for line in told.noted.console if "the server responded with a status of 4" not in line]


def test_two_tabs_show_what_the_other_one_did(told, open_tab, app):
    other = open_tab(app, beside=told, path=told.page.url.partition(str(app.port))[2])
    assert other.answered().text() == told.text()
    other.send("Tell me about the sea.")
    told.page.get_by_text("Tell me about the sea.").first.wait_for()
    told.page.wait_for_function("() => document.querySelectorAll('[data-role=assistant]').length === 2")
    assert told.answered().text() == other.text()
    renamed(other, "Two windows")
    told.page.get_by_test_id("conversation-link").get_by_text("Two windows", exact=True).wait_for()
