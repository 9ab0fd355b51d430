"""A tokenizer.json of an adapted tokenizer, for programs that know nothing of virtual merges.

Plain byte pair encoding cannot split a token again, so it is exact only where no merge is virtual: first-k, or an
adaptation that found nothing to swap. For everything else there is none, rather than one that gives other ids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.adapted import AdaptedVocabulary
from mlx_zip.vocab.adaptbpe.text import PATTERNS, to_text


def tokenizer_json(vocabulary: AdaptedVocabulary, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the `tokenizers` library loads, with the ids of `vocabulary.encode`.

    source: the base's tokenizer.json, whose decoder and special tokens around a text are taken over. Raises `DataError`
    where a merge is virtual.
    """
    if vocabulary.virtual:
        raise DataError(
            f"{len(vocabulary.virtual)} merges are virtual, which a tokenizer.json cannot say: "
            "use mlx_zip's own file, or the method first-k"
        )
    data = copy.deepcopy(dict(source)) if source is not None else _made_up(vocabulary)
    new = {int(old): i for i, old in enumerate(vocabulary.ids)}
    spelled = list(map(to_text, vocabulary.merges.tokens))
    ids = [new[int(old)] for old in vocabulary.token_ids]
    known = dict(zip(spelled, ids, strict=True)) | {token.content: new[token.id] for token in vocabulary.front.added}
    own = data["model"]
    own["vocab"] = dict(sorted(known.items(), key=lambda item: item[1]))
    own["merges"] = [[spelled[left], spelled[right]] for left, right in vocabulary.merges.parts.tolist()]
    own["ignore_merges"] = False
    for token in data["added_tokens"]:
        token["id"] = new[token["id"]]
    data["post_processor"] = _renumbered(data.get("post_processor"), new)
    return data


def _made_up(vocabulary: AdaptedVocabulary) -> dict[str, Any]:
    """For a base that came as a list of merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pieces, cutter = vocabulary.front.pieces, byte_level
    if pieces == "gpt2":
        cutter = byte_level | {"use_regex": True}
    elif pieces in PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[pieces]}, "behavior": "Isolated", "invert": False}
        cutter = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    added = [
        {"id": token.id, "content": token.content, "single_word": False, "lstrip": token.lstrip,
         "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special}
        for token in vocabulary.front.added
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": cutter, "post_processor": None, "decoder": byte_level, "model": {"type": "BPE"},
    }  # fmt: skip


def _renumbered(processor: Any, new: Mapping[int, int]) -> Any:
    """A post_processor with the new ids of the tokens that it adds."""
    if not isinstance(processor, dict):
        return processor
    kind = processor.get("type")
    if kind == "Sequence":
        return {**processor, "processors": [_renumbered(step, new) for step in processor["processors"]]}
    if kind == "TemplateProcessing":
        special = processor["special_tokens"]
        changed = {name: {**token, "ids": [new[i] for i in token["ids"]]} for name, token in special.items()}
        return {**processor, "special_tokens": changed}
    if kind in ("BertProcessing", "RobertaProcessing"):
        pairs = {side: [processor[side][0], new[processor[side][1]]] for side in ("sep", "cls")}
        return {**processor, **pairs}
    return processor
