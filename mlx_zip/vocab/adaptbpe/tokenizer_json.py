"""Writes an adapted tokenizer as a tokenizer.json, for programs without virtual merges.

Plain byte pair encoding cannot split a token again, so a tokenizer.json is exact only if no merge is virtual: after
first-k, or an adaptation without swaps. Otherwise `exact_tokenizer_json` raises an error. A model folder needs a
tokenizer.json in any case. The one from `kept_ids_tokenizer_json` gives ids of the vocabulary that decode to the text,
but not always the ids of `AdaptedVocabulary.encode`. `make_tokenizer_exact` corrects a tokenizer that was loaded from
such a file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.adapted import AdaptedVocabulary, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import FILE
from mlx_zip.vocab.adaptbpe.merge_list import BYTES, NO_ID, BpeEncoder
from mlx_zip.vocab.adaptbpe.pieces import CHARACTERS, PATTERNS
from mlx_zip.vocab.first_stage import bytes_to_spelled, spelled_to_bytes


def exact_tokenizer_json(vocabulary: AdaptedVocabulary, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a tokenizer.json that gives the ids of `vocabulary.encode`.

    source: the base's tokenizer.json, from which decoder and special tokens around a text are copied. Raises
    `DataError` if a merge is virtual.
    """
    if vocabulary.virtual:
        raise DataError(
            f"{len(vocabulary.virtual)} merges are virtual, which a tokenizer.json cannot express: "
            "use mlx_zip's own file, or the method first-k"
        )
    return _json_of_kept_tokens(vocabulary, source)


