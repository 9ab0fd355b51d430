"""Conversations leave as files and come back; what is no export of ours is refused with its reason."""

from __future__ import annotations

import copy
import json

import pytest

from support.chat_app import AUTHORIZED, chatting

XSS = "<script>alert(1)</script><img src=x onerror=alert(2)> \u202e \u0000 ]]> </style> 👩‍👩‍👧 שלום"


@pytest.fixture(scope="module")
def chat():
    with chatting() as served:
        yield served


@pytest.fixture
def export(chat):
    """An export of one conversation with two branches."""
    one = chat.create(system="", sampling={"temp": 0.5})["id"]
    first = chat.said(one, "Tell me a story.")
    chat.answer(one, parent=first["parent"])
    return chat.call("GET", f"conversations/{one}/export").json


def bare(conversation):
    """A conversation without ids, its messages' parents as indices."""
    ids = [message["id"] for message in conversation["messages"]]
    place = {one: i for i, one in enumerate(ids)}
    messages = [
        {**m, "id": place[m["id"]], "parent": place.get(m["parent"])} for m in copy.deepcopy(conversation["messages"])
    ]
    return {**conversation, "id": 0, "leaf": place.get(conversation["leaf"]), "messages": messages}


def test_an_export_comes_back_as_it_was_under_new_ids(chat, export):
    answer = chat.call("POST", "import", export)
    assert (answer.status, answer.json["imported"]) == (200, 1)
    (one,) = answer.json["ids"]
    (given,) = export["conversations"]
    assert one != given["id"]
    assert bare(chat.show(one)) == bare(given)


def test_an_export_has_pin_and_folder_and_one_from_before_there_were_any_comes_back(chat, export):
    (given,) = export["conversations"]
    chat.call("PATCH", f"conversations/{given['id']}", {"pinned": True, "folder": "Tales"})
    export = chat.call("GET", f"conversations/{given['id']}/export").json
    (one,) = chat.call("POST", "import", export).json["ids"]
    assert (chat.show(one)["pinned"], chat.show(one)["folder"]) == (True, "Tales")
    older = {name: value for name, value in export["conversations"][0].items() if name not in ("pinned", "folder")}
    (one,) = chat.call("POST", "import", export | {"conversations": [older]}).json["ids"]
    assert (chat.show(one)["pinned"], chat.show(one)["folder"]) == (False, "")


def test_an_answer_can_be_continued_whose_figures_contradict_each_other(chat, export):
    export["conversations"][0]["messages"][1]["figures"] = {"base_tokens": 0, "steps": 1, "base_tokens_per_s": 5.0}
    (one,) = chat.call("POST", "import", export).json["ids"]
    answer = chat.show(one)["messages"][1]
    assert chat.answer(one, parent=answer["id"], **{"continue": True})[-1]["type"] == "done"


def test_all_conversations_are_exported_together(chat, export):
    answer = chat.call("GET", "export")
    assert answer.headers["content-disposition"] == 'attachment; filename="conversations.json"'
    total = chat.call("GET", "conversations").json["total"]
    assert len(answer.json["conversations"]) == total
    assert chat.call("POST", "import", answer.json).json["imported"] == total


def test_tokens_that_do_not_make_up_the_text_are_left_out(chat, export):
    for message in export["conversations"][0]["messages"]:
        message["tokens"] = [{"t": "Something else."}]
    (one,) = chat.call("POST", "import", export).json["ids"]
    assert [message["tokens"] for message in chat.show(one)["messages"]] == [None, None, None]


@pytest.mark.slow
def test_an_export_of_more_than_ten_thousand_messages_comes_back(chat, export):
    (given,) = export["conversations"]
    user = given["messages"][0]
    given["messages"] = [
        {**user, "id": f"m{i}", "parent": f"m{i - 1}" if i else None, "text": str(i)} for i in range(10_001)
    ]
    given["leaf"] = "m10000"
    answer = chat.call("POST", "import", export)
    assert answer.status == 200, answer.body
    (one,) = answer.json["ids"]
    again = chat.call("GET", f"conversations/{one}/export").json
    assert bare(again["conversations"][0]) == bare(given)
    chat.call("DELETE", f"conversations/{one}")


def test_markdown_has_the_branch_that_is_shown(chat, export):
    one = export["conversations"][0]["id"]
    chat.call("PATCH", f"conversations/{one}", {"title": "../../A *boat*\n# and more"})
    answer = chat.call("GET", f"conversations/{one}/export?format=md")
    assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="A-boat-and-more.md"'
    text = answer.body.decode()
    assert text.startswith("# ../../A *boat* # and more\n\n## You\n\nTell me a story.\n\n## stories\n\nOnce upon")
    assert text.count("Once upon") == 1
    assert chat.call("GET", f"conversations/{one}/export?format=exe").status == 400


