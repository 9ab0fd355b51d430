"""Sessions on disk: found again after a restart, bounded, private, and left alone where another process wrote."""

import errno
import gc
import logging
import os
import signal
import stat
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache

from mlx_zip.cli import main
from mlx_zip.engine.sessions import file_format as session_format
from mlx_zip.engine.sessions import folder as session_folder
from mlx_zip.engine.sessions.folder import purge_session_folder
from mlx_zip.engine.sessions.session import SessionFile, session_as_file, write_session
from mlx_zip.errors import EngineError, ModelError
from mlx_zip.files import make_private
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from support import keeping, tiny
from support.keeping import OWN
from support.processes import CONTEXT
from support.serving import NEEDS_TORCH

NEXT = [7, 9, 11, 13, 7, 9, 11, 13, 5]
all_kinds = pytest.mark.parametrize("kind", keeping.KINDS)
both_engines = pytest.mark.parametrize("kind", keeping.ENGINES)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


def saved(folder, kind="zip", **options):
    """Holds a conversation whose session is written to a folder; returns all its base ids."""
    store = keeping.store(kind, folder=folder)
    _, held = keeping.conversation(kind, store, **options)
    store.close()
    return held


def files(folder):
    return sorted(folder.glob("*.safetensors"))


@all_kinds
def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(folder, kind):
    held = saved(folder, kind, answers={"text": [3, 4]}, random_state=keeping.random_state(kind))
    cache, prompt = keeping.new_cache(kind), tiny.base_ids(60)
    keeping.greedy(kind, cache, prompt)
    wanted = keeping.greedy(kind, cache, NEXT)[0]
    store = keeping.store(kind, folder=folder)
    (info,) = store.sessions()
    assert (info.on_disk, info.bytes, info.base_tokens) == (True, 0, len(held))
    assert dict(store.answers()) == {"text": (3, 4)}
    found = store.checkout(held + NEXT, OWN)
    assert found.base_tokens == len(held)
    assert found.random_state.tolist() == [5, 6]
    assert keeping.continued(kind, found, held + NEXT) == wanted


@pytest.mark.parametrize("kind", keeping.TRIMMED)
def test_an_edited_conversation_finds_its_beginning_after_a_restart(folder, kind):
    held = saved(folder, kind)
    edited = held[:40] + NEXT
    found = keeping.store(kind, folder=folder).checkout(edited, OWN)
    assert found.base_tokens > 40 - tiny.MERGE
    log = keeping.log(kind, found, edited)
    assert keeping.continued(kind, found, edited) == keeping.as_read_at_once(kind, log, edited)


def test_a_quantized_cache_goes_on_after_a_restart(folder):
    kind, store, cache = "wide heads", keeping.store("wide heads", folder=folder), keeping.new_cache("wide heads")
    held = tiny.base_ids(60)
    held += keeping.greedy(kind, cache, held, bits=8)[1]
    store.put(cache, pack_key=OWN)
    store.flush()
    wanted = keeping.greedy(kind, store.checkout(held + NEXT, OWN).cache, NEXT)
    found = keeping.store(kind, folder=folder).checkout(held + NEXT, OWN)
    assert keeping.greedy(kind, found.cache, NEXT) == wanted


@both_engines
def test_a_growing_conversation_keeps_one_file_and_an_answer_noted_later_is_written(folder, kind):
    store = keeping.store(kind, folder=folder)
    name, held = keeping.conversation(kind, store)
    for turn in range(3):
        prompt = held + tiny.base_ids(9, seed=turn)
        found = store.checkout(prompt, OWN)
        held = prompt + keeping.greedy(kind, found.cache, prompt[found.base_tokens :])[1]
        store.put(found.cache, pack_key=OWN, name=found.name)
        store.flush()
        store.note_answer(name, f"turn {turn}", [3, 4, turn])
        store.flush()
    assert [file.stem for file in files(folder)] == [name]
    store.close()
    again = keeping.store(kind, folder=folder)
    assert set(again.answers()) == {"turn 0", "turn 1", "turn 2"}
    assert again.checkout(held + NEXT, OWN).base_tokens == len(held)


