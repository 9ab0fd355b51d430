"""The vocabulary made visible: tints, what a hypertoken is made of, the codebook, packs, and the race."""

import re

import pytest

STORY = "Tell me a story about a bear."


@pytest.fixture
def told(tab):
    """A tab with one answered conversation."""
    return tab.send(STORY)


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


def test_sampling_and_system_prompt_are_kept_with_the_conversation(told):
    told["settings-open"].click()
    told["sampling-temp"].fill("0.7")
    told["sampling-temp"].press("Enter")
    with told.page.expect_response(lambda answer: '"system"' in (answer.request.post_data or "")):
        told["system"].fill("You tell short stories.")
    told.page.reload()
    told.ready()
    if not told["panel"].is_visible():
        told["settings-open"].click()
    assert told["sampling-temp"].input_value() == "0.7"
    assert told["system"].input_value() == "You tell short stories."
    told["panel-close"].click()


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
