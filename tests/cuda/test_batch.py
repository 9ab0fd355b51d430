"""Batches on PyTorch: sequences together emit what each emits alone, whatever joins, leaves, fails or is taken back."""

from __future__ import annotations

from itertools import islice
from unittest.mock import patch

import numpy as np
import pytest

from support import tiny
from support.slow_cases import slow_but
from support.tiny import VOCAB, base_ids, tiny_model
from support.torch_folders import save

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from mlx_zip.bench.engines.cuda_engines import generate_greedily  # noqa: E402
from mlx_zip.codec.codebook import compress_next  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.graphs import CudaGraphs  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from mlx_zip.errors import CodecError, ModelError  # noqa: E402
from mlx_zip.packs.pack import Pack  # noqa: E402
from mlx_zip.packs.tuned import TunedRows  # noqa: E402
from support.kernel_launches import counting_launches  # noqa: E402

STEPS, CAPACITY = 24, 128
CASES = {
    "llama": ("llama", {}),
    "base positions": ("llama", {"position_mode": "base_token_end"}),
    "longrope": ("phi3", {}),
    "longrope base positions": ("phi3", {"position_mode": "base_token_end"}),
    "tied": ("qwen3", {"tie_encoders": True}),
    "evictions": (
        "llama",
        {
            "compression": {
                "initial_vocab_size": VOCAB,
                "max_codebook_size": 6,
                "max_subtokens": 4,
                "disabled_ids": [0, 1, 2],
                "policy": "lru",
            }
        },
    ),
}
WAYS = [(name, True) for name in CASES]  # True: a card's way, by the references of kernels; False: a CPU's own
WAYS += [(name, False) for name in ("llama", "longrope base positions", "tied")]
QUICK = [("longrope base positions", True), ("evictions", True), ("llama", True), ("tied", False)]
PROMPTS = [base_ids(length, seed) for seed, length in enumerate((9, 22, 14, 30, 5))]


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS],
    ids=lambda way: f"{way[0]} {'references' if way[1] else 'cpu'}",
)
def model(request, tmp_path_factory):
    family, changes = CASES[request.param[0]]
    folder = save(tiny_model(family, "res_latent_attn", **changes), tmp_path_factory.mktemp("m") / "m")
    return open_model(folder, "cpu", kernels=request.param[1])


@pytest.fixture(scope="module")
def alone(model):
    """What each prompt's sequence emits alone."""
    return [[one for one, _ in islice(generate_greedily(model, prompt, 1000), STEPS)] for prompt in PROMPTS]


def join(batch: Batch, prompt: list[int]) -> int:
    row = batch.add()
    batch.read(row, compress_next(batch.book(row), np.array(prompt)))
    return row


def step(batch: Batch) -> list[int]:
    """One step of all sequences; returns their ids."""
    batch.choose_ids()
    batch.start_body()
    ids = batch.wait_for_ids()
    assert batch.update_codebooks(ids) == {}
    return ids


@pytest.mark.parametrize("count", slow_but([1, 2, 3, 5], 2, 5))
def test_sequences_together_emit_what_each_emits_alone(model, alone, count):
    batch = Batch(model, 5, CAPACITY)
    for prompt in PROMPTS[:count]:
        join(batch, prompt)
    made = np.array([step(batch) for _ in range(STEPS)]).T.tolist()
    assert made == alone[:count]


def test_sequences_join_and_leave_without_touching_the_others(model, alone):
    batch, who, made = Batch(model, 3, CAPACITY), [], [[] for _ in PROMPTS]
    plan = {0: [0], 3: [1, 2], 9: [], 11: [3], 14: [4]}  # step: prompts that join
    leaves = {8: 0, 10: 1, 13: 2}  # after this step, this prompt's sequence leaves
    for number in range(STEPS):
        for prompt in plan.get(number, ()):
            assert join(batch, PROMPTS[prompt]) == len(who)
            who.append(prompt)
        for prompt, one in zip(who, step(batch), strict=True):
            made[prompt].append(one)
        if number in leaves:
            row = who.index(leaves[number])
            batch.remove(row)
            last = who.pop()
            if row < len(who):
                who[row] = last
    assert all(ids == alone[prompt][: len(ids)] for prompt, ids in enumerate(made))
    assert [len(ids) for ids in made] == [9, 8, 11, 13, 10]


