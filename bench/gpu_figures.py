"""The figures of a run on an NVIDIA card that have targets, computed from its records, by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]
Cases = dict[str, float]  # figure by case, such as a shape or a text


# ---- steps


def steps(records: Sequence[Record], engine: str, rows: str = "warm") -> dict[str, Record]:
    """Returns the records of an engine's steps by shape and precision."""
    named = lambda one: f"{one['model']['name']} {one['model']['precision']}"
    return {named(one): one for one in _kind(records, "nvidia-steps") if (one["engine"], one["rows"]) == (engine, rows)}


def step_ms(record: Record) -> float:
    """Returns the median time of a step in ms."""
    return record["step"]["device_ms"]["median"]


def share(records: Sequence[Record]) -> Cases:
    """Returns the share of the read bandwidth that a step of torch-base reaches."""
    return {case: one["share_of_read"] for case, one in steps(records, "torch-base").items()}


def ratio(rows: str) -> Callable[[Sequence[Record]], Cases]:
    """Returns a function of torch-zip's step over torch-base's."""

    def values(records: Sequence[Record]) -> Cases:
        base = steps(records, "torch-base")
        zipped = steps(records, "torch-zip", rows)
        return {case: step_ms(zipped[case]) / step_ms(base[case]) for case in zipped.keys() & base.keys()}

    return values


def int4(records: Sequence[Record]) -> Cases:
    """Returns torch-base's steps per second with 4-bit weights over those with 16 bits."""
    base = steps(records, "torch-base")
    names = [case.removesuffix(" 4") for case in base if case.endswith(" 4")]
    return {n: step_ms(base[f"{n} 16"]) / step_ms(base[f"{n} 4"]) for n in names if f"{n} 16" in base}


# ---- kernels


def kernels(start: str) -> Callable[[Sequence[Record]], Cases]:
    """Returns a function of the share of the read bandwidth of the kernels whose names begin so."""
    return lambda records: {case: one["share_of_read"] for case, one in _kernels(records, start)}


def faster(start: str) -> Callable[[Sequence[Record]], Cases]:
    """Returns a function of the reference's time over the kernel's, of kernels whose names begin so."""
    return lambda records: {
        case: one["reference_us"] / one["us"] for case, one in _kernels(records, start) if one["reference_us"]
    }


def _kernels(records: Sequence[Record], start: str) -> Iterator[tuple[str, Record]]:
    for one in _kind(records, "nvidia-kernels"):
        if one["kernel"].startswith(start):
            yield f"{one['model']['name']} {one['kernel']}", one


# ---- whole requests


def end_to_end(records: Sequence[Record]) -> Cases:
    """Returns decoding in base tokens/s of torch-zip over (its base tokens per step x torch-base's)."""
    per_step = lambda one: one["figures"]["base_tokens_per_step"]["median"]
    return _against("torch-base", "base_tokens_per_s", records, lambda zipped, base: per_step(zipped) / per_step(base))


def prefill(records: Sequence[Record]) -> Cases:
    """Returns the speed of torch-zip's prefill over torch-base's on the same text."""
    return _against("torch-base", "prefill_tokens_per_s", records)


def published(records: Sequence[Record]) -> Cases:
    """Returns base tokens over the time of a whole request, of torch-zip over those of the published package."""
    return _against("zip2zip", "end_to_end_tokens_per_s", records)


def _against(
    other: str, figure: str, records: Sequence[Record], scale: Callable[[Record, Record], float] = lambda a, b: 1.0
) -> Cases:
    """Returns torch-zip's figure over (`scale` x another engine's) on the same workload of the same card."""
    found = {}
    for zipped in _whole(records, "torch-zip"):
        fields = [zipped[name] for name in ("workload", "device")] + [_weights(zipped)]
        same = [one for one in _whole(records, other) if [one["workload"], one["device"], _weights(one)] == fields]
        for one in same[:1]:
            a, b = (each["figures"][figure] for each in (zipped, one))
            if a is not None and b is not None:
                size = f"{zipped['workload']['prompt_tokens']}+{zipped['workload']['tokens']}"
                found[f"{zipped['model']['name']} {zipped['model']['precision']} {size}"] = (
                    a["median"] / b["median"] / scale(zipped, one)
                )
    return found


def _weights(record: Record) -> list[Any]:
    return [record["model"][name] for name in ("name", "precision", "weights")]


def _whole(records: Sequence[Record], engine: str) -> list[Record]:
    return [
        one
        for one in _kind(records, "generate")
        if one["engine"] == engine and one["mode"] == "replay" and one["setting"]["rows"] == "warm"
    ]


# ---- agreement


def agreeing(start: str) -> Callable[[Sequence[Record]], Cases]:
    """Returns a function of the checks whose names begin so: 1 for one that holds, else 0."""
    return lambda records: {
        one["check"]: float(one["holds"]) for one in _kind(records, "nvidia-checks") if one["check"].startswith(start)
    }


def logits_error(records: Sequence[Record]) -> Cases:
    """Returns the relative error of the bfloat16 logits."""
    return {one["check"]: one["value"] for one in _kind(records, "nvidia-checks") if one.get("value") is not None}


def float64(records: Sequence[Record]) -> Cases:
    """Returns the share of the kernels' tests against float64 references that passed; skipped ones do not count."""
    found = _kind(records, "nvidia-float64")
    passed, failed = (sum(one[name] for one in found) for name in ("passed", "failed"))
    return {"tests": passed / (passed + failed)} if passed + failed else {}


# ---- counted


def layer_launches(records: Sequence[Record]) -> Cases:
    """Returns the launches of a warm step over the layers, rounded down: those outside of layers are fewer."""
    return {
        f"{one['model']['name']} {one['engine']}": one["launches"]["launches"] // one["layers"]
        for one in _kind(records, "nvidia-trace")
    }


def added_launches(records: Sequence[Record]) -> Cases:
    """Returns the launches that a warm step of torch-zip has more than torch-base's."""
    found = {one["engine"]: one["launches"]["launches"] for one in _kind(records, "nvidia-trace")}
    both = {"torch-zip", "torch-base"} <= found.keys()
    return {"phi-3.5-mini": found["torch-zip"] - found["torch-base"]} if both else {}


def added_bytes(records: Sequence[Record]) -> Cases:
    """Returns the bytes that a warm step of torch-zip moves more than torch-base's, over those of the weights."""
    found = {one["engine"]: one for one in _kind(records, "nvidia-trace")}
    if not {"torch-zip", "torch-base"} <= found.keys():
        return {}
    more = found["torch-zip"]["launches"]["bytes"] - found["torch-base"]["launches"]["bytes"]
    return {"phi-3.5-mini": more / found["torch-base"]["weight_bytes"]}


def _kind(records: Iterable[Record], bench: str) -> list[Record]:
    return [one for one in records if one["bench"] == bench]
