"""Files that are dropped on the page or pasted: texts become text, anything else is refused, and the page stays."""

import pytest

PNG = [137, 80, 78, 71, 13, 10, 26, 10, 0, 0, 0, 13]
# Gives files [[name, type, bytes or text], ...] to the page as a browser does, and returns whether the page took them.
GIVE = """([where, event, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    data.items.add(new File([typeof content === 'string' ? content : new Uint8Array(content)], name, { type }));
  }
  if (text) data.setData('text/plain', text);
  const options = { bubbles: true, cancelable: true };
  const given = event === 'paste'
    ? new ClipboardEvent('paste', { ...options, clipboardData: data })
    : new DragEvent(event, { ...options, dataTransfer: data });
  return !document.querySelector(where).dispatchEvent(given);
}"""


def give(tab, *files, where="#messages", event="drop", text=""):
    """Gives files to the page; returns whether it keeps them from the browser."""
    return tab.page.evaluate(GIVE, [where, event, list(files), text])


@pytest.mark.parametrize(
    ("where", "event"), [("#messages", "drop"), ("#input", "drop"), ("#input", "paste"), ("body", "paste")]
)
def test_a_text_file_becomes_text_where_the_cursor_is(tab, where, event):
    tab["input"].fill("Before: ")
    assert give(tab, ["notes.md", "text/markdown", "# Größe\nx = 1"], where=where, event=event)
    tab.page.wait_for_function("() => document.querySelector('#input').value.length > 9")
    assert tab["input"].input_value() == "Before: # Größe\nx = 1"
    assert tab["send"].is_enabled()


def test_several_text_files_stand_below_each_other(tab):
    give(tab, ["a.txt", "", "one"], ["b.py", "", "two"])
    tab.page.wait_for_function("() => document.querySelector('#input').value")
    assert tab["input"].input_value() == "one\n\ntwo"


@pytest.mark.parametrize("event", ["drop", "paste"])
@pytest.mark.parametrize(
    "file",
    [
        ["cat.png", "image/png", PNG],
        ["a.bin", "", [0, 1, 2]],
        ["latin.txt", "text/plain", [228, 246]],
        ["big.txt", "", "x" * (2**20 + 1)],
    ],
    ids=lambda file: file[0],
)
def test_what_is_no_text_or_too_large_gets_one_line_and_changes_nothing(tab, file, event):
    tab["input"].fill("Before")
    assert give(tab, file, event=event)
    tab["banner"].wait_for()
    assert tab["banner"].inner_text().strip().startswith(f"{file[0]}: only text of at most 1 MiB can be read")
    assert tab["input"].input_value() == "Before"


def test_an_image_beside_a_text_is_refused_and_the_text_is_taken(tab):
    give(tab, ["cat.png", "image/png", PNG], ["a.txt", "text/plain", "words"])
    tab["banner"].get_by_text("cat.png: only text").wait_for()
    assert tab["input"].input_value() == "words"


def test_words_that_were_copied_together_with_a_picture_of_them_are_pasted_by_the_browser(tab):
    assert not give(tab, ["image.png", "image/png", PNG], where="#input", event="paste", text="words")
    assert not tab["banner"].is_visible()


def test_files_that_were_copied_with_their_names_are_read(tab):
    assert give(tab, ["a.txt", "", "one"], ["b.py", "", "two"], where="#input", event="paste", text="a.txt\rb.py")
    tab.page.wait_for_function("() => document.querySelector('#input').value")
    assert tab["input"].input_value() == "one\n\ntwo"


def test_the_browser_does_not_leave_the_page_for_what_is_dropped(tab):
    for where in ("#messages", "#sidebar", "#toolbar"):
        assert give(tab, text="http://127.0.0.1:9/", where=where, event="dragover")
        assert give(tab, text="http://127.0.0.1:9/", where=where)
    assert give(tab, ["cat.png", "image/png", PNG], where="#input", event="dragover")
    assert not give(tab, text="words", where="#input")  # the browser puts words into a text box
