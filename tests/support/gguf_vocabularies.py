"""Vocabularies for GGUF files, made from a short text: byte-level merges, and pieces with scores."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

LANGUAGES = (
    "The quick brown fox isn't quick today; it'll sleep for 1234 hours. THE END!  Two  spaces\n\n\nand\tlines.",
    "Der Straßenverkäufer zählte 56 Äpfel, 7,5 Öre und übte fröhlich das Grüßen — „Guten Tag!“",
    "Съешь же ещё этих мягких французских булок, да выпей чаю в 2024 году.",
    "东京的天气很好，今天是12月3日。我们去公园吧！ こんにちは、世界。",
    "أهلا بالعالم، العدد هو ٤٢ وليس ١٢٣.",
    "def f(x: int) -> str:\n    if x >= 10:\n        return f'{x!r} == {x**2}'\n\treturn \"naïve\"  # \U0001f600\r\n",
)
TEXT = "\n".join(LANGUAGES)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@cache
def _trained(byte_level: bool, size: int) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The tokens and merges of a vocabulary learned from `TEXT`."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet = []
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple(map(tuple, model["merges"]))


def byte_level(pre: str = "gpt-2", size: int = 380, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with ChatML's tokens, one token of the user's, and two unused ones."""
    tokens, merges = _trained(True, size)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    every = [*special, *tokens, "<think>", "[PAD1]", "[PAD2]"]
    kinds = [CONTROL] * 3 + [NORMAL] * len(tokens) + [USER, UNUSED, UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": every,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def pieces(size: int = 300, gemma: bool = False, **more: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of pieces with scores, in the order of Llama's or Gemma's special tokens."""
    tokens, _ = _trained(False, size)
    front = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    kinds = [UNKNOWN if one == "<unk>" else CONTROL for one in front]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    spaces = ["  ", "   ", "    "] if gemma else []  # llama.cpp writes Gemma's pieces of spaces with real spaces
    merged = [token for token in tokens if len(token) > 1]
    letters = [token for token in tokens if len(token) == 1]
    back = ["<end_of_turn>", "<mine>"]
    every = [*front, *single, *spaces, *merged, *letters, *back]
    kinds += [BYTE] * 256 + [USER] * len(spaces) + [NORMAL] * (len(merged) + len(letters)) + [CONTROL, USER]
    plain = [0.0] * (len(front) + 256) + [-1000.0] * len(spaces)
    scores = [*plain, *(-float(i) for i in range(len(merged) + len(letters))), -1000.0, -1000.0]
    ids = {"bos": front.index("<bos>" if gemma else "<s>"), "eos": front.index("<eos>" if gemma else "</s>")}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": every,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.unknown_token_id": front.index("<unk>"),
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()},
        "tokenizer.ggml.add_bos_token": True,
        **({"tokenizer.ggml.add_space_prefix": False} if gemma else {}),
        **more,
    }
