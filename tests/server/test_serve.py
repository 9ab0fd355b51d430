"""`mlx_zip serve` as its users start it: a process of its own, with the model that comes with the package."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import mlx_zip
import mlx_zip.server
from mlx_zip.cli.serving import serve
from mlx_zip.engine.mlx.generate import load, stream_generate
from support.clients import anthropic_client, openai_client
from support.command_line import WITHOUT_TORCH, without_torch
from support.forked_server import forked_server
from support.http_server import post, read_all, until
from support.places import REPO

if TYPE_CHECKING:
    from openai import OpenAI

PROMPT = "Tell me a story about a frog."
USER = [{"role": "user", "content": PROMPT}]
START_S = 120


@dataclass
class Served:
    """A server in a process of its own."""

    url: str

    @property
    def openai(self) -> OpenAI:
        return openai_client(self, timeout=60)


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mlx_zip serve` on a free port, started as users start it: the process and its address."""
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*without_torch("mlx_zip"), "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings,
    )
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        timer.cancel()
        found = re.fullmatch(r"serving stories on (http://127\.0\.0\.1:\d+)/v1 \(Ctrl-C ends\)\n", line)
        assert found, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield process, found[1]
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started("--session-cache", str(tmp_path_factory.mktemp("sessions"))) as (_, url):
        yield Served(url)


@pytest.fixture(scope="module")
def story() -> str:
    """What `generate` says to the prompt."""
    model, tokenizer = load("stories")
    return "".join(one.text for one in stream_generate(model, tokenizer, USER, max_tokens=300))


def test_the_server_says_what_generate_says(server, story):
    answer = server.openai.chat.completions.create(model="stories", messages=USER, max_tokens=300)
    assert answer.choices[0].message.content == story
    assert answer.model_extra["mlx_zip"]["hypertokens"] > 0


@pytest.mark.slow
def test_a_stream_says_the_same_and_so_does_anthropics_dialect(server, story):
    chunks = server.openai.chat.completions.create(model="stories", messages=USER, max_tokens=300, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == story
    client = anthropic_client(server)
    message = client.messages.create(model="stories", messages=USER, max_tokens=300)
    assert message.content[0].text == story


def test_the_next_turn_of_a_chat_is_not_read_again(server):
    first = server.openai.chat.completions.create(model="stories", messages=USER, max_tokens=300)
    turns = [*USER, {"role": "assistant", "content": first.choices[0].message.content}]
    turns.append({"role": "user", "content": "And then?"})
    second = server.openai.chat.completions.create(model="stories", messages=turns, max_tokens=10)
    used = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= 0.95 * used


def test_a_seed_says_the_same_alone_and_in_company(server):
    asked = {"model": "stories", "messages": USER, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    alone = server.openai.chat.completions.create(**asked).choices[0].message.content
    together = server.openai.chat.completions.create(**asked, n=3).choices
    assert together[0].message.content == alone


def test_log_probabilities_of_a_real_model_are_of_its_tokens(server):
    asked = {"model": "stories", "messages": USER, "logprobs": True, "top_logprobs": 3, "max_tokens": 20}
    choice = server.openai.chat.completions.create(**asked).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in choice.logprobs.content)


@pytest.mark.parametrize(
    "fields", [{"extra_body": {"top_k": 10**9}}, {"temperature": 1e3}, {"extra_body": {"pack": "none"}}]
)
def test_options_that_the_engine_refuses_are_told_as_bad_requests(server, fields):
    from openai import BadRequestError

    with pytest.raises(BadRequestError):
        server.openai.chat.completions.create(model="stories", messages=USER, **fields)
    assert server.openai.chat.completions.create(model="stories", messages=USER, max_tokens=5).choices


def test_a_prompt_beyond_the_context_is_refused(server):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="context"):
        server.openai.chat.completions.create(model="stories", messages=[{"role": "user", "content": "frog " * 9000}])


def test_a_client_that_leaves_is_noticed_by_the_engine(server):
    fields = {"messages": USER, "max_tokens": 400, "logit_bias": {}, "n": 4, "temperature": 1.5}
    connection = connected(server.url)
    connection.sendall(post("/v1/chat/completions", fields))
    assert until(lambda: figure(server.url, "running") > 0)
    connection.close()
    assert until(lambda: figure(server.url, "running") == 0, 5)


def connected(url: str) -> socket.socket:
    """Connects to a server on this machine."""
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


