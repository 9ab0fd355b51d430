"""The vocabulary made visible: tints, what a hypertoken is made of, the codebook, packs, and the race."""

import re
import subprocess

import pytest

from support.browsing import App, running
from support.command_line import without_torch

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


def test_the_colours_are_explained_under_the_newest_answer_while_they_are_shown(told):
    legend = told.answers().last.get_by_test_id("text-legend")
    assert legend.inner_text().split() == ["2", "3", "4", "5+", "base", "tokens", "in", "one", "step"]
    told["tint-toggle"].click()
    assert not legend.is_visible()
    told["tint-toggle"].click()


def test_the_buttons_of_the_header_show_their_names(told):
    names = {"tint-toggle": "Tint", "race-open": "Race", "vocabulary-open": "Vocabulary", "settings-open": "Settings"}
    for width in (1280, 360):
        told.page.set_viewport_size({"width": width, "height": 800})
        assert {name: told[name].inner_text() for name in names} == names
        assert all(told[name].is_visible() for name in names)
    told.page.set_viewport_size({"width": 1280, "height": 800})


def test_the_line_of_figures_says_in_words_what_each_of_them_is(told):
    assert "base tokens/s" in told["live-speed"].inner_text()
    told["live-help"].click()
    explained = told["dialog"].inner_text()
    for figure in told.page.locator("[data-testid=live] .figure > span:visible").all():
        assert figure.inner_text() in explained
    assert "Base tokens are the pieces of text" in explained
    told.page.keyboard.press("Escape")


def test_a_click_on_the_line_of_figures_explains_it_where_there_is_no_room_for_a_button(told):
    told.page.set_viewport_size({"width": 860, "height": 800})
    assert not told["live-help"].is_visible()
    told["live-per-step"].click()
    assert "What these figures mean" in told["dialog"].inner_text()
    told.page.keyboard.press("Escape")
    told.page.set_viewport_size({"width": 1280, "height": 800})


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


def test_stepping_through_a_long_answer_shows_the_first_hypertoken_s_parts_on_the_first_click(told):
    told.page.set_viewport_size({"width": 390, "height": 420})  # so that the first hypertoken is out of sight
    told.page.evaluate("() => { document.querySelector('#scroller').scrollTop = 1e6; }")
    told.page.wait_for_timeout(300)
    told["inspect"].click()
    told.page.wait_for_timeout(500)  # the page has scrolled by then
    assert told["token-popover"].is_visible()
    popover, token = told["token-popover"].bounding_box(), told.page.locator(".tok.on").bounding_box()
    assert min(abs(popover["y"] - token["y"]), abs(popover["y"] + popover["height"] - token["y"])) < 60
    told.page.set_viewport_size({"width": 1280, "height": 800})


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
        "support.replayed_app",
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


def test_a_model_that_takes_no_system_prompt_has_the_field_switched_off_with_the_reason(told):
    told["settings-open"].click()
    assert told["system"].is_disabled()
    assert "the stories model knows the roles user and assistant only" in told["system-refusal"].inner_text()
    (one,) = told.api("GET", "conversations?limit=1")["conversations"]
    refused = told.api("PATCH", f"conversations/{one['id']}", {"system": "You tell short stories."})
    assert "system" in refused["error"]["message"]
    told.noted.console = [line for line in told.noted.console if "400" not in line]
    assert settings(told)["system"].input_value() == ""
    told["panel-close"].click()


def test_a_model_that_takes_a_system_prompt_has_the_field_switched_on(any_role, open_tab):
    tab = open_tab(any_role)
    tab["settings-open"].click()
    assert tab["system"].is_enabled()
    assert tab["system-refusal"].inner_text() == ""


