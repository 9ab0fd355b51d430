"""The paper's ablations at small scale: merge size (table 7, figure 5) and hyper-encoder (table 8, figure 6).

Every setting starts from the same base model, reads the same training windows and is evaluated on the same bytes. An
entry can be predicted right after the id that created it, as in generation. No more windows are prepared than are read:
batches are sorted by length in ids, so from a larger set each merge size would read different windows.

A result is a JSON line in OUT/ablations.jsonl. A setting with a result is skipped, and an interrupted setting continues
where it stopped. Source: arXiv 2506.01084, appendix A.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.arguments import add_limit_bytes_flag, add_separator_flag, default_flags
from mlx_zip.bench.recording import environment_fields
from mlx_zip.bench.records import read_lines, write_whole
from mlx_zip.errors import MlxZipError

from .ablation_tables import ENCODERS, AblationResults, tables_7_and_8

LINES = "ablations.jsonl"
POINTS = 100  # most points in a training curve
_TRAINING = (  # flags that are also fields of `TrainSettings`
    "iters",
    "batch_size",
    "optimizer",
    "learning_rate",
    "muon_learning_rate",
    "fine_tune_type",
    "lora_rank",
    "dtype",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench ablations` to a parser."""
    add = parser.add_argument
    add("--model", help="plain model to start every setting from: a folder or a hub id")
    add("--data", nargs="+", metavar="FILE", help="texts to train on, in any format of `mlx_zip prepare --data`")
    add("--valid", nargs="+", metavar="FILE", help="held-out texts to evaluate on; each is a column of the tables")
    add(
        "--out",
        metavar="DIR",
        help=f"folder to write prepared data, training runs and results ({LINES}) to; the same command "
        "continues an interrupted run",
    )
    setting = parser.add_argument_group("settings").add_argument
    setting_flag = default_flags(setting)
    setting_flag(
        "--merge-sizes",
        [1, 2, 3, 4, 5],
        "merge sizes to compare (most base ids in a hypertoken), all with --encoder",
        metavar="M",
    )
    setting_flag("--encoder", "transformer-2", "hyper-encoder with which --merge-sizes are compared", choices=ENCODERS)
    setting(
        "--encoders",
        nargs="+",
        choices=ENCODERS,
        default=list(ENCODERS),
        help="hyper-encoders to compare, all with --merge-size (default: all)",
    )
    setting_flag("--merge-size", 3, "merge size with which --encoders are compared, at least 2", metavar="M")
    setting_flag("--seed", [0], "random seeds, one training run each")
    train = parser.add_argument_group("training, the same for every setting").add_argument
    train_flag = default_flags(train)
    train_flag("--iters", 500, "number of optimizer steps")
    train_flag("--batch-size", 16, "windows per training step")
    train_flag("--optimizer", "adamw", "optimizer, any that `mlx_zip train` has")
    train_flag("--learning-rate", 3e-4, "peak learning rate")
    train_flag("--muon-learning-rate", 0.02, "peak learning rate of the weights that Muon trains")
    train("--warmup", type=int, help="steps until the learning rate is at its peak (default: a twentieth of --iters)")
    train_flag(
        "--fine-tune-type", "full", "train all weights of the decoder, or LoRA adapters", choices=("full", "lora")
    )
    train_flag("--lora-rank", 32, "rank of LoRA adapters")
    train_flag("--dtype", "float32", "number format of the forward pass", choices=("float32", "bfloat16"))
    train_flag("--encoder-heads", 4, "attention heads of the hyper-encoders")
    text = parser.add_argument_group("text").add_argument
    text_flag = default_flags(text)
    text_flag("--context", 1024, "base ids per window, in training and evaluation")
    text_flag("--codebook-size", 2048, "maximum number of hypertokens")
    add_separator_flag(text)
    text(
        "--limit",
        type=int,
        metavar="N",
        help="prepare at most N windows of --data (default: as many as training reads, --iters times --batch-size)",
    )
    add_limit_bytes_flag(text, "each text of --valid")


def run(args: argparse.Namespace) -> int:
    """Trains and evaluates every setting that has no result in --out, and prints the tables.

    Returns 0. A signal that stops training ends the process with exit status 130 or 143; the same command continues the
    run. Raises `MlxZipError` if a flag or file cannot be used.
    """
    for name in ("model", "data", "valid", "out"):
        if not getattr(args, name):
            raise MlxZipError(f"--{name} is missing")
    lines = Path(args.out) / LINES
    measure_all(args, lines)
    print(tables_7_and_8(AblationResults(read_lines(lines))))
    return 0


