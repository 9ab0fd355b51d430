"""Runs on several machines: processes on MLX's ring over loopback, and tiny models on disk that they share."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import tiny
from support.checkpoints import write_json, write_tokenizer
from support.processes import CONTEXT

LIMIT_S = 120
PROMPT = "w5 w6 w7 w8 w5 w6 w7 w8 w5 w6 w7 w9 w5 w6"


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ring(home: Path, n: int) -> list[dict[str, str]]:
    """The environment of each of n machines of one run."""
    hosts = home / f"hosts-{free_ports(1)[0]}.json"
    write_json(hosts, [[f"127.0.0.1:{port}"] for port in free_ports(n)])
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(n)]


def write_model(
    folder: Path,
    family: str,
    quantized: bool = False,
    plain: bool = False,
    seed: int = 0,
    encoder: str = "transformer",
    **changes: Any,
) -> Path:
    """Saves a tiny model that never ends its text. plain: without hypertokens. changes: as in `tiny_config`."""
    folder.mkdir(parents=True)
    model, config = tiny.tiny_model(family, encoder, seed, **changes), tiny.tiny_config(family, encoder, **changes)
    config["max_position_embeddings"] = 1 << 20
    if quantized:
        tiny.quantize(model)
        config["quantization"] = {"group_size": 32, "bits": 8}
    if plain:
        del config["zip2zip"], model.input_encoder, model.output_encoder
        config |= {"model_type": family, "rope_theta": 10000.0}
    model.save_weights(str(folder / "model.safetensors"))
    write_json(folder / "config.json", config)
    write_tokenizer(folder, tiny.VOCAB, eos_token=None)
    return folder


def generated_ids(folder: Path, requests: Sequence[Mapping[str, Any]], group: Any = None) -> list[list[int]]:
    """The ids that a model emits for each request, options of `stream_generate`."""
    from mlx_zip import load, stream_generate

    model, tokenizer = load(folder, group=group)
    return [[r.token for r in stream_generate(model, tokenizer, PROMPT, **request)] for request in requests]


def _write_ids(jobs: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]], out: str) -> None:
    """Writes the ids of each job's requests."""
    from mlx_zip.models.machines import connect_machines, wait_for_machines

    group = connect_machines()
    assert group is not None
    found = [generated_ids(folder, requests, group) for folder, requests in jobs]
    wait_for_machines(group)
    Path(out).write_text(json.dumps(found))


