"""`mlx_zip selftest`: checks recorded cases of the published packages and measures speed on the user's machine.

Writes a one-page Markdown report to send to the developers, and next to it a JSON file with all figures. Both name the
machine, versions and figures, and hold no text or file name of the user.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlx_zip.cli.actions import writable
from mlx_zip.errors import CodecError, MlxZipError
from mlx_zip.files import whole_file
from mlx_zip.tf32 import full_precision, tf32_line

ROWS_TOLERANCE, LOGITS_TOLERANCE = 2e-5, 2e-4
PLAIN = "llama_transformer_tied_lora"  # its base folder is a plain mlx-lm model of the same size
PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy")
TRIALS = 7
SCHEMA = 1  # of the JSON file
COPIES = 4  # additions per evaluation when the memory's bandwidth is measured
TOTAL_S, STORIES_S, SHAPE_S = 110.0, 30.0, 40.0  # limits of the whole command and of its long parts, in seconds
AT_LEAST_S = 10.0  # a long part is left out when less time is left


@dataclass(frozen=True)
class Check:
    """name: what was checked. passed: None for a measurement, which cannot fail. figure: the result as text."""

    name: str
    passed: bool | None
    figure: str


@dataclass(frozen=True)
class Limit:
    """The time that the command may take. ends: `time.monotonic()` at its end."""

    ends: float

    def left(self, part_s: float) -> float:
        """Returns the seconds that a part may take, at most `part_s`."""
        return min(part_s, self.ends - time.monotonic())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add(
        "--out",
        default="mlx_zip_selftest.md",
        help="Markdown report to write; a file of this name ending in .json gets the figures (default: %(default)s)",
    )
    add("--output", dest="out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # its old name


def run(args: argparse.Namespace) -> int:
    """Checks, measures, writes the report and prints its path; returns 0 if every check passed, else 1."""
    full_precision()  # the recorded results are float32; before MLX computes anything
    limit = Limit(time.monotonic() + TOTAL_S)
    out = writable("--out", args.out)
    data_file = writable("--out", figures_file(out))
    golden = Path(str(files("mlx_zip.golden")))
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        checks = [*check_codec(golden), *check_models(golden, Path(folder)), *measure(golden, Path(folder))]
    checks += measure_steps(limit, data)
    failed = [check for check in checks if check.passed is False]
    with whole_file(out) as partial:
        partial.write_text(report(checks), encoding="utf-8")
    with whole_file(data_file) as partial:
        partial.write_text(json.dumps(figures(checks, data), indent=1) + "\n", encoding="utf-8")
    for check in checks:
        print(f"{_MARKS[check.passed]:>8}  {check.name}: {check.figure}")
    passed = sum(check.passed is True for check in checks)
    print(f"{passed} checks passed, {len(failed)} failed; report: {args.out}, figures: {data_file}")
    print("Please attach both files to a report on the project's issue tracker.")
    return 1 if failed else 0


def figures_file(out: Path) -> Path:
    """Returns the JSON file that belongs to a report."""
    return out.with_suffix(".figures.json" if out.suffix == ".json" else ".json")


def figures(checks: list[Check], data: dict[str, Any]) -> dict[str, Any]:
    """Returns what the JSON file holds: the checks, the machine, and the data of the measurements."""
    found = [{"name": one.name, "passed": one.passed, "figure": one.figure} for one in checks]
    return {"selftest": SCHEMA, "machine": machine(), "checks": found, **data}


_MARKS = {True: "ok", False: "FAILED", None: "measured"}


def report(checks: list[Check]) -> str:
    """Returns the report in Markdown."""
    failed = sum(check.passed is False for check in checks)
    rows = [f"| {_MARKS[check.passed]} | {check.name} | {check.figure} |" for check in checks]
    about = [f"- {name}: {value}" for name, value in machine().items()]
    head = ["# mlx_zip selftest", "", "All checks passed." if not failed else f"**{failed} checks failed.**", ""]
    return "\n".join([*head, *about, "", "| | check | found |", "| --- | --- | --- |", *rows, ""])


def machine() -> dict[str, str]:
    """Returns the machine and the versions of the libraries, by name."""
    import mlx.core as mx

    device = mx.default_device()
    about = {
        "system": f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}",
        "device": ", ".join(f"{key} {value}" for key, value in mx.device_info(device).items()),
        "default device": str(device),
    }
    return {**about, "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES), "mlx_zip": _own_version()}


def _own_version() -> str:
    return import_module("mlx_zip").__version__


def attempt(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    """Runs one check and returns its result; an error of the library, device or files counts as a failed check."""
    try:
        passed, figure = check()
    except (MlxZipError, OSError, RuntimeError, ValueError) as error:
        passed, figure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Check(name, passed, figure)


# ---- codec


def check_codec(golden: Path) -> list[Check]:
    """Checks every recorded encoding and decoding of zip2zip-compression 0.3.4."""
    cases = json.loads((golden / "lzw_public.json").read_text(encoding="utf-8"))["cases"]
    encode, decode = ([case for case in cases if case["kind"] == kind] for kind in ("encode", "decode"))
    return [
        attempt("codec: encode cases", lambda: _count(_encodes, encode)),
        attempt("codec: decode cases", lambda: _count(_decodes, decode)),
    ]


def _count(same: Callable[[Any], bool], cases: list[Any]) -> tuple[bool, str]:
    """Returns whether all cases agree with their records, and how many do. same: checks one case."""
    wrong = [case["name"] for case in cases if not same(case)]
    return not wrong, f"{len(cases) - len(wrong)} of {len(cases)} equal" + (f"; not: {', '.join(wrong)}" * bool(wrong))


def _params(case: Any) -> Any:
    """Returns the codec parameters of a recorded case."""
    from mlx_zip.codec import CodecParams

    c = case["config"]
    sizes = (c["initial_vocab_size"], c["max_codebook_size"], c["max_subtokens"])
    return CodecParams(*sizes, tuple(c["disabled_ids"]), c["pad_token_id"])


def _encodes(case: Any) -> bool:
    """Returns whether compressing a case's base ids gives the recorded ids and codebook, and decodes as recorded."""
    from mlx_zip.codec import compress

    params = _params(case)
    ids, entries = compress(params, case["input_ids"])
    encoded = ids.tolist() == case["encoded_ids"] and _pairs(entries) == case["codebook_after_encode"]
    return encoded and _decodes(case)


