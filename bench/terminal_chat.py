"""Times what `mlx_zip chat` does with each step of an answer: ids to text, Markdown, and writing to a terminal.

No model runs: an answer is replayed, each step of which is an id of two base tokens. The terminal is a pseudo-terminal
that another thread empties. Times are in microseconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

from mlx_zip.arguments import check_at_least
from mlx_zip.bundled import bundled_model
from mlx_zip.engine import Emitted
from mlx_zip.text.tokenizers import load_tokenizer

from .recording import load_before, surroundings

STORY = (
    "Once upon a time there was a boy who had a small boat. Every day he went to the river, and he looked at the big "
    "ships. One day the wind was strong, and his boat went away. He was sad, but a duck brought it back to him.\n\n"
)
MARKDOWN = """## A plan with **parts**

A line with *words* in `code`, a [link](https://example.org/page) and a name such as snake_case_name.

1. The first item is long enough that a terminal of eighty columns has to wrap it somewhere.
2. The second one has **bold words in it**.

```python
def area(width: float, height: float) -> float:
    \"\"\"Returns the area.\"\"\"
    return width * height
```

| shape | area |
| --- | --- |
| square | 4 |
| circle | 3.14 |

"""
TEXTS = {"story": STORY, "markdown": MARKDOWN}
BASE_TOKENS_PER_STEP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench chat`."""
    parser.add_argument("--steps", type=int, default=2000, help="number of steps of an answer (default: 2000)")
    parser.add_argument("--trials", type=int, default=5, help="number of timed answers per measurement (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per text and way of showing it. Raises `MlxZipError` for flags out of range."""
    check_at_least(args, 1, "steps", "trials")
    load_before()
    tokenizer = load_tokenizer(bundled_model("stories"))
    for name, text in TEXTS.items():
        events = _events(tokenizer, text, args.steps)
        for shown in ("plain", "markdown", "markdown and colours"):
            _answer(tokenizer, events, shown)  # warm-up
            trials = [_answer(tokenizer, events, shown) for _ in range(args.trials)]
            setting = {"text": name, "shown": shown, "steps": args.steps, "trials": args.trials}
            print(json.dumps({"bench": "chat", **_figures(trials), "setting": setting, **surroundings()}), flush=True)
    return 0


def _events(tokenizer: Any, text: str, steps: int) -> list[Emitted]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids * (steps * BASE_TOKENS_PER_STEP // len(ids) + 1)
    return [Emitted(i, tuple(ids[2 * i : 2 * i + BASE_TOKENS_PER_STEP])) for i in range(steps)]


def _answer(tokenizer: Any, events: Sequence[Emitted], shown: str) -> list[float]:
    """Shows an answer; returns the microseconds of each step."""
    answering = import_module("mlx_zip.cli.chat.answer").Answering
    with _terminal() as out:
        view = _view(shown, out)
        answer, times = answering(tokenizer, view.feed), []
        for event in events:
            began = time.perf_counter_ns()
            answer.take(event)
            times.append((time.perf_counter_ns() - began) / 1000)
        view.finish()
    return times


def _view(shown: str, out: TextIO) -> Any:
    if shown == "plain":
        return import_module("mlx_zip.cli.chat.front").PlainView(out, True)
    screen = import_module("mlx_zip.cli.chat.screen").Screen(out)
    tint = import_module("mlx_zip.cli.colours").code if shown.endswith("colours") else lambda length: ""
    return import_module("mlx_zip.cli.chat.markdown").MarkdownStream(screen, tint)


@contextmanager
def _terminal() -> Iterator[TextIO]:
    master, slave = pty.openpty()
    reader = threading.Thread(target=_empty, args=(master,), daemon=True)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as out:
        yield out
    reader.join()
    os.close(master)


def _empty(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:  # Linux says so when the other end is closed
        return


def _figures(trials: Sequence[Sequence[float]]) -> dict[str, Any]:
    ordered = [sorted(trial) for trial in trials]
    ranks = {"median": 0.5, "p99": 0.99, "longest": 1.0}
    at = {name: [trial[int(rank * (len(trial) - 1))] for trial in ordered] for name, rank in ranks.items()}
    all_of = {"mean": [statistics.fmean(trial) for trial in trials], **at}
    return {"unit": "us per step", **{name: round(statistics.median(values), 1) for name, values in all_of.items()}}
