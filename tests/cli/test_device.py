"""MLX_ZIP_DEVICE: the device that a command and the tests compute on."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_zip.cli import main
from mlx_zip.device import DEVICE_VARIABLE, set_device_from_environment
from mlx_zip.errors import ConfigError
from support.places import TESTS

WATCH = """
import os, sys
import mlx.core as mx

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx_lm":
            print("mlx_lm", flush=True)
            os._exit(0)  # what is imported with it takes seconds

sys.meta_path.insert(0, Watch())
mx.set_default_device = lambda device: print(device, flush=True)
"""


def order(code: str, *argv: str) -> list[str]:
    """What `code` does with MLX_ZIP_DEVICE=cpu until mlx_lm is imported: the devices it chooses, and that import."""
    environment = os.environ | {DEVICE_VARIABLE: "cpu", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code, *argv], env=environment, capture_output=True, text=True, timeout=120
    )
    return [line for line in done.stdout.splitlines() if line.startswith(("mlx_lm", "Device"))]


@pytest.mark.slow
def test_a_command_chooses_the_device_before_mlx_lm_is_imported():
    words = ["generate", "--engine", "mlx", "--model", "/nowhere/at/all", "--prompt", "x"]
    code = f"from mlx_zip.cli import main; main({words})"
    assert order(code)[:2] == ["Device(cpu, 0)", "mlx_lm"]


@pytest.mark.slow
def test_the_tests_choose_the_device_before_mlx_lm_is_imported():
    code = "import runpy; runpy.run_path(sys.argv[1]); import mlx_lm"
    assert order(code, str(TESTS / "conftest.py")) == ["Device(cpu, 0)", "mlx_lm"]


@pytest.fixture
def device():
    before = mx.default_device()
    yield
    mx.set_default_device(before)


@pytest.mark.usefixtures("device")
def test_without_the_variable_the_device_stays(monkeypatch):
    before = mx.default_device()
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    set_device_from_environment()
    assert mx.default_device() == before


@pytest.mark.usefixtures("device")
def test_the_cpu_is_everywhere(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    set_device_from_environment()
    assert mx.default_device() == mx.Device(mx.cpu)


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    assert main(["rows", "show", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: MLX_ZIP_DEVICE=gpu: MLX has no such device here\n"


def test_an_unknown_device_is_refused_with_those_that_are_known(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "npu")
    with pytest.raises(ConfigError, match="MLX_ZIP_DEVICE=npu: it is one of cpu, gpu"):
        set_device_from_environment()