@both_engines
def test_a_session_that_a_request_took_is_still_on_disk_if_the_request_is_lost(folder, kind):
    store = keeping.store(kind, folder=folder)
    _, held = keeping.conversation(kind, store)
    store.flush()
    first = store.checkout(held + NEXT, OWN)
    store.release(first.name)
    again = store.checkout(held + NEXT, OWN)
    assert again.base_tokens == len(held)
    assert keeping.continued(kind, again, held + NEXT) == keeping.continued(kind, first, held + NEXT)


@both_engines
def test_a_session_evicted_from_memory_is_found_on_disk(folder, kind):
    store = keeping.store(kind, folder=folder, max_bytes=1)
    held = [keeping.conversation(kind, store, seed)[1] for seed in range(3)]
    store.flush()
    assert [(one.bytes, one.on_disk) for one in store.sessions()] == [(0, True)] * 3
    assert [store.checkout(ids + NEXT, OWN).base_tokens for ids in held] == [len(ids) for ids in held]


@both_engines
def test_the_least_recently_used_files_are_deleted_when_the_disk_bound_is_reached(folder, kind):
    one = len(files_of_one(folder / "one", kind))
    store = keeping.store(kind, folder=folder / "three", max_disk_bytes=3 * one + one // 2)
    held = []
    for seed in range(5):
        held.append(keeping.conversation(kind, store, seed)[1])
        store.flush()
    assert len(files(folder / "three")) == 3
    assert store.figures()["disk_bytes"] <= 3 * one + one // 2
    store.close()
    again = keeping.store(kind, folder=folder / "three")
    assert [again.checkout(ids + NEXT, OWN) is None for ids in held] == [True, True, False, False, False]


def files_of_one(folder, kind):
    saved(folder, kind)
    return files(folder)[0].read_bytes()


@both_engines
def test_files_and_folder_are_for_their_owner_only(folder, kind):
    saved(folder, kind)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in files(folder)] == [0o600]


def test_folders_that_are_made_for_sessions_are_for_their_owner_only(tmp_path):
    assert make_private(tmp_path / "kept" / "machine-1-of-2") is None
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "kept", tmp_path / "kept" / "machine-1-of-2")]
    assert modes == [0o700, 0o700]


@both_engines
def test_a_folder_that_others_can_write_to_is_not_used(folder, caplog, kind):
    folder.mkdir()
    folder.chmod(0o777)
    saved(folder, kind)
    assert files(folder) == []
    assert "other users can write to it" in caplog.text


@both_engines
def test_a_purge_deletes_the_files_too(folder, kind):
    store = keeping.store(kind, folder=folder)
    _, held = keeping.conversation(kind, store)
    keeping.conversation(kind, store, 1)
    store.checkout(held + NEXT, OWN)
    store.flush()
    store.purge()
    store.flush()
    assert files(folder) == []
    assert store.sessions() == []
    assert store.figures()["disk_bytes"] == 0


@both_engines
def test_a_dropped_session_leaves_no_file_even_if_it_is_being_written(folder, kind):
    store = keeping.store(kind, folder=folder)
    for seed in range(3):
        name, _ = keeping.conversation(kind, store, seed)
        store.drop(name)
    store.close()
    assert files(folder) == []


def test_a_folder_of_sessions_can_be_purged_whole(folder):
    saved(folder)
    size = files(folder)[0].stat().st_size
    (folder / "notes.txt").write_text("mine")
    assert purge_session_folder(folder) == (1, size)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    assert purge_session_folder(folder) == (0, 0)
    assert not folder.exists()


def tuned_start(seed):
    """A pack of two entries with rows of its own, tuned for the tiny model."""
    model, rng = keeping.model("zip"), np.random.default_rng(seed)
    rows = [rng.normal(0, 0.3, (2, 64)).astype(np.float32) for _ in range(2)]
    return Pack(((27, 36), (21, 25)), rows=TunedRows(*rows, model.fingerprint))


def test_stored_responses_in_a_folder_of_sessions_are_purged_too(folder):
    kept = folder / "responses" / "resp_1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert purge_session_folder(folder) == (1, 2)
    assert not folder.exists()