def _decodes(case: Any) -> bool:
    """Returns whether expanding a case's ids gives the recorded base ids and codebook.

    Hypertokens that are neither in the codebook nor the next to be created must be refused, although the published
    package accepts some of them.
    """
    from mlx_zip.codec import Codebook

    book = Codebook(_params(case))
    try:
        book.push(case["encoded_ids"])
    except CodecError:
        return case["name"].startswith("unknown_")
    base_ids = book.expand(case["encoded_ids"]).tolist()
    return base_ids == case["decoded_ids"] and _pairs(book.entries) == case["codebook_after_decode"]


def _pairs(entries: Any) -> list[list[Any]]:
    """Returns codebook entries as [id, base ids] lists, the form of the records."""
    return [[int(i), list(map(int, base_ids))] for i, base_ids in entries]


# ---- models


def check_models(golden: Path, folder: Path) -> list[Check]:
    """Converts each recorded checkpoint and compares rows, logits and greedy ids."""
    checks = []
    for source in sorted((golden / "models").iterdir()):
        out = folder / source.name
        checks.append(attempt(f"{source.name}: convert", lambda source=source, out=out: _convert(source, out)))
        if checks[-1].passed:
            for name, check in (("rows", _rows), ("logits", _logits), ("greedy ids", _greedy)):
                one = lambda check=check, source=source, out=out: check(source, *_load(out))
                checks.append(attempt(f"{source.name}: {name}", one))
    return checks


def _convert(source: Path, out: Path) -> tuple[bool, str]:
    import_module("mlx_zip.converters").convert(str(source), str(out), progress=False)
    return True, f"{sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB"


def _load(folder: Path) -> tuple[Any, Any]:
    from mlx_zip.generate import load

    return load(folder)


