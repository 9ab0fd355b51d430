"""A tiny random Llama model with a ChatML tokenizer of single characters, in a folder as a base model's."""

from __future__ import annotations

import string
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.torch_folders import save_weights

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; other characters are left out of what it encodes."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    tokens = [*MARKS, *shown.pre_tokenize_str(letters)[0][0]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = shown, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    end, _, eos = MARKS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token=eos, pad_token=end)
    fast.chat_template = TEMPLATE
    return fast


def chat_model(folder: Path, seed: int = 0) -> tuple[Path, llama.Model]:
    """Writes the folder; returns it with the model that it holds."""
    tokenizer = chat_tokenizer()
    config = {**CONFIG, "vocab_size": len(tokenizer)}
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(model.apply(lambda one: mx.random.normal(one.shape) * 0.3 if one.ndim > 1 else one).parameters())
    save_weights(model, folder, config)
    tokenizer.save_pretrained(folder)
    return folder, model
