"""The engine on a card that is pretended: the ids are those of the CPU, and it does nothing that a card refuses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from support.generating import ENDLESS
from support.tiny import VOCAB, base_ids, tiny_model
from support.torch_folders import make_model, pack, save

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("mlx.core")

from mlx_zip.bench.engines.cuda_engines import generate_greedily  # noqa: E402
from mlx_zip.codec.codebook import compress_next  # noqa: E402
from mlx_zip.cuda import transfers  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.devices import PRODUCTS, measure_matvec_bandwidth  # noqa: E402
from mlx_zip.cuda.engine import CudaEngine, make_session_store  # noqa: E402
from mlx_zip.cuda.graphs import CudaGraphs  # noqa: E402
from mlx_zip.cuda.kernels.products import silu_gate  # noqa: E402
from mlx_zip.cuda.model import CudaModel, open_model  # noqa: E402
from mlx_zip.cuda.transfers import Download, Upload  # noqa: E402
from mlx_zip.engine.options import RunOptions, ServeOptions  # noqa: E402
from mlx_zip.engine.sessions.store import SessionOptions  # noqa: E402
from support.card_tensor import CARD, CardError  # noqa: E402
from support.pretend_card import pretended_card  # noqa: E402
from support.serving import ask  # noqa: E402
from support.slow_cases import slow_but  # noqa: E402

ENCODER = "res_latent_attn"
SIZES = {"initial_vocab_size": VOCAB, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "an encoder of transformer layers": ("mistral", {"encoder": "transformer"}),
    "longrope and base positions": ("phi3", {"position_mode": "base_token_end"}),
    "evictions and start entries": ("qwen2", {"compression": {**SIZES, "policy": "lru"}, "start": [[5, 6], [7, 8, 9]]}),
    "canonical, one encoder": ("qwen3", {"canonical": True, "tie_encoders": True}),
}


@pytest.fixture
def card(monkeypatch):
    with pretended_card(monkeypatch, kernels=False) as made:
        yield made


def opened(folder, device, **options) -> CudaModel:
    return open_model(folder, device, "float32", **options)


def emitted(model: CudaModel, prompt: list[int], steps: int, **options) -> list[int]:
    return [one for one, _ in islice(generate_greedily(model, prompt, 1000, **options), steps)]


# ---- what the card refuses and spoils


def test_tensors_of_the_host_and_of_the_card_do_not_mix(card):
    ours = torch.ones(3, device=CARD)
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2, 2]
    with pytest.raises(CardError, match="on the card and on the host"):
        ours.add(torch.ones(3))


def test_rows_are_chosen_by_numbers_of_the_host_too(card):
    ours = torch.zeros(4, 2, device=CARD)
    ours[[3, 1]] = 1.0
    assert ours.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert ours[[1, 2]].tolist() == [[1, 1], [0, 0]]


def test_kernels_for_the_card_do_not_run_on_the_host(monkeypatch):
    with pretended_card(monkeypatch), pytest.raises(CardError, match="got tensors on the host only"):
        silu_gate(torch.ones(1, 4), impl="triton")


def test_memory_that_nobody_wrote_holds_no_numbers(card):
    assert torch.empty(3, device=CARD).isnan().all()


def test_what_was_fetched_without_waiting_is_there_after_the_wait(card):
    host, done = torch.zeros(2, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
    host.copy_(torch.tensor([3, 4], device=CARD), non_blocking=True)
    done.record()
    assert host.tolist() != [3, 4]
    done.synchronize()
    assert host.tolist() == [3, 4]


def test_what_was_sent_must_stay_until_the_card_has_it(card):
    host = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    torch.zeros(2, dtype=torch.int64, device=CARD).copy_(host, non_blocking=True)
    host[0] = 5
    with pytest.raises(CardError, match="changed before the card had read it"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("ordered", ["not at all", "by a stream", "by an event", "by the host"])
def test_streams_that_use_the_same_memory_wait_for_each_other(card, ordered):
    one, main, side = torch.ones(1, device=CARD), torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        if ordered == "not at all":
            with pytest.raises(CardError, match="memory that another stream may be at"):
                one.clone()
            return
        if ordered == "by a stream":
            side.wait_stream(main)
        elif ordered == "by an event":
            done = torch.cuda.Event()
            done.record(main)
            done.synchronize()
        else:
            torch.cuda.synchronize()
        one += 1
    with pytest.raises(CardError, match="memory that another stream may be at"):
        one.clone()
    main.wait_stream(side)
    assert one.tolist() == [2]


def test_a_graph_uses_memory_in_the_stream_that_it_is_replayed_on(card):
    graph, one = torch.cuda.CUDAGraph(), torch.ones(1, device=CARD)
    with torch.cuda.graph(graph):
        one += 1
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    with pytest.raises(CardError, match="memory that another stream may be at"):
        graph.replay()


def test_a_graph_works_on_its_addresses_each_time_and_computes_nothing_before(card):
    counter, graphs = torch.zeros(1, device=CARD), CudaGraphs(CARD)

    def work() -> Any:
        counter.add_(1)
        return counter * 2

    results = [graphs.run("double", work, [counter]) for _ in range(3)]
    assert counter.tolist() == [3]
    assert [one.tolist() for one in results] == [[6], [6], [6]]
    assert card.replays == 3


@pytest.mark.parametrize("wait", [torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.nonzero])
def test_a_graph_cannot_wait_for_the_card(card, wait):
    one = torch.ones(1, device=CARD)
    with pytest.raises(CardError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait(one)


def test_a_graph_does_not_survive_the_memory_that_it_reads(card):
    graph, one = torch.cuda.CUDAGraph(), torch.ones(1, device=CARD)
    with torch.cuda.graph(graph):
        two = one + 1
    graph.replay()
    assert two.tolist() == [2]
    del one
    with pytest.raises(CardError, match="memory that has been given back"):
        graph.replay()


def test_graphs_of_two_threads_are_captured_one_after_the_other(card):
    """A capture begins with a wait for the whole card, which another thread's capture does not survive."""
    one, is_inside, wait = torch.ones(1, device=CARD), Event(), Event()

    def slow() -> Any:
        if card.capturing is not None:
            is_inside.set()
            wait.wait(0.3)
        return one + 1

    other = Thread(target=lambda: CudaGraphs(CARD).run("slow", slow))
    other.start()
    assert is_inside.wait(10)
    assert CudaGraphs(CARD).run("fast", lambda: 7) == 7
    other.join()
    assert card.replays == 2


