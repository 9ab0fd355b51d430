"""meta.pt is read as data: plain values come out, and no code in it ever runs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.converters import meta_pt
from mlx_zip.converters.meta_pt import Opaque, read_encoder_overrides, read_meta_pt
from mlx_zip.errors import ConversionError
from support.checkpoints import pickled_args, write_checkpoint, write_meta
from support.converting import config_of, convert

PLAIN = {"a": [1, -2, 1 << 80, 2.5, None, True, False], "b": ("x", b"y", {"z": "\u4f60"}), 7: {3, 4}, "": []}


def meta(tmp_path: Path, value: Any, protocol: int = 2) -> Path:
    path = tmp_path / "meta.pt"
    write_meta(path, pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_in_every_pickle_protocol(protocol: int, tmp_path: Path) -> None:
    expected = {k: v for k, v in PLAIN.items() if protocol >= 3 or k != "b"}
    if protocol < 4:  # older protocols build sets by calling a class
        del expected[7]
    else:
        expected[7] = [3, 4]
    source = {k: set(v) if k == 7 else v for k, v in expected.items()}
    assert read_meta_pt(meta(tmp_path, source, protocol)) == expected


def test_objects_become_inert_with_their_state(tmp_path: Path) -> None:
    found = read_meta_pt(meta(tmp_path, {"args": argparse.Namespace(encoder_causal=True, lr=0.1)}))
    assert isinstance(found["args"], Opaque)
    assert found["args"].state == {"encoder_causal": True, "lr": 0.1}


@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict, lambda args: argparse.Namespace(**args)])
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"encoder_causal": True, "no_encoder_residual": True}, {"causal": True, "residual": False}),
        ({"encoder_causal": False}, {"causal": False, "residual": True}),
        ({"no_encoder_residual": 1}, {"causal": False, "residual": False}),
        ({"lr": 1e-4, "path": Path("/x")}, {"causal": False, "residual": True}),
        ({}, {}),
    ],
    ids=str,
)
def test_training_args_override_the_encoders_options_as_upstream(
    args: dict[str, Any], expected: dict[str, bool], wrap: Any, tmp_path: Path
) -> None:
    assert read_encoder_overrides(meta(tmp_path, {"args": wrap(args)})) == expected


@pytest.mark.parametrize("value", [{"step": 3}, {"args": None}, [1, 2], 7], ids=str)
def test_a_meta_without_args_overrides_nothing(value: Any, tmp_path: Path) -> None:
    assert read_encoder_overrides(meta(tmp_path, value)) == {}


class Calls:
    """Pickles to a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_does_not_run(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    value = {"args": {"encoder_causal": True, "x": Calls(os.mkdir, str(trap))}, "y": Calls(eval, "1/0")}
    path = meta(tmp_path, value, protocol)
    assert read_encoder_overrides(path) == {"causal": True, "residual": True}
    assert not trap.exists()
    pickle.loads(pickle.dumps({"x": value["args"]["x"]}, protocol=protocol))  # the trap does work
    assert trap.exists()


@pytest.mark.parametrize(
    "code",
    [b"cos\nsystem\n(S'touch ran'\ntR.", b"(S'touch ran'\nios\nsystem\n.", b"(cos\nsystem\nS'touch ran'\no."],
    ids=["GLOBAL REDUCE", "INST", "OBJ"],
)
def test_old_ways_to_call_a_function_do_not_run(code: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_meta(tmp_path / "meta.pt", code)
    assert isinstance(read_meta_pt(tmp_path / "meta.pt"), Opaque)
    assert not (tmp_path / "ran").exists()


def test_a_flag_that_is_not_plain_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="encoder_causal is not a plain value"):
        read_encoder_overrides(meta(tmp_path, {"args": {"encoder_causal": Calls(bool, 1)}}))


def test_files_of_torch_before_1_6_are_read(tmp_path: Path) -> None:
    parts = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {"args": {"encoder_causal": True}}, ["0"]]
    (tmp_path / "meta.pt").write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts) + b"storages")
    assert read_encoder_overrides(tmp_path / "meta.pt") == {"causal": True, "residual": True}


GOOD = pickled_args(encoder_causal=True)


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        GOOD[:-1],
        GOOD[: len(GOOD) // 2],
        b"\x80\x02}X\x05\x00\x00\x00ab.",
        b"\x80\x02u.",
        b"\x80\x02(K\x01u.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02K\x01}b.",
        b"h\x05.",
        b"\x82\x01.",
        b"\x80\x02" + b"(" * 9 + b"e.",
    ],
    ids=[
        "empty",
        "nothing",
        "no stop",
        "half",
        "short string",
        "no mark",
        "not a dict",
        "append to int",
        "state of dict",
        "memo",
        "extension",
        "marks",
    ],
)
def test_a_malformed_pickle_is_an_error(code: bytes, tmp_path: Path) -> None:
    write_meta(tmp_path / "meta.pt", code)
    with pytest.raises(ConversionError, match=r"meta\.pt is malformed"):
        read_meta_pt(tmp_path / "meta.pt")


