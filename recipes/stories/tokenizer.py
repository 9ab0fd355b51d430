"""The stories tokenizer: BPE within words, with bytes as fallback, in Hugging Face's files, with a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int, context: int) -> None:
    """Learns a tokenizer of `vocab_size` tokens from texts and writes its files into `folder`.

    A space belongs to the word after it and is never added or dropped, so decoding returns the text exactly. What the
    learned tokens cannot spell is spelt in bytes. Each digit is a token, so that digits can be protected. context: most
    positions of the model.
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

    As special tokens, byte tokens such as <0x41> would be recognized in plain text.
    """
    import json

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
