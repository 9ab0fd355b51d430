"""Session files that are damaged, foreign or made up: each is refused with its reason, and nothing is lost."""

import json
import struct
import zlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import save_prompt_cache

from mlx_zip.engine.sessions import mlx_caches
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.errors import EngineError
from support import generating, keeping, tiny
from support.keeping import OWN
from support.serving import NEEDS_TORCH

NEXT = [7, 9, 11, 13, 5]


def file_of(kind, folder):
    """(the bytes of a session's file, its base ids)."""
    store = keeping.store(kind)
    name, held = keeping.conversation(kind, store, length=24, answers={"text": [3]})
    store.save(name, folder / "x")
    return (folder / "x").read_bytes(), held


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What `file_of` returns, on MLX."""
    return file_of("zip", tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def whole_on_pytorch(tmp_path_factory):
    return file_of("torch zip", tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module", params=keeping.ENGINES)
def both(request, tmp_path_factory):
    """(what `file_of` returns, the kind of model), on MLX and on PyTorch."""
    return file_of(request.param, tmp_path_factory.mktemp("kept")), request.param


def refused(folder, data, reason, kind="zip"):
    """Checks that a file with these bytes is refused, loaded and at a start, and stays as it is."""
    folder.mkdir(exist_ok=True, mode=0o700)
    file = folder / f"{'0' * 16}.safetensors"
    file.write_bytes(data)
    store = keeping.store(kind, folder=folder)
    _, held = keeping.conversation(kind, store, seed=5)
    with pytest.raises(EngineError, match=reason) as error:
        store.load(file)
    assert str(file) in str(error.value)
    assert store.checkout(held + NEXT, OWN, share=True).base_tokens == len(held)
    assert store.checkout(tiny.base_ids(24) + NEXT, OWN) is None
    assert len(store.sessions()) == 1
    store.close()
    assert file.read_bytes() == data


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def sealed(header, data):
    """A file with this header and data, and right checksums."""
    names = [name for name in header if name != "__metadata__"]
    names.sort(key=lambda name: header[name]["data_offsets"])
    index = header[names[1]]["data_offsets"][1]
    facts = header["__metadata__"]
    facts.update({"0.head_crc32": "0" * 8, "0.body_crc32": f"{zlib.crc32(data[index:]):08x}"})
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head_sum = zlib.crc32(struct.pack("<Q", len(text)) + text + data[:index])
    text = text.replace(b'"0.head_crc32":"00000000"', f'"0.head_crc32":"{head_sum:08x}"'.encode())
    return struct.pack("<Q", len(text)) + text + data


def test_a_file_that_is_sealed_again_unchanged_is_read(tmp_path, both):
    whole, kind = both
    (tmp_path / "x").write_bytes(sealed(*header_of(whole[0])))
    store = keeping.store(kind)
    assert store.load(tmp_path / "x").base_tokens == len(whole[1])


def test_a_flip_of_any_97th_byte_is_noticed(tmp_path, both):
    ((data, _), kind), file = both, tmp_path / "x"
    store = keeping.store(kind)
    for at in range(0, len(data), 97):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :])
        with pytest.raises(EngineError, match=r"x: .*(damaged|cut off|no session|not written|tensor)"):
            store.load(file)
    assert store.sessions() == []


def test_a_flip_in_the_index_is_noticed_at_a_start(tmp_path, whole, caplog):
    data = whole[0]
    for number, at in enumerate(range(3, len(data) // 3, 97)):
        flipped = data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]
        (tmp_path / f"{number:016x}.safetensors").write_bytes(flipped)
    (length,) = struct.unpack("<Q", data[:8])
    header, _ = header_of(data)
    index = max(place["data_offsets"][1] for name, place in header.items() if name in ("3.0", "3.1"))
    damaged = sum(at < 8 + length + index for at in range(3, len(data) // 3, 97))
    tmp_path.chmod(0o700)
    store = keeping.store(folder=tmp_path)
    assert len(store.sessions()) == number + 1 - damaged
    assert len(caplog.records) == 1
    assert f"has {damaged} file(s) that are not used" in caplog.text


def test_a_damaged_kv_cache_is_noticed_when_it_is_needed(tmp_path, both, caplog):
    (data, held), kind = both
    tmp_path.chmod(0o700)
    (tmp_path / f"{'0' * 16}.safetensors").write_bytes(data[:-5] + b"\x77" + data[-4:])
    store = keeping.store(kind, folder=tmp_path)
    assert store.checkout(held + NEXT, OWN) is None
    assert "its checksum is wrong" in caplog.text
    assert (tmp_path / f"{'0' * 16}.safetensors").exists()


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.3, 0.8, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path, both, share):
    (data, _), kind = both
    refused(tmp_path / "kept", data[: int(len(data) * share)], "cut off|damaged|tensor", kind)


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_is_refused_unread(tmp_path, whole, length):
    refused(tmp_path / "kept", struct.pack("<Q", length) + whole[0][8:], "its header would have|cut off")


@pytest.mark.parametrize("text", [b"", b"[" * 100000, b"{}", b'{"__metadata__": 3}', b"\xff\xfe", b"9" * 9000, b"null"])
def test_a_header_that_is_something_else_is_refused(tmp_path, text):
    refused(tmp_path / "kept", struct.pack("<Q", len(text)) + text, "header")


def changed(whole, change):
    header, data = header_of(whole[0])
    change(header)
    return sealed(header, data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["__metadata__"].update({"0.format": "mlx_zip session 2"}), "its format is 'mlx_zip session 2'"),
        (lambda h: h["__metadata__"].update({"0.model_fingerprint": "0"}), "another model than"),
        (lambda h: h["__metadata__"].update({"0.tokenizer_fingerprint": "0"}), "another tokenizer than"),
        (lambda h: h["__metadata__"].update({"0.codec": "{}"}), "another codec"),
        (lambda h: h["__metadata__"].update({"0.answers": "[[["}), "do not fit together"),
        (lambda h: h["__metadata__"].update({"0.answers": '{"a": "b"}'}), "do not fit together"),
        (lambda h: h["__metadata__"].pop("0.pack_key"), "do not fit together"),
        (lambda h: h["__metadata__"].update({"1.0": "os"}), "has a 'os' where this model has a KVCache"),
        (lambda h: h["__metadata__"].update({"1.2": "KVCache"}), "has a 'KVCache' where this model has its codebook"),
        (lambda h: h["__metadata__"].update({"2.1.1": "pickle"}), "unknown kind 'pickle'"),
        (lambda h: h["__metadata__"].update({"2.1.0": "7.7"}), "do not fit together"),
        (lambda h: h["0.0"].update({"shape": h["0.0"]["shape"][::-1]}), "not those of this model"),
        (lambda h: h["0.0"].update({"dtype": "I32"}), "not those of this model"),
        (lambda h: h["0.0"].update({"dtype": "F128"}), "header cannot be read"),
        (lambda h: h["0.0"].update({"shape": [1 << 40, 1 << 40]}), "place of its tensor '0.0' is wrong"),
        (lambda h: h["0.0"].update({"shape": [-1, -1]}), "header cannot be read"),
    ],
)
def test_a_made_up_file_with_right_checksums_is_refused(tmp_path, whole, change, reason):
    refused(tmp_path / "kept", changed(whole, change), reason)


CODEBOOK = "the arrays of its codebook are of another kind"
OTHER_CACHE = "not those of this model"


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["__metadata__"].update({"0.format": "mlx_zip torch session 2"}), "is 'mlx_zip torch session 2'"),
        (lambda h: h["__metadata__"].update({"0.model_fingerprint": "0"}), "another model than"),
        (lambda h: h["__metadata__"].update({"0.tokenizer_fingerprint": "0"}), "another tokenizer than"),
        (lambda h: h["__metadata__"].update({"0.codec": "{}"}), "another codec"),
        (lambda h: h["__metadata__"].update({"0.dtype": "bfloat16"}), "another type of numbers"),
        (lambda h: h["__metadata__"].pop("0.dtype"), "another type of numbers"),
        (lambda h: h["__metadata__"].update({"0.which": "2"}), "set 2 of rotary frequencies"),
        (lambda h: h["__metadata__"].update({"0.which": "-1"}), "set -1 of rotary frequencies"),
        (lambda h: h["__metadata__"].update({"0.which": "x"}), "do not fit together"),
        (lambda h: h["__metadata__"].pop("0.which"), "do not fit together"),
        (lambda h: h["keys_values"].update({"shape": h["keys_values"]["shape"][::-1]}), OTHER_CACHE),
        (lambda h: h["keys_values"].update({"dtype": "I32"}), OTHER_CACHE),
        (lambda h: h["log"].update({"dtype": "F32"}), CODEBOOK),
        (lambda h: h["log"].update({"shape": [1, *h["log"]["shape"]]}), CODEBOOK),
        (lambda h: h["start"].update({"dtype": "I8"}), CODEBOOK),
        (lambda h: h.update({"other": h.pop("start")}), "do not fit together"),
    ],
)
def test_a_made_up_file_is_refused_on_pytorch_too(tmp_path, whole_on_pytorch, change, reason):
    refused(tmp_path / "kept", changed(whole_on_pytorch, change), reason, "torch zip")


@NEEDS_TORCH
@pytest.mark.parametrize("name", ["log", "base_ids", "start"])
def test_values_that_do_not_belong_together_are_refused_on_pytorch(tmp_path, whole_on_pytorch, name):
    header, data = header_of(whole_on_pytorch[0])
    begin, end = header[name]["data_offsets"]
    values = np.frombuffer(data[begin:end], np.uint8).copy()
    values[-4] ^= 1
    made = sealed(header, data[:begin] + values.tobytes() + data[end:])
    refused(tmp_path / "kept", made, "holds other ids|do not fit together", "torch zip")


def test_a_file_of_another_model_is_refused(tmp_path):
    store = keeping.store("LongRoPE")
    name, _ = keeping.conversation("LongRoPE", store)
    store.save(name, tmp_path / "x")
    refused(tmp_path / "kept", (tmp_path / "x").read_bytes(), "another model than the one that is loaded")


def reopened(kind, folder, changes):
    """A store of the model of this kind, with the same weights and changes to its config; None changes its section."""
    made = keeping.model(kind.removeprefix("torch "))
    config = {**made.args.config, **changes}
    if None in changes:
        config = {**made.args.config, "zip2zip": {**made.args.config["zip2zip"], **changes[None]}}
    if keeping.is_torch(kind):
        from support import keeping_torch

        return keeping_torch.store(keeping_torch.model(made, folder, config), generating.TOKENIZER)
    return open_session_store(tiny.random_model(config, 0, 0.3), generating.TOKENIZER)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
FACTORS = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
ON_BOTH = pytest.mark.parametrize("engine", ["", *keeping.on_torch("torch ")])  # the beginning of a kind


@ON_BOTH
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("zip", {None: {"position_mode": "base_token_end"}}),
        ("zip", {"rope_theta": 1e6}),
        ("zip", {"rope_scaling": YARN}),
        ("zip", {"rope_parameters": YARN}),
        ("LongRoPE", {"rope_scaling": FACTORS}),
        ("LongRoPE", {"original_max_position_embeddings": 64}),
        ("LongRoPE", {"sliding_window": 20}),
    ],
)
def test_a_session_whose_positions_were_set_otherwise_is_refused(tmp_path, engine, kind, changes):
    kind = engine + kind
    file_of(kind, tmp_path)
    with pytest.raises(EngineError, match="another position mode, rotary setting or attention window than"):
        reopened(kind, tmp_path / "changed", changes).load(tmp_path / "x")
    assert reopened(kind, tmp_path / "same", {"max_new_thing": 3}).load(tmp_path / "x")


def test_a_session_that_does_not_say_how_positions_were_set_is_refused(tmp_path, both):
    (file, _), kind = both
    header, data = header_of(file)
    del header["__metadata__"]["0.positions"]
    refused(tmp_path / "kept", sealed(header, data), "another position mode, rotary setting or attention window", kind)


def test_a_cache_of_mlx_lm_is_refused_with_what_to_do(tmp_path):
    cache = keeping.new_cache("plain")
    keeping.read("plain", cache, [3, 4, 5])
    save_prompt_cache(str(tmp_path / "x.safetensors"), cache)
    refused(tmp_path / "kept", (tmp_path / "x.safetensors").read_bytes(), "mlx_zip cache-prompt", kind="plain")


def test_ids_that_are_not_those_of_the_codebook_are_refused(tmp_path, whole):
    header, data = header_of(whole[0])
    begin, end = header["3.0"]["data_offsets"]
    ids = np.frombuffer(data[begin:end], np.uint32).copy()
    ids[4] = (ids[4] + 1) % tiny.VOCAB
    refused(tmp_path / "kept", sealed(header, data[:begin] + ids.tobytes() + data[end:]), "holds other ids")


def test_devices_folders_and_missing_files_are_refused(tmp_path):
    store = keeping.store()
    for path in ("/dev/null", tmp_path, tmp_path / "missing"):
        with pytest.raises(EngineError, match=f"session file {path}: "):
            store.load(path)


def test_a_file_larger_than_all_sessions_may_be_is_refused(tmp_path, whole):
    (tmp_path / "x").write_bytes(whole[0])
    with pytest.raises(EngineError, match="bytes are more than the 1000 that sessions may take"):
        keeping.store(max_bytes=1000).load(tmp_path / "x")


def test_every_type_of_array_is_written_and_read_as_it_was():
    for dtype in mlx_caches.SAFETENSORS_TYPES:
        if dtype == mx.float64:
            continue
        array = (mx.arange(6).reshape(2, 3) % 2).astype(dtype)
        mx.eval(array)
        again = mlx_caches.array_from_tensor(mlx_caches.view_on_host(array))
        assert again.dtype == dtype
        assert mx.array_equal(again, array).item()
