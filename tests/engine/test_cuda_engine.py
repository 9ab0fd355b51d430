"""What only the engine on PyTorch has: rows of one batch, caches of a fixed size, snapshots; here on a CPU."""

import functools
import re
import threading
import time
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlx_zip.engine import Emitted, Failed, Finished, Submission
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import EngineError, ModelError, PromptTooLongError
from mlx_zip.models.loading import weight_bytes_per_step
from mlx_zip.packs.pack import Pack
from support import tiny
from support.serving import MISSING, WAIT_S, Watch, alone, ask, prompts, same_until_a_tie, tiny_engine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
PER_ID = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width of a head, float32


def engine(family="llama", **options):
    return tiny_engine(family, kind="cuda", **options)


def expected(prompt, family="llama", max_tokens=12, **changes):
    """What MLX generates, once for all tests."""
    return _expected(tuple(prompt), family, max_tokens, **changes)


@functools.cache
def _expected(prompt, family, max_tokens, **changes):
    return alone(tiny.tiny_model(family, **changes).eval(), list(prompt), max_tokens=max_tokens)


def test_models_of_other_families_answer_in_company_as_mlx_does():
    cases: list[tuple[str, dict[str, Any]]] = [
        ("phi3", {"position_mode": "base_token_end"}),
        ("qwen3", {"canonical": True}),
    ]
    for family, changes in cases:
        with engine(family, model=changes) as made:
            some = [tiny.base_ids(n, n) for n in (20, 28, 5)]
            watches = [ask(made, prompt, max_tokens=12)[1] for prompt in some]
            for watch, prompt in zip(watches, some, strict=True):
                same_until_a_tie(watch.wait(), expected(prompt, family, **changes))


def test_a_seed_gives_the_same_ids_alone_and_in_company():
    options = [{"temp": 1.0, "seed": 3}, {"temp": 0.7, "top_p": 0.9, "seed": 4}, {"temp": 1.2, "top_k": 9, "seed": 5}]
    pairs = list(zip(prompts(3), options, strict=True))
    with engine() as made:
        one_by_one = [ask(made, prompt, max_tokens=20, sampling=one)[1].wait().ids for prompt, one in pairs]
        together = [ask(made, prompt, max_tokens=20, sampling=one)[1] for prompt, one in pairs]
        assert [watch.wait().ids for watch in together] == one_by_one


def test_requests_with_packs_of_their_own_run_in_one_batch():
    packs = [None, Pack(((3, 4), (5, 6))), Pack(((7, 8, 9),))]
    with engine() as made:
        watches = [ask(made, [3, 4, 5, 6, 7, 8, 9], max_tokens=12, pack=pack)[1] for pack in packs]
        found = [watch.wait().events[0].prompt_ids for watch in watches]
    assert found == [7, 5, 5]


@pytest.mark.parametrize("part", ["choose_ids", "start_body", "wait_for_ids", "update_codebooks"])
def test_a_step_that_fails_ends_the_requests_in_it_and_the_engine_goes_on(monkeypatch, part):
    from mlx_zip.cuda.batch import Batch

    whole, calls = getattr(Batch, part), []

    def fails(self, *args, **options):
        calls.append(len(self))
        if calls.count(3) == 2:
            raise RuntimeError("CUDA out of memory")
        return whole(self, *args, **options)

    with engine(sessions=SessionOptions(), max_running=3) as made:
        monkeypatch.setattr(Batch, part, fails)
        bad = [ask(made, prompt, max_tokens=300)[1] for prompt in prompts(3)]
        ends = [watch.wait().end for watch in bad]
        assert all(isinstance(end, Failed) and "out of memory" in str(end.error) for end in ends)
        assert made.sessions() == []
        monkeypatch.setattr(Batch, part, whole)
        good = [ask(made, prompt, max_tokens=12)[1] for prompt in prompts(4)]
        for watch, prompt in zip(good, prompts(4), strict=True):
            same_until_a_tie(watch.wait(), expected(prompt))


