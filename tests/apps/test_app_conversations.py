"""Conversations of the app over HTTP: made, listed, changed, answered, branched, deleted."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mlx_zip.engine import Differing
from mlx_zip.errors import EngineError
from support.chat_app import AUTHORIZED, Chat, chatting
from support.fake_engine import FakeEngine, Script, any_role
from support.http_server import post, until

STORY = "Once upon a time there was a boat."


@pytest.fixture(scope="module")
def chat():
    with chatting() as served:
        yield served


@pytest.fixture(scope="module")
def instructed():
    """The app with a model that takes a system prompt."""
    engine = FakeEngine(vocab=any_role())
    with chatting(engine, system="Be brief.") as served:
        served.engine = engine  # type: ignore[attr-defined]
        yield served


def asked(chat: Chat, text: str = "Tell me a story."):
    """A conversation with one answer, and that answer."""
    one = chat.create()["id"]
    return one, chat.said(one, text)


def test_an_answer_streams_and_is_kept(chat):
    one = chat.create()["id"]
    frames = chat.answer(one, text="Tell me a story.")
    assert [frame["message"]["role"] for frame in frames[:2]] == ["user", "assistant"]
    assert "".join(frame["text"] for frame in frames if frame["type"] == "text") == STORY
    assert (frames[-1]["type"], frames[-1]["message"]["text"]) == ("done", STORY)
    shown = chat.show(one)
    assert [(m["role"], m["state"], m["text"]) for m in shown["messages"]] == [
        ("user", "whole", "Tell me a story."),
        ("assistant", "whole", STORY),
    ]
    assert (shown["leaf"], shown["title"]) == (shown["messages"][1]["id"], "Tell me a story.")
    answer = shown["messages"][1]
    assert answer["figures"]["base_tokens"] > answer["figures"]["steps"] > 0
    assert "".join(token["t"] for token in answer["tokens"]) == STORY
    assert {token["o"] for token in answer["tokens"] if "p" in token} == {"pack", "prompt", "answer"}
    assert [entry for frame in frames if frame["type"] == "learned" for entry in frame["entries"]] == answer["learned"]
    assert answer["learned"]


def test_an_answer_keeps_where_its_prompt_differs_from_what_was_kept_also_over_an_export():
    with chatting(engine := FakeEngine()) as chat:
        engine.script.differing = Differing(7, tuple(engine.tokenizer.encode("Lily 8", add_special_tokens=False)), (5,))
        one, answer = asked(chat)
        found = answer["figures"]["prompt_differs"]
        assert (found["at"], found["kept"].strip()) == (7, "xxxx 0")
        assert chat.show(one)["messages"][1]["figures"]["prompt_differs"] == found
        (again,) = chat.call("POST", "import", chat.call("GET", f"conversations/{one}/export").json).json["ids"]
        assert chat.show(again)["messages"][1]["figures"] == answer["figures"]
        engine.script.differing = None
        assert "prompt_differs" not in asked(chat)[1]["figures"]


def test_the_model_reads_the_branch(chat):
    one = chat.create()["id"]
    first = chat.said(one, "Hello.")
    chat.said(one, "And then?", first["id"])
    said = chat.core.engine.inner.told.submissions[-1].base_ids
    text = chat.core.engine.tokenizer.decode(said)
    assert text.index("Hello.") < text.index(STORY) < text.index("And then?")


def test_another_answer_to_a_message_is_a_branch_beside_the_first(chat):
    one, first = asked(chat)
    second = chat.answer(one, parent=first["parent"])[-1]["message"]
    assert second["parent"] == first["parent"]
    assert second["id"] != first["id"]
    assert chat.show(one)["leaf"] == second["id"]


def test_a_message_that_is_edited_begins_a_branch(chat):
    one, first = asked(chat)
    user = first["parent"]
    edited = chat.answer(one, text="Tell me two stories.", parent=None)
    messages = {message["id"]: message for message in chat.show(one)["messages"]}
    assert len(messages) == 4
    assert messages[edited[0]["message"]["id"]]["parent"] is messages[user]["parent"] is None


def test_an_answer_goes_on_where_it_ended(chat):
    one = chat.create(sampling={"max_tokens": 4})["id"]
    cut = chat.said(one, "Tell me a story.")
    assert (cut["state"], cut["reason"]) == ("whole", "length")
    frames = chat.answer(one, parent=cut["id"], **{"continue": True})
    assert frames[0]["message"]["id"] == frames[-1]["message"]["id"] == cut["id"]
    whole = frames[-1]["message"]["text"]
    assert whole.startswith(cut["text"])
    assert len(whole) > len(cut["text"])
    assert len(chat.show(one)["messages"]) == 2


def test_the_figures_of_an_answer_that_went_on_are_those_of_the_whole_answer(chat):
    one = chat.create(sampling={"max_tokens": 3})["id"]
    first = chat.said(one, "Tell me a story.")
    chat.call("PATCH", f"conversations/{one}", {"sampling": {}})
    frames = chat.answer(one, parent=first["id"], **{"continue": True})
    before, after = first["figures"], frames[-1]["message"]["figures"]
    came = [token for frame in frames if frame["type"] == "text" for token in frame["tokens"]]
    assert before["base_tokens"] == 3
    assert after["base_tokens"] == 3 + sum(len(token.get("p", "1")) for token in came) + 1  # the last one ends it
    assert after["steps"] > before["steps"]
    assert after["seconds"] > before["seconds"]
    assert after["base_tokens_per_step"] == round(after["base_tokens"] / after["steps"], 3)
    assert [frame for frame in frames if frame["type"] == "figures"][-1] == {"type": "figures", **after}


def test_drafted_tokens_and_the_figures_of_drafts_are_told_and_kept(tmp_path):
    file = tmp_path / "kept.db"
    with chatting(FakeEngine(Script(drafted=(1, 2), refused=5)), file=file) as chat:
        one = chat.create()["id"]
        frames = chat.answer(one, text="Tell me a story.")
        message = chat.show(one)["messages"][1]
        export = chat.call("GET", f"conversations/{one}/export").json
        (again,) = chat.call("POST", "import", export).json["ids"]
        assert [chat.show(again)["messages"][1][name] for name in ("tokens", "figures")] == [
            message[name] for name in ("tokens", "figures")
        ]
    came = [token for frame in frames if frame["type"] == "text" for token in frame["tokens"]]
    assert [nth for nth, token in enumerate(came) if token.get("d")] == [1, 2]
    assert message["tokens"] == came
    figures = message["figures"]
    assert (figures["proposed"], figures["accepted"]) == (7, 2)
    assert figures["base_tokens_per_pass"] == round(figures["base_tokens"] / (figures["steps"] - 2), 3)
    with chatting(file=file) as chat:
        assert chat.show(one)["messages"][1] == message


def test_an_answer_of_a_version_without_drafts_can_be_gone_on_with_one_that_has_some(tmp_path):
    file, engine = tmp_path / "kept.db", FakeEngine(Script(ends=False))
    with chatting(engine, file=file) as chat:
        one = chat.create(sampling={"max_tokens": 4})["id"]
        first = chat.said(one, "Tell me a story.")
        older = {name: value for name, value in first["figures"].items() if "pass" not in name}
        del older["proposed"], older["accepted"]
        chat.store.database.write(
            lambda db: db.execute("UPDATE messages SET figures = ? WHERE id = ?", (json.dumps(older), first["id"]))
        )
        engine.script = Script(drafted=(1, 2), refused=5)
        after = chat.answer(one, parent=first["id"], **{"continue": True})[-1]["message"]["figures"]
    assert (after["proposed"], after["accepted"]) == (6, 1)  # four base tokens are two ids
    assert after["base_tokens_per_pass"] == round(after["base_tokens"] / (after["steps"] - 1), 3)


def test_an_answer_that_goes_on_has_the_white_space_between_its_parts_once():
    begun = Script(text="Once upon a time.\n\n", ends=False)
    engine = FakeEngine(begun)
    with chatting(engine) as chat:
        one, cut = asked(chat)
        assert cut["text"].endswith("\n\n")
        engine.script = Script(text="\n\nThen came a boat.")
        frames = chat.answer(one, parent=cut["id"], **{"continue": True})
        assert frames[0]["message"]["text"] == "Once upon a time."
        whole = frames[-1]["message"]
        assert whole["text"] == "Once upon a time.\n\nThen came a boat."
        assert "".join(token["t"] for token in whole["tokens"]) == whole["text"]
        kept = chat.show(one)["messages"][1]
        assert (kept["text"], kept["tokens"]) == (whole["text"], whole["tokens"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"text": "x", "parent": "nobody"}, 404),
        ({}, 400),
        ({"parent": "ANSWER"}, 400),
        ({"parent": "USER", "text": "x"}, 400),
        ({"parent": "USER", "continue": True}, 400),
        ({"parent": "ANSWER", "text": "x", "continue": True}, 400),
        ({"text": ""}, 400),
        ({"text": "half \ud800"}, 400),
        ({"text": "x", "unknown": 1}, 400),
        ({"text": "x", "model": "another"}, 404),
        ({"text": "word " * 3000}, 400),
    ],
)
def test_an_answer_that_cannot_be_given_changes_nothing(chat, body, status):
    one, first = asked(chat)
    names = {"ANSWER": first["id"], "USER": first["parent"]}
    body = {key: names.get(value, value) if isinstance(value, str) else value for key, value in body.items()}
    refused = chat.call("POST", f"conversations/{one}/answer", body)
    assert (refused.status, bool(refused.json["error"]["message"])) == (status, True)
    assert len(chat.show(one)["messages"]) == 2


def test_stop_ends_an_answer_and_keeps_what_was_written():
    engine = FakeEngine(Script(text="Once upon a time. " * 300, delay_s=0.02))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        found = []
        thread = threading.Thread(target=lambda: found.extend(chat.answer(one, text="Tell me a story.")))
        thread.start()
        assert until(lambda: engine.told.tickets)
        time.sleep(0.3)
        assert chat.call("POST", f"conversations/{one}/stop").json == {"stopped": 1}
        thread.join(10)
        assert found[-1]["type"] == "done"
        message = chat.show(one)["messages"][1]
        assert (message["state"], message) == ("stopped", found[-1]["message"])
        assert message["text"].startswith("Once upon")
        assert until(lambda: engine.told.tickets[0].cancelled.is_set())
        assert chat.call("POST", f"conversations/{one}/stop").json == {"stopped": 0}


def test_a_page_that_is_closed_stops_its_answer():
    engine = FakeEngine(Script(text="Once upon a time. " * 300, delay_s=0.02))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        path = f"/app/api/conversations/{one}/answer"
        header = f"Authorization: {AUTHORIZED['Authorization']}"
        connection = chat.raw(post(path, {"text": "Tell me a story."}, header))
        assert until(lambda: b"Once" in connection.recv(4096))
        connection.close()
        assert until(lambda: chat.show(one)["messages"][1]["state"] == "stopped")
        assert chat.show(one)["messages"][1]["text"].startswith("Once")


def test_a_new_conversation_has_the_system_prompt_that_the_app_was_started_with(instructed):
    assert instructed.call("GET", "state").json["defaults"]["system"] == "Be brief."
    one, _ = asked(instructed)
    assert instructed.show(one)["system"] == "Be brief."
    prompt = instructed.engine.told.submissions[-1].base_ids
    assert instructed.engine.tokenizer.decode(prompt).startswith("system: Be brief.")
    assert instructed.create(system="Be kind.")["system"] == "Be kind."


def test_an_empty_system_prompt_of_a_new_conversation_is_none_and_not_the_default(instructed):
    one = instructed.create(system="")["id"]
    assert instructed.show(one)["system"] == ""
    instructed.said(one, "hello")
    prompt = instructed.engine.told.submissions[-1].base_ids
    assert instructed.engine.tokenizer.decode(prompt).startswith("user: hello")
    assert instructed.create(system=None)["system"] == "Be brief."


def test_a_system_prompt_that_the_template_refuses_is_refused_at_once_with_the_reason(chat):
    one, _ = asked(chat)
    refused = chat.call("PATCH", f"conversations/{one}", {"system": "Be brief.", "title": "other"})
    assert refused.status == 400
    assert "takes no system message" in refused.json["error"]["message"]
    assert (chat.show(one)["system"], chat.show(one)["title"]) == ("", "Tell me a story.")
    assert chat.call("POST", "conversations", {"system": "Be brief."}).status == 400
    assert chat.call("PATCH", f"conversations/{one}", {"system": ""}).status == 200


def test_fields_of_a_conversation_are_changed(instructed):
    chat = instructed
    one, answer = asked(chat)
    fields = {"title": "A <b>title</b>", "system": "s", "draft": "dr", "sampling": {"temp": 0.5}, "leaf": answer["id"]}
    changed = chat.call("PATCH", f"conversations/{one}", fields).json
    assert {name: changed[name] for name in fields} == fields
    assert "messages" not in changed
    assert chat.show(one)["draft"] == "dr"


@pytest.mark.parametrize(
    "fields", [{"leaf": "nobody"}, {"sampling": {"temp": -1}}, {"sampling": {"x": 1}}, {"title": 5}, {"id": "other"}]
)
def test_fields_that_are_wrong_change_nothing(chat, fields):
    one = chat.create(title="before")["id"]
    assert chat.call("PATCH", f"conversations/{one}", fields).status in (400, 404)
    assert chat.show(one)["title"] == "before"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"title": 501 * "a"}, "title: this has 501 characters, and at most 500 are allowed"),
        ({"packs": [""]}, "packs.0: this must not be empty"),
        ({"packs": 101 * ["a"]}, "packs: this has 101 items, and at most 100 are allowed"),
    ],
)
def test_a_field_that_is_too_long_or_empty_is_told_so_in_its_unit(chat, fields, said):
    one = chat.create()["id"]
    assert chat.call("PATCH", f"conversations/{one}", fields).json["error"]["message"] == said


def test_a_conversation_is_deleted(chat):
    one, _ = asked(chat)
    assert chat.call("DELETE", f"conversations/{one}").json == {"deleted": 1}
    for method in ("GET", "DELETE"):
        assert chat.call(method, f"conversations/{one}").status == 404


def test_all_conversations_are_deleted_also_from_the_file(tmp_path):
    file = tmp_path / "c.db"
    with chatting(file=file) as chat:
        for _ in range(3):
            one, _ = asked(chat, "A zebra under the bed")
        chat.call("DELETE", f"conversations/{one}")
        assert chat.call("DELETE", "conversations").json == {"deleted": 2}
        assert chat.call("GET", "conversations").json == {"conversations": [], "total": 0}
        left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"zebra" not in left.lower()
    assert b"zeb" not in left.lower()


def test_conversations_are_listed_the_last_changed_first(chat):
    chat.call("DELETE", "conversations")
    ids = [chat.create(title=f"nr {i}")["id"] for i in range(3)]
    chat.call("PATCH", f"conversations/{ids[0]}", {"title": "new"})
    chat.call("PATCH", f"conversations/{ids[1]}", {"draft": "moves nothing"})
    found = chat.call("GET", "conversations?limit=2&offset=0").json
    assert ([one["id"] for one in found["conversations"]], found["total"]) == ([ids[0], ids[2]], 3)
    rest = chat.call("GET", "conversations?limit=2&offset=2").json
    assert [one["id"] for one in rest["conversations"]] == [ids[1]]
    assert chat.call("GET", "conversations?limit=-1").status == 400


def test_a_conversation_that_is_reloaded_while_it_is_answered_shows_what_there_is():
    engine = FakeEngine(Script(text="Once upon a time. " * 300, delay_s=0.02))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        thread = threading.Thread(target=lambda: chat.answer(one, text="Tell me a story."))
        thread.start()
        assert until(lambda: (chat.show(one)["messages"] or [{}])[-1].get("text", "").startswith("Once"))
        assert chat.show(one)["messages"][-1]["state"] == "running"
        chat.call("POST", f"conversations/{one}/stop")
        thread.join(10)


def test_two_pages_that_answer_in_one_conversation_lose_nothing():
    engine = FakeEngine(Script(delay_s=0.01))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        found: list[dict] = []
        asked = [threading.Thread(target=lambda i=i: found.append(chat.said(one, f"Story {i}"))) for i in range(4)]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join(20)
        messages = {message["id"]: message for message in chat.show(one)["messages"]}
        assert len(messages) == 8
        assert all(messages[answer["id"]] == answer for answer in found)
        assert {messages[answer["parent"]]["text"] for answer in found} == {f"Story {i}" for i in range(4)}


def test_only_one_page_goes_on_with_an_answer(monkeypatch):
    with chatting(FakeEngine(Script(delay_s=0.02))) as chat:
        one, first = asked(chat)
        resume = chat.store.resume
        monkeypatch.setattr(chat.store, "resume", lambda *asked: (time.sleep(0.3), resume(*asked)))
        path, body = f"conversations/{one}/answer", {"parent": first["id"], "continue": True}
        statuses: list[int] = []
        pages = [threading.Thread(target=lambda: statuses.append(chat.call("POST", path, body).status)) for _ in "abc"]
        for page in pages:
            page.start()
        for page in pages:
            page.join(20)
        assert sorted(statuses) == [200, 409, 409]
        assert chat.show(one)["messages"][1]["text"] == 2 * STORY
        assert chat.answer(one, **body)[-1]["type"] == "done"


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted():
    engine = FakeEngine(Script(text="Once upon a time. " * 300, delay_s=0.02))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        frames: list[dict] = []
        thread = threading.Thread(target=lambda: frames.extend(chat.answer(one, text="Tell me a story.")))
        thread.start()
        assert until(lambda: len(chat.show(one)["messages"]) == 2)
        assert chat.call("DELETE", f"conversations/{one}").json == {"deleted": 1}
        thread.join(10)
        assert frames[-1]["message"]["state"] == "stopped"
        assert chat.call("GET", f"conversations/{one}").status == 404
        assert chat.call("GET", "conversations").json["total"] == 0


def test_an_engine_that_fails_is_told_in_the_answer_which_is_kept():
    engine = FakeEngine(Script(text="Once upon a time", fails=EngineError("the model is broken")))
    with chatting(engine) as chat:
        one = chat.create()["id"]
        frames = chat.answer(one, text="Tell me a story.")
        assert frames[-1] == {"type": "error", "message": "the model is broken", "state": "failed"}
        message = chat.show(one)["messages"][1]
        assert (message["state"], message["reason"], message["text"]) == (
            "failed",
            "the model is broken",
            "Once upon a time",
        )