def test_a_conversation_that_began_with_a_tuned_pack_goes_on_with_it_after_a_restart(folder):
    start, model, held = tuned_start(0), keeping.model("zip"), tiny.base_ids(60)
    store, cache = keeping.store(folder=folder), model.make_cache(pack=start)
    held += keeping.greedy("zip", cache, held)[1]
    store.put(cache, pack_key="tuned")
    store.flush()
    wanted = keeping.greedy("zip", store.checkout(held + NEXT, "tuned").cache, NEXT)
    again = keeping.store(folder=folder)
    assert again.checkout(held + NEXT, "") is None
    found = again.checkout(held + NEXT, "tuned")
    find_zip_state(found.cache).bind_start_packs([start])
    assert keeping.greedy("zip", found.cache, NEXT) == wanted


def test_a_conversation_that_began_with_another_pack_of_the_model_is_not_found(folder, monkeypatch):
    held, model = saved_with_own_pack(folder), keeping.model("zip")
    assert keeping.store(folder=folder).checkout(held + NEXT, "").base_tokens == len(held)
    monkeypatch.setattr(model.row_source, "pack", tuned_start(1))
    assert keeping.store(folder=folder).checkout(held + NEXT, "") is None


def saved_with_own_pack(folder):
    """Holds a conversation that begins with the model's own pack, in a folder; returns its base ids."""
    store, cache, held = keeping.store(folder=folder), keeping.new_cache("zip"), tiny.base_ids(60)
    held += keeping.greedy("zip", cache, held)[1]
    store.put(cache, pack_key="")
    store.close()
    return held


# ---- what a disk can do


@both_engines
def test_a_full_disk_ends_no_conversation_and_warns_once(folder, monkeypatch, caplog, kind):
    store = keeping.store(kind, folder=folder)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(session_format, "_write_all", full)
        held = [keeping.conversation(kind, store, seed)[1] for seed in range(3)]
        store.flush()
    assert caplog.text.count("No space left on device") == 1
    assert list(folder.iterdir()) == []
    assert [store.checkout(ids + NEXT, OWN, share=True).base_tokens for ids in held] == [len(ids) for ids in held]
    keeping.conversation(kind, store, 3)
    store.close()
    assert len(files(folder)) == 1