@pytest.mark.parametrize("part", ["__init__", "read"])
def test_too_little_memory_is_one_line_with_what_to_do_when_a_model_is_loaded(monkeypatch, part):
    import torch

    from mlx_zip.cuda.batch import Batch

    def fails(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nmore")

    monkeypatch.setattr(Batch, part, fails)
    with pytest.raises(
        ModelError, match=r"^CUDA out of memory. Tried to allocate 20.00 MiB: use a smaller model.*time$"
    ):
        engine()


def test_a_prompt_that_cannot_be_read_fails_its_request_only(monkeypatch):
    from mlx_zip.cuda.batch import Batch

    whole = Batch.read

    def fails(self, row, ids, more=False):
        if len(ids) == 13:
            raise RuntimeError("CUDA out of memory")
        return whole(self, row, ids, more)

    monkeypatch.setattr(Batch, "read", fails)
    with engine(run={"prefill_step_size": 13}, sessions=SessionOptions()) as made:
        good = [ask(made, tiny.base_ids(n, n), max_tokens=12)[1] for n in (5, 8)]
        bad = ask(made, tiny.base_ids(200))[1].wait()
        assert "out of memory" in str(bad.end.error)
        for watch, n in zip(good, (5, 8), strict=True):
            same_until_a_tie(watch.wait(), expected(tiny.base_ids(n, n)))
        assert len(made.sessions()) == 2


@pytest.mark.parametrize("part", ["choose_ids", "start_body"])
def test_a_first_id_that_cannot_be_chosen_fails_its_request_and_gives_its_row_back(monkeypatch, part):
    from mlx_zip.cuda.batch import Batch

    def fails(self, *args, **options):
        raise RuntimeError("CUDA out of memory")

    prompt = tiny.base_ids(9)
    with engine(max_running=1, sessions=SessionOptions()) as made:
        with monkeypatch.context() as broken:
            broken.setattr(Batch, part, fails)
            end = ask(made, prompt)[1].wait().end
        assert isinstance(end, Failed)
        assert "out of memory" in str(end.error)
        assert made.sessions() == []
        same_until_a_tie(ask(made, prompt, max_tokens=12)[1].wait(), expected(prompt))


def test_prompts_that_are_read_in_turns_are_not_touched_by_the_steps_of_others():
    with engine(max_running=3, run={"prefill_step_size": 4}) as made:
        some = [tiny.base_ids(n, n) for n in (5, 90, 80)]
        watches = [ask(made, prompt, max_tokens=20)[1] for prompt in some]
        for watch, prompt in zip(watches, some, strict=True):
            same_until_a_tie(watch.wait(), expected(prompt, max_tokens=20))


def test_a_request_that_fails_to_begin_takes_no_row_from_the_next_one(monkeypatch):
    from mlx_zip.cuda.engine import CudaEngine

    whole, later, asked = CudaEngine._make_reading, [], threading.Event()

    def fails(self, served, request):
        if len(request.prompt_ids) == 1:
            raise MemoryError("no room for the prompt's ids")
        return whole(self, served, request)

    monkeypatch.setattr(CudaEngine, "_make_reading", fails)
    with engine(max_running=2) as made:

        def deliver(event):
            if isinstance(event, Emitted) and not later:  # in the middle of a step, when rows cannot be moved
                later.extend(ask(made, prompt, max_tokens=5)[1] for prompt in ([3], [3, 4, 5]))
                asked.set()

        ticket = made.submit(Submission([3, 4], max_tokens=-1), deliver)
        assert asked.wait(WAIT_S)
        assert isinstance(later[0].wait().end, Failed)
        assert later[1].wait().end.reason == "length"
        made.cancel(ticket)


def test_a_request_ends_where_its_cache_is_full_and_others_go_on():
    with engine(max_running=2, max_kv_bytes=2 * 60 * PER_ID) as made:
        full = ask(made, [*range(3, 33)], max_tokens=-1)[1]
        other = ask(made, tiny.base_ids(5), max_tokens=20)[1]
        assert full.wait().end.reason == "length"
        assert 28 <= len(full.ids) <= 31
        assert len(other.wait().base_ids) == 20
        with pytest.raises(PromptTooLongError, match="context has 60"):
            ask(made, [3, 4] * 7 + [*range(3, 39)] * 3)


BY_BASE = {"model": {"position_mode": "base_token_end"}, "max_running": 2, "max_kv_bytes": 2 * 60 * PER_ID}


def test_where_positions_are_those_of_base_ids_a_request_fills_its_cache_to_the_last_place():
    with engine(**BY_BASE) as made:
        full = ask(made, [*range(3, 33)], max_tokens=-1)[1]
        other = ask(made, tiny.base_ids(5), max_tokens=20)[1]
        assert full.wait().end.reason == "length"
        assert full.events[0].prompt_ids + len(full.ids) == 60
        assert len(other.wait().base_ids) == 20


def test_a_prompt_that_leaves_no_place_for_an_answer_is_refused_and_others_go_on():
    from mlx_zip.codec import compress

    with engine(**BY_BASE) as made:
        params, ids = made._scheduler.served.model.default_start.params, tiny.base_ids(400, 3)
        prompt = next(ids[:n] for n in range(60, 400) if len(compress(params, ids[:n])[0]) == 60)
        other = ask(made, tiny.base_ids(5), max_tokens=30)[1]
        end = ask(made, prompt)[1].wait().end
        assert isinstance(end.error, PromptTooLongError)
        assert "the KV caches have room for 60 ids" in str(end.error)
        assert len(other.wait().base_ids) >= 30
        tokens, most = map(int, re.search(r"is too long: (\d+) tokens > (\d+) maximum", str(end.error)).groups())
        assert (tokens, most) == (len(prompt), len(prompt) - 1)
        one_shorter = ask(made, prompt[:most], max_tokens=1)[1].wait()
        assert one_shorter.end.reason == "length"


def test_the_log_probability_of_an_id_is_its_own_and_not_that_of_the_likeliest():
    with engine() as made:
        options = {"temp": 2.0, "seed": 1}
        watch = ask(made, [3, 4], max_tokens=30, sampling=options, top_logprobs=tiny.VOCAB)[1].wait()
    shares = [{one.base_ids: one.logprob for one in event.likely} for event in watch.emitted[:-1]]  # the last is cut
    known = [(event, some) for event, some in zip(watch.emitted, shares, strict=False) if event.base_ids in some]
    assert all(event.logprob == pytest.approx(some[event.base_ids], abs=1e-6) for event, some in known)
    assert sum(event.logprob < max(some.values()) for event, some in known) > 5


def test_a_compressible_prompt_beyond_the_room_in_base_tokens_is_read():
    with engine(max_running=1, max_kv_bytes=120 * PER_ID) as made:
        assert made.info.context == 120
        assert ask(made, [3, 4, 5] * 70, max_tokens=5)[1].wait().end.reason == "length"


def test_too_little_memory_for_the_caches_is_told_with_both_numbers():
    with pytest.raises(ModelError, match=f"{16 * 8 * PER_ID} bytes needed at least, there is room for 5000"):
        engine(max_kv_bytes=5000)


def test_sessions_are_dropped_oldest_first_where_memory_is_bounded():
    bound = 4 * 60 * PER_ID
    with engine(sessions=SessionOptions(max_bytes=bound)) as made:
        for n in range(6):
            ask(made, tiny.base_ids(60, n), max_tokens=20)[1].wait()
        kept, figures = made.sessions(), made.figures()
        assert 2 <= len(kept) < 6
        assert figures.session_bytes == sum(one.bytes for one in kept) <= bound
        assert ask(made, tiny.base_ids(60, 5), max_tokens=2)[1].wait().end.counts.cached_tokens > 40
        assert ask(made, tiny.base_ids(60, 0), max_tokens=2)[1].wait().end.counts.cached_tokens == 0
        made.drop_session(made.sessions()[0].name)
        with pytest.raises(EngineError, match="no session"):
            made.drop_session("nobody")


def test_a_continued_session_gives_the_ids_of_one_that_was_never_kept():
    first = tiny.base_ids(60)
    with engine(sessions=SessionOptions()) as made, engine() as fresh:
        one = ask(made, first)[1].wait()
        edited = [*first[:40], 9, 8, 7, *first[40:55]]
        for prompt in ([*first, *one.base_ids, 9, 8, 7, 6], edited):
            again, new = ask(made, prompt, max_tokens=15)[1].wait(), ask(fresh, prompt, max_tokens=15)[1].wait()
            assert again.end.counts.cached_tokens > 20
            assert again.base_ids[:1] == new.base_ids[:1]
            assert again.end.counts.prompt_ids < new.end.counts.prompt_ids


def test_a_cancelled_request_keeps_what_was_delivered():
    with engine(sessions=SessionOptions()) as made:
        asked = [ask(made, prompt, max_tokens=300) for prompt in prompts(3)]
        for ticket, watch in asked:
            while len(watch.emitted) < 5:
                time.sleep(0.001)
            made.cancel(ticket)
        lengths = [len(p) + len(w.wait().base_ids) for p, (_, w) in zip(prompts(3), asked, strict=True)]
        assert [watch.end.reason for _, watch in asked] == ["cancelled"] * 3
        assert sorted(one.base_tokens for one in made.sessions()) == sorted(lengths)


def test_a_session_that_the_host_has_no_room_for_is_lost_and_no_answer(monkeypatch):
    from mlx_zip.cuda.batch import Batch

    def fails(self, row):
        raise MemoryError("no room for a copy of the cache")

    with engine(sessions=SessionOptions(), max_running=3) as made:
        monkeypatch.setattr(Batch, "snapshot", fails)
        watches = [ask(made, prompt, max_tokens=12)[1] for prompt in prompts(3)]
        for watch, prompt in zip(watches, prompts(3), strict=True):
            same_until_a_tie(watch.wait(), expected(prompt))
        assert made.sessions() == []


def test_rows_are_given_back_however_requests_end():
    with engine(max_running=2, run={"prefill_step_size": 4}) as made:
        for n in range(6):
            ticket, watch = ask(made, tiny.base_ids(120, n), max_tokens=30)
            _, other = ask(made, tiny.base_ids(9, n), max_tokens=6)
            while len(watch.events) < 2 + 3 * n:
                time.sleep(0.001)
            made.cancel(ticket)
            assert isinstance(watch.wait().end, Finished)
            assert other.wait().end.reason == "length"
        made.sessions()
        assert len(made._scheduler.served.batch) == 0


def test_the_ceiling_is_the_bandwidth_over_the_same_bytes_as_on_mlx(monkeypatch):
    from mlx_zip.cuda import devices

    calls = []
    monkeypatch.setattr(devices, "_measured", {})
    monkeypatch.setattr(devices, "measure_matvec_bandwidth", lambda *facts: calls.append(facts) or 1e9)
    with engine() as made, made.without_hypertokens("plain") as plain:
        found = made.ceiling()
        assert found == made.ceiling() == plain.ceiling()
    read = weight_bytes_per_step(dict(tree_flatten(tiny.tiny_model().parameters())))
    assert (found.bytes_per_s, found.bytes_per_step, found.steps_per_s) == (1e9, read, 1e9 / read)
    assert len(calls) == 1
    assert calls[0][2] < 1


def test_the_bandwidth_is_measured_by_reading_and_not_where_memory_is_short(monkeypatch):
    import torch

    from mlx_zip.cuda import devices

    assert devices.measure_matvec_bandwidth(torch.device("cpu"), 128) > 0
    calls, products_s = [], devices._time_matrix_products
    monkeypatch.setattr(devices, "_time_matrix_products", lambda *both: calls.append(both) or products_s(*both))
    assert devices.measure_matvec_bandwidth(torch.device("cpu"), 128, 0.0) > 0
    assert len(calls) == 2  # there is no time, but one product is needed after the one that warms up
    monkeypatch.setattr(devices, "_measured", {})
    with engine() as made:
        monkeypatch.setattr(devices, "free_gpu_bytes", lambda device: 4 * devices.BANDWIDTH_SIDE**2 - 1)
        assert made.ceiling() is None


def test_an_engine_without_hypertokens_shares_the_weights():
    with engine() as made, made.without_hypertokens("plain") as plain:
        watch = Watch()
        from mlx_zip.engine import Submission

        plain.submit(Submission(tiny.base_ids(9), max_tokens=10), watch)
        assert len(watch.wait().ids) == 10
        assert max(watch.ids) < tiny.VOCAB
        ours, theirs = (one._scheduler.served.model.embedding for one in (made, plain))
        assert ours.data_ptr() == theirs.data_ptr()
        with pytest.raises(EngineError, match="cannot be run"):
            plain.without_hypertokens("again")


# ---- sessions on disk


def kept_on_disk(folder, prompt, family="llama", **options):
    """Answers a prompt with an engine of its own that keeps the session in a folder; returns the whole text."""
    with engine(family, sessions=SessionOptions(folder=folder), **options) as made:
        return [*prompt, *ask(made, prompt, max_tokens=10)[1].wait().base_ids]


def test_a_session_beyond_longrope_s_switch_goes_on_after_a_restart_without_being_read_again(tmp_path, monkeypatch):
    from mlx_zip.cuda.sequence import SequenceReader

    whole, begins = SequenceReader._run_body_over_spans, []
    text = kept_on_disk(tmp_path, tiny.base_ids(80), "phi3")

    def noting(self, spans):
        begins.extend(begin for _, begin, _ in spans.values())
        return whole(self, spans)

    with engine("phi3", sessions=SessionOptions(folder=tmp_path)) as made:
        monkeypatch.setattr(SequenceReader, "_run_body_over_spans", noting)
        watch = ask(made, [*text, 9, 8, 7], max_tokens=10)[1].wait()
    assert watch.end.counts.cached_tokens > 60
    assert begins[0] > 32


def test_a_session_longer_than_this_engine_has_room_for_gives_the_usual_error(tmp_path):
    text = kept_on_disk(tmp_path, tiny.base_ids(200, 3), model=BY_BASE["model"], max_running=2)
    with engine(**BY_BASE, sessions=SessionOptions(folder=tmp_path)) as made:
        end = ask(made, [*text, 9, 8, 7])[1].wait().end
        assert isinstance(end.error, PromptTooLongError)
        tokens, most = map(int, re.search(r"is too long: (\d+) tokens > (\d+) maximum", str(end.error)).groups())
        assert tokens == len(text) + 3
        assert len(text) > most > 60  # the base tokens of 60 ids
        assert ask(made, tiny.base_ids(5), max_tokens=3)[1].wait().end.reason == "length"


# ---- how it is opened


def test_an_engine_that_keeps_no_sessions_reads_each_prompt_anew(tmp_path):
    from mlx_zip.cuda.engine import open_cuda_engine

    folder = converted(tmp_path)
    with open_cuda_engine(folder, device="cpu", sessions=None, max_running=1) as made:
        for _ in range(2):
            watch = ask(made, tiny.base_ids(20), max_tokens=5)[1].wait()
            assert watch.end.counts.cached_tokens == 0
        assert made.sessions() == []


def test_a_tokenizer_s_own_code_and_a_chat_template_of_one_s_own_can_be_asked_for(tmp_path, monkeypatch):
    from mlx_zip.cuda.engine import open_cuda_engine
    from mlx_zip.models import model_folder

    folder, whole, asked = converted(tmp_path, eos_token_id=[5]), model_folder.load_tokenizer, []

    def load(path, trust_remote_code):
        asked.append(trust_remote_code)
        return whole(path, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(model_folder, "load_tokenizer", load)
    template = "{% for one in messages %}w9 {{ one.content }}{% endfor %}"
    options = {"device": "cpu", "tokenizer_config": {"chat_template": template}, "max_running": 1}
    with open_cuda_engine(folder, **options) as made:
        asked_before = list(asked)
    with open_cuda_engine(folder, trust_remote_code=True, **options) as made:
        assert (asked_before, asked) == ([False], [False, True])  # never read without the trust that was asked for
        assert made.tokenizer.apply_chat_template([{"role": "user", "content": "w7"}]) == [9, 7]
        assert 5 in made.tokenizer.eos_token_ids


def converted(tmp_path, **changes):
    """Saves a tiny model with a tokenizer and returns its folder; changes: keys of config.json."""
    from support.checkpoints import write_tokenizer
    from support.torch_folders import save

    folder = save(tiny.tiny_model("llama").eval(), tmp_path / "m", **changes)
    write_tokenizer(folder, tiny.VOCAB)
    return folder


def test_a_device_that_the_variable_names_wrongly_and_a_missing_card_are_one_line(monkeypatch):
    import torch

    from mlx_zip.cuda.engine import device_from_environment
    from mlx_zip.errors import ConfigError

    monkeypatch.setenv("MLX_ZIP_DEVICE", "tpu")
    with pytest.raises(ConfigError, match=r"^MLX_ZIP_DEVICE=tpu: it is one of cpu, gpu$"):
        device_from_environment()
    monkeypatch.setenv("MLX_ZIP_DEVICE", "cpu")
    assert {device_from_environment(needs_card).type for needs_card in (False, True)} == {"cpu"}
    monkeypatch.setenv("MLX_ZIP_DEVICE", "gpu")
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    refusal = r"no usable CUDA card here: .* \(MLX_ZIP_DEVICE=cpu computes on the CPU\)$"
    with pytest.raises(ModelError, match=refusal):
        device_from_environment()
    monkeypatch.delenv("MLX_ZIP_DEVICE")
    assert device_from_environment().type == "cpu"
    with pytest.raises(ModelError, match=refusal):
        device_from_environment(needs_card=True)