def figure(url: str, name: str) -> float:
    text = urllib.request.urlopen(url + "/metrics", timeout=10).read().decode()
    return float(re.search(rf"^mlx_zip_{name} (\S+)$", text, re.MULTILINE)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_lets_an_answer_end_and_then_ends_the_server(tmp_path, number, status):
    with forked_server(tmp_path) as (process, url):
        connection = connected(url)
        connection.sendall(post("/v1/chat/completions", {"messages": USER, "stream": True, "max_tokens": 60}))
        begun = connection.recv(100)
        process.send_signal(number)
        assert b"data: [DONE]" in begun + read_all(connection)
        assert process.wait(30)[0] == status


@pytest.mark.slow
def test_a_second_interrupt_ends_answers_with_an_error_and_writes_no_traceback():
    with started("--drain", "60") as (process, url):
        asked = {"messages": USER, "max_tokens": 1500, "temperature": 1.5, "n": 4}
        both = []
        for stream in (True, False):
            both.append(connected(url))
            both[-1].sendall(post("/v1/chat/completions", {**asked, "stream": stream}))
        assert until(lambda: figure(url, "running") == 8)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        streamed, whole = [read_all(connection) for connection in both]
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert b'"code":"stopped"' in streamed
    assert whole.startswith(b"HTTP/1.1 503 ")


@pytest.mark.slow
def test_a_server_whose_output_nobody_reads_serves():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    reader, writer = os.pipe()
    os.close(reader)
    command = [*without_torch("mlx_zip"), "serve", "--port", port]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    try:
        assert process.stderr is not None
        assert f"WARNING mlx_zip.server.running: serving on http://127.0.0.1:{port}/v1" in process.stderr.readline()
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == (None, "")
    finally:
        process.kill()
    assert process.returncode == 143


@pytest.mark.slow
def test_the_engines_death_ends_the_process_with_status_1_and_a_line():
    code = (
        WITHOUT_TORCH + "import sys, threading; sys.path.insert(0, 'tests')\n"
        "from mlx_zip.engine.mlx import mlx_engine\n"
        "from support.fake_engine import FakeEngine\n"
        "def open_engine(*_, **__):\n"
        "    engine = FakeEngine()\n"
        "    threading.Timer(1, engine.die).start()\n"
        "    return engine\n"
        "mlx_engine.open_engine = open_engine\n"
        "from mlx_zip.cli import main\n"
        "sys.exit(main(['serve', '--port', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=START_S)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stderr.splitlines()[-1] == "error: the engine has stopped: RuntimeError: a fault"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "--port"),
        (["--host", "999.0.0.1"], "--host"),
        (["--host", ""], "--host"),
        (["--kv-bits", "7"], "--kv-bits"),
        (["--kv-bits", "8", "--kv-group-size", "7"], "--kv-group-size"),
        (["--prompt-cache-size", "3"], "--prompt-cache-bytes"),
        (["--host", "127." + "a" * 300], "--host"),
        (["--drain", "inf"], "--drain"),
        (["--drain", "nan"], "--drain"),
        (["--keep-wired", "-1"], "--keep-wired"),
        (["--keep-wired", "inf"], "--keep-wired"),
        (["--temp", "nan"], "--temp"),
        (["--top-p", "1e-320"], "--top-p"),
        (["--draft-model", "nowhere/at/all"], "nowhere/at/all"),
        (["--num-draft-tokens", "16"], "--num-draft-tokens"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--top-p", "2"], "--top-p"),
        (["--chat-template-args", "[]"], "--chat-template-args"),
        (["--chat-template", "nowhere.jinja"], "--chat-template"),
        (["--chat-template", "/dev/null"], "--chat-template"),
        (["--chat-template", "{{"], "--chat-template: the chat template cannot render"),
        (["--session-files", "nowhere"], "--session-files"),
        (["--api-key", ""], "--api-key"),
        (["--model", ""], "the name of the model is empty"),
        (["--model", "nowhere/"], "nowhere"),
        (["--pack", "nowhere.json"], "nowhere.json"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_in_one_line(run, home, flags, words):
    status, said, error = run("serve", "--port", "0", *flags)
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert words in error


def test_a_port_that_is_taken_is_named(run, home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, error = run("serve", "--port", port)
    assert (status, error.count("\n")) == (2, 1)
    assert port in error
    assert "choose another --port" in error


@pytest.mark.slow
def test_missing_libraries_are_named_with_the_command_that_installs_them(run, home, monkeypatch):
    monkeypatch.setattr(mlx_zip, "server", mlx_zip.server)  # put back afterwards; the command imports a second one
    for name in [name for name in sys.modules if name.startswith("mlx_zip.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, error = run("serve")
    assert (status, error.count("\n")) == (2, 1)
    assert "'.[serve]'" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "127.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_of_a_loopback_address_only_its_names_are_allowed(host):
    args = argparse.Namespace(allowed_hosts=None, host=host)
    assert serve._allowed_hosts(args) == {"localhost", "127.0.0.1", "::1", host}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost.example.org", "127.example.org", "192.168.1.2"])
def test_an_address_that_others_reach_has_no_names_by_itself(host):
    assert serve._allowed_hosts(argparse.Namespace(allowed_hosts=None, host=host)) is None
