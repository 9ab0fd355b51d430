"""Makes the lines that a run prints (header, final figures, hints, next commands)."""

from __future__ import annotations

import shlex
from typing import Any

from mlx_lm.utils import get_total_parameters

from mlx_zip.layout import has_hypertokens
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.progress import format_duration, pluralize
from mlx_zip.training.checkpoints import Progress
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.settings import ADAPTER, RunOptions
from mlx_zip.training.trainer import SampleData, Trainer

_FEW_BASE_IDS = 1_000_000  # new hyper-encoders trained on fewer base ids hardly help yet
PASSES = 4  # after more passes over the data, a rising validation loss is attributed to too little data
_FAIR_COMPARISON = (
    "warning: training on one kind of text moves this gap too, with or without hypertokens; what they cost is the gap "
    "to a base trained alike: the same texts prepared with --merge-size 1, then the same training"
)
_NOTABLE_CHANGE = 0.005  # relative change from which a validation figure counts as falling or rising


def run_header_lines(trainer: Trainer, what: str) -> list[str]:
    """Returns lines of text: trained parameters, device, data, and the step at which the run resumes.

    what: description of the trained model.
    """
    trained = sum(array.size for _, array in named_arrays(trainer.trainee.trainable_parameters()))
    total = get_total_parameters(trainer.trainee)
    lines = [
        f"training {what}: {trained:,} of {total:,} parameters; device: {trainer.stepper.device}",
        f"data: {_describe_data_counts(trainer.data)}"
        + (
            f"; held out: {_describe_data_counts(trainer.valid)}" if trainer.valid is not None else "; nothing held out"
        ),
    ]
    if trainer.progress.step:
        lines.append(f"resuming at step {trainer.progress.step:,} of {trainer.settings.iters:,}")
    return lines


def _describe_data_counts(data: SampleData) -> str:
    usable = data.lengths >= 2
    base_ids, ids = int(data.base_ids[usable].sum()), int(data.lengths[usable].sum())
    samples = pluralize(int(usable.sum()), "sample")
    return f"{samples}, {pluralize(base_ids, 'base id')} ({base_ids / max(ids, 1):.2f} per id)"


def run_summary_lines(trainer: Trainer, options: RunOptions) -> list[str]:
    """Returns lines of text about a finished run: figures and their meaning, hints, and commands to run next."""
    done = trainer.progress
    passes = done.seen_samples / max(1, int((trainer.data.lengths >= 2).sum()))
    lines = [
        f"{pluralize(done.step, 'step')} in {format_duration(done.seconds)}: "
        f"{pluralize(done.seen_samples, 'sample')} read, {passes:.1f} times the data, {done.seen_base_ids:,} base ids"
    ]
    log = read_metrics(options.out)
    bits = [line["val_bits_per_byte"] for line in log if isinstance(line.get("val_bits_per_byte"), float)]
    lines += (
        _quality_lines(log, bits) if bits else ["no validation data: how the model does on other text is not known"]
    )
    lines += [
        f"hint: {hint}"
        for hint in training_hint_lines(bits, passes, done, new_encoders=has_hypertokens(trainer.trainee.model))
    ]
    return lines + _list_next_commands(options, done)


def _quality_lines(log: list[dict[str, Any]], bits: list[float]) -> list[str]:
    """Returns lines: the last validation, and the gap to the model before training. bits: see `training_hint_lines`."""
    last = next(line for line in reversed(log) if "val_bits_per_byte" in line)
    base = next((line["base_bits_per_byte"] for line in log if "base_bits_per_byte" in line), None)
    lines = [f"held-out text: {bits[-1]:.4f} bits per byte"]
    if base is not None:
        gap = bits[-1] - base
        lines[0] += f"; before training, without hypertokens: {base:.4f} (gap {gap:+.4f}, {gap / base:+.1%})"
    if (per_step := last.get("val_base_tokens_per_step")) is not None:
        lines.append(f"each step of the model covers {per_step:.2f} base tokens of that text on average")
    return lines if base is None else [*lines, _FAIR_COMPARISON]


def training_hint_lines(bits: list[float], passes: float, done: Progress, new_encoders: bool) -> list[str]:
    """Returns advice on more steps or more data.

    bits: bits per byte of each validation, in order. passes: number of passes over the data. done: the run's progress.
    new_encoders: whether the model has hyper-encoders.
    """
    found = []
    if len(bits) > 1 and bits[-1] < bits[-2] * (1 - _NOTABLE_CHANGE):
        found.append(f"the validation figure still falls: the same command with --iters {2 * done.step} goes on")
    if len(bits) > 1 and bits[-1] > min(bits) * (1 + _NOTABLE_CHANGE) and passes > PASSES:
        found.append(
            f"the validation figure has risen again after {passes:.0f} passes: more data would help, or fewer steps"
        )
    if passes < 1:
        found.append(f"only {passes:.0%} of the data were read: more --iters would use the rest")
    if new_encoders and done.seen_base_ids < _FEW_BASE_IDS:
        found.append(
            f"hyper-encoders trained on fewer than {_FEW_BASE_IDS:,} base ids are a trial run: expect a gap to the base"
        )
    return found


def _list_next_commands(options: RunOptions, done: Progress) -> list[str]:
    if options.save == ADAPTER:
        folder = shlex.quote(str(options.out / ADAPTER))
        return [f"next: mlx_zip convert --hf-path {folder} --mlx-path FOLDER puts it together with its base"]
    folder = shlex.quote(str(options.out / "model"))
    base = f"--model {shlex.quote(options.model)} " if options.model else ""
    return [
        f"next: mlx_zip generate --model {folder} --prompt TEXT",
        f"      mlx_zip evaluate {base}--model {folder} --data FILE",
    ]
