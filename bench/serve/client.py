"""An HTTP client that records when each event of a streamed answer arrives.

It talks to servers on this machine, one request per connection, in the dialect of chat completions.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

from mlx_zip.errors import MlxZipError

END = "[DONE]"  # the last event of a streamed answer


@dataclass
class Reply:
    """A server's answer.

    events: for a streamed answer, (seconds after the request was sent, content of a `data:` line). body: content of any
    other answer. JSON is parsed; anything else is kept as text. seconds: time until the last byte.
    """

    status: int
    body: Any = None
    events: list[tuple[float, Any]] = field(default_factory=list)
    seconds: float = 0.0


def send_request(port: int, path: str, body: Any = None, *, timeout_s: float = 120.0) -> Reply:
    """Sends a request to 127.0.0.1 and returns the reply: a POST of `body` as JSON, or a GET if there is no body.

    Raises `MlxZipError` if the server sends nothing for timeout_s seconds, or the answer's end is missing.
    """
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
            connection.connect()
            sent = time.perf_counter()
            connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            reply = Reply(answer.status)
            if answer.headers.get_content_type() == "text/event-stream":
                for line in answer:
                    if line.startswith(b"data:"):
                        reply.events.append((time.perf_counter() - sent, parse_json_or_text(line[5:].strip())))
                is_whole = bool(reply.events) and reply.events[-1][1] == END
            else:
                found = answer.read()
                reply.body, is_whole = parse_json_or_text(found), bool(found)
            reply.seconds = time.perf_counter() - sent
    except (OSError, HTTPException) as error:
        raise MlxZipError(f"{path} on port {port}: no whole answer ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise MlxZipError(f"{path} on port {port}: no whole answer (its end is missing)")
    return reply


def parse_json_or_text(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


# ---- chat completions


def chat_text(reply: Reply) -> str:
    """Returns the text of a streamed chat completion."""
    choices = [choice for _, event in reply.events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def answered_tokens(reply: Reply) -> int:
    """Returns the base tokens of a streamed chat completion, as the server counts them."""
    found = next(
        event["usage"] for _, event in reversed(reply.events) if isinstance(event, dict) and event.get("usage")
    )
    return found["completion_tokens"]


def served_model_name(port: int) -> str:
    """Returns the name of the first model that a server lists. Raises `MlxZipError` if it lists none."""
    reply = send_request(port, "/v1/models")
    try:
        return reply.body["data"][0]["id"]
    except (KeyError, IndexError, TypeError) as error:
        raise MlxZipError(f"the server on port {port} lists no model (/v1/models, status {reply.status})") from error


@dataclass(frozen=True)
class AskedServer:
    """A server to send requests to. model: the server's name for its model."""

    port: int
    model: str

    def answer(self, content: str, max_tokens: int) -> Reply:
        """Returns the greedy streamed answer to one message."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return send_request(self.port, "/v1/chat/completions", body)


def first_text_s(reply: Reply) -> float:
    """Returns the seconds from the request to a streamed chat completion's first text; without text, to its end."""
    for seconds, event in reply.events:
        if isinstance(event, dict) and any(one["delta"].get("content") for one in event.get("choices") or ()):
            return seconds
    return reply.seconds
