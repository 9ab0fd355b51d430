"""The guides: their Python runs, and their memory table follows from the assumptions that stand below it."""

import re

import pytest

from support.places import DOCS

USE = (DOCS / "guides/use.md").read_text(encoding="utf-8")
SHAPES = {  # billions of parameters, width, layers, width of all KV heads
    "Llama 3.2 1B": (1.236, 2048, 16, 8 * 64),
    "Llama 3.2 3B": (3.213, 3072, 28, 8 * 128),
    "Phi-3.5-mini (3.8B)": (3.821, 3072, 32, 32 * 96),
    "Llama 3.1 8B": (8.030, 4096, 32, 8 * 128),
}


@pytest.mark.slow
def test_the_chat_of_the_guide_answers_both_requests(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", USE, re.DOTALL)
    exec(compile(code, "use.md", "exec"), {})
    rates = re.findall(r"\[(\d\.\d\d) base tokens per step\]", capsys.readouterr().out)
    assert len(rates) == 2
    assert min(map(float, rates)) > 1


@pytest.mark.parametrize("name", SHAPES)
def test_the_memory_table_follows_from_its_assumptions(name):
    billions, width, layers, kv_width = SHAPES[name]
    weights = [billions * bits / 8 for bits in (4.5, 8.5, 16)]
    encoders = [48 * width**2 * bits / 8e9 for bits in (8.5, 8.5, 16)]
    rows = 4096 * width * 2 * 2 / 1e9
    cache = 2 * layers * kv_width * 2 * 1000 / 1e9
    totals = [a + b + rows + 4 * cache + 0.5 for a, b in zip(weights, encoders, strict=True)]
    both = f"{encoders[0]:.1f} / {encoders[2]:.1f}"
    cells = [*(f"{one:.1f}" for one in weights), both, f"{cache:.3f}", *(f"{total:.1f}" for total in totals)]
    assert f"| {name} | {' | '.join(cells)} |" in USE
