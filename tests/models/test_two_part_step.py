"""Steps whose body begins before the host has read their id: what waits, runs twice, is launched and is copied."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import _get_classes

from mlx_zip.codec import compress
from mlx_zip.engine.sampling.canonical import CanonicalDecoding
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.rows.row_tables import ColumnTable, RowTable, TwoCopyTable
from mlx_zip.models.rows.zip_state import ZipState
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER, TwoPartStep
from mlx_zip.models.zip_model import Model
from support import tiny
from support.launches import build_graphs_as_on_gpu, count_added_launches
from support.slow_cases import slow_but
from support.steps import decode_steps

WARM, PER_SIDE, BASE_TOKEN_END, CANONICAL = 10, 30, 3, 6  # launches that a step may add to mlx-lm's
TOGETHER = 50  # launches that encode `INPUT_ROWS_TOGETHER` rows of one side
STEPS = 24


def prompt_of(model):
    return compress(model.config.codec_params, tiny.base_ids(30))[0]


def read(model):
    """A cache that has read the prompt, and the id that follows it."""
    cache = model.make_cache()
    logits = model(mx.array(prompt_of(model).astype(np.int32))[None], cache=cache)
    y = mx.argmax(logits[:, -1], axis=-1)
    mx.eval(y, [entry.state for entry in cache[:-1]])
    return cache, y


def chosen(logits):
    return mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)


def zip_steps(model, ids, cache, canonical, twice):
    """The steps of a request; `twice` gets how many bodies have run twice after each."""
    ahead, processor = TwoPartStep(model, cache), CanonicalDecoding(cache[-1].books[0])
    processor(None, mx.zeros((1, model.layout.width)))
    for one in ids:
        y = mx.array([one])
        logits = ahead.compute_logits(ahead.run_body(y), y)[:, -1]
        twice.append(cache[-1].second_bodies)
        yield chosen(processor(None, logits) if canonical else logits)


def plain_steps(model, ids):
    """The steps of mlx-lm's own model of the same shape."""
    config = {"rope_theta": 10000.0, **model.args.decoder_config}
    kind, arguments = _get_classes(config)
    plain = kind(arguments.from_dict(config))
    if quantized(model):
        tiny.quantize(plain)
    mx.eval(plain.parameters())
    cache = make_prompt_cache(plain)
    mx.eval(plain(mx.array([[3, 4, 5]]), cache=cache), [entry.state for entry in cache])
    for one in ids:
        yield chosen(plain(mx.array([[one % tiny.VOCAB]]), cache=cache)[:, -1])


def quantized(model):
    return "scales" in model.model.embed_tokens


def counted(model, warm, canonical=False):
    """Launches that each step adds to mlx-lm's, from the second on, and whether the step installs an entry; without the
    steps whose body runs twice.
    """
    model.eval()
    model.row_source.store = RowStore() if warm else None
    emitted = [
        token
        for token, _ in decode_steps(
            model,
            prompt_of(model),
            model.make_cache(),
            max_steps=STEPS,
            sampler=make_sampler(0),
            prefill_step_size=64,
            ahead=True,
        )
    ]
    if warm:
        model.row_source.store.flush()
    cache, _ = read(model)
    mx.eval(TwoPartStep(model, cache).run_body(mx.array([5])))  # the prompt's entries have input rows from here on
    cache[0].trim(1), [entry.trim(1) for entry in cache[1:-1]]
    book, installs = cache[-1].books[0].copy(), []
    for one in emitted:
        installs.append(len(book.push(one)) > 0)
    with build_graphs_as_on_gpu():
        ours = count_added_launches(zip_steps(model, emitted, cache, canonical, twice := []))
        plain = count_added_launches(plain_steps(model, emitted))
    once = [i for i in range(1, len(ours)) if twice[i] == twice[i - 1]]
    return [ours[i] - plain[i] for i in once], [installs[i] for i in once]