def test_a_prompt_is_read_in_parts_while_others_step(model, alone):
    batch, made = Batch(model, 2, CAPACITY), []
    join(batch, PROMPTS[0])
    row = batch.add()
    ids = compress_next(batch.book(row), np.array(PROMPTS[3])).tolist()
    for at in range(0, len(ids), 5):
        batch.choose_ids()
        batch.read(row, ids[at : at + 5], more=at + 5 < len(ids))  # between choosing and the body
        batch.start_body()
        chosen = batch.wait_for_ids()
        assert batch.update_codebooks(chosen) == {}
        made.append(chosen[0])
    assert made == alone[0][: len(made)]
    assert [step(batch)[1] for _ in range(10)] == alone[3][:10]


def test_a_sequence_taken_back_goes_on_as_a_fresh_one(model, alone):
    batch = Batch(model, 2, CAPACITY)
    for prompt in PROMPTS[:2]:
        join(batch, prompt)
    for _ in range(9):
        step(batch)
    log = batch.book(0).ids
    read = len(log) - 9
    batch.trim_sequence(0, read - 2)
    batch.read(0, log[read - 2 : read + 3])
    made = [step(batch) for _ in range(6)]
    assert [ids[0] for ids in made] == alone[0][3:9]
    assert [ids[1] for ids in made] == alone[1][9:15]


def test_a_snapshot_goes_on_in_another_batch(model, alone):
    first, second = Batch(model, 1, CAPACITY), Batch(model, 3, 96)
    join(first, PROMPTS[1])
    for _ in range(7):
        step(first)
    kept = first.snapshot(0)
    step(first)
    join(second, PROMPTS[2])
    row = second.restore(kept)
    assert kept.nbytes > kept.keys_values.nbytes
    assert [step(second)[row] for _ in range(STEPS - 7)] == alone[1][7:]
    again = second.restore(kept)
    second.trim_sequence(again, len(kept.log) - 1)
    second.read(again, kept.log[-1:])
    assert [step(second)[again] for _ in range(5)] == alone[1][7:12]


def test_an_illegal_id_fails_its_own_sequence_only(model, alone):
    batch, made = Batch(model, 3, CAPACITY), []
    for prompt in PROMPTS[:3]:
        join(batch, prompt)
    made.append(step(batch))
    before = batch.book(1).ids.tolist()
    bad = model.layout.end + 3

    def chooser(head):
        ids = head.best.clone()
        ids[1] = bad
        return ids

    batch.choose_ids(chooser)
    batch.start_body()
    ids = batch.wait_for_ids()
    errors = batch.update_codebooks(ids)
    assert list(errors) == [1]
    assert isinstance(errors[1], CodecError)
    assert batch.book(1).ids.tolist() == before
    made.append(ids)
    made += [step(batch) for _ in range(4)]  # without the one that failed
    batch.trim_sequence(1, len(before) - 1)
    batch.read(1, before[-1:])
    made += [step(batch) for _ in range(4)]
    for row in (0, 2):
        assert [ids[row] for ids in made] == alone[row][:10]
    assert [ids[1] for ids in made[-4:]] == alone[1][1:5]


def test_illegal_ids_of_a_prompt_change_nothing(model, alone):
    batch = Batch(model, 1, CAPACITY)
    join(batch, PROMPTS[0])
    made = [step(batch)[0] for _ in range(4)]
    with pytest.raises(CodecError):
        batch.read(0, [5, model.layout.end])
    with pytest.raises(ModelError, match="room for"):
        batch.read(0, [5] * CAPACITY)
    assert made + [step(batch)[0] for _ in range(4)] == alone[0][:8]


def test_an_entry_that_its_own_id_installs_is_read_with_its_row(model):
    """LZW's KwKwK: after `5`, the id of the next free slot stands for `5 5`, and installs that entry."""
    if model.config.policy != "freeze":
        pytest.skip("slots are given again")
    batch, whole = Batch(model, 2, CAPACITY), Batch(model, 1, CAPACITY)
    ids = [7, 8, 9, 5]
    for _ in range(2):
        batch.read(batch.add(), ids)
    kwkwk = model.layout.hyper_id(len(batch.book(0)))
    batch.choose_ids(lambda head: torch.tensor([kwkwk, 6]))
    batch.start_body()
    assert batch.update_codebooks(batch.wait_for_ids()) == {}
    whole.read(whole.add(), [*ids, kwkwk])
    assert batch.book(0).base_ids(4).tolist() == [5, 5]
    made = [step(batch)[0] for _ in range(6)]
    assert made == [step(whole)[0] for _ in range(6)]


