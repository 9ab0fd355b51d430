"""Other models in the app: chosen, opened, raced against."""

from __future__ import annotations

import threading
import time

import pytest

from mlx_zip.engine import EngineInfo
from mlx_zip.engine.engines import OtherModel
from mlx_zip.errors import ModelError
from mlx_zip.packs.pack import Pack
from support.chat_app import AUTHORIZED, chatting
from support.fake_engine import FakeEngine, Script
from support.http_server import events, post, until

BASE = "Once upon a time there was a base."
USER = [{"role": "user", "content": "Tell me a story."}]


def base_engine() -> FakeEngine:
    engine = FakeEngine(Script(text=BASE))
    engine.info = EngineInfo("plain", engine.info.vocab_size, 2000, 0, 0, "f" * 20)
    return engine


def other(name: str = "plain", kind: str = "control") -> OtherModel:
    return OtherModel(name, kind, base_engine, f"{name}: the baseline", "0.7 bits per byte")


def named(name: str) -> FakeEngine:
    if name == "nowhere":
        raise ModelError("nowhere: no such model folder")
    if name == "slow":
        time.sleep(0.3)
        raise ModelError("slow: no such model folder")
    return base_engine()


@pytest.fixture(scope="module")
def chat():
    with chatting(FakeEngine(), others=[other(), other("off", "off")], open_model=named, packs=PACKS) as served:
        yield served


PACKS = {"chat": Pack(((5, 6), (7, 8)), name="chat"), "web": Pack(((5, 9),), name="web"), "wrong": Pack(((10**6, 1),))}


def raced(chat, **body):
    answer = chat.call("POST", "race", body)
    assert answer.status == 200, answer.body
    return events(answer.body)


def test_the_state_shows_models_packs_and_what_can_be_raced_against(chat):
    state = chat.call("GET", "state").json
    refused = state["models"][0].pop("no_system")
    assert "the stories model knows the roles user and assistant only" in refused
    assert state["models"][0] == {"name": "stories", "hypertokens": True, "loaded": True, "base": "plain"}
    assert [(m["name"], m["hypertokens"]) for m in state["models"][1:]] == [("plain", False)]
    assert [(pack["name"], pack["entries"]) for pack in state["packs"]] == [("chat", 2), ("web", 1), ("wrong", 1)]
    assert [pack["reason"] is None for pack in state["packs"]] == [True, True, False]
    assert "no base id" in state["packs"][2]["reason"]
    assert [(base["name"], base["kind"]) for base in state["race"]] == [("plain", "control"), ("off", "off")]
    assert state["defaults"]["system"] == ""
    assert state["defaults"]["sampling"].keys() >= {"temp", "top_p", "top_k", "min_p", "seed", "max_tokens"}


def test_a_race_runs_one_lane_after_the_other_and_ends_with_both_figures(chat):
    frames = raced(chat, messages=USER, base="plain")
    lanes = [frame["lane"] for frame in frames if "lane" in frame]
    assert lanes == sorted(lanes, reverse=True)
    texts = {
        lane: "".join(f["text"] for f in frames if f.get("lane") == lane and f["type"] == "text") for lane in lanes
    }
    assert texts == {"zip": "Once upon a time there was a boat.", "base": BASE}
    begins = [frame for frame in frames if frame["type"] == "lane"]
    assert [(one["model"], one["quality"]) for one in begins][1] == ("plain", "0.7 bits per byte")
    assert frames[-1]["type"] == "done"
    assert frames[-1]["lanes"].keys() == {"zip", "base"}
    assert frames[-1]["lanes"]["zip"]["base_tokens"] > 0


def test_a_message_of_a_conversation_can_be_raced_and_nothing_is_added_to_it(chat):
    one = chat.create(packs=["chat"], sampling={"max_tokens": 5})["id"]
    answer = chat.said(one, "Tell me a story.")
    frames = raced(chat, conversation=one, leaf=answer["parent"], base="off", max_tokens=7)
    assert frames[-1]["lanes"]["zip"]["base_tokens"] == 7
    assert len(chat.show(one)["messages"]) == 2
    submission = chat.core.engine.inner.told.submissions[-1]
    assert (submission.pack.name, submission.max_tokens) == ("chat", 7)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": USER, "base": "nobody"}, 404),
        ({"base": "plain"}, 400),
        ({"conversation": "nobody", "leaf": "x", "base": "plain"}, 404),
        ({"messages": [], "base": "plain"}, 400),
        ({"messages": [{"role": "tool", "content": "x"}], "base": "plain"}, 400),
        ({"messages": USER, "base": "plain", "max_tokens": 0}, 400),
    ],
)
def test_a_race_that_cannot_be_run_is_refused(chat, body, status):
    assert chat.call("POST", "race", body).status == status


