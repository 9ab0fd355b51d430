"""A model folder and an adapted tokenizer become a smaller model: the same numbers for the ids that are kept."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import tiny_text
from adaptbpe_cases import GOLDEN

from mlx_zip import ConversionError, DataError, cli, compress, convert, generate, load
from mlx_zip.cli.compression import read_vocabulary
from mlx_zip.converters.adapt import adapt
from mlx_zip.converters.export import export
from mlx_zip.converters.tensors import load as load_tensors
from mlx_zip.converters.tensors import read_model_files
from mlx_zip.training.encoding import load_tokenizer
from mlx_zip.vocab.adaptbpe.adapted import adapted, read_adapted, words_of
from mlx_zip.vocab.adaptbpe.base import read_base

TEXT = "<|user|>The cat sat on the mat. The cat café 日本 sat on the mat again.<|end|>"
NAMES = ("llama_transformer_tied_lora", "llama_transformer_untied_pos", "phi3_reslatent_mean_untied_v2")
PLAIN = tiny_text.GOLDEN / "llama_transformer_untied_pos" / "base"


def vocabulary_of(folder, file, n=90, **options):
    """An adapted tokenizer of the model in a folder, saved."""
    base = read_base(folder)
    words = words_of(base.front, [GOLDEN["gpt2"]["train_text"][:8000]])
    kept = adapted(base, words, n, **options)
    kept.save(file)
    return kept


@pytest.fixture
def made(tmp_path):
    """Adapts the model in a folder -> (folder of the smaller one, its vocabulary)."""

    def command(folder, **options):
        kept = vocabulary_of(folder, tmp_path / "adapted.json", **options)
        return adapt(folder, tmp_path / "adapted.json", tmp_path / "smaller", progress=False), kept

    return command


def quantized(folder, out):
    """The plain model in a folder, quantized by mlx-lm."""
    from mlx_lm.convert import convert as mlx_convert

    mlx_convert(str(folder), str(out), quantize=True, q_group_size=32, q_bits=4)
    return out


def parameters_in(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_parameters"]


def logits_of(model, ids):
    return np.array(model(mx.array(ids)[None], cache=model.make_cache() if hasattr(model, "layout") else None))[0]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_kept_ids_are_those_of_the_full_model(made, tmp_path, bits, tied):
    folder = tiny_text.GOLDEN / "llama_transformer_tied_lora" / "base" if tied else PLAIN
    if bits:
        folder = quantized(folder, tmp_path / "quantized")
    smaller, kept = made(folder)
    (whole, _), (cut, tokenizer) = load(folder), load(smaller)
    ids = kept.encode(TEXT)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids.tolist()
    expected, got = logits_of(whole, kept.ids[ids]), logits_of(cut, ids)
    assert got.shape[-1] == len(kept) < expected.shape[-1]
    np.testing.assert_allclose(got, expected[:, kept.ids], atol=1e-5, rtol=1e-5)


def test_rows_are_selected_bit_for_bit_also_packed_ones(made, tmp_path):
    folder = quantized(PLAIN, tmp_path / "quantized")
    smaller, kept = made(folder)
    before, after = (load_tensors(read_model_files(path)) for path in (folder, smaller))
    assert before.keys() == after.keys()
    rows = [name for name in before if "embed_tokens" in name or "lm_head" in name]
    assert len(rows) == 6
    for name, array in before.items():
        chosen = mx.take(array, mx.array(kept.ids), axis=0) if name in rows else array
        assert mx.array_equal(after[name], chosen).item(), name
    lost = 2 * (before["lm_head.weight"].shape[0] - len(kept)) * 64  # a row of 64 in each of the two
    assert parameters_in(smaller) == parameters_in(folder) - lost


@pytest.mark.parametrize("name", NAMES)
def test_a_zip2zip_model_goes_on_with_hypertokens_behind_the_new_ids(made, name):
    folder = tiny_text.converted(name)
    smaller, kept = made(folder)
    (whole, _), (cut, _) = load(folder), load(smaller)
    assert cut.layout.vocab_size == cut.layout.embedding_rows == len(kept)
    ids = kept.encode(TEXT)
    new, old = compress(cut.config.codec_params, ids)[0], compress(whole.config.codec_params, kept.ids[ids])[0]
    assert len(new) == len(old) < len(ids)
    expected, got = logits_of(whole, old), logits_of(cut, new)
    hyper = slice(whole.layout.vocab_size, whole.layout.end)
    np.testing.assert_allclose(got[:, : len(kept)], expected[:, kept.ids], atol=2e-4)
    np.testing.assert_allclose(got[:, len(kept) :], expected[:, hyper], atol=2e-4)


def test_what_names_ids_is_renumbered(made):
    folder = tiny_text.converted(NAMES[0])
    smaller, kept = made(folder)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, smaller))
    new = {int(old): i for i, old in enumerate(kept.ids)}
    assert after["vocab_size"] == len(kept)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert after[key] == new[before[key]]
    old_codec, codec = before["zip2zip"]["compression"], after["zip2zip"]["compression"]
    assert codec["disabled_ids"] == [new[i] for i in old_codec["disabled_ids"] if i in new]
    assert after["zip2zip"]["pad_token_id"] == new[before["zip2zip"]["pad_token_id"]]
    assert after["zip2zip"]["fingerprint"] != before["zip2zip"]["fingerprint"]
    assert read_adapted(smaller / "adapted.json").ids.tolist() == kept.ids.tolist()


def test_the_smaller_model_generates_and_chats(made):
    smaller, _ = made(tiny_text.converted(NAMES[1]))
    model, tokenizer = load(smaller)
    assert generate(model, tokenizer, "The cat sat on the mat.", max_tokens=8)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert max(prompt) < model.layout.vocab_size


def test_without_mlx_zip_its_tokenizer_json_gives_lawful_ids_that_decode_to_the_text(made):
    from tokenizers import Tokenizer

    smaller, kept = made(PLAIN)
    plain = Tokenizer.from_file(str(smaller / "tokenizer.json"))
    ids = plain.encode(TEXT, add_special_tokens=False).ids
    assert max(ids) < len(kept)
    assert kept.decode(ids) == TEXT.encode()


def altered(folder, target, file, **changes):
    shutil.copytree(folder, target)
    data = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(data | changes))
    return target


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("config.json", {"eos_token_id": [1, 511]}, "config.json: eos_token_id is 511, an id that the vocabulary"),
        ("generation_config.json", {"eos_token_id": 511}, "generation_config.json: eos_token_id is 511"),
        ("tokenizer.json", {"added_tokens": []}, "added tokens differ from those of"),
    ],
)
def test_ids_that_are_lost_are_refused_and_nothing_is_written(tmp_path, file, changes, told):
    vocabulary_of(PLAIN, tmp_path / "adapted.json")
    folder = altered(PLAIN, tmp_path / "altered", file, **changes)
    with pytest.raises(ConversionError, match=told):
        adapt(folder, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)
    assert not (tmp_path / "smaller").exists()


def test_the_vocabulary_of_another_tokenizer_is_refused(tmp_path):
    vocabulary_of(tiny_text.GOLDEN / NAMES[0] / "base", tmp_path / "adapted.json")
    with pytest.raises(DataError, match="whose merges differ"):
        adapt(PLAIN, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)


def test_the_command_converts(tmp_path, capsys):
    vocabulary_of(PLAIN, tmp_path / "adapted.json")
    words = ["vocab", "adapt", "convert", PLAIN, tmp_path / "adapted.json", "--mlx-path", tmp_path / "smaller"]
    assert cli.main(list(map(str, words))) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "smaller")
    assert cli.main(list(map(str, words))) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_starting_codebook_is_renumbered_and_what_is_lost_is_told(made, tmp_path):
    folder = tmp_path / "started"
    shutil.copytree(tiny_text.converted(NAMES[0]), folder)
    kept = vocabulary_of(folder, tmp_path / "probe.json")
    lost = next(i for i in range(300, 512) if i not in kept.ids.tolist())
    config = json.loads((folder / "config.json").read_text())
    two = kept.ids[100:102].tolist()
    config["zip2zip"]["start"] = [two, [two[0], lost]]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="1 entries of the starting codebook hold ids that are not kept"):
        smaller, _ = made(folder)
    assert json.loads((smaller / "config.json").read_text())["zip2zip"]["start"] == [[100, 101]]


def test_convert_takes_the_smaller_model_on(made, tmp_path):
    smaller, kept = made(tiny_text.converted(NAMES[0]))
    convert(str(smaller), tmp_path / "quantized", quantize=True, q_group_size=32, q_bits=4, progress=False)
    model, tokenizer = load(tmp_path / "quantized")
    assert model.layout.vocab_size == len(kept)
    assert len(tokenizer) == len(kept)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == kept.encode(TEXT).tolist()


def test_every_way_to_its_tokenizer_gives_the_same_ids(made):
    smaller, kept = made(tiny_text.converted(NAMES[0]))
    expected = kept.encode(TEXT).tolist()
    prepared = load_tokenizer(smaller).backend_tokenizer
    assert [found.ids for found in prepared.encode_batch_fast([TEXT] * 50, add_special_tokens=False)] == [expected] * 50
    assert list(read_vocabulary(str(smaller)).encode(TEXT)) == expected


def test_export_carries_the_tokenizer_and_says_that_others_read_it_otherwise(made, tmp_path):
    smaller, _ = made(tiny_text.converted(NAMES[0]))
    with pytest.warns(UserWarning, match=r"zip2zip does not know adapted\.json"):
        export(str(smaller), tmp_path / "exported", progress=False)
