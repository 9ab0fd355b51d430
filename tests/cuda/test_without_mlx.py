"""The PyTorch engine runs where neither MLX nor mlx-lm can be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

CODE = """
import importlib, importlib.machinery, pkgutil, sys

FORBIDDEN = ("mlx", "mlx_lm")
find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in FORBIDDEN else find(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
for name in FORBIDDEN:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit(f"{name} can be imported")

import mlx_zip.cuda

names = [module.name for module in pkgutil.walk_packages(mlx_zip.cuda.__path__, "mlx_zip.cuda.")]
for name in names:
    importlib.import_module(name)

import torch
from mlx_zip.cuda.network.decoder import Decoder
from mlx_zip.cuda.network.checkpoint import read_tensor_folder

decoder = Decoder(read_tensor_folder("stories", "cpu"))
kv, at = decoder.make_kv_cache(1, 8), torch.arange(3)[None]
decoder.prefill(torch.ones((1, 3, decoder.config.width)), at, at, kv)
assert decoder.step(torch.ones((1, decoder.config.width)), torch.tensor([3]), kv).isfinite().all()
assert not [name for name in FORBIDDEN if name in sys.modules]
assert "torch._dynamo" not in sys.modules  # PyTorch's compiler takes seconds to import
print(len(names), "modules")
"""


@pytest.mark.slow
def test_every_module_is_imported_and_a_decoder_runs():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) > 10
