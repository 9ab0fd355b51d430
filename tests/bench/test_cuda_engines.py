"""The engines torch-zip and torch-base in `bench generate`: same ids, same counts, no MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain

import pytest

pytest.importorskip("torch")

from mlx_zip.bench.engines import cuda_engines
from mlx_zip.bench.engines.choice import make_engine
from mlx_zip.bench.engines.cuda_engines import TorchEngine, torch_models_from_flags
from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.shape_table import ZipOptions
from mlx_zip.bench.engines.torch_engines import TransformersEngine
from mlx_zip.codec import Codebook
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.model import open_model
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.tiny_bench import ON

OPTIONS = ZipOptions(encoder_layers=1, codebook_size=64)
TEXT = [300 + i % 7 for i in range(24)]
PROMPT = [300 + i % 5 for i in range(20)]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


@pytest.fixture
def models():
    return torch_models_from_flags("tiny", "float32", None, None, "stories", OPTIONS)


@pytest.mark.parametrize("name", cuda_engines.NAMES)
def test_replay_emits_exactly_the_forced_ids(models, name):
    made = TorchEngine(name, models)
    for _ in range(2):  # the second time in the batch of the first
        run = made.run(PROMPT, len(TEXT), TEXT)
        assert run.base_ids == TEXT
        prompt_ids, ids = compress_prompt_and_text(Codebook(made.model.params), PROMPT, TEXT)
        assert (run.prompt_ids, list(chain(*run.ids))) == (len(prompt_ids), ids.tolist())
        assert run.times == sorted(run.times)
        assert run.text_bytes == len(made.tokenizer.decode(TEXT).encode())
        assert run.kv_ids == run.prompt_ids + len(ids)
        assert (len(ids) < len(TEXT)) == (run.row_bytes > 0) == (name == "torch-zip")


def test_both_engines_share_their_weights(models):
    zipped, base = (TorchEngine(name, models) for name in cuda_engines.NAMES)
    assert zipped.model.head_matrix is base.model.head_matrix
    assert (zipped.weight_bytes, zipped.kv_bytes) == (base.weight_bytes, base.kv_bytes)
    assert base.weight_bytes == 4 * (4160 * 32 + 32 + 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32))
    assert base.kv_bytes == 2 * 2 * 16 * 4


def test_cold_rows_are_those_of_an_empty_store(models):
    made = TorchEngine("torch-zip", models)
    made.run(PROMPT, len(TEXT), TEXT)
    assert len(made.model.store) > 0
    made.forget_encoded_rows()
    assert len(made.model.store) == 0


@pytest.mark.slow
def test_the_bundled_models_write_what_mlx_writes():
    pytest.importorskip("mlx.core")
    from mlx_zip.bench.engines.model_making import models_from_folders

    _, args = tiny_bench.parse("generate")
    described = torch_models_from_flags(None, "", "stories", "stories-base", "", None)
    loaded = models_from_folders("stories", "stories-base")
    prompt = described.tokenizer.encode("Once upon a time there was a little dog", add_special_tokens=False)
    for ours, theirs in (("torch-zip", "mlx-zip"), ("torch-base", "mlx-lm")):
        found, expected = make_engine(ours, described, args), make_engine(theirs, loaded, args)
        assert found.run(prompt, 24).base_ids == expected.run(prompt, 24).base_ids
        conversation = found.start_conversation(), expected.start_conversation()
        for _ in range(2):
            a, b = (e.run(prompt, 8, None, held) for e, held in zip((found, expected), conversation, strict=True))
            assert a.base_ids == b.base_ids


def test_generate_writes_their_records_and_compares_each_with_its_own_base(capsys):
    flags = ["--engines", "torch-base", "torch-zip", *ON, "--sizes", "16+8", "--trials", "2"]
    assert tiny_bench.run("generate", *flags) == 0
    printed = capsys.readouterr()
    base, zipped = map(json.loads, printed.out.splitlines())
    assert (base["engine"], zipped["engine"]) == ("torch-base", "torch-zip")
    assert base["counts"]["base_tokens"] == zipped["counts"]["base_tokens"] == 8
    assert base["device"]["device"] == "cpu"
    rows = [line for line in printed.err.splitlines() if line.startswith("| torch")]
    assert rows[0].endswith("| - | - |")
    assert not rows[1].endswith("| - | - |")


CODE = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def hidden(name, path=None, target=None):
    return None if name.split(".")[0] in ("mlx", "mlx_lm") else find(name, path, target)

importlib.machinery.PathFinder.find_spec = staticmethod(hidden)
from mlx_zip.bench.__main__ import main
flags = "--model stories --base stories-base --mode chat --turns 1 --sizes 16+8 --trials 1 --warmup 0"
assert main(["generate", "--engines", "torch-zip", "torch-base", *flags.split()]) == 0
assert main(["generate", "--engines", "mlx-lm", "--shape", "llama-3.2-1b"]) == 2
assert "mlx" not in sys.modules
"""