def _enter(environment: Mapping[str, str], said: str, target: Any, args: Sequence[Any]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.exit(target(*args))


def _write_peak(folder: Path, out: str) -> None:
    """Writes the most bytes of arrays that loading took, and the bytes of the whole model's weights."""
    import mlx.core as mx

    from mlx_zip import load
    from mlx_zip.models.machines import connect_machines, wait_for_machines

    group = connect_machines()
    load(folder, group=group)
    wait_for_machines(group)
    peak, whole = mx.get_peak_memory(), (folder / "model.safetensors").stat().st_size
    Path(out).write_text(json.dumps([peak, whole]))


def ids_on(n: int, home: Path, jobs: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> list[Any]:
    """What each of n machines generates: per job and request the emitted ids."""
    return _results_on(n, home, _write_ids, jobs)


def peaks_on(n: int, home: Path, folder: Path) -> list[Any]:
    """Per machine: the most bytes of arrays that loading its share took, and the bytes of all weights."""
    return _results_on(n, home, _write_peak, folder)


def _results_on(n: int, home: Path, target: Any, job: Any) -> list[Any]:
    """Runs target(job, file) on n machines and returns the JSON that each wrote to its file."""
    home.mkdir(exist_ok=True)
    outs = [home / f"result-{rank}.json" for rank in range(n)]
    processes = []
    for rank, (place, out) in enumerate(zip(ring(home, n), outs, strict=True)):
        args = place, str(home / f"said-{rank}"), target, (job, str(out))
        processes.append(CONTEXT.Process(target=_enter, args=args))
    wait(processes)
    assert [one.exitcode for one in processes] == [0] * n, [(home / f"said-{r}").read_text() for r in range(n)]
    return [json.loads(out.read_text()) for out in outs]


def wait(processes: Sequence[Any]) -> None:
    """Starts processes and waits for them; those that take too long are killed."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would not live through a fork
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def serve_on(n: int, home: Path, folder: Path, requests: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """What the first of n machines' engines answers to requests; see `answered`. options: of `open_engine`."""
    return _results_on(n, home, _write_answers, (folder, requests, options))[0]


def _write_answers(job: tuple[Path, Sequence[Mapping[str, Any]], Mapping[str, Any]], out: str) -> None:
    from mlx_zip.engine.mlx.split_engine import open_split_engine
    from mlx_zip.models.machines import connect_machines, is_first_machine

    folder, requests, options = job
    group, found = connect_machines(), None
    assert group is not None
    with open_split_engine(group, folder, **options) as engine:
        if is_first_machine(group):
            found = answered(engine, requests)
        else:
            engine.follow()
    Path(out).write_text(json.dumps(found))


def answered(engine: Any, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Per request, all submitted together: emitted ids, how it ended, and cached tokens.

    A request is fields of `Submission`; besides, after: whether all requests before it must have ended; cancel_at:
    after how many ids it is cancelled; only: base ids that a constraint accepts; broken: whether the constraint fails.
    """
    from mlx_zip.engine import Submission
    from support.serving import Watch

    watches: list[Any] = []
    for request in requests:
        fields = dict(request)
        if fields.pop("after", False):
            for watch in watches:
                watch.wait()
        cancel_at, only = fields.pop("cancel_at", None), fields.pop("only", None)
        constraint = None if only is None else Only(only, fields.pop("broken", False))
        watch = Watch()
        ticket = engine.submit(Submission(**fields, constraint=constraint), watch)
        watches.append(watch)
        if cancel_at is not None:
            while len(watch.emitted) < cancel_at:
                time.sleep(0.001)
            engine.cancel(ticket)
    ended = [watch.wait().end for watch in watches]
    return [
        [watch.ids, getattr(end, "reason", None) or str(end.error), watch.events[0].cached_tokens]
        for watch, end in zip(watches, ended, strict=True)
    ]


class Only:
    """A constraint that accepts some base ids only. broken: whether `push` fails after three ids."""

    def __init__(self, allowed: Sequence[int], broken: bool) -> None:
        self._allowed, self._broken, self._pushed = list(allowed), broken, 0

    def mask(self) -> Any:
        import numpy as np

        mask = np.zeros(tiny.VOCAB, bool)
        mask[self._allowed] = True
        return mask

    def accepts(self, base_ids: Sequence[int]) -> bool:
        return set(base_ids) <= set(self._allowed)

    def push(self, base_ids: Sequence[int]) -> None:
        self._pushed += 1
        if self._broken and self._pushed > 3:
            raise ValueError("the constraint is broken")


def losing(lost: int, busy: bool, home: Path, folder: Path) -> tuple[int, str]:
    """Kills one of two machines that serve; returns the other's exit status and standard error.

    busy: whether a request is under way then.
    """
    ready = home / "ready"
    processes = [
        CONTEXT.Process(
            target=_enter, args=(place, str(home / f"said-{rank}"), _serve_until, (folder, busy, str(ready)))
        )
        for rank, place in enumerate(ring(home, 2))
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    processes[lost].kill()
    processes[1 - lost].join(LIMIT_S)
    for process in processes:
        process.kill()
        process.join()
    status = processes[1 - lost].exitcode
    assert status is not None
    return status, (home / f"said-{1 - lost}").read_text()


def _serve_until(folder: Path, busy: bool, ready: str) -> int:
    """Serves until another machine is lost; returns 2 then, as the commands do."""
    from mlx_zip.models.machines import connect_machines, watch_machines

    group = connect_machines()
    with watch_machines(group):
        return _serve_watched(group, folder, busy, ready)


def _serve_watched(group: Any, folder: Path, busy: bool, ready: str) -> int:
    from mlx_zip.engine import Submission
    from mlx_zip.engine.mlx.split_engine import open_split_engine
    from mlx_zip.errors import MachineError
    from mlx_zip.models.machines import is_first_machine
    from support.serving import Watch

    engine, watch = open_split_engine(group, folder), Watch()
    try:
        if is_first_machine(group) and busy:
            engine.submit(Submission(tiny.base_ids(20), max_tokens=1_000_000), watch)
            while len(watch.emitted) < 3:
                time.sleep(0.01)
        if is_first_machine(group):
            Path(ready).touch()
        engine.follow()
    except MachineError as error:
        assert not busy or not is_first_machine(group) or "a fault has ended the engine" in str(watch.wait().end.error)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
