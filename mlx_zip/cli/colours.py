"""Colours hypertokens on a terminal by their number of base tokens."""

from __future__ import annotations

import os
from typing import TextIO

COLOURS, LONGER = {2: "36", 3: "32", 4: "33"}, "35"  # by base tokens: cyan, green, yellow; magenta for longer ones


def should_colour(choice: str, out: TextIO) -> bool:
    """Returns whether to colour what is written to `out`. choice: the value of --color."""
    return choice == "always" or (choice == "auto" and out.isatty() and not os.environ.get("NO_COLOR"))


def colour_code(length: int) -> str:
    """Returns the SGR code for the text of an id of `length` base tokens, "" for one base token."""
    return COLOURS.get(length, LONGER) if length > 1 else ""


def colour_text(text: str, length: int) -> str:
    """Returns text in the colour of an id of `length` base tokens; newlines stay uncoloured."""
    if not text or not (colour := colour_code(length)):
        return text
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def legend() -> str:
    """Returns a line that explains the colours, each in its own colour."""
    named = [f"\x1b[{colour}m{n}\x1b[0m" for n, colour in COLOURS.items()]
    named.append(f"\x1b[{LONGER}m{max(COLOURS) + 1} or more\x1b[0m")
    return f"coloured text took one step for {', '.join(named)} base tokens"
