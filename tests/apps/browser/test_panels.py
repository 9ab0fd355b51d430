"""The vocabulary made visible: tints, what a hypertoken is made of, the codebook, packs, and the race."""

import re
import subprocess
import sys

import pytest

from support.browsing import App, running

TEXTS = {
    "sea": "The boy and his boat went out to the sea. The sea was calm and the boat was small. ",
    "dog": "The old dog slept under the big tree. The big tree was green and the old dog was happy. ",
}
STORY = "Tell me a story about a bear."


def test_hypertokens_are_tinted_and_the_tint_can_be_switched_off(told):
    token = told.page.locator("[data-role=assistant] .tok").first
    token.wait_for()
    clear = "rgba(0, 0, 0, 0)"
    colour = "one => getComputedStyle(one).backgroundColor"
    assert token.evaluate(colour) != clear
    told["tint-toggle"].click()
    assert token.evaluate(colour) == clear
    told["tint-toggle"].click()


def test_a_hypertoken_shows_its_parts_and_where_it_was_learned(told):
    token = told.page.locator("[data-role=assistant] .tok").first
    token.hover()
    told["token-popover"].wait_for()
    shown = told["token-popover"].inner_text()
    assert re.search(r"\d base tokens, one step", shown)
    assert re.search("pack|request|conversation|answer|prompt", shown)


def test_the_keyboard_steps_through_the_hypertokens(told):
    told["inspect"].click()
    told["token-popover"].wait_for()
    first = told.page.evaluate("document.activeElement.dataset.t")
    told.page.keyboard.press("ArrowRight")
    assert int(told.page.evaluate("document.activeElement.dataset.t")) > int(first)


def test_the_tokens_of_an_answer_are_there_after_a_reload(told):
    count = told.page.locator("[data-role=assistant] .tok").count()
    told.page.reload()
    told.ready().page.locator("[data-role=assistant] .tok").first.wait_for()
    assert told.page.locator("[data-role=assistant] .tok").count() == count > 5


def test_the_panel_lists_the_most_used_entries(told):
    told["vocabulary-open"].click()
    told["entry"].first.wait_for()
    uses = [int(re.findall(r"(\d+)×", one)[0]) for one in told["entry"].all_inner_texts()]
    assert uses == sorted(uses, reverse=True)
    told["panel-close"].click()


@pytest.fixture(scope="module")
def any_role(tmp_path_factory):
    """The app with an engine whose chat template takes system messages, which the bundled model's does not."""
    home = tmp_path_factory.mktemp("any_role")
    (home / "text.txt").write_text(TEXTS["sea"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    words = [
        "mlx_zip.apps.replayed_app",
        "--text",
        "text.txt",
        "--chat-template",
        template,
        "--system-prompt",
        "Be brief.",
    ]
    with running(App(home, words)) as app:
        yield app


def settings(tab):
    """Reloads the page and shows the settings of the conversation that was open."""
    tab.page.reload()
    tab.ready()
    if not tab["panel"].is_visible():
        tab["settings-open"].click()
    return tab


def test_sampling_and_system_prompt_are_kept_with_the_conversation(any_role, open_tab):
    tab = open_tab(any_role).send(STORY)
    tab["settings-open"].click()
    tab["sampling-temp"].fill("0.7")
    tab["sampling-temp"].press("Enter")
    with tab.page.expect_response(lambda answer: '"system"' in (answer.request.post_data or "")):
        tab["system"].fill("You tell short stories.")
    settings(tab)
    assert tab["sampling-temp"].input_value() == "0.7"
    assert tab["system"].input_value() == "You tell short stories."


def test_a_new_conversation_shows_the_default_system_prompt_and_can_do_without_it(any_role, open_tab):
    tab = open_tab(any_role)
    tab["settings-open"].click()
    assert tab["system"].input_value() == "Be brief."
    tab["system"].fill("")
    tab.send(STORY)
    assert settings(tab)["system"].input_value() == ""
    with_default = open_tab(any_role).send(STORY)
    assert settings(with_default)["system"].input_value() == "Be brief."


def test_a_system_prompt_that_the_model_does_not_take_is_refused_with_the_reason(told):
    told["settings-open"].click()
    told["system"].fill("You tell short stories.")
    told["banner"].wait_for()
    assert "system" in told["banner"].inner_text()
    # On a narrow screen the panel lies over the conversation, and not over the banner.
    told.page.set_viewport_size({"width": 390, "height": 780})
    hit = "one => one.contains(document.elementFromPoint(innerWidth - 60, one.getBoundingClientRect().y + 9))"
    assert told["banner"].evaluate(hit)
    told.page.set_viewport_size({"width": 1280, "height": 800})
    told.noted.console = [line for line in told.noted.console if "400" not in line]
    assert settings(told)["system"].input_value() == ""
    told["panel-close"].click()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The app with two packs that conversations can choose."""
    home = tmp_path_factory.mktemp("packed")
    learn = [sys.executable, "-P", "-m", "mlx_zip", "vocab", "pack", "learn", "--model", "stories", "--size", "24"]
    started = []
    for name, text in TEXTS.items():
        (home / f"{name}.txt").write_text(50 * text)
        more = ["--data", f"{name}.txt", "--out", f"{name}.npz"]
        started.append(subprocess.Popen([*learn, *more], cwd=home, stdout=subprocess.DEVNULL))
    assert [process.wait(120) for process in started] == [0, 0]
    with running(App(home, ["mlx_zip", "app", "--no-open", "--pack", "sea.npz", "--pack", "dog.npz"])) as app:
        yield app


def test_packs_are_chosen_and_merged_for_one_conversation(packed, open_tab):
    tab = open_tab(packed)
    tab["settings-open"].click()
    for name in TEXTS:
        tab[f"pack-{name}"].check()
    tab["panel-close"].click()
    tab.send(STORY)
    (one,) = tab.api("GET", "conversations")["conversations"]
    kept = tab.api("GET", f"conversations/{one['id']}")
    assert kept["packs"] == list(TEXTS)
    assert kept["messages"][-1]["figures"]["entries"] >= 48
    tab["new-chat"].click()
    tab["settings-open"].click()
    assert not tab["pack-sea"].is_checked()
    tab["conversation-link"].first.click()
    tab.answers().first.wait_for()
    assert tab["pack-sea"].is_checked()


def test_the_page_says_where_conversations_are_kept(told):
    told["settings-open"].click()
    assert "conversations.db" in told["storage"].inner_text()
    told["panel-close"].click()


def test_the_race_runs_one_after_the_other_and_has_a_verdict(told):
    told["race-open"].click()
    assert told["race-prompt"].input_value() == STORY
    told.raced()
    for lane in ("lane-zip", "lane-base"):
        assert len(told[lane].get_by_test_id("lane-text").inner_text()) > 100
        assert re.search(r"\d", told[lane].get_by_test_id("lane-clock").inner_text())
    told["race-close"].click()
    assert told["input"].is_visible()


def test_a_race_that_is_stopped_says_so(told):
    told["race-open"].click()
    told["race-start"].click()
    told["race-stop"].click()
    told.page.get_by_text("Stopped.").wait_for()
    told["race-close"].click()
