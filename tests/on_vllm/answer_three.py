"""Prints the ids of three requests to `stories` as JSON. Argument: vLLM's arguments as JSON."""

from __future__ import annotations

import json
import sys

from mlx_zip.engine.interface import Submission
from support.on_vllm import answer_all, open_on_vllm

TEXTS = ("Once upon a time there was a little girl. The little girl", "One day, a big dog", "Tim and Tim and Tim and")


def main() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
    with open_on_vllm("stories", 4, json.loads(sys.argv[1])) as engine:
        asked = [Submission(engine.tokenizer.encode(text), 16) for text in TEXTS]
        print(json.dumps([watch.ids for watch in answer_all(engine, asked)]))


if __name__ == "__main__":
    main()
