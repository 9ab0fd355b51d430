"""Makes text harmless for a terminal: control characters are shown and never executed."""

from __future__ import annotations

import re

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_UNSEEN = (
    *range(0x80, 0xA0),  # a second set of control characters; some terminals take 0x9B for ESC [
    *range(0x2028, 0x202F),  # line separators, and marks that turn the direction of the text around them
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of surrogate pairs, which no terminal can be sent
)
_HALVES = re.compile("[\ud800-\udfff]")
_NO_BYTES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_TABLE = {**_PICTURES, **dict.fromkeys(_UNSEEN, 0xFFFD)}


def harmless(text: str) -> str:
    """Returns the text with control characters replaced by pictures of them, such as ␛ for escape.

    Newlines and tabs stay. A line that ends in a carriage return and a newline ends in a newline alone. Characters
    without a picture become the replacement character.
    """
    if text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_TABLE)


def valid(text: str) -> str:
    """Returns typed text as valid Unicode: bytes that were not UTF-8 become the replacement character.

    A terminal's reader keeps such bytes as halves of surrogate pairs. Bytes that form a character together become it.
    """
    if not _HALVES.search(text):
        return text
    return _NO_BYTES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
