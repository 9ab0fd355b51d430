"""Cores of a main model and of another one, which take turns."""

import asyncio
import threading
from dataclasses import replace

import pytest

from mlx_zip.engine.engines import Engines, OtherModel
from mlx_zip.errors import EngineError
from mlx_zip.packs.pack import Pack
from mlx_zip.server.answers.turn import Done, Text, Turn, Waiting
from mlx_zip.server.core import Core, Cores
from mlx_zip.server.options import Options
from support.answers import COUNTS
from support.fake_engine import FakeEngine, Script
from support.http_server import events, replay, serving

ASKED = Turn(messages=[{"role": "user", "content": "hi"}])
SLOW = Script(text="one two three four five", delay_s=0.02)


def made(gate=None):
    engines = Engines(FakeEngine(replace(SLOW, gate=gate)), [OtherModel("b", "model", lambda: FakeEngine(SLOW), "b")])
    return Cores(engines, Core(engines.main, Options(packs={"p": Pack(((5, 6),))}, max_tokens=9)))


async def answer(core, deltas):
    async for delta in core.answer(ASKED):
        deltas.append(delta)


def test_the_second_answer_is_told_whom_it_waits_for():
    held = threading.Event()

    async def work():
        cores, first, second = made(held), [], []
        async with cores.use("stories") as main, cores.use("b") as other:
            assert main is cores.main
            assert other.model == "b"
            assert other.options.packs == {}
            assert other.options.max_tokens == 9
            task = asyncio.create_task(answer(main, first))
            while not any(isinstance(delta, Text) for delta in first):
                await asyncio.sleep(0.005)
            async for delta in other.answer(ASKED):
                second.append(delta)
                if delta == Waiting(0, 0, waits_for="stories"):
                    held.set()  # the first answer may end
            await task
        async with cores.use("b") as again:
            assert again is other
        cores.close()
        return first, second

    first, second = asyncio.run(work())
    assert held.is_set()
    assert all(isinstance(deltas[-1], Done) for deltas in (first, second))


def test_a_task_that_is_cancelled_while_it_waits_for_a_model_gives_it_back():
    async def work():
        cores = made()
        cores.engines.others["c"] = OtherModel("c", "model", lambda: FakeEngine(SLOW), "c")

        async def hold():
            async with cores.use("c"):
                pass

        async with cores.use("b"):
            task = asyncio.create_task(hold())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10), cores.use("b") as core:
            assert core.model == "b"
        with pytest.raises(EngineError, match="no model"):
            async with cores.use("nothing"):
                pass
        cores.close()

    asyncio.run(work())


def test_a_chat_stream_says_that_it_waits_in_a_comment_only():
    with serving(FakeEngine()) as served:
        served.core.answers = replay([Waiting(0, 0), Waiting(0, 0, waits_for="b"), Text("Hi"), Done("stop", COUNTS)])
        body = served.chat(stream=True).body
    assert b": waiting for another model" in body
    assert sum(one["choices"][0]["delta"].get("role") == "assistant" for one in events(body)[:-1]) == 1
