"""Cuts the slices of public data sets that the reports were measured on.

    python bench/papers/slices.py reviews aclImdb/train > imdb.train.jsonl
    python bench/papers/slices.py news test.csv train > agnews.train.jsonl
    python bench/papers/slices.py abstracts ori_pqal.json test > pubmedqa.test.jsonl
    python bench/papers/slices.py tasks mbpp.jsonl test > mbpp.test.jsonl
    python bench/papers/slices.py sentences fr_gsd-ud-test.conllu > ud_fr.test.txt
    python bench/papers/slices.py paragraphs xquad.zh.json test > xquad_zh.test.txt

reviews: the folder `train` or `test` of the Large Movie Review Dataset (Maas et al. 2011), with its folders `neg` and
`pos`. news: `test.csv` of AG News (Zhang et al. 2015). abstracts: `ori_pqal.json` of github.com/pubmedqa/pubmedqa.
tasks: `mbpp.jsonl` of google-research. sentences: a file of a Universal Dependencies treebank. paragraphs: a file of
github.com/google-deepmind/xquad.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OFFSETS = (0, 8, 16)  # positions taken from every 25 reviews of a class, in the order of their numbers
NEWS = 5600  # number of articles in the train part; the other 2,000 are the test part
TASKS = range(11, 511)  # task numbers of the test part, as in MBPP


def review_lines(folder: str) -> Iterator[str]:
    """Yields the lines of the slice of reviews: 3,000 of 25,000, shuffled. label: 0 for `neg`, 1 for `pos`."""
    found = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted(Path(folder, name).glob("*.txt"), key=lambda file: int(file.stem.partition("_")[0]))
        found += [(label, file) for i, file in enumerate(files) if i % 25 in OFFSETS]
    random.Random(0).shuffle(found)
    for label, file in found:
        yield json.dumps({"label": label, "file": file.name, "text": file.read_text(encoding="utf-8")})


def news_lines(file: str, part: str) -> Iterator[str]:
    """Yields the lines of the `train` or `test` part of the news, shuffled. label: 0 to 3."""
    with open(file, encoding="utf-8", newline="") as rows:
        found = [{"label": int(label) - 1, "text": f"{title} {about}"} for label, title, about in csv.reader(rows)]
    random.Random(0).shuffle(found)
    yield from map(json.dumps, found[NEWS:] if part == "test" else found[:NEWS])


def abstract_lines(file: str, part: str) -> Iterator[str]:
    """Yields the lines of the `train` or `test` part of the abstracts; every fifth, sorted by id, is in `test`."""
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    for i, pmid in enumerate(sorted(found)):
        if (i % 5 == 4) == (part == "test"):
            one = found[pmid]
            text = "\n".join([one["QUESTION"], *abstract_sections(one)])
            yield json.dumps({"pmid": pmid, "text": text})


def abstract_sections(abstract: Mapping[str, Any]) -> Iterator[str]:
    for label, text in zip(abstract["LABELS"], abstract["CONTEXTS"], strict=True):
        yield f"{label}: {text}"
    yield f"CONCLUSION: {abstract['LONG_ANSWER']}"


def task_lines(file: str, part: str) -> Iterator[str]:
    """Yields the lines of the `train` or `test` part of the tasks."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if (json.loads(line)["task_id"] in TASKS) == (part == "test"):
            yield line


def treebank_sentences(file: str) -> Iterator[str]:
    """Yields the sentences of a treebank file in their original text."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith("# text = "):
            yield line.removeprefix("# text = ")


def paragraph_lines(file: str, part: str) -> Iterator[str]:
    """Yields the paragraphs of the `train` or `test` part, one per line; every fourth paragraph is in `test`."""
    articles = json.loads(Path(file).read_text(encoding="utf-8"))["data"]
    found = [one["context"] for article in articles for one in article["paragraphs"]]
    for i, text in enumerate(found):
        if (i % 4 == 3) == (part == "test"):
            yield text


SLICES = {
    "reviews": review_lines,
    "news": news_lines,
    "abstracts": abstract_lines,
    "tasks": task_lines,
    "sentences": treebank_sentences,
    "paragraphs": paragraph_lines,
}


def main(words: Sequence[str]) -> None:
    """Prints a slice. words: the slice's name and arguments."""
    for line in SLICES[words[0]](*words[1:]):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
