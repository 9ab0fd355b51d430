"""A main model and another one, which take turns."""

import asyncio
import threading
from dataclasses import replace

import pytest

from mlx_zip.apps.chat.models import Models
from mlx_zip.engine.engines import Engines, OtherModel
from mlx_zip.packs.pack import Pack
from mlx_zip.server.answers.turn import Done, Text, Turn, Waiting
from mlx_zip.server.errors import RequestError
from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, Script

ASKED = Turn(messages=[{"role": "user", "content": "hi"}])
SLOW = Script(text="one two three four five", delay_s=0.02)


def made(gate=None):
    engines = Engines(FakeEngine(replace(SLOW, gate=gate)), [OtherModel("b", "model", lambda: FakeEngine(SLOW), "b")])
    return Models(engines, Options(packs={"p": Pack(((5, 6),))}, max_tokens=9))


async def answer(core, deltas):
    async for delta in core.answer(ASKED):
        deltas.append(delta)


def test_the_second_answer_is_told_whom_it_waits_for():
    held = threading.Event()

    async def work():
        models, first, second = made(held), [], []
        async with models.using("stories") as main, models.using("b") as other:
            assert main is models.main
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
        async with models.using("b") as again:
            assert again is other
        models.close()
        return first, second

    first, second = asyncio.run(work())
    assert held.is_set()
    assert all(isinstance(deltas[-1], Done) for deltas in (first, second))


def test_a_task_that_is_cancelled_while_it_waits_for_a_model_gives_it_back():
    async def work():
        models = made()
        models.engines.others["c"] = OtherModel("c", "model", lambda: FakeEngine(SLOW), "c")

        async def hold():
            async with models.using("c"):
                pass

        async with models.using("b"):
            task = asyncio.create_task(hold())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10), models.using("b") as core:
            assert core.model == "b"
        with pytest.raises(RequestError, match="no model"):
            async with models.using("nothing"):
                pass
        models.close()

    asyncio.run(work())
