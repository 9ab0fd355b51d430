"""Reads the base model's tokenizer with transformers, as zip2zip does, and copies the tokenizer's files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.converters.tensors import read_json_object_strictly
from mlx_zip.errors import ConversionError, bare_exceptions_as_value_errors, first_message_line
from mlx_zip.files import write_json
from mlx_zip.text.tokenizers import silence_transformers
from mlx_zip.vocab.adaptbpe.base_vocabulary import FILE as ADAPTED
from mlx_zip.vocab.first_stage import PROBE

CONFIG = "tokenizer_config.json"
FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
    ADAPTED,
)
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFacts:
    """Properties of a tokenizer that a copy must also have.

    kind: name of the class. length: number of ids. pad_id: see `read_tokenizer_facts`. probe: the ids of a fixed text.
    """

    kind: str
    length: int
    pad_id: int | None
    probe: tuple[int, ...]


def read_tokenizer_facts(folder: Path, trust_remote_code: bool = False) -> TokenizerFacts:
    """Loads the tokenizer in `folder` and returns its properties. Raises `ConversionError` if loading fails.

    As in zip2zip 0.2.0, `pad_id` is the id of the pad token, else of the eos token, else None.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    failures = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError)
    try:
        with silence_transformers(), bare_exceptions_as_value_errors():
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            probe = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
    except (*failures, StrictDataclassError) as error:  # the last: config.json has a value of a wrong type
        raise ConversionError(
            f"the tokenizer in {folder.name} cannot be loaded: {first_message_line(error)[:300]}"
        ) from error
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return TokenizerFacts(type(tokenizer).__name__, len(tokenizer), pad, probe)


def copy_tokenizer(source: Path, target: Path, facts: TokenizerFacts, trust_remote_code: bool = False) -> None:
    """Copies the tokenizer's files from `source` to `target`, and checks that the copy has the properties `facts`.

    transformers chooses some tokenizer classes by config.json's model_type, which is "zip2zip" in the converted folder.
    If the copy would get another class, the original class is written into tokenizer_config.json. Python files are
    copied only if `trust_remote_code`.
    """
    patterns = (*FILES, "*.py") if trust_remote_code else FILES
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        shutil.copyfile(path, target / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, copy_function=shutil.copyfile)
    config = read_json_object_strictly(target / CONFIG) if (target / CONFIG).is_file() else {}
    if not trust_remote_code and config.pop("auto_map", None) is not None:
        write_json(target / CONFIG, config)
    if not config.get("tokenizer_class") or read_tokenizer_facts(target, trust_remote_code) != facts:
        write_json(target / CONFIG, {**config, "tokenizer_class": facts.kind})
        found = read_tokenizer_facts(target, trust_remote_code)
        if found != facts:
            raise ConversionError(
                f"the tokenizer ({facts.kind}, {facts.length} ids) loads differently in the converted folder "
                f"({found.kind}, {found.length} ids)"
            )
