"""The three golden checkpoints, converted: everything zip2zip 0.2.0 computed on them, reproduced.

Origin of the numbers: zip2zip 0.2.0 on torch 2.13 (CPU, fp32); see `expected.json` in each checkpoint's folder.
"""

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

import mlx_zip
from mlx_zip.converters import convert
from support.places import GOLDEN_MODELS
from support.slow_cases import slow_but

NAMES = sorted(path.name for path in GOLDEN_MODELS.iterdir() if path.is_dir())
ROWS_ATOL, LOGITS_ATOL = 2e-5, 2e-4


class Case:
    """One golden checkpoint: the converted model, its tokenizer, and what the published package computed."""

    def __init__(self, name, folder):
        convert(str(GOLDEN_MODELS / name), str(folder), progress=False)
        self.model, self.tokenizer = mlx_zip.load(str(folder))
        self.expected = json.loads((GOLDEN_MODELS / name / "expected.json").read_text())
        self.arrays = np.load(GOLDEN_MODELS / name / "expected.npz")
        self.prompts = self.expected["prompts"]
        self.open_columns = self.model.layout.vocab_size + self.model.layout.codebook_size

    def last(self, ids, cache):
        return np.array(self.model(mx.array([ids]), cache=cache)[0, -1])

    def greedy(self, ids, cache, steps):
        made = []
        for _ in range(steps):
            made.append(int(self.last(ids, cache).argmax()))
            ids = made[-1:]
        return made


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("golden") / request.param)


def assert_logits(ours, theirs, columns):
    """Equal within the tolerance where finite, -inf in the same hyper columns, and our base tail closed."""
    finite = np.isfinite(theirs[..., :columns])
    assert (np.isfinite(ours[..., :columns]) == finite).all()
    np.testing.assert_allclose(ours[..., :columns][finite], theirs[..., :columns][finite], atol=LOGITS_ATOL, rtol=0)
    assert np.isneginf(ours[..., columns:]).all()


def test_encoders_give_the_published_rows(case):
    pad = case.expected["pad_token_id"]
    entries = case.arrays["encoder_codebook"][: len(case.arrays["encoder_input_side"])]
    lengths = (entries != pad).sum(axis=1)
    for side, rows in zip(("input", "output"), case.model.encode_rows(entries.astype(np.uint32), lengths), strict=True):
        np.testing.assert_allclose(np.array(rows), case.arrays[f"encoder_{side}_side"], atol=ROWS_ATOL, rtol=0)


@pytest.mark.parametrize("index", range(3))
def test_prompts_compress_to_the_published_ids_and_entries(case, index):
    prompt = case.prompts[index]
    assert [case.tokenizer.bos_token_id, *case.tokenizer.encode(prompt["text"])] == prompt["base_ids"]
    ids, _ = mlx_zip.compress(case.model.config.codec_params, prompt["base_ids"])
    assert ids.tolist() == prompt["compressed_ids"]
    book = mlx_zip.Codebook(case.model.config.codec_params)
    book.push(ids)
    assert [[i, list(entry)] for i, entry in book.entries] == prompt["codebook_after_prompt"]


@pytest.mark.parametrize("index", range(3))
def test_rows_of_the_prompt_s_entries_equal_the_published_ones(case, index):
    entries = case.prompts[index]["codebook_after_prompt"]
    width, pad = case.model.config.merge_size, case.model.config.pad_id
    padded = np.array([e + [pad] * (width - len(e)) for _, e in entries], dtype=np.uint32).reshape(-1, width)
    inputs, outputs = case.model.encode_rows(padded, np.array([len(e) for _, e in entries]))
    expected = case.arrays[f"p{index}_hyper_embedding_rows"], case.arrays[f"p{index}_hyper_linear_rows"]
    np.testing.assert_allclose(np.array(inputs), expected[0], atol=ROWS_ATOL, rtol=0)
    np.testing.assert_allclose(np.array(outputs), expected[1], atol=ROWS_ATOL, rtol=0)


@pytest.mark.parametrize("index", range(3))
def test_the_full_forward_gives_the_published_logits(case, index):
    ours = np.array(case.model(mx.array([case.prompts[index]["compressed_ids"]]))[0])
    assert_logits(ours, case.arrays[f"p{index}_logits"], case.open_columns)


