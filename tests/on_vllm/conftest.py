"""What vLLM needs to run here: on a CPU, Triton's kernels are interpreted, and a stub stands for a compiler."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "stub"
HAS_VLLM = find_spec("vllm") is not None

if HAS_VLLM and not Path("/dev/nvidiactl").exists():  # before anything imports vLLM
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers share one node
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that tests see the worker
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.path.insert(0, str(STUB))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if STUB in (collection_path, *collection_path.parents) else None


@pytest.fixture(autouse=True, scope="session")
def interpreted_sampler():
    """Has vLLM cut top-k and top-p by PyTorch: Triton's interpreter cannot run that one kernel."""
    if HAS_VLLM and os.environ.get("TRITON_INTERPRET"):
        from vllm.v1.sample.ops import topk_topp_sampler

        topk_topp_sampler.HAS_TRITON = False
