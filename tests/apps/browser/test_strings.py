"""Texts from anywhere stay text: scripts do not run, and every script of the world is shown as it was written."""

import json

import pytest

from support.browsing import App, running

EVIL = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<svg onload='window.hacked = 3'><style>*{display:none}</style></svg>",
    "[press me](javascript:window.hacked=4)",
    '"><iframe srcdoc="<script>parent.hacked = 5</script>"></iframe>',
    "<a href='data:text/html,<script>alert(6)</script>'>data</a>",
    "<form action='/app/'><input name=body autofocus onfocus='window.hacked = 7'></form>",
    "$\\href{javascript:window.hacked=8}{formula}$ and $\\includegraphics{http://127.0.0.1:9/x.png}$",
    "![picture](http://127.0.0.1:9/picture.png)",
    "```html\n<script>window.hacked = 9</script>\n```",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=10></style></mglyph></table></mtext></math>",
]
WORLD = [
    "東京は今日も晴れです。猫が「こんにちは」と言いました。",
    "مرحبا بالعالم، هذه قصة قصيرة عن قارب صغير.",
    "שלום עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é é ﷽",
]
HARM = (
    "[window.hacked ?? null, document.querySelectorAll('#app script, #app iframe, #app form:not(#composer), #app style,"
    ' #messages img, #messages [onerror], [href^="javascript:"], #messages a[href^="data:"]\').length]'
)


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """The app with an engine whose answers try everything."""
    home = tmp_path_factory.mktemp("evil")
    (home / "text.txt").write_text("\n\n".join([*EVIL, *WORLD]))
    with running(App(home, ["support.replayed_app", "--text", "text.txt", "--speed", "2000"])) as app:
        yield app


def unharmed(tab):
    """Whether nothing ran and nothing was built that could run."""
    return tab.page.evaluate(HARM) == [None, 0] and tab.noted.dialogs == [] and tab.noted.foreign == []


@pytest.fixture
def answered(evil, open_tab):
    """A tab with an answer that tried everything, its formulas set."""
    return with_formulas(open_tab(evil).send("Try it."))


def with_formulas(tab):
    """Waits until the library of formulas, which is fetched when a formula is there, has set them."""
    tab.page.wait_for_selector("[data-role=assistant] .math > *")
    return tab


def test_an_answer_that_tries_to_run_scripts_is_shown_as_text(answered):
    answered.page.locator("pre code").wait_for()
    assert unharmed(answered)
    assert "window.hacked = 9" in answered.text()


def test_an_answer_is_the_same_text_after_a_reload(answered):
    before = answered.text()
    answered.page.reload()
    with_formulas(answered.ready().answered())
    answered.page.locator("pre code").wait_for()
    assert unharmed(answered)
    assert answered.text() == before


def test_every_script_of_the_world_is_shown_as_it_was_written(answered):
    text = answered.text()
    assert [line for line in WORLD if line not in text] == []


def test_a_table_keeps_its_alignment_and_a_list_its_first_number(answered):
    found = answered.page.evaluate(
        """async (text) => {
          const { nodesOf } = await import('/app/page/safe.js');
          const { blocksOf, htmlOf } = await import('/app/page/blocks.js');
          const all = document.createElement('div');
          for (const block of blocksOf(text)) if (block.type !== 'space') all.append(nodesOf(htmlOf(block)));
          return [all.querySelector('td').align, all.querySelector('ol').start, all.querySelector('[onclick]')];
        }""",
        "| a |\n| ---: |\n| 1 |\n\n5. five\n6. six\n\n<b onclick='window.hacked = 12'>b</b>",
    )
    assert found == ["right", 5, None]


# Draws a text whose library comes while only its first block is drawn: each frame has time for one block, and the next
# frame begins when the library is there.
SLOWLY = """async (text) => {
  const { Body } = await import('/app/page/body.js');
  const now = performance.now.bind(performance);
  const frame = requestAnimationFrame;
  let past = 0;
  performance.now = () => now() + (past += 5);
  window.requestAnimationFrame = async (next) => {
    while (!globalThis.katex) await new Promise((done) => setTimeout(done, 10));
    frame(() => setTimeout(next, 20));
  };
  const element = document.createElement('div');
  element.id = 'slow';
  document.body.append(element);
  new Body(element).set(text, null);
}"""


@pytest.mark.parametrize("text", ["$x^2$", "$x^2$\n\nsecond\n\nthird"])
def test_formulas_are_set_in_a_text_that_stands_whenever_their_library_comes(evil, open_tab, text):
    tab = open_tab(evil)
    tab.page.evaluate(SLOWLY, text)
    tab.page.wait_for_selector("#slow .math > *")


def test_lines_from_right_to_left_run_from_right_to_left(answered):
    found = answered.page.evaluate(
        """text => {
          const all = [...document.querySelectorAll('[data-role=assistant] p')];
          return getComputedStyle(all.find((one) => one.textContent.includes(text))).direction;
        }""",
        "قصة",
    )
    assert found == "rtl"


@pytest.mark.parametrize("text", [EVIL[1], WORLD[0], WORLD[1], WORLD[3]])
def test_a_message_is_sent_and_titled_as_it_was_typed(evil, open_tab, text):
    tab = open_tab(evil).send(text)
    assert tab.page.locator("[data-role=user] [data-testid=message-text]").inner_text() == text
    tab["conversation"].first.get_by_text(text[:20]).wait_for()
    assert unharmed(tab)


def test_a_title_stays_text_everywhere(evil, open_tab):
    tab = open_tab(evil).send("A title")
    tab["title"].fill(EVIL[1])
    tab["title"].press("Enter")
    tab["conversation-link"].first.get_by_text(EVIL[1], exact=True).wait_for()  # others may have such a title too
    tab["conversation-menu"].first.click()
    tab["delete"].click()
    assert EVIL[1] in tab["dialog"].inner_text()
    tab["dialog-cancel"].click()
    assert unharmed(tab)


def test_an_import_with_scripts_everywhere_stays_text(evil, open_tab, tmp_path):
    tab = open_tab(evil).send("Out")
    (one,) = tab.api("GET", "conversations?limit=1")["conversations"]
    content = json.dumps(tab.api("GET", f"conversations/{one['id']}/export?format=json"))
    file = tmp_path / "<img src=x onerror=alert(1)>.json"
    file.write_text(content.replace("Out", EVIL[1]))
    tab["import-file"].set_input_files(file)
    tab.page.locator("[data-role=user]").get_by_text(EVIL[1]).wait_for()
    assert unharmed(tab)


def test_the_name_of_a_file_that_is_refused_stays_text(evil, open_tab, tmp_path):
    tab = open_tab(evil)
    file = tmp_path / "<img src=x onerror=alert(1)>.json"
    file.write_text("no JSON")
    tab["import-file"].set_input_files(file)
    tab["banner"].get_by_text(file.name).wait_for()
    assert unharmed(tab)


def test_a_page_of_another_origin_gets_nothing(evil, open_tab):
    tab = open_tab(evil)
    head = {"Authorization": f"Bearer {evil.token}", "Origin": "http://127.0.0.1:9"}
    answer = tab.page.request.get(f"http://127.0.0.1:{evil.port}/app/api/conversations", headers=head)
    assert answer.status == 403


def test_without_the_key_the_page_says_what_to_do(evil, chrome):
    page = chrome.new_page()
    page.goto(f"http://127.0.0.1:{evil.port}/app/")
    page.get_by_text("This page has no valid key").wait_for()
    page.close()
