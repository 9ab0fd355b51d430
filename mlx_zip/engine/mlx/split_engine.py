"""`SplitEngine`: an engine whose model is split over several machines.

The first machine's engine takes requests. Before each round of the scheduler it sends the other machines the news since
the previous round, such as new and cancelled requests. All engines run the same rounds with the same news, so all
machines take part in the same sums over machines in the same order. Each machine has its own codebooks, KV caches and
sessions. The first machine chooses every id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_zip.engine.interface import Constraint, Deliver, Submission
from mlx_zip.engine.mlx.mlx_engine import DEFAULT_SESSIONS, MlxEngine, open_engine
from mlx_zip.engine.request import Request
from mlx_zip.engine.sessions.folder import MACHINE_FOLDER_PREFIX
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.engine.submissions import Checked
from mlx_zip.errors import EngineError, GenerationError
from mlx_zip.models.machines import (
    Group,
    arrays_of_first_machine,
    bytes_of_first_machine,
    lost_machines_as_errors,
    smallest_over_machines,
    sum_over_machines,
)
from mlx_zip.packs.pack import Pack, as_pack

HEARTBEAT_S = 1.0  # seconds after which the first engine, if idle, sends empty news, to detect lost machines
NO_BOUND = 1 << 62
News = list[Any]  # the kind of event, then its arguments


def open_split_engine(group: Group, model_name: str | Path, **options: Any) -> SplitEngine:
    """Loads this machine's share of a model and returns its engine. Every machine of the group must call this.

    options: as in `open_engine`. Each machine keeps its share of the sessions, on disk in its own folder inside the
    folder of sessions. Raises what `mlx_zip.load` raises.
    """
    kept = options.pop("sessions", DEFAULT_SESSIONS)
    sessions = None if kept is None else _session_options_of_machine(kept, group)
    made = open_engine(model_name, **options, sessions=sessions, group=group, make=partial(SplitEngine, group))
    return cast(SplitEngine, made)


def _session_options_of_machine(sessions: SessionOptions, group: Group) -> SessionOptions:
    """Returns the options of this machine's session store: a folder and a `share` that no other machine uses."""
    share = f"{MACHINE_FOLDER_PREFIX}{group.rank() + 1}-of-{group.size()}"
    folder = None if sessions.folder is None else sessions.folder / share
    return replace(sessions, folder=folder, share=share)


