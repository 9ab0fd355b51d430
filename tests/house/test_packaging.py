"""sdist and wheel, built offline from a copy of the tree and used outside it."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import mlx_zip
from support.places import REPO

LEFT_OUT = [
    ".git",
    ".venv*",
    ".hypothesis",
    "build",
    "dist",
    "bin",
    "corpus",
    "*.egg-info",
    ".*_cache",
    "__pycache__",
    "*.so",
    "*.o",
    "_native.c",
]
COMPILED = ("mlx_zip/codec/_native.abi3.so", "mlx_zip/codec/_native.c", "native/params.o")  # made by earlier builds


NOT_INSTALLED = ("recipes", "papers", "tests", "native")  # folders of a checkout that no wheel may hold


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a command that must succeed and returns its stdout; all output is in the failure message."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path, **environment: str) -> Path:
    """Builds an sdist or a wheel of a source folder with what is installed here, and returns the file."""
    run(
        sys.executable,
        "-c",
        f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})",
        cwd=source,
        **environment,
    )
    (file,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> str:
    """The C compiler with optimisation off, which halves the time of these tests."""
    script = tmp_path_factory.mktemp("compiler") / "cc"
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CC") or "cc"} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return Path(copytree(REPO, tmp_path_factory.mktemp("tree") / "source", ignore=ignore_patterns(*LEFT_OUT)))


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    for name in COMPILED:
        (tree / name).touch()
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, compiler, tmp_path_factory) -> Path:
    """The wheel that is built from the unpacked sdist."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"), CC=compiler)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment that has the wheel, and the running environment's packages as a plain path.

    The .pth files in that path have no effect here, so an editable install of mlx_zip cannot be imported by mistake.
    """
    home = tmp_path_factory.mktemp("clean") / "env"
    venv.create(home)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q"]
    run(*pip, "--no-index", "--no-deps", wheel, cwd=home)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (Path(packages) / "lent.pth").write_text("\n".join(lent) + "\n")
    return python


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def files(pattern: str) -> set[str]:
    return {str(path.relative_to(REPO)) for path in REPO.glob(pattern)}


@pytest.mark.slow
def test_the_sdist_carries_all_that_the_build_and_the_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = files("native/*.[ch]") | files("bench/papers/**/*.py") | files("recipes/**/*.py")
    tests = files("tests/**/*.py") | files("tests/golden/**/*.json") | files("bench/**/*.jsonl") | files("docs/**/*.md")
    top = {"setup.py", "native/build.py", "LICENSE", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert (sources | tests | top) - names == set()


@pytest.mark.slow
def test_the_sdist_carries_nothing_that_was_compiled(sdist):
    with tarfile.open(sdist) as archive:
        assert [name for name in archive.getnames() if name.endswith(COMPILED)] == []


@pytest.mark.slow
def test_a_wheel_from_the_sdist_has_the_same_files_as_one_from_the_tree(tree, wheel, compiler, tmp_path):
    assert contents(build("wheel", tree, tmp_path, CC=compiler)) == contents(wheel)


@pytest.mark.slow
def test_the_wheel_installs_one_package(wheel):
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert tops == {"mlx_zip", f"mlx_zip-{mlx_zip.__version__}.dist-info"}


@pytest.mark.slow
def test_what_repeats_papers_and_makes_the_bundled_models_stays_out_of_the_wheel(wheel):
    folders = {folder for name in contents(wheel) for folder in Path(name).parts[:-1]}
    assert folders & set(NOT_INSTALLED) == set()


@pytest.mark.slow
def test_one_wheel_serves_every_supported_python(wheel):
    assert re.fullmatch(rf"mlx_zip-{re.escape(mlx_zip.__version__)}-cp311-abi3-\w+\.whl", wheel.name)


@pytest.mark.slow
def test_the_wheel_is_typed_and_carries_the_golden_data(wheel):
    golden = REPO / "tests/golden"
    models = {f"mlx_zip/golden/{p.relative_to(golden)}" for p in (golden / "models").rglob("*") if p.is_file()}
    assert models | {"mlx_zip/py.typed", "mlx_zip/golden/lzw_public.json"} <= contents(wheel)


@pytest.mark.slow
def test_every_part_of_the_package_comes_from_the_wheel(python, tmp_path):
    code = """
        import importlib, json
        names = ["mlx_zip", "mlx_zip.codec", "mlx_zip.converters", "mlx_zip.bench", "mlx_zip.apps", "mlx_zip.golden"]
        print(json.dumps([importlib.import_module(name).__file__ for name in names]))
    """
    files = json.loads(run(python, "-c", _dedent(code), cwd=tmp_path))
    assert [f for f in files if not f.startswith(str(python.parents[1]))] == []


@pytest.mark.slow
def test_the_installed_codec_compresses_and_expands(python, tmp_path):
    code = """
        from mlx_zip import Codebook, CodecParams, compress
        params = CodecParams(vocab_size=16, codebook_size=8, merge_size=3)
        text = [1, 2, 3] * 6
        ids, _ = compress(params, text)
        book = Codebook(params)
        book.push(ids)
        print(len(ids) < len(text), book.expand(ids).tolist() == text)
    """
    assert run(python, "-c", _dedent(code), cwd=tmp_path).split() == ["True", "True"]


@pytest.mark.slow
def test_the_installed_command_says_what_it_can_do(python, tmp_path):
    help_text = run(python.with_name("mlx_zip"), "--help", cwd=tmp_path)
    assert {"generate", "convert", "compress", "selftest", "bench"} <= set(re.findall(r"\w+", help_text))


def _dedent(code: str) -> str:
    return "\n".join(line[8:] for line in code.splitlines())


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_chat_apps_page(wheel):
    page = {name for part in ("page", "vendor") for name in files(f"apps/chat/{part}/**/*") if (REPO / name).is_file()}
    assert "apps/chat/page/index.html" in page
    assert {f"mlx_zip/{name}" for name in page} <= contents(wheel)
