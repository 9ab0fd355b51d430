"""The targets of the PyTorch engine, and which of them a run's records meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]
UNMEASURED = "not measured"


class Target(NamedTuple):
    """A target. value: of the records, None if they lack it. bound: the least that is wanted; if `most`, the most."""

    name: str
    value: Callable[[Sequence[Record]], float | None]
    bound: float
    most: bool = False

    def met(self, value: float) -> bool:
        """Whether a value meets the target."""
        return value <= self.bound if self.most else value >= self.bound


def step_ms(
    records: Sequence[Record], engine: str, shape: str, precision: str = "16", rows: str = "warm"
) -> float | None:
    """Returns the median time of a step in ms, None if it was not measured."""
    found = _steps(records, engine, shape, precision, rows)
    return None if found is None else found["step"]["device_ms"]["median"]


def _steps(records: Sequence[Record], engine: str, shape: str, precision: str, rows: str) -> Record | None:
    wanted = (engine, shape, precision, rows)
    named = lambda one: (one["engine"], one["model"]["name"], one["model"]["precision"], one["rows"])
    return next((one for one in records if one["bench"] == "nvidia-steps" and named(one) == wanted), None)


def share(shape: str) -> Callable[[Sequence[Record]], float | None]:
    """Returns a function of the share of the copy bandwidth that a step of torch-base reaches at a shape."""

    def value(records: Sequence[Record]) -> float | None:
        found = _steps(records, "torch-base", shape, "16", "warm")
        return None if found is None else found["share_of_copy"]

    return value


def ratio(rows: str) -> Callable[[Sequence[Record]], float | None]:
    """Returns a function of torch-zip's step over torch-base's, the most over all shapes."""

    def value(records: Sequence[Record]) -> float | None:
        shapes = {one["model"]["name"] for one in records if one["bench"] == "nvidia-steps"}
        pairs = [(step_ms(records, "torch-zip", s, rows=rows), step_ms(records, "torch-base", s)) for s in shapes]
        known = [a / b for a, b in pairs if a is not None and b is not None]
        return max(known, default=None)

    return value


def kernels(start: str) -> Callable[[Sequence[Record]], float | None]:
    """Returns a function of the least share of the copy bandwidth of the kernels whose names begin so."""

    def value(records: Sequence[Record]) -> float | None:
        return min((k["share_of_copy"] for k in _kernels(records, start)), default=None)

    return value


def faster(start: str) -> Callable[[Sequence[Record]], float | None]:
    """Returns a function of the least ratio of the reference's time to the kernel's, of kernels that begin so."""

    def value(records: Sequence[Record]) -> float | None:
        found = [k["reference_us"] / k["us"] for k in _kernels(records, start) if k["reference_us"] is not None]
        return min(found, default=None)

    return value


def _kernels(records: Sequence[Record], start: str) -> Iterator[Record]:
    return (one for one in records if one["bench"] == "nvidia-kernels" and one["kernel"].startswith(start))


def int4(records: Sequence[Record]) -> float | None:
    """Returns torch-base's steps per second with 4-bit weights over those with 16 bits, at phi-3.5-mini."""
    four, sixteen = (step_ms(records, "torch-base", "phi-3.5-mini", bits) for bits in ("4", "16"))
    return None if four is None or sixteen is None else sixteen / four


def end_to_end(records: Sequence[Record]) -> float | None:
    """Returns decoding in base tokens/s of torch-zip over (compression x torch-base's), the least over all texts."""
    return _against_base(records, "base_tokens_per_s", lambda zipped, base: _per_step(zipped) / _per_step(base))


def prefill(records: Sequence[Record]) -> float | None:
    """Returns the speed of torch-zip's prefill over torch-base's on the same text, the least over all texts."""
    return _against_base(records, "prefill_tokens_per_s", lambda zipped, base: 1.0)


def _per_step(record: Record) -> float:
    return record["figures"]["base_tokens_per_step"]["median"]


def _against_base(records: Sequence[Record], figure: str, scale: Callable[[Record, Record], float]) -> float | None:
    """Returns the least ratio, divided by `scale`, of torch-zip's figure to torch-base's on the same workload."""
    found = []
    for zipped in _of(records, "torch-zip"):
        same = [b for b in _of(records, "torch-base") if all(b[n] == zipped[n] for n in ("model", "workload"))]
        for base in same[:1]:
            a, b = (one["figures"][figure] for one in (zipped, base))
            if a is not None and b is not None:
                found.append(a["median"] / b["median"] / scale(zipped, base))
    return min(found, default=None)


def _of(records: Sequence[Record], engine: str) -> list[Record]:
    return [
        one for one in records if one["bench"] == "generate" and one["engine"] == engine and one["mode"] == "replay"
    ]


TARGETS = (
    Target("torch-base reaches 78 % of the copy bandwidth at phi-3.5-mini", share("phi-3.5-mini"), 0.78),
    Target("torch-base reaches 55 % of the copy bandwidth at llama-3.2-1b", share("llama-3.2-1b"), 0.55),
    Target("a warm step of torch-zip takes at most 1.05 x torch-base's", ratio("warm"), 1.05, most=True),
    Target("a cold step of torch-zip takes at most 1.15 x torch-base's", ratio("cold"), 1.15, most=True),
    Target("end to end, torch-zip keeps 0.95 of its compression", end_to_end, 0.95),
    Target("prefill of torch-zip is faster than torch-base's", prefill, 1.0),
    Target("the joint head reaches 80 % of the copy bandwidth", kernels("joint head, dense"), 0.8),
    Target("the hyper embedding reaches 80 % of the copy bandwidth", kernels("hyper embedding"), 0.8),
    Target("the encoders' pieces are 2 x as fast as eager PyTorch", faster("encoder"), 2.0),
    Target("4-bit weights give 2 x the steps of 16-bit ones", int4, 2.0),
)


def judged(records: Sequence[Record], on_gpu: bool) -> list[Record]:
    """Returns each target with its figure and "met", "missed" or "not measured"; without a GPU none is measured."""
    lines = []
    for target in TARGETS:
        value = target.value(records) if on_gpu else None
        verdict = UNMEASURED if value is None else "met" if target.met(value) else "missed"
        limit = {"bound": target.bound, "kind": "at most" if target.most else "at least"}
        lines.append(
            {"target": target.name, **limit, "value": None if value is None else round(value, 4), "verdict": verdict}
        )
    return lines
