"""Makes the first part of the recipe: texts, tokenizer, windows, base, zip2zip model and control, all without packs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_zip.files import atomic_folder, write_json

from .commands import Recipe
from .lexicon import learn_lexicon
from .requests import make_conversations, make_request, write_jsonl
from .texts import SOURCES, read_stories

TRAIN_SETS = ("t1.train", "mixed.train", "real.train")
TEXTS = {"train", "valid", "t1.test", "real.test"}  # texts/NAME.jsonl
UNK, BOS, EOS, PAD, USER, ASSISTANT = "<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"
SPECIALS = [UNK, BOS, EOS, PAD, USER, ASSISTANT]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|assistant|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('the stories model knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}"
)


def make_texts(recipe: Recipe) -> None:
    """Writes texts/: shuffled training stories, test stories, conversations and test requests.

    asked.jsonl holds the conversations with one turn.
    """
    if (recipe.out / "texts").exists():
        return
    settings, stories = recipe.settings, read_stories(recipe.data, recipe.check)
    once = stories["t1.train"] + stories["mixed.train"]  # sampled stories without repeats
    lexicon = learn_lexicon(once, rare=8 if len(once) > 1000 else 2)
    rng = random.Random(settings.seed)
    repeated = {name: stories[name] * settings.repeats.get(name, 1) for name in TRAIN_SETS}
    sampled = repeated["t1.train"] + repeated["mixed.train"]
    train = sampled + repeated["real.train"]
    rng.shuffle(train)
    with atomic_folder(recipe.out / "texts") as folder:
        tests = {
            "valid": stories["t1.test"][: settings.validation],
            "t1.test": stories["t1.test"],
            "real.test": stories["real.test"],
        }
        for name, texts in {"train": train, **tests}.items():
            write_jsonl(folder / f"{name}.jsonl", ({"text": text} for text in texts))
        for name, turns, limit in (("asked", 1, settings.asked), ("conversations", None, settings.conversations)):
            talks = make_conversations(sampled, lexicon, settings.seed, turns, limit)
            write_jsonl(folder / f"{name}.jsonl", talks)
        requests = (make_request(story, lexicon, rng) for story in stories["t1.test"][: settings.requests])
        write_jsonl(folder / "requests.jsonl", ({"messages": [{"role": "user", "content": r}]} for r in requests))


def make_tokenizer(recipe: Recipe) -> None:
    """Learns a tokenizer from the training stories, each taken once, in file order, and writes tokenizer/."""
    if (recipe.out / "tokenizer").exists():
        return
    texts = [text for name in TRAIN_SETS for text in SOURCES[name].stories(recipe.data, recipe.check)]
    with atomic_folder(recipe.out / "tokenizer") as folder:
        settings = recipe.settings
        train_tokenizer(texts, folder, settings.vocab_size, settings.model["max_position_embeddings"])


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int, context: int) -> None:
    """Learns a tokenizer of `vocab_size` tokens from texts and writes its files into `folder`.

    A space belongs to the following word and is never added or dropped, so decoding returns the exact text. Characters
    that the learned tokens cannot spell are spelled in bytes. Each digit is a token, so that digits can be protected.
    context: the model's number of positions.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=True),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*SPECIALS, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_without_special_bytes(tokenizer),
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _without_special_bytes(tokenizer: Any) -> Any:
    """Returns a copy of a tokenizer in which byte tokens are ordinary tokens and each text begins with `BOS`.

    If byte tokens were special, a text that contains "<0x41>" would be encoded as that byte token.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, sequence],
        "pair": [bos, sequence, sequence],
        "special_tokens": {BOS: {"id": BOS, "ids": [SPECIALS.index(BOS)], "tokens": [BOS]}},
    }
    return Tokenizer.from_str(json.dumps(state))


# ---- preparing

PLAIN = {"codebook_size": 0, "merge_size": 1}
WINDOWS = {  # kind of windows -> {NAME: file in texts/ from which prepared/KIND-NAME is made}
    "short": {"train": "train", "chat": "asked", "valid": "valid"},
    "long": {"train": "train", "chat": "conversations", "valid": "valid"},
    "compressed": {"train": "train", "chat": "conversations", "valid": "valid"},
}


def list_window_folders(kind: str) -> dict[str, str]:
    """Returns folder -> text file for a kind of windows (a key of `WINDOWS`). The validation folder is the last."""
    return {f"prepared/{kind}-{what}": f"texts/{text}.jsonl" for what, text in WINDOWS[kind].items()}


def make_windows(recipe: Recipe, kind: str) -> None:
    """Prepares all folders of a kind of windows (a key of `WINDOWS`) with `mlx_zip prepare`."""
    settings = recipe.settings
    codec = settings.codec if kind == "compressed" else PLAIN
    context = settings.short if kind == "short" else settings.long
    fixed = {
        "tokenizer": "tokenizer",
        "context": context,
        "shard_samples": settings.shard_samples,
        "protect": settings.protect,
        "workers": settings.workers,
        "fill_windows": kind == "short",
    }
    for folder, text in list_window_folders(kind).items():
        recipe.run_mlx_zip("prepare", {**fixed, "data": text, "out": folder, **codec})


# ---- training


def train_on_windows(
    recipe: Recipe, name: str, kind: str, start: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Trains on the windows of a kind with `mlx_zip train` and writes the run to runs/NAME.

    start: flags that choose the initial weights. settings: further flags of `mlx_zip train`.
    """
    *data, valid = list_window_folders(kind)
    fixed = {"data": data, "valid": valid, "out": f"runs/{name}", "seed": recipe.settings.seed}
    recipe.run_mlx_zip("train", {**start, **fixed, **settings})


def model_path(run: str) -> str:
    """Returns the path of a training run's model, relative to the `out` folder."""
    return f"runs/{run}/model"


def train_base(recipe: Recipe) -> None:
    """Trains the base's first stage, from random weights."""
    write_json(recipe.out / "base.json", dict(recipe.settings.model))
    start = {"from_scratch": "base.json", "tokenizer": "tokenizer"}
    train_on_windows(recipe, "base-short", "short", start, recipe.settings.base)


def train_chat(recipe: Recipe) -> None:
    """Trains the base's second stage, on long windows of stories and conversations."""
    train_on_windows(recipe, "base", "long", {"model": model_path("base-short")}, recipe.settings.chat)


def train_zip(recipe: Recipe) -> None:
    """Trains all weights of the zip2zip model, which is the base with new hyper-encoders."""
    train_on_windows(
        recipe, "zip", "compressed", {"model": model_path("base")}, {**recipe.settings.extra, **recipe.settings.encoder}
    )


def train_control(recipe: Recipe) -> None:
    """Trains the control: the base, with as many steps as the zip2zip model, on the same text uncompressed."""
    train_on_windows(recipe, "control", "long", {"model": model_path("base")}, recipe.settings.extra)
