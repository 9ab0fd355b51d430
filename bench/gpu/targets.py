"""The targets of the PyTorch engine, and whether a run's records meet them.

Functions compute the figures from the records; `TARGETS` gives their bounds. A target must hold for each of its cases,
such as shapes or texts: its figure is the worst case's, and it is not met while a case is missing. Shares of the
bandwidth have a target per GPU, because on a GPU with faster memory, the time that a step spends on anything but
reading is a larger share of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from mlx_zip.bench.records import Record, lines_with

Cases = dict[str, float]  # case, such as a shape or a text -> figure


# ---- steps


def step_records_of(records: Sequence[Record], engine: str, rows: str = "warm") -> dict[str, Record]:
    named = lambda one: f"{one['model']['name']} {one['model']['precision']}"
    return {
        named(one): one
        for one in lines_with(records, bench="nvidia-steps")
        if (one["engine"], one["rows"]) == (engine, rows)
    }


def median_step_ms(record: Record) -> float:
    return record["step"]["device_ms"]["median"]


def bandwidth_share_of_steps(records: Sequence[Record]) -> Cases:
    return {case: one["share_of_read"] for case, one in step_records_of(records, "torch-base").items()}


def zip_step_over_base(rows: str) -> Callable[[Sequence[Record]], Cases]:
    def values(records: Sequence[Record]) -> Cases:
        base = step_records_of(records, "torch-base")
        zipped = step_records_of(records, "torch-zip", rows)
        return {case: median_step_ms(zipped[case]) / median_step_ms(base[case]) for case in zipped.keys() & base.keys()}

    return values


def int4_over_16_bit_speed(records: Sequence[Record]) -> Cases:
    base = step_records_of(records, "torch-base")
    names = [case.removesuffix(" 4") for case in base if case.endswith(" 4")]
    return {n: median_step_ms(base[f"{n} 16"]) / median_step_ms(base[f"{n} 4"]) for n in names if f"{n} 16" in base}


# ---- kernels


def kernel_bandwidth_share(start: str) -> Callable[[Sequence[Record]], Cases]:
    return lambda records: {case: one["share_of_read"] for case, one in kernels_named(records, start)}


def kernel_speedup_over_reference(start: str) -> Callable[[Sequence[Record]], Cases]:
    return lambda records: {
        case: one["reference_us"] / one["us"] for case, one in kernels_named(records, start) if one["reference_us"]
    }


def kernels_named(records: Sequence[Record], start: str) -> Iterator[tuple[str, Record]]:
    for one in lines_with(records, bench="nvidia-kernels"):
        if one["kernel"].startswith(start):
            yield f"{one['model']['name']} {one['kernel']}", one


# ---- whole requests


def decoding_over_compression(records: Sequence[Record]) -> Cases:
    """Returns torch-zip's speed of decoding relative to torch-base's, divided by the ratio of base tokens per step."""
    per_step = lambda one: one["figures"]["base_tokens_per_step"]["median"]
    return compare_with_engine(
        "torch-base", "base_tokens_per_s", records, lambda zipped, base: per_step(zipped) / per_step(base)
    )


def compare_with_engine(
    other: str, figure: str, records: Sequence[Record], scale: Callable[[Record, Record], float] = lambda a, b: 1.0
) -> Cases:
    """Returns torch-zip's figure divided by `scale` x the engine `other`'s, for equal workload, device and weights."""
    found = {}
    for zipped in whole_requests_of(records, "torch-zip"):
        fields = [zipped[name] for name in ("workload", "device")] + [weights_key(zipped)]
        same = [
            one
            for one in whole_requests_of(records, other)
            if [one["workload"], one["device"], weights_key(one)] == fields
        ]
        for one in same[:1]:
            a, b = (each["figures"][figure] for each in (zipped, one))
            if a is not None and b is not None:
                size = f"{zipped['workload']['prompt_tokens']}+{zipped['workload']['tokens']}"
                found[f"{zipped['model']['name']} {zipped['model']['precision']} {size}"] = (
                    a["median"] / b["median"] / scale(zipped, one)
                )
    return found


def weights_key(record: Record) -> list[Any]:
    return [record["model"][name] for name in ("name", "precision", "weights")]


def whole_requests_of(records: Sequence[Record], engine: str) -> list[Record]:
    return [
        one
        for one in lines_with(records, bench="generate")
        if one["engine"] == engine and one["mode"] == "replay" and one["setting"]["rows"] == "warm"
    ]


# ---- agreement


def checks_that_hold(start: str) -> Callable[[Sequence[Record]], Cases]:
    """Returns a function that gives each check whose name begins with `start` the figure 1 if it holds, else 0."""
    return lambda records: {
        one["check"]: float(one["holds"])
        for one in lines_with(records, bench="nvidia-checks")
        if one["check"].startswith(start)
    }


def bfloat16_logits_error(records: Sequence[Record]) -> Cases:
    return {
        one["check"]: one["value"] for one in lines_with(records, bench="nvidia-checks") if one.get("value") is not None
    }


# ---- targets

UNMEASURED = "not measured"
SHAPES = ("phi-3.5-mini 16", "llama-3.2-1b 16", "phi-3.5-mini 4", "phi-3-medium 16")  # cases of the part `steps`
REQUESTS = ("phi-3.5-mini 16", "phi-3.5-mini 4", "llama-3.2-1b 16", "phi-3-medium 16")  # cases of `generate`
TEXTS = tuple(f"{shape} {size}" for shape in REQUESTS for size in ("512+256", "2048+256"))
ENCODERS = tuple(
    f"{shape} encoder {piece}, {count} entries"
    for shape in ("phi-3.5-mini", "llama-3.2-1b")
    for piece in ("rows", "attention", "pooling")
    for count in (1, 64)
)
HEADS = ("one key head per query head", "grouped key heads")
LOGITS_ERROR = 1e-2  # largest relative error of bfloat16


class Target(NamedTuple):
    """A target. rule: how the figure is computed, in words. values: computes the figure of each case from records.

    bound: minimum of the figure, or maximum if `most`. needed: names of the cases. card: only records whose chip's name
    contains `card` count; "" for all.
    """

    name: str
    rule: str
    values: Callable[[Sequence[Record]], Cases]
    bound: float
    needed: Sequence[str]
    most: bool = False
    card: str = ""

    def values_on_card(self, records: Sequence[Record]) -> Cases:
        """Returns the figure of each case, computed from the records of the target's GPU only."""
        return self.values([one for one in records if self.card in one.get("device", {}).get("chip", "")])

    def is_met(self, value: float) -> bool:
        """Returns whether a value meets the target."""
        return value <= self.bound if self.most else value >= self.bound