def test_packs_are_merged_for_a_conversation(chat):
    one = chat.create(packs=["chat", "web"])["id"]
    chat.said(one, "Tell me a story.")
    assert len(chat.core.engine.inner.told.submissions[-1].pack.entries) == 3
    chat.call("PATCH", f"conversations/{one}", {"packs": ["nobody"]})
    refused = chat.call("POST", f"conversations/{one}/answer", {"text": "x"})
    assert (refused.status, "nobody" in refused.json["error"]["message"]) == (400, True)


def test_a_conversation_is_answered_by_the_model_that_it_names(chat):
    one = chat.create(model="plain")["id"]
    answer = chat.said(one, "Tell me a story.")
    assert (answer["text"], answer["model"]) == (BASE, "plain")


def test_a_model_that_nobody_named_before_is_opened(chat):
    opened = events(chat.call("POST", "models", {"name": "some/folder"}).body)
    assert [frame["type"] for frame in opened] == ["opening", "done"]
    models = {model["name"]: model for model in chat.call("GET", "state").json["models"]}
    assert (models["some/folder"]["loaded"], models["some/folder"]["hypertokens"]) == (True, False)


def test_a_model_that_cannot_be_opened_is_told_and_forgotten(chat):
    opened = events(chat.call("POST", "models", {"name": "nowhere"}).body)
    assert opened[-1]["type"] == "error"
    assert "nowhere" in opened[-1]["message"]
    assert "nowhere" not in {model["name"] for model in chat.call("GET", "state").json["models"]}
    assert chat.said(chat.create()["id"], "Tell me a story.")["state"] == "whole"


def test_a_model_that_two_pages_cannot_open_at_once_leaves_the_others_usable(chat):
    answers: list[bytes] = []
    asked = [
        threading.Thread(target=lambda: answers.append(chat.call("POST", "models", {"name": "slow"}).body))
        for _ in range(3)
    ]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(20)
    ends = [events(body)[-1] for body in answers]
    assert [(end["type"], end["message"]) for end in ends] == [("error", "slow: no such model folder")] * 3
    assert events(chat.call("POST", "models", {"name": "plain"}).body)[-1]["type"] == "done"


def test_a_page_that_is_closed_ends_its_race():
    engine = FakeEngine(Script(text="Once upon a time. " * 300, delay_s=0.02))
    with chatting(engine, others=[other()]) as chat:
        header = f"Authorization: {AUTHORIZED['Authorization']}"
        connection = chat.raw(post("/app/api/race", {"messages": USER, "base": "plain"}, header))
        assert until(lambda: engine.told.tickets)
        time.sleep(0.1)
        connection.close()
        assert until(lambda: engine.told.tickets[0].cancelled.is_set(), 5)
        assert len(engine.told.tickets) == 1


@pytest.fixture(scope="module")
def fitting():
    """The app with packs of three letters' words, one pack that no model can use, and a pack for all conversations."""
    tokenizer = FakeEngine().tokenizer
    entries = {
        name: tuple(dict.fromkeys(tuple(tokenizer.encode(word, add_special_tokens=False)[:4]) for word in words))
        for name, words in {"sea": ["the sea", "a boat"], "dog": ["the dog", "a tree"]}.items()
    }
    packs = {name: Pack(found, name=name) for name, found in entries.items()}
    packs["foreign"] = Pack(((5, 1 << 30),), name="foreign")
    with chatting(packs=packs) as served:
        yield served


def test_a_prompt_that_a_pack_helps_is_told_the_pack_with_which_it_is_read_in_the_fewest_steps(fitting):
    found = fitting.call("POST", "fit", {"text": "the dog a tree"}).json
    assert found["best"]["name"] == "dog"
    assert found["best"]["ids"] < found["ids"]


def test_a_prompt_of_a_conversation_that_has_the_best_pack_already_is_told_none(fitting):
    assert fitting.call("POST", "fit", {"text": "the dog a tree", "packs": ["dog"]}).json["best"] is None


def test_a_prompt_that_no_pack_helps_is_told_none(fitting):
    assert fitting.call("POST", "fit", {"text": "zzz"}).json["best"] is None


def test_a_fit_with_a_pack_that_is_not_there_is_refused(fitting):
    answer = fitting.call("POST", "fit", {"text": "the dog", "packs": ["cat"]})
    assert (answer.status, "there is no pack 'cat'" in answer.json["error"]["message"]) == (400, True)
