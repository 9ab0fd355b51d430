"""Measures training: time of a step and its parts, data preparation, and memory compared with mlx-lm's LoRA trainer.

Without --model and --data a small decoder with random weights reads synthetic ids: enough to see that everything runs
and roughly where the time goes. Figures to quote need a real model and prepared text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_at_least
from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import MlxZipError

from .codec import synthetic_ids
from .recording import print_record, summarize_samples

PARTS = ("step", "prepare", "memory", "torch")
BY_DEFAULT = PARTS[:3]  # the others need PyTorch
TRAINERS = ("mlx_zip", "mlx-lm", "mlx-lm same ids")
VOCAB, SLOTS = 2048, 2048
DOCUMENT = 200  # base ids per synthetic document
SMALL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench training`."""
    add = parser.add_argument
    add(
        "--model",
        help="plain model to train: model folder or hub id; needs --data (default: a small Llama with random weights)",
    )
    add("--data", help="folder that `mlx_zip prepare` made for --model, with hypertokens (default: synthetic ids)")
    add(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(BY_DEFAULT),
        help="parts of the bench to run; torch: steps of --engine torch and of MLX, and the machine's products "
        "(default: all but torch)",
    )
    add("--context", type=int, default=256, help="number of base ids per synthetic sample (default: 256)")
    add("--merge-size", type=int, default=3, help="maximum base ids per hypertoken of synthetic samples (default: 3)")
    add(
        "--prepare-ids",
        type=int,
        default=500_000,
        help="number of synthetic base ids that the part prepare compresses, without --data (default: 500000)",
    )
    add("--batch-size", type=int, default=4, help="number of samples per training step (default: 4)")
    add(
        "--batches",
        type=int,
        default=3,
        help="number of different batches that the timed steps use in turn (default: 3)",
    )
    add("--trials", type=int, default=9, help="number of timed runs per measurement (default: 9)")
    add(
        "--memory-steps",
        type=int,
        default=4,
        help="steps that each trainer runs while its memory is measured (default: 4)",
    )
    add(
        "--fine-tune-type",
        choices=("lora", "full"),
        default="lora",
        help="weights of the decoder to train; lora: adapters, full: all (default: lora)",
    )
    add("--lora-rank", type=int, default=8, help="rank of the LoRA adapters (default: 8)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="number type of the forward and backward pass (default: float32)",
    )
    add(
        "--compile",
        choices=("auto", "on", "off"),
        default="auto",
        help="compile the training step; auto: on every device but the CPU (default: auto)",
    )
    add(
        "--encoder",
        choices=("attention", "transformer", "res_latent_attn"),
        default="res_latent_attn",
        help="kind of hyper-encoder to add to the model (default: res_latent_attn)",
    )
    add("--encoder-layers", type=int, default=2, help="number of layers of the hyper-encoder (default: 2)")
    add("--memory-of", choices=TRAINERS, help="run only this trainer, in this process, and print its peak memory")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints one JSON line per part. Returns 0. Raises `MlxZipError`."""
    check_at_least(args, 1, "context", "prepare_ids", "batch_size", "batches", "trials", "memory_steps")
    if (args.model is None) != (args.data is None):
        raise MlxZipError("--model and --data go together: the data are prepared with the model's tokenizer")
    with tempfile.TemporaryDirectory(prefix="mlx_zip-bench-") as folder:
        bench = TrainingBench(args, Path(folder))
        if args.memory_of:
            print(json.dumps(bench.measure_peak_memory(args.memory_of)))
            return 0
        for name in args.only:
            record = {"step": bench.step, "prepare": bench.prepare, "memory": bench.memory, "torch": bench.torch}[
                name
            ]()
            line = {"bench": "training", "what": name, **record, "setting": bench.setting, "data": bench.data_name}
            print_record(line, "mlx", "mlx-lm")
    return 0


@dataclass(frozen=True)
class Documents:
    """Documents as base ids, the codec that compresses them, and the base ids per window (`context`)."""

    ids: list[Uint32s]
    params: CodecParams
    context: int


def synthetic_documents(length: int, context: int, merge_size: int) -> Documents:
    """Returns `length` Zipf-distributed base ids, half of them in repeated phrases, cut into documents."""
    disabled = range(VOCAB - 256, VOCAB)
    ids = synthetic_ids(length, VOCAB)
    cuts = range(DOCUMENT, len(ids), DOCUMENT)
    return Documents(np.split(ids, cuts), CodecParams(VOCAB, SLOTS, merge_size, disabled, VOCAB - 1), context)


def write_shard(folder: Path, documents: Documents, name: str = "shard-00000") -> dict[str, float]:
    """Writes documents as a shard, as `mlx_zip prepare` does, on one core; returns the seconds of each stage."""
    from mlx_zip.training.prepare.encoding import EncodedRecord, compress_window, cut_windows
    from mlx_zip.training.prepare.shards import ShardWriter

    pieces = [EncodedRecord(ids, np.ones(len(ids), np.bool_), np.ones(len(ids), np.int64), ()) for ids in documents.ids]
    times = [time.perf_counter()]
    windows = list(cut_windows(pieces, documents.context, True, ()))
    times.append(time.perf_counter())
    compressed = [compress_window(documents.params, window) for window in windows]
    times.append(time.perf_counter())
    writer = ShardWriter(folder, name)
    for (ids, mask), window in zip(compressed, windows, strict=True):
        writer.add(ids, mask, len(window.ids), window.n_bytes)
    writer.close()
    times.append(time.perf_counter())
    return dict(zip(("cut", "compress", "write"), np.diff(times).tolist(), strict=True))


def write_prepared(folder: Path, documents: Documents) -> Path:
    from mlx_zip.training.prepare.shards import make_codec_record, write_index

    write_shard(folder, documents)
    ends = np.load(folder / "shard-00000.ends.npy")
    shards = [{"name": "shard-00000", "samples": len(ends)}]
    write_index(folder, {"codec": make_codec_record(documents.params), "context": documents.context, "shards": shards})
    return folder


def read_prepared_samples(data: Path) -> Documents:
    from mlx_zip.training.prepare.shards import PreparedShards

    shards = PreparedShards(data)
    return Documents(
        list(expand_samples(shards, range(len(shards)))), replace(shards.params, start=None), shards.context
    )


def expand_samples(shards: Any, indices: Sequence[int]) -> Iterator[Uint32s]:
    for i in indices:
        book = Codebook(shards[i].params(shards.params))
        book.push(shards[i].ids)
        yield book.expand(shards[i].ids)


class TrainingBench:
    """The three measurements, on one base model and its samples. folder: where temporary data are written."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from mlx_zip.models.loading import find_model_folder, read_model_config
        from mlx_zip.training.prepare.shards import PreparedShards, can_have_entries

        self.args, self.folder = args, folder
        self.base = find_model_folder(args.model) if args.model else None
        if self.base is not None and "zip2zip" in read_model_config(self.base):
            raise MlxZipError(f"{args.model} is a zip2zip model; name the plain model that is its base")
        self.data_name = "synthetic: Zipf ids with repeated phrases, not a real text"
        if args.data is None:
            samples = 4 * args.batch_size * args.batches
            self.data = write_prepared(
                folder, synthetic_documents(samples * args.context, args.context, args.merge_size)
            )
        else:
            self.data, self.data_name = Path(args.data), Path(args.data).name
        self.shards = PreparedShards(self.data)
        if not can_have_entries(self.shards.params):
            raise MlxZipError(f"{self.data} was prepared without a codebook; there is nothing to compare")
        if (self.shards.lengths >= 2).sum() < args.batch_size * args.batches:
            raise MlxZipError(f"{self.data} has too few samples for {args.batches} batches of {args.batch_size}")

    @property
    def setting(self) -> dict[str, Any]:
        """The settings of the measurement, which its record keeps."""
        names = (
            "batch_size",
            "batches",
            "fine_tune_type",
            "lora_rank",
            "dtype",
            "compile",
            "encoder",
            "encoder_layers",
        )
        params, model = self.shards.params, self.args.model
        return {
            "model": Path(model).name if model else "small random Llama",
            "context": self.shards.context,
            "merge_size": params.merge_size,
            "codebook_size": params.codebook_size,
            **{name: getattr(self.args, name) for name in names},
        }

    # ---- a step and its parts

    def step(self) -> dict[str, Any]:
        """Measures a step and its parts; returns the record that `training_step` describes."""
        from .training_step import measure_steps

        settings = self._settings(self.args.fine_tune_type)
        models = self._model(self.shards.params), self._model(self._plain())
        return measure_steps(*models, self._samples(), self.shards.params, settings, self.args.trials).record()

    def torch(self) -> dict[str, Any]:
        """Measures steps of both engines; returns the record that `training_step` describes."""
        from mlx_zip.training.settings import EncoderOptions
        from mlx_zip.training.starting_model import make_starting_model

        from .training_step import measure_engines

        encoder = EncoderOptions(kind=self.args.encoder, num_hidden_layers=self.args.encoder_layers)

        def make() -> tuple[Any, dict[str, Any]]:
            return make_starting_model(self.base, None if self.base else SMALL, self.shards.params, encoder)

        settings = self._settings(self.args.fine_tune_type)
        return measure_engines(make, self._samples(), self.shards.params, settings, self.args.trials)

    def _samples(self) -> list[list[Any]]:
        """Returns the samples of each batch that is timed."""
        from mlx_zip.training.steps.batches import order_batches

        order = order_batches(self.shards.lengths, self.args.batch_size, 0, 0)[: self.args.batches]
        return [[self.shards[int(i)] for i in batch] for batch in order]

    def _plain(self) -> CodecParams:
        return replace(self.shards.params, codebook_size=0, start=None)

    def _model(self, params: CodecParams) -> Any:
        from mlx_zip.training.settings import EncoderOptions
        from mlx_zip.training.starting_model import make_starting_model

        encoder = EncoderOptions(kind=self.args.encoder, num_hidden_layers=self.args.encoder_layers)
        return make_starting_model(self.base, None if self.base else SMALL, params, encoder)[0]

    def _settings(self, fine_tune_type: str) -> Any:
        from mlx_zip.training.settings import TrainSettings

        args = self.args
        return TrainSettings(
            iters=args.memory_steps,
            batch_size=args.batch_size,
            optimizer="adam",
            fine_tune_type=fine_tune_type,
            lora_rank=args.lora_rank,
            dtype=args.dtype,
            compile=args.compile,
        )

    # ---- preparation

    def prepare(self) -> dict[str, Any]:
        """Measures base ids per second from tokenized documents to a shard on disk, and the time of each stage."""
        if self.args.data is None:
            documents = synthetic_documents(self.args.prepare_ids, self.shards.context, self.shards.params.merge_size)
        else:
            documents = read_prepared_samples(self.data)
        n, rates, stages = sum(map(len, documents.ids)), [], []
        for trial in range(-1, self.args.trials):
            seconds = write_shard(self.folder, documents, "shard-prepare")
            if trial >= 0:
                rates.append(n / sum(seconds.values()) / 1e6)
                stages.append({name: 1e9 * value / n for name, value in seconds.items()})
        ns = {name: summarize_samples([stage[name] for stage in stages]) for name in stages[0]}
        return {
            "unit": "million base ids/s, one core, after tokenization",
            "base_ids": n,
            "rate": summarize_samples(rates),
            "ns_per_base_id": ns,
        }

    # ---- memory

    def memory(self) -> dict[str, Any]:
        """Measures the peak memory of LoRA training, each trainer in a process of its own.

        mlx-lm reads the base ids of the same texts; "same ids" cuts each sample to as many ids as it has compressed.
        """
        peaks = {trainer: self._memory_in_new_process(trainer) for trainer in TRAINERS}
        ours, same_text, same_ids = (peaks[trainer]["peak_bytes"] for trainer in TRAINERS)
        return {
            "unit": "bytes",
            "peaks": peaks,
            "ratio": round(ours / same_text, 3),
            "ratio_same_ids": round(ours / same_ids, 3),
        }

    def _memory_in_new_process(self, trainer: str) -> dict[str, Any]:
        args = self.args
        flags = ["--memory-of", trainer]
        for name in (
            "model",
            "context",
            "merge_size",
            "batch_size",
            "batches",
            "memory_steps",
            "lora_rank",
            "dtype",
            "compile",
            "encoder",
            "encoder_layers",
        ):
            if (value := getattr(args, name)) is not None:
                flags += [f"--{name.replace('_', '-')}", str(value)]
        flags += ["--data", str(self.data)] if args.data else []
        done = subprocess.run(
            [sys.executable, "-m", "mlx_zip.bench", "training", *flags], capture_output=True, text=True
        )
        if done.returncode:
            raise MlxZipError(f"the trainer {trainer} failed: {' '.join(done.stderr.split())[-500:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def measure_peak_memory(self, trainer: str) -> dict[str, Any]:
        """Trains some steps in this process; returns its peak memory, weights included, and its longest sample."""
        import mlx.core as mx

        mx.random.seed(0)
        train: Callable[[], int] = {
            "mlx_zip": self._train_with_mlx_zip,
            "mlx-lm": self._train_with_mlx_lm,
            "mlx-lm same ids": lambda: self._train_with_mlx_lm(same_ids=True),
        }[trainer]
        with contextlib.redirect_stdout(sys.stderr):
            longest = train()
        return {"peak_bytes": mx.get_peak_memory(), "longest_ids": longest}

    def _train_with_mlx_zip(self) -> int:
        """Trains with `mlx_zip train`'s trainer; returns the ids of the longest sample."""
        from mlx_zip.training.run_data import JoinedFolders
        from mlx_zip.training.starting_model import freeze_and_add_lora
        from mlx_zip.training.steps.objective import LossWeights, Trainee
        from mlx_zip.training.trainer import Trainer

        settings, model = self._settings("lora"), self._model(self.shards.params)
        freeze_and_add_lora(model, settings)
        trainee, data = Trainee(model, LossWeights()), JoinedFolders([self.data])
        Trainer(trainee, data, settings, self.folder, "", quiet=True).train()
        return int(self.shards.lengths.max())

    def _train_with_mlx_lm(self, same_ids: bool = False) -> int:
        """Trains with mlx-lm's trainer on the samples' base ids, in our dtype; returns the longest sample's ids.

        same_ids: cut each sample to as many base ids as it has compressed ids.
        """
        import mlx.optimizers as optim
        from mlx_lm.tuner.trainer import TrainingArgs, train

        from mlx_zip.training.starting_model import freeze_and_add_lora

        model = self._model(self._plain())
        freeze_and_add_lora(model, self._settings("lora"))
        ids = list(expand_samples(self.shards, range(len(self.shards))))
        if same_ids:
            ids = [row[:n] for row, n in zip(ids, self.shards.lengths.tolist(), strict=True)]
        longest = max(map(len, ids))
        arguments = TrainingArgs(
            batch_size=self.args.batch_size,
            iters=self.args.memory_steps,
            max_seq_length=longest,
            adapter_file=str(self.folder / "adapters.safetensors"),
        )
        train(model, optim.Adam(learning_rate=3e-4), [(row.tolist(), 0) for row in ids], None, arguments)
        return longest
