"""Prints the ids of three requests to `stories` as JSON. Argument: vLLM's arguments as JSON."""

from __future__ import annotations

import json
import sys

from support.on_vllm import answer_three


def main() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
    print(json.dumps(answer_three(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