def test_the_speed_of_reading_is_measured_by_the_cards_clock(card):
    seconds = 1e-6 * (1 + PRODUCTS)  # the pieces of work between the events
    assert measure_matvec_bandwidth(CARD, 50) == pytest.approx(PRODUCTS * 4 * 50**2 / seconds)


# ---- copies


def test_uploads_that_follow_at_once_do_not_disturb_each_other(card):
    upload, sums = Upload(3, CARD), torch.zeros(3, dtype=torch.int64, device=CARD)
    for number in range(4):
        upload.send(np.full(3, number))
        sums += upload.device
    assert sums.tolist() == [6, 6, 6]


def test_a_download_holds_what_was_there_when_it_began(card):
    download, values = Download(2, CARD), torch.ones(2, dtype=torch.int64, device=CARD)
    download.start(values)
    values += 1
    assert download.wait(2) == [1, 1]


# ---- the engine


@pytest.mark.parametrize("name", slow_but(CASES, "llama"))
def test_the_ids_are_those_of_the_cpu_and_no_step_waits(name, card, tmp_path):
    family, changes = CASES[name]
    folder = save(tiny_model(family, **{"encoder": ENCODER, **changes}), tmp_path / "m")
    model, prompt = opened(folder, CARD), base_ids(40)
    card.syncs.clear()
    assert emitted(model, prompt, 14, chunk=9) == emitted(opened(folder, "cpu"), prompt, 14, chunk=9)
    assert card.replays > 14 * 2  # body and head of each step
    assert not card.syncs


@pytest.mark.slow
def test_packs_and_models_without_hypertokens_run_too(card, tmp_path):
    folder, prompt = save(tiny_model(encoder=ENCODER), tmp_path / "m"), base_ids(20)
    entries = [[5, 6, 7], [8, 9], prompt[3:7]]
    models = [opened(folder, device) for device in (CARD, "cpu")]
    assert emitted(models[0], prompt, 20, pack=entries) == emitted(models[1], prompt, 20, pack=entries)
    ours, expected = (emitted(one.without_hypertokens(), prompt, 20) for one in models)
    assert ours == expected


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (8, "bfloat16")])
def test_packed_weights_and_half_precision_run_too(card, tmp_path, bits, dtype):
    model = tiny_model(encoder=ENCODER)
    record = pack(model, bits, 32, {"pos_embed": False})
    folder = save(model, tmp_path / "m", quantization=record)
    ours, expected = (emitted(open_model(folder, device, dtype), base_ids(20), 16) for device in (CARD, "cpu"))
    assert ours == expected


@pytest.mark.slow
def test_the_kernels_run_in_graphs_as_their_references_do(few_programs, monkeypatch, tmp_path):
    folder, prompt = save(make_model("phi3", encoder=ENCODER, num_hidden_layers=1), tmp_path / "m"), base_ids(8)
    expected = emitted(opened(folder, "cpu"), prompt, 4)
    assert max(expected) >= VOCAB  # hypertokens are among them
    with pretended_card(monkeypatch) as card:
        assert emitted(opened(folder, CARD), prompt, 4) == expected
        assert card.replays > 4 * 2


