"""Training models over patches: the measure, resuming, learning; other ways to cut patches."""

import math
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.bench.papers.hbpe.patches import byte_entropies, entropy_patches, number_patches, space_patches
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.models.patches.patch_model import PatchConfig, PatchModel, PlainConfig, PlainModel
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.patch_training import (
    PatchCorpus,
    _iterate_window_batches,
    cut_patch_windows,
    evaluate_patch_corpus,
    sum_window_nats,
    train_patch_model,
)
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.hbpe.measures import Tower
from mlx_zip.vocab.hbpe.patch_merges import MARK
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from support.same_numbers import assert_same_losses, assert_same_weights

WORDS = [b"the", b" cat", b" and", b" dog", b"ouse", b" a very long word", b""]
END = len(WORDS) - 1
TABLE = PatchTable.learn(WORDS, 4)
BYTES = np.array(list(map(len, WORDS)))
SETTINGS = TrainSettings(iters=6, batch_size=2, learning_rate=0.01, save_every=3, keep=9, steps_per_report=1)
DOCUMENTS = [[0, 1, 2, 0, 3], [0, 3, 4, 2, 0, 1], [5, 1], [0, 4, 2, 5]] * 6


@pytest.fixture
def corpus():
    return PatchCorpus(cut_patch_windows(DOCUMENTS, END, 7), BYTES, TABLE.rows)


@pytest.fixture
def plain_corpus():
    return PatchCorpus(cut_patch_windows(DOCUMENTS, END, 7), BYTES)


def patch_model(seed=0):
    mx.random.seed(seed)
    return PatchModel(PatchConfig(TABLE.merges.symbols, 4, Tower(1, 16, 24, 2), Tower(1, 8, 12, 2)))


def plain_model(seed=0):
    mx.random.seed(seed)
    return PlainModel(PlainConfig(len(WORDS), Tower(1, 16, 24, 2)))


def weights(model):
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


# ---- the measure


def test_documents_follow_each_other_with_their_ends_between():
    assert cut_patch_windows([[1, 2], [3], [4, 5, 6]], 9, 4).tolist() == [[1, 2, 9, 3], [9, 4, 5, 6]]


def test_nats_of_patches_are_those_of_every_symbol_up_to_the_mark(corpus):
    model, ids = patch_model(), corpus.ids[:3]
    patches = corpus.rows[ids].astype(np.int32)
    logits = np.array(model(mx.array(patches))).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    total, counted = 0.0, 0
    for row, patch_row in zip(logs, patches, strict=True):
        for log, patch in zip(row, patch_row.tolist(), strict=True):
            for place in range(patch.index(MARK) + 1):
                total, counted = total - log[place, patch[place]], counted + 1
    assert counted == TABLE.lengths[ids].sum()
    assert sum_window_nats(model, corpus, ids).item() == pytest.approx(total, rel=1e-4)


def test_bits_per_byte_are_nats_over_the_bytes_of_the_text(corpus):
    model = patch_model()
    told = evaluate_patch_corpus(model, corpus, batch_size=2)
    text = b"".join(WORDS[i] for i in corpus.ids.reshape(-1))
    assert told["bytes"] == corpus.n_bytes == len(text)
    assert told["nats"] == pytest.approx(float(sum_window_nats(model, corpus, corpus.ids).item()), rel=1e-4)
    assert told["bits_per_byte"] == pytest.approx(told["nats"] / math.log(2) / len(text))
    assert told["units"] == corpus.ids.size


def test_nats_of_ids_are_those_of_every_id(plain_corpus):
    model, ids = plain_model(), plain_corpus.ids[:2]
    logits = np.array(model(mx.array(ids.astype(np.int32)))).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(logs, ids[..., None].astype(int), axis=-1).sum()
    assert sum_window_nats(model, plain_corpus, ids).item() == pytest.approx(expected, rel=1e-4)


# ---- training


@pytest.mark.parametrize("kind", ["patches", "plain"])
def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path, corpus, plain_corpus, kind):
    make, data = (patch_model, corpus) if kind == "patches" else (plain_model, plain_corpus)
    whole = make()
    train_patch_model(whole, data, SETTINGS, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(list_checkpoints(tmp_path / "stopped")[-1][1])
    resumed = make(seed=1)
    progress = train_patch_model(resumed, data, SETTINGS, tmp_path / "stopped")
    assert (progress.step, progress.seen_samples) == (6, 12)
    assert_same_weights(weights(resumed), weights(whole))
    told = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "stopped")]
    assert_same_losses(told[0], told[1])
    assert len(told[0]) == 6


def test_every_pass_reads_each_window_once_in_an_order_of_its_own():
    corpus = PatchCorpus(np.arange(14, dtype=np.uint32).reshape(7, 2), np.ones(14, np.int64))
    settings = TrainSettings(iters=9, batch_size=2)
    batches = [batch[:, 0].tolist() for batch in _iterate_window_batches(corpus, settings, 0)]
    passes = [[i for batch in batches[at : at + 3] for i in batch] for at in (0, 3, 6)]
    assert all(len(set(some)) == 6 for some in passes)  # seven windows: one is left out
    assert len({tuple(some) for some in passes}) == 3
    for step in range(9):
        assert [batch[:, 0].tolist() for batch in _iterate_window_batches(corpus, settings, step)] == batches[step:]


