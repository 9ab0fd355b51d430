"""Shared by the tests of bench generate, report and profile: tiny models in both forms, made-up records."""

from __future__ import annotations

import argparse
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_zip.bench import machine
from mlx_zip.bench import recording as record_fields
from mlx_zip.bench.__main__ import BENCHES
from mlx_zip.bench.engines import model_making as shapes
from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.bench.generation import batch
from mlx_zip.bench.generation.generate_record import (
    SCHEMA,
    average_step_bytes,
    ceiling_record,
    sum_counts,
    summarize_figures,
)
from mlx_zip.bench.papers import EXPERIMENTS
from support import tiny, tiny_text

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4160,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ON = ["--shape", "tiny", "--encoder-layers", "1", "--codebook-size", "64"]


def models(seed: int = 0, **changes: Any) -> Models:
    """A tiny random model with and without hypertokens, with clearly different logits, and a tokenizer of bytes."""
    zipped = tiny.tiny_model("llama", seed=seed, **changes)
    return Models(
        name="tiny",
        precision="as stored",
        weights="random",
        base_config=zipped.args.decoder_config,
        tokenizer=tiny_text.byte_level(),
        plain=shapes.decoder_copier(zipped),
        zipped=lambda: zipped,
    )


def parse(bench: str, *flags: object) -> tuple[ModuleType, argparse.Namespace]:
    """Returns a bench's module and its parsed flags."""
    module, parser = import_module((BENCHES | EXPERIMENTS)[bench][0]), argparse.ArgumentParser()
    module.add_arguments(parser)
    return module, parser.parse_args([*map(str, flags)])


def run(bench: str, *flags: object) -> int:
    """Runs a bench on these flags."""
    module, args = parse(bench, *flags)
    return record_fields.run_bench(module.run, args)


def small(monkeypatch: Any) -> None:
    """Adds a shape named `tiny`, makes the bandwidth measurement small, and skips waiting for the load."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(machine, "BANDWIDTH_SIDE", 64)
    monkeypatch.setattr(record_fields, "IDLE_S", 0.01)


def made_run(step_s: float = 0.1, steps: int = 4, first_s: float = 0.5, per_step: int = 1) -> Run:
    """A made-up run: first_s seconds to the first id, then step_s per step of per_step base tokens (2 bytes each)."""
    made = Run(prompt_ids=6, text_bytes=2 * steps * per_step, kv_ids=6 + steps, peak_bytes=1000, prompt_tokens=8)
    for i in range(steps):
        made.step(first_s + i * step_s, [i], range(per_step))
    return made


def record(engine: str = "mlx-lm", steps_s: tuple[float, ...] = (0.1, 0.11, 0.12), **changes: Any) -> dict[str, Any]:
    """A record as `bench generate` prints it, of a trial per time in steps_s. changes: its sections, or fields of the
    workload.
    """
    per_step = 2 if "zip" in engine else 1
    runs = [made_run(step, per_step=per_step) for step in steps_s]
    step_bytes = [average_step_bytes(1000, 10, one) for one in runs]
    workload = {"domain": "code", "data": "a.txt", "window": 0, "turn": 0, "turns": 1, "prompt_tokens": 8, "tokens": 4}
    workload |= {name: changes.pop(name) for name in list(changes) if name in {*workload, "conversations"}}
    return {
        "bench": "generate",
        "schema": SCHEMA,
        "run": "a",
        "time": "2026-01-02T03:04:05+00:00",
        "engine": engine,
        "mode": "replay",
        "model": {"name": "tiny", "precision": "float32", "weights": "random"},
        "workload": workload,
        "setting": {"trials": len(runs), "warmup": 1, "rows": "warm", "draft": 10},
        "counts": sum_counts(runs[:1]),
        "figures": summarize_figures(runs, step_bytes, 1e6),
        "ceiling": ceiling_record(step_bytes, 1e6),
        "energy_source": None,
        "device": {"device": "Device(cpu, 0)", "chip": "a chip", "threads": {}},
        "machine": "Linux, a chip, 2 cores",
        "python": "3.11.7",
        "versions": {"mlx": "0.32.4"},
        "commit": "abc",
        "load_average": 0.1,
        "idle_share": 0.95,
        "preloaded": [],
        "blas": ["libblas.so"],
        **changes,
    }


def batch_record() -> dict[str, Any]:
    """A record as `bench batch` prints it, of two equal trials of each way."""
    rates = {(kind, way): [1.0, 1.0] for kind in ("base", "zip") for way in ("one_stream", "batch")}
    return {
        "model": {"zip": "stories", "base": "stories-base", "precision": "as stored"},
        "setting": {"requests": 8, "rows": "cold", "trials": 2},
        "figures": {"whole": batch.throughput_figures(rates)},
        "preloaded": ["libopenblas.so.0"],
        "blas": ["libblas.so"],
    }
