"""Full float32 precision: the variable is set before MLX is imported, and what TF32 changes is reported."""

import os
import subprocess
import sys

import pytest

from mlx_zip.cli.selftest import speed
from mlx_zip.device import TF32_VARIABLE
from support.places import TESTS

WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            print("first import of", name.partition(".")[0], "with", os.environ.get("MLX_ENABLE_TF32"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
"""


def first_import(code: str, *argv: str) -> str:
    """What the environment holds when `code` first imports MLX, in a process without the variable."""
    environment = {name: value for name, value in os.environ.items() if name not in (TF32_VARIABLE, "MLX_ZIP_DEVICE")}
    environment["PYTHONPATH"] = f"{TESTS.parent}{os.pathsep}{TESTS}"
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code, *argv], env=environment, capture_output=True, text=True, timeout=120
    )
    return (done.stdout.strip().splitlines() or [done.stderr])[-1]


def test_selftest_switches_tf32_off_before_mlx_is_imported(tmp_path):
    code = "from mlx_zip.cli import main; main(['selftest', '--out', sys.argv[1]])"
    assert first_import(code, str(tmp_path / "page.md")) == "first import of mlx with 0"


def test_the_tests_switch_tf32_off_before_mlx_is_imported():
    code = "import runpy; runpy.run_path(sys.argv[1]); import mlx.core"
    assert first_import(code, str(TESTS / "conftest.py")) == "first import of mlx with 0"


def test_the_tests_run_without_tf32():
    assert os.environ[TF32_VARIABLE] == "0"


@pytest.mark.parametrize(("default", "state"), [(2e-4, "on"), (1e-6, "off")])
def test_the_line_says_whether_tf32_is_on_by_default_and_both_errors(monkeypatch, default, state):
    monkeypatch.setattr(speed, "_matmul_error", lambda value: default if value is None else 1e-6)
    line = speed._describe_tf32()
    assert line.startswith(f"{state} by default; ")
    assert f"{default:.0e}" in line
    assert "1e-06" in line


def test_the_error_of_a_float32_product_is_measured_in_another_process(monkeypatch):
    asked = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: asked.append(k["env"].get(TF32_VARIABLE)) or real(*a, **k))
    assert 0 < speed._matmul_error("0") < speed._SURELY_TF32
    assert asked == ["0"]


def test_mlx_default_is_asked_without_the_variable(monkeypatch):
    def run(command, env, **_):
        return subprocess.CompletedProcess(command, 0, stdout="5e-4" if TF32_VARIABLE not in env else "1e-6")

    monkeypatch.setattr(subprocess, "run", run)
    assert speed._matmul_error(None) == 5e-4