@pytest.mark.parametrize("index", range(3))
def test_greedy_steps_give_the_published_ids_logits_and_entries(case, index):
    prompt, cache = case.prompts[index], case.model.make_cache()
    logits, made = [], []
    ids = prompt["compressed_ids"]
    for _ in prompt["generated_ids"]:
        logits.append(case.last(ids, cache))
        made.append(int(logits[-1].argmax()))
        ids = made[-1:]
    assert made == prompt["generated_ids"]
    expected = case.arrays[f"p{index}_step_logits"]
    assert_logits(np.stack(logits[: len(expected)]), expected, case.open_columns)
    book = cache[-1].books[0]
    assert [[i, list(entry)] for i, entry in book.entries] == prompt["codebook_after_generation"]
    assert prompt["base_ids"] + book.expand(made).tolist() == prompt["decoded_base_ids"]


CHUNKS = [(index, size) for index in range(3) for size in (1, 2, 5, 16)]


@pytest.mark.parametrize(("index", "size"), slow_but(CHUNKS, (0, 1), (1, 2), (2, 5), (0, 16)))
def test_any_chunking_of_the_prefill_gives_the_same_greedy_ids(case, index, size):
    prompt, cache = case.prompts[index], case.model.make_cache()
    ids = prompt["compressed_ids"]
    for begin in range(0, len(ids) - size, size):
        case.model(mx.array([ids[begin : begin + size]]), cache=cache)
    rest = ids[cache[-1].offset :]
    assert case.greedy(rest, cache, len(prompt["generated_ids"])) == prompt["generated_ids"]


@pytest.mark.parametrize("index", slow_but(range(3), 0))
def test_a_saved_trimmed_and_reloaded_cache_gives_the_same_logits_rows_and_ids(case, index, tmp_path):
    prompt, straight = case.prompts[index], case.model.make_cache()
    case.model(mx.array([prompt["compressed_ids"][:-1]]), cache=straight)
    detour = copy.deepcopy(straight)
    case.greedy(prompt["compressed_ids"][-1:], detour, 9)
    trim_prompt_cache(detour, 9)
    save_prompt_cache(str(tmp_path / "c.safetensors"), detour)
    loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
    last = prompt["compressed_ids"][-1:]
    expected = case.last(last, straight)
    for cache in (detour, loaded):
        np.testing.assert_allclose(case.last(last, cache), expected, atol=1e-5)
        live = len(cache[-1].books[0])
        rows = [np.array(c[-1].outputs.rows[:, :live]) for c in (cache, straight)]
        np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)
        made = case.greedy([int(expected.argmax())], cache, len(prompt["generated_ids"]) - 1)
        assert [int(expected.argmax()), *made] == prompt["generated_ids"]


def test_two_interleaved_conversations_give_the_ids_of_two_separate_ones(case):
    caches = [case.model.make_cache(), case.model.make_cache()]
    feeds = [p["compressed_ids"] for p in case.prompts[:2]]
    made = [[], []]
    for _ in range(min(len(p["generated_ids"]) for p in case.prompts[:2])):
        for who in (0, 1):
            made[who].append(int(case.last(feeds[who], caches[who]).argmax()))
            feeds[who] = made[who][-1:]
    for who in (0, 1):
        assert made[who] == case.prompts[who]["generated_ids"][: len(made[who])]


def test_a_left_padded_batch_gives_the_published_logits_and_ids(case):
    batch = case.expected["batch"]
    padding = [row.index(1) for row in batch["attention_mask"]]
    cache = case.model.make_cache(left_padding=padding)
    logits = case.model(mx.array(batch["input_ids"]), cache=cache)[:, -1]
    assert_logits(np.array(logits), case.arrays["batch_last_logits"], case.open_columns)
    made = []
    for _ in range(len(batch["generated_ids"][0])):
        made.append(np.array(mx.argmax(logits, axis=-1)).tolist())
        logits = case.model(mx.array(made[-1])[:, None], cache=cache)[:, -1]
    assert np.transpose(made).tolist() == batch["generated_ids"]


def test_the_chat_template_renders_and_compresses_to_the_published_ids(case):
    chat = case.expected["chat"]
    text = case.tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
    assert text == chat["rendered"]
    base_ids = case.tokenizer.encode(text, add_special_tokens=False)
    assert base_ids == chat["base_ids"]
    assert mlx_zip.compress(case.model.config.codec_params, base_ids)[0].tolist() == chat["compressed_ids"]
