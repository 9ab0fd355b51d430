"""The picture of an answer: every character is drawn, in the colour of its step."""

import re
from html import unescape

import pytest

from mlx_zip.apps import picture
from mlx_zip.apps.picture import COLUMNS, Step, draw_svg, wrap_cells

ANSWER = [Step("Once upon a time", 4), Step(",", 1), Step(" there was", 2), Step(" a <b>\nand", 3), Step("", 1)]


def drawn(text: str) -> list[str]:
    """The pieces of text in a picture, without request, legend and summary."""
    pieces = [unescape(piece) for piece in re.findall(r"<text [^>]*>([^<]*)</text>", text)]
    return pieces[1 : pieces.index(" 1 ")]


def test_every_character_of_the_answer_is_drawn_in_order():
    assert "".join(drawn(draw_svg("Tell me.", ANSWER))) == "Once upon a time, there was a <b>and"


def test_a_line_has_no_more_characters_than_there_are_columns():
    lines = wrap_cells([Step(" word" * 40, 2), Step("x" * (2 * COLUMNS), 5)])
    assert max(map(len, lines)) == COLUMNS


@pytest.mark.parametrize("answer", [[Step("a", 1), Step(" b c", 2)], [Step("a", 1), Step(" b c", 9)]])
def test_a_box_has_the_colour_of_its_number_of_base_tokens(answer):
    wanted = [picture.COLOURS[1], picture.COLOURS[min(answer[1].base_tokens, 5)]]
    assert re.findall(r'height="21" rx="4" fill="(#\w+)"', draw_svg("?", answer))[:2] == wanted


def test_the_summary_counts_base_tokens_and_steps():
    assert "11 base tokens in 5 steps: 2.20 per step" in draw_svg("Tell me.", ANSWER)
