"""The kernels of a step are compiled for an H100 without one: types and shapes fit, and registers are enough."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_of_a_step_are_compiled_without_spilled_registers(tmp_path):
    program = Path(__file__).with_name("compile_for_gpu.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program, "90"], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split()[:6] for line in done.stdout.splitlines()]
    names = {f"_{name}_kernel" for name in ("head", "matvec", "attend_part", "combine_parts", "join_head_blocks")}
    assert names <= {kernel[1] for kernel in kernels}
    for name, count in product(("ROWS", "VECTORS"), (1, 16)):
        assert f",{name}={count}," in done.stdout
    for _, name, _, _, local, shared in kernels:
        assert int(local) <= 32, f"{name} spills {local} bytes"  # the sine of large angles takes 32
        assert int(shared) <= 99 * 1024, f"{name} needs {shared} bytes of shared memory"
    counts = [line.split()[8:10] for line in done.stdout.splitlines() if line.split()[8] != "-"]
    most = {"BITS=0": 9, "BITS=4": 9, "BITS=8": 12}  # instructions per weight, the prologue's among them
    assert {constants.split(",")[0] for _, constants in counts} == most.keys()
    for count, constants in counts:
        assert 3 < float(count) < most[constants.split(",")[0]], constants
