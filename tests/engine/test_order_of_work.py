"""Which request does what next: prompts are read in chunks, in turn, between the steps of answers."""

from dataclasses import replace
from itertools import groupby

import pytest

from mlx_zip.engine import Failed, Finished, Started, Submission
from mlx_zip.engine.request import Request
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.sessions.store import NoSessions
from mlx_zip.engine.submissions import Checks
from support.fake_parts import FakeServed, name_of

CHUNK = 10


class Work:
    """A scheduler with a model that is none. events: of all requests, in order, each with the request's name."""

    def __init__(self, max_running=8):
        self.served, self.events, self.ended = FakeServed(CHUNK), [], []
        self.scheduler = Scheduler(
            self.served,
            NoSessions(),
            max_running,
            None,
            self.ended.append,
            lambda request: self.served.make_reading(request),
        )
        self.checks = Checks(self.served.make_facts(), None, None)

    def add(self, name, length, max_tokens=5):
        """Adds a request with a prompt of `length` ids and returns it."""
        submission = Submission([name] * length, max_tokens)
        request = Request(self.checks.check(submission), lambda event: self.events.append((name, event)))
        self.scheduler.add_request(request)
        return request

    def rounds(self, count):
        for _ in range(count):
            self.scheduler.run_round()

    def all(self):
        while self.scheduler.busy:
            self.scheduler.run_round()

    def steps(self, name):
        """The number of steps of a request so far."""
        return sum(note[0] == "step" and name in note for note in self.served.notes)

    def first(self, name, kind):
        """The number of the first event of a kind that a request got."""
        return next(n for n, (one, event) in enumerate(self.events) if one == name and isinstance(event, kind))


def test_between_two_steps_of_an_answer_no_more_than_one_chunk_of_prompts_is_read():
    work = Work()
    work.add(1, 3, max_tokens=60)
    work.rounds(2)
    for name, length in ((2, 87), (3, 4), (4, 4), (5, 33)):
        work.add(name, length, max_tokens=9)
    work.all()
    read = 0
    for what, *facts in work.served.notes:
        if what == "step" and 1 in facts:
            read = 0
        read += facts[1] if what == "read" else 0
        assert read <= CHUNK
    assert sum(note[2] for note in work.served.notes if note[0] == "read") == 3 + 87 + 4 + 4 + 33


@pytest.mark.parametrize("running", [1, 2])
def test_a_prompt_is_read_in_large_chunks_only_while_nobody_else_waits(running):
    work = Work(max_running=running)
    work.served.options = replace(work.served.options, alone_step_size=4 * CHUNK)
    first = work.add(1, 8 * CHUNK)
    work.rounds(1)
    work.add(2, 3 * CHUNK)
    work.rounds(1)
    first.cancelled = True
    work.rounds(1)
    reads = [note[1:] for note in work.served.notes if note[0] == "read"]
    assert reads[:2] == [(1, 4 * CHUNK), (1, CHUNK)]


def test_every_answer_takes_one_step_in_every_round():
    work = Work()
    for name in range(1, 9):
        work.add(name, 3, max_tokens=100)
    work.add(9, 95)  # has to wait: eight run
    work.rounds(3)  # all prompts are read by now
    before = {name: work.steps(name) for name in range(1, 9)}
    work.rounds(50)
    assert {work.steps(name) - before[name] for name in before} == {50}
    assert work.steps(9) == 0


def test_prompts_are_read_in_turn_a_chunk_each():
    work = Work()
    work.add(1, 5 * CHUNK)
    work.add(2, 5 * CHUNK)
    work.all()
    assert [note[1] for note in work.served.notes if note[0] == "read"] == [1, 2] * 5


def test_two_prompts_that_come_together_take_no_more_rounds_than_their_chunks():
    work = Work()
    requests = [work.add(name, 20 * CHUNK) for name in (1, 2)]
    rounds = 0
    while not all(request.first_s for request in requests):
        work.rounds(1)
        rounds += 1
    assert rounds == 40  # twice those of one prompt alone


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_and_not_for_all_of_it():
    work = Work()
    work.add(1, 50 * CHUNK)
    work.rounds(3)
    work.add(2, 4)
    work.rounds(2)
    assert work.steps(2) == 1
    assert work.steps(1) == 0


def test_requests_begin_in_the_order_they_came_however_long_their_prompts_are():
    work = Work(max_running=2)
    for name, length in ((1, 30), (2, 5), (3, 45), (4, 1), (5, 12)):
        work.add(name, length)
    work.all()
    assert [name for name, event in work.events if isinstance(event, Started)] == [1, 2, 3, 4, 5]


def test_events_of_a_request_come_in_order_and_the_last_one_comes_once():
    work = Work(max_running=3)
    for name in range(1, 8):
        work.add(name, 7 * name, max_tokens=name)
    work.all()
    for name in range(1, 8):
        kinds = [type(event).__name__ for one, event in work.events if one == name]
        assert [kind for kind, _ in groupby(kinds)] == ["Started", "Progress", "Emitted", "Finished"]
        assert kinds.count("Finished") == 1
    assert sorted(map(name_of, work.ended)) == list(range(1, 8))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((2, 2, 2, 2), [("read", 1, 2, 3, 4)]),
        ((5, 5, 2), [("read", 1, 2), ("read", 3, 2)]),  # 15 with padding are more than a chunk
        ((4, 4, 1), [("read", 1, 2), ("read", 3, 1)]),  # a fourth would be padding
        ((30, 2), [("read", 1, 10), ("read", 2, 2), ("read", 1, 10), ("read", 1, 10)]),
    ],
)
def test_short_prompts_that_come_together_are_read_in_one_call(lengths, expected):
    work = Work()
    work.served.key = "all"
    for name, length in enumerate(lengths, start=1):
        work.add(name, length)
    work.all()
    assert [note for note in work.served.notes if note[0] == "read"] == expected
    assert len(work.ended) == len(lengths)


def test_a_request_whose_reading_cannot_begin_fails_alone():
    work = Work()
    whole = work.served.make_reading

    def fails(request):
        if name_of(request) == 2:
            raise MemoryError("no room for the prompt's ids")
        return whole(request)

    work.served.make_reading = fails
    for name in (1, 2, 3):
        work.add(name, 4)
    work.all()
    ends = [type(event) for _, event in work.events if isinstance(event, Finished | Failed)]
    assert sorted(ends, key=str) == [Failed, Finished, Finished]
    assert work.first(2, Failed) < work.first(1, Finished)
