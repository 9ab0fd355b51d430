"""Loads tokenizers: from a file of any published format, a model's folder, a bundled model's name or a hub id.

A loaded tokenizer wraps a tokenizer of transformers and adds what every engine needs: chat template, ids that end a
text, streaming detokenizer.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, GenerationError, bare_exceptions_as_value_errors, first_message_line
from mlx_zip.named import KNOWN, resolve_model_name
from mlx_zip.text import hub
from mlx_zip.text.formats import (
    KINDS,
    find_gpt2_merges,
    is_tokenizer_file,
    read_tokenizer_file,
    well_known_special_tokens,
)
from mlx_zip.vocab.adaptbpe.tokenizer_json import make_tokenizer_exact_in_folder
from mlx_zip.vocab.first_stage import TokenizerFile, open_tokenizer_file

_SETTINGS = ("tokenizer.json", "tokenizer_config.json", "config.json")  # a folder for transformers has one of these


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Returns the tokenizer of a folder, a tokenizer file (`formats.KINDS`), a bundled model's name or a hub id.

    For an adapted model's folder, the tokenizer's ids equal those of `AdaptedVocabulary.encode`. A tokenizer.json is
    read together with the settings and the chat template in its folder. Raises `DataError` if loading fails.
    """
    file = _standalone_tokenizer_file(resolve_model_name(name))
    if file is not None:
        return Tokenizer(_wrap_for_transformers(read_tokenizer_file(file)))
    from transformers import AutoTokenizer

    folder = tokenizer_folder(name, trust_remote_code)
    try:
        with silence_transformers(), bare_exceptions_as_value_errors():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            make_tokenizer_exact_in_folder(getattr(tokenizer, "backend_tokenizer", None), folder)
            return Tokenizer(tokenizer)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError) as error:
        reason = find_damaged_json(folder) or _missing_file_reason(folder) or first_message_line(error)[:300]
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error


def find_damaged_json(folder: Path) -> str | None:
    """Returns a message if a JSON file in a model's folder holds no JSON object, naming the file, else None.

    The libraries that load a model do not name the file that they cannot read.
    """
    for name in _SETTINGS:
        file = folder / name
        try:
            if file.is_file() and not isinstance(json.loads(file.read_bytes()), dict):
                return f"{name} holds no JSON object"
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} is not valid JSON: {first_message_line(error)}"
    return None


def _missing_file_reason(folder: Path) -> str | None:
    if any(is_tokenizer_file(file) for file in folder.iterdir()):
        return None
    return f"it has no tokenizer file ({KINDS})"


def tokenizer_folder(name: str | Path, trust_remote_code: bool = False) -> Path:
    """Returns the folder of a tokenizer. For a hub id, downloads only the tokenizer's files.

    name: a folder, a tokenizer.json, a bundled model's name or a hub id. Raises `DataError` if no tokenizer is found;
    the hub is not asked if `name` is not a hub id.
    """
    path = resolve_model_name(name)
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if path.exists() or not hub.is_hub_id(str(name)):
        raise DataError(
            f"{name}: no folder with a tokenizer, no tokenizer file ({KINDS}), not bundled ({', '.join(KNOWN)}), and "
            "no hub id of the form owner/name"
        )
    patterns = (*hub.TOKENIZER, *(hub.CODE if trust_remote_code else ()))
    return hub.download_files(str(name), patterns, error=DataError)


def read_first_stage_tokenizer(name: str) -> TokenizerFile:
    """Returns the file of a tokenizer, given a folder, a file, a bundled model's name or a hub id.

    A .json list of tokens in hex is read too. SentencePiece and BERT files are converted to a tokenizer.json. Raises
    `DataError` if no tokenizer can be read from `name`.
    """
    path = resolve_model_name(name)
    if hub.is_hub_id(name) and not path.exists() and not is_tokenizer_file(path):
        path = tokenizer_folder(name)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        path = find_gpt2_merges(path) or path
    if path.is_file() and path.name.removesuffix(".gz").endswith((".model", "vocab.txt")):
        return TokenizerFile(path, "tokenizer", read_tokenizer_file(path).to_str().encode())
    return open_tokenizer_file(path)


def _standalone_tokenizer_file(path: Path) -> Path | None:
    """Returns the tokenizer file to read without transformers' settings, None if transformers should read `path`.

    Returns `path` if it is a tokenizer file other than tokenizer.json, or the merge list in a folder without settings.
    """
    if path.is_dir():
        return None if any((path / name).is_file() for name in _SETTINGS) else find_gpt2_merges(path)
    return path if is_tokenizer_file(path) and path.is_file() and path.name != "tokenizer.json" else None


def _wrap_for_transformers(library: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=library, **well_known_special_tokens(library))


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Context manager: silences transformers' warnings about the model type "zip2zip" and its rope settings."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    finally:
        logger.setLevel(level)


# ---- a tokenizer as every engine needs it

_THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
)
_FULL_MARKS = {"<|channel>": "<|channel>thought"}  # token -> whole mark, if the mark is longer than the token