def program(model: CudaModel) -> list[list[int]]:
    """Sequences that join, are taken back, kept, removed and restored while others step; returns their logs."""
    batch, kept, logs = Batch(model, 3, 90), [], []
    for number in range(16):
        if number in (0, 2, 3, 9):
            row = batch.add()
            batch.read(row, compress_next(batch.book(row), np.array(base_ids(10 + 4 * number, number))))
        if number == 6:
            kept.append(batch.snapshot(1))
            logs.append(batch.book(0).ids.tolist())
            batch.remove(0)
        if number == 11:
            batch.trim_sequence(1, 8)
            batch.read(1, [5, 6])
        if number == 13:
            logs.append(batch.book(2).ids.tolist())
            batch.remove(2)
            batch.restore(kept[0])
        batch.choose_ids()
        batch.start_body()
        assert not batch.update_codebooks(batch.wait_for_ids())
    return logs + [batch.book(row).ids.tolist() for row in range(len(batch))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "longrope and base positions", "evictions and start entries"])
def test_sequences_join_leave_and_come_back_as_on_the_cpu(name, card, tmp_path):
    family, changes = CASES[name]
    folder = save(tiny_model(family, ENCODER, **changes), tmp_path / "m")
    assert program(opened(folder, CARD)) == program(opened(folder, "cpu"))


@pytest.mark.slow
def test_sequences_come_back_in_many_small_pieces_too(card, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "PIECE_BYTES", 200)  # less than the keys of one head
    folder = save(tiny_model("llama", ENCODER), tmp_path / "m")
    assert program(opened(folder, CARD)) == program(opened(folder, "cpu"))


@pytest.mark.slow
def test_a_batch_is_used_again_with_the_graphs_that_it_has(card, tmp_path, monkeypatch):
    folder, prompts = save(tiny_model(encoder=ENCODER), tmp_path / "m"), [base_ids(20, seed) for seed in range(3)]
    model, captured, capture = opened(folder, CARD), [], CudaGraphs._capture

    def noted(graphs: CudaGraphs, work: Any) -> Any:
        captured.append(work)
        return capture(graphs, work)

    monkeypatch.setattr(CudaGraphs, "_capture", noted)
    batch = Batch(model, 1, 200)
    expected = [emitted(opened(folder, "cpu"), prompt, 16) for prompt in prompts]
    assert emitted(model, prompts[0], 16, batch=batch) == expected[0]
    assert len(captured) == 4  # head, body, new rows and their installation
    next(iter(generate_greedily(model, prompts[1], 16, batch=batch)))  # is given up in the middle of a step
    assert [emitted(model, prompt, 16, batch=batch) for prompt in prompts] == expected
    assert len(captured) == 4


def answers(folder: Any, device: Any, predictions: Sequence[list[int]] = ()) -> tuple[list[Any], list[float], int]:
    """What an engine answers to requests of all kinds that run together, and to one that goes on with a session.

    predictions: base ids that each of the four answers will probably have, which are proposed; empty for no drafts.
    Returns per request its ids and its base ids, behind them the number of ids that the session gave; the
    log-probabilities of the third answer; and how many ids were accepted.
    """
    drawn = {"temp": 0.9, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "xtc_probability": 0.5, "xtc_threshold": 0.05}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {9: 2.0}}
    asked: list[dict[str, Any]] = [
        {},
        {"sampling": {**drawn, "seed": 1}},
        {"sampling": {"temp": 0.8, "seed": 3, **penalties}, "top_logprobs": 2},
        {"max_tokens": 9},
    ]
    for one, prediction in zip(asked, predictions, strict=False):
        one["prediction"] = prediction
    options, store = (
        ServeOptions(max_running=2, run=RunOptions(draft="lookup" if predictions else "off")),
        partial(make_session_store, options=SessionOptions()),
    )
    with CudaEngine(lambda: (opened(folder, device), ENDLESS), "tiny", options, store) as engine:
        watches = [ask(engine, base_ids(20, at), **{"max_tokens": 16, **one})[1] for at, one in enumerate(asked[:3])]
        found: list[Any] = [(watch.wait().ids, watch.base_ids) for watch in watches]
        likely = [one.logprob or 0.0 for one in watches[2].emitted]
        again = base_ids(20, 0) + watches[0].base_ids + [4, 5]
        watch = ask(engine, again, **asked[3])[1].wait()
        accepted = sum(one.end.counts.accepted for one in (*watches, watch))
        return [*found, (watch.ids, watch.base_ids), watch.events[0].cached_tokens], likely, accepted


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True])
def test_an_engine_answers_requests_of_all_kinds_as_on_the_cpu(card, tmp_path, drafted):
    folder = save(tiny_model(encoder=ENCODER), tmp_path / "m")
    expected, on_cpu, _ = answers(folder, "cpu")
    ours, likely, accepted = answers(folder, CARD, [base for _, base in expected[:4]] if drafted else ())
    assert (accepted > 10) == drafted
    assert ours == expected
    assert ours[-1] > 20
    assert likely == pytest.approx(on_cpu, abs=1e-5)
    assert min(likely) < 0