SHAPES = [("llama", "res_latent_attn"), ("llama", "transformer"), ("qwen3", "transformer"), ("gemma", "transformer")]


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
@pytest.mark.parametrize(("family", "encoder"), SHAPES)
def test_a_warm_step_adds_few_launches_to_mlx_lms(family, encoder, mode):
    model = tiny.tiny_model(family, encoder, position_mode=mode)
    more, installs = counted(model, warm=True)
    assert any(installs)
    assert 0 < max(more) <= WARM + (BASE_TOKEN_END if mode == "base_token_end" else 0)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("encoder", slow_but(["res_latent_attn", "transformer"], "res_latent_attn"))
def test_a_cold_step_encodes_one_row_and_seldom_several(encoder, bits):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    if encoder == "res_latent_attn":
        sizes |= {"hidden_size": 32, "model_hidden_size": 64}
    config = tiny.tiny_config("llama", encoder)
    config["zip2zip"]["encoder"] |= sizes
    model = Model(ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    if bits:
        tiny.quantize(model)
    more, installs = counted(model, warm=False)
    assert any(installs)
    assert WARM < max(more) <= WARM + PER_SIDE + TOGETHER
    assert np.mean(more) <= WARM + PER_SIDE + TOGETHER / INPUT_ROWS_TOGETHER


def test_canonical_decoding_adds_few_launches():
    model = tiny.tiny_model()
    assert 0 < max(counted(model, warm=True, canonical=True)[0]) <= WARM + CANONICAL


@pytest.mark.slow
def test_the_id_is_on_the_host_while_its_body_still_runs(monkeypatch):
    model = tiny.tiny_model()
    cache, y = read(model)
    run_layers, slow = Model.run_layers, mx.random.normal((1100, 1100))
    mx.eval(slow)

    def with_a_slow_end(self, *args):
        h = run_layers(self, *args)
        return h + 0 * (slow @ (slow + h.sum())).sum()

    monkeypatch.setattr(Model, "run_layers", with_a_slow_end)
    ahead, ended = TwoPartStep(model, cache), threading.Event()
    h = ahead.run_body(y)
    mx.async_eval(h)
    waiter = threading.Thread(target=lambda: (mx.eval(h), ended.set()))
    waiter.start()
    logits = ahead.compute_logits(h, y)
    assert not ended.is_set()
    assert cache[-1].books[0].last == y.item()
    waiter.join()
    assert np.isfinite(np.array(logits)[0, 0, : tiny.VOCAB]).all()


def test_a_hypertoken_that_is_installed_by_being_read_runs_the_body_again():
    model = tiny.tiny_model()
    cache, plain = model.make_cache(), model.make_cache()
    for one in (cache, plain):
        model(mx.array([[3, 5]]), cache=one)
    ids = [model.layout.hyper_id(len(cache[-1].books[0])), 7]  # the first stands for 5 5 and is installed by being read
    ahead = TwoPartStep(model, cache)
    for one in ids:
        y = mx.array([one])
        np.testing.assert_allclose(
            np.array(ahead.compute_logits(ahead.run_body(y), y)), np.array(model(y[None], cache=plain)), atol=1e-5
        )
    assert cache[-1].second_bodies == 1
    assert plain[-1].second_bodies == 0


def test_input_rows_that_run_encodes_go_into_a_table_of_two_copies():
    model = tiny.tiny_model()
    cache, y = read(model)
    assert not isinstance(cache[-1].inputs, TwoCopyTable)
    assert len(cache[-1].missing_installed_inputs()) >= INPUT_ROWS_TOGETHER
    TwoPartStep(model, cache).run_body(y)
    assert isinstance(cache[-1].inputs, TwoCopyTable)
    assert not len(cache[-1].missing_installed_inputs())


def test_a_batch_that_was_saved_and_loaded_goes_on_ahead():
    model, logits = tiny.tiny_model(), []
    ids = np.array([tiny.base_ids(20, seed) for seed in (1, 2)], np.int32)
    for ahead in (False, True):
        cache = model.make_cache(left_padding=[0, 0])
        model(mx.array(ids), cache=cache)
        cache = [*cache[:-1], ZipState.from_state(cache[-1].state)]  # without rows and without places
        y = mx.array([model.layout.hyper_id(len(book) - 1) for book in cache[-1].books])
        if ahead:
            logits.append(TwoPartStep(model, cache).compute_logits(TwoPartStep(model, cache).run_body(y), y))
        else:
            logits.append(model(y[:, None], cache=cache))
    np.testing.assert_allclose(*map(np.array, logits), atol=1e-4)


# ---- tables


def address(array):
    """Where an array's values are in memory."""
    mx.eval(array)
    return np.array(array, copy=False).__array_interface__["data"][0]


def viewed(array):
    """A view of all of an array, which holds its values as an operation in flight does."""
    view = None if array is None else array[..., :]
    mx.eval([] if view is None else view.reshape(-1))
    return view


def test_a_row_is_written_in_place_while_a_body_holds_the_copy_that_it_reads():
    table, row, places = TwoCopyTable(64), mx.ones((1, 8)), set()
    for slot in range(20):
        body = viewed(table.array)  # a body in flight reads this copy
        table.put_run(slot, slot * row)
        places.add(address(table.array))
        del body
    assert len(places) == 2
    np.testing.assert_array_equal(np.array(table.rows)[0, :20, 0], np.arange(20))


@pytest.mark.parametrize("at", range(2))
def test_an_interrupt_while_a_row_is_written_leaves_every_row_that_was_put(at, monkeypatch):
    table, row = TwoCopyTable(64), mx.ones((1, 8))
    for slot in range(5):
        table.put_run(slot, slot * row)
    write, calls = RowTable._write_run, iter(range(9))

    def interrupted(self, *args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RowTable, "_write_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.put_run(5, 5 * row)
    for slot in range(5, 9):
        np.testing.assert_array_equal(np.array(table.rows)[0, :slot, 0], np.arange(slot))
        table.put_run(slot, slot * row)


def test_without_turns_the_same_writes_copy_the_table():
    """What the test above would see if a table did not turn."""
    table, held = RowTable(64), []
    for slot in range(5):
        table.put_run(slot, mx.ones((1, 8)))
        held.append(viewed(table.array))
    assert len({address(one) for one in held}) == len(held)


def test_an_output_row_is_written_in_place():
    table, row = ColumnTable(64), mx.ones((1, 8))
    table.put_run(0, row)
    first = address(table.array)
    for slot in range(1, 20):
        table.put_run(slot, slot * row)
        assert address(table.array) == first
    np.testing.assert_array_equal(np.array(table.rows)[0, 1:20, 3], np.arange(1, 20))


@pytest.mark.parametrize("kind", [RowTable, ColumnTable, TwoCopyTable])
def test_every_table_holds_what_was_put_last(kind):
    rng, width, limit = np.random.default_rng(0), 5, 600
    table, expected = kind(limit), np.zeros((limit, width), np.float32)
    for _ in range(40):
        n = int(rng.integers(1, 6))
        places, first = rng.permutation(limit)[:n], int(rng.integers(limit - n))
        rows = rng.normal(size=(2, n, width)).astype(np.float32)
        table.put_rows(places, mx.array(rows[0]))
        np.testing.assert_array_equal(np.array(table.rows_at(places)), rows[0])
        table.put_run(first, mx.array(rows[1]))
        expected[places] = rows[0]
        expected[first : first + n] = rows[1]
        found = np.array(table.rows)
        np.testing.assert_array_equal(found[0], expected[: found.shape[1]])
    twin, some = table.copy(), rng.permutation(table.capacity)[:300]
    kept = table.select(some, 400)
    table.put_rows(np.array([0]), mx.full((1, width), 9.0))
    np.testing.assert_array_equal(np.array(twin.rows)[0], expected[: found.shape[1]])
    np.testing.assert_array_equal(np.array(kept.rows)[0, :300], expected[some])
    kept.put_run(300, mx.ones((1, width)))
    np.testing.assert_array_equal(np.array(kept.rows)[0, :301], [*expected[some], np.ones(width)])
    assert kept.capacity == 400
    assert table.nbytes >= expected[: found.shape[1]].nbytes
