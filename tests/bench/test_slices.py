"""The script that cuts slices out of public data sets: which documents it chooses, and how it writes them."""

import json
import subprocess
import sys

from support.places import REPO

PARTS = ("train", "test")


def lines(*words):
    """The lines that the script prints."""
    script = [sys.executable, REPO / "bench/papers/slices.py", *words]
    return subprocess.run(script, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_three_of_25_reviews_of_each_class_are_chosen_by_their_numbers_and_shuffled(tmp_path):
    for name in ("neg", "pos"):
        (tmp_path / name).mkdir()
        for i in range(50):
            (tmp_path / name / f"{i}_{i % 10}.txt").write_text(f"{name} {i}")
    found = [json.loads(line) for line in lines("reviews", tmp_path)]
    chosen = [f"{i}_{i % 10}.txt" for i in (0, 8, 16, 25, 33, 41)]
    for label, name in enumerate(("neg", "pos")):
        of_class = [one for one in found if one["label"] == label]
        assert sorted(one["file"] for one in of_class) == sorted(chosen)
        assert {one["text"] for one in of_class} == {f"{name} {int(file.partition('_')[0])}" for file in chosen}
    assert [one["label"] for one in found] not in ([0] * 6 + [1] * 6, [1] * 6 + [0] * 6)
    assert lines("reviews", tmp_path) == [json.dumps(one) for one in found]


def test_every_fifth_abstract_is_in_the_test_part_and_no_abstract_is_in_both(tmp_path):
    one = {
        "QUESTION": "Why?",
        "LABELS": ["AIMS", "METHODS"],
        "CONTEXTS": ["To know.", "By asking."],
        "LONG_ANSWER": "So.",
    }
    (tmp_path / "all.json").write_text(json.dumps({str(i): one for i in range(20, 10, -1)}))
    parts = {p: [json.loads(line) for line in lines("abstracts", tmp_path / "all.json", p)] for p in ("train", "test")}
    assert [one["pmid"] for one in parts["test"]] == ["15", "20"]
    assert len(parts["train"]) == 8
    assert parts["test"][0]["text"] == "Why?\nAIMS: To know.\nMETHODS: By asking.\nCONCLUSION: So."


def test_the_news_are_shuffled_and_all_but_the_first_5600_are_the_test_part(tmp_path):
    rows = [f'"{1 + i % 4}","Title {i}","It said ""{i}"", today."\n' for i in range(5610)]
    (tmp_path / "test.csv").write_text("".join(rows))
    parts = [[json.loads(line) for line in lines("news", tmp_path / "test.csv", p)] for p in PARTS]
    assert [len(part) for part in parts] == [5600, 10]
    found = parts[0] + parts[1]
    wanted = [{"label": i % 4, "text": f'Title {i} It said "{i}", today.'} for i in range(5610)]
    assert found != wanted
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_the_tasks_from_11_to_510_are_the_test_part(tmp_path):
    (tmp_path / "mbpp.jsonl").write_text("".join(f'{{"task_id": {i}}}\n' for i in range(1, 521)))
    numbers = {p: [json.loads(line)["task_id"] for line in lines("tasks", tmp_path / "mbpp.jsonl", p)] for p in PARTS}
    assert numbers == {"train": [*range(1, 11), *range(511, 521)], "test": list(range(11, 511))}


def test_every_fourth_paragraph_is_in_the_test_part(tmp_path):
    articles = [{"paragraphs": [{"context": f"{name}{i}"} for i in range(3)]} for name in "abc"]
    (tmp_path / "xquad.json").write_text(json.dumps({"data": articles}))
    texts = {p: lines("paragraphs", tmp_path / "xquad.json", p) for p in PARTS}
    assert texts == {"train": ["a0", "a1", "a2", "b1", "b2", "c0", "c2"], "test": ["b0", "c1"]}


def test_the_sentences_of_a_treebank_are_those_that_its_comments_hold(tmp_path):
    (tmp_path / "a.conllu").write_text("# sent_id = 1\n# text = Il pleut.\n1\tIl\n\n# text = Encore !\n1\tEncore\n")
    assert lines("sentences", tmp_path / "a.conllu") == ["Il pleut.", "Encore !"]
