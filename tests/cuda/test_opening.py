"""Models as they are opened on PyTorch: what is refused in one line, what is named, and packs that requests name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.checkpoints import write_tokenizer
from support.tiny import VOCAB, base_ids, tiny_model
from support.torch_folders import save

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

import numpy as np  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mlx_zip.bench.engines.cuda_engines import generate_greedily  # noqa: E402
from mlx_zip.codec import Codebook  # noqa: E402
from mlx_zip.cuda import model as model_module  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from mlx_zip.cuda.network.checkpoint import folder_fingerprint  # noqa: E402
from mlx_zip.cuda.network.encoders import EncoderWeights, make_encoder  # noqa: E402
from mlx_zip.cuda.sampling import exclude_ids  # noqa: E402
from mlx_zip.cuda.sequence import SequenceState  # noqa: E402
from mlx_zip.errors import CodecError, ConfigError, DataError, ModelError  # noqa: E402
from mlx_zip.packs.pack import IN_FOLDER, Pack, save_pack  # noqa: E402
from mlx_zip.packs.tuned import TunedRows  # noqa: E402
from mlx_zip.text.tokenizers import load_tokenizer  # noqa: E402
from mlx_zip.vocab.first_stage import tokenizer_fingerprint  # noqa: E402
from support import kernel_launches  # noqa: E402
from support.shape_costs import count_shape_costs  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return save(tiny_model("llama", "averaging"), tmp_path / "m")


def edit(folder, **changes):
    """Changes keys of config.json; those of its zip2zip section where there is one with that key."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        (config["zip2zip"] if key in config["zip2zip"] else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def plain(folder):
    """Makes a converted model's folder that of its base."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = config.pop("zip2zip")["base_model_type"]
    (folder / "config.json").write_text(json.dumps(config))


# ---- refused


def test_a_plain_model_has_no_codebook_whose_size_could_be_chosen(folder):
    plain(folder)
    with pytest.raises(
        ModelError, match=r"^codebook_size \(--codebook-size\): a plain model has no codebook of its own$"
    ):
        open_model(folder, "cpu", codebook_size=9)


def test_encoders_of_another_width_than_the_model_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["zip2zip"]["encoder"]["hidden_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"^the encoder makes rows of width 32, the model's are 64$"):
        open_model(folder, "cpu")


@pytest.mark.parametrize(("text", "told"), [("{", "cannot be read: "), ("[]", "holds no JSON object")])
def test_a_generation_config_that_cannot_be_read_is_named(folder, text, told):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"generation_config\.json {told}") as caught:
        open_model(folder, "cpu")
    assert "\n" not in str(caught.value)


def test_the_ends_of_generation_config_replace_those_of_config(folder):
    edit(folder, eos_token_id=[4])
    assert open_model(folder, "cpu")._eos_ids == [4]
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_model(folder, "cpu")._eos_ids == [7]


def test_a_model_used_without_hypertokens_takes_no_pack(folder):
    with pytest.raises(ModelError, match="this model has no hypertokens"):
        open_model(folder, "cpu", hypertokens=False).use_pack([[5, 6]])


def test_rotations_that_differ_between_layers_are_refused(tmp_path):
    folder = save(tiny_model("qwen3", "averaging"), tmp_path / "m")
    kinds = ["sliding_attention", "full_attention"]
    ropes = {kind: {"rope_type": "default", "rope_theta": 10.0**at} for at, kind in enumerate(kinds, 4)}
    edit(folder, layer_types=kinds, use_sliding_window=True, sliding_window=8, rope_parameters=ropes)
    with pytest.raises(ConfigError, match="rope_parameters that differ between layers are not supported on PyTorch"):
        open_model(folder, "cpu")
    edit(folder, rope_parameters=dict.fromkeys(kinds, ropes[kinds[0]]))
    assert open_model(folder, "cpu").folder.decoder.windows == (8, None)


def test_an_encoder_that_does_not_exist_is_named():
    config = replace(tiny_model("llama", "averaging").config.encoder, kind="magic")
    with pytest.raises(ConfigError, match="encoder_type 'magic' is not one of attention, averaging"):
        make_encoder(config, 4, EncoderWeights(lambda *_: None, "input_encoder."))


# ---- named


def test_a_model_and_its_store_say_what_they_are(folder):
    model = open_model(folder, "cpu")
    assert repr(model) == "<CudaModel m: llama in torch.float32 on cpu>"
    assert model.store is not None
    model.store.find_or_encode(np.array([[5, 6, 2, 2]]), np.array([2]), model.encode_entries)
    assert repr(model.store) == f"<RowStore: 1 of {model.store.places} rows>"


def test_frequencies_that_a_checkpoint_stores_are_no_part_of_its_fingerprint(folder):
    before = folder_fingerprint(folder, False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, name: torch.ones(8)}, folder / "model.safetensors")
    assert folder_fingerprint(folder, False) == before
    assert open_model(folder, "cpu").fingerprint == before
    save_file({**tensors, "another": torch.ones(8)}, folder / "model.safetensors")
    assert folder_fingerprint(folder, False) != before


# ---- packs


def test_of_packs_that_requests_name_the_first_is_forgotten_when_there_are_too_many(folder, monkeypatch):
    monkeypatch.setattr(model_module, "MAX_KEPT_PACKS", 2)
    model = open_model(folder, "cpu")
    packs = [[[5, one]] for one in (6, 7, 8)]
    first, second, third = (model.sequence_start(pack) for pack in packs)
    assert model.sequence_start(packs[1]) is second
    assert model.sequence_start(packs[2]) is third
    again = model.sequence_start(packs[0])
    assert again is not first
    assert again.params.start == first.params.start == ((5, 6),)


def pack_of(folder, tokenizer=None):
    """Puts a tuned pack into a converted model's folder and returns its rows [2, 1, D], outputs first."""
    rows = np.random.default_rng(2).normal(0, 0.3, (2, 1, 64)).astype(np.float32)
    tuned = TunedRows(rows[1], rows[0], folder_fingerprint(folder, False))
    section = json.loads((folder / "config.json").read_text())["zip2zip"]
    edit(folder, zip2zip={**section, "start": [[5, 6]]})
    save_pack(folder / IN_FOLDER, Pack(((5, 6),), tokenizer, rows=tuned))
    return rows


