"""What a pass over several ids costs on some chips, as published."""

from __future__ import annotations

CHIPS = {  # number of ids in a pass -> published cost, relative to a pass over one id; if unknown, 16 cost twice 8
    "M4 Pro, 4 bit, cheapest": {1: 1.0, 2: 1.03, 4: 1.14, 8: 1.73, 16: 3.46},
    "M4 Pro, 4 bit, dearest": {1: 1.0, 2: 1.25, 4: 1.57, 8: 2.69, 16: 5.38},
    "M3 Ultra, 4 bit": {1: 1.0, 2: 1.83, 4: 3.26, 8: 6.12, 16: 12.24},
    "M3 Ultra, bf16": {1: 1.0, 2: 2.0, 4: 2.0, 8: 2.0, 16: 2.0},
    "M1 Ultra": {1: 1.0, **{ids: (34 + 10.9 * ids) / 37 for ids in (2, 4, 8, 16)}},
}
