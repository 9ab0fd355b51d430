"""`make picture`: draws an answer with its hypertokens in colour, as an SVG file.

The bundled model answers its default request, greedily. Each box in the picture is one step of the model. Its colour
shows the number of base tokens that the step produced, as in `mlx_zip generate --color always`. The file depends only
on the emitted ids, so the same model and request give the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from mlx_zip.arguments import Parser
from mlx_zip.engine.mlx.generate import load, stream_generate
from mlx_zip.files import atomic_file
from mlx_zip.named import DEFAULT, MAX_TOKENS, PROMPT

COLUMNS = 86  # characters per line
CELL, LINE, MARGIN = 9, 24, 24  # width of a character, height of a line, border; in pixels
BACKGROUND, TEXT, QUIET = "#0d1117", "#e6edf3", "#8b949e"
COLOURS = {1: "#21262d", 2: "#0e5a6b", 3: "#1c6b35", 4: "#7a5d00", 5: "#7d2f7d"}  # base tokens (5: or more) -> colour
PURPOSE = "Draws an answer with its hypertokens in colour, as an SVG file."
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Step(NamedTuple):
    """One emitted id: its text and how many base tokens it stands for."""

    text: str
    base_tokens: int


class Cell(NamedTuple):
    """One character of the text and the index of the step that wrote it."""

    character: str
    step: int


def main() -> int:
    """Writes an SVG picture of a model's answer, a box for each step; returns the exit status."""
    parser = Parser(prog="python -m mlx_zip.apps.picture", description=PURPOSE)
    parser.add_argument("--model", default=DEFAULT, help=f"model folder, hub id or bundled model (default: {DEFAULT})")
    parser.add_argument("--prompt", default=PROMPT, help=f"the request (default: {PROMPT!r})")
    parser.add_argument("--out", default="docs/pictures/answer.svg", help="SVG file (default: %(default)s)")
    args = parser.parse_args()
    picture = draw_svg(args.prompt, generate_steps(args.model, args.prompt))
    with atomic_file(Path(args.out)) as partial:
        partial.write_text(picture, encoding="utf-8")
    return 0


def generate_steps(model_name: str, prompt: str) -> list[Step]:
    """Returns a model's greedy answer to a request, one `Step` per generated id."""
    model, tokenizer = load(model_name)
    request = [{"role": "user", "content": prompt}]
    parts = stream_generate(model, tokenizer, request, max_tokens=MAX_TOKENS)
    return [Step(part.text, len(part.base_ids)) for part in parts]


def draw_svg(prompt: str, answer: Sequence[Step]) -> str:
    """Returns an SVG document: the request, the answer with a box per step, a legend and the count of steps."""
    lines = wrap_cells(answer)
    width, top = COLUMNS * CELL + 2 * MARGIN, MARGIN + 2 * LINE
    bottom = top + len(lines) * LINE
    body = [_draw_text(MARGIN, MARGIN + LINE // 2, f"> {prompt}", QUIET)]
    for number, line in enumerate(lines):
        body += _draw_line(line, answer, top + number * LINE)
    body += _draw_legend(answer, bottom + LINE)
    height = bottom + 2 * LINE + MARGIN
    return "\n".join([_svg_opening(width, height, _summary_text(answer)), *body, "</svg>", ""])


def wrap_cells(answer: Sequence[Step]) -> list[list[Cell]]:
    """Returns the answer in lines of at most `COLUMNS` characters, broken at spaces; longer words are split."""
    lines: list[list[Cell]] = [[]]
    cells = (Cell(character, step) for step, (text, _) in enumerate(answer) for character in text)
    for word in _group_words(cells):
        if word[0].character == "\n":
            lines.append([])
        elif len(lines[-1]) + len(word) <= COLUMNS:
            lines[-1] += word
        else:
            word = word[1:] if word[0].character == " " else word
            lines += [word[at : at + COLUMNS] for at in range(0, len(word), COLUMNS)]
    return lines


def _group_words(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups characters that stay on one line: a word with the space before it, or a newline alone."""
    words: list[list[Cell]] = []
    for cell in cells:
        if not words or cell.character in " \n" or words[-1][0].character == "\n":
            words.append([])
        words[-1].append(cell)
    return words


def _draw_line(line: Sequence[Cell], answer: Sequence[Step], y: int) -> list[str]:
    """Returns the SVG elements of one line: a box and a text for each run of characters of the same step.

    y: position of the text's baseline in pixels.
    """
    drawn, x = [], MARGIN
    for step, run in groupby(line, key=lambda cell: cell.step):
        text = "".join(cell.character for cell in run)
        drawn.append(_draw_box(x, y, len(text) * CELL, answer[step].base_tokens))
        drawn.append(_draw_text(x, y, text, TEXT))
        x += len(text) * CELL
    return drawn


def _draw_legend(answer: Sequence[Step], y: int) -> list[str]:
    drawn, x = [], MARGIN
    for tokens in sorted({min(max(step.base_tokens, 1), max(COLOURS)) for step in answer}):
        label = f" {tokens}{' or more' if tokens == max(COLOURS) else ''} "
        drawn += [_draw_box(x, y, len(label) * CELL, tokens), _draw_text(x, y, label, TEXT)]
        x += (len(label) + 1) * CELL
    return [
        *drawn,
        _draw_text(x, y, "base tokens in one step", QUIET),
        _draw_text(MARGIN, y + LINE, _summary_text(answer), QUIET),
    ]


def _summary_text(answer: Sequence[Step]) -> str:
    tokens = sum(step.base_tokens for step in answer)
    return f"{tokens} base tokens in {len(answer)} steps: {tokens / len(answer):.2f} per step"


def _svg_opening(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}" font-size="15" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="10" fill="{BACKGROUND}"/>'
    )


def _draw_box(x: int, y: int, width: int, base_tokens: int) -> str:
    colour = COLOURS[min(max(base_tokens, 1), max(COLOURS))]
    return f'<rect x="{x + 0.5}" y="{y - 16}" width="{width - 1}" height="21" rx="4" fill="{colour}"/>'


def _draw_text(x: int, y: int, text: str, colour: str) -> str:
    """Returns an SVG text element whose characters are `CELL` pixels wide in any font."""
    width = len(text) * CELL
    attributes = f'x="{x}" y="{y}" fill="{colour}" textLength="{width}" lengthAdjust="spacingAndGlyphs"'
    return f'<text {attributes} xml:space="preserve">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