def _recorded(source: Path) -> tuple[Any, Any]:
    """Returns the recorded prompts and ids (JSON) and arrays (NumPy) of a checkpoint."""
    import numpy as np

    return json.loads((source / "expected.json").read_text(encoding="utf-8")), np.load(source / "expected.npz")


def _rows(source: Path, model: Any, _: Any) -> tuple[bool, str]:
    """Returns whether the hypertoken rows agree with the recorded ones, and the largest difference as text."""
    import numpy as np

    from mlx_zip.codec import compress

    expected, arrays = _recorded(source)
    worst = 0.0
    for k, prompt in enumerate(expected["prompts"]):
        _, entries = compress(model.config.codec_params, prompt["base_ids"])
        sides = model.rows(entries.base_ids, entries.lengths)
        for side, name in zip(sides, ("hyper_embedding_rows", "hyper_linear_rows"), strict=True):
            worst = _worse(worst, np.array(side) - arrays[f"p{k}_{name}"])
    return worst <= ROWS_TOLERANCE, f"largest difference {worst:.2e} (at most {ROWS_TOLERANCE:.0e})"


def _logits(source: Path, model: Any, _: Any) -> tuple[bool, str]:
    """Returns whether the logits agree with the recorded ones, and the largest difference as text."""
    import mlx.core as mx
    import numpy as np

    expected, arrays = _recorded(source)
    worst, closed = 0.0, True
    for k, prompt in enumerate(expected["prompts"]):
        ours = np.array(model(mx.array([prompt["compressed_ids"]])))[0, :, : model.layout.end]
        theirs = arrays[f"p{k}_logits"][:, : model.layout.end]  # zip2zip does not mask the columns after that
        is_open = ~np.isneginf(theirs)
        closed = closed and bool(np.array_equal(is_open, ~np.isneginf(ours)))
        worst = _worse(worst, ours[is_open] - theirs[is_open])
    figure = f"largest difference {worst:.2e} (at most {LOGITS_TOLERANCE:.0e})"
    return closed and worst <= LOGITS_TOLERANCE, figure if closed else figure + "; the masked columns differ"


def _worse(worst: float, difference: Any) -> float:
    """Returns the larger of `worst` and the largest magnitude in `difference`; NaN if either is NaN."""
    import numpy as np

    return float(np.maximum(worst, np.abs(difference).max()))


def _greedy(source: Path, model: Any, tokenizer: Any) -> tuple[bool, str]:
    """Returns whether greedy generation gives the recorded ids, and how many are equal as text."""
    from mlx_zip.generate import stream_generate

    prompts = _recorded(source)[0]["prompts"]
    equal = total = 0
    for prompt in prompts:
        wanted = prompt["generated_ids"]
        limit = len(wanted) * model.config.merge_size
        found = [r.token for r in stream_generate(model, tokenizer, prompt["base_ids"], max_tokens=limit)]
        equal += sum(a == b for a, b in zip(found, wanted, strict=False))
        total += len(wanted)
    return equal == total, f"{equal} of {total} equal"


# ---- speed


def measure(golden: Path, folder: Path) -> list[Check]:
    """Measures rough speeds to compare machines by; each is the median of a few trials.

    golden: the recorded checkpoints. folder: the models that `check_models` converted.
    """
    plain, zipped = golden / "models" / PLAIN / "base", folder / PLAIN
    checks = [
        attempt("codec: compress 2,048 ids", _compress_speed),
        attempt("codec: push one id", _push_speed),
        attempt("memory: read and write 64 MB", _bandwidth),
        attempt("TF32 in float32 products", lambda: (None, tf32_line())),
        attempt("step, plain tiny model", lambda: (None, _step_time(plain))),
    ]
    return [*checks, attempt("step, same model with hypertokens", lambda: (None, _step_time(zipped)))]


def _timed(work: Callable[[], Any]) -> list[float]:
    """Runs `work` once to warm up, then `TRIALS` times; returns the seconds of each trial."""
    work()  # warm-up
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return times


def _synthetic_ids(count: int) -> Any:
    """Returns base ids distributed like those of text, from a fixed seed."""
    import numpy as np

    return (np.random.default_rng(0).zipf(1.3, count) % 32000).astype(np.uint32)