class SplitEngine(MlxEngine):
    """An engine on one of several machines.

    group: the group of machines. Other arguments are those of `MlxEngine`. On the first machine, use this engine like
    any other, but it refuses requests with tuned packs, and cannot save, load or drop single sessions. On the other
    machines call only `follow`.
    """

    def __init__(self, group: Group, *args: Any, **options: Any) -> None:
        self._group, self._first = group, group.rank() == 0
        self._news: list[News] = []  # not yet sent to the others
        self._requests: dict[int, _SharedRequest] = {}  # requests that have not ended, by number
        self._numbers = 0
        super().__init__(*args, **options)

    def follow(self) -> None:
        """Waits until the first machine's engine is closed. If a fault has ended this engine, raises the fault."""
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    # ---- requests

    def _score_in_parts(self, served: Any, row: Any, top: int) -> NoReturn:
        raise GenerationError("a model that is split over several machines does not tell how likely a prompt is")

    def _make_request(self, submission: Submission, deliver: Deliver) -> _SharedRequest:
        self.check_pack(submission.pack)
        if submission.constraint is not None:
            submission = replace(submission, constraint=_LateFailure(submission.constraint))
        return _SharedRequest(self._checks.check(submission), deliver)

    def check_pack(self, pack: Any) -> None:
        super().check_pack(pack)
        if pack is not None and as_pack(pack).rows is not None:
            raise GenerationError("pack: tuned rows are not sent to other machines; start all of them with --pack")

    def _add_request(self, request: Request) -> None:
        """Queues a request as news, so that all machines give it to their schedulers in the same round."""
        assert isinstance(request, _SharedRequest)
        self._requests[self._numbers] = request
        self._news.append(["add", self._numbers, _request_to_json(request.checked)])
        self._numbers += 1

    def _forget_ended(self, request: Request) -> None:
        super()._forget_ended(request)
        self._requests = {number: one for number, one in self._requests.items() if one is not request}

    # ---- sessions

    def save_session(self, name: str, file: Path) -> NoReturn:
        raise EngineError("a session of a model on several machines cannot be saved: each machine has a share of it")

    def load_session(self, file: Path) -> NoReturn:
        raise EngineError(
            "a session cannot be loaded for a model on several machines: each machine needs a share of it"
        )

    def drop_session(self, name: str) -> NoReturn:
        raise EngineError("a session on several machines cannot be dropped alone; purge all of them")

    def purge_sessions(self) -> int:
        return self._inbox.ask(self._purge_on_all_machines)

    def _purge_on_all_machines(self) -> int:
        """Deletes this machine's sessions, and queues news that has the other machines delete theirs."""
        self._news.append(["purge"])
        return self._update_figures(self._store.purge())

    # ---- the engine's thread

    def _max_kv_bytes(self, served: Any) -> int | None:
        own = super()._max_kv_bytes(served)
        least = smallest_over_machines(self._group, NO_BOUND if own is None else own)
        return None if least == NO_BOUND else least

    def _load_model(self, *args: Any) -> None:
        super()._load_model(*args)
        self._store = self._scheduler.store = _SameSessions(self._store, self._group)

    def _serve_requests(self) -> None:
        """Does rounds until the first machine's engine is closed. Raises `MachineError` if a machine is lost."""
        scheduler, going = self._scheduler, True
        with lost_machines_as_errors():
            while going:
                going = self._exchange_news()
                if going and scheduler.busy:
                    self._prepare_device()
                while going and scheduler.busy:
                    scheduler.run_round()
                    self._running = len(scheduler.running)
                    going = self._exchange_news()
                if not scheduler.busy:
                    self._work_when_idle()

    def _exchange_news(self) -> bool:
        """Sends or receives the news since the last round, and acts on it. Returns whether there is a next round.

        First waits for the step in flight. If a machine is lost during that step, the step raises, while with MLX's
        ring backend the exchange of news would wait for ever.
        """
        for group in self._scheduler.groups:
            group.wait_for_choice()
        news = json.dumps(self._gather_news(), default=_plain_values).encode() if self._first else b""
        with mx.stream(generation_stream):
            received = bytes_of_first_machine(self._group, b"" if news == b"[]" else news)
        going = True
        for what, *facts in json.loads(received or b"[]"):
            if what == "end":
                going = False
            elif what == "add":
                self._begin_request(*facts)
            elif what == "cancel" and facts[0] in self._requests:
                self._requests[facts[0]].confirm_cancelled()
            elif what == "purge":  # all machines mark the same requests; the first has already deleted its sessions
                self._scheduler.keep_no_session()
                self._update_figures(None if self._first else self._store.purge())
        return going

    def _gather_news(self) -> list[News]:
        """Returns the news that the first machine sends. If nothing runs, first waits up to `HEARTBEAT_S` for news."""
        scheduler, closing = self._scheduler, self._closing  # requests submitted before closing are in the inbox now
        self._inbox.run_queued_calls(0 if scheduler.busy or closing else HEARTBEAT_S)
        if closing and time.monotonic() >= self._deadline:
            scheduler.cancel_all()
        asked = [["cancel", n] for n, request in self._requests.items() if request.asked and not request.cancelled]
        news, self._news = [*self._news, *asked], []
        over = closing and not (news or scheduler.busy)
        return [["end"]] if over else news

    def _begin_request(self, number: int, facts: Mapping[str, Any]) -> None:
        """Gives a request to the scheduler. Called on every machine in the same round."""
        if not self._first:
            checked = self._checks.check(_submission_from_json(facts, self.info.vocab_size))
            self._requests[number] = _SharedRequest(checked, lambda event: None)
        self._scheduler.add_request(self._requests[number])


