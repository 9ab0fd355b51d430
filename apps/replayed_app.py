"""The chat app with an engine that replays a text: to measure the page, and to see it with any answer.

`python -m mlx_zip.apps.replayed_app --text FILE` prints the page's address, as `mlx_zip app` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_zip.apps.chat.running import PageDisplay, new_token, open_listener, run_app
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.apps.replay import ReplayEngine
from mlx_zip.arguments import Parser
from mlx_zip.engine.engines import Engines
from mlx_zip.named import DEFAULT, bundled_model_folder
from mlx_zip.server.options import Options
from mlx_zip.text.tokenizers import load_tokenizer


def main() -> int:
    """Serves the app until a signal comes; returns the exit status."""
    args = _parser().parse_args()
    tokenizer = load_tokenizer(bundled_model_folder(DEFAULT))
    if args.chat_template is not None:
        tokenizer._tokenizer.chat_template = args.chat_template
    engine = ReplayEngine(tokenizer, Path(args.text).read_text("utf-8"), args.speed)
    options = Options(model="replay", max_tokens=1 << 20, api_key=args.token or new_token(), drain_s=1.0)
    with engine, open_listener(args.port) as listener:
        store = Store(Path(args.data) if args.data else None)
        try:
            run_app(Engines(engine), options, listener, store, Settings(args.system_prompt), PageDisplay(browser=False))
        finally:
            store.close()
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m mlx_zip.apps.replayed_app", description="The chat app, replaying a text.")
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
