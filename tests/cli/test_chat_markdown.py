"""Markdown in the chat: what is finished is shown, whatever the pieces that it came in, and nothing twice."""

from __future__ import annotations

import io
import os
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.cli import colours
from mlx_zip.cli.chat.markdown import MarkdownStream
from mlx_zip.cli.chat.screen import Screen, repair_surrogates, replace_control_characters

TEXT = """# A title with `colour_code`

Some **bold text** and *em*, snake_case_name, 2 * 3 = 6, a [link](http://x.y/z), <http://a.b> and &amp; too.
A line that is rather long, so that it has to be wrapped, because it has more words than a terminal has room for.

- first item with a text that is wrapped and hangs below the text of the item and not below its bullet, as it ought to
  1. inner `x = 1`
> a quote

```python
def f(x):
    '''doc
    string'''
```

| a | b |
|---|---|
| 1 | **2** |

---
日本語の文章は空白がないのでどこでも改行できます。日本語の文章は空白がないのでどこでも改行できます。
Unclosed **bold, and \x1b]0;title\x07 at the end of the *last line"""
SGR = re.compile(r"\x1b\[[\d;]*m")


def shown(pieces, tint=lambda length: "", coloured=True):
    """What is written for pieces of (text, length)."""
    out = io.StringIO()
    stream = MarkdownStream(Screen(out), tint, coloured)
    for text, length in pieces:
        stream.feed(text, length)
    stream.finish()
    return out.getvalue()


def plain(text):
    """The text that is seen for a Markdown text."""
    return SGR.sub("", shown([(text, 1)]))


@pytest.mark.slow
@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=80), st.booleans())
def test_what_is_shown_does_not_depend_on_the_pieces(cuts, tinted):
    at = [0, *sorted(cuts), len(TEXT)]
    tint = colours.colour_code if tinted else lambda length: ""
    assert shown([(TEXT[a:b], 1) for a, b in pairwise(at)], tint) == shown([(TEXT, 1)], tint)


def test_each_character_alone_shows_the_same():
    assert shown([(one, 1) for one in TEXT]) == shown([(TEXT, 1)])


@given(st.text(alphabet="ab *_`~[](){}<>!&\\#|->=\n0.\t\x1b\u9fff", max_size=120))
def test_any_text_is_shown_and_ends_its_line(text):
    seen = shown([(one, 1 + (i % 3)) for i, one in enumerate(text)], colours.colour_code)
    assert "\x1b" not in SGR.sub("", seen)
    assert seen == "" or seen.endswith("\n")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("**a** b", "a b\n"),
        ("a ** b", "a ** b\n"),
        ("snake_case_name", "snake_case_name\n"),
        ("`a  *b*`", "a *b*\n"),
        ("- a\n- b", "• a\n• b\n"),
        ("1. a\n2) b", "1. a\n2) b\n"),
        ("> a\n> > b", "│ a\n│ │ b\n"),
        ("## A\nb", "A\nb\n"),
        ("a\nb\n\n\n\nc", "a\nb\n\nc\n"),
        ("[a](http://b.c/)", "a (http://b.c/)\n"),
        ("<http://b.c>", "http://b.c\n"),
        ("<b>x</b> <script>", "<b>x</b> <script>\n"),
        ("a &lt; b \\* c", "a < b * c\n"),
        ("```\n**a**\n```\nb", "```\n**a**\n```\nb\n"),
        ("  ```sh\n  a  b\n  ```", "  ```sh\n  a  b\n  ```\n"),
        ("```py\nno end", "```py\nno end\n"),
        ("~~a~~ ![b](c.png)", "a b\n"),
        ("## A #\n# B#", "A\nB#\n"),
        ("#hash and -dash and 1.5", "#hash and -dash and 1.5\n"),
    ],
)
def test_marks_are_rendered(text, seen):
    assert plain(text) == seen


def test_a_word_is_shown_as_soon_as_it_is_complete_and_a_phrase_when_its_mark_is_closed():
    out = io.StringIO()
    stream = MarkdownStream(Screen(out), lambda length: "")
    seen = []
    for piece in ("One", " two", " **th", "ree fo", "ur** ", "five"):
        stream.feed(piece)
        seen.append(SGR.sub("", out.getvalue()))
    assert seen == ["", "One", "One two", "One two", "One two three four", "One two three four"]