@pytest.mark.slow
def test_training_learns_the_text(tmp_path, corpus):
    model = patch_model()
    before = evaluate_patch_corpus(model, corpus)["bits_per_byte"]
    settings = TrainSettings(iters=120, batch_size=6, learning_rate=0.02, save_every=1000)
    train_patch_model(model, corpus, settings, tmp_path / "run")
    assert evaluate_patch_corpus(model, corpus)["bits_per_byte"] < before / 4


def test_another_run_does_not_go_on_from_its_checkpoints(tmp_path, corpus, plain_corpus):
    train_patch_model(patch_model(), corpus, SETTINGS, tmp_path)
    other = TrainSettings(**{**SETTINGS.to_dict(), "learning_rate": 0.02})
    shorter = PatchCorpus(corpus.ids[:-1], BYTES, TABLE.rows)
    for model, data, settings in (
        (patch_model(), corpus, other),
        (patch_model(), shorter, SETTINGS),
        (plain_model(), plain_corpus, SETTINGS),
    ):
        with pytest.raises(TrainingError, match="belongs to another"):
            train_patch_model(model, data, settings, tmp_path)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(tmp_path, corpus):
    model = patch_model()
    train_patch_model(model, corpus, SETTINGS, tmp_path)
    shutil.rmtree(list_checkpoints(tmp_path)[-1][1])
    broken = patch_model()
    head = broken.head
    broken.head = lambda states: head(states) * mx.array(float("nan"))
    with pytest.raises(TrainingError, match=r"step 4: .* not a number"):
        train_patch_model(broken, corpus, SETTINGS, tmp_path)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3]


def test_a_text_that_is_too_short_is_refused(tmp_path, corpus):
    with pytest.raises(DataError, match="does not fill one window"):
        PatchCorpus(cut_patch_windows([[1, 2]], END, 7), BYTES, TABLE.rows)
    with pytest.raises(TrainingError, match="1 windows do not fill a batch of 2"):
        train_patch_model(patch_model(), PatchCorpus(corpus.ids[:1], BYTES, TABLE.rows), SETTINGS, tmp_path)


def test_ids_of_another_vocabulary_are_refused(corpus):
    with pytest.raises(DataError, match="not below"):
        PatchCorpus(corpus.ids + 1, BYTES, TABLE.rows)


def test_a_text_that_the_model_cannot_read_is_refused(tmp_path, corpus, plain_corpus):
    wide = PatchCorpus(corpus.ids, BYTES, PatchTable.learn(WORDS, 6).rows)
    strange = PatchCorpus(corpus.ids, BYTES, np.where(TABLE.rows == 97, 999, TABLE.rows).astype(np.uint16))
    many = PatchCorpus(np.full((2, 7), len(WORDS), np.uint32), np.ones(99, np.int64))
    for model, data, message in (
        (patch_model(), wide, "patches of 4 symbols, the text has patches of 6"),
        (patch_model(), plain_corpus, "the text has no patches"),
        (patch_model(), strange, "has 1000 different"),
        (plain_model(), many, "has 8 different ids or symbols, the model knows 7"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate_patch_corpus(model, data)
        with pytest.raises(DataError, match=message):
            train_patch_model(model, data, SETTINGS, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- other patches


def test_space_patches_are_words_with_the_blank_before_them():
    text = b"the  cat sat\n\non a matress"
    patches = space_patches(text)
    assert b"".join(patches) == text
    assert patches == [b"the", b" ", b" cat", b" sat", b"\n", b"\n", b"on", b" a", b" matre", b"ss"]


def test_entropy_patches_begin_where_the_next_byte_is_hard_to_foresee():
    entropies = [0.1, 0.2, 3.0, 0.1, 3.0, *[0.0] * 7]
    assert entropy_patches(b"abcdefghijkl", entropies, 1.0) == [b"ab", b"cd", b"efghij", b"kl"]
    assert entropy_patches(b"", [], 1.0) == []


def test_patches_of_bytes_are_numbered_in_the_order_of_their_coming():
    ids, table = number_patches([[b"a", b"bc", b"a"], [b"abcdef"]])
    assert ids == [[0, 1, 0], [2]]
    assert table.rows[2].tolist() == [*b"abcdef", MARK]
    assert table.merges.pairs == ()


def test_byte_entropies_are_those_of_the_models_forecast():
    mx.random.seed(0)
    model = PlainModel(PlainConfig(257, Tower(1, 8, 8, 2)))
    found = byte_entropies(model, b"abcdefghij", 4)
    logits = np.array(model(mx.array([list(b"abcd"), list(b"efgh"), [*b"ij", 0, 0]]))).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert found == pytest.approx(-(p * np.log(p)).sum(axis=-1).reshape(-1)[:10], rel=1e-4)
