"""Damaged and hostile GGUF files: each is refused with one line, in bounded memory, and leaves nothing behind."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip.converters import output
from mlx_zip.converters.gguf.gguf_file import read_gguf
from mlx_zip.errors import ConversionError, ModelError
from mlx_zip.models.model_folder import find_model_folder
from support import gguf_files as files
from support import gguf_vocabularies as vocabularies
from support.converting import convert
from support.gguf_files import Stored, encode, entry, string, tiny, value

MOST_BYTES = 64 << 20  # that a conversion may take beyond the file, whatever the file announces
MOST_WORDS = 1500  # characters of a message
HUGE = (1 << 62, (1 << 64) - 1, 1 << 63, 1 << 40, 1 << 33)
GGML = "tokenizer.ggml."


@cache
def parts() -> tuple[dict[str, Any], dict[str, Stored]]:
    """The metadata and the tensors of a lawful file with packed matrices."""
    tokenizer = vocabularies.byte_level(size=300)
    model = tiny("llama", vocab=len(tokenizer[GGML + "tokens"]), width=32)
    return {**model.metadata, **tokenizer}, model.tensors("Q8_0", np.random.default_rng(0))


@cache
def whole() -> bytes:
    return encode(*parts())


def header_bytes() -> int:
    return len(whole()) - sum(len(one.data) + -len(one.data) % 32 for one in parts()[1].values())


def with_keys(drop: tuple[str, ...] = (), **more: Any) -> bytes:
    """The file with other metadata; keys have a slash where the format has a dot."""
    metadata, tensors = parts()
    kept = {key: one for key, one in metadata.items() if key not in drop}
    return encode({**kept, **{key.replace("/", "."): one for key, one in more.items()}}, tensors)


def with_raw_key(data: bytes) -> bytes:
    """The file with one more key, given as it is stored."""
    metadata, tensors = parts()
    made = encode(metadata, tensors)
    keys = struct.unpack_from("<Q", made, 16)[0]
    return made[:16] + struct.pack("<Q", keys + 1) + data + made[24:]


def with_tensors(tensors: dict[str, Stored], drop: tuple[str, ...] = ()) -> bytes:
    metadata, old = parts()
    return encode(metadata, {name: one for name, one in {**old, **tensors}.items() if name not in drop})


def with_entry(name: str, data: bytes) -> bytes:
    """The file with a tensor's entry in the header replaced."""
    offset = 0
    for known, tensor in parts()[1].items():
        if known == name:
            old = entry(name, tensor, offset)
            assert whole().count(old) == 1
            made = whole().replace(old, data)
            missing = len(whole()) - len(made)  # the data stay where they were, as far as padding allows
            at = header_bytes() - missing
            return made[:at] + (b"\0" * missing if missing >= 0 else b"") + made[at:]
        offset += len(tensor.data) + -len(tensor.data) % 32
    raise KeyError(name)


def head(
    name: str = "output_norm.weight",
    shape: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int | None = None,
    rank: int | None = None,
) -> bytes:
    """The entry of a tensor, by default the true one of the file's final norm."""
    true = 0
    for known, tensor in parts()[1].items():
        if known == "output_norm.weight":
            break
        true += len(tensor.data) + -len(tensor.data) % 32
    sizes = b"".join(struct.pack("<Q", size % (1 << 64)) for size in shape)
    at = true if offset is None else offset
    return string(name) + struct.pack("<I", len(shape) if rank is None else rank) + sizes + struct.pack("<IQ", kind, at)


