"""Builds mlx_zip.app on a Mac, or checks on any machine that everything in the app can be installed.

docs/guides/mac_app.md describes the app. This script needs only Python, pip and, to build, Briefcase.

Briefcase installs wheels only, and pywebview needs `proxy_tools`, which has no wheel, so that wheel is built here.
(Without pywebview, the app would need code of its own for its window, which could be tested only on a Mac.) pip chooses
MLX's wheel by the oldest macOS that the app supports, so apps for macOS 14 and for macOS 26 are separate builds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO, WHEELS = HERE.parents[1], HERE / "wheels"
SYSTEMS = ("14.0", "26.0")  # choices for the oldest macOS of an app: MLX has separate wheels for each
LOCAL = ("proxy_tools==0.1.0",)  # required by pywebview; the registry has only its source, plain Python
# A program that runs pip with the environment markers of a Mac; argv[1] is the version of the Mac's Python. pip
# evaluates markers for the machine it runs on, so on Linux it would leave out requirements for macOS.
_PIP_OF_A_MAC = """
import sys
from pip._internal.cli.main import main
from pip._vendor.packaging import markers
here = markers.default_environment
python = {"python_version": sys.argv[1], "python_full_version": sys.argv[1] + ".0"}
mac = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
markers.default_environment = lambda: {**here(), **mac, **python}
sys.exit(main(sys.argv[2:]))
"""


def main(argv: list[str] | None = None) -> int:
    """Builds the app, or checks its requirements; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds mlx_zip.app with Briefcase (docs/guides/mac_app.md).")
    parser.add_argument(
        "--macos", choices=SYSTEMS, help="oldest macOS that the app starts on (default: the newest that this Mac has)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build nothing: ask the package registry for every file that Briefcase would install, for --macos or all",
    )
    parser.add_argument(
        "--python", metavar="X.Y", default=_this_python(), help="with --check: Python of the app (default: this one)"
    )
    parser.add_argument("--record", metavar="FILE", type=Path, help="with --check: write what was found to a JSON file")
    args = parser.parse_args(argv)
    if args.check:
        return _check_requirements([args.macos] if args.macos else list(SYSTEMS), args.python, args.record)
    if sys.platform != "darwin":
        parser.error("an app for macOS is built on a Mac; --check works everywhere")
    return _build(args.macos or newest_usable_system(platform.mac_ver()[0]))


def newest_usable_system(system: str) -> str:
    """Returns the newest of `SYSTEMS` up to macOS version `system`. Raises `SystemExit` if all of `SYSTEMS` are newer.

    A Python built for an older macOS reports macOS 26 as version 16 (python/cpython#135675), so 16 counts as 26.
    """
    found = _version(system)
    usable = [one for one in SYSTEMS if _version(one) <= ((26, *found[1:]) if found[0] == 16 else found)]
    if not usable:
        raise SystemExit(f"this Mac has macOS {system}, and the app needs {SYSTEMS[0]} or newer")
    return max(usable, key=_version)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _this_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


# ---- building


def _build(macos: str) -> int:
    """Builds the wheels that the registry lacks, then the app; deletes earlier builds first."""
    for old in (WHEELS, HERE / "build"):
        shutil.rmtree(old, ignore_errors=True)
    make_wheels(macos, WHEELS, str(REPO), *LOCAL)
    return subprocess.run(briefcase_command(macos), cwd=HERE).returncode


def briefcase_command(macos: str) -> list[str]:
    """Returns the command that builds the app for macOS `macos` and newer."""
    return [sys.executable, "-m", "briefcase", "build", "macOS", "app", "-C", f'min_os_version="{macos}"']


def make_wheels(macos: str, folder: Path, *sources: str) -> None:
    """Builds the sources' wheels into `folder`; on a Mac, for version `macos` even if Python is for a newer version."""
    found = {"_PYTHON_HOST_PLATFORM": f"macosx-{macos}-arm64", "ARCHFLAGS": "-arch arm64"}
    wanted = {"MACOSX_DEPLOYMENT_TARGET": macos, **found} if sys.platform == "darwin" else {}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w"]
    subprocess.run([*command, str(folder), *sources], check=True, env={**os.environ, **wanted})


# ---- checking


def _check_requirements(systems: list[str], python: str, record: Path | None) -> int:
    """Resolves the app's requirements for each macOS and prints the wheels; returns 1 if one cannot be resolved."""
    answers, failed = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        make_wheels(SYSTEMS[0], Path(folder), *LOCAL)
        for macos in systems:
            write_our_wheel(Path(folder), macos)
            try:
                answers[macos] = files = resolve_wheels(macos, python, ["--find-links", folder])
            except subprocess.CalledProcessError as error:
                print(f"macOS {macos}, Python {python}: {error.stderr.strip()}", file=sys.stderr)
                failed = 1
                continue
            compiled = sorted(name for name in files if not name.endswith("-any.whl"))
            print(f"macOS {macos}, Python {python}: {len(files)} wheels, {len(compiled)} of them with compiled code:")
            print("".join(f"  {name}\n" for name in compiled), end="")
    if record is not None and not failed:
        record.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return failed


def resolve_wheels(macos: str, python: str, sources: Iterable[str]) -> dict[str, list[str]]:
    """Returns the wheels that pip chooses for the app: file name -> the wheel's requirements, without those of extras.

    python: a version such as "3.13". sources: pip's options that say where to find wheels. Raises `CalledProcessError`
    if pip fails.
    """
    command = [sys.executable, "-c", _PIP_OF_A_MAC, python, "install", "--dry-run", "--quiet", "--report", "-"]
    with tempfile.TemporaryDirectory() as target:
        options = [f"--target={target}", *pip_options(macos), "--python-version", python, *sources, *app_requirements()]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    found = {}
    for one in json.loads(done.stdout)["install"]:
        name = one["download_info"]["url"].rpartition("/")[2]
        found[name] = [line for line in one["metadata"].get("requires_dist", ()) if "extra ==" not in line]
    return found


def pip_options(macos: str) -> list[str]:
    """Returns the options that Briefcase 0.4.7 passes to pip to choose wheels for a Mac with Apple silicon."""
    only = ["--platform", _platform_tag(macos), "--only-binary", ":all:"]
    return ["--disable-pip-version-check", "--no-user", "--upgrade", *only]


def _platform_tag(macos: str) -> str:
    return f"macosx_{macos.replace('.', '_')}_arm64"


def app_requirements() -> list[str]:
    """Returns the requirements of the app in Briefcase's settings."""
    settings = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["tool"]["briefcase"]["app"]["mlx_zip_app"]["macOS"]["requires"]


def write_our_wheel(folder: Path, macos: str) -> None:
    """Writes an empty wheel with mlx_zip's name, version and requirements."""
    project: Any = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"Requires-Dist: {one}" for one in project["dependencies"]]
    for extra, needed in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for one in needed:
            name, _, marker = (part.strip() for part in one.partition(";"))
            condition = f"({marker}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {name}; {condition}")
    write_wheel(folder, f"mlx_zip-{project['version']}-cp311-abi3-{_platform_tag(macos)}", lines)


def write_wheel(folder: Path, name: str, metadata: Iterable[str]) -> None:
    """Writes an empty wheel that pip can choose. name: file name without ".whl". metadata: lines to add to METADATA."""
    project, version, tag = name.split("-", 2)
    about = [f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}", *metadata]
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
        where = f"{project}-{version}.dist-info"
        wheel.writestr(f"{where}/METADATA", "\n".join([*about, ""]))
        wheel.writestr(f"{where}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{where}/RECORD", "")


if __name__ == "__main__":
    sys.exit(main())
