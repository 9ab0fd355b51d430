"""Tiny random checkpoints in the layout of zip2zip 0.2.0, and the published package run on them.

The builders need torch and transformers (and peft for an adapter); `Published` needs zip2zip as well. Everything is
float32 on the CPU, drawn from a seed. Text plays no part: prompts are base ids, compressed by zip2zip-compression.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for one another

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
BOS, EOS, PAD = range(3)
TOKENIZER_TEXT = "the more it has read, the fewer steps a model takes to say the same thing once more; so say it again"

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_ENCODER = {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}


@dataclass(frozen=True)
class Checkpoint:
    """What to build. `base` and `encoder` override the sizes above; the rest describes upstream's files.

    override: names of decoder tensors that a partial `model.safetensors` next to the encoders replaces.
    meta: contents of `meta.pt`. stray: an `output_encoder.*` in the file of a tied checkpoint.
    """

    arch: str = "llama"
    base: dict[str, Any] = field(default_factory=dict)
    kind: str = "transformer"
    encoder: dict[str, Any] = field(default_factory=dict)
    boundary: int = 320
    codebook_size: int = 64
    merge_size: int = 3
    position_mode: str = "compressed"
    self_contained: bool = False
    has_pad: bool = True
    lora: dict[str, Any] | None = None
    override: tuple[str, ...] = ()
    meta: dict[str, Any] | None = None
    encoder_file: str = "zip2zip_encoders.safetensors"
    stray: bool = False
    seed: int = 0

    @property
    def pad_id(self) -> int:
        """Upstream's rule: the tokenizer's pad token, else its eos."""
        return PAD if self.has_pad else EOS

    @property
    def config(self) -> dict[str, Any]:
        """The `zip2zip_config.json`, without the name of the base model."""
        sizes = {key: _ENCODER[key] for key in ("hidden_size", "num_heads")} if self.kind == "attention" else _ENCODER
        encoder = {**sizes, "position_encoding": None, "tie_encoders": False, **self.encoder}
        return {
            "format_version": 2 if self.self_contained else 1,
            "position_mode": self.position_mode,
            "encoder_type": self.kind,
            "encoder": encoder,
            "compression": {
                "initial_vocab_size": self.boundary,
                "max_codebook_size": self.codebook_size,
                "max_subtokens": self.merge_size,
                "disabled_ids": [BOS, EOS, PAD],
            },
        }


def fill(module: torch.nn.Module, seed: int, norm: float = 1.0) -> None:
    """Draws every parameter, so that logits differ clearly; LayerNorm weights are near `norm`."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=random)
        if "norm" in name and name.endswith("weight"):
            drawn = weight.mean().round() * norm + 0.1 * noise  # around 1, or around 0 where 1 is added (Gemma)
        elif weight.ndim == 1 or "embed" in name or "lm_head" in name:
            drawn = 0.3 * noise
        else:
            drawn = 1.2 * noise / weight.shape[-1] ** 0.5
        with torch.no_grad():
            weight.copy_(drawn)


def base_model(arch: str, seed: int = 0, **config: Any) -> Any:
    """A random causal model of transformers in float32; `config` overrides the tiny sizes."""
    made = AutoConfig.for_model(arch, **{**_SIZES, **config})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    fill(model, seed)
    return model