@dataclass(frozen=True)
class Setting:
    """One training run. encoder: a name in `ENCODERS`, or None for merge size 1, which has no hypertokens."""

    merge_size: int
    encoder: str | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder, for example m3-attention-seed0."""
        return "-".join([f"m{self.merge_size}", *([self.encoder] if self.encoder else []), f"seed{self.seed}"])


def settings_from_flags(args: argparse.Namespace) -> list[Setting]:
    """Returns the settings that the flags ask for, without duplicates, for every seed.

    These are each of --merge-sizes with --encoder and each of --encoders with --merge-size. Raises `MlxZipError` if a
    merge size is too small.
    """
    if low := [m for m in (*args.merge_sizes, args.merge_size) if m < 1]:
        raise MlxZipError(f"a merge size must be 1 or more, got {low[0]}")
    if args.merge_size < 2:
        raise MlxZipError("--merge-size, that of the encoders, must be 2 or more: without compression there is none")
    wanted = [(m, args.encoder if m > 1 else None) for m in args.merge_sizes]
    wanted += [(args.merge_size, encoder) for encoder in args.encoders]
    return list(dict.fromkeys(Setting(m, encoder, seed) for seed in args.seed for m, encoder in wanted))


def measure_all(args: argparse.Namespace, path: Path) -> None:
    """Trains and evaluates each setting that has no line in the file `path`, and adds the setting's line to the file.

    Raises `MlxZipError` if lines of the file were measured under other conditions.
    """
    wanted, now = settings_from_flags(args), shared_conditions(args)
    lines = read_lines(path) if path.exists() else []
    for line in lines:
        if differing := sorted(condition_differences(line["conditions"], now)):
            raise MlxZipError(
                f"{path} was measured under other conditions ({', '.join(differing)}); choose another --out"
            )
    done = {Setting(**line["setting"]) for line in lines}
    laboratory = AblationRunner(args, path.parent)
    for i, setting in enumerate(wanted, 1):
        if setting in done:
            continue
        print(f"{i} of {len(wanted)}: {setting.name}", file=sys.stderr, flush=True)
        measured = laboratory.measure(setting)
        lines.append(
            {
                "bench": "ablations",
                "setting": vars(setting),
                "conditions": now,
                **measured,
                **environment_fields(),
            }
        )
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def shared_conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the conditions that all settings share: values of flags, and files by name and SHA-256.

    Raises `MlxZipError` if --model is a zip2zip model, or two texts of --valid have the same name.
    """
    from mlx_zip.models.loading import find_model_folder, read_model_config

    folder = find_model_folder(args.model)
    if "zip2zip" in read_model_config(folder):
        raise MlxZipError(f"{args.model} is a zip2zip model; the ablations start from a plain one")
    names = [Path(name).name for name in args.valid]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MlxZipError(f"--valid: two texts are called {twice[0]}, and each is a column of the tables")
    weights = sorted(folder.glob("model*.safetensors"))
    return {
        "model": {"name": folder.name, "sha256": [file_sha256(file) for file in [folder / "config.json", *weights]]},
        "data": [[Path(name).name, file_sha256(Path(name))] for name in args.data],
        "valid": [[name, file_sha256(Path(path))] for name, path in zip(names, args.valid, strict=True)],
        **{name: getattr(args, name) for name in _TRAINING},
        "warmup": args.iters // 20 if args.warmup is None else args.warmup,
        **{name: getattr(args, name) for name in ("encoder", "merge_size", "encoder_heads", "context")},
        **{name: getattr(args, name) for name in ("codebook_size", "separator", "limit", "limit_bytes")},
    }


def file_sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def condition_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    plain = json.loads(json.dumps(now))
    for name in before.keys() | plain.keys():
        if before.get(name) != plain.get(name):
            yield name