def test_a_model_begins_with_the_tuned_pack_in_its_folder(folder):
    rows = pack_of(folder)
    begin = open_model(folder, "cpu").default_start
    np.testing.assert_array_equal(begin.rows.numpy(), rows.swapaxes(0, 1))


def test_the_tuned_pack_in_a_folder_is_one_of_the_folder_s_tokenizer(folder):
    write_tokenizer(folder, VOCAB)
    pack_of(folder, tokenizer_fingerprint(load_tokenizer(folder)))
    assert open_model(folder, "cpu").default_start.pack.entries == ((5, 6),)
    pack_of(folder, "0" * 64)
    with pytest.raises(DataError, match=r"was learned with another tokenizer \(000000000000, not "):
        open_model(folder, "cpu")


# ---- steps


def test_an_id_that_cannot_be_read_ends_a_generation_with_its_error(folder, monkeypatch):
    model = open_model(folder, "cpu")
    monkeypatch.setattr(Batch, "update_codebooks", lambda self, ids: {0: CodecError("no such id")})
    with pytest.raises(CodecError, match="no such id"):
        list(generate_greedily(model, base_ids(9), 5))


def test_a_count_says_if_no_step_installs_an_entry(folder, monkeypatch):
    monkeypatch.setattr(kernel_launches, "TRIES", 1)
    model = open_model(folder, "cpu", codebook_size=1, pack=[[5, 6]])
    with pytest.raises(ValueError, match="no entry was installed in 1 steps"):
        kernel_launches.count_step_costs(model)


def test_a_step_that_is_counted_fails_with_the_error_of_its_sequence(folder):
    model = open_model(folder, "cpu")
    batch = Batch(model, 1, 9)
    batch.read(batch.add(), [5, 6])
    with pytest.raises(CodecError):
        kernel_launches.take_step(batch, torch.tensor([model.layout.end - 1]))


@pytest.mark.parametrize(("bits", "least"), [(8, 8.5 / 32), (4, 4.5 / 32)])
def test_a_packed_shape_reads_its_weights_as_they_are_packed(bits, least):
    config = json.loads(json.dumps(tiny_model("llama", "averaging", hidden=64).args.config))
    config |= {"intermediate_size": 128, "vocab_size": 512}
    config["zip2zip"]["compression"]["max_codebook_size"] = 8
    dense = count_shape_costs(config, torch.float32).warm
    packed = count_shape_costs(config, torch.float32, bits, 64).warm
    assert packed.names == dense.names
    assert least < packed.bytes / dense.bytes < 2 * least


def test_rows_without_excluded_ids_keep_their_logits():
    logits = torch.randn(2, 5)
    assert exclude_ids(logits, [[], []], 0) is logits


def test_a_sequence_that_lacks_no_row_has_none_to_make(folder):
    begin = open_model(folder, "cpu").default_start
    parts = SequenceState(0, begin, Codebook(begin.params)).missing_entries()
    assert [part.shape for part in parts] == [(0,), (0, 4), (0,)]
