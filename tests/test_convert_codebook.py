"""`convert --codebook`: a model that begins every request with the entries of a pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_convert import GOLDEN, config_of, convert

from mlx_zip.errors import ConversionError, DataError
from mlx_zip.generate import load
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import Pack, save_pack
from mlx_zip.vocab.tuned import TunedRows

CHECKPOINT = GOLDEN / "llama_transformer_untied_pos"
ENTRIES = ((10, 11), (11, 12, 13))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(CHECKPOINT, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def packed(converted: Path, tmp_path: Path) -> Any:
    """Converts the converted model again with packs -> the new folder."""
    mark = tokenizer_fingerprint(load(str(converted))[1])

    def command(*packs: tuple[tuple[int, ...], ...], tokenizer: str | None = mark, **options: Any) -> Path:
        files = [tmp_path / f"{n}.npz" for n in range(len(packs))]
        for file, entries in zip(files, packs, strict=True):
            save_pack(file, Pack(entries, tokenizer))
        return convert(converted, tmp_path / "out", codebook=files, **options)

    return command


def test_the_model_begins_with_the_packs_merged(packed: Any, converted: Path) -> None:
    folder = packed(ENTRIES, ((10, 11), (20, 21)), quantize=True, q_group_size=32)
    assert config_of(folder)["zip2zip"]["start"] == [[10, 11], [11, 12, 13], [20, 21]]
    model = load(str(folder))[0]
    assert model.make_cache()[-1].books[0].entries[1] == (model.config.vocab_size + 1, (11, 12, 13))
    assert load(str(converted))[0].config.start is None


def test_another_pack_takes_the_place_of_the_first_and_none_leaves_it(packed: Any, tmp_path: Path) -> None:
    first = packed(ENTRIES)
    save_pack(tmp_path / "other.npz", Pack(((30, 31),)))
    other = convert(first, tmp_path / "other", codebook=[tmp_path / "other.npz"])
    assert config_of(other)["zip2zip"]["start"] == [[30, 31]]
    assert config_of(convert(first, tmp_path / "again"))["zip2zip"]["start"] == [list(entry) for entry in ENTRIES]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (((1, 2, 3, 4, 5, 6, 7, 8, 9),), r"0\.npz does not fit the model: start entry 0 has 9 ids"),
        (((1, 999_999),), "disabled or no base id"),
        (tuple((i, i + 1) for i in range(10, 210)), "do not fit in codebook_size"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused(entries: Any, message: str, packed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        packed(entries)
    assert not (tmp_path / "out").exists()


def test_a_pack_of_another_tokenizer_is_refused(packed: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.npz was learned with another tokenizer"):
        packed(ENTRIES, tokenizer="0" * 64)
    assert not (tmp_path / "out").exists()


def test_a_tuned_pack_is_refused_for_its_rows_would_be_lost(converted: Path, tmp_path: Path) -> None:
    rows = np.ones((len(ENTRIES), 4), np.float32)
    save_pack(tmp_path / "tuned.npz", Pack(ENTRIES, rows=TunedRows(rows, rows, "some model")))
    with pytest.raises(ConversionError, match=r"tuned\.npz has tuned rows.*--drop-rows"):
        convert(converted, tmp_path / "out", codebook=[tmp_path / "tuned.npz"])
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_takes_no_codebook(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no --canonical, no --codebook and no --policy"):
        convert(CHECKPOINT, tmp_path / "out", lora_only=True, codebook=["x.npz"])
