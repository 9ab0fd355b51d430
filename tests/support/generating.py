"""A tiny model, its tokenizer, a prompt, and calls of `stream_generate` with them."""

import copy

import mlx.core as mx
from mlx_lm.models import llama

from mlx_zip.engine.mlx.generate import stream_generate
from support import tiny, tiny_text

TOKENIZER = tiny_text.byte_level()

MODEL = tiny.tiny_model()

PROMPT = tiny.base_ids(50)


def never_ending(tokenizer=TOKENIZER):
    """The tokenizer without an end of text, so that random models do not stop by chance."""
    tokenizer = copy.copy(tokenizer)
    tokenizer._eos_token_ids = set()
    return tokenizer


ENDLESS = never_ending()


def plain_model():
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict({**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40}))


def run(model=MODEL, tokenizer=ENDLESS, prompt=PROMPT, **options):
    return list(stream_generate(model, tokenizer, prompt, **{"max_tokens": 40, **options}))


def ids(responses):
    return [response.token for response in responses]


def text(responses):
    return "".join(response.text for response in responses)