def tokenizer(has_pad: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with bos, eos and (if asked for) pad: 3 specials, 256 bytes and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = byte_level, decoders.ByteLevel()
    alphabet = sorted(byte_level.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TOKENIZER_TEXT] * 4, trainer)
    names = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS]}
    names |= {"pad_token": SPECIALS[PAD]} if has_pad else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def write_checkpoint(folder: Path, made: Checkpoint) -> Path:
    """Writes `made` to `folder` as zip2zip would and returns the folder. The base goes to `folder/base`, or,
    self-contained, next to the encoders in several shards with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = folder if made.self_contained else folder / "base"
    decoder = base_model(made.arch, made.seed, **made.base)
    decoder.save_pretrained(home, max_shard_size="150KB" if made.self_contained else "5GB")
    tokenizer(made.has_pad).save_pretrained(home)
    name = "." if made.self_contained else str(home)
    (folder / "zip2zip_config.json").write_text(json.dumps({**made.config, "base_model_name_or_path": name}))
    _write_encoders(folder / made.encoder_file, made)
    if made.lora is not None:
        _write_adapter(folder, decoder, made)
    if made.override:
        _write_override(folder / "model.safetensors", made)
    if made.meta is not None:
        torch.save(made.meta, folder / "meta.pt")
    return folder


def build_encoder(made: Checkpoint, seed: int) -> torch.nn.Module:
    """One encoder of zip2zip with drawn weights."""
    from zip2zip.config import CompressionConfig
    from zip2zip.nn.encoders.base import BaseEncoder
    from zip2zip.nn.encoders.config import ENCODER_CONFIG_MAPPING

    fields = ENCODER_CONFIG_MAPPING[made.kind](**made.config["encoder"])
    encoder = BaseEncoder.from_config(fields, CompressionConfig(**made.config["compression"])).eval()
    fill(encoder, seed, norm=0.4)  # keeps hyper logits in the range of the base logits
    return encoder


def _write_encoders(path: Path, made: Checkpoint) -> None:
    from safetensors.torch import save_file

    tensors = build_encoder(made, 1000 + made.seed).state_dict(prefix="input_encoder.")
    if made.stray or not made.config["encoder"]["tie_encoders"]:
        tensors |= build_encoder(made, 2000 + made.seed).state_dict(prefix="output_encoder.")
    save_file(tensors, path)


def _write_adapter(folder: Path, decoder: Any, made: Checkpoint) -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(decoder, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **(made.lora or {})))
    random = torch.Generator().manual_seed(3000 + made.seed)
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                weight.copy_(0.15 * torch.randn(weight.shape, generator=random))
    wrapped.save_pretrained(folder)


def _write_override(path: Path, made: Checkpoint) -> None:
    from safetensors.torch import save_file

    other = base_model(made.arch, 4000 + made.seed, **made.base).state_dict()
    save_file({name: other[name].contiguous() for name in made.override}, path)


def prompt(seed: int, length: int, low: int = 3, high: int = 300) -> list[int]:
    """Base ids with repeats: bos, then phrases drawn from a few, one of them a run of one id; no other special id."""
    random = np.random.default_rng(seed)
    phrases = [random.integers(low, high, size=n).tolist() for n in (2, 3, 4, 5, 7)]
    phrases.append([int(random.integers(low, high))] * 6)
    ids = [BOS]
    while len(ids) < length:
        ids += phrases[random.integers(len(phrases))]
    return ids[:length]


class Published:
    """The zip2zip package with one checkpoint loaded, from a clean state at every call."""

    def __init__(self, folder: Path, made: Checkpoint) -> None:
        from zip2zip.model import Zip2ZipModel
        from zip2zip_compression import LZWCompressor

        self.made = made
        self.model = Zip2ZipModel.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
        self._check_encoders(folder / made.encoder_file)
        sizes = made.config["compression"]
        self._lzw = LZWCompressor(
            sizes["initial_vocab_size"],
            sizes["max_codebook_size"],
            sizes["max_subtokens"],
            made.pad_id,
            sizes["disabled_ids"],
        )

    def _check_encoders(self, path: Path) -> None:
        """Raises if encoders failed to load, where format 1 would continue with random encoders."""
        from safetensors.torch import load_file

        loaded = self.model.input_encoder.state_dict(prefix="input_encoder.")
        if not self.made.config["encoder"]["tie_encoders"]:
            loaded |= self.model.output_encoder.state_dict(prefix="output_encoder.")
        stored = load_file(path)
        assert all(torch.equal(stored[name], weight) for name, weight in loaded.items())

    def compress(self, base_ids: list[int]) -> list[int]:
        """Compresses base ids to the ids that the model reads."""
        return self._lzw.encode(base_ids)[0]

    @torch.no_grad()
    def forward(self, rows: list[list[int]]) -> np.ndarray:
        """Logits [B, L, W] float32 of one pass over left-padded rows, the mask given (without one, positions
        with gaps are taken for packed sequences).
        """
        ids, mask = self._padded(rows)
        self.model.codebook_manager.reset()
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.numpy()

    def hyper_rows(self, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The installed rows [n, D] of embedding and head after `forward`, in slot order."""
        manager = self.model.codebook_manager
        slots = manager.installed_slots[row]
        sides = manager.hyper_embedding_weight_cache, manager.hyper_linear_weight_cache
        return sides[0][row][slots].numpy(), sides[1][row][slots].numpy()

    @torch.no_grad()
    def generate(self, rows: list[list[int]], steps: int) -> tuple[np.ndarray, float]:
        """Greedy ids [B, steps] through the package's own `generate`, and the smallest margin between the best
        and the second best logit. Special ids and the base tail (whose ids cannot be read back) are barred.
        """
        from transformers import LogitsProcessorList

        ids, mask = self._padded(rows)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=steps,
            eos_token_id=None,
            pad_token_id=self.made.pad_id,
            return_dict_in_generate=True,
            output_scores=True,
            logits_processor=LogitsProcessorList([self._bar]),
        )
        best = torch.stack(out.scores, dim=1).topk(2).values  # [B, steps, 2]
        return out.sequences[:, ids.shape[1] :].numpy(), float((best[..., 0] - best[..., 1]).min())

    def _bar(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(bar(scores.numpy(), self.made))

    def _padded(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        ids = torch.tensor([[self.made.pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask


def bar(logits: np.ndarray, made: Checkpoint) -> np.ndarray:
    """Returns logits [..., W] with special ids and the base tail set to -inf."""
    barred = np.array(logits)
    barred[..., : len(SPECIALS)] = -np.inf
    barred[..., made.boundary + made.codebook_size :] = -np.inf
    return barred
