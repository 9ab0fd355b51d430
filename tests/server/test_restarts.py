"""A chat of 1,000 tokens goes on after a kill, and after a restart, with next to nothing read again; both engines."""

import json
import random
import signal
import urllib.request

import pytest

from support.forked_server import forked_server
from support.http_server import until
from support.serving import both

ANSWER_S = 240
WORDS = "frog bird tree little big red blue ball mom dad saw ran said happy sad day park house cat dog was went the a"


def text(tokens):
    """About so many tokens of the bundled model: sentences of words in a random order."""
    rng, words = random.Random(0), WORDS.split()
    return " ".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(tokens // 10))


def ask(url, messages, max_tokens):
    """What a chat says to messages: the answer and the usage."""
    body = json.dumps({"model": "stories", "messages": messages, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        said = json.load(response)
    return said["choices"][0]["message"], said["usage"]


def cached_share(used):
    return used["prompt_tokens_details"]["cached_tokens"] / used["prompt_tokens"]


@pytest.mark.slow
@both
def test_each_next_turn_of_a_long_chat_is_found_on_disk_after_a_kill_and_after_a_restart(tmp_path, kind):
    folder = tmp_path / "kept"
    flags = "--engine", kind, "--session-cache", str(folder)
    turns = [{"role": "user", "content": text(900)}]
    with forked_server(tmp_path, *flags) as (process, url):
        said, used = ask(url, turns, 30)
        assert 900 < used["prompt_tokens"] + used["completion_tokens"] < 1200
        assert until(lambda: folder.is_dir() and any(folder.glob("*.safetensors")))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    turns += [said, {"role": "user", "content": "And then?"}]
    with forked_server(tmp_path, *flags) as (process, url):
        said, used = ask(url, turns, 5)
        assert cached_share(used) >= 0.95
        turns += [said, {"role": "user", "content": text(200)}]
        said, used = ask(url, turns, 5)
        assert cached_share(used) < 0.95  # the last turns are a larger part than what may be read again
        process.send_signal(signal.SIGTERM)  # at once: the server still has to write what it holds
        process.wait(60)
    turns += [said, {"role": "user", "content": "And then?"}]
    with forked_server(tmp_path, *flags) as (_, url):
        _, used = ask(url, turns, 5)
    assert cached_share(used) >= 0.95
