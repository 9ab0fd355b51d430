"""Plays an agent against `mlx_zip serve`: many turns, tools, and a prompt that grows, and reports what was cached.

In every second turn the model must call a tool; its answer and a made-up result of the tool join the conversation. In
the others it writes text. The answers of a small model make no sense; what counts is that each turn's prompt begins
with all that the turns before it were, so that only the new part need be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.bench.recording import environment_fields, load_before_bench
from mlx_zip.bench.records import table
from mlx_zip.errors import MlxZipError

from .client import Reply, send_request
from .server_process import ServerProcess, serve_command

TEMPLATE = (  # for models whose own template has no tools
    "{{ bos_token }}{% if tools %}<|user|>Tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content or '' }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{{ eos_token }}'
    "{% elif m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a thing.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["tree", "boat", "house"]}, "far": {"type": "boolean"}},
            "required": ["thing", "far"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TOKENS = 40  # base tokens of an answer that is text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench agent`."""
    add = parser.add_argument
    add("--model", default="stories", help="chat model to serve: folder, hub id or bundled model (default: stories)")
    add("--turns", type=int, default=12, help="number of requests (default: 12)")
    add("--own-template", action="store_true", help="use the model's own chat template, which must have tools")


def run(args: argparse.Namespace) -> int:
    """Plays the agent and prints one JSON line; returns 1 if a forced call is missing. Raises `MlxZipError`."""
    check_at_least(args, 1, "turns")
    load_before_bench()
    template = [] if args.own_template else ["--chat-template", TEMPLATE]
    with TemporaryDirectory() as folder, ServerProcess([*serve_command(args.model, Path(folder)), *template]) as server:
        turns = asyncio.run(play_conversation(server.port, args.turns))
    record = {"bench": "agent", "model": {"zip": args.model}, "turns": turns, **environment_fields("mlx", "mlx-lm")}
    print(json.dumps(record), flush=True)
    heads = ("turn", "answer", "prompt, base tokens", "cached", "share")
    rows = [
        [str(n), t["kind"], str(t["prompt"]), str(t["cached"]), f"{t['cached'] / t['prompt']:.1%}"]
        for n, t in enumerate(turns, 1)
    ]
    print(table(heads, rows), file=sys.stderr)
    return 0 if all(turn["kind"] == "call" for turn in turns[::2]) else 1


async def play_conversation(port: int, count: int) -> list[dict[str, Any]]:
    """Plays the turns of one conversation. Returns for each: kind of the answer, base tokens of the prompt, cached."""
    model = (await send_request(port, "/v1/models")).body["data"][0]["id"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look around and tell me a story about what you see."}
    ]
    turns = []
    for number in range(count):
        forced = number % 2 == 0
        body = {"model": model, "messages": messages, "tools": [TOOL], "max_tokens": 120 if forced else TOKENS}
        body |= {"tool_choice": "required" if forced else "auto", "temperature": 0, "seed": number}
        reply = await send_request(port, "/v1/chat/completions", body)
        message = assistant_message(reply)
        usage = reply.body["usage"]
        calls = message.get("tool_calls") or []
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append({"kind": "call" if calls else "text", "prompt": usage["prompt_tokens"], "cached": cached})
        messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": tool_result(call)} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "Look again."})
    return turns


def assistant_message(reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        raise MlxZipError(f"the server answered {reply.status}: {reply.body}")
    return reply.body["choices"][0]["message"]


def tool_result(call: dict[str, Any]) -> str:
    asked = json.loads(call["function"]["arguments"])
    return f"The {asked['thing']} is {'far away' if asked['far'] else 'near'}."
