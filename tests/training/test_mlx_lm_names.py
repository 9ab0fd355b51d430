"""mlx-lm's names of training settings: translated to ours, or refused by name with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from mlx_lm import lora

from mlx_zip.cli import command_parser, main
from mlx_zip.cli import training as command
from mlx_zip.errors import TrainingError
from mlx_zip.training import trainer
from mlx_zip.training.mlx_lm_names import translate_mlx_lm_names
from mlx_zip.training.settings import RunOptions, TrainSettings

EXAMPLE = {  # mlx-lm's own lora_config.yaml
    "model": "Qwen/Qwen3-0.6b",
    "train": True,
    "fine_tune_type": "lora",
    "optimizer": "adamw",
    "data": "prepared",
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "save_every": 100,
    "test": False,
    "test_batches": 100,
    "max_seq_length": 2048,
    "grad_checkpoint": False,
    "lora_parameters": {"keys": ["self_attn.q_proj", "self_attn.v_proj"], "rank": 8, "scale": 20.0, "dropout": 0.0},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks of `train`, which does nothing."""
    seen: dict[str, Any] = {}

    def look(options: RunOptions, settings: TrainSettings) -> Any:
        seen["options"], seen["settings"] = options, settings
        return trainer.Outcome(trainer.Progress())

    monkeypatch.setattr("mlx_zip.training.run.train", look)
    return seen


def test_every_flag_and_every_default_of_mlx_lm_is_known_here():
    ours = {flag for action in command_parser("train", "train")._actions for flag in action.option_strings}
    theirs = {flag for action in lora.build_parser()._actions for flag in action.option_strings}
    assert theirs <= ours
    known = {*command._SETTINGS, *command._KINDS, *command._FOLDERS, *command.MLX_LM_NAMES, "config"}
    assert lora.CONFIG_DEFAULTS.keys() <= known


def test_mlx_lms_example_file_is_translated(tmp_path, asked):
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(EXAMPLE))
    assert main(["train", "-c", str(tmp_path / "lora.yaml")]) == 0
    found, made = asked["settings"], asked["options"]
    assert (found.lora_layers, found.lora_rank, found.lora_scale, found.learning_rate) == (16, 8, 20.0, 1e-5)
    assert found.lora_keys == "self_attn.q_proj,self_attn.v_proj"
    assert (made.out, made.save, made.max_seq_length) == (Path("adapters"), "adapter", 2048)


@pytest.mark.parametrize(
    ("lines", "flags", "found"),
    [
        ({"num_layers": 16}, ["--lora-layers", "4"], {"lora_layers": 4}),
        ({"lora_layers": 16}, ["--num-layers", "4"], {"lora_layers": 4}),
        ({"lora_parameters": {"rank": 8, "scale": 2.0}}, ["--lora-rank", "16"], {"lora_rank": 16, "lora_scale": 2.0}),
        (
            {"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 20, 1e-6]}},
            ["--learning-rate", "0.5", "--iters", "20"],
            {"learning_rate": 0.5, "min_learning_rate": 1e-6, "iters": 20},
        ),
        ({"num_layers": 16}, ["--fine-tune-type", "lora"], {"lora_layers": 16}),
    ],
    ids=str,
)
def test_a_flag_takes_precedence_over_a_file_by_whichever_name(lines, flags, found, tmp_path, asked):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(lines))
    basics = ["--model", "m", "--data", "d", "--out", "o"]
    assert main(["train", "-c", str(tmp_path / "c.yaml"), *basics, *flags]) == 0
    assert {name: getattr(asked["settings"], name) for name in found} == found


def test_out_takes_precedence_over_a_files_adapter_path(tmp_path, asked):
    (tmp_path / "c.yaml").write_text("adapter_path: adapters")
    assert main(["train", "-c", str(tmp_path / "c.yaml"), "--model", "m", "--data", "d", "--out", "o"]) == 0
    assert (asked["options"].out, asked["options"].save) == (Path("o"), "adapter")


