"""`bench load`: when requests begin, that none is lost, and that its figures are those of the answers."""

import asyncio
import json
from itertools import pairwise

import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.serve.load import percentiles, start_times

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
EVENTS = [{"choices": [{"delta": {"content": text}}]} for text in ("", "a", "b")] + [{"choices": [], "usage": USAGE}]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS).encode()
MODELS = json.dumps({"data": [{"id": "some"}]}).encode()


def test_fixed_arrivals_are_even_and_bounded_by_count_and_time():
    assert start_times(2.0, 4, 100.0, "fixed", 0) == [0.0, 0.5, 1.0, 1.5]
    assert start_times(2.0, 4, 1.2, "fixed", 0) == [0.0, 0.5, 1.0]
    assert start_times(2.0, 1, 100.0, "fixed", 0) == [0.0]


def test_poisson_arrivals_have_the_rate_and_follow_the_seed():
    found = start_times(5.0, 4000, 1e9, "poisson", 1)
    assert 5.0 * 0.95 < (len(found) - 1) / found[-1] < 5.0 * 1.05
    gaps = [b - a for a, b in pairwise(found)]
    assert 0.36 < sum(gap > 0.2 for gap in gaps) / len(gaps) < 0.38  # 1 / e of exponential gaps are above the mean
    assert start_times(5.0, 9, 1e9, "poisson", 1) == found[:9] != start_times(5.0, 9, 1e9, "poisson", 2)


def test_percentiles_are_in_milliseconds():
    assert percentiles([0.001 * i for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([]) is None


def load_on_server(capsys, statuses, *flags):
    """The exit status, the record and the contents asked of a server that answers with these statuses in turn."""
    seen, left = [], iter(statuses)

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        status, kind, content = 200, "application/json", MODELS
        if head.startswith(b"post"):
            seen.append(json.loads(body)["messages"][0]["content"])
            status, kind, content = next(left), "text/event-stream", STREAM
        if status != 200:
            kind, content = "application/json", b'{"error": {"message": "full"}}'
        if status:
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n".encode())
            writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        writer.close()

    async def both():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = str(server.sockets[0].getsockname()[1])
            return await asyncio.to_thread(main, ["load", "--port", port, "--arrivals", "fixed", *flags])

    status = asyncio.run(both())
    out = capsys.readouterr()
    return status, json.loads(out.out) if out.out else out.err, seen


def test_every_request_is_counted_as_answered_or_failed(capsys):
    status, record, seen = load_on_server(
        capsys, [200, 200, 429, 0, 200], "--rates", "50", "--requests", "4", "--max-tokens", "3"
    )
    (found,) = record["rates"]
    assert status == 1
    assert (found["sent"], found["answered"], found["failed"]) == (4, 2, {"429": 1, "no answer": 1})
    assert found["base_tokens_per_s"] == pytest.approx(3 * found["answers_per_s"], rel=1e-3)  # 3 by each answer
    assert found["first_text_ms"]["p50"] > 0
    assert found["between_ms"]["p50"] >= 0
    assert record["model"] == "some"
    assert len(set(seen)) == 5  # no request begins like another, so that no cache has its prompt


def test_rates_are_measured_one_after_the_other(capsys):
    status, record, seen = load_on_server(capsys, [200] * 5, "--rates", "40", "80", "--requests", "2")
    assert status == 0
    assert [one["rate"] for one in record["rates"]] == [40, 80]
    assert len(set(seen)) == 5


def test_a_server_that_refuses_the_first_request_is_named(capsys):
    status, error, _ = load_on_server(capsys, [400])
    assert status == 2
    assert "answers with status 400" in error


def test_a_port_without_a_server_is_one_clear_line(capsys):
    assert main(["load", "--port", "9"]) == 2
    assert "/v1/models on port 9: no whole answer" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "nan", "inf"])
def test_rates_must_be_numbers_above_zero(capsys, rate):
    assert main(["load", "--rates", rate]) == 2
    assert "--rates and --seconds must be finite numbers above 0" in capsys.readouterr().err
