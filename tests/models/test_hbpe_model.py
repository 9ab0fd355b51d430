"""The model over patches: what its logits have seen, padding, strict sizes, generation against the full forward."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_zip.bench.papers.hbpe.patches import LOCAL, SMALL
from mlx_zip.errors import CodecError, ConfigError, GenerationError
from mlx_zip.models.patch_model import (
    PatchConfig,
    PatchModel,
    PlainConfig,
    PlainModel,
    canonical_patch,
    count_parameters,
    generate_patches,
    pad_patch,
    patch_lengths,
)
from mlx_zip.vocab.hbpe.measures import Tower
from mlx_zip.vocab.hbpe.patch_merges import MARK, PatchMerges
from mlx_zip.vocab.hbpe.patch_table import PatchTable

WORDS = [b"banana", b" ban", b"nana nana", b"a", b"xy", b" is", b"and", b""]
TABLE = PatchTable.learn(WORDS, 4)
SIZES = {"symbols": TABLE.merges.symbols, "patch_size": 4, "latent": Tower(2, 16, 24, 2), "local": Tower(2, 8, 12, 2)}
ATOL = 2e-5


@pytest.fixture
def model():
    mx.random.seed(3)
    model = PatchModel(PatchConfig(**SIZES))
    model.update(tree_map(lambda value: 3 * value, model.parameters()))  # so that what was seen shows in the logits
    return model


def text(ids):
    return mx.array(TABLE.encode(ids).astype(np.int32))[None]


def logits_of(model, patches):
    return np.array(model(patches))


# ---- what the logits have seen


@pytest.mark.parametrize("at", range(5))
def test_logits_of_a_patch_do_not_see_it_or_a_later_one(model, at):
    ids = [0, 1, 2, 3, 4]
    before = logits_of(model, text(ids))
    ids[at] = 6
    after = logits_of(model, text(ids))
    assert np.array_equal(before[:, :at], after[:, :at])
    assert np.abs(before[:, at, 0] - after[:, at, 0]).max() < ATOL  # its first symbol is predicted before it is read
    if at + 1 < len(ids):
        assert np.abs(before[:, at + 1 :] - after[:, at + 1 :]).max() > 1e-3


@pytest.mark.parametrize("k", range(9))
def test_a_changed_byte_leaves_the_logits_of_earlier_bytes_alone(model, k):
    said = b"xy is a.b"
    rows = lambda said: mx.array([[pad_patch([*said[at : at + 3], MARK], 4) for at in range(0, 9, 3)]])
    before, after = (logits_of(model, rows(text))[0] for text in (said, said[:k] + b"?" + said[k + 1 :]))
    patch, place = divmod(k, 3)
    assert np.abs(before[:patch] - after[:patch]).max(initial=0) < ATOL
    assert np.abs(before[patch, : place + 1] - after[patch, : place + 1]).max() < ATOL
    assert np.abs(before[patch, place + 1 :] - after[patch, place + 1 :]).max() > 1e-3


@pytest.mark.parametrize("symbol", range(3))
def test_logits_of_a_symbol_do_not_see_it_or_a_later_one(model, symbol):
    patches = np.array(text([0, 1, 2]))
    before = logits_of(model, mx.array(patches))
    patches[0, 1, symbol] = 120
    after = logits_of(model, mx.array(patches))
    assert np.abs(before[0, 0] - after[0, 0]).max() < ATOL
    assert np.abs(before[0, 1, : symbol + 1] - after[0, 1, : symbol + 1]).max() < ATOL
    assert np.abs(before[0, 1, symbol + 1] - after[0, 1, symbol + 1]).max() > 1e-3


def test_texts_of_a_batch_do_not_see_each_other(model):
    both = mx.concatenate([text([0, 1, 2]), text([5, 6, 4])])
    whole = logits_of(model, both)
    for row, ids in enumerate(([0, 1, 2], [5, 6, 4])):
        assert np.abs(whole[row] - logits_of(model, text(ids))[0]).max() < ATOL


def test_symbols_after_the_mark_are_not_read(model):
    patches = mx.array([[97, MARK, MARK, MARK], [97, MARK, 98, 99]])
    e = np.array(model.encode_patches(patches))
    assert np.abs(e[0] - e[1]).max() < ATOL


def test_a_patch_without_a_mark_is_read_to_its_last_symbol(model):
    e = np.array(model.encode_patches(mx.array([[97, 98, 99, 100], [97, 98, 99, 101], [97, 98, 99, MARK]])))
    assert np.abs(e[0] - e[1]).max() > 1e-3
    assert np.abs(e[0] - e[2]).max() > 1e-3


def test_lengths_count_the_mark():
    patches = mx.array([[MARK, MARK, 1], [1, MARK, 2], [1, 2, MARK], [1, 2, 3]])
    assert patch_lengths(patches).tolist() == [1, 2, 3, 3]


def test_a_plain_models_logits_depend_on_earlier_ids_only():
    mx.random.seed(0)
    model = PlainModel(PlainConfig(9, Tower(2, 16, 24, 2)))
    before = np.array(model(mx.array([[1, 2, 3, 4]])))
    after = np.array(model(mx.array([[1, 2, 8, 4]])))
    assert np.abs(before[0, :3] - after[0, :3]).max() < ATOL
    assert np.abs(before[0, 3] - after[0, 3]).max() > 1e-4


# ---- generation


def full_choices(model, prompt, patches):
    """The likeliest symbols of each written patch by one full forward over what the model read."""
    read = [*prompt, *(canonical_patch(TABLE.merges, patch) for patch in patches)]
    rows = mx.array([[pad_patch(patch, 4) for patch in read]])
    h = model.latent_states(model.encode_patches(rows[0])[None])[0]
    out = []
    for t, patch in enumerate(patches, start=len(prompt)):
        states = model.states(h[t : t + 1], mx.array([patch[:-1]], mx.int32).reshape(1, -1))
        out.append(np.array(model.head(states))[0].argmax(axis=-1).tolist())
    return out


@pytest.mark.parametrize("prompt", [[], [0], [0, 4, 2, 5]])
def test_greedy_generation_is_what_the_full_forward_would_choose(model, prompt):
    rows = [TABLE.merges.encode(WORDS[i]) for i in prompt]
    patches = list(generate_patches(model, TABLE.merges, rows, max_patches=12))
    assert len(patches) == 12 or patches[-1] == [MARK]
    assert full_choices(model, rows, patches) == patches


def count_reads(model):
    """Lets a model note how many patches each call of its large model reads; returns the list."""
    lengths, latent = [], model.latent
    model.latent = type(
        "Counted",
        (),
        {
            "make_cache": lambda self: latent.make_cache(),
            "__call__": lambda self, x, mask, cache=None: lengths.append(x.shape[1]) or latent(x, mask, cache),
        },
    )()
    return lengths


def test_the_large_model_runs_once_per_patch(model):
    lengths = count_reads(model)
    patches = list(generate_patches(model, TABLE.merges, [[97, MARK]] * 3, max_patches=5))
    assert lengths == [4] + [1] * (len(patches) - 1)


def test_a_long_prompt_is_read_in_parts_so_that_memory_does_not_grow_with_its_square(model):
    lengths = count_reads(model)
    rows = [TABLE.merges.encode(WORDS[i % 7]) for i in range(1300)]
    patches = list(generate_patches(model, TABLE.merges, rows, max_patches=3))
    assert max(lengths) <= 512
    assert sum(lengths) == 1 + len(rows) + len(patches) - 1
    assert full_choices(model, rows, patches) == patches


def test_generation_ends_after_a_patch_of_the_mark_alone(model):
    model.head = lambda states: mx.where(mx.arange(TABLE.merges.symbols) == MARK, 1.0, 0.0)[None, None]
    assert list(generate_patches(model, TABLE.merges)) == [[MARK]]


def test_a_patch_that_never_ends_is_cut_at_its_size(model):
    model.head = lambda states: mx.where(mx.arange(TABLE.merges.symbols) == 97, 1.0, 0.0)[None, None]
    assert list(generate_patches(model, TABLE.merges, max_patches=3)) == [[97] * 4] * 3


def test_sampling_follows_its_seed(model):
    draw = lambda seed: list(generate_patches(model, TABLE.merges, max_patches=8, temperature=1.0, seed=seed))
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_generated_patch_is_read_back_as_the_canonical_patch_of_its_bytes():
    merges = PatchMerges(4, ((97, 98), (257, 99)))  # ab, abc
    assert canonical_patch(merges, [258, 97, 98, MARK]) == merges.encode(b"abcab") == [257, 99, 257, MARK]
    assert canonical_patch(merges, [97, MARK]) == [97, MARK]
    assert canonical_patch(merges, [120, 121, 122, 120]) == [120, 121, 122, 120]  # its bytes and a mark would not fit
    assert canonical_patch(merges, [97, 98, 120, 121]) == [257, 120, 121, MARK]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"merges": PatchMerges(4, ())}, "these merges make patches of 4 out of 257"),
        ({"merges": PatchMerges(5, TABLE.merges.pairs)}, "of 5 out of"),
        ({"prompt": [[97] * 5]}, "1 to 4 symbols"),
        ({"prompt": [[]]}, "1 to 4 symbols"),
        ({"prompt": [[97, 999]]}, "symbol 999"),
        ({"max_patches": 0}, "max_patches"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(model, arguments, message):
    with pytest.raises(GenerationError, match=message):
        generate_patches(model, **{"merges": TABLE.merges, **arguments})


# ---- sizes


def test_sizes_are_read_back_as_written():
    config = PatchConfig(**SIZES)
    assert PatchConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"symbols": 256}, "symbols"),
        ({"patch_size": 1}, "patch_size"),
        ({"patch_size": 4.0}, "patch_size"),
        ({"latent": {"layers": 2, "width": 16, "ffn": 24}}, "latent: unknown or missing: heads"),
        ({"latent": {"layers": 2, "width": 16, "ffn": 24, "heads": 3}}, "latent: width 16"),
        ({"local": {"layers": 0, "width": 16, "ffn": 24, "heads": 2}}, "local: layers"),
        ({"local": {"layers": True, "width": 16, "ffn": 24, "heads": 2}}, "local: layers"),
        ({"local": 3}, "local must be an object"),
        ({"hashes": 1}, "unknown or missing: hashes"),
    ],
)
def test_wrong_sizes_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        PatchConfig.from_dict({**PatchConfig(**SIZES).to_dict(), **change})


def test_wrong_sizes_of_a_plain_model_are_refused_by_name():
    with pytest.raises(ConfigError, match="vocab_size"):
        PlainConfig(0, Tower(1, 4, 4, 1))
    with pytest.raises(ConfigError, match="must be an object"):
        PatchConfig.from_dict([])


@pytest.mark.parametrize(("tower", "millions"), [(SMALL, 84.9), (Tower(24, 1024, 2816, 16), 308.3)])
def test_the_latent_models_have_the_parameter_counts_of_the_paper(tower, millions):
    block = 4 * tower.width**2 + 3 * tower.width * tower.ffn + 2 * tower.width
    counted = tower.layers * block + tower.width
    assert round(counted / 1e6, 1) == pytest.approx(millions, abs=0.11)
    layers, width = 1, 64
    model = PlainModel(PlainConfig(1, Tower(layers, width, 2 * width, 2)))
    assert count_parameters(model) == 4 * width**2 + 6 * width**2 + 2 * width + width + 2 * width


def test_the_local_models_of_the_small_model_have_about_the_rest_of_the_papers_count():
    model = PatchModel(PatchConfig(257 + 240, 10, Tower(1, 768, 8, 12), LOCAL))
    latent = count_parameters(model.latent)
    assert count_parameters(model) - latent == pytest.approx(11.9e6, rel=0.03)  # the table leaves 14.8 million for it


def test_a_patch_is_read_back_in_the_mode_of_its_table(model):
    token = bytes(TABLE.merges.decode([257, MARK]))  # the first merge: it fits as it is, so `stop` leaves it alone
    other = TABLE.merges.encode(token, "full")
    assert other != TABLE.merges.encode(token)
    assert canonical_patch(TABLE.merges, other, "full") == other
    assert canonical_patch(TABLE.merges, other) != other
    with pytest.raises(CodecError, match="mode"):
        generate_patches(model, TABLE.merges, mode="other")
