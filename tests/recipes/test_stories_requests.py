"""Conversations of the stories recipe: requests in the words of the story that answers them."""

import random
import re

import pytest

from mlx_zip.errors import DataError
from recipes.stories import requests
from recipes.stories.lexicon import ends_noun, learn_lexicon, split_into_words
from recipes.stories.requests import find_topics, join_topics, make_conversations, make_request, write_jsonl
from support.stories_toy import ANIMALS, COLOURS, NAMES, OBJECTS, PLACES, story

STORIES = list(dict.fromkeys(story(random.Random(seed)) for seed in range(120)))
LEXICON = learn_lexicon(STORIES)
PHRASINGS = (
    *requests.ABOUT,
    *requests.ABOUT_AGAIN,
    *requests.USING,
    *requests.USING_AGAIN,
    *requests.ANY,
    *requests.ANY_AGAIN,
)
OWN = {word for phrasing in PHRASINGS for word in split_into_words(phrasing.lower())} | {
    "a",
    "an",
    "the",
    "some",
    "and",
    "named",
}


def talks(seed=0, **options):
    return list(make_conversations(STORIES, LEXICON, seed, **options))


def said(records, role):
    return [message["content"] for record in records for message in record["messages"] if message["role"] == role]


# ---- words


def test_nouns_are_found_by_where_they_stand():
    assert {*ANIMALS, *OBJECTS, *PLACES} <= LEXICON.nouns.keys()


def test_adjectives_and_names_are_no_nouns():
    assert LEXICON.nouns.keys().isdisjoint({*COLOURS, *(name.lower() for name in NAMES), "was", "found", "little"})


def test_adjectives_are_found_before_nouns():
    assert set(COLOURS) <= LEXICON.adjectives


def test_names_are_found_after_named():
    assert set(NAMES) == LEXICON.names


@pytest.mark.parametrize(
    ("noun", "text"),
    [
        ("a", "He saw a zebra. She had a zebra. A zebra ran."),
        ("the", "He went to the zebra. She saw the zebra. Then the zebra was gone."),
        ("some", "He had some zebras. She saw her zebras. A zebra ran."),
    ],
)
def test_a_noun_goes_with_the_article_of_the_stories(noun, text):
    lexicon = learn_lexicon([text], rare=1)
    assert lexicon.nouns["zebras" if noun == "some" else "zebra"] == noun


@pytest.mark.parametrize(("token", "ends"), [(",", True), ("was", True), ("ball", False)])
def test_a_noun_phrase_ends_before_commas_and_verbs(token, ends):
    assert ends_noun(token) is ends


# ---- requests


def test_a_story_is_about_its_person_and_its_things():
    told = (
        "Once upon a time, there was a little girl named Lily. She had a dog. The dog was in the park.\n"
        "One day, Lily found a red ball in the park. The dog and Lily were happy."
    )
    found = {topic for seed in range(20) for topic in find_topics(told, LEXICON, random.Random(seed))}
    assert found == {"a little girl named Lily", "a dog", "a red ball", "the park"}


def test_every_word_of_a_request_is_the_storys_or_the_phrasings():
    for seed, one in enumerate(STORIES):
        request = make_request(one, LEXICON, random.Random(seed), again=seed % 2 == 0)
        assert set(split_into_words(request.lower())) <= OWN | set(split_into_words(one.lower())), request


@pytest.mark.parametrize(
    ("topics", "text"),
    [
        (["a dog"], "a dog"),
        (["a dog", "a hat"], "a dog and a hat"),
        (["Tom and his mom", "a hat"], "Tom, his mom and a hat"),
        (["a", "b", "c"], "a, b and c"),
    ],
)
def test_topics_are_listed_as_people_do(topics, text):
    assert join_topics(topics) == text


def test_requests_are_phrased_in_more_than_twenty_ways():
    shapes = {re.sub(r"(about|with|words) .*", r"\1", request) for request in said(talks(), "user")}
    assert len(shapes) > 20


def test_some_requests_are_typed_carelessly():
    asked = said(talks(), "user")
    careless = [request for request in asked if request == request.lower() and not request.endswith((".", "?", "!"))]
    assert 0.05 < len(careless) / len(asked) < 0.3


def test_a_first_request_does_not_look_back():
    first = [record["messages"][0]["content"].lower() for record in talks()]
    assert [request for request in first if re.search(r"\b(another|again|more|now|next)\b", request)] == []


def test_later_requests_do_look_back():
    later = [message["content"] for record in talks() for message in record["messages"][2::2]]
    assert sum(bool(re.search(r"(?i)\b(another|again|more|now|next)\b", request)) for request in later) > len(later) / 4


def test_a_story_of_unknown_words_is_asked_for_without_a_topic():
    plain = {phrasing.lower().rstrip(".!?") for phrasing in requests.ANY}
    assert {
        make_request("Xyzzy qux.", LEXICON, random.Random(seed)).lower().rstrip(".!?") for seed in range(99)
    } == plain


# ---- conversations


def test_every_story_is_told_once_and_as_it_is():
    assert sorted(said(talks(), "assistant")) == sorted(STORIES)


def test_conversations_have_one_to_six_turns():
    assert {len(record["messages"]) // 2 for seed in range(4) for record in talks(seed)} == {1, 2, 3, 4, 5, 6}


def test_roles_alternate_and_the_user_begins():
    for record in talks():
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"] * (len(record["messages"]) // 2)


def test_the_same_seed_gives_the_same_conversations():
    assert talks(seed=3) == talks(seed=3) != talks(seed=4)


def test_turns_and_number_can_be_fixed():
    assert [len(record["messages"]) for record in talks(turns=3, limit=5)] == [6] * 5


def test_no_stories_are_an_error_and_leave_no_file(tmp_path):
    with pytest.raises(DataError, match=r"talks\.jsonl: not one conversation"):
        write_jsonl(tmp_path / "talks.jsonl", make_conversations([], LEXICON, 0))
    assert list(tmp_path.iterdir()) == []
