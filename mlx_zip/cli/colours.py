"""Colours hypertokens on a terminal by their number of base tokens."""

from __future__ import annotations

import os
from typing import TextIO

COLOURS, LONGER = {2: "36", 3: "32", 4: "33"}, "35"  # SGR codes by length: cyan, green, yellow; magenta


def should_colour(choice: str, out: TextIO) -> bool:
    """Returns whether to colour text written to `out`. choice: value of --color: always, auto or never."""
    return choice == "always" or (choice == "auto" and out.isatty() and not os.environ.get("NO_COLOR"))


def colour_code(length: int) -> str:
    """Returns the SGR code for the text of an id that stands for `length` base tokens, "" if `length` is 1."""
    return COLOURS.get(length, LONGER) if length > 1 else ""


def colour_text(text: str, length: int) -> str:
    """Returns text in the colour of an id that stands for `length` base tokens; newlines stay uncoloured."""
    if not text or not (colour := colour_code(length)):
        return text
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def colour_legend() -> str:
    """Returns a line that explains the colours, each in its own colour."""
    named = [f"\x1b[{colour}m{n}\x1b[0m" for n, colour in COLOURS.items()]
    named.append(f"\x1b[{LONGER}m{max(COLOURS) + 1} or more\x1b[0m")
    return f"coloured text took one step for {', '.join(named)} base tokens"
