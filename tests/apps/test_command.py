"""`mlx_zip app` as its users start it: a process of its own, with the model that comes with the package."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mlx_zip
import mlx_zip.apps.chat
import mlx_zip.server
from mlx_zip.apps.chat import running
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.engine.engines import Engines
from mlx_zip.files import data_folder
from mlx_zip.server.options import Options
from support.command_line import without_torch
from support.fake_engine import FakeEngine
from support.http_server import events, post, read_all, until
from support.places import REPO

START_S = 120
LINE = re.compile(r"mlx_zip app: (http://127\.0\.0\.1:(\d+)/app/)#token=([\w-]{43}) \(Ctrl-C ends\)\n")


class App:
    """The app in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        found = LINE.fullmatch(line)
        assert found, line
        self.process, self.page, self.port, self.key = process, found[1], int(found[2]), found[3]

    def call(self, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.page + "api/" + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()


@contextmanager
def started(*flags: str) -> Iterator[App]:
    """Starts the app on a free port and waits for its line."""
    words = [*without_torch("mlx_zip"), "app", "--port", "0", "--no-open", *flags]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings, cwd=REPO)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield App(process, process.stdout.readline())
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_app_answers_races_and_keeps_its_conversations_over_ctrl_c(tmp_path: Path):
    file = tmp_path / "c.db"
    with started("--data", str(file)) as app:
        with urllib.request.urlopen(app.page, timeout=10) as page:
            assert page.headers["content-type"] == "text/html; charset=utf-8"
        state = json.loads(app.call("state"))
        assert state["storage"]["file"] == str(file)
        kinds = {base["kind"] for base in state["race"]} - {"model"}  # such as SmolLM2, where its package is installed
        assert kinds == {"control", "off"}
        one = json.loads(app.call("conversations", {}))["id"]
        frames = events(app.call(f"conversations/{one}/answer", {"text": "Tell me a story."}))
        answer = frames[-1]["message"]
        assert "".join(token["t"] for token in answer["tokens"]) == answer["text"]
        assert any(len(token.get("p", ())) > 1 for token in answer["tokens"])
        assert answer["learned"]
        assert answer["figures"]["base_tokens_per_step"] > 1

        raced = events(app.call("race", {"messages": [{"role": "user", "content": "A story"}], "base": "off"}))
        zip_lane, base_lane = raced[-1]["lanes"]["zip"], raced[-1]["lanes"]["base"]
        assert zip_lane["hypertokens"] > base_lane["hypertokens"] == 0

        body, key = {"parent": answer["id"], "text": "Another one."}, f"Authorization: Bearer {app.key}"
        path = f"/app/api/conversations/{one}/answer"
        with socket.create_connection(("127.0.0.1", app.port), timeout=30) as connection:
            connection.sendall(post(path, body, key, "Connection: close"))
            assert until(lambda: b'"type":"text"' in connection.recv(65536))
            app.process.send_signal(signal.SIGINT)
            rest = read_all(connection)
        assert app.process.wait(30) == 130
        assert app.process.stderr is not None
        assert app.process.stderr.read() == ""
        assert b'"type":"done"' in rest or b"the server is stopping" in rest
    store = Store(file)
    shown = store.conversation(one)
    store.close()
    assert shown is not None
    assert [message["state"] for message in shown["messages"][:3]] == ["whole"] * 3
    assert shown["messages"][3]["state"] in ("whole", "cut")
    assert shown["messages"][3]["text"]
    assert {path.name for path in tmp_path.iterdir()} == {"c.db", "c.db.lock"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "--port"),
        (["--port", "-1"], "--port"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--top-p", "2"], "--top-p"),
        (["--temp", "nan"], "--temp"),
        (["--model", ""], "name of the model is empty"),
        (["--model", "nowhere/", "--no-history"], "nowhere"),
        (["--race-against", "nowhere/", "--no-history"], "nowhere"),
        (["--no-history", "--purge"], "--no-history"),
        (["--no-history", "--data", "x"], "--no-history"),
        (["--data", "/dev/null/c.db"], "/dev/null/c.db"),
        (["--window"], "pywebview"),
        (["--chat-template-args", "[]", "--no-history"], "--chat-template-args"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_in_one_line(run, home, monkeypatch, flags, words):
    monkeypatch.setattr("mlx_zip.cli.serving.app.find_spec", lambda _: None)
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    flags = flags if "--port" in flags else ["--port", "0", *flags]
    status, said, error = run("app", *flags)
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert words in error


def test_purge_deletes_all_conversations_and_says_how_many(run, home, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    assert run("app", "--purge") == (0, "deleted: 0 conversations\n", "")
    store = Store(home / "mlx_zip" / "conversations.db")
    for _ in range(2):
        store.create({"title": "secret"})
    store.close()
    assert run("app", "--purge") == (0, "deleted: 2 conversations\n", "")
    assert b"secret" not in (home / "mlx_zip" / "conversations.db").read_bytes()


def test_an_app_on_a_database_that_another_app_has_open_is_refused_in_one_line(run, home):
    store = Store(home / "c.db")
    for flags in (["--port", "0"], ["--purge"]):
        status, said, error = run("app", "--data", str(home / "c.db"), *flags)
        assert (status, said, error.count("\n")) == (2, "", 1)
        assert "c.db: another mlx_zip app has these conversations open; end that app first" in error
    store.close()


def test_purge_is_refused_where_the_disk_cannot_be_written(run, home, monkeypatch):
    file = home / "c.db"
    Store(file).close()

    def refuse(path: object, *_: object) -> int:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        status, said, error = run("app", "--purge", "--data", str(file))
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert "c.db: Read-only file system" in error


def test_a_port_that_is_taken_is_named_and_the_usual_one_is_replaced(run, home, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, error = run("app", "--no-history", "--port", str(port))
        assert (status, str(port) in error) == (2, True)
        assert "choose another --port" in error
        monkeypatch.setattr(running, "PREFERRED_PORT", port)
        with running.open_listener(None) as listener:
            assert listener.getsockname()[1] not in (0, port)


def test_two_apps_that_open_their_models_at_the_same_time_have_ports_of_their_own(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(running, "PREFERRED_PORT", port)
    with running.open_listener(None) as one, running.open_listener(None) as other:
        assert one.getsockname()[1] == port
        other.listen()  # as the server does when its model is open
        assert other.getsockname()[1] != port


def test_each_start_has_a_key_of_its_own():
    assert len({running.new_token() for _ in range(10)}) == 10


def test_missing_libraries_are_named_with_the_command_that_installs_them(run, home, monkeypatch):
    monkeypatch.setattr(mlx_zip, "server", mlx_zip.server)  # put back afterwards; the command imports a second one
    monkeypatch.setattr(mlx_zip.apps, "chat", mlx_zip.apps.chat)
    for name in [name for name in sys.modules if name.startswith(("mlx_zip.server", "mlx_zip.apps.chat"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, error = run("app", "--no-history")
    assert (status, error.count("\n")) == (2, 1)
    assert "'.[serve]'" in error


def test_a_window_shows_the_page_and_the_app_ends_when_it_is_closed(monkeypatch):
    shown: list[str] = []

    def create_window(title: str, address: str, **_: Any) -> None:
        with urllib.request.urlopen(address.partition("#")[0], timeout=10) as page:
            shown.extend([title, address, page.headers["content-type"]])

    monkeypatch.setitem(sys.modules, "webview", FakeWebview(create_window))
    store = Store(None)
    with running.open_listener(0) as listener:
        engine, options = FakeEngine(), Options(api_key=running.new_token())
        showing = running.PageDisplay(window=True)
        assert running.run_app(Engines(engine), options, listener, store, Settings(), showing) is None
    store.close()
    assert shown[0] == "mlx_zip"
    assert shown[1].endswith(f"/app/#token={options.api_key}")
    assert shown[2] == "text/html; charset=utf-8"


class FakeWebview:
    """Stands in for pywebview. started: what `start` was called with."""

    def __init__(self, create_window: Any = lambda *_, **__: None) -> None:
        self.create_window, self.windows, self.started = create_window, [], {}

    def start(self, **options: Any) -> None:
        self.started = options


@pytest.mark.parametrize("kept", [None, "window"])
def test_a_window_keeps_what_the_page_keeps_unless_nothing_is_kept(tmp_path, monkeypatch, kept):
    webview, folder = FakeWebview(), kept and tmp_path / kept
    monkeypatch.setitem(sys.modules, "webview", webview)
    store = Store(None)
    with running.open_listener(0) as listener:
        options, showing = Options(api_key=running.new_token()), running.PageDisplay(window=True, storage_folder=folder)
        running.run_app(Engines(FakeEngine()), options, listener, store, Settings(), showing)
    store.close()
    assert webview.started == {"private_mode": kept is None, "storage_path": kept and str(folder)}


@pytest.mark.parametrize("flags", [[], ["--no-history"]])
def test_the_command_gives_the_window_a_private_folder_unless_there_is_no_history(run, home, monkeypatch, flags):
    shown = []
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setattr(running, "run_app", lambda *args: shown.append(args[5]))
    monkeypatch.setattr("mlx_zip.cli.serving.app.find_spec", lambda name: name)
    assert run("app", "--window", "--port", "0", *flags)[0] == 0
    folder = data_folder() / "window"
    assert shown[0].storage_folder == (None if flags else folder)
    assert folder.exists() != bool(flags)
    assert flags or folder.stat().st_mode & 0o077 == 0
