"""`prepare`: the folder is the same however the work was done."""

import errno
import multiprocessing
import signal

import numpy as np
import pytest

from mlx_zip.errors import DataError
from mlx_zip.packs.entries import write_entries
from mlx_zip.text.sources import Source
from mlx_zip.training.prepare import preparation
from mlx_zip.training.prepare.plan import PrepareOptions, make_preparation_plan
from mlx_zip.training.prepare.shards import PreparedShards
from support.prepared import (
    PACK,
    entries_of,
    expanded,
    prepared,
    stories,
    texts,
    tokenizer_folder,
    tree,
)


@pytest.mark.slow
def test_the_folder_does_not_depend_on_the_number_of_workers(tmp_path, data):
    one = prepared(tmp_path / "one", data, shard_samples=4)
    prepared(tmp_path / "two", data, shard_samples=4, workers=2)
    assert len(one.index["shards"]) > 3
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_signal_ends_the_workers_in_the_middle_of_their_work(tmp_path, data):
    out = tmp_path / "out"
    out.mkdir()
    options = PrepareOptions((Source((data,)),), out, tokenizer=str(tokenizer_folder()), codebook_size=64)
    others, started = set(multiprocessing.active_children()), set()

    def work_until_a_signal():
        with preparation._start_shard_workers(*make_preparation_plan(options), 2) as make:
            next(make([preparation.Chunk(number, 0, ()) for number in range(500)]))
            started.update(set(multiprocessing.active_children()) - others)
            (out / ".shard-00001.ids.npy.partial-1").write_bytes(b"half")  # as a worker may leave one
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        work_until_a_signal()
    assert {worker.exitcode for worker in started} == {-signal.SIGTERM}
    assert len(list(out.glob("shard-*.json"))) < 500
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("stage", ["make_shard", "write_json"])
def test_a_run_that_was_stopped_anywhere_is_completed_to_the_same_bytes(tmp_path, data, monkeypatch, stage):
    write_entries(tmp_path / "pack.json", entries_of(*PACK), 3)
    options = {"shard_samples": 4, "limit": 40, "pack": tmp_path / "pack.json", "start_draw": 2}
    prepared(tmp_path / "whole", data, **options)
    place = preparation.ShardMaker if stage == "make_shard" else preparation
    real, calls = getattr(place, stage), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 3:  # before the shard's arrays are written, or after them
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(place, stage, stop)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", data, **options)
    (tmp_path / "out" / ".shard-00002.ids.npy.partial-1").write_bytes(b"half")
    with pytest.raises(DataError, match="unfinished"):
        PreparedShards(tmp_path / "out")
    monkeypatch.setattr(place, stage, real)
    makes = []
    make = preparation.ShardMaker.make_shard
    monkeypatch.setattr(
        preparation.ShardMaker, "make_shard", lambda self, chunk: makes.append(chunk.number) or make(self, chunk)
    )
    prepared(tmp_path / "out", data, **options)
    assert min(makes) == 2  # the finished ones are kept
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_run_stopped_after_the_index_is_tidied_and_not_repeated(tmp_path, data, monkeypatch):
    before = tree_after(tmp_path / "out", data)
    (tmp_path / "out" / "shard-00000.json").write_text("{}")
    (tmp_path / "out" / "shard-00009.ids.npy").write_bytes(b"left over")
    monkeypatch.setattr(preparation.ShardMaker, "make_shard", None)
    assert tree_after(tmp_path / "out", data) == before


def tree_after(out, data):
    prepared(out, data)
    return tree(out)


def test_other_settings_for_a_begun_folder_are_refused_and_named(tmp_path, data):
    prepared(tmp_path / "out", data)
    with pytest.raises(DataError, match=r"context 32, which is now 64"):
        prepared(tmp_path / "out", data, context=64)
    texts(tmp_path / "data.jsonl", stories(41))
    with pytest.raises(DataError, match=r"sources\.0\.sha256\.\S*data\.jsonl"):
        prepared(tmp_path / "out", data)


def test_a_folder_with_other_content_is_left_alone(tmp_path, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="holds other files"):
        prepared(tmp_path / "out", data)
    assert tree(tmp_path / "out") == {"letter.txt": b"dear"}


def test_an_out_that_cannot_be_a_folder_is_one_clear_line(tmp_path, data):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        prepared(tmp_path / "file", data)
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        prepared(tmp_path / "file" / "out", data)


def test_a_full_disk_leaves_the_finished_shards_and_the_run_can_go_on(tmp_path, data, monkeypatch):
    options = {"shard_samples": 4, "limit": 40}
    prepared(tmp_path / "whole", data, **options)
    real, calls = np.save, []

    def save(file, *args, **kwargs):
        calls.append(file)
        if len(calls) == 13:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, *args, **kwargs)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(DataError, match="No space left on device; the shards written so far stay"):
        prepared(tmp_path / "out", data, **options)
    assert not [name for name in tree(tmp_path / "out") if "partial" in name]
    monkeypatch.setattr(np, "save", real)
    prepared(tmp_path / "out", data, **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_limit_keeps_the_first_samples_exactly(tmp_path):
    data = texts(tmp_path / "data.jsonl", stories(15))
    whole = expanded(prepared(tmp_path / "whole", data, shard_samples=4))
    assert len(whole) > 20
    for limit in (1, 5, 17):
        cut = prepared(tmp_path / str(limit), data, shard_samples=4, limit=limit)
        assert expanded(cut) == whole[:limit]
        assert cut.index["totals"]["base_ids"] == sum(map(len, expanded(cut)))
