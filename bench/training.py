"""Measures a training step, a step without hypertokens, the encoders alone, and steps of both training engines.

Without --model and --data, a small decoder with random weights reads synthetic ids: enough to check that everything
runs and roughly where the time goes. Figures for publication need a real model and prepared text.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.codec import CodecParams
from mlx_zip.errors import MlxZipError

from .codec import synthetic_ids
from .recording import print_record

PARTS = ("step", "torch")
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
        default=["step"],
        help="parts of the bench to run; torch: steps of --engine torch and of MLX, and the machine's products "
        "(default: step)",
    )
    add("--context", type=int, default=256, help="number of base ids per synthetic sample (default: 256)")
    add("--merge-size", type=int, default=3, help="maximum base ids per hypertoken of synthetic samples (default: 3)")
    add("--batch-size", type=int, default=4, help="number of samples per training step (default: 4)")
    add(
        "--batches",
        type=int,
        default=3,
        help="number of different batches that the timed steps use in turn (default: 3)",
    )
    add("--trials", type=int, default=9, help="number of timed runs per measurement (default: 9)")
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


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per part and returns 0. Raises `MlxZipError` if the flags, model or data cannot be used."""
    check_flags_at_least(args, 1, "context", "batch_size", "batches", "trials")
    if (args.model is None) != (args.data is None):
        raise MlxZipError("--model and --data go together: the data are prepared with the model's tokenizer")
    with tempfile.TemporaryDirectory(prefix="mlx_zip-bench-") as folder:
        bench = TrainingBench(args, Path(folder))
        for name in args.only:
            record = {"step": bench.step, "torch": bench.torch}[name]()
            line = {"bench": "training", "what": name, **record, "setting": bench.setting, "data": bench.data_name}
            print_record(line)
    return 0


def write_synthetic(folder: Path, length: int, context: int, merge_size: int) -> Path:
    """Writes `length` Zipf-distributed base ids, half of them in repeated phrases, in the format of `mlx_zip prepare`.

    The ids form documents of `DOCUMENT` base ids, which are joined and cut into windows of `context`. Returns `folder`.
    """
    from mlx_zip.training.prepare.encoding import EncodedRecord, compress_window, cut_training_windows
    from mlx_zip.training.prepare.shards import make_codec_record, write_index, write_shard

    params = CodecParams(VOCAB, SLOTS, merge_size, range(VOCAB - 256, VOCAB), VOCAB - 1)
    documents = np.split(synthetic_ids(length, VOCAB), range(DOCUMENT, length, DOCUMENT))
    pieces = [EncodedRecord(ids, np.ones(len(ids), np.bool_), np.ones(len(ids), np.int64), ()) for ids in documents]
    samples = [compress_window(params, window) for window in cut_training_windows(pieces, context, True, ())]
    shards = [write_shard(folder, "shard-00000", samples)]
    write_index(folder, {"codec": make_codec_record(params), "context": context, "shards": shards})
    return folder


class TrainingBench:
    """Measures training steps of one base model on prepared or synthetic samples. folder: for synthetic samples."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from mlx_zip.models.loading import find_model_folder, read_model_config
        from mlx_zip.training.prepare.shards import PreparedShards, can_have_entries

        self.args = args
        self.base = find_model_folder(args.model) if args.model else None
        if self.base is not None and "zip2zip" in read_model_config(self.base):
            raise MlxZipError(f"{args.model} is a zip2zip model; name the plain model that is its base")
        self.data_name = "synthetic: Zipf ids with repeated phrases, not a real text"
        if args.data is None:
            samples = 4 * args.batch_size * args.batches
            data = write_synthetic(folder, samples * args.context, args.context, args.merge_size)
        else:
            data, self.data_name = Path(args.data), Path(args.data).name
        self.shards = PreparedShards(data)
        if not can_have_entries(self.shards.params):
            raise MlxZipError(f"{data} was prepared without a codebook; there is nothing to compare")
        if (self.shards.lengths >= 2).sum() < args.batch_size * args.batches:
            raise MlxZipError(f"{data} has too few samples for {args.batches} batches of {args.batch_size}")

    @property
    def setting(self) -> dict[str, Any]:
        """The settings of the measurement, for the record."""
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
        """Measures a step and its unavoidable work; returns the record of `measure_steps`."""
        from .training_step import measure_steps

        without = replace(self.shards.params, codebook_size=0, start=None)
        zipped, plain = (self._make(params)[0] for params in (self.shards.params, without))
        return measure_steps(
            zipped, plain, self._load_samples(), self.shards.params, self._train_settings(), self.args.trials
        )

    def torch(self) -> dict[str, Any]:
        """Measures steps of both training engines, MLX and PyTorch; returns the record of `measure_engines`."""
        from .training_step import measure_engines

        make = partial(self._make, self.shards.params)
        return measure_engines(make, self._load_samples(), self.shards.params, self._train_settings(), self.args.trials)

    def _load_samples(self) -> list[list[Any]]:
        from mlx_zip.training.steps.batches import order_batches

        order = order_batches(self.shards.lengths, self.args.batch_size, 0, 0)[: self.args.batches]
        return [[self.shards[int(i)] for i in batch] for batch in order]

    def _make(self, params: CodecParams) -> tuple[Any, dict[str, Any]]:
        """Returns a new model and its config.json."""
        from mlx_zip.training.settings import EncoderOptions
        from mlx_zip.training.starting_model import make_starting_model

        encoder = EncoderOptions(kind=self.args.encoder, num_hidden_layers=self.args.encoder_layers)
        return make_starting_model(self.base, None if self.base else SMALL, params, encoder)

    def _train_settings(self) -> Any:
        from mlx_zip.training.settings import TrainSettings

        args = self.args
        return TrainSettings(
            iters=1,
            batch_size=args.batch_size,
            optimizer="adam",
            fine_tune_type=args.fine_tune_type,
            lora_rank=args.lora_rank,
            dtype=args.dtype,
            compile=args.compile,
        )