SHARE = "bytes of weights, keys and values over the median time of a step, over the read bandwidth of the same run"
STEP = "median time of a step over torch-base's, at the same shape"
CALLS = "bytes over the median time of a call, over the read bandwidth of the same run"


CARDS = ("H100", "H200")  # faster memory: equal time lost per launch is a larger share of an H200's step


def bandwidth_share_targets(
    name: str,
    rule: str,
    values: Callable[[Sequence[Record]], Cases],
    bounds: tuple[float, float],
    needed: Sequence[str],
) -> Iterator[Target]:
    """Yields a target for each GPU in `CARDS`: a minimum share of its read bandwidth.

    name: the name, with {} in place of share and GPU. bounds: the minimum share on each GPU.
    """
    for card, bound in zip(CARDS, bounds, strict=True):
        share = f"{100 * bound:.0f} % of an {card}'s read bandwidth"
        yield Target(name.format(share), rule, values, bound, needed, card=card)


def step_targets() -> Iterator[Target]:
    for bounds, shape in (((0.78, 0.71), SHAPES[0]), ((0.55, 0.46), SHAPES[1])):
        name = f"torch-base reaches {{}} at {shape.removesuffix(' 16')}"
        yield from bandwidth_share_targets(name, SHARE, bandwidth_share_of_steps, bounds, (shape,))
    for rows, bound in (("warm", 1.05), ("cold", 1.15)):
        name = f"a {rows} step of torch-zip takes at most {bound} x torch-base's"
        yield Target(name, STEP, zip_step_over_base(rows), bound, SHAPES, most=True)


