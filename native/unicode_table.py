"""Prints unicode_table.h: the letters, numbers and white space of Unicode, as the `tokenizers` library sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tokenizers import Regex, pre_tokenizers

CLASSES = {"LETTER": r"\p{L}", "NUMBER": r"\p{N}", "SPACE": r"\s"}
PER_LINE = 4


def ranges(pattern: str) -> Iterator[tuple[int, int]]:
    """Yields the first and last code point of each range that the pattern matches; surrogates are left out."""
    points = [point for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    text = "".join(map(chr, points))
    others = pre_tokenizers.Split(Regex(f"[^{pattern}]+"), "removed")
    for _, (start, end) in others.pre_tokenize_str(text):
        cut = start  # the surrogates split a range in two
        for i in range(start, end):
            if i + 1 == end or points[i + 1] != points[i] + 1:
                yield points[cut], points[i]
                cut = i + 1


def main() -> None:
    """Prints the header."""
    found = sorted((*span, name) for name, pattern in CLASSES.items() for span in ranges(pattern))
    cells = [f"{{0x{first:X}, 0x{last:X}, {name}}}" for first, last, name in found if last >= 0x80]
    print("/* Internal: letters, numbers and white space beyond ASCII, in rising order. By unicode_table.py. */")
    print("static const struct {\n  uint32_t first, last, kind;\n} RANGES[] = {")
    for i in range(0, len(cells), PER_LINE):
        print(f"    {', '.join(cells[i : i + PER_LINE])},")
    print("};")


if __name__ == "__main__":
    main()
