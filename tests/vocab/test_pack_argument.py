"""The flag --pack, declared once for all commands, and what every argument `pack=` accepts."""

import argparse

import numpy as np
import pytest

from mlx_zip.arguments import add_pack_flag
from mlx_zip.errors import DataError
from mlx_zip.packs.pack import Pack, as_pack, load_pack, save_pack
from mlx_zip.packs.tuned import TunedRows


def packs(*words):
    parser = argparse.ArgumentParser()
    add_pack_flag(parser.add_argument)
    return parser.parse_args(words).pack


def test_packs_are_listed_in_the_order_given():
    assert packs("--pack", "a.npz", "--pack", "b.npz") == ["a.npz", "b.npz"]
    assert packs() is None


def test_an_argument_takes_a_pack_or_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pack = Pack(((5, 6), (6, 7)), "ab" * 32)
    save_pack(tmp_path / "p.npz", pack)
    assert as_pack(pack) is pack
    assert as_pack(tmp_path / "p.npz") == as_pack(str(tmp_path / "p.npz")) == as_pack("~/p.npz") == pack


@pytest.mark.parametrize(("given", "told"), [("none.npz", "none.npz"), ("x.txt", "x.txt"), (((5, 6),), "not tuple")])
def test_an_argument_that_is_no_pack_is_named(given, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=told):
        as_pack(given)


def test_a_pack_is_shown_in_a_line_without_its_entries(tmp_path):
    rows = np.ones((300, 64), np.float32)
    entries = tuple((i, i + 1, i + 2) for i in range(300))
    save_pack(tmp_path / "p.npz", Pack(entries, "ab" * 32, {}, TunedRows(rows, rows, "m")))
    shown = repr(load_pack(tmp_path / "p.npz"))
    assert shown == f"<Pack {tmp_path / 'p.npz'}: 300 entries, merge size 3, tokenizer abababababab, tuned rows>"
    assert repr(Pack(((1, 2),))) == "<Pack 1 entries, merge size 2, tokenizer unknown>"