def truncated() -> Iterator[tuple[str, bytes]]:
    header = header_bytes()
    for part in range(30):
        yield f"header cut at {part} of 30", whole()[: header * part // 30]
    for part in range(1, 15):
        yield f"data cut at {part} of 15", whole()[: header + (len(whole()) - header) * part // 15]
    yield "the last byte is missing", whole()[: -32 - 1]
    for size in (1, 3, 4, 7, 8, 15, 16, 23, 24):
        yield f"{size} bytes", whole()[:size]
    yield "bytes behind the last tensor", whole() + b"\0" * 64


def counted() -> Iterator[tuple[str, bytes]]:
    """Versions, counts and lengths that are absurd."""
    for version in (0, 1, 4, 99, 2 << 24, 3 << 24, 0xFFFFFFFF):
        yield f"version {version}", whole()[:4] + struct.pack("<I", version) + whole()[8:]
    for many in (*HUGE, 70_000, len(parts()[1]) + 1):
        yield f"{many} tensors", whole()[:8] + struct.pack("<Q", many) + whole()[16:]
    for many in (*HUGE, 5000, len(parts()[0]) + 1):
        yield f"{many} keys", whole()[:16] + struct.pack("<Q", many) + whole()[24:]
    for size in (*HUGE, 0, 300, 1 << 20):
        yield f"a key of {size} bytes", with_raw_key(struct.pack("<Q", size) + b"general.a" + value(1))
        if size:
            yield f"a text of {size} bytes", with_raw_key(string("general.a") + struct.pack("<IQ", 8, size) + b"short")
    for kind in range(13):
        if kind == 9:
            continue
        array = struct.pack("<IIQ", 9, kind, 1 << 62)
        yield f"an endless array of the type {kind}", with_raw_key(string("general.a") + array)
    for count in (1 << 22, 1 << 32):
        array = struct.pack("<IIQ", 9, 8, count)
        yield f"an array of {count} texts", with_raw_key(string("general.a") + array)


def typed() -> Iterator[tuple[str, bytes]]:
    """Types and names that cannot be."""
    for kind in (13, 14, 99, 0xFFFFFFFF):
        yield f"a value of the type {kind}", with_raw_key(string("general.a") + struct.pack("<IQ", kind, 0))
        array = struct.pack("<IIQ", 9, kind, 1)
        yield f"an array of the type {kind}", with_raw_key(string("general.a") + array + b"\0" * 8)
    yield "an array of arrays", with_raw_key(string("general.a") + struct.pack("<IIQIQ", 9, 9, 1, 0, 0))
    yield "a truth value of 2", with_raw_key(string("general.a") + struct.pack("<IB", 7, 2))
    yield "a key there twice", with_raw_key(string("general.name") + value("again"))
    yield "a text that is not UTF-8", with_raw_key(string("general.a") + struct.pack("<I", 8) + string(b"\xff\xfe"))
    yield "a token that is not UTF-8", whole().replace(string("<|im_start|>"), string(b"<|im\xffstart|>"), 1)
    for name in (b"general.\xff", b"general.\n", b"general.\0", "general.ä".encode()):
        yield f"a key called {name!r}", with_raw_key(string(name) + value(1))
    for name in (b"output_norm.\xff\xffeight", b"output_norm.\nweight", b""):
        made = head().replace(string("output_norm.weight"), string(name))
        yield f"a tensor called {name!r}", with_entry("output_norm.weight", made)


def placed() -> Iterator[tuple[str, bytes]]:
    """Shapes, types and offsets of tensors that cannot be."""
    norm = "output_norm.weight"
    for rank in (0, 5, 1 << 20, 0xFFFFFFFF):
        yield f"{rank} dimensions", with_entry(norm, head(rank=rank))
    for shape in (
        (0,),
        (-1,),
        (1 << 62,),
        (1 << 32, 1 << 32),
        (1 << 21, 1 << 21, 1 << 21, 1 << 21),
        (31,),
        (33,),
        (64,),
    ):
        yield f"a norm of {shape}", with_entry(norm, head(shape=shape))
    for kind in (4, 5, 9, 15, 16, 24, 31, 39, 255, 0xFFFFFFFF):
        yield f"the tensor type {kind}", with_entry(norm, head(kind=kind))
    for kind in (2, 3, 6, 7, 8, 10, 12, 14):
        yield f"a norm in the packed type {kind}", with_entry(norm, head(kind=kind))
    for offset in (0, 1, 31, 32, 1 << 20, 1 << 40, (1 << 64) - 32, (1 << 64) - 1, 1 << 63):
        yield f"a tensor at {offset}", with_entry(norm, head(offset=offset))
    yield "a tensor there twice", with_entry(norm, head(name="token_embd.weight"))
    for step in (0, 1, 2, 4, 7, 24, 1 << 17, "32", 32.0, True):
        yield f"an alignment of {step!r}", with_raw_key(string("general.alignment") + value(step))


def meant() -> Iterator[tuple[str, bytes]]:
    """Files whose form is right and whose content is not."""
    metadata, tensors = parts()
    sizes = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length")
    for name in sizes:
        key = f"llama.{name}"
        yield f"no {key}", with_keys(drop=(key,))
        for wrong in (0, 7, "many", 2.5, np.int32(-1), np.uint64(1 << 40), True, np.array([1, 2], np.uint32)):
            if name == "context_length" and type(wrong) is int and wrong == 7:
                continue  # a context may have any size
            yield f"{key} is {wrong!r}", with_keys(**{key: wrong})
    for key in ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"):
        for wrong in ("1", 0.0, -1.0, float("nan"), float("inf"), np.float64(1e300), np.float64(1e-300)):
            yield f"{key} is {wrong!r}", with_keys(**{key: wrong})
    for key, wrong in (
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 7),
        ("llama.attention.value_length", 16),
        ("llama.rope.dimension_count", 4),
        ("llama.rope.scaling.type", "strange"),
        ("llama.rope.scaling.type", 1),
        ("llama.rope.scaling.type", np.ones(2, np.uint32)),
        ("llama.attention.sliding_window", -1.0),
        ("llama.expert_count", 8),
        ("llama.expert_count", np.ones(2, np.uint32)),
        ("llama.vocab_size", 5),
        ("llama.tensor_data_layout", "another"),
        ("llama.tensor_data_layout", np.ones(2, np.uint32)),
        ("llama.strange", 1),
        ("strange", 1),
        ("split.count", 2),
        ("split.count", np.ones(2, np.uint32)),
        ("general.architecture", "mamba"),
        ("general.architecture", 5),
        ("general.type", "adapter"),
        ("general.type", np.ones(2, np.uint32)),
        ("tokenizer.chat_template", 1),
        ("tokenizer.chat_templates", "x"),
        (f"{GGML}model", "t5"),
        (f"{GGML}model", 1),
        (f"{GGML}pre", "strange"),
        (f"{GGML}strange", 1),
        (f"{GGML}tokens", []),
        (f"{GGML}tokens", "token"),
        (f"{GGML}tokens", [f"{i}" for i in range(1000)]),
        (f"{GGML}token_type", np.ones(3, np.int32)),
        (f"{GGML}token_type", np.full(len(metadata[f"{GGML}tokens"]), 9, np.int32)),
        (f"{GGML}token_type", np.full(len(metadata[f"{GGML}tokens"]), -1, np.int32)),
        (f"{GGML}token_type", np.full(len(metadata[f"{GGML}tokens"]), np.nan, np.float32)),
        (f"{GGML}scores", np.full(len(metadata[f"{GGML}tokens"]), np.inf, np.float32)),
        (f"{GGML}merges", ["a"]),
        (f"{GGML}merges", ["a b c"]),
        (f"{GGML}merges", ["no such"]),
        (f"{GGML}merges", 1),
        (f"{GGML}eos_token_id", 1 << 20),
        (f"{GGML}eos_token_id", "x"),
        (f"{GGML}add_bos_token", 1),
    ):
        shown = wrong if not isinstance(wrong, np.ndarray | list) else f"{type(wrong).__name__} of {len(wrong)}"
        yield f"{key} is {shown!r}", with_keys(**{key: wrong})
    for tokens in (["a", "a"], ["a", ""], []):
        yield f"the tokens are {tokens}", with_keys(drop=(f"{GGML}token_type",), **{f"{GGML}tokens": tokens})
    for name in ("token_embd.weight", "blk.1.attn_norm.weight", "blk.0.ffn_gate.weight", "output_norm.weight"):
        yield f"no {name}", with_tensors({}, drop=(name,))
    for name in ("strange.weight", "blk.9.attn_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight"):
        yield f"a tensor {name}", with_tensors({name: files.dense(np.ones(32))})
    yield "a misshapen matrix", with_tensors({"blk.0.ffn_gate.weight": files.dense(np.ones((32, 64)))})
    yield (
        "a vector in blocks",
        with_tensors({"output_norm.weight": files.blocks(np.random.default_rng(0), (32,), "Q8_0")}),
    )
    for number in (np.nan, np.inf, 600.0):
        head = tensors["output.weight"]
        data = np.float16(number).tobytes() + head.data[2:]
        yield f"a scale of {number}", with_tensors({"output.weight": Stored(head.kind, head.shape, data)})
    for number in (np.nan, -np.inf, 1e6):  # which float16 does not hold
        yield f"a norm with {number}", with_tensors({"output_norm.weight": files.dense(np.r_[np.ones(31), number])})
    matrix = np.ones(parts()[1]["blk.0.ffn_gate.weight"].shape)
    matrix[-1, -1] = np.nan
    yield "a matrix with nan", with_tensors({"blk.0.ffn_gate.weight": files.dense(matrix)})


CASES = [*truncated(), *counted(), *typed(), *placed(), *meant()]


def test_the_file_that_is_damaged_here_can_be_converted(tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole())
    assert (convert(tmp_path / "model.gguf", tmp_path / "out") / "model.safetensors").is_file()


def test_there_are_two_hundred_damaged_files_and_no_two_are_alike():
    assert len(CASES) >= 200
    assert len({data for _, data in CASES}) == len(CASES)
    assert whole() not in {data for _, data in CASES}


def check_refused(tmp_path: Path, data: bytes) -> str:
    """Asserts that the file is refused with one line and leaves nothing; returns that line."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ConversionError) as caught:
        convert(path, tmp_path / "out")
    line = str(caught.value)
    assert line.isprintable()
    assert str(path) in line
    assert len(line) < MOST_WORDS
    assert [one.name for one in tmp_path.iterdir()] == ["model.gguf"]
    return line


@pytest.mark.parametrize(("name", "data"), CASES, ids=[name for name, _ in CASES])
def test_a_damaged_file_is_refused_with_one_line_and_leaves_nothing(tmp_path, name, data):
    check_refused(tmp_path, data)


def test_damaged_files_take_little_memory(tmp_path):
    path = tmp_path / "model.gguf"
    check_refused(tmp_path, CASES[0][1])  # imports take memory once
    tracemalloc.start()
    try:
        for name, data in [*counted(), *placed()]:
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(ConversionError):
                convert(path, tmp_path / "out")
            assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES, name
    finally:
        tracemalloc.stop()


def refusal(path: Path, out: Path) -> str | None:
    try:
        convert(path, out)
    except ConversionError as error:
        return str(error)
    return None


def test_a_changed_bit_in_the_header_is_refused_or_gives_a_whole_folder(tmp_path):
    rng = np.random.default_rng(11)
    tokens = whole().index(string(GGML + "tokens"))  # most of the header are tokens, of which any may be lawful
    places = [*rng.integers(0, tokens, 60), *rng.integers(tokens, header_bytes(), 30)]
    refused = 0
    for number, place in enumerate(map(int, places)):
        data = bytearray(whole())
        data[place] ^= 1 << number % 8
        path, out = tmp_path / "model.gguf", tmp_path / f"out{number}"
        path.write_bytes(bytes(data))
        line = refusal(path, out)
        assert line is None or line.isprintable()
        refused += line is not None
        assert not list(tmp_path.glob(".*"))
        assert not out.exists() or (out / "config.json").is_file()
    assert refused > 30


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_behind_the_magic_ones_are_refused(tmp_path, seed):
    noise = np.random.default_rng(seed).integers(0, 256, 4096, np.uint8).tobytes()
    check_refused(tmp_path, b"GGUF\3\0\0\0" + noise)
    check_refused(tmp_path, b"GGUF\3\0\0\0" + struct.pack("<QQ", 3, 3) + noise)


def test_a_header_that_never_ends_is_refused_before_it_is_read(tmp_path):
    keys = b"".join(string(f"general.k{i}") + value(["x" * 40] * 2000) for i in range(20))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 21) + keys)
    with pytest.raises(ConversionError, match="truncated or damaged"):
        read_gguf(path)


@pytest.mark.parametrize("change", ["shorter", "empty", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, change):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole())

    def then_change(*arguments: Any) -> None:
        with open(path, "r+b") as file:
            if change == "rewritten":
                file.write(whole())
                os.utime(path, ns=(1, 1))
            else:
                file.truncate(0 if change == "empty" else header_bytes() + 100)
        write_model(*arguments)

    write_model = output.write_model
    monkeypatch.setattr(output, "write_model", then_change)
    with pytest.raises(ConversionError, match=f"^{path}: the file changed while it was read; convert it again"):
        convert(path, tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["model.gguf"]


def test_a_token_too_long_to_be_split_in_every_way_is_refused(tmp_path):
    tokenizer = vocabularies.pieces()
    tokens, types = tokenizer[f"{GGML}tokens"], tokenizer[f"{GGML}token_type"]
    model = tiny("llama", vocab=len(tokens))
    longest = [*tokens]
    longest[int(np.flatnonzero(types == 1)[0])] = "a" * 100_000
    line = check_refused(tmp_path, encode({**model.metadata, **tokenizer, f"{GGML}tokens": longest}, model.tensors()))
    assert "a piece has 100000 characters; at most 1024 are supported" in line


def test_more_control_tokens_than_the_library_can_hold_are_refused(tmp_path):
    size = (1 << 16) + 301
    tokens = [*parts()[0][f"{GGML}tokens"], *(f"<{i}>" for i in range(size - 300))]
    data = with_keys(**{f"{GGML}tokens": tokens, f"{GGML}token_type": np.full(len(tokens), 3, np.int32)})
    assert "at most 65536 are supported" in check_refused(tmp_path, data)


@pytest.mark.parametrize("name", ["none.gguf", "./none.gguf", "models/none.GGUF", "/no/such/none.gguf", "a/b/c/d.gguf"])
def test_a_path_without_a_file_is_not_looked_for_on_the_hub(tmp_path, name):
    with pytest.raises(ConversionError, match=f"^{name}: no such file"):
        convert(name, tmp_path / "out")


def test_a_folder_or_a_broken_link_with_a_gguf_name_is_no_gguf_file(tmp_path):
    (tmp_path / "in/folder.gguf").mkdir(parents=True)
    (tmp_path / "in/link.gguf").symlink_to("nowhere")
    with pytest.raises(ConversionError, match=r"no zip2zip_config\.json"):
        convert(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/MODEL.GGUF").write_bytes(whole())
    assert (convert(tmp_path / "in", tmp_path / "out") / "model.safetensors").is_file()


def test_a_checkpoint_with_a_gguf_file_beside_it_is_a_checkpoint(tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole())
    (tmp_path / "zip2zip_config.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"zip2zip_config\.json"):
        convert(tmp_path, tmp_path.with_name("out"))
    assert not tmp_path.with_name("out").exists()


def test_a_file_in_the_place_of_a_model_is_to_be_converted(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole())
    with pytest.raises(ModelError, match=f"convert it first: mlx_zip convert --hf-path {path}"):
        find_model_folder(path)


def test_no_bits_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole())
    with pytest.raises(ConversionError, match="q_bits must be above zero"):
        convert(tmp_path / "model.gguf", tmp_path / "out", quantize=True, q_bits=0)