def request_targets() -> Iterator[Target]:
    name = "end to end, torch-zip keeps 0.95 of its compression"
    rule = "base tokens/s of decoding over (base tokens per step x torch-base's base tokens/s), same text"
    yield Target(name, rule, decoding_over_compression, 0.95, TEXTS)
    name = "torch-zip is 5 x as fast as the published package"
    rule = "base tokens over the time of the whole request, over the package's, same text and card"
    yield Target(name, rule, partial(compare_with_engine, "zip2zip", "end_to_end_tokens_per_s"), 5.0, TEXTS[:2])
    name = "prefill of torch-zip is faster than torch-base's"
    rule = "base tokens of the prompt over the time to the first id, over torch-base's, same text"
    yield Target(name, rule, partial(compare_with_engine, "torch-base", "prefill_tokens_per_s"), 1.0, TEXTS)


def kernel_targets() -> Iterator[Target]:
    for what, kernel in (("joint head", "joint head, dense"), ("hyper embedding", "hyper embedding, 2048 ids")):
        needed = [f"{shape} {kernel}" for shape in ("phi-3.5-mini", "llama-3.2-1b")]
        values = kernel_bandwidth_share(kernel)
        yield from bandwidth_share_targets(f"the {what} reaches {{}}", CALLS, values, (0.8, 0.74), needed)
    rule = "time of the eager reference over the kernel's"
    name = "the encoders' pieces are 2 x as fast as eager PyTorch"
    yield Target(name, rule, kernel_speedup_over_reference("encoder"), 2.0, ENCODERS)
    rule = "steps/s of torch-base with 4 bits over those with 16"
    name = "4-bit weights give 2 x the steps of 16-bit ones"
    yield Target(name, rule, int4_over_16_bit_speed, 2.0, ("phi-3.5-mini",))


def agreement_targets() -> Iterator[Target]:
    models = ("stories", "stories-base")
    name, rule = "greedy ids of the bundled models are MLX's, in float32", "1 if every id is the recorded one, else 0"
    needed = [f"greedy ids of {model}, float32, equal MLX's" for model in models]
    yield Target(name, rule, checks_that_hold("greedy ids"), 1.0, needed)
    rule = "1 if graphs and eager work give the same ids, else 0"
    needed = [f"CUDA graphs of {model} give what eager work gives" for model in models]
    yield Target("CUDA graphs change no id", rule, checks_that_hold("CUDA graphs"), 1.0, needed)
    rule = "norm of the difference from the model in float32, over the norm of that one's"
    needed = ["logits of stories-base, bfloat16"]
    yield Target("logits in bfloat16 are within 1e-2", rule, bfloat16_logits_error, LOGITS_ERROR, needed, most=True)
    name, rule = "a prompt in two chunks gives what one chunk gives", "1 if the logits agree within rounding, else 0"
    needed = [f"two chunks equal one, {heads}, {dtype}" for heads in HEADS for dtype in ("float32", "bfloat16")]
    yield Target(name, rule, checks_that_hold("two chunks"), 1.0, needed)


TARGETS = (*step_targets(), *request_targets(), *kernel_targets(), *agreement_targets())


def judge_targets(records: Sequence[Record], on_gpu: bool) -> list[Record]:
    """Returns each target with its rule, its worst case's figure, and "met", "missed" or "not measured".

    Without a GPU all are "not measured". missing: names of cases without a figure.
    """
    lines = []
    for target in TARGETS:
        values = target.values_on_card(records) if on_gpu else {}
        known = {case: values[case] for case in target.needed if case in values}
        missing = [case for case in target.needed if case not in known]
        worst = (max if target.most else min)(known, key=known.__getitem__, default=None)
        if worst is not None and missing and target.is_met(known[worst]):
            worst = None  # a missing case may be worse
        value = None if worst is None else known[worst]
        verdict = UNMEASURED if value is None else "met" if target.is_met(value) else "missed"
        limit = {"bound": target.bound, "kind": "at most" if target.most else "at least", "rule": target.rule}
        cases = {case: round(value, 4) for case, value in known.items()}
        figure = {"value": None if value is None else round(value, 4), "worst": worst, "cases": cases}
        lines.append({"target": target.name, **limit, **figure, "missing": missing, "verdict": verdict})
    return lines
