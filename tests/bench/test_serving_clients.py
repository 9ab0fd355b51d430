"""The client of `bench serve`, and how it reads answers."""

import asyncio
import json

import pytest

from mlx_zip.bench.serve.client import Reply, answered_tokens, chat_text, first_text_s, send_request
from mlx_zip.bench.serve.timing import long_prompt, unfairness_ratio
from mlx_zip.errors import MlxZipError


def answered(parts, timeout_s=5.0, **options):
    """The reply to a server that answers with these bytes, one part after the other, and the request it saw."""
    seen = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async def both():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(send_request, port, "/path", {"a": 1}, timeout_s=timeout_s, **options)

    return asyncio.run(both()), seen[0]


def chunked(*parts):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def test_a_whole_answer_is_read_by_its_length():
    reply, request = answered([b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\n", b'{"err', b'":1}'])
    assert (reply.status, reply.body) == (400, {"err": 1})
    assert request.startswith(b"POST /path HTTP/1.1\r\n")
    assert request.endswith(b'{"a": 1}')


def test_an_empty_object_is_a_whole_answer():
    assert answered([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])[0].body == {}


def test_events_are_read_wherever_their_bytes_are_cut():
    text = b': note\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    reply, _ = answered(chunked(*(text[i : i + 7] for i in range(0, len(text), 7))))
    assert [event for _, event in reply.events] == [{"n": 1}, {"n": 2}, "[DONE]"]
    times = [seconds for seconds, _ in reply.events]
    assert times == sorted(times)
    assert reply.seconds >= times[-1] > 0


@pytest.mark.parametrize("parts", [[], [b"HTTP/1.1 200 OK\r\nContent-Le"], chunked(b"data: 1\n\n")[:-1]])
def test_an_answer_that_breaks_off_is_an_error(parts):
    with pytest.raises(MlxZipError, match="no whole answer"):
        answered(parts)


def test_text_and_base_tokens_are_read_from_the_events():
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    streamed = [{"choices": [{"delta": {"content": c}}]} for c in ("", "h", "i")] + [{"choices": [], "usage": usage}]
    reply = Reply(200, events=list(enumerate([*streamed, "[DONE]"])))
    assert (chat_text(reply), answered_tokens(reply)) == ("hi", 2)


def stream(*texts):
    """A streamed chat completion; texts: (second, piece of text)."""
    events = [(at, {"choices": [{"delta": {"content": text}}]}) for at, text in texts]
    return Reply(200, events=[(0.0, {"choices": [{"delta": {"role": "assistant"}}]}), *events], seconds=texts[-1][0])


def test_the_first_text_is_not_the_first_event():
    assert first_text_s(stream((0.5, "a"), (0.7, "b"))) == 0.5


def test_unfairness_compares_what_streams_had_when_the_first_one_ended():
    quick, slow = stream((1, "aaaa"), (2, "bbbb")), stream((1, "aa"), (3, "bbbbbbbbbbb"))
    assert unfairness_ratio([quick, slow]) == 4
    assert unfairness_ratio([quick, quick]) == 1


def test_long_prompts_differ_from_the_beginning_on():
    prompts = [long_prompt(50, number) for number in range(9)]
    assert {len(prompt.split()) for prompt in prompts} == {50}
    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) == 9
    json.dumps(prompts)
