"""A type checker that reads only `from mlx_zip import ...` finds misspelled arguments and attributes."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mlx_zip

CODE = """
from mlx_zip import Pack, batch_generate, generate, load, load_pack, stream_generate

model, tokenizer = load("x", pack="p.npz")
for response in stream_generate(model, tokenizer, "hi", temp=0.5, pack=load_pack("p.npz")):
    print(response.text, response.base_tokens_per_step)
generate(model, tokenizer, "hi", temp=0.5, stop="x", max_tokens=4)
batch_generate(model, tokenizer, ["hi"], top_p=0.5)
"""
WRONG = {
    "print(response.txt)": "txt",
    'stream_generate(model, tokenizer, "hi", temprature=0.5)': "temprature",
    'generate(model, tokenizer, "hi", temprature=0.5)': "temprature",
    'batch_generate(model, tokenizer, ["hi"], top_q=1)': "top_q",
    'load("x", pak="p.npz")': "pak",
    "print(Pack(()).entrees)": "entrees",
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed (pip install -e '.[lint]')")
def test_a_checker_finds_misspelled_names_and_nothing_else(tmp_path):
    file = tmp_path / "use.py"
    file.write_text(CODE + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(file)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    first = CODE.count("\n")
    lines = {one["range"]["start"]["line"] - first: one["message"] for one in found}
    assert sorted(lines) == list(range(len(WRONG)))
    assert all(f'"{name}"' in lines[i] for i, name in enumerate(WRONG.values()))


def test_every_public_name_is_typed():
    tree = ast.parse(Path(mlx_zip.__file__).read_text())
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    imported = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    declared = {node.target.id for node in block.body if isinstance(node, ast.AnnAssign)}
    assert imported | declared == set(mlx_zip._HOMES)
