"""Converts the tokenizer in a GGUF file's metadata to the files of transformers: tokenizer.json and settings.

Source of the keys: gguf.md of ggml. Source of their meaning and of the values of tokenizer.ggml.pre: llama-vocab.cpp of
llama.cpp. Where llama.cpp differs from the tokenizer of a model's training, the training's tokenizer is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import ConversionError, bare_exceptions_as_value_errors, first_message_line
from mlx_zip.text.formats import LOWER, PATTERNS, UPPER
from mlx_zip.text.sentencepiece_file import BPE, SPACE, SentencePieceModel

PREFIX = "tokenizer."
_GGML = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types, numbered as in SentencePiece
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Cut:
    """How a text is split before a byte-level vocabulary's merges apply.

    pattern: regular expression of the pieces, None for GPT-2's. digits: whether each digit is a separate piece.
    composed: whether texts are first normalized to NFC. whole: whether a piece that is a token skips the merges.
    begins: whether a text begins with the bos token if the file has no add_bos_token.
    """

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


_LLAMA3, _QWEN2 = Cut(PATTERNS["llama3"], whole=True, begins=True), Cut(PATTERNS["qwen"], composed=True)
CUTS = {  # by tokenizer.ggml.pre
    "gpt-2": Cut(),
    "phi-2": Cut(),
    "smollm": Cut(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Cut(_TEKKEN, whole=True, begins=True),
    "gpt-4o": Cut(PATTERNS["o200k"]),
    "dbrx": Cut(PATTERNS["cl100k"]),
}
_IDS = {  # key in the file -> name of the special token in tokenizer_config.json
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "separator_token_id": "sep_token",
    "seperator_token_id": "sep_token",  # so spelled by older writers
    "mask_token_id": "mask_token",
    "cls_token_id": "cls_token",
}
_ENDINGS = ("eot_token_id", "eom_token_id")
_ENDING_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_OTHER_IDS = tuple(f"{name}_token_id" for name in ("prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid"))
_OTHER_IDS += tuple(f"fim_{name}_token_id" for name in ("pad", "rep", "sep"))  # checked, then ignored
_EXPECTED = {"add_sep_token": False, "escape_whitespaces": True, "treat_whitespace_as_suffix": False}
_MOST_ADDED = 1 << 16  # control and user-defined tokens; the library takes a minute for half a million
_KEPT = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other control tokens strip the white space to their right
_HARMLESS = ("tokenizer.huggingface.json", "tokenizer.ggml.added_tokens", "tokenizer.rwkv.world")


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer read from a file. library: a `tokenizers.Tokenizer`. settings: the content of tokenizer_config.json.

    eos_ids: ids that end a text. special_ids: key of config.json, such as bos_token_id -> id.
    """

    library: Any
    settings: dict[str, Any]
    eos_ids: tuple[int, ...]
    special_ids: dict[str, int]


def read_gguf_tokenizer(path: Path, metadata: Mapping[str, Any], architecture: str, context: int) -> GgufTokenizer:
    """Returns the tokenizer in a file's metadata.

    metadata: all keys of the file, with arrays of numbers as NumPy arrays and arrays of strings as lists. architecture:
    general.architecture. context: the model's number of positions. Raises `ConversionError`, naming the key, if a value
    is invalid or not supported, or if a key under "tokenizer." is unknown.
    """
    return _MetadataReader(path, metadata, architecture).read_tokenizer(context)