class AblationRunner:
    """Prepares data, trains and evaluates. Writes to the folder `out`, and continues work that was interrupted."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.args, self.out = args, out
        self._windows: dict[str, Any] = {}

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Trains and evaluates one setting; returns the fields of its line: training, parameters and texts.

        Raises `MlxZipError`, and `SystemExit` if a signal stopped the training.
        """
        folder, index = self._prepare(setting.merge_size)
        run_folder = self._train(setting, folder)
        return {"training": self._training_fields(run_folder, index), **self._evaluate(run_folder)}

    def _prepare(self, merge_size: int) -> tuple[Path, dict[str, Any]]:
        """Prepares the training windows of a merge size; returns their folder and the folder's index.

        Raises `MlxZipError` if training would not read every window equally often.
        """
        from mlx_zip.text.sources import Source
        from mlx_zip.training.prepare.plan import PrepareOptions
        from mlx_zip.training.prepare.preparation import prepare_data

        args, out = self.args, self.out / "data" / f"m{merge_size}"
        read = args.iters * args.batch_size
        options = PrepareOptions(
            sources=(Source(tuple(args.data), separator=args.separator),),
            out=out,
            model=args.model,
            context=args.context,
            merge_size=merge_size,
            codebook_size=args.codebook_size,
            fill_windows=True,
            limit=read if args.limit is None else min(args.limit, read),
        )
        index = prepare_data(options, progress=True)
        windows = index["totals"]["samples"]
        if windows % args.batch_size or read % windows:
            shutil.rmtree(out)
            raise MlxZipError(
                f"--data gives {windows} windows, {read} are read ({args.iters} steps of {args.batch_size}): sorted by "
                "length, each merge size would leave out and repeat others; give more text, or choose --limit and "
                "--iters so that each window is read equally often"
            )
        return out, index

    def _train(self, setting: Setting, data: Path) -> Path:
        from mlx_zip.training.run import RunOptions, train
        from mlx_zip.training.settings import EncoderOptions, TrainSettings

        args, out = self.args, self.out / "runs" / setting.name
        kind, layers, _ = ENCODERS[setting.encoder or "averaging"]
        encoder = EncoderOptions(kind=kind, num_hidden_layers=layers, num_heads=args.encoder_heads)
        options = RunOptions(data=[data], out=out, model=args.model, encoder=encoder, valid_share=0.0)
        chosen = TrainSettings(
            **{name: getattr(args, name) for name in _TRAINING},
            warmup=args.iters // 20 if args.warmup is None else args.warmup,
            steps_per_report=max(1, args.iters // POINTS),
            seed=setting.seed,
            keep=1,
        )
        outcome = train(options, chosen)
        if outcome.stopped_by is not None:
            print("stopped; the same command continues from there", file=sys.stderr)
            raise SystemExit(128 + outcome.stopped_by)
        return out

    def _training_fields(self, run_folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a line's fields about a training run: amount read, seconds, compression rate and training curve.

        A point of the curve has the bytes read so far, and the mean nats per id and bits per byte since the last point.
        index: the index of the prepared windows.
        """
        from mlx_zip.training.run_folder import read_metrics

        reports = [line for line in read_metrics(run_folder) if "loss" in line]
        totals, last = index["totals"], reports[-1]
        return {
            **{name: last[f"seen_{name}"] for name in ("samples", "ids", "base_ids", "bytes")},
            "seconds": last["seconds"],
            "compression_rate": totals["ids"] / totals["base_ids"],
            "prepared_bytes": totals["bytes"],
            "curve": [
                [line["seen_bytes"], round(line["loss"], 5), round(line["bits_per_byte"], 5)] for line in reports
            ],
        }

    def _evaluate(self, run_folder: Path) -> dict[str, Any]:
        from mlx_zip.engine.mlx.generate import load
        from mlx_zip.evaluation.bits import measure_bits
        from mlx_zip.training.run import finished_model_folder

        model, tokenizer = load(str(finished_model_folder(run_folder)))
        texts = {}
        for path in self.args.valid:
            windows = self._windows_of_text(path, tokenizer)
            texts[Path(path).name] = measure_bits(model, windows, self.args.batch_size).record()
        return {"parameters": count_parameters(model), "texts": texts}

    def _windows_of_text(self, path: str, tokenizer: Any) -> Any:
        from mlx_zip.evaluation.bits import cut_scored_windows
        from mlx_zip.text.documents import read_corpus

        if path not in self._windows:
            corpus = read_corpus([path], self.args.separator, self.args.limit_bytes)
            self._windows[path] = cut_scored_windows(tokenizer, corpus.documents, self.args.context, fill_windows=True)
        return self._windows[path]


def count_parameters(model: Any) -> dict[str, int]:
    from mlx_zip.config import SIDES
    from mlx_zip.models.rows.fingerprints import named_arrays

    sizes = [(name, value.size) for name, value in named_arrays(model.parameters())]
    encoders = sum(size for name, size in sizes if name.startswith(SIDES))
    return {"decoder": sum(size for _, size in sizes) - encoders, "encoders": encoders}