@both_engines
def test_a_full_disk_leaves_the_older_state_of_a_session_on_disk(folder, monkeypatch, kind):
    store = keeping.store(kind, folder=folder)
    _, held = keeping.conversation(kind, store)
    store.flush()
    found = store.checkout(held + NEXT, OWN)
    keeping.read(kind, found.cache, NEXT)
    monkeypatch.setattr(session_format, "_write_all", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    store.put(found.cache, pack_key=OWN, name=found.name)
    store.close()
    assert keeping.store(kind, folder=folder).checkout(held + NEXT, OWN).base_tokens == len(held)
    assert store.checkout([*held, *NEXT, 3], OWN).base_tokens == len(held) + len(NEXT)


@both_engines
def test_two_stores_with_one_folder_do_not_overwrite_each_others_files(folder, kind):
    held = saved(folder, kind)
    stores, lengths = [keeping.store(kind, folder=folder) for _ in range(2)], []
    for number, store in enumerate(stores):
        prompt = [*held, 5 + number, *NEXT]
        found = store.checkout(prompt, OWN)
        keeping.read(kind, found.cache, prompt[found.base_tokens :])
        store.put(found.cache, pack_key=OWN, name=found.name)
        store.flush()
    again = keeping.store(kind, folder=folder)
    for number in range(2):
        lengths.append(again.checkout([*held, 5 + number, *NEXT, 3], OWN).base_tokens)
    assert lengths == [len(held) + 1 + len(NEXT)] * 2
    stores[0].purge()
    assert keeping.store(kind, folder=folder).sessions()[0].base_tokens == lengths[1]


@both_engines
def test_a_file_that_another_process_deleted_is_a_session_less(folder, caplog, kind):
    held = saved(folder, kind)
    store = keeping.store(kind, folder=folder)
    files(folder)[0].unlink()
    assert store.checkout(held + NEXT, OWN) is None
    assert store.sessions() == []
    assert "No such file" in caplog.text


@pytest.mark.slow
@both_engines
@pytest.mark.parametrize("after_s", [0.05, 0.3])
def test_after_a_kill_every_file_is_whole_or_absent(folder, after_s, kind):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would not live through a fork
    began = CONTEXT.Event()
    writer = CONTEXT.Process(target=keeping.write_without_end, args=(folder, kind, began))
    writer.start()
    try:
        assert began.wait(120)
        time.sleep(after_s)
    finally:
        writer.kill()
        writer.join()
    assert writer.exitcode == -signal.SIGKILL  # it had not ended by itself
    store = keeping.store(kind, folder=folder)
    assert len(store.sessions()) == len(files(folder))
    for file in files(folder):
        held = keeping.store(kind).load(file).base_tokens
        assert held > 0
        if kind == "zip":
            assert find_zip_state(load_prompt_cache(str(file))).books[0].base_length == held


def test_unfinished_files_of_killed_processes_are_removed_if_nobody_else_uses_the_folder(folder):
    folder.mkdir(mode=0o700)
    left = folder / f".{'a' * 16}.safetensors.partial-1"
    left.write_bytes(b"x")
    store = keeping.store(folder=folder)
    assert not left.exists()
    left.write_bytes(b"x")
    store.close()
    del store
    gc.collect()
    keeping.store(folder=folder)
    assert not left.exists()


def test_unfinished_files_in_a_folder_that_others_use_are_removed_once_they_are_old(folder):
    folder.mkdir(mode=0o700)
    other = keeping.store(folder=folder)
    left = [folder / f".{name * 16}.safetensors.partial-1" for name in "ab"]
    for file in left:
        file.write_bytes(b"x")
    os.utime(left[0], (0, 0))
    keeping.store(folder=folder)
    assert [file.exists() for file in left] == [False, True]
    other.close()


def test_what_other_processes_leave_unfinished_counts_toward_the_bound(folder):
    saved(folder)
    bound = files(folder)[0].stat().st_size + 500
    other = keeping.store(folder=folder)  # so that the unfinished file is not removed
    left = folder / f".{'a' * 16}.safetensors.partial-1"
    left.write_bytes(b"x" * 400)
    assert len(keeping.store(folder=folder, max_disk_bytes=bound).sessions()) == 1
    left.write_bytes(b"x" * 600)
    assert not keeping.store(folder=folder, max_disk_bytes=bound).sessions()
    assert (files(folder), left.exists()) == ([], True)
    other.close()


def test_what_is_named_as_a_session_and_cannot_be_read_is_listed_too(folder, capsys):
    (folder / f"{'d' * 16}.safetensors").mkdir(parents=True)
    (folder / f"{'c' * 16}.safetensors").symlink_to("nowhere")
    assert main(["sessions", "list", str(folder)]) == 0
    assert capsys.readouterr().out.count("cannot be used") == 2


# ---- files that a user names


@all_kinds
def test_a_saved_session_can_be_loaded_by_another_store(tmp_path, kind):
    store = keeping.store(kind)
    name, held = keeping.conversation(kind, store, answers={"text": [3]})
    store.save(name, tmp_path / "chat.safetensors")
    wanted = keeping.continued(kind, store.checkout(held + NEXT, OWN), held + NEXT)
    other = keeping.store(kind)
    info = other.load(tmp_path / "chat.safetensors")
    assert info.base_tokens == len(held)
    assert dict(other.answers()) == {"text": (3,)}
    assert keeping.continued(kind, other.checkout(held + NEXT, OWN), held + NEXT) == wanted


def test_mlx_lm_reads_the_cache_of_a_session_file(tmp_path):
    store = keeping.store("plain", model_name="some/model")
    name, held = keeping.conversation("plain", store)
    store.save(name, tmp_path / "chat.safetensors")
    cache, metadata = load_prompt_cache(str(tmp_path / "chat.safetensors"), return_metadata=True)
    assert [entry.offset for entry in cache] == [len(held)] * len(cache)
    assert metadata["model"] == "some/model"
    assert mx.array_equal(cache[0].keys, store.checkout(held + NEXT, OWN).cache[0].keys[..., : len(held), :])


def test_the_file_of_an_edited_conversation_holds_nothing_of_what_was_cut(tmp_path):
    store = keeping.store("plain")
    _, held = keeping.conversation("plain", store)
    found = store.checkout(held[:20] + NEXT, OWN)
    ids = held[: found.base_tokens]
    name = store.put(found.cache, pack_key=OWN, name=found.name, base_ids=ids)
    store.save(name, tmp_path / "chat.safetensors")
    cache = load_prompt_cache(str(tmp_path / "chat.safetensors"))
    assert [entry.keys.shape[2] for entry in cache] == [len(ids)] * len(cache)


@pytest.mark.parametrize("kind", ["plain", "wide heads", "sliding window"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_is_being_written_does_not_change_when_the_conversation_goes_on(tmp_path, kind, dtype):
    cache, store = keeping.new_cache(kind), keeping.store(kind)
    held = tiny.base_ids(60)
    keeping.greedy(kind, cache, held, bits=8 if kind == "wide heads" else None)
    for entry in cache:
        if isinstance(entry, KVCache | RotatingKVCache):
            entry.keys, entry.values = entry.keys.astype(dtype), entry.values.astype(dtype)
    ids = {"base_ids": [3] * cache[0].offset} if find_zip_state(cache) is None else {}
    kept = store._session_named(store.put(cache, pack_key=OWN, **ids))
    contents = [session_as_file(kept, store.caches, {}) for _ in range(2)]
    write_session(tmp_path / "before", contents[0], {})
    del contents[0]
    for _ in range(3):
        keeping.read(kind, kept.cache, [5, 6, 7, 8])
        mx.eval([entry.state for entry in kept.cache if find_zip_state([entry]) is None])
    write_session(tmp_path / "after", contents[0], {})
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


@both_engines
def test_a_session_cannot_be_saved_where_there_is_no_folder(tmp_path, kind):
    store = keeping.store(kind)
    name, _ = keeping.conversation(kind, store)
    with pytest.raises(EngineError, match=r"no/chat.safetensors: cannot be written: No such file"):
        store.save(name, tmp_path / "no" / "chat.safetensors")


@both_engines
def test_what_is_written_is_bounded_by_the_room_on_disk(folder, caplog, kind):
    store = keeping.store(kind, folder=folder, max_disk_bytes=100)
    _, held = keeping.conversation(kind, store)
    with caplog.at_level(logging.WARNING):
        store.close()
    assert files(folder) == []
    assert "is not written" in caplog.text
    assert store.checkout(held + NEXT, OWN).base_tokens == len(held)


@both_engines
def test_a_write_that_fails_in_an_unforeseen_way_loses_that_write_only(folder, monkeypatch, caplog, kind):
    store = keeping.store(kind, folder=folder, max_bytes=1)

    def fails(*_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(session_format, "_write_all", fails)
        keeping.conversation(kind, store)
        store.flush()
    assert "no memory" in caplog.text
    assert store.sessions() == []
    keeping.conversation(kind, store)
    store.close()
    assert len(files(folder)) == 1


@both_engines
def test_a_dropped_session_whose_file_cannot_be_deleted_is_warned_of(folder, monkeypatch, caplog, kind):
    store, begun, go = keeping.store(kind, folder=folder), threading.Event(), threading.Event()
    write = session_format._write_all

    def slow(*arguments):
        begun.set()
        assert go.wait(30)
        write(*arguments)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(session_format, "_write_all", slow)
        name, _ = keeping.conversation(kind, store)
        assert begun.wait(30)
        store.drop(name)
        patch.setattr(SessionFile, "delete_if_unchanged", refuse)
        go.set()
        store.flush()
    assert "read-only" in caplog.text
    assert store.sessions() == []
    store.close()


@both_engines
def test_a_purge_forgets_all_but_the_files_that_it_cannot_delete(folder, monkeypatch, kind):
    store = keeping.store(kind, folder=folder)
    for seed in range(3):
        keeping.conversation(kind, store, seed)
    store.flush()
    delete, refused = SessionFile.delete_if_unchanged, []

    def refuse_once(slot):
        if not refused:
            refused.append(slot.path)
            raise PermissionError(errno.EACCES, "read-only")
        delete(slot)

    monkeypatch.setattr(SessionFile, "delete_if_unchanged", refuse_once)
    with pytest.raises(EngineError, match="read-only"):
        store.purge()
    assert store.sessions() == []
    assert files(folder) == refused


def test_a_file_that_vanishes_while_the_folder_is_read_hides_no_other(folder, monkeypatch, caplog):
    held = saved(folder)
    found, gone = session_folder.read_session_index, folder / f"{0:016x}.safetensors"
    gone.write_bytes(files(folder)[0].read_bytes())

    def vanishing(path, marks):
        kept = found(path, marks)
        gone.unlink(missing_ok=True)
        return kept

    monkeypatch.setattr(session_folder, "read_session_index", vanishing)
    assert keeping.store(folder=folder).checkout(held + NEXT, OWN).base_tokens == len(held)


# ---- one folder for both engines


@NEEDS_TORCH
@pytest.mark.parametrize(("writer", "reader"), [("zip", "torch zip"), ("torch zip", "zip")])
def test_a_file_of_the_other_engine_is_not_used_and_stays_as_it_is(folder, caplog, writer, reader):
    held = saved(folder, writer)
    (file,) = files(folder)
    before = file.read_bytes()
    store = keeping.store(reader, folder=folder, max_disk_bytes=1)
    assert store.checkout(held + NEXT, OWN) is None
    assert store.sessions() == []
    names = {"zip": "--engine mlx", "torch zip": "--engine torch"}
    assert f"{names[writer]} wrote it, and {names[reader]} cannot go on from it" in caplog.text
    with pytest.raises(EngineError, match=f"{names[writer]} wrote it"):
        store.load(file)
    store.purge()
    store.close()
    assert file.read_bytes() == before
    assert keeping.store(writer, folder=folder).checkout(held + NEXT, OWN).base_tokens == len(held)


@NEEDS_TORCH
def test_the_bytes_on_disk_are_the_keys_and_values_in_the_models_type(folder):
    from safetensors.torch import load_file

    saved(folder, "torch bfloat16")
    found = load_file(files(folder)[0])
    store = keeping.store("torch bfloat16")
    _, held = keeping.conversation("torch bfloat16", store)
    (kept,) = store._list
    assert str(found["keys_values"].dtype) == "torch.bfloat16"
    assert found["keys_values"].equal(kept.cache.keys_values)
    assert found["base_ids"].tolist() == held


@NEEDS_TORCH
def test_a_session_of_a_model_that_runs_in_another_type_is_not_used(folder, caplog):
    held = saved(folder, "torch zip")
    store = keeping.store("torch bfloat16", folder=folder)
    assert store.checkout(held + NEXT, OWN) is None
    assert "another type of numbers than the one that is loaded" in caplog.text


@NEEDS_TORCH
def test_a_tuned_pack_of_a_request_is_found_again_on_pytorch(folder):
    kind, start, held = "torch zip", tuned_start(0), tiny.base_ids(60)
    store, prompt = keeping.store(kind, folder=folder), list(held)
    seat = keeping.new_cache(kind, start)
    held += keeping.greedy(kind, seat, held)[1]
    store.put(seat, pack_key="tuned")
    store.flush()
    wanted = keeping.greedy(kind, store.checkout(held + NEXT, "tuned", start=start).cache, NEXT)
    again = keeping.store(kind, folder=folder)
    assert again.checkout(held + NEXT, "", start=start) is None
    with pytest.raises(ModelError, match="began with another pack"):
        again.checkout(held + NEXT, "tuned", start=tuned_start(1))
    found = again.checkout(held + NEXT, "tuned", start=tuned_start(0))
    assert found.base_tokens == len(held) > len(prompt)
    assert keeping.greedy(kind, found.cache, NEXT) == wanted


@NEEDS_TORCH
def test_a_session_longer_than_a_requests_room_is_used_as_far_as_there_is_room(folder):
    held = saved(folder, "torch zip")
    store = keeping.store("torch zip", folder=folder)
    store.caches.count_fitting_ids = lambda ids: min(ids, 20)
    found = store.checkout(held + NEXT, OWN)
    assert (found.ids, found.cache.book.mark()) == (20, 20)
    assert 20 <= found.base_tokens < len(held)
    assert len(store.sessions()) == 1