def test_an_entry_of_its_own_id_that_cannot_be_made_fails_its_sequence_once(model, monkeypatch):
    if model.config.policy != "freeze":
        pytest.skip("slots are given again")
    batch = Batch(model, 1, CAPACITY)
    batch.read(batch.add(), [7, 8, 9, 5])
    kwkwk = model.layout.hyper_id(len(batch.book(0)))
    batch.choose_ids(lambda head: torch.tensor([kwkwk]))
    batch.start_body()
    monkeypatch.setattr(batch._new_rows, "install", refuses)
    monkeypatch.setattr(batch._reader, "run_body", lambda *_: pytest.fail("an id that was not read is read again"))
    assert [str(error) for error in batch.update_codebooks(batch.wait_for_ids()).values()] == ["out of memory"]
    assert batch.book(0).ids.tolist() == [7, 8, 9, 5]


def test_a_batch_without_sequences_takes_steps_of_nothing(model, monkeypatch):
    batch = Batch(model, 2, CAPACITY)
    monkeypatch.setattr(model, "head", lambda *_: pytest.fail("the head is computed of no row"))
    batch.choose_ids()
    assert (len(batch), batch.wait_for_ids(), batch.update_codebooks([])) == (0, [], {})


def test_a_full_batch_and_a_full_sequence_are_named(model):
    batch = Batch(model, 1, 12)
    batch.read(batch.add(), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    with pytest.raises(ModelError, match="room for 1 sequence"):
        batch.add()
    batch.choose_ids()
    with pytest.raises(ModelError, match="no room for more"):
        batch.start_body()


def test_rows_that_cannot_be_made_fail_their_sequences_only(model, alone, monkeypatch):
    batch = Batch(model, 2, CAPACITY)
    for prompt in PROMPTS[:2]:
        join(batch, prompt)
    model.store.clear()
    encode, failed = model.encode_entries, {}

    def fails(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "encode_entries", fails)
    made: list[list[int]] = []
    while not failed:
        batch.choose_ids()
        batch.start_body()
        made.append(batch.wait_for_ids())
        failed = batch.update_codebooks(made[-1])
    monkeypatch.setattr(model, "encode_entries", encode)
    assert all("out of memory" in str(error) for error in failed.values())
    assert len(model.store) == 0  # it has no places of rows that were not written
    for row in failed:
        log = batch.book(row).ids
        batch.trim_sequence(row, len(log) - 1)
        batch.read(row, log[-1:])
    rest = [step(batch) for _ in range(5)]
    for row in range(2):
        ids = [one[row] for one in (made[:-1] if row in failed else made)] + [one[row] for one in rest]
        assert ids == alone[row][: len(ids)]


def test_a_row_that_moves_takes_its_tables_along_and_one_taken_back_gives_up_its_slots(model):
    batch = Batch(model, 3, CAPACITY)
    for prompt in (PROMPTS[3], PROMPTS[0], [5, 6, 7, 5, 6, 7, 5, 6, 7]):
        batch.read(batch.add(), prompt)
    tables = batch.tables
    parts = (tables.outputs, tables.inputs, tables.installed, tables.spans)
    tables.spans[2, -1] = 3  # as of an entry that only this row has
    last = [part[2].clone() for part in parts]
    batch.remove(0)
    assert all(torch.equal(part[0], one) for part, one in zip(parts, last, strict=True))
    assert int(tables.installed[0].sum()) == len(batch.book(0)) > 0
    batch.trim_sequence(0, 1)
    assert int(tables.installed[0].sum()) == len(batch.book(0)) == 0


def test_of_two_new_entries_the_one_that_is_not_in_the_store_is_made(model):
    if model.config.policy != "freeze":
        pytest.skip("slots are given again")
    model.store.clear()
    for chosen in ([6], [6, 10]):
        batch = Batch(model, 2, CAPACITY)
        for _ in chosen:
            batch.read(batch.add(), [7, 8, 9, 5])
        batch.choose_ids(lambda head, chosen=chosen: torch.tensor(chosen))
        batch.start_body()
        assert batch.update_codebooks(batch.wait_for_ids()) == {}
    for row, one in enumerate([6, 10]):
        entry = torch.tensor([[5, one] + [model.config.pad_id] * (model.config.merge_size - 2)])
        wanted = model.encode_entries(entry, torch.tensor([2]))[0]
        slot = len(batch.book(row)) - 1
        for side, table in enumerate(batch.tables.sides):
            torch.testing.assert_close(table[row, slot], wanted[side], rtol=1e-5, atol=1e-6)


def test_slots_that_hold_other_entries_again_after_a_cut_get_their_rows_again(model):
    one, fresh = Batch(model, 1, CAPACITY), Batch(model, 1, CAPACITY)
    log = base_ids(60, 9)
    one.read(one.add(), log)
    one.trim_sequence(0, 20)
    one.read(0, log[20:21])
    fresh.read(fresh.add(), log[:21])
    count = len(fresh.book(0))
    assert len(one.book(0)) == count > 0
    for ours, theirs in zip(one.tables.sides, fresh.tables.sides, strict=True):
        torch.testing.assert_close(ours[0, :count], theirs[0, :count], rtol=1e-5, atol=1e-6)


def refuses(*arguments):
    raise RuntimeError("out of memory")


def test_ids_whose_rows_cannot_be_made_are_not_read(model, alone, monkeypatch):
    batch = Batch(model, 1, CAPACITY)
    join(batch, PROMPTS[0])
    made, log = [step(batch)[0] for _ in range(4)], batch.book(0).ids.tolist()
    model.store.clear()
    with monkeypatch.context() as broken:
        broken.setattr(model, "encode_entries", refuses)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.read(0, [20, 21, 22, 23])
    assert batch.book(0).ids.tolist() == log
    batch.choose_ids()
    batch.start_body()
    assert batch.update_codebooks(batch.wait_for_ids()) == {}
    assert batch.book(0).ids.tolist() == log  # it cannot choose before it has read
    batch.trim_sequence(0, len(log) - 1)
    batch.read(0, log[-1:])
    assert made + [step(batch)[0] for _ in range(4)] == alone[0][:8]


def test_a_sequence_whose_keys_are_missing_has_no_snapshot(tmp_path, monkeypatch):
    model = open_model(save(tiny_model("phi3"), tmp_path), "cpu")  # LongRoPE: from id 32 on all keys are others
    batch, ids = Batch(model, 1, CAPACITY), base_ids(40)
    batch.read(batch.add(), ids[:20])
    with monkeypatch.context() as broken:
        broken.setattr(model.decoder, "prefill", refuses)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.read(0, ids[20:])
    with pytest.raises(ModelError, match="keys of the sequence are missing"):
        batch.snapshot(0)
    batch.read(0, ids[20:22])
    assert batch.snapshot(0).log.tolist() == ids[:22]


def test_a_snapshot_that_cannot_be_restored_takes_no_row(model, alone, monkeypatch):
    batch = Batch(model, 2, CAPACITY)
    join(batch, PROMPTS[1])
    kept = batch.snapshot(0)
    model.store.clear()
    with monkeypatch.context() as broken:
        broken.setattr(model, "encode_entries", refuses)
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.restore(kept)
    with pytest.raises(ModelError, match="room for 4"):
        Batch(model, 1, 4).restore(kept)
    assert (len(batch), repr(batch)) == (1, f"<Batch: 1 of 2 sequences, {CAPACITY} ids each>")
    assert batch.restore(kept) == 1
    assert [step(batch) for _ in range(5)] == [[one, one] for one in alone[1][:5]]


def test_an_id_that_cannot_be_read_again_fails_its_own_sequence(model, monkeypatch):
    if model.config.policy != "freeze":
        pytest.skip("slots are given again")
    batch = Batch(model, 2, CAPACITY)
    for _ in range(2):
        batch.read(batch.add(), [7, 8, 9, 5])
    kwkwk = model.layout.hyper_id(len(batch.book(0)))
    batch.choose_ids(lambda head: torch.tensor([6, kwkwk]))
    batch.start_body()
    monkeypatch.setattr(batch._reader, "run_body", refuses)
    failed = batch.update_codebooks(batch.wait_for_ids())
    assert {row: str(error) for row, error in failed.items()}[1] == "out of memory"
    assert batch.book(1).ids.tolist() == [7, 8, 9, 5]
    assert not batch.sequences[1].can_choose


# ---- LongRoPE

LONG_FROM = tiny.FAMILIES["phi3"]["original_max_position_embeddings"]


@pytest.fixture(scope="module")
def by_base(tmp_path_factory):
    """A LongRoPE model of base positions that begins with an entry of the most base ids, and one of two."""
    model = tiny_model("phi3", "res_latent_attn", position_mode="base_token_end")
    entries = [[5, 6, 7, 8][: tiny.MERGE], [9, 10]]
    return open_model(save(model, tmp_path_factory.mktemp("long") / "m"), "cpu", pack=entries)


def stepped(model, before, slot):
    """Returns a batch that has read so many base ids and then emitted one entry, and whether the body had to wait."""
    batch = Batch(model, 1, CAPACITY)
    batch.read(batch.add(), [3 + at % 30 for at in range(before)])
    batch.choose_ids(lambda head: torch.tensor([model.layout.hyper_id(slot)]))
    batch.start_body()
    waited = batch._postponed
    assert batch.update_codebooks(batch.wait_for_ids()) == {}
    return batch, waited


@pytest.mark.parametrize(("slot", "span"), [(0, tiny.MERGE), (1, 2)])
def test_an_entry_whose_last_base_id_has_the_first_long_position_switches_all_keys(by_base, slot, span):
    batch, waited = stepped(by_base, LONG_FROM + 1 - span, slot)
    whole = Batch(by_base, 1, CAPACITY)
    whole.read(whole.add(), batch.book(0).ids)
    assert waited
    assert batch.kv.frequency_set.tolist() == whole.kv.frequency_set.tolist() == [1]
    for one in (batch, whole):
        one._collect_outputs()
    torch.testing.assert_close(batch._outputs, whole._outputs, rtol=1e-4, atol=1e-4)
    assert [step(batch) for _ in range(4)] == [step(whole) for _ in range(4)]


def test_the_body_does_not_wait_as_long_as_no_entry_can_reach_the_long_positions(by_base):
    batch, waited = stepped(by_base, LONG_FROM - tiny.MERGE, 0)
    assert not waited
    assert batch.kv.frequency_set.tolist() == [0]
    assert stepped(by_base, LONG_FROM - tiny.MERGE + 1, 1)[1]  # an entry of four could


# ---- what a CUDA graph would hold


class Recorder(CudaGraphs):
    """Runs each piece twice before it counts, as a capture's warm-up does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.keys: set = set()

    def run(self, key, work, keep=()):
        before = [tensor.clone() for tensor in keep]
        for _ in range(2):
            work()
            for tensor, value in zip(keep, before, strict=True):
                tensor.copy_(value)
        self.keys.add(key)
        return work()


def test_pieces_can_be_run_again_to_warm_up(model, alone):
    batch = Batch(model, 5, CAPACITY)
    recorder = Recorder()
    batch._graphs = recorder
    if batch._new_rows is not None:
        batch._new_rows._graphs = recorder
    model.store.clear()
    for prompt in PROMPTS[:3]:
        join(batch, prompt)
    made = np.array([step(batch) for _ in range(STEPS)]).T.tolist()
    assert made == alone[:3]
    assert ("body", 4) in recorder.keys
    assert {key[0] for key in recorder.keys} == {"body", "head", "encode", "install"}


HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2", "item"}


READERS = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__")


def refuse(*arguments):
    raise AssertionError("a tensor is read on the host")


class Watched(CudaGraphs):
    """Collects the operations of each piece, those inside of kernels aside; raises where a tensor is read."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.operations: dict[str, set[str]] = {}

    def run(self, key, work, keep=()):
        before = [tensor.clone() for tensor in keep]
        with patch.multiple(torch.Tensor, **dict.fromkeys(READERS, refuse)):
            work()
        for tensor, value in zip(keep, before, strict=True):
            tensor.copy_(value)
        with counting_launches() as found:
            result = work()
        self.operations.setdefault(key[0], set()).update(found.names)
        return result


def test_pieces_read_nothing_on_the_host(model):
    if not model.folder.kernels:
        pytest.skip("on a CPU nothing is captured")
    batch = Batch(model, 2, CAPACITY)
    batch._graphs = watched = Watched()
    if batch._new_rows is not None:
        batch._new_rows._graphs = watched
    model.store.clear()
    for prompt in PROMPTS[:2]:
        join(batch, prompt)
    for _ in range(STEPS):
        step(batch)
    assert set(watched.operations) == {"body", "head", "encode", "install"}
    for piece, names in watched.operations.items():
        assert not names & HOST_READS, piece


def test_each_sequence_begins_with_its_own_pack(tmp_path):
    mlx = tiny_model("llama", "res_latent_attn", start=[[3, 4], [6, 7, 8]])
    model = open_model(save(mlx, tmp_path / "m"), "cpu")
    rows = np.random.default_rng(3).normal(0, 0.3, (2, 2, 64)).astype(np.float32)
    tuned = Pack(((5, 6, 7), (9, 10)), rows=TunedRows(rows[0], rows[1], mlx.fingerprint))
    packs = [None, (), [PROMPTS[1][2:5]], tuned]
    batch, expected = Batch(model, 4, CAPACITY), []
    for pack in packs:
        row = batch.add(pack)
        batch.read(row, compress_next(batch.book(row), np.array(PROMPTS[1])))
        expected.append([one for one, _ in islice(generate_greedily(model, PROMPTS[1], 1000, pack=pack), 12)])
    assert np.array([step(batch) for _ in range(12)]).T.tolist() == expected
    assert len({tuple(ids) for ids in expected}) == len(packs)
