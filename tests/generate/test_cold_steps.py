"""Steps of bodies that run ahead, with a store without rows: nothing waits for what the running body encodes."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_zip.codec import compress
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER, TwoPartStep
from mlx_zip.models.zip_model import Model
from support import tiny
from support.serving import ask, at_once, tiny_engine
from support.steps import Together, decode_steps

STEPS, LENGTHS = 40, (40, 25, 33)


class Watched(RowStore):
    """A store that notes, for all rows that it keeps, how many bodies were begun since they were encoded."""

    def __init__(self):
        super().__init__()
        self.begun, self.ages, self._born = 0, [], {}

    def note_body(self, call):
        """Calls `call`, which begins a body, and counts it; the rows that it encodes belong to this body."""
        self.begun += 1
        found = call()
        self._born.update({id(one.rows): self.begun for one in self._fresh if id(one.rows) not in self._born})
        return found

    def _store_rows(self, encoded):
        self.ages += [self.begun - self._born.pop(id(one.rows), -1) for one in encoded]
        super()._store_rows(encoded)


@pytest.fixture
def store(monkeypatch):
    made, run = Watched(), TwoPartStep.run_body
    monkeypatch.setattr(TwoPartStep, "run_body", lambda self, ids: made.note_body(lambda: run(self, ids)))
    return made


def prompts_of(model):
    return [compress(model.config.codec_params, tiny.base_ids(n, seed))[0] for seed, n in enumerate(LENGTHS)]


def single(model):
    options = {"sampler": make_sampler(0), "prefill_step_size": 64, "ahead": True}
    list(decode_steps(model, prompts_of(model)[0], model.make_cache(), max_steps=STEPS, **options))


def batch(model):
    Together(model, prompts_of(model), ahead=True, chunk=256).run(STEPS)  # all prompts are read before the first step


@pytest.mark.parametrize("loop", [single, batch])
def test_no_row_is_read_before_the_body_that_encodes_it_has_ended(loop, store):
    model = tiny.tiny_model().eval()
    model.row_source.store = store
    loop(model)
    assert len([age for age in store.ages if age <= store.begun]) > STEPS // INPUT_ROWS_TOGETHER
    assert min(store.ages) >= 1


@pytest.mark.parametrize("running", [1, 3])
def test_no_step_of_the_engine_reads_a_row_of_a_running_body(running, store):
    def with_store(model):
        model.row_source.store = store

    with tiny_engine(change=with_store, run={"ahead": True}) as engine:
        prompts = [tiny.base_ids(n, seed) for seed, n in enumerate(LENGTHS[:running])]
        for watch in at_once(engine, lambda: [ask(engine, prompt, max_tokens=STEPS)[1] for prompt in prompts]):
            watch.wait()
        ages = list(store.ages)
    assert len([age for age in ages if age <= store.begun]) > STEPS // INPUT_ROWS_TOGETHER
    assert min(ages) >= 1


class SeesSteps(RowStore):
    """Counts the rows that are stored, and those of them that were submitted in the same step."""

    def __init__(self):
        super().__init__()
        self.stored, self.too_early, self.submitted = 0, 0, set()

    def take_rows_to_submit(self):
        rows = super().take_rows_to_submit()
        self.submitted |= set(map(id, rows))
        return rows

    def _store_rows(self, encoded):
        self.stored += len(encoded)
        self.too_early += sum(id(one.rows) in self.submitted for one in encoded)
        super()._store_rows(encoded)


@pytest.mark.parametrize("ahead", [True, False])
def test_no_group_waits_for_rows_that_another_submits_in_the_same_step(ahead, monkeypatch):
    store, take_step = SeesSteps(), Scheduler._take_step

    def begins_a_step(self):
        store.submitted.clear()
        take_step(self)

    def with_store(model):
        model.row_source.store = store

    monkeypatch.setattr(Scheduler, "_take_step", begins_a_step)
    monkeypatch.setattr(Served, "batches", False)  # each request stays a group of its own
    with tiny_engine(change=with_store, run={"ahead": ahead}) as engine:
        prompts = [tiny.base_ids(n, seed) for seed, n in enumerate(LENGTHS[:3])]
        for watch in at_once(engine, lambda: [ask(engine, prompt, max_tokens=STEPS)[1] for prompt in prompts]):
            watch.wait()
        figures = store.stored, store.too_early
    assert figures[0] > STEPS // 2
    assert figures[1] == 0


def test_the_host_does_not_wait_for_a_body_that_encodes_input_rows(monkeypatch):
    model, run_layers = tiny.tiny_model().eval(), Model.run_layers
    single(model)  # makes the encoders of single entries, which takes one wait per model
    model.row_source.store, slow = RowStore(), mx.random.normal((1100, 1100))
    cache = model.make_cache()
    y = mx.argmax(model(mx.array(prompts_of(model)[0].astype(np.int32))[None], cache=cache)[:, -1], axis=-1)
    mx.eval(y, *model.row_source.take_rows_to_submit())
    assert len(cache[-1].missing_installed_inputs()) >= INPUT_ROWS_TOGETHER

    def with_a_slow_end(self, *args):
        h = run_layers(self, *args)
        return h + 0 * (slow @ (slow + h.sum())).sum()

    monkeypatch.setattr(Model, "run_layers", with_a_slow_end)
    ahead, ended, before = TwoPartStep(model, cache), threading.Event(), model.row_source.store.encoded
    h = ahead.run_body(y)
    mx.async_eval(h)
    waiter = threading.Thread(target=lambda: (mx.eval(h), ended.set()))
    waiter.start()
    ahead.compute_logits(h, y)
    model.row_source.note_submitted_computed()
    model.row_source.store_computed_rows()
    assert not ended.is_set()
    encoded = model.row_source.store.encoded - before
    assert encoded > INPUT_ROWS_TOGETHER  # the input rows of `run_body`, the output row of `compute_logits`
    waiter.join()
