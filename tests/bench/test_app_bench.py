"""The bench of the page: its conversations are whole, and its figures count what they say."""

from mlx_zip.bench import app_page

TOKENS = [{"t": "The boy"}, {"t": " and his", "p": [" and", " his"], "o": "pack", "a": -1}] * 400
EXAMPLE = {
    "conversations": [
        {
            "id": "c",
            "title": "t",
            "updated": 1000.0,
            "leaf": "a",
            "messages": [
                {"id": "u", "parent": None, "role": "user", "text": "Tell me."},
                {"id": "a", "parent": "u", "role": "assistant", "text": "", "tokens": TOKENS, "state": "stopped"},
            ],
        }
    ]
}


def test_the_long_conversation_has_as_many_tokens_as_were_asked_for():
    made = app_page.make_long_conversation(EXAMPLE, 5000)
    answers = [one for one in made["messages"] if one["role"] == "assistant"]
    counts = [sum(len(token.get("p", "1")) for token in one["tokens"]) for one in answers]
    assert 5000 <= sum(counts) < 5000 + app_page.LONG_ANSWER + 2
    assert all("".join(token["t"] for token in one["tokens"]) == one["text"] for one in answers)


def test_the_long_conversation_is_one_path_to_its_last_message():
    made = app_page.make_long_conversation(EXAMPLE, 2000)
    parents = {one["id"]: one["parent"] for one in made["messages"]}
    path, at = [], made["leaf"]
    while at is not None:
        path, at = [*path, at], parents[at]
    assert len(path) == len(made["messages"])


def test_each_conversation_that_is_searched_has_a_word_of_its_own():
    texts = [app_page.make_short_conversation(EXAMPLE, i)["messages"][1]["text"] for i in (3, 33)]
    assert [f"word{i} " in text for i in (3, 33) for text in texts] == [True, False, False, True]
    assert EXAMPLE["conversations"][0]["title"] == "t"


def test_frames_are_counted_by_their_length():
    assert app_page.summarize_frame_times([16.0] * 97 + [60.0, 101.0, 120.0]) == {
        "frames": 100,
        "median_ms": 16.0,
        "p99_ms": 120.0,
        "longest_ms": 120.0,
        "over_50_ms": 3,
        "over_100_ms": 2,
    }
