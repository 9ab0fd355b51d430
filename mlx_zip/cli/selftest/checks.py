"""The selftest's checks, and those of the codec and of models against recorded results of the published packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_zip.errors import CodecError, MlxZipError

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy")  # libraries whose versions are reported
ROWS_TOLERANCE, LOGITS_TOLERANCE = 2e-5, 2e-4


@dataclass(frozen=True)
class Check:
    """A check's result. name: what was checked. passed: None for a measurement. figure: the result as text."""

    name: str
    passed: bool | None
    figure: str


def run_check(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
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
        run_check("codec: encode cases", lambda: _count_agreeing(_compresses_as_recorded, encode)),
        run_check("codec: decode cases", lambda: _count_agreeing(_expands_as_recorded, decode)),
    ]


def _count_agreeing(same: Callable[[Any], bool], cases: list[Any]) -> tuple[bool, str]:
    wrong = [case["name"] for case in cases if not same(case)]
    return not wrong, f"{len(cases) - len(wrong)} of {len(cases)} equal" + (f"; not: {', '.join(wrong)}" * bool(wrong))


def _recorded_codec_params(case: Any) -> Any:
    from mlx_zip.codec import CodecParams

    c = case["config"]
    sizes = (c["initial_vocab_size"], c["max_codebook_size"], c["max_subtokens"])
    return CodecParams(*sizes, tuple(c["disabled_ids"]), c["pad_token_id"])


def _compresses_as_recorded(case: Any) -> bool:
    """Returns whether compressing a case's base ids gives the recorded ids and codebook, and decodes as recorded."""
    from mlx_zip.codec import compress

    params = _recorded_codec_params(case)
    ids, entries = compress(params, case["input_ids"])
    encoded = ids.tolist() == case["encoded_ids"] and _entry_pairs(entries) == case["codebook_after_encode"]
    return encoded and _expands_as_recorded(case)


def _expands_as_recorded(case: Any) -> bool:
    """Returns whether expanding a case's ids gives the recorded base ids and codebook.

    Hypertokens that are neither in the codebook nor the next to be created must be refused, although the published
    package accepts some of them.
    """
    from mlx_zip.codec import Codebook

    book = Codebook(_recorded_codec_params(case))
    try:
        book.push(case["encoded_ids"])
    except CodecError:
        return case["name"].startswith("unknown_")
    base_ids = book.expand(case["encoded_ids"]).tolist()
    return base_ids == case["decoded_ids"] and _entry_pairs(book.entries) == case["codebook_after_decode"]


def _entry_pairs(entries: Any) -> list[list[Any]]:
    return [[int(i), list(map(int, base_ids))] for i, base_ids in entries]


# ---- models


def check_models(golden: Path, folder: Path) -> list[Check]:
    """Converts each recorded checkpoint, and compares its rows, logits and greedy ids with the recorded ones."""
    checks = []
    for source in sorted((golden / "models").iterdir()):
        out = folder / source.name
        checks.append(
            run_check(f"{source.name}: convert", lambda source=source, out=out: _check_conversion(source, out))
        )
        if checks[-1].passed:
            for name, check in (
                ("rows", _compare_rows),
                ("logits", _compare_logits),
                ("greedy ids", _compare_greedy_ids),
            ):
                one = lambda check=check, source=source, out=out: check(source, *_load_converted_model(out))
                checks.append(run_check(f"{source.name}: {name}", one))
    return checks


def _check_conversion(source: Path, out: Path) -> tuple[bool, str]:
    import_module("mlx_zip.converters").convert(str(source), str(out), progress=False)
    return True, f"{sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB"


def _load_converted_model(folder: Path) -> tuple[Any, Any]:
    from mlx_zip.models.loading import load

    return load(folder)


def _read_recorded_arrays(source: Path) -> tuple[Any, Any]:
    import numpy as np

    return json.loads((source / "expected.json").read_text(encoding="utf-8")), np.load(source / "expected.npz")


def _compare_rows(source: Path, model: Any, _: Any) -> tuple[bool, str]:
    """Returns whether the hypertoken rows agree with the recorded ones, and the largest difference as text."""
    import numpy as np

    from mlx_zip.codec import compress

    expected, arrays = _read_recorded_arrays(source)
    worst = 0.0
    for k, prompt in enumerate(expected["prompts"]):
        _, entries = compress(model.config.codec_params, prompt["base_ids"])
        sides = model.encode_rows(entries.base_ids, entries.lengths)
        for side, name in zip(sides, ("hyper_embedding_rows", "hyper_linear_rows"), strict=True):
            worst = _larger_difference(worst, np.array(side) - arrays[f"p{k}_{name}"])
    return worst <= ROWS_TOLERANCE, f"largest difference {worst:.2e} (at most {ROWS_TOLERANCE:.0e})"


def _compare_logits(source: Path, model: Any, _: Any) -> tuple[bool, str]:
    """Returns whether the logits agree with the recorded ones, and the largest difference as text."""
    import mlx.core as mx
    import numpy as np

    expected, arrays = _read_recorded_arrays(source)
    worst, closed = 0.0, True
    for k, prompt in enumerate(expected["prompts"]):
        ours = np.array(model(mx.array([prompt["compressed_ids"]])))[0, :, : model.layout.end]
        theirs = arrays[f"p{k}_logits"][:, : model.layout.end]  # zip2zip does not mask the columns after that
        is_open = ~np.isneginf(theirs)
        closed = closed and bool(np.array_equal(is_open, ~np.isneginf(ours)))
        worst = _larger_difference(worst, ours[is_open] - theirs[is_open])
    figure = f"largest difference {worst:.2e} (at most {LOGITS_TOLERANCE:.0e})"
    return closed and worst <= LOGITS_TOLERANCE, figure if closed else figure + "; the masked columns differ"


def _larger_difference(worst: float, difference: Any) -> float:
    """Returns the larger of `worst` and the largest magnitude in `difference`; NaN if either is NaN."""
    import numpy as np

    return float(np.maximum(worst, np.abs(difference).max()))


def _compare_greedy_ids(source: Path, model: Any, tokenizer: Any) -> tuple[bool, str]:
    """Returns whether greedy generation gives the recorded ids, and how many are equal as text."""
    from mlx_zip.engine.mlx.generate import stream_generate

    prompts = _read_recorded_arrays(source)[0]["prompts"]
    equal = total = 0
    for prompt in prompts:
        wanted = prompt["generated_ids"]
        limit = len(wanted) * model.config.merge_size
        found = [r.token for r in stream_generate(model, tokenizer, prompt["base_ids"], max_tokens=limit)]
        equal += sum(a == b for a, b in zip(found, wanted, strict=False))
        total += len(wanted)
    return equal == total, f"{equal} of {total} equal"