def test_the_flags_go_by_mlx_lms_names_too(asked):
    flags = ["--model", "m", "--data", "d", "--adapter-path", "o", "--num-layers", "3", "--max-seq-length", "128"]
    more = ["--mask-prompt", "--val-batches", "-1", "--train"]
    assert main(["train", *flags, *more]) == 0
    assert (asked["settings"].lora_layers, asked["settings"].val_batches) == (3, 0)
    made = asked["options"]
    assert (made.max_seq_length, made.mask_prompt) == (128, True)


def test_a_cosine_schedule_is_ours_when_it_ends_with_the_run():
    schedule = {"name": "cosine_decay", "warmup": 100, "arguments": ["1e-4", 900, "1e-6"]}
    found = translate_mlx_lm_names({"lr_schedule": schedule, "iters": 1000, "learning_rate": 1.0})
    assert found == {"iters": 1000, "learning_rate": 1e-4, "min_learning_rate": 1e-6, "warmup": 100}


def test_an_optimizers_options_are_taken_where_they_are_ours():
    config = {"adamw": {"weight_decay": 0.05, "betas": [0.9, 0.95]}, "adam": {"eps": 1.0}}
    assert translate_mlx_lm_names({"optimizer": "adamw", "optimizer_config": config}) == {
        "optimizer": "adamw",
        "weight_decay": 0.05,
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"resume_adapter_file": "a.safetensors"}, r"resume_adapter_file .*mlx_lm\.fuse"),
        ({"test": True}, r"test of mlx-lm: .*mlx_zip evaluate"),
        ({"train": False}, "train of mlx-lm: this command always trains"),
        ({"fine_tune_type": "dora"}, "dora .*use lora"),
        ({"fine_tune_type": "full", "num_layers": 4}, "num_layers .*full trains all"),
        ({"num_layers": 4, "lora_layers": 4}, "num_layers .* and lora_layers name one setting"),
        ({"adapter_path": "a", "out": "b"}, "adapter_path .* and out name one setting"),
        ({"clear_cache_threshold": "1GB"}, "clear_cache_threshold .*--batch-size"),
        ({"trust_remote_code": True}, "trust_remote_code .*mlx_zip prepare"),
        ({"report_to": "wandb"}, "report_to of mlx-lm: OUT/metrics.jsonl .*--plot"),
        ({"project_name": "p"}, "project_name .*report_to, which is refused"),
        ({"hf_dataset": {"path": "a/b"}}, "hf_dataset .*mlx_zip prepare"),
        ({"prompt_feature": "question"}, "prompt_feature .*--columns"),
        ({"optimizer": "adam", "optimizer_config": {"adam": {"betas": [0.9, 0.98]}}}, "betas of adam cannot be set"),
        ({"lr_schedule": {"name": "exponential_decay", "arguments": [1.0, 2.0]}}, "only cosine_decay"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1.0, 10]}, "iters": 20}, "its 10 steps are not"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1.0, 10], "warmup_init": 0.1}}, "warmup_init"),
        ({"lora_parameters": {"alpha": 3}}, "lora_parameters .*unknown alpha"),
        ({"optimizer_config": {"adamw": 5}}, "optimizer_config of mlx-lm: adamw must be a mapping, got 5"),
        ({"optimizer_config": {"adamw": [1]}}, r"optimizer_config .*: adamw must be a mapping, got \[1\]"),
        (
            {"lr_schedule": {"name": "cosine_decay", "warmup": "x", "arguments": [1.0, 10]}},
            "lr_schedule of mlx-lm: warmup must be a whole number, got 'x'",
        ),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused_by_name(values, reason):
    with pytest.raises(TrainingError, match=reason):
        translate_mlx_lm_names(values)


def test_a_zero_in_lora_parameters_is_passed_on_and_nothing_is_not():
    given = {"rank": 0, "scale": 0.0, "dropout": None, "keys": []}
    assert translate_mlx_lm_names({"lora_parameters": given}) == {"lora_rank": 0, "lora_scale": 0.0}


def test_a_misspelled_name_is_answered_with_the_nearest_one(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("num_layer: 3")
    assert main(["train", "-c", str(tmp_path / "c.yaml")]) == 2
    assert "unknown num_layer; did you mean num_layers?" in capsys.readouterr().err
