"""Kills vLLM's core while it answers; prints how the request ended, and how the next one is refused, as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

from mlx_zip.engine.interface import Failed, Submission
from mlx_zip.errors import EngineError
from support.on_vllm import answer_all, open_on_vllm
from support.serving import Watch


class Killing(Watch):
    """Receives the events of a request and kills the other processes after its third id."""

    def __call__(self, event: object) -> None:
        super().__call__(event)
        if len(self.emitted) == 3:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)


def main() -> None:
    with open_on_vllm("stories", 2) as engine:
        prompt = engine.tokenizer.encode("Once upon a time")
        answer_all(engine, [Submission(prompt, 2)])
        watch = Killing()
        engine.submit(Submission(prompt, 300), watch)
        watch.wait()
        failed = isinstance(watch.end, Failed) and type(watch.end.error).__name__
        try:
            engine.submit(Submission(prompt, 2), Watch())
        except EngineError as error:
            print(json.dumps({"failed": failed, "ids": len(watch.ids), "then": type(error).__name__}))


if __name__ == "__main__":
    main()
