"""Memory is wired on a Mac while a model is open; MLX's calls are replaced by ones that note the limits."""

import threading

import mlx.core as mx
import pytest

from mlx_zip import device
from mlx_zip.cli import command_parser
from mlx_zip.device import WiredMemory
from mlx_zip.engine.options import KEEP_WIRED_S
from mlx_zip.errors import ModelError
from support import tiny
from support.fake_engine import FakeEngine
from support.http_server import serving
from support.serving import ask, tiny_engine

RECOMMENDED, BEFORE = 10**9, 70
PROMPT = tiny.base_ids(9)


class Clock:
    """A clock that a test moves on."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def limits(monkeypatch):
    """A Mac: the limits that MLX was given, in order."""
    seen, lock, info = [BEFORE], threading.Lock(), mx.device_info()

    def set_wired_limit(limit):
        with lock:
            seen.append(limit)
            return seen[-2]

    monkeypatch.setattr(mx, "device_info", lambda: {**info, "max_recommended_working_set_size": RECOMMENDED})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return seen


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(device, "time", made)
    return made


def pause(engine):
    """Returns when the engine has looked at the clock in a pause."""
    for _ in range(2):  # a call is made between two looks
        engine.sessions()


def test_an_open_engine_wires_memory_once_and_keeps_it_over_requests_and_pauses(limits, clock):
    with tiny_engine() as engine:
        assert limits == [BEFORE, RECOMMENDED]
        for _ in range(3):
            ask(engine, PROMPT, max_tokens=4)[1].wait()
            pause(engine)
            clock.now += KEEP_WIRED_S - 1
        assert limits == [BEFORE, RECOMMENDED]
    assert limits == [BEFORE, RECOMMENDED, BEFORE]


def test_after_a_long_pause_it_is_free_and_the_next_request_wires_it_again(limits, clock):
    with tiny_engine(keep_wired_s=60) as engine:
        pause(engine)
        clock.now += 59
        pause(engine)
        assert limits == [BEFORE, RECOMMENDED]
        clock.now += 2
        pause(engine)
        assert limits == [BEFORE, RECOMMENDED, BEFORE]
        ask(engine, PROMPT, max_tokens=4)[1].wait()
        pause(engine)
        clock.now += 59
        pause(engine)
        assert limits == [BEFORE, RECOMMENDED, BEFORE, RECOMMENDED]
    assert limits == [BEFORE, RECOMMENDED, BEFORE, RECOMMENDED, BEFORE]


def test_nobody_has_to_call_for_a_pause_to_end(limits):
    freed = threading.Event()
    with tiny_engine(keep_wired_s=0.05) as engine:
        free = engine._wired.unwire
        engine._wired.unwire = lambda: (free(), freed.set())
        ask(engine, PROMPT, max_tokens=4)[1].wait()
        assert freed.wait(20)
        assert limits[-1] == BEFORE


def test_memory_is_free_on_request_unless_requests_run(limits):
    with tiny_engine() as engine:
        assert engine.unwire_idle_memory()
        assert engine.unwire_idle_memory()
        assert limits == [BEFORE, RECOMMENDED, BEFORE]
        ticket, watch = ask(engine, PROMPT, max_tokens=400)
        assert not engine.unwire_idle_memory()
        engine.cancel(ticket)
        watch.wait()
        assert limits == [BEFORE, RECOMMENDED, BEFORE, RECOMMENDED]


def test_scoring_a_prompt_wires_it_too(limits):
    with tiny_engine() as engine:
        engine.unwire_idle_memory()
        assert list(engine.score_prompt_ids(PROMPT))
        assert limits == [BEFORE, RECOMMENDED, BEFORE, RECOMMENDED]


def test_it_stays_wired_until_the_last_of_several_engines_is_closed(limits):
    with tiny_engine() as first:
        second, plain = tiny_engine(), first.without_hypertokens("plain")
        plain.close()
        first.unwire_idle_memory()
        assert limits == [BEFORE, RECOMMENDED]
        second.close()
        assert limits == [BEFORE, RECOMMENDED, BEFORE]


def test_a_model_that_cannot_be_opened_leaves_the_limit_as_it_was(limits):
    def broken(model):
        model.layers.clear()
        raise ModelError("no such model")

    with pytest.raises(ModelError):
        tiny_engine(change=broken)
    assert limits[-1] == BEFORE


def test_a_model_that_cannot_run_leaves_the_limit_as_it_was(limits):
    with pytest.raises(Exception, match="kv_group_size"):
        tiny_engine(run={"kv_bits": 4, "kv_group_size": 128})
    assert limits == [BEFORE, RECOMMENDED, BEFORE]


def test_a_model_as_large_as_the_memory_is_warned_of(limits, monkeypatch, caplog):
    info = mx.device_info()
    monkeypatch.setattr(mx, "device_info", lambda: {**info, "max_recommended_working_set_size": 1000})
    with tiny_engine():
        assert "tiny takes" in caplog.text


def test_a_device_that_recommends_nothing_is_left_alone(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a processor"})
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail("set"))
    memory = WiredMemory(1.0, [])
    memory.wire()
    assert memory.unwire_if_idle() is None
    memory.unwire()


def test_a_fault_while_the_device_is_waited_for_sets_the_limit_back_anyway(limits, monkeypatch):
    memory = WiredMemory(1.0, [mx.default_stream(mx.cpu)])
    memory.wire()
    monkeypatch.setattr(mx, "synchronize", lambda stream: pytest.fail("the device is gone"))
    with pytest.raises(pytest.fail.Exception):
        memory.unwire()
    assert limits == [BEFORE, RECOMMENDED, BEFORE]


@pytest.mark.parametrize("command", ["serve", "app", "chat"])
def test_the_flag_has_the_engine_s_own_default(command):
    assert command_parser(command, f"mlx_zip {command}").parse_args([]).keep_wired == KEEP_WIRED_S


def test_the_server_frees_it_on_request():
    engine = FakeEngine()
    with serving(engine) as served:
        answer = served.ask("POST", "/v1/mlx_zip/unwire")
        assert (answer.status, answer.json) == (200, {"unwired": True})
        assert served.ask("GET", "/v1/mlx_zip/unwire").status == 405
