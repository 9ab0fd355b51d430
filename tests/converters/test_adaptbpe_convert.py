"""A model folder and an adapted tokenizer become a smaller model: the same numbers for the ids that are kept."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import ConversionError, DataError, cli, compress, convert, generate, load
from mlx_zip.converters.adapt import adapt
from mlx_zip.converters.export import export
from mlx_zip.converters.tensors import read_folder_tensors
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.adaptbpe.adapted import adapt_vocabulary, count_words, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from support import tiny_text
from support.adaptbpe_cases import ADAPTBPE
from support.adapting import logits_of, quantized
from support.places import GOLDEN_MODELS

TEXT = "<|user|>The cat sat on the mat. The cat café 日本 sat on the mat again.<|end|>"
NAMES = ("llama_transformer_tied_lora", "llama_transformer_untied_pos", "phi3_reslatent_mean_untied_v2")
PLAIN = GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"


def vocabulary_of(folder, file, n=90, **options):
    """An adapted tokenizer of the model in a folder, saved."""
    base = read_base_vocabulary(folder)
    words = count_words(base.splitter, [ADAPTBPE["gpt2"]["train_text"][:8000]])
    kept = adapt_vocabulary(base, words, n, **options)
    kept.save(file)
    return kept


@pytest.fixture
def made(tmp_path):
    """Adapts the model in a folder -> (folder of the smaller one, its vocabulary)."""

    def command(folder, **options):
        kept = vocabulary_of(folder, tmp_path / "adapted.json", **options)
        return adapt(folder, tmp_path / "adapted.json", tmp_path / "smaller", progress=False), kept

    return command


def parameters_in(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_parameters"]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_kept_ids_are_those_of_the_full_model(made, tmp_path, bits, tied):
    folder = GOLDEN_MODELS / "llama_transformer_tied_lora" / "base" if tied else PLAIN
    if bits:
        folder = quantized(folder, tmp_path / "quantized")
    smaller, kept = made(folder)
    (whole, _), (cut, tokenizer) = load(folder), load(smaller)
    ids = kept.encode(TEXT)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids.tolist()
    expected, got = logits_of(whole, kept.ids[ids]), logits_of(cut, ids)
    assert got.shape[-1] == len(kept) < expected.shape[-1]
    np.testing.assert_array_equal(got, expected[:, kept.ids])


def test_rows_are_selected_bit_for_bit_also_packed_ones(made, tmp_path):
    folder = quantized(PLAIN, tmp_path / "quantized")
    smaller, kept = made(folder)
    before, after = map(read_folder_tensors, (folder, smaller))
    assert before.keys() == after.keys()
    rows = [name for name in before if "embed_tokens" in name or "lm_head" in name]
    assert len(rows) == 6
    for name, array in before.items():
        chosen = mx.take(array, mx.array(kept.ids), axis=0) if name in rows else array
        assert mx.array_equal(after[name], chosen).item(), name
    lost = 2 * (before["lm_head.weight"].shape[0] - len(kept)) * 64  # a row of 64 in each of the two
    assert parameters_in(smaller) == parameters_in(folder) - lost


@pytest.mark.parametrize("name", NAMES)
def test_a_zip2zip_model_goes_on_with_hypertokens_after_the_new_ids(made, name):
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
    assert read_adapted_vocabulary(smaller / "adapted.json").ids.tolist() == kept.ids.tolist()


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


FIRST, END = 7, 480  # ids 0..6 of NAMES[1] are added tokens, 480..511 rows without a token
FINAL = {"bos": 473, "eos": 474, "pad": 475}  # where `specials_last` puts them


def moved(i):
    """Where an id is when the added tokens stand after all others."""
    return i if i >= END else (i - FIRST) % END


@pytest.fixture
def specials_last(tmp_path):
    """A converted model whose added tokens are the last ids, and ids wherever they can be."""
    folder = shutil.copytree(tiny_text.converted(NAMES[1]), tmp_path / "specials_last")

    def change(file, alter):
        data = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps(alter(data)))

    def tokenizer(data):
        data["model"]["vocab"] = {token: moved(i) for token, i in data["model"]["vocab"].items()}
        data["added_tokens"] = [token | {"id": moved(token["id"])} for token in data["added_tokens"]]
        bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
        data["post_processor"]["single"] = [bos, *data["post_processor"]["single"]]
        own = {"id": "<|bos|>", "ids": [FINAL["bos"]], "tokens": ["<|bos|>"]}
        data["post_processor"]["special_tokens"] = {"<|bos|>": own}
        data["padding"] = {
            "strategy": "BatchLongest",
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": FINAL["pad"],
            "pad_type_id": 0,
            "pad_token": "<|pad|>",
        }
        return data

    def config(data):
        codec = data["zip2zip"]["compression"]
        codec["disabled_ids"] = [moved(i) for i in codec["disabled_ids"]]
        data["zip2zip"]["pad_token_id"] = FINAL["pad"]
        return data | {f"{name}_token_id": i for name, i in FINAL.items()}

    change("tokenizer.json", tokenizer)
    change("config.json", config)
    change(
        "generation_config.json",
        lambda data: (
            data
            | {
                **{f"{name}_token_id": i for name, i in FINAL.items()},
                "eos_token_id": [474, 479],
                "bad_words_ids": [[473], [475, 479]],
                "suppress_tokens": [476],
                "forced_decoder_ids": [[1, 477], [2, None]],
                "sequence_bias": [[[474, 478], 2.0]],
                "image_token_index": 479,
                "top_k": 474,
            }
        ),
    )
    change(
        "tokenizer_config.json",
        lambda data: (
            data
            | {
                "added_tokens_decoder": {
                    str(i): {"content": name, "special": True} for name, i in (("<|bos|>", 473), ("<|end|>", 479))
                }
            }
        ),
    )
    change("added_tokens.json", lambda _: {"<|eos|>": 474, "<|end|>": 479})
    weights = read_folder_tensors(folder)
    order = mx.array(np.argsort([moved(i) for i in range(512)]))
    rows = {name: mx.take(array, order, axis=0) for name, array in weights.items() if array.shape[0] == 512}
    assert rows
    mx.save_safetensors(str(folder / "model.safetensors"), weights | rows, {"format": "mlx"})
    return folder


def test_added_tokens_that_are_the_last_ids_are_renumbered_wherever_they_are_named(made, specials_last):
    smaller, kept = made(specials_last)
    new = {int(old): i for i, old in enumerate(kept.ids)}
    assert all(new[i] != i for i in range(END - FIRST, END))
    read = lambda file: json.loads((smaller / file).read_text())
    config, generation, tokenizer = read("config.json"), read("generation_config.json"), read("tokenizer.json")
    for name, i in FINAL.items():
        assert config[f"{name}_token_id"] == new[i]
    codec = config["zip2zip"]
    assert codec["pad_token_id"] == new[475]
    assert sorted(codec["compression"]["disabled_ids"]) == [new[i] for i in range(END - FIRST, END)]
    assert codec["compression"]["initial_vocab_size"] == len(kept)
    expected = {
        "bos_token_id": new[473],
        "eos_token_id": [new[474], new[479]],
        "pad_token_id": new[475],
        "bad_words_ids": [[new[473]], [new[475], new[479]]],
        "suppress_tokens": [new[476]],
        "forced_decoder_ids": [[1, new[477]], [2, None]],
        "sequence_bias": [[[new[474], new[478]], 2.0]],
        "image_token_index": new[479],
        "top_k": 474,
    }
    assert {key: generation[key] for key in expected} == expected
    assert tokenizer["post_processor"]["special_tokens"]["<|bos|>"]["ids"] == [new[473]]
    assert tokenizer["padding"]["pad_id"] == new[475]
    assert {token["content"]: token["id"] for token in tokenizer["added_tokens"]}["<|user|>"] == new[476]
    assert read("tokenizer_config.json")["added_tokens_decoder"].keys() == {str(new[473]), str(new[479])}
    assert read("added_tokens.json") == {"<|eos|>": new[474], "<|end|>": new[479]}


def test_with_added_tokens_last_the_numbers_are_those_of_the_full_model_and_of_the_first_order(made, specials_last):
    smaller, kept = made(specials_last)
    (whole, _), (cut, tokenizer) = load(specials_last), load(smaller)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (len(kept) - 6, len(kept) - 5)
    ids = kept.encode(TEXT)
    assert {len(kept) - 4, len(kept) - 1} <= set(ids.tolist())
    assert tokenizer.encode(TEXT) == [len(kept) - 7, *ids.tolist()]
    new, old = compress(cut.config.codec_params, ids)[0], compress(whole.config.codec_params, kept.ids[ids])[0]
    assert len(new) == len(old) < len(ids)
    expected, got = logits_of(whole, old)[:, kept.ids], logits_of(cut, new)[:, : len(kept)]
    np.testing.assert_allclose(got, expected, atol=2e-4)
    unmoved = np.argsort([moved(i) for i in range(512)])[kept.ids]
    first, _ = load(tiny_text.converted(NAMES[1]))
    same = logits_of(first, compress(first.config.codec_params, unmoved[ids])[0])
    np.testing.assert_allclose(got, same[:, unmoved], atol=2e-4)


def altered(folder, target, file, **changes):
    shutil.copytree(folder, target)
    data = json.loads((target / file).read_text()) if (target / file).is_file() else {}
    (target / file).write_text(json.dumps(data | changes))
    return target


LOST = {"content": "<|tool|>", "special": True}


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("config.json", {"eos_token_id": [1, 511]}, "config.json: eos_token_id is 511, an id that the vocabulary"),
        ("generation_config.json", {"eos_token_id": 511}, "generation_config.json: eos_token_id is 511"),
        ("generation_config.json", {"bad_words_ids": [[1], [2, 511]]}, "generation_config.json: bad_words_ids is 511"),
        ("generation_config.json", {"forced_decoder_ids": [[1, 511]]}, "forced_decoder_ids is 511"),
        ("generation_config.json", {"sequence_bias": [[[511], 1.0]]}, "sequence_bias is 511"),
        ("generation_config.json", {"sequence_bias": {"(1,)": 1.0}}, "sequence_bias is no list of pairs"),
        ("config.json", {"image_token_index": 511}, "config.json: image_token_index is 511"),
        ("tokenizer.json", {"added_tokens": []}, "added tokens differ from those of"),
        ("tokenizer.json", {"padding": {"pad_id": 511}}, "tokenizer.json: padding names id 511"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"500": LOST}}, r"decoder has '<\|tool\|>', id 500, which"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": LOST}}, r"decoder has '<\|tool\|>', id x, which"),
        ("added_tokens.json", {"<|tool|>": 500}, r"added_tokens\.json has '<\|tool\|>', id 500, which the vocabulary"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|tool|>"]}, "finds 354 ids in the new tokenizer"),
        ("special_tokens_map.json", {"eos_token": "<|tool|>"}, "of which 353 have a row"),
    ],
)
def test_ids_that_are_lost_are_refused_and_nothing_is_written(tmp_path, file, changes, told):
    vocabulary_of(PLAIN, tmp_path / "adapted.json")
    folder = altered(PLAIN, tmp_path / "altered", file, **changes)
    with pytest.raises((ConversionError, DataError), match=told):
        adapt(folder, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)
    assert not (tmp_path / "smaller").exists()


def test_a_tensor_as_high_as_the_embedding_that_is_not_known_is_refused_by_name(tmp_path):
    vocabulary_of(PLAIN, tmp_path / "adapted.json")
    folder = shutil.copytree(PLAIN, tmp_path / "more")
    weights = read_folder_tensors(folder) | {"model.per_token.weight": mx.zeros((512, 2))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(ConversionError, match=r"model\.per_token\.weight: 512 rows, as the embedding has"):
        adapt(folder, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)
    assert not (tmp_path / "smaller").exists()


def test_a_model_that_was_adapted_is_not_adapted_again(made, tmp_path):
    smaller, kept = made(PLAIN)
    assert kept.virtual
    with pytest.raises(DataError, match=r"the folder has an adapted\.json\): adapt the base of this model instead"):
        read_base_vocabulary(smaller)


def test_the_vocabulary_of_another_tokenizer_is_refused(tmp_path):
    vocabulary_of(GOLDEN_MODELS / NAMES[0] / "base", tmp_path / "adapted.json")
    with pytest.raises(DataError, match="whose merges differ"):
        adapt(PLAIN, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)


def test_the_command_converts(tmp_path, capsys):
    vocabulary_of(PLAIN, tmp_path / "adapted.json")
    flags = ["--model", PLAIN, "--out", tmp_path / "smaller"]
    words = ["vocab", "adapt", "convert", tmp_path / "adapted.json", *flags]
    assert cli.main(list(map(str, words))) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "smaller")
    assert cli.main(list(map(str, words))) == 2
    assert "already exists; delete it or choose another --out" in capsys.readouterr().err


def test_a_starting_codebook_is_renumbered_and_what_is_lost_is_told(made, tmp_path):
    folder = tmp_path / "started"
    shutil.copytree(tiny_text.converted(NAMES[0]), folder)
    kept = vocabulary_of(folder, tmp_path / "probe.json")
    lost = next(i for i in range(300, 512) if i not in kept.ids.tolist())
    config = json.loads((folder / "config.json").read_text())
    two = kept.ids[100:102].tolist()
    config["zip2zip"]["start"] = [two, [two[0], lost]]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="1 entries of the pack hold ids that are not kept"):
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


def test_a_base_next_to_the_file_that_was_adapted_from_it_encodes_as_before(tmp_path):
    folder = shutil.copytree(PLAIN, tmp_path / "base")
    expected = list(read_vocabulary(str(folder)).encode(TEXT))
    kept = vocabulary_of(folder, folder / "adapted.json")
    assert kept.ids[kept.encode(TEXT)].tolist() != expected
    assert list(read_vocabulary(str(folder)).encode(TEXT)) == expected
    assert load_tokenizer(folder).encode(TEXT, add_special_tokens=False) == expected


def test_export_carries_the_tokenizer_and_says_that_others_read_it_otherwise(made, tmp_path):
    smaller, _ = made(tiny_text.converted(NAMES[0]))
    with pytest.warns(UserWarning, match=r"zip2zip does not know adapted\.json"):
        export(str(smaller), tmp_path / "exported", progress=False)
