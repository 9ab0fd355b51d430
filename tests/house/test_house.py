"""Keeps the picture of the house (docs/decisions.md) true: imports point down, leaves stand alone."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import mlx_zip
from support.places import REPO

FLOORS = [  # from the ground up; a room is the first name below `mlx_zip`; some of these rooms are still to be built
    {"errors", "files", "named", "arguments", "progress", "device"},
    {"layout", "config", "codec"},
    {"vocab"},
    {"text", "packs"},
    {"models"},
    {"engine"},
    {"evaluation", "cuda", "vllm"},  # they stand on engine
    {"training"},  # on MLX or on PyTorch
]
LOOPS = {"engine", "evaluation", "training"}
LEAVES = {"apps", "bench", "converters", "server", "golden", "recipes"}
STANDS_ON = {("apps", "server")}  # the one leaf that another one may import
NOT_INSTALLED = {  # package: folder, in a checkout only
    "mlx_zip.bench.papers": "bench/papers",
    "mlx_zip.apps.mac": "apps/mac",
    "recipes": "recipes",
}
ROOT = ""  # `mlx_zip` itself: names and a version
DOORS = {"__main__", "cli"}  # they reach the rooms on demand, leaves by name only; nothing imports them
HEAVY = {  # where a library that is large or optional may be imported; the declared ones not named here, anywhere
    "torch": {"cuda", "training", "vllm", "bench", "recipes"},
    "triton": {"cuda", "vllm", "bench"},
    "vllm": {"vllm"},
    "starlette": {"server", "apps"},
    "prompt_toolkit": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"bench", "training"},
    "lm_eval": {"evaluation"},
    "zip2zip": {"bench"},
    "zip2zip_compression": {"bench"},
    "transformers": {"text", "training", "vllm", "converters", "bench", "recipes", *DOORS},
    "mlx": {"device", "models", *LOOPS, "converters", "bench", *DOORS},
    "mlx_lm": {"models", *LOOPS, "converters", "bench", *DOORS},
}
DISTRIBUTIONS = {
    "mlx_lm": "mlx-lm",
    "zip2zip": None,
    "zip2zip_compression": None,
    "tokenizers": "mlx-lm",
    "transformers": "mlx-lm",
    "jinja2": "mlx-lm",
    "markdown_it": "rich",
    "pygments": "rich",
    "yaml": "mlx-lm",
    "pydantic_core": "pydantic",
}


@cache
def modules() -> dict[str, Path]:
    """Module name -> source file, for everything that is packaged or `NOT_INSTALLED`."""
    setuptools = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name: setuptools["package-dir"].get(name, name.replace(".", "/")) for name in setuptools["packages"]}
    for top, place in NOT_INSTALLED.items():
        inner = {file.parent.relative_to(REPO / place).as_posix() for file in (REPO / place).rglob("*.py")}
        folders |= {f"{top}.{name.replace('/', '.')}" if name != "." else top: f"{place}/{name}" for name in inner}
    return {
        package if file.stem == "__init__" else f"{package}.{file.stem}": file
        for package, folder in folders.items()
        for file in sorted((REPO / folder).glob("*.py"))
    }


def room(module: str) -> str:
    return module.removeprefix("mlx_zip").lstrip(".").split(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported name: `from origin import name`, or `import origin` with no name."""

    origin: str  # absolute
    name: str

    @property
    def home(self) -> str:
        """The module or package that is imported; `from mlx_zip import load` means the room that `load` lives in."""
        if self.origin != "mlx_zip" or not self.name:
            return self.origin
        return mlx_zip._HOMES.get(self.name, f"mlx_zip.{self.name}")


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """All imports of a module, inside functions and type checks too. Each file is parsed once."""
    file = modules()[module]
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    statements = _statements(ast.parse(file.read_text()).body)
    return tuple(found for node in statements for found in _imports_in(node, package))


