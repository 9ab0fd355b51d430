"""The fuzz targets compile against the library as it is; native/fuzz/run.sh runs them."""

import shutil
import subprocess

import pytest

from support.places import REPO

FUZZ = REPO / "native" / "fuzz"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.c"))
COMPILER = shutil.which("cc") or shutil.which("clang")


def test_run_sh_runs_every_target():
    usual = next(line for line in (FUZZ / "run.sh").read_text().splitlines() if "|| set --" in line)
    assert sorted(usual.partition("set --")[2].split()) == TARGETS


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_compiles(target):
    assert COMPILER is not None
    command = [COMPILER, "-std=c11", "-Wall", "-Wextra", "-fsyntax-only", str(FUZZ / f"fuzz_{target}.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
