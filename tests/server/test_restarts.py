"""A chat of 1,000 tokens goes on after a kill, and after a restart, with next to nothing read again; both engines."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager

import pytest

from support.command_line import without_torch
from support.http_server import until
from support.serving import both

START_S, ANSWER_S = 240, 240
WORDS = "frog bird tree little big red blue ball mom dad saw ran said happy sad day park house cat dog was went the a"


def text(tokens):
    """About so many tokens of the bundled model: sentences of words in a random order."""
    rng, words = random.Random(0), WORDS.split()
    return " ".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(tokens // 10))


@contextmanager
def serving(kind, folder):
    """A server in a process of its own; gives the process and its address."""
    start = without_torch("mlx_zip") if kind == "mlx" else [sys.executable, "-m", "mlx_zip"]
    words = [*start, "serve", "--port", "0", "--engine", kind, "--session-cache", str(folder)]
    settings = {**os.environ, "MLX_ZIP_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serving stories on "), process.stderr.read()
        yield process, line.split()[3]
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def ask(url, messages, max_tokens):
    """What a chat says to messages: the answer and the usage."""
    body = json.dumps({"model": "stories", "messages": messages, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        said = json.load(response)
    return said["choices"][0]["message"], said["usage"]


def cached_share(used):
    return used["prompt_tokens_details"]["cached_tokens"] / used["prompt_tokens"]


@pytest.mark.slow
@both
def test_each_next_turn_of_a_long_chat_is_found_on_disk_after_a_kill_and_after_a_restart(tmp_path, kind):
    folder = tmp_path / "kept"
    turns = [{"role": "user", "content": text(900)}]
    with serving(kind, folder) as (process, url):
        said, used = ask(url, turns, 30)
        assert 900 < used["prompt_tokens"] + used["completion_tokens"] < 1200
        assert until(lambda: folder.is_dir() and any(folder.glob("*.safetensors")))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    turns += [said, {"role": "user", "content": "And then?"}]
    with serving(kind, folder) as (process, url):
        said, used = ask(url, turns, 5)
        assert cached_share(used) >= 0.95
        turns += [said, {"role": "user", "content": text(200)}]
        said, used = ask(url, turns, 5)
        assert cached_share(used) < 0.95  # the last turns are a larger part than what may be read again
        process.send_signal(signal.SIGTERM)  # at once: the server still has to write what it holds
        process.wait(60)
    turns += [said, {"role": "user", "content": "And then?"}]
    with serving(kind, folder) as (_, url):
        _, used = ask(url, turns, 5)
    assert cached_share(used) >= 0.95
