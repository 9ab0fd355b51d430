"""Defines all settings of the recipe. `FULL` makes the bundled models; `TINY` runs all stages in seconds, for tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

Flags = Mapping[str, Any]  # flags of a command, without dashes


class Texts(NamedTuple):
    """Numbers of texts. conversations: those with several turns. asked: conversations with one turn."""

    stories: int
    conversations: int
    asked: int = 0


@dataclass(frozen=True)
class Round:
    """One training run with packs, and one run of the control on the same texts.

    prefix: beginning of the names of the round's texts and runs. empty: number of texts for windows that begin without
    a pack. own: number of texts for windows that begin with the model's own pack. drawn: number of texts, per other
    pack, for windows that begin with that pack. packed, control: flags of `mlx_zip train` for the model and the
    control.
    """

    prefix: str
    empty: Texts
    own: Texts
    drawn: Texts
    packed: Flags
    control: Flags


@dataclass(frozen=True)
class PackSettings:
    """Packs, and the training with them.

    codec: codec flags of the model with packs. size: number of entries in the model's own pack. sizes: per other pack,
    the number of entries that each sample draws from the pack. unseen: sizes of packs that are used for measuring but
    not for training. window: number of base ids that are compressed separately while packs are learned. learn_own,
    learn, learn_unseen: numbers of texts to learn the model's own pack, each other pack and the unseen packs from;
    packs of `large` entries or more are learned from twice `learn`. rounds: training runs in order, each with its own
    texts. tune: flags of `mlx_zip vocab pack tune`.
    """

    codec: Flags
    size: int
    sizes: tuple[int, ...]
    unseen: tuple[int, ...]
    window: int
    large: int
    learn_own: Texts
    learn: Texts
    learn_unseen: Texts
    rounds: tuple[Round, ...]
    tune: Flags


@dataclass(frozen=True)
class Settings:
    """All settings of the recipe.

    vocab_size: number of tokens of the tokenizer. model: config.json of the base. short, long: base ids per window in
    the base's first stage and in all later training. repeats: how often the training text repeats each story of a file
    (once for files that are not named). asked, conversations: maximum number of conversations with one turn (for the
    base's first stage) and with several turns. requests: number of test requests. test_turns: number of the turn that
    is measured besides the first. codec: codec flags of the zip2zip model. base, chat: flags of `mlx_zip train` for the
    base's first and second stage. extra: flags of `mlx_zip train` for the zip2zip model and the control. encoder: flags
    of the hyper-encoder. packs: settings of the further training of these two models with packs. head: flags of
    `mlx_zip train --draft-head` for the bundled model's draft head. bits: bits per bundled weight. validation: number
    of stories on which bits per byte are measured during training. measure: flags of `mlx_zip evaluate`. protect:
    tokens that never merge. shard_samples: samples per file of prepared data. workers: processes of `mlx_zip prepare`;
    None: the command's default. temperatures: temperatures of the measured generation. bundled: name of a bundled model
    -> its training run.
    """

    vocab_size: int
    model: Flags
    short: int
    long: int
    repeats: Mapping[str, int]
    asked: int
    conversations: int
    requests: int
    test_turns: int
    codec: Flags
    base: Flags
    chat: Flags
    extra: Flags
    encoder: Flags
    packs: PackSettings
    head: Flags
    bits: int
    validation: int
    measure: Flags
    seed: int = 0
    protect: str = "digits"
    shard_samples: int = 2048
    workers: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    bundled: Mapping[str, str] = field(
        default_factory=lambda: {"stories": "asked-packed", "stories-base": "asked-packed-control"}
    )

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all settings. A folder with results of a different fingerprint is refused."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


_FURTHER = {
    "iters": 320,
    "fine_tune_type": "full",
    "optimizer": "muon",
    "muon_learning_rate": 0.01,
    "learning_rate": 1.5e-3,
    "min_learning_rate": 3e-5,
    "warmup": 20,
    "steps_per_eval": 100,
    "val_batches": 4,
    "save_every": 25,
}
_MORE = {
    **_FURTHER,
    "iters": 400,
    "muon_learning_rate": 7e-3,
    "learning_rate": 1e-3,
    "min_learning_rate": 2e-5,
    "warmup": 10,
    "save_every": 30,
}
_LAST = {**_MORE, "iters": 490, "save_every": 50}
_WHOLE = {"batch_size": 32}
_PARTS = {"batch_size": 8, "grad_accumulation_steps": 4}  # uncompressed windows are longer

FULL = Settings(
    vocab_size=2048,
    model={
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
    short=256,
    long=1024,
    repeats={"t1.train": 3, "real.train": 3},
    asked=16_000,
    conversations=12_000,
    requests=200,
    test_turns=3,
    codec={"merge_size": 3, "codebook_size": 2048},
    base={
        "iters": 1100,
        "batch_size": 32,
        "fine_tune_type": "full",
        "optimizer": "muon",
        "muon_learning_rate": 0.02,
        "learning_rate": 3e-3,
        "min_learning_rate": 1.5e-4,
        "warmup": 50,
        "steps_per_eval": 100,
        "val_batches": 4,
        "save_every": 50,
    },
    chat={
        "iters": 350,
        "batch_size": 8,
        "fine_tune_type": "full",
        "optimizer": "muon",
        "muon_learning_rate": 0.014,
        "learning_rate": 2e-3,
        "min_learning_rate": 4e-5,
        "warmup": 10,
        "steps_per_eval": 100,
        "val_batches": 8,
        "save_every": 50,
    },
    extra={
        "iters": 600,
        "batch_size": 8,
        "fine_tune_type": "full",
        "optimizer": "muon",
        "muon_learning_rate": 0.01,
        "learning_rate": 1.8e-3,
        "min_learning_rate": 3.6e-5,
        "warmup": 10,
        "steps_per_eval": 100,
        "val_batches": 8,
        "save_every": 50,
    },
    encoder={"encoder": "res_latent_attn", "encoder_size": 128, "encoder_layers": 2, "encoder_heads": 4},
    packs=PackSettings(
        codec={"merge_size": 4, "codebook_size": 4096},
        size=1536,
        sizes=(256, 384, 512, 768, 1024, 1024, 1536, 1536, 2048, 2048, 3072, 4096),
        unseen=(256, 1024, 4096),
        window=256,
        large=2048,
        learn_own=Texts(6000, 600),
        learn=Texts(1000, 100),
        learn_unseen=Texts(3000, 300),
        rounds=(
            Round(
                prefix="",
                empty=Texts(3072, 768),
                own=Texts(4916, 1229),
                drawn=Texts(358, 90),
                packed={**_FURTHER, **_WHOLE},
                control={**_FURTHER, **_PARTS},
            ),
            Round(
                prefix="more-",
                empty=Texts(2600, 1240),
                own=Texts(5880, 2760),
                drawn=Texts(390, 170),
                packed={**_MORE, **_WHOLE, "canonical": True},
                control={**_MORE, **_PARTS},
            ),
            Round(
                prefix="asked-",
                empty=Texts(1100, 0, 1800),
                own=Texts(2650, 383, 5600),
                drawn=Texts(146, 0, 217),
                packed={**_LAST, **_WHOLE, "canonical": True},
                control={**_LAST, **_PARTS},
            ),
        ),
        tune={
            "iters": 400,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "min_learning_rate": 5e-5,
            "warmup": 10,
            "context": 1024,
            "save_dtype": "float16",
        },
    ),
    head={
        "iters": 200,
        "batch_size": 16,
        "optimizer": "muon",
        "muon_learning_rate": 0.02,
        "learning_rate": 3e-3,
        "min_learning_rate": 1e-4,
        "warmup": 8,
        "steps_per_eval": 50,
        "val_batches": 3,
        "save_every": 10,
    },
    bits=8,
    validation=200,
    measure={"batch_size": 16, "max_tokens": 320},
)

_FEW = {"iters": 4, "batch_size": 4, "warmup": 1, "steps_per_report": 2, "steps_per_eval": 4, "val_batches": 1}


def _shrink_texts(texts: Texts) -> Texts:
    return Texts(4, min(texts.conversations, 1), min(texts.asked, 1))


TINY = replace(
    FULL,
    vocab_size=320,
    model={
        **FULL.model,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    },
    short=32,
    long=96,
    asked=8,
    conversations=16,
    requests=4,
    test_turns=2,
    validation=4,
    shard_samples=16,
    workers=1,
    codec={"merge_size": 3, "codebook_size": 64},
    base={**FULL.base, **_FEW},
    chat={**FULL.chat, **_FEW},
    extra={**FULL.extra, **_FEW},
    encoder={**FULL.encoder, "encoder_size": 32, "encoder_layers": 1},
    packs=PackSettings(
        codec={"merge_size": 4, "codebook_size": 96},
        size=24,
        sizes=(8, 16),
        unseen=(8,),
        window=64,
        large=16,
        learn_own=Texts(6, 1),
        learn=Texts(4, 1),
        learn_unseen=Texts(4, 1),
        rounds=tuple(
            replace(
                found,
                empty=_shrink_texts(found.empty),
                own=_shrink_texts(found.own),
                drawn=_shrink_texts(found.drawn),
                packed={**found.packed, **_FEW},
                control={**found.control, **_FEW, "grad_accumulation_steps": 1},
            )
            for found in FULL.packs.rounds
        ),
        tune={**FULL.packs.tune, "iters": 4, "batch_size": 2, "warmup": 1, "context": 96},
    ),
    head={**FULL.head, **_FEW},
    measure={"batch_size": 4, "max_tokens": 12},
)

SCALES = {"full": FULL, "tiny": TINY}

# Plain models that are smaller than the base, name -> what differs in config.json. They are no part of `Settings`,
# whose fingerprint says what made the bundled models.
SMALLER: dict[str, Flags] = {
    "1m": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 320,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "2m": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "3m": {"num_hidden_layers": 4, "intermediate_size": 512},
}