def _compress_speed() -> tuple[None, str]:
    """Measures how many base ids per second the codec compresses."""
    from mlx_zip.codec import CodecParams, compress

    params, ids = CodecParams(32000, 2048, 3), _synthetic_ids(2048)
    compress_s = statistics.median(_timed(lambda: compress(params, ids)))
    return None, f"{len(ids) / compress_s / 1e6:.1f} M ids/s (synthetic ids)"


def _push_speed() -> tuple[None, str]:
    """Measures how long a codebook takes to read one id."""
    from mlx_zip.codec import Codebook, CodecParams

    book, times = Codebook(CodecParams(32000, 2048, 3)), []
    for one in _synthetic_ids(4000).tolist():
        begun = time.perf_counter()
        book.push(one)
        times.append(time.perf_counter() - begun)
    return None, f"{statistics.median(times) * 1e6:.2f} microseconds"


def _bandwidth() -> tuple[None, str]:
    """Measures the memory bandwidth: bytes read and written per second when a number is added to a 64 MB array."""
    import mlx.core as mx

    x = mx.zeros((16 << 20,), mx.float32)
    mx.eval(x)
    took = statistics.median(_timed(lambda: mx.eval([x + (i + 1) for i in range(COPIES)])))
    return None, f"{COPIES * 2 * x.nbytes / took / 1e9:.1f} GB/s"


def _step_time(folder: Path) -> str:
    """Returns the median time per step when the model in `folder` continues 32 ids, as text."""
    from mlx_zip.generate import stream_generate

    model, tokenizer = _load(folder)
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        last = list(stream_generate(model, tokenizer, list(range(10, 42)), max_tokens=64))[-1]
        times.append((time.perf_counter() - begun) / last.steps)
    return f"{statistics.median(times) * 1e3:.2f} ms per step, prefill of 32 ids included ({last.steps} steps)"


# ---- steps


def measure_steps(limit: Limit, data: dict[str, Any]) -> list[Check]:
    """Measures steps of the bundled model and of one of 1B size over mlx-lm's, bandwidth, and the machine's state.

    data: is filled with all figures, by part.
    """
    bench, state = import_module("mlx_zip.bench.selftest"), import_module("mlx_zip.bench.machine_state").machine_state
    data["state_before"] = state()
    parts = [
        _bandwidth_part(bench, data),
        *_steps_part("stories", bench.stories_steps, bench.lines, limit.left(STORIES_S), data),
        *_steps_part("1B, 4 bit", bench.shape_steps, bench.lines, limit.left(SHAPE_S), data),
    ]
    data["state_after"] = state()
    data["surroundings"] = import_module("mlx_zip.bench.record").surroundings(*PACKAGES)
    reported = [Check(f"machine: {name}", None, text[:200]) for name, text in data["state_after"].items()]
    return [*parts, *reported]


def _bandwidth_part(bench: Any, data: dict[str, Any]) -> Check:
    """Returns the measured bandwidth of reading. bench: the module that measures."""

    def measured() -> tuple[None, str]:
        found = data["bandwidth"] = bench.bandwidth()
        return None, f"skipped: {found['skipped']}" if "skipped" in found else f"{found['gb_per_s']:.1f} GB/s"

    return attempt("memory: read in matrix-vector products", measured)


def _steps_part(
    name: str, measure: Callable[[float], Any], lines: Callable[[Any], Any], limit_s: float, data: dict[str, Any]
) -> list[Check]:
    """Returns a line per figure of one model's steps; one line if it is left out or fails.

    measure: is called with the limit in seconds. lines: makes (name, text) of what it returns.
    """

    def measured() -> tuple[None, str]:
        data[name] = measure(limit_s)
        return None, ""

    if limit_s < AT_LEAST_S:
        data[name] = {"skipped": f"the limit of {TOTAL_S:.0f} seconds is nearly reached"}
    elif (tried := attempt(f"{name}: steps", measured)).passed is False:
        return [tried]
    return [Check(f"{name}: {what}", None, text) for what, text in lines(data[name])]