def changed(export, *path_and_value):
    """An export with one value changed, at a path below its first conversation; `...` deletes."""
    *path, last, value = path_and_value
    found = copy.deepcopy(export)
    at = found["conversations"][0]
    for step in path:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return found


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("title", 5), "title"),
        (("title", "x" * 501), "title"),
        (("title", "half \ud800"), "title"),
        (("messages", "text"), "messages"),
        (("messages", ...), "messages"),
        (("messages", 0, "role", "system"), "role"),
        (("messages", 0, "text", None), "text"),
        (("messages", 0, "id", {"$gt": ""}), "id"),
        (("messages", 1, "parent", "nobody"), "parent"),
        (("messages", 0, "parent", "SELF"), "parent"),
        (("messages", 0, "created", "today"), "created"),
        (("messages", 0, "created", 1e300), "created"),
        (("messages", 1, "state", "evil"), "state"),
        (("messages", 1, "tokens", [{"t": 1}]), "tokens"),
        (("messages", 1, "tokens", [{"t": "x", "o": "elsewhere"}]), "tokens"),
        (("messages", 1, "figures", {"steps": "many"}), "figures"),
        (("messages", 1, "figures", {"steps": 1, "x": 2}), "figures"),
        (("messages", 1, "figures", {"steps": -1}), "figures"),
        (("messages", 1, "figures", {"base_tokens": 10**400}), "figures"),
        (("messages", 1, "figures", {"base_tokens_per_s": -1.0}), "figures"),
        (("leaf", "nobody"), "leaf"),
        (("sampling", {"temp": -1}), "temp"),
        (("onload", "alert(1)"), "onload"),
        (("packs", ["x"] * 101), "packs"),
    ],
)
def test_an_import_with_a_fault_is_refused_naming_it_and_nothing_is_added(chat, export, where, words):
    before = chat.call("GET", "conversations").json["total"]
    first = export["conversations"][0]["messages"][0]["id"]
    given = changed(export, *[first if one == "SELF" else one for one in where])
    answer = chat.call("POST", "import", given)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]
    assert chat.call("GET", "conversations").json["total"] == before


def test_two_messages_of_one_id_are_refused(chat, export):
    first = export["conversations"][0]["messages"][0]["id"]
    assert chat.call("POST", "import", changed(export, "messages", 1, "id", first)).status == 400


@pytest.mark.parametrize(
    "foreign",
    [
        [{"title": "x", "mapping": {}, "current_node": "a"}],
        {"conversations": []},
        {"format": "another program", "version": 1, "conversations": []},
        {"format": "mlx_zip conversations", "version": 2, "conversations": []},
        {"chat_messages": [], "uuid": "1"},
        {},
        "text",
    ],
)
def test_an_export_of_another_program_is_refused_with_its_reason(chat, foreign):
    answer = chat.call("POST", "import", foreign)
    assert answer.status == 400
    assert "no export of this app" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"not json", b'{"format": NaN}', b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"\x00\xff"]
)
def test_an_import_that_is_no_json_is_refused(chat, body):
    assert chat.call("POST", "import", body).status == 400


def test_an_answer_that_was_being_written_comes_back_as_cut(chat, export):
    (one,) = chat.call("POST", "import", changed(export, "messages", 1, "state", "running")).json["ids"]
    assert chat.show(one)["messages"][1]["state"] == "cut"


def test_code_in_texts_stays_text(chat, export):
    given = changed(export, "title", XSS)
    for message in given["conversations"][0]["messages"]:
        message["text"] = XSS
    given["conversations"][0]["messages"][1]["tokens"] = [{"t": XSS, "id": 1, "p": [XSS], "o": "answer", "a": 3}]
    (one,) = chat.call("POST", "import", given).json["ids"]
    answer = chat.call("GET", f"conversations/{one}")
    assert answer.headers["content-type"] == "application/json"
    shown = json.loads(answer.body)
    assert shown["title"] == XSS
    assert {message["text"] for message in shown["messages"]} == {XSS}
    assert shown["messages"][1]["tokens"][0]["p"] == [XSS]
    markdown = chat.call("GET", f"conversations/{one}/export?format=md")
    assert markdown.headers["content-type"].startswith("text/markdown")
    assert markdown.headers["x-content-type-options"] == "nosniff"


def test_an_import_needs_the_key(chat, export):
    assert chat.ask("POST", "/app/api/import", export).status == 401
    assert chat.ask("POST", "/app/api/import", export, AUTHORIZED).status == 200