class _SharedRequest(Request):
    """A request that is `cancelled` only after `confirm_cancelled`. asked: whether a caller has set `cancelled`."""

    def __init__(self, checked: Checked, deliver: Deliver) -> None:
        self.asked = self._confirmed = False
        super().__init__(checked, deliver)

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        return self._confirmed

    @cancelled.setter
    def cancelled(self, asked: bool) -> None:
        self.asked = self.asked or asked

    def confirm_cancelled(self) -> None:
        """Sets `cancelled`. Called on all machines in the same round."""
        self._confirmed = True


class _LateFailure:
    """Wraps a constraint: an exception of `push` is raised by the next `mask`, where other machines learn of it."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._error: Exception | None = None

    def mask(self) -> np.ndarray:
        if self._error is not None:
            raise self._error
        return self._inner.mask()

    def accepts(self, base_ids: Sequence[int]) -> bool:
        return self._inner.accepts(base_ids)

    def push(self, base_ids: Sequence[int]) -> None:
        try:
            self._inner.push(base_ids)
        except Exception as error:
            self._error = error


class _Anything:
    """Takes the place of a constraint on machines that choose no ids: allows all ids."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.ones(vocab_size, bool)

    def mask(self) -> np.ndarray:
        return self._mask

    def accepts(self, base_ids: Sequence[int]) -> bool:
        return True

    def push(self, base_ids: Sequence[int]) -> None:
        return


class _SameSessions:
    """A session store that uses a session only if all machines find the same one. Other attributes are `inner`'s."""

    def __init__(self, inner: Any, group: Group) -> None:
        self._inner, self._group = inner, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def checkout(self, base_ids: Sequence[int], pack_key: Any, share: bool = False, start: Any = None) -> Any:
        """Returns the result of `inner.checkout`, None if the machines' results differ in ids or base tokens."""
        found = self._inner.checkout(base_ids, pack_key, share, start)
        held = (0, 0) if found is None else (found.ids, found.base_tokens)
        with mx.stream(generation_stream):
            same = arrays_of_first_machine(self._group, mx.array(held, mx.int32)).tolist() == list(held)
            differing = sum_over_machines(self._group, int(not same))[0]
        if differing and found is not None:
            self._inner.release(found.name)
        return None if differing else found


def _request_to_json(checked: Checked) -> dict[str, Any]:
    """Returns a request as JSON, without its constraint, which stays on the first machine."""
    submission, sampling = checked.submission, asdict(checked.sampling)
    sampling["logit_bias"] = list((checked.sampling.logit_bias or {}).items())
    return {
        "base_ids": checked.base_ids.tolist(),
        "max_tokens": submission.max_tokens,
        "eos_ids": sorted(submission.eos_ids),
        "sampling": sampling,
        "top_logprobs": submission.top_logprobs,
        "constrained": submission.constraint is not None,
        "pack": None if checked.start is None else checked.start.entries,
        "keep": submission.keep,
    }


def _submission_from_json(facts: Mapping[str, Any], vocab_size: int) -> Submission:
    entries = facts["pack"]
    facts = {**facts, "pack": None if entries is None else Pack(tuple(map(tuple, entries)))}
    sampling = {**facts["sampling"], "logit_bias": dict(facts["sampling"]["logit_bias"]) or None}
    constraint = _Anything(vocab_size) if facts.pop("constrained") else None
    return Submission(**{**facts, "eos_ids": frozenset(facts["eos_ids"]), "sampling": sampling}, constraint=constraint)


def _plain_values(value: Any) -> Any:
    """Returns a NumPy number as a Python number, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")
