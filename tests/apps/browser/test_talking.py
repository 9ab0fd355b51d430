"""Talking with the bundled model in a browser: send, again, edit, branches, go on, copy."""

import re

STORY = "Tell me a story about a frog."


def test_an_answer_comes_with_its_figures(tab):
    tab.send(STORY)
    assert len(tab.text()) > 100
    figures = tab.answers().last.get_by_test_id("message-figures").inner_text()
    assert re.match(r"\d+ base tokens in \d+ steps · \d\.\d\d per step · [\d.,]+ base tokens/s", figures)
    assert tab["live-per-step"].is_visible()
    tab["conversation"].first.get_by_text(STORY).wait_for()


def test_an_example_is_sent_when_it_is_pressed(tab):
    tab["example"].first.click()
    tab.answered()
    assert tab["empty"].count() == 0
    assert len(tab.text()) > 100


def test_an_answer_given_again_is_a_branch_and_both_can_be_read(tab):
    tab.send(STORY)
    first = tab.text()
    tab["settings-open"].click()
    tab["sampling-temp"].fill("1.5")
    tab["sampling-temp"].press("Enter")
    tab.answers().last.get_by_test_id("regenerate").click()
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    second = tab.answered().text()
    assert second != first
    tab["branch-previous"].click()
    tab.page.get_by_text("1 / 2", exact=True).wait_for()
    assert tab.text() == first
    tab["branch-next"].click()
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    assert tab.text() == second


def test_an_answer_given_again_at_temperature_0_is_said_to_be_the_same(tab):
    tab.send(STORY)
    assert tab["message-same"].count() == 0
    tab.answers().last.get_by_test_id("regenerate").click()
    tab["toast"].get_by_text("The temperature is 0: with the same settings the answer is the same").wait_for()
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    tab.answered()
    assert tab["message-same"].inner_text() == "the same text as version 1"


def test_an_answer_given_again_with_a_fixed_seed_is_said_to_be_the_same_and_a_drawn_one_is_not(tab):
    tab["settings-open"].click()
    for name, value in {"temp": "0.9", "seed": "7", "max_tokens": "30"}.items():
        tab[f"sampling-{name}"].fill(value)
        tab[f"sampling-{name}"].press("Enter")
    tab.send(STORY)
    tab.answers().last.get_by_test_id("regenerate").click()
    tab["toast"].get_by_text("The seed is 7: with the same settings the answer is the same").wait_for()
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    tab.answered()
    tab.page.evaluate("() => { document.querySelector('[data-testid=toast]').textContent = ''; }")
    tab["sampling-seed"].fill("")
    tab["sampling-seed"].press("Enter")
    tab.answers().last.get_by_test_id("regenerate").click()
    tab.page.get_by_text("3 / 3", exact=True).wait_for()
    tab.answered()
    assert tab["toast"].inner_text() == ""


def test_an_edited_message_begins_a_branch_with_an_answer_of_its_own(tab):
    tab.send("Tell me a story about a cat.")
    old = tab.text()
    tab["edit"].click()
    tab["edit-input"].fill("Tell me a story about a dog.")
    tab["edit-send"].click()
    tab.page.get_by_text("2 / 2", exact=True).wait_for()
    tab.answered()
    assert "dog" in tab.text()
    tab["branch-previous"].click()
    tab.page.get_by_text("1 / 2", exact=True).wait_for()
    assert tab.text() == old


def test_an_answer_says_from_where_on_its_prompt_was_read_again_and_hides_the_words(tab):
    tab.send(STORY)
    tab["new-chat"].click()
    tab.send("Tell me a story about a cat.")
    assert tab["message-differs"].count() == 0  # a first answer has no earlier prompt to go on from
    tab["edit"].click()
    tab["edit-input"].fill("Tell me a story about 12 zebras.")
    tab["edit-send"].click()
    differs = tab["message-differs"]
    differs.get_by_text("read again from base token").wait_for()
    tab.answered()
    differs.locator("summary").click()
    assert "The prompt goes on with “ 00 xxxxxx" in differs.inner_text()
    assert "zebra" not in differs.inner_text()


def test_an_edit_that_is_cancelled_changes_nothing(tab):
    tab.send(STORY)
    tab["edit"].click()
    tab["edit-input"].fill("Something else")
    tab["edit-input"].press("Escape")
    assert tab["edit-input"].count() == 0
    assert tab.page.locator("[data-role=user] [data-testid=message-text]").inner_text() == STORY


def test_an_answer_that_ended_at_its_limit_goes_on(tab):
    tab["settings-open"].click()
    tab["sampling-max_tokens"].fill("12")
    tab["sampling-max_tokens"].press("Enter")
    tab.send(STORY)
    begun = tab.text()
    tab["continue"].click()
    tab.page.wait_for_function(
        "begun => document.querySelector('[data-role=assistant] [data-testid=message-text]').innerText.length > begun",
        arg=len(begun),
    )
    assert tab.answered().text().startswith(begun)
    tab.page.get_by_text("24 base tokens in").wait_for()
    assert tab.answers().count() == 1


def test_an_answer_is_copied_as_it_was_written(tab):
    tab.send(STORY)
    tab.answers().last.get_by_test_id("copy").click()
    tab.page.get_by_text("Copied").wait_for()
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied.split() == tab.text().split()


def test_a_second_message_follows_the_first_answer(tab):
    tab.send(STORY).send("Tell me another one.")
    roles = [one.get_attribute("data-role") for one in tab["message"].all()]
    assert roles == ["user", "assistant"] * 2
