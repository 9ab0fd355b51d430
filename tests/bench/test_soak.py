"""The soak's checks: each kind of fault is seen."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlx_zip.bench.serve import soak
from mlx_zip.bench.serve.soak import KINDS, LENGTHS, SoakRun
from support.fake_engine import FakeEngine, Running, Script
from support.http_server import serving

ASKED = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(soak, "QUIET_S", 0.3)


def soaked(served, answers=None, resident=None, requests=60):
    """What a soak of a server finds. answers: by length, those that are expected; None for the server's own."""
    if answers is None:
        whole = [served.ask("POST", "/v1/chat/completions", _body(n)).json for n in LENGTHS]
        answers = {n: one["choices"][0]["message"]["content"] for n, one in zip(LENGTHS, whole, strict=True)}
    args = argparse.Namespace(requests=requests, at_once=6, cancelled=0.1, malformed=0.1, seed=1)
    numbers = iter(resident or [])
    server = SimpleNamespace(port=served.port, resident_bytes=lambda: next(numbers, None))
    return asyncio.run(SoakRun(server, [(ASKED, answers)], args).run())["wrong"]


def _body(n):
    return {"model": "stories", "messages": ASKED, "max_tokens": n}


def nothing_but(**seen):
    return {**dict.fromkeys(KINDS, 0), **seen}


def test_a_server_without_faults_has_none():
    with serving(FakeEngine()) as served:
        assert soaked(served) == nothing_but()


def test_wrong_answers_are_counted():
    with serving(FakeEngine()) as served:
        wrong = soaked(served, dict.fromkeys(LENGTHS, "something else"))
    assert wrong["answer"] > 30
    assert wrong == nothing_but(answer=wrong["answer"])


def test_requests_that_are_refused_are_counted():
    with serving(FakeEngine(most=0)) as served:
        wrong = soaked(served, dict.fromkeys(LENGTHS, ""))
    assert wrong["status"] > 30


def test_connections_that_break_off_are_counted(monkeypatch):
    with serving(FakeEngine(Script(delay_s=5))) as served:
        ask = soak.send_request
        quick = lambda *args, **options: ask(*args, **{"timeout_s": 0.3, **options})
        monkeypatch.setattr(soak, "send_request", quick)
        assert soaked(served, dict.fromkeys(LENGTHS, ""), requests=12)["hung"] > 4


def test_a_request_that_never_ends_is_counted():
    engine = FakeEngine()
    with serving(engine) as served:
        stuck = Running(None)
        engine.told.tickets.append(stuck)
        assert soaked(served) == nothing_but(running=1)
        stuck.ended.set()


def test_a_session_that_a_purge_leaves_is_counted(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engine, "_figures", replace(engine._figures, sessions=2, disk_bytes=5))
    with serving(engine) as served:
        assert soaked(served) == nothing_but(sessions=1)


@pytest.mark.slow
@pytest.mark.parametrize(("end", "growth"), [(104, 0), (110, 1)])
def test_memory_that_grows_after_the_warm_up_is_counted(end, growth, monkeypatch):
    monkeypatch.setattr(soak, "MEASURED_EVERY", 10)
    resident = [50] * 5 + [100] * 10 + [end] * 9
    with serving(FakeEngine()) as served:
        assert soaked(served, resident=resident, requests=240) == nothing_but(growth=growth)