def test_a_banner_lies_over_the_panel_on_a_narrow_screen(told):
    told["settings-open"].click()
    told.page.evaluate("import('/app/page/tell.js').then(({ banner }) => banner('Something is wrong.'))")
    told["banner"].wait_for()
    told.page.set_viewport_size({"width": 390, "height": 780})
    hit = "one => one.contains(document.elementFromPoint(innerWidth - 60, one.getBoundingClientRect().y + 9))"
    assert told["banner"].evaluate(hit)
    told.page.set_viewport_size({"width": 1280, "height": 800})
    told["panel-close"].click()


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("temp", "-3", "0.75"), ("max_tokens", "0", "40"), ("top_k", "1.5", "3"), ("top_k", "1e30", "40")],
)
def test_a_setting_out_of_range_is_refused_beside_its_field(told, name, wrong, right):
    told["settings-open"].click()
    field, problem = told[f"sampling-{name}"], told[f"sampling-{name}-problem"]
    field.fill(wrong)
    field.press("Enter")
    assert "must be a" in problem.inner_text()
    assert field.get_attribute("aria-invalid") == "true"
    (one,) = told.api("GET", "conversations?limit=1")["conversations"]
    assert name not in told.api("GET", f"conversations/{one['id']}")["sampling"]
    with told.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        field.fill(right)
        field.press("Enter")
    assert problem.inner_text() == ""
    assert told.api("GET", f"conversations/{one['id']}")["sampling"][name] == float(right)
    told["sampling-reset"].click()
    told["panel-close"].click()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The app with two packs that conversations can choose."""
    home = tmp_path_factory.mktemp("packed")
    learn = [*without_torch("mlx_zip", "-P"), "vocab", "pack", "learn", "--model", "stories", "--size", "24"]
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


def test_a_prompt_that_a_pack_would_help_is_offered_the_pack(packed, open_tab):
    tab = open_tab(packed)
    tab["settings-open"].click()
    tab["pack-sea"].check()
    tab["input"].fill(2 * TEXTS["dog"])
    tab["offer"].get_by_text("dog").wait_for()
    with_pack, without = map(int, re.findall(r"\d+", tab["offer"].inner_text()))
    assert with_pack <= 0.9 * without
    tab["offer-use"].click()
    tab["offer"].wait_for(state="hidden")
    assert [tab[f"pack-{name}"].is_checked() for name in TEXTS] == [False, True]
    assert tab["input"].input_value() == 2 * TEXTS["dog"]
    tab["panel-close"].click()
    tab["input"].fill("")


def test_the_page_says_where_conversations_are_kept(told):
    told["settings-open"].click()
    assert "conversations.db" in told["storage"].inner_text()
    told["panel-close"].click()


def test_the_settings_have_no_scrollbar_from_left_to_right(open_tab, tmp_path):
    home = tmp_path / ("a_folder_with_a_long_name" * 6)
    home.mkdir()
    (home / "text.txt").write_text(TEXTS["sea"])
    data = str(home / "kept.db")
    with running(App(home, ["support.replayed_app", "--text", "text.txt", "--data", data])) as app:
        tab = open_tab(app)
        tab["settings-open"].click()
        assert "a_folder_with_a_long_name" in tab["storage"].inner_text()
        wide = (
            "() => { const one = document.querySelector('#panel-settings'); return one.scrollWidth - one.clientWidth; }"
        )
        for width in (1280, 390, 360):
            tab.page.set_viewport_size({"width": width, "height": 800})
            assert tab.page.evaluate(wide) == 0
            cut = "one => one.getBoundingClientRect().right <= one.closest('.panel').getBoundingClientRect().right"
            assert all(one.evaluate(cut) for one in tab.page.locator("#panel-settings :visible").all())
        tab.page.set_viewport_size({"width": 1280, "height": 800})


def test_the_race_runs_one_after_the_other_and_has_a_verdict(told):
    told["race-open"].click()
    assert told["race-prompt"].input_value() == STORY
    told.raced()
    assert re.match(r"[\d.,]+ against [\d.,]+ base tokens/s: with hypertokens", told["race-verdict"].inner_text())
    for lane in ("lane-zip", "lane-base"):
        first = told[lane].locator(".figures > div").first.inner_text()
        assert re.fullmatch(r"[\d.,]+\s+base tokens/s", first), lane
        assert len(told[lane].get_by_test_id("lane-text").inner_text()) > 100
        assert re.search(r"\d", told[lane].get_by_test_id("lane-clock").inner_text())
    told["race-close"].click()
    assert told["input"].is_visible()


@pytest.mark.parametrize(("length", "differs"), [(200, False), (150, True)])
def test_the_verdict_says_when_the_texts_of_a_race_differ_in_length(told, length, differs):
    figures = {"base_tokens": 200, "steps": 100, "base_tokens_per_s": 90.0}
    verdict = "async both => (await import('/app/page/lane.js')).verdict(...both).join(' ')"
    said = told.page.evaluate(verdict, [figures, figures | {"base_tokens": length, "base_tokens_per_s": 60.0}])
    assert said.startswith("90.0 against 60.0 base tokens/s: with hypertokens 1.50 times as fast.")
    assert ("differ in length, 200 against 150" in said) == differs


def test_a_race_that_is_stopped_says_so(told):
    told["race-open"].click()
    told["race-start"].click()
    told["race-stop"].click()
    told.page.get_by_text("Stopped.").wait_for()
    told["race-close"].click()
