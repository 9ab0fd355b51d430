"""The chat app with an engine that answers every request with one text, at a set speed.

`python -m support.replayed_app --text FILE` prints the page's address, as `mlx_zip app` does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_zip.apps.chat.running import PageDisplay, new_token, open_listener, run_app
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.arguments import Parser
from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.engine import Counted, Counts, Emitted, EngineInfo, Event, Finished, Origin, Progress, Started, Submission
from mlx_zip.engine.engines import Engines
from mlx_zip.named import DEFAULT, bundled_model_folder
from mlx_zip.server.options import Options
from mlx_zip.text.tokenizers import load_tokenizer
from support.fake_engine import FakeEngine, Running, Script

CONTEXT = 1 << 20
CODEBOOK_SIZE, MERGE_SIZE = 2048, 4
KV_BYTES = 1 << 15  # bytes of KV cache that stand for one id
COUNTED_S = 0.1  # time between two `Counted`


class ReplayEngine(FakeEngine):
    """Answers every request with `text`, `tokens_per_s` base tokens per second.

    The text is compressed by the codec as a model would write it, so hypertokens, new entries and counts are real ones.
    """

    def __init__(self, vocab: Any, text: str, tokens_per_s: float) -> None:
        super().__init__(vocab=vocab)
        self.info = EngineInfo("replay", len(vocab), CONTEXT, MERGE_SIZE, CODEBOOK_SIZE, "replay")
        self._speed = tokens_per_s
        self._params = CodecParams(len(vocab), CODEBOOK_SIZE, MERGE_SIZE, tuple(sorted(vocab.eos_token_ids)))
        self._base_ids = [int(one) for one in vocab.encode(text, add_special_tokens=False)]

    def _replay(self, ticket: Running, script: Script, deliver: Callable[[Event], None]) -> None:
        """Delivers the events of one request, until the text or its limit ends or somebody cancels."""
        submission, prompt = ticket.submission, len(ticket.submission.base_ids)
        begun = counted = time.monotonic()
        counts = Counts(prompt_tokens=prompt, prompt_ids=prompt, codebook_size=CODEBOOK_SIZE)
        deliver(Started(prompt, 0, prompt))
        deliver(Progress(prompt, prompt))
        reason = "stop"
        for emitted in self._written(submission):
            due = begun + counts.base_tokens / self._speed
            if ticket.cancelled.wait(max(0.0, due - time.monotonic())):
                reason = "cancelled"
                break
            deliver(emitted)
            counts = _count_emitted(counts, emitted, time.monotonic() - begun)
            if submission.show and time.monotonic() - counted >= COUNTED_S:
                counted = time.monotonic()
                deliver(Counted(counts))
        if 0 <= submission.max_tokens <= counts.base_tokens:
            reason = "length"
        with self._lock:
            self._figures = replace(self._figures, requests=self._figures.requests + 1)
        ticket.ended.set()
        deliver(Finished(reason, counts))

    def _written(self, submission: Submission) -> Iterator[Emitted]:
        """Yields the ids of the text, as the codec writes it."""
        limit = submission.max_tokens if submission.max_tokens >= 0 else CONTEXT
        base_ids = self._base_ids[:limit]
        book = Codebook(self._params)
        known: dict[int, Origin] = {}
        read = len(submission.base_ids)
        for one in map(int, compress(self._params, base_ids)[0]):
            new = book.push([one])
            expansion = tuple(int(base) for base in book.expand([one]))
            read += len(expansion)
            learned = tuple(tuple(map(int, entry)) for _, entry in new)
            known |= {hyper_id: Origin("answer", read) for hyper_id, _ in new}
            origin = known.get(one) if submission.show else None
            yield Emitted(one, expansion, learned=learned, origin=origin)


def _count_emitted(counts: Counts, emitted: Emitted, seconds: float) -> Counts:
    more = len(emitted.base_ids)
    return replace(
        counts,
        base_tokens=counts.base_tokens + more,
        steps=counts.steps + 1,
        hypertokens=counts.hypertokens + (more > 1),
        entries=counts.entries + len(emitted.learned),
        kv_bytes_saved=counts.kv_bytes_saved + (more - 1) * KV_BYTES,
        first_id_s=counts.first_id_s or seconds,
        total_s=seconds,
    )


def main() -> int:
    """Serves the app until a signal comes; returns the exit status."""
    args = _parser().parse_args()
    vocab = load_tokenizer(bundled_model_folder(DEFAULT))
    if args.chat_template is not None:
        vocab._tokenizer.chat_template = args.chat_template
    engine = ReplayEngine(vocab, Path(args.text).read_text("utf-8"), args.speed)
    options = Options(model="replay", max_tokens=1 << 20, api_key=args.token or new_token(), drain_s=1.0)
    with engine, open_listener(args.port) as listener:
        store = Store(Path(args.data) if args.data else None)
        try:
            run_app(Engines(engine), options, listener, store, Settings(args.system_prompt), PageDisplay(browser=False))
        finally:
            store.close()
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m support.replayed_app", description="The chat app, replaying a text.")
    parser.add_argument("--text", required=True, help="file with the text of every answer, UTF-8")
    parser.add_argument("--speed", type=float, default=200.0, help="base tokens per second (default: 200)")
    parser.add_argument("--chat-template", metavar="TEXT", help="in Jinja's language (default: the bundled model's)")
    parser.add_argument("--system-prompt", default="", help="of new conversations (default: none)")
    parser.add_argument("--port", type=int, default=0, help="port of this machine (default: a free one)")
    parser.add_argument("--data", help="file of the conversations (default: they are kept in memory only)")
    parser.add_argument("--token", help="key in the page's address (default: a new one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