FOUR_PICKLES = b"".join(pickle.dumps(part, protocol=2) for part in (1, 1001, {}, {"args": {}}))


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04 no", pickle.dumps({"args": {}}), FOUR_PICKLES], ids=repr)
def test_a_file_that_torch_did_not_write_is_an_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "meta.pt").write_bytes(data)
    with pytest.raises(ConversionError, match=r"meta\.pt"):
        read_meta_pt(tmp_path / "meta.pt")


def test_an_archive_without_a_pickle_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "meta.pt", "w") as archive:
        archive.writestr("meta/version", "3")
    with pytest.raises(ConversionError, match=r"0 data\.pkl"):
        read_meta_pt(tmp_path / "meta.pt")


def test_a_pickle_that_unpacks_to_too_much_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_pt, "MAX_PICKLE_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "meta.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta/data.pkl", b"N0" * 100_000 + b"N.")
    with pytest.raises(ConversionError, match="larger than 1000 bytes"):
        read_meta_pt(tmp_path / "meta.pt")


@pytest.mark.slow
def test_deep_nesting_neither_crashes_nor_recurses(tmp_path: Path) -> None:
    depth = 200_000
    write_meta(tmp_path / "meta.pt", b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert isinstance(read_meta_pt(tmp_path / "meta.pt"), list)
    tuples = b"\x80\x02}" + b"K\x01" + b"\x85" * depth + b"K\x01s."  # a dict with a deeply nested tuple as its key
    write_meta(tmp_path / "meta.pt", tuples)
    assert isinstance(read_meta_pt(tmp_path / "meta.pt"), dict)


@given(st.binary(max_size=60), st.integers(0, len(GOOD)), st.integers(0, 3))
def test_any_bytes_give_a_value_or_an_error(junk: bytes, at: int, cut: int) -> None:
    with contextlib.suppress(meta_pt._PickleError):
        meta_pt._read_one_pickle(io.BytesIO(GOOD[:at] + junk + GOOD[at + cut :]))


# ---- in a conversion


@pytest.mark.parametrize("self_contained", [False, True], ids=["format 1", "format 2"])
def test_a_conversion_honours_meta_and_warns(self_contained: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", "res_latent_attn", self_contained=self_contained)
    write_meta(tmp_path / "src" / "meta.pt", pickled_args(encoder_causal=True, no_encoder_residual=True))
    with pytest.warns(UserWarning, match=r"meta.pt overrides encoder\.(causal|residual)") as caught:
        out = convert(tmp_path / "src", tmp_path / "out")
    assert len(caught) == 2
    encoder = config_of(out)["zip2zip"]["encoder"]
    assert (encoder["causal"], encoder["residual"]) == (True, False)
    assert config_of(out)["zip2zip"]["source"]["meta_pt"] == {"causal": True, "residual": False}


def test_a_meta_that_agrees_is_silent(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_checkpoint(tmp_path / "src", "res_latent_attn")
    write_meta(tmp_path / "src" / "meta.pt", pickled_args(lr=1.0))
    assert config_of(convert(tmp_path / "src", tmp_path / "out"))["zip2zip"]["encoder"]["residual"] is True
    assert not [w for w in recwarn if "meta.pt" in str(w.message)]


def test_encoders_without_these_options_do_not_ask_meta(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", "transformer")
    write_meta(tmp_path / "src" / "meta.pt", pickled_args(encoder_causal=True))
    assert "causal" not in config_of(convert(tmp_path / "src", tmp_path / "out"))["zip2zip"]["encoder"]


def test_a_malformed_meta_stops_the_conversion(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", "res_latent_attn")
    (tmp_path / "src" / "meta.pt").write_bytes(b"PK broken")
    with pytest.raises(ConversionError, match=r"meta\.pt"):
        convert(tmp_path / "src", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_of_very_many_operations_is_refused_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_pt, "MAX_OPERATIONS", 1000)
    write_meta(tmp_path / "meta.pt", b"\x80\x02" + b"}" * 2000 + b".")
    with pytest.raises(ConversionError, match=r"meta\.pt is malformed: it has more than 1000 operations"):
        read_meta_pt(tmp_path / "meta.pt")


def test_damaged_compressed_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"args": {"lr": 0.5}}))
    data = bytearray(path.read_bytes())
    at = 30 + len("archive/data.pkl")  # after the local header: the first deflate block
    data[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(ConversionError, match=r"cannot read meta\.pt"):
        read_meta_pt(path)
