"""`mlx_zip chat` in a process of its own, with an engine that replays an answer: python chat_child.py SCRIPT FLAGS...

SCRIPT: JSON of the fields of `Script`, or "stories" for the bundled model.
"""

from __future__ import annotations

import fcntl
import json
import sys
import termios
from pathlib import Path


def main() -> int:
    sys.path[:0] = [str(Path(__file__).parents[1])]
    script, flags = sys.argv[1], sys.argv[2:]
    if sys.stdin is not None and sys.stdin.isatty():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal for this process
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers imports it if it can, which takes seconds
    from mlx_zip import cli

    if script != "stories":
        import mlx_zip.cli.serving.opening as opening
        from support.fake_engine import FakeEngine, Script

        engine = FakeEngine(Script(**json.loads(script)))
        opening.open_chosen_engine = lambda group, name, **options: engine
    return cli.main(["chat", *flags])


if __name__ == "__main__":
    sys.exit(main())