def _statements(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """All statements and those inside of them, without expressions, which are most of a file and import nothing."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, inside, [])


def _imports_in(node: ast.AST, package: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folders = package.split(".")
        parents = folders[: len(folders) - node.level + 1] if node.level else []
        origin = ".".join([*parents, *([node.module] if node.module else [])])
        yield from (Import(origin, alias.name) for alias in node.names)


def imports(module: str) -> set[str]:
    """Absolute names of the modules and packages that a module imports."""
    return {found.home for found in imports_of(module)}


@cache
def inner_edges() -> set[tuple[str, str]]:
    """(importing room, imported room), for different rooms of mlx_zip."""
    return {
        (room(module), room(name))
        for module in modules()
        for name in imports(module)
        if name.split(".")[0] in ("mlx_zip", "recipes") and room(name) != room(module)
    }


def file_edges() -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports, inside functions and type checks too."""
    known = modules()
    return {module: {_module(found) for found in imports_of(module)} & known.keys() - {module} for module in known}


def _module(found: Import) -> str:
    """The module that an import loads: `from package import name` may name a module of that package."""
    inner = found.home if found.origin == "mlx_zip" else f"{found.origin}.{found.name}"
    return inner if inner in modules() else found.origin


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def floor(name: str) -> int:
    return next((i for i, rooms in enumerate(FLOORS) if name in rooms), len(FLOORS))


def test_every_module_belongs_to_a_room_of_the_picture():
    assert {room(m) for m in modules()} <= set.union({ROOT}, LEAVES, DOORS, *FLOORS)


def test_every_source_folder_is_packaged_or_known_not_to_be():
    folders = {
        f.parent for top in ("mlx_zip", "converters", "bench", "apps", "recipes") for f in (REPO / top).rglob("*.py")
    }
    assert folders <= {file.parent for file in modules().values()}


def test_imports_never_point_up():
    assert [(a, b) for a, b in sorted(inner_edges()) if b != ROOT and floor(b) > floor(a)] == []


def test_rooms_on_one_floor_do_not_import_each_other_in_circles():
    edges = {(a, b) for a, b in inner_edges() if floor(a) == floor(b)}
    while leaving := {a for a, _ in edges} - {b for _, b in edges}:
        edges = {(a, b) for a, b in edges if a not in leaving}
    assert edges == set()


def test_no_files_import_each_other_in_circles():
    assert cycles(file_edges()) == []


def test_nothing_imports_a_leaf_but_the_apps_the_server():
    assert [(a, b) for a, b in sorted(inner_edges() - STANDS_ON) if b in LEAVES - {"golden"}] == []


def test_nothing_imports_a_door():
    assert [(a, b) for a, b in sorted(inner_edges()) if b in DOORS and a not in DOORS] == []


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_are_imported_only_where_they_are_used(library):
    users = {room(module) for module in modules() for name in imports(module) if name.split(".")[0] == library}
    assert users <= HEAVY[library]


def test_every_library_that_is_imported_is_declared():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {line.split(";")[0].split("[")[0].rstrip("0123456789.,<>=! ").replace("_", "-") for line in lines}
    used = {name.split(".")[0] for module in modules() for name in imports(module)}
    foreign = used - set(sys.stdlib_module_names) - {"mlx_zip", "recipes", "__future__"}
    named = {DISTRIBUTIONS.get(name, name) for name in foreign}
    assert {name.replace("_", "-") for name in named if name} <= declared


def test_mlx_and_mlx_lm_have_an_upper_bound_wherever_they_are_asked_for():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    asked = [line for line in lines if line.startswith("mlx") and not line.startswith("mlx_zip")]
    assert len(asked) == 4  # mlx-lm; mlx on a Mac, on a CPU, with CUDA
    assert [line for line in asked if ",<" not in line] == []


@pytest.mark.parametrize("extra", ["cpu", "bench", "test", "lint", "dev"])
def test_what_builds_and_tests_the_project_does_not_ask_for_torch(extra):
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked, waiting = set(), [extra]
    while waiting:
        lines = extras[waiting.pop()]
        waiting += [name for line in lines if line.startswith("mlx_zip[") for name in line[8:-1].split(",")]
        asked |= {line for line in lines if not line.startswith("mlx_zip[")}
    assert [line for line in asked if line.startswith(("torch", "triton", "vllm"))] == []


@cache
def loaded_after(code: str) -> set[str]:
    """Modules in a fresh interpreter after `code`, which must not print on stdout."""
    report = "\nimport sys\nsys.stdout.write('\\0' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\0")[1].split())


@pytest.mark.parametrize("library", ["mlx", "mlx_lm", "transformers", "torch", "numpy"])
def test_importing_mlx_zip_loads_no_heavy_library(library):
    assert library not in loaded_after("import mlx_zip")


@pytest.mark.parametrize("library", ["mlx", "mlx_lm", "torch"])
def test_the_text_room_loads_no_engine(library):
    inside = [module for module in sorted(modules()) if room(module) == "text"]
    assert library not in loaded_after("import " + ", ".join(inside))


@pytest.mark.parametrize("library", ["mlx", "mlx_lm", "transformers", "torch", "numpy"])
def test_help_loads_no_heavy_library(library):
    code = "import mlx_zip.cli\ntry:\n    mlx_zip.cli.main(['--help'])\nexcept SystemExit:\n    pass"
    assert library not in loaded_after(code)


@pytest.mark.parametrize("leaf", ["apps", "bench", "converters"])
def test_the_command_line_loads_leaves_only_on_demand(leaf):
    assert f"mlx_zip.{leaf}" not in loaded_after("import mlx_zip.cli")


def test_without_mlx_a_public_name_says_what_to_install():
    code = "import sys\nsys.modules['mlx'] = None\nfrom mlx_zip import InstallationError\n"
    code += "try:\n    from mlx_zip import load\nexcept InstallationError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MLX is not installed here: ")
    assert "pip install" in done.stdout


def test_every_public_name_can_be_loaded():
    missing = [name for name in mlx_zip.__all__ if not hasattr(mlx_zip, name)]
    assert missing == []
