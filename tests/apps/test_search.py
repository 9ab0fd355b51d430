"""Conversations are found by words in their titles and texts."""

from __future__ import annotations

import pytest

from mlx_zip.apps.chat.running_answers import new_message
from mlx_zip.apps.chat.store import Store

TEXTS = {
    "A boat": "The captain of the ship said: <b>ahoy</b>, 100 % sure_thing!",
    "料理のレシピ": "今日は京都で豆腐を食べました。とても美味しかった。",
    "Fenêtre": "L'été, la FENÊTRE reste ouverte; straße und ÄRGER.",
    "שלום": "مرحبا بالعالم, שלום עולם",
    "Emoji": "A family 👩‍👩‍👧 and a rocket 🚀 in C++",
}


@pytest.fixture(scope="module")
def store():
    made = Store(None)
    for title, text in TEXTS.items():
        one = made.create({"title": title})["id"]
        user = new_message("user", None, "a question")
        made.begin(one, [user, new_message("assistant", user["id"], "") | {"text": text, "state": "whole"}])
    yield made
    made.close()


def titles(store: Store, wanted: str) -> set[str]:
    return {found["title"] for found in store.conversations(wanted)["conversations"]}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("boat", {"A boat"}),
        ("CAPTAIN ship", {"A boat"}),
        ("boat captain", {"A boat"}),
        ("captain rocket", set()),
        ("<b>ahoy", {"A boat"}),
        ("100 %", {"A boat"}),
        ("sure_thing", {"A boat"}),
        ("sure%thing", set()),
        ("e_", {"A boat"}),
        ("f_", set()),
        ("00", {"A boat"}),
        ("豆腐", {"料理のレシピ"}),
        ("京", {"料理のレシピ"}),
        ("食べました", {"料理のレシピ"}),
        ("レシピ", {"料理のレシピ"}),
        ("fenêtre", {"Fenêtre"}),
        ("STRAßE", {"Fenêtre"}),
        ("är", {"Fenêtre"}),
        ("بالعالم", {"שלום"}),
        ("שלום עולם", {"שלום"}),
        ("🚀", {"Emoji"}),
        ("👩‍👩‍👧", {"Emoji"}),
        ("c++", {"Emoji"}),
        ("question", set(TEXTS)),
        ("", set(TEXTS)),
        ("   ", set(TEXTS)),
        ('"', set()),
        ('" OR "', set()),
        ("NEAR(boat", set()),
        ("'; DROP TABLE messages; --", set()),
        ("a\0b", set()),
        ("boat " * 1000, {"A boat"}),
    ],
)
def test_words_are_found_in_titles_and_texts_of_any_script(store, wanted, found):
    assert titles(store, wanted) == found
    assert store.conversations(wanted)["total"] == len(found)


def test_a_snippet_shows_the_place_that_was_found(store):
    (found,) = store.conversations("AHOY")["conversations"]
    assert "<b>ahoy</b>" in found["snippet"]
    (found,) = store.conversations("boat")["conversations"]
    assert found["snippet"].startswith("The captain")


def test_what_is_changed_or_deleted_is_not_found_any_more():
    store = Store(None)
    one = store.create({})["id"]
    user = new_message("user", None, "first")
    answer = new_message("assistant", user["id"], "")
    store.begin(one, [user, answer])
    store.finish(one, answer | {"text": "walrus", "state": "whole"})
    assert store.conversations("walrus")["total"] == 1
    store.resume(answer | {"state": "running"})
    store.finish(one, answer | {"text": "penguin", "state": "whole"})
    assert (store.conversations("walrus")["total"], store.conversations("penguin")["total"]) == (0, 1)
    store.delete(one)
    assert store.conversations("penguin")["total"] == 0
    store.close()