@pytest.mark.slow
def test_they_run_where_mlx_cannot_be_imported():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["engine"] for line in done.stdout.splitlines()] == ["torch-zip", "torch-base"]
    assert "mlx" in done.stderr.splitlines()[-1]


def test_what_they_cannot_run_is_refused_on_one_line(models):
    with pytest.raises(MlxZipError, match="needs a model with hypertokens"):
        TorchEngine("torch-zip", torch_models_from_flags(None, "", None, "stories-base", "", None))
    with pytest.raises(MlxZipError, match="--model stories-base has no hypertokens"):
        torch_models_from_flags(None, "", "stories-base", None, "", None)
    with pytest.raises(MlxZipError, match="for the engines on PyTorch only"):
        models.plain()


# ---- transformers over the same weights


@pytest.fixture
def packed(tmp_path):
    """A folder of a tiny packed model with hypertokens."""
    pytest.importorskip("transformers")
    pytest.importorskip("mlx.core")
    from support import torch_folders

    model = torch_folders.make_model("qwen3", encoder="transformer", tie_word_embeddings=True)
    record = torch_folders.pack(model, 8, 32, {"pos_embed": False})
    return torch_folders.save(model, tmp_path / "m", quantization=record)


def test_transformers_runs_the_weights_of_a_packed_folder_with_hypertokens(packed):
    import torch

    from mlx_zip.bench.engines.torch_engines import load_unpacked_decoder

    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    model = open_model(packed, "cpu")
    batch = Batch(model, 1, 20)
    batch.read(batch.add(), ids)
    found = []
    batch.choose_ids(lambda head: found.append(head.logits) or head.best)
    with torch.no_grad():
        expected = load_unpacked_decoder(packed, torch.float32)(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(found[0][0, :40], expected[:40], atol=1e-4, rtol=1e-4)
    assert load_unpacked_decoder(packed, torch.bfloat16).dtype == torch.bfloat16


def test_transformers_needs_a_dtype_for_a_packed_folder(packed, monkeypatch):
    monkeypatch.setattr(cuda_engines, "load_tokenizer", lambda _: None)
    models = torch_models_from_flags(None, "float32", str(packed), None, "", OPTIONS)
    with pytest.raises(MlxZipError, match="is packed or has hypertokens: name hf-float32"):
        TransformersEngine(models, "hf")


def test_transformers_in_a_dtype_of_its_own_emits_what_torch_base_emits(monkeypatch):
    pytest.importorskip("transformers")
    models = torch_models_from_flags(None, "float32", "stories", None, "", OPTIONS)
    runs = [make(name, models) for name, make in (("torch-base", TorchEngine), ("hf-float32", hugging_face))]
    assert runs[0].run(PROMPT, 12).base_ids == runs[1].run(PROMPT, 12).base_ids
    assert hugging_face("hf-bfloat16", models).kv_dtype == "bfloat16"


def hugging_face(name, models):
    return TransformersEngine(models, name)