class _MetadataReader:
    """The metadata of a file. Each read removes its key, so that keys left at the end are unknown ones."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path, self.architecture = path, architecture
        self.left = {key: value for key, value in metadata.items() if key.startswith(PREFIX) and key not in _HARMLESS}
        self.kind = self.pop_value("model", str)
        self.tokens: list[str] = list(self.pop_value("tokens", list))
        self.types = self.numbers_per_token("token_type", "iu", _NORMAL).copy()
        self.check_tokens()

    def error(self, what: str) -> ConversionError:
        return ConversionError(f"{self.path}: {what}")

    def pop_value(self, name: str, kind: type, default: Any = ...) -> Any:
        """Removes a key and returns its value. If the key is missing, returns `default`, or raises without default."""
        value = self.left.pop(_GGML + name, default)
        if value is ...:
            raise self.error(f"{_GGML}{name} is missing: the file holds no tokenizer that can be used")
        if value is not default and type(value) is not kind:
            raise self.error(f"{_GGML}{name} must be of the type {kind.__name__}, got {type(value).__name__}")
        return value

    def numbers_per_token(self, name: str, kinds: str, default: float) -> np.ndarray:
        """Returns the value of `name` as an array, one number per token. kinds: allowed letters of `dtype.kind`."""
        values = self.pop_value(name, np.ndarray, None)
        if values is None:
            return np.full(len(self.tokens), default)
        if values.dtype.kind not in kinds or len(values) != len(self.tokens) or not np.isfinite(values).all():
            raise self.error(f"{_GGML}{name} must hold a finite number for each of {len(self.tokens)} tokens")
        return values

    def check_tokens(self) -> None:
        if len(set(self.tokens)) != len(self.tokens) or not self.tokens or "" in self.tokens:
            raise self.error(f"{_GGML}tokens must hold tokens that differ from one another and are not empty")
        if unknown := sorted({int(kind) for kind in self.types} - {*range(_NORMAL, _BYTE + 1)}):
            raise self.error(f"{_GGML}token_type has the unknown type {unknown[0]}")
        if (added := int(np.isin(self.types, (_CONTROL, _USER)).sum())) > _MOST_ADDED:
            raise self.error(
                f"{added} tokens are control tokens or the user's own; at most {_MOST_ADDED} are supported"
            )

    def read_tokenizer(self, context: int) -> GgufTokenizer:
        """Returns the tokenizer. Raises `ConversionError` if a key is left over."""
        ids = {name: self.token_id(name) for name in (*_IDS, *_ENDINGS, *_OTHER_IDS)}
        try:
            with bare_exceptions_as_value_errors():
                library, begins = (
                    self.build_byte_level_tokenizer() if self.kind == "gpt2" else self.build_sentencepiece_tokenizer()
                )
                self.add_tokens(library)
                begins = self.pop_value("add_bos_token", bool, begins)
                ends = self.pop_value("add_eos_token", bool, False)
                self.add_bos_and_eos(
                    library, ids["bos_token_id"] if begins else None, ids["eos_token_id"] if ends else None
                )
        except (ValueError, TypeError, OverflowError) as error:
            raise self.error(f"the tokenizer cannot be built: {first_message_line(error)[:300]}") from error
        names = {name: self.tokens[one] for key, name in _IDS.items() if (one := ids[key]) is not None}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **names,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            **self.chat_templates(),
        }
        for name, value in _EXPECTED.items():
            if self.pop_value(name, bool, value) != value:
                raise self.error(f"{_GGML}{name} is {not value}, which is not supported")
        if self.left:
            raise self.error(f"unknown keys: {', '.join(sorted(self.left)[:12])}")
        special = {f"{name}_token_id": ids[key] for key, name in (("bos_token_id", "bos"), ("padding_token_id", "pad"))}
        return GgufTokenizer(
            library, settings, self.end_token_ids(ids), {k: v for k, v in special.items() if v is not None}
        )

    def token_id(self, name: str) -> int | None:
        """Returns the id under the key `name`, None if the key is missing or the id is negative (also -1 as uint32)."""
        value = self.pop_value(name, int, None)
        if value is None or value < 0 or value == 0xFFFFFFFF:
            return None
        if value >= len(self.tokens):
            raise self.error(f"{_GGML}{name} is {value}, and there are {len(self.tokens)} tokens")
        return value

    def end_token_ids(self, ids: Mapping[str, int | None]) -> tuple[int, ...]:
        """Returns the ids that end a text: the ids that the file names, and control tokens known to end a turn."""
        own = [ids[name] for name in ("eos_token_id", *_ENDINGS)]
        known = [i for i, text in enumerate(self.tokens) if text in _ENDING_TEXTS and self.types[i] == _CONTROL]
        return tuple(dict.fromkeys(i for i in (*own, *known) if i is not None))

    def build_byte_level_tokenizer(self) -> tuple[Any, bool]:
        """Returns the tokenizer of a byte-level vocabulary, and whether texts begin with the bos token by default."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        name = self.pop_value("pre", str)
        if name not in CUTS:
            raise self.error(f"{_GGML}pre {name[:80]!r} is not supported; supported: {', '.join(CUTS)}")
        cut = CUTS[name]
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, self.read_merges(), ignore_merges=cut.whole))
        if cut.composed:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
        if cut.pattern is None:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        else:
            split = pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated")
            steps += [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        tokenizer.decoder = decoders.ByteLevel()
        if self.pop_value("add_space_prefix", bool, False):
            raise self.error(f"{_GGML}add_space_prefix is true, which is not supported with a byte-level vocabulary")
        self.numbers_per_token("scores", "f", 0.0)
        return tokenizer, cut.begins

    def read_merges(self) -> list[tuple[str, str]]:
        merges: list[str] = self.pop_value("merges", list)
        pairs = []
        for merge in merges:
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise self.error(f"{_GGML}merges has {merge[:80]!r}, which is no pair of tokens")
            pairs.append((left, right))
        return pairs

    def build_sentencepiece_tokenizer(self) -> tuple[Any, bool]:
        """Returns the tokenizer of a SentencePiece vocabulary, and True: texts begin with the bos token by default."""
        if self.kind != "llama":
            raise self.error(f"{_GGML}model {self.kind[:80]!r} is not supported; supported: gpt2, llama")
        self.pop_value("pre", str, "default")
        self.pop_value("merges", list, [])  # not needed: merges follow from scores
        scores = [float(score) for score in self.numbers_per_token("scores", "f", 0.0)]
        if self.architecture.startswith("gemma"):
            self.respell_spaces()
            scores = [-float(i) for i in range(len(self.tokens))]  # Gemma's files list tokens in merge order
        pieces = tuple(zip(self.tokens, scores, map(int, self.types), strict=True))
        single = self.pop_value("remove_extra_whitespaces", bool, False)
        prefix = self.pop_value("add_space_prefix", bool, True)
        return SentencePieceModel(self.path, pieces, BPE, b"", prefix, single).build_tokenizer(), True

    def respell_spaces(self) -> None:
        """For Gemma: spells tokens of spaces with "▁" and sets their type to normal, so that merges build them."""
        for i, token in enumerate(self.tokens):
            if not token.strip(" "):
                self.tokens[i], self.types[i] = SPACE * len(token), _NORMAL
        self.check_tokens()

    def add_tokens(self, library: Any) -> None:
        """Adds control and user-defined tokens to `library`, which then finds them before the text is split."""
        from tokenizers import AddedToken

        strips = self.architecture == "phi3" and self.kind == "llama"
        for kind, add in ((_CONTROL, library.add_special_tokens), (_USER, library.add_tokens)):
            texts = [text for text, found in zip(self.tokens, self.types, strict=True) if found == kind]
            special = kind == _CONTROL
            right = [special and strips and text not in _KEPT for text in texts]
            pairs = zip(texts, right, strict=True)
            add([AddedToken(text, normalized=False, special=special, rstrip=strip) for text, strip in pairs])

    def add_bos_and_eos(self, library: Any, first: int | None, last: int | None) -> None:
        """Makes the library add the id `first` before each text and the id `last` after it; None: no id."""
        from tokenizers import processors

        if first is None and last is None:
            return
        ends = [[self.tokens[i]] if i is not None else [] for i in (first, last)]
        known = [(self.tokens[i], i) for i in dict.fromkeys((first, last)) if i is not None]
        one, two = [*ends[0], "$A", *ends[1]], [*ends[0], "$B:1", *ends[1]]
        library.post_processor = processors.TemplateProcessing(single=one, pair=[*one, *two], special_tokens=known)

    def chat_templates(self) -> dict[str, Any]:
        key = "tokenizer.chat_template"
        names = self.left.pop(f"{key}s", [])
        found = {name: self.left.pop(f"{key}.{name}", None) for name in names} if isinstance(names, list) else {}
        if (default := self.left.pop(key, None)) is not None:
            found = {"default": default, **found}
        if not isinstance(names, list) or not all(isinstance(text, str) for text in found.values()):
            raise self.error(f"{key} and {key}s must hold texts")
        if not found:
            return {}
        if list(found) == ["default"]:
            return {"chat_template": default}
        return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}