def kept_ids_tokenizer_json(vocabulary: AdaptedVocabulary, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a tokenizer.json whose ids are all in the vocabulary.

    Its ids are those of `vocabulary.encode` if no merge is virtual. Otherwise, a piece that is a token becomes that
    token. Other pieces are merged only by merges that are not virtual and have no virtual parts.
    """
    data = _json_of_kept_tokens(vocabulary, source)
    data["model"]["ignore_merges"] = bool(vocabulary.virtual)
    return data


def make_tokenizer_exact(tokenizer: Any, vocabulary: AdaptedVocabulary) -> None:
    """Changes a `tokenizers.Tokenizer` from `kept_ids_tokenizer_json` to give the ids of `vocabulary.encode`.

    Adds a pre-tokenizer that cuts every piece into its tokens. Because the pre-tokenizer is written in Python, the
    tokenizer can no longer be saved or copied.
    """
    from tokenizers.pre_tokenizers import PreTokenizer, Sequence

    if vocabulary.virtual:
        before = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = Sequence([*before, PreTokenizer.custom(_TokenPreTokenizer(vocabulary))])


def make_tokenizer_exact_in_folder(tokenizer: Any, folder: Path) -> None:
    """Applies `make_tokenizer_exact` to the tokenizer of a model folder if the folder's model was adapted.

    If the folder holds the base tokenizer beside the adapted file, the base tokenizer has more ids and is left
    unchanged. Raises `DataError` if the adapted file cannot be read.
    """
    if (folder / FILE).is_file():
        vocabulary = read_adapted_vocabulary(folder / FILE)
        if tokenizer.get_vocab_size() == len(vocabulary):
            make_tokenizer_exact(tokenizer, vocabulary)


class _TokenPreTokenizer:
    """Pre-tokenizer that cuts pieces into the tokens of an adapted vocabulary, but never within a character."""

    def __init__(self, vocabulary: AdaptedVocabulary) -> None:
        self.encoder = BpeEncoder(vocabulary.merges, vocabulary.schedule, "whole")
        self.spelled: Callable[[str], bytes] = (
            str.encode if vocabulary.splitter.pieces == CHARACTERS else spelled_to_bytes
        )

    def pre_tokenize(self, text: Any) -> None:
        """Cuts the pieces of `text`, a `PreTokenizedString` of the `tokenizers` library, which calls this method."""
        text.split(self._cut)

    def _cut(self, _: int, piece: Any) -> list[Any]:
        """Returns one piece, a `NormalizedString` of the `tokenizers` library, cut at the ends of its tokens."""
        text, known = str(piece), self.encoder.merges.tokens
        ends = accumulate(len(known[token]) for token in self.encoder.encode(self.spelled(text)))
        at = {end: i for i, end in enumerate(accumulate(len(self.spelled(char)) for char in text), 1)}  # byte -> char
        return [piece[start:end] for start, end in pairwise([0, *(at[end] for end in ends if end in at)])]


def _json_of_kept_tokens(vocabulary: AdaptedVocabulary, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a tokenizer.json with the vocabulary's tokens, and those of its merges that involve no virtual merge.

    source: the base's tokenizer.json, whose other parts are copied; None makes a new tokenizer.json. Raises `DataError`
    if a part of `source` names a token that was not kept.
    """
    data = copy.deepcopy(dict(source)) if source is not None else _json_of_merge_list(vocabulary)
    new = {int(old): i for i, old in enumerate(vocabulary.ids)}
    spelled = _spelled_tokens(vocabulary, data["model"].get("vocab") or {})
    virtual = {BYTES + place for place in (*vocabulary.virtual, *vocabulary.merges.unfinished)}
    actual = [token for token in range(len(spelled)) if token not in virtual]
    known = {spelled[token]: new[int(vocabulary.token_ids[token])] for token in actual}
    known |= {token.content: new[token.id] for token in vocabulary.splitter.added}
    merges = [
        parts
        for made, parts in enumerate(vocabulary.merges.parts.tolist(), BYTES)
        if made >= BYTES + vocabulary.merges.letters and virtual.isdisjoint([made, *parts])
    ]
    own = data["model"]
    own["vocab"] = dict(sorted(known.items(), key=lambda item: item[1]))
    own["merges"] = [[spelled[left], spelled[right]] for left, right in merges]
    own["ignore_merges"] = False
    for token in data.get("added_tokens") or []:
        token["id"] = _adapted_id("added_tokens", token["id"], new)
    if data.get("padding"):
        data["padding"]["pad_id"] = _adapted_id("padding", data["padding"]["pad_id"], new)
    data["post_processor"] = _renumber_post_processor(data.get("post_processor"), new)
    return data


def _spelled_tokens(vocabulary: AdaptedVocabulary, names: Mapping[str, int]) -> list[str]:
    """Returns how a tokenizer.json spells each token. names: spelled tokens -> ids in the base's tokenizer.json."""
    if vocabulary.splitter.pieces != CHARACTERS:
        return list(map(bytes_to_spelled, vocabulary.merges.tokens))
    of = {i: name for name, i in names.items()} | {NO_ID: ""}
    if lost := set(vocabulary.token_ids.tolist()) - of.keys():
        raise DataError(f"the base's tokenizer.json is needed, and has no token {min(lost)}")
    return [of[i] for i in vocabulary.token_ids.tolist()]


def _adapted_id(part: str, i: int, new: Mapping[int, int]) -> int:
    """Returns the adapted id of base id i, from `new`. Raises `DataError` naming `part`, the field that uses the id."""
    if i not in new:
        raise DataError(f"tokenizer.json: {part} names id {i}, which the vocabulary does not keep")
    return new[i]


def _json_of_merge_list(vocabulary: AdaptedVocabulary) -> dict[str, Any]:
    """Returns a tokenizer.json without vocabulary and merges, for a base that was a merge list."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pieces, cutter = vocabulary.splitter.pieces, byte_level
    if pieces == "gpt2":
        cutter = byte_level | {"use_regex": True}
    elif pieces in PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[pieces]}, "behavior": "Isolated", "invert": False}
        cutter = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    added = [
        {
            "id": token.id,
            "content": token.content,
            "single_word": False,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
        for token in vocabulary.splitter.added
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": cutter,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE"},
    }


def _renumber_post_processor(processor: Any, new: Mapping[int, int]) -> Any:
    """Returns a tokenizer.json's post_processor with adapted ids for the tokens that it adds.

    new: base ids -> adapted ids. Raises `DataError` if a token was not kept.
    """
    if not isinstance(processor, dict):
        return processor
    kind = processor.get("type")
    if kind == "Sequence":
        return {**processor, "processors": [_renumber_post_processor(step, new) for step in processor["processors"]]}
    if kind == "TemplateProcessing":
        special = processor["special_tokens"]
        changed = {
            name: {**token, "ids": [_adapted_id("post_processor", i, new) for i in token["ids"]]}
            for name, token in special.items()
        }
        return {**processor, "special_tokens": changed}
    if kind in ("BertProcessing", "RobertaProcessing"):
        ends = {side: processor[side] for side in ("sep", "cls")}
        return processor | {side: [token, _adapted_id("post_processor", i, new)] for side, (token, i) in ends.items()}
    return processor