def test_a_mark_that_is_never_closed_holds_back_only_so_much():
    out = io.StringIO()
    stream = MarkdownStream(Screen(out), lambda length: "")
    for _ in range(200):
        stream.feed("word *and ")
    assert len(out.getvalue()) > 1500


@pytest.mark.parametrize(
    "text",
    [" " * 20_000 + "x", "x" * 20_000, "- " * 5000 + "x", "> " * 5000 + "x", "[" * 5000, "# " + " " * 5000 + "x"],
)
def test_very_long_lines_are_shown(text):
    seen = SGR.sub("", shown([(text[i : i + 50], 1) for i in range(0, len(text), 50)]))
    assert seen.split()
    if "x" in text:
        assert seen.count("x") == text.count("x")


def test_a_word_without_end_is_shown_while_it_grows():
    out = io.StringIO()
    stream = MarkdownStream(Screen(out), lambda length: "")
    for _ in range(1000):
        stream.feed("abcd")
    assert len(out.getvalue()) > 3500


def test_hypertokens_have_the_colour_of_their_length():
    seen = shown(
        [("One", 1), (" two three", 2), (" **fo", 1), ("ur**", 3), ("\n```\n", 1), ("x = ", 4), ("1", 1)],
        colours.colour_code,
    )
    assert "One \x1b[36mtwo\x1b[0m \x1b[36mthree\x1b[0m \x1b[1mfo\x1b[0m\x1b[1;32mur\x1b[0m\n" in seen
    assert "\x1b[33mx = \x1b[0m1\n" in seen


def test_code_is_coloured_by_its_language_unless_hypertokens_are():
    text = "```python\ndef f():\n    '''a\n    b'''\n```\n"
    lit = shown([(text, 1)])
    assert "\x1b[34mdef" in lit
    assert lit.count("\x1b[33m") >= 2  # both lines of the string
    assert "\x1b[34m" not in shown([(text, 1)], colours.colour_code)
    assert "\x1b[34m" not in shown([(text, 1)], coloured=False)


class Sized(io.StringIO):
    """An output whose width changes."""

    columns = 80

    def fileno(self):
        return 99


@pytest.fixture
def sized(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda handle: os.terminal_size((Sized.columns, 24)))
    yield Sized()
    Sized.columns = 80


def test_lines_are_wrapped_at_the_width_of_now(sized):
    stream = MarkdownStream(Screen(sized), lambda length: "")
    Sized.columns = 20
    stream.feed("- one two three four five six\n")
    Sized.columns = 40
    stream.feed("- one two three four five six seven eight nine ten\n")
    stream.finish()
    assert sized.getvalue().split("\n") == [
        "• one two three four",
        "  five six",
        "• one two three four five six seven",
        "  eight nine ten",
        "",
    ]


def test_wide_characters_count_twice(sized):
    Sized.columns = 20
    stream = MarkdownStream(Screen(sized), lambda length: "")
    stream.feed("日本語" * 5)
    stream.finish()
    assert sized.getvalue() == "日本語日本語日本語日\n本語日本語\n"


def test_a_terminal_that_says_it_has_no_columns_has_eighty(sized):
    Sized.columns = 0
    assert Screen(sized).columns == 80


def test_control_characters_are_pictures():
    assert replace_control_characters("\x1b[31m\x07\x00\x7f\x9b\u202e\r\n\ta\r") == "␛[31m␇␀␡\ufffd\ufffd\n\ta␍"
    assert replace_control_characters("👩‍👩‍👧 שלום e\u0301") == "👩‍👩‍👧 שלום e\u0301"


def test_typed_bytes_that_are_not_utf8_become_replacement_characters():
    typed = b"a\xff\xc3".decode("utf-8", "surrogateescape")
    assert repair_surrogates(typed) == "a\ufffd\ufffd"
    assert repair_surrogates("\udcc3\udca9 \ud800") == "é \ufffd"
