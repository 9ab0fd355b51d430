"""Cuts the slices of public data sets that the reports were measured on.

    python bench/papers/slices.py reviews aclImdb/train > imdb.train.jsonl
    python bench/papers/slices.py abstracts ori_pqal.json test > pubmedqa.test.jsonl
    python bench/papers/slices.py sentences fr_gsd-ud-test.conllu > ud_fr.test.txt

reviews: the folder `train` or `test` of the Large Movie Review Dataset (Maas et al. 2011), with its folders `neg` and
`pos`. abstracts: `ori_pqal.json` of github.com/pubmedqa/pubmedqa. sentences: a file of a Universal Dependencies
treebank.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OFFSETS = (0, 8, 16)  # of every 25 reviews of a class, in the order of their numbers


def reviews(folder: str) -> Iterator[str]:
    """Yields the lines of the slice of reviews: 3,000 of 25,000, shuffled. label: 0 for `neg`, 1 for `pos`."""
    found = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted(Path(folder, name).glob("*.txt"), key=lambda file: int(file.stem.partition("_")[0]))
        found += [(label, file) for i, file in enumerate(files) if i % 25 in OFFSETS]
    random.Random(0).shuffle(found)
    for label, file in found:
        yield json.dumps({"label": label, "file": file.name, "text": file.read_text(encoding="utf-8")})


def abstracts(file: str, part: str) -> Iterator[str]:
    """Yields the lines of one part of the abstracts. test: every fifth one, by id as text; train: the others."""
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    for i, pmid in enumerate(sorted(found)):
        if (i % 5 == 4) == (part == "test"):
            one = found[pmid]
            text = "\n".join([one["QUESTION"], *_sections(one)])
            yield json.dumps({"pmid": pmid, "text": text})


def _sections(abstract: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sections of an abstract, each with its label."""
    for label, text in zip(abstract["LABELS"], abstract["CONTEXTS"], strict=True):
        yield f"{label}: {text}"
    yield f"CONCLUSION: {abstract['LONG_ANSWER']}"


def sentences(file: str) -> Iterator[str]:
    """Yields the sentences of a treebank's file, as they were written."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith("# text = "):
            yield line.removeprefix("# text = ")


def main(words: Sequence[str]) -> None:
    """Prints one slice. words: its name and its arguments."""
    for line in {"reviews": reviews, "abstracts": abstracts, "sentences": sentences}[words[0]](*words[1:]):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