def as_tokenizer(tokenizer: Any) -> Any:
    """Wraps a bare tokenizer of transformers; returns our `Tokenizer` or mlx-lm's `TokenizerWrapper` unchanged.

    Raises `GenerationError` if `tokenizer` is none of these.
    """
    if hasattr(tokenizer, "detokenizer"):
        return tokenizer
    if not hasattr(tokenizer, "eos_token_id") or not hasattr(tokenizer, "encode"):
        raise GenerationError(f"tokenizer must be the one that load returns, not {type(tokenizer).__name__}")
    return Tokenizer(tokenizer)


def thinking_marks(tokenizer: Any) -> tuple[str, str] | None:
    """Returns the texts that mark the beginning and end of a model's reasoning, None for a model without such marks.

    Returns the marks of mlx-lm's wrapper if it has some; else a known pair of marks if both are tokens, or if both
    occur in the chat template.
    """
    begin, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    if isinstance(begin, str) and isinstance(end, str):
        return begin, end
    template = chat_template(tokenizer)
    pair = _thinking_tokens(tokenizer) or next((p for p in _THINKING if p[0] in template and p[1] in template), None)
    return pair and (_FULL_MARKS.get(pair[0], pair[0]), pair[1])


def single_token_id(tokenizer: Any, text: str) -> int | None:
    """Returns the id of the token whose text is exactly `text`, None if there is no such token."""
    found = tokenizer.convert_tokens_to_ids(text)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == text else None


def chat_template(tokenizer: Any) -> str:
    """Returns a tokenizer's chat template, "" if there is none; of several, the one for tools, else the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) else ""


def _thinking_tokens(tokenizer: Any) -> tuple[str, str] | None:
    has = lambda text: single_token_id(tokenizer, text) is not None
    return next((pair for pair in _THINKING if has(pair[0]) and has(pair[1])), None)


class Tokenizer:
    """Wraps a tokenizer of the transformers library. Attributes that are not defined here are those of the tokenizer.

    Has the interface of mlx-lm's `TokenizerWrapper`, so that code can take either.

    eos_token_ids: ids that end a text, including the tokenizer's own eos.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = set[int]() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._tokenizer.chat_template is not None

    @property
    def has_thinking(self) -> bool:
        """Whether the vocabulary has tokens that mark the beginning and end of thinking."""
        return _thinking_tokens(self._tokenizer) is not None

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer."""
        return Detokenizer(self._tokenizer)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], tokenize: bool = True, **options: Any) -> Any:
        """Renders chat messages to ids, or to text with tokenize=False. options: further arguments of the template.

        As in mlx-lm, `enable_thinking` defaults to `has_thinking`.
        """
        options = {"enable_thinking": self.has_thinking, "return_dict": False} | options
        return self._tokenizer.apply_chat_template(list(messages), tokenize=tokenize, **options)

    def add_eos_token(self, token: str) -> None:
        """Adds an id to `eos_token_ids`. token: the token's text, or the id as decimal digits."""
        single_token_id = int(token) if token.isdecimal() else self._tokenizer.convert_tokens_to_ids(token)
        if single_token_id is None:
            raise ValueError(f"{token!r} is not a token of this tokenizer")
        self.eos_token_ids.add(single_token_id)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __repr__(self) -> str:
        return f"Tokenizer({self._tokenizer.name_or_path or type(self._tokenizer).__name__}, {len(self)} tokens)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def add_eos_tokens(tokenizer: Any, tokens: Iterable[str]) -> None:
    """Makes further tokens end a text. tokens: texts of tokens, or ids as decimal digits.

    tokenizer: a `Tokenizer`, or mlx-lm's wrapper. Raises `GenerationError` if an item is not a token.
    """
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary and not (token.isdecimal() and len(token) < 10 and int(token) < len(tokenizer)):
            raise GenerationError(f"--extra-eos-token {token!r} is not a token of this tokenizer")
        tokenizer.add_eos_token(token)


# ---- ids to text, one at a time

REPLACEMENT = "\ufffd"  # decoded from bytes that are not a complete character


class Detokenizer:
    """Decodes ids one by one, with mlx-lm's interface: `add_token`, `text`, `last_segment`, `finalize`, `reset`.

    `text` is the text so far and only grows. An incomplete character is held back until it is complete, or until
    `finalize`. Each call decodes only the ids of the previous piece of text and the new ids. The previous piece is
    needed because a decoder may drop a space at the beginning of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Forgets all ids."""
        self.tokens: list[int] = []
        self.text = ""
        self.offset = 0
        self._begin = self._shown = 0  # ids before `_shown` are in `text`; decoding starts at `_begin`

    def add_token(self, token: int) -> None:
        """Adds the next id, and appends new text to `text` unless it ends within a character."""
        self.tokens.append(token)
        self._append_new_text(final=False)

    def finalize(self) -> None:
        """Adds the text that was held back to `text`."""
        self._append_new_text(final=True)

    @property
    def last_segment(self) -> str:
        """The text since this property was last read."""
        segment, self.offset = self.text[self.offset :], len(self.text)
        return segment

    def _append_new_text(self, final: bool) -> None:
        """Appends the text of new ids to `text`. final: also append an incomplete character."""
        known, whole = (self._decode_up_to(end) for end in (self._shown, len(self.tokens)))
        if len(whole) <= len(known) or (whole.endswith(REPLACEMENT) and not final):
            return
        self.text += whole[len(known) :]
        self._begin, self._shown = self._shown, len(self.tokens)

    def _decode_up_to(self, end: int) -> str:
        ids = self.tokens[self._begin : end]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
