"""Times the chat app's page in a real browser: until it can be used, its slowest frames, and its search.

The app answers with an engine that replays a text, so that the page is measured and not a model.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import check_at_least
from mlx_zip.errors import MlxZipError, missing_library_error

from .recording import environment_fields, load_before_bench, summarize_samples

if TYPE_CHECKING:
    from playwright.sync_api import Browser  # pyright: ignore[reportMissingImports]


START_S = 120.0
WORDS = (
    "The boy and his boat went out to the sea. The sea was calm, and **the boat was small**. "
    'He said: "Where is the old whale?" The old whale was under the boat.\n\n'
)
LONG_ANSWER = 500  # base tokens of each answer of the long conversation, about
# In the page: every frame's length in ms, from now on.
FRAMES = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const frame = (now) => {
    window.frames_ms.push(now - last);
    last = now;
    window.frame = requestAnimationFrame(frame);
  };
  window.frame = requestAnimationFrame(frame);
}"""
COLLECT = "() => { cancelAnimationFrame(window.frame); return window.frames_ms.slice(1); }"
READY = """new MutationObserver(() => {
  if (document.documentElement?.dataset.ready === 'true') window.ready_ms ??= performance.now();
}).observe(document, {attributes: true, subtree: true});"""
FETCH = """async ([method, path, body]) => {
  const headers = {Authorization: `Bearer ${localStorage.getItem('key')}`, 'Content-Type': 'application/json'};
  const answer = await fetch('/app/api/' + path, {method, headers, body: body ?? undefined});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}"""
SEARCH = """async ([text]) => {
  const headers = {Authorization: `Bearer ${localStorage.getItem('key')}`};
  const begun = performance.now();
  const answer = await fetch(`/app/api/conversations?limit=100&search=${encodeURIComponent(text)}`, {headers});
  const found = (await answer.json()).conversations.length;
  return [performance.now() - begun, found];
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench app`."""
    add = parser.add_argument
    add("--trials", type=int, default=9, help="times that the page is opened, and searches (default: 9)")
    add("--speed", type=float, default=200.0, help="base tokens per second of the replayed answer (default: 200)")
    add("--seconds", type=float, default=10.0, help="seconds of streaming whose frames are timed (default: 10)")
    add("--conversations", type=int, default=1000, help="conversations that are searched (default: 1000)")
    add("--tokens", type=int, default=20_000, help="base tokens of the long conversation (default: 20000)")


def run(args: argparse.Namespace) -> int:
    """Measures and prints one JSON line. Raises `MlxZipError` without Playwright or a browser."""
    check_at_least(args, 1, "trials", "conversations", "tokens")
    if args.speed <= 0 or args.seconds <= 0:
        raise MlxZipError("--speed and --seconds must be above 0")
    load_before_bench()
    with running_browser() as chrome:
        record = {"bench": "app", **measure_page(chrome, args), "browser": chrome.version}
    print(json.dumps(record | environment_fields("playwright")), flush=True)
    print_figures_beside_targets(record)
    return 0


def measure_page(chrome: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures, times in ms."""
    with tempfile.TemporaryDirectory() as folder, serve_replayed_app(Path(folder), args.speed) as address:
        page = open_page(chrome, address)
        streaming = measure_streaming_frames(page, args.seconds)
        example = export_conversations(page)
        import_conversations(page, [make_short_conversation(example, i) for i in range(args.conversations)])
        import_conversations(page, [make_long_conversation(example, args.tokens)])
        opening = summarize_samples([time_until_usable_ms(chrome, address) for _ in range(args.trials)])
        long = measure_long_conversation(chrome, address, args.seconds)
        return {
            "speed": args.speed,
            "interactive_ms": opening,
            "frames_streaming": streaming,
            "frames_long": long,
            "long_tokens": args.tokens,
            "conversations": args.conversations,
            **time_search(page, args.trials),
        }


@contextmanager
def serve_replayed_app(folder: Path, speed: float) -> Iterator[str]:
    (folder / "text.md").write_text(WORDS * 400, encoding="utf-8")
    words = ["--text", "text.md", "--speed", str(speed), "--data", "conversations.db"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "mlx_zip.apps.replayed_app", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    impatient = threading.Timer(START_S, process.kill)
    impatient.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                impatient.cancel()
                yield found[0]
                return
        raise MlxZipError(f"the app ended at once: {''.join(lines)[-500:]}")
    finally:
        impatient.cancel()
        process.terminate()
        process.wait(30)


def open_page(chrome: Any, address: str) -> Any:
    page = chrome.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.add_init_script(READY)
    page.goto(address)
    page.wait_for_selector("html[data-ready=true]")
    return page


def time_until_usable_ms(chrome: Any, address: str) -> float:
    page = open_page(chrome, address)
    ready_ms = page.evaluate("window.ready_ms")
    page.context.close()
    return ready_ms


def measure_streaming_frames(page: Any, seconds: float) -> dict[str, Any]:
    page.get_by_test_id("input").fill("Tell me a story.")
    page.evaluate(FRAMES)
    page.get_by_test_id("input").press("Enter")
    page.get_by_test_id("stop").wait_for()
    page.wait_for_timeout(1000 * seconds)
    frames = page.evaluate(COLLECT)
    page.get_by_test_id("stop").click()
    page.get_by_test_id("send").wait_for()
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-role=assistant]')].every((one) => one.dataset.state !== 'running')"
    )
    return summarize_frame_times(frames)


def summarize_frame_times(frames_ms: list[float]) -> dict[str, Any]:
    ordered = sorted(frames_ms)
    return {
        "frames": len(ordered),
        "median_ms": round(ordered[len(ordered) // 2], 1),
        "p99_ms": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "longest_ms": round(ordered[-1], 1),
        "over_50_ms": sum(one > 50 for one in ordered),
        "over_100_ms": sum(one > 100 for one in ordered),
    }


def export_conversations(page: Any) -> dict[str, Any]:
    return page.evaluate(FETCH, ["GET", "export", None])


def import_conversations(page: Any, conversations: list[dict[str, Any]]) -> None:
    for i in range(0, len(conversations), 50):
        body = {"format": "mlx_zip conversations", "version": 1, "conversations": conversations[i : i + 50]}
        page.evaluate(FETCH, ["POST", "import", json.dumps(body)])


def make_short_conversation(example: dict[str, Any], number: int) -> dict[str, Any]:
    made = copy.deepcopy(example["conversations"][0])
    made["title"], made["updated"] = f"Conversation {number}", made["updated"] - 60 * (number + 1)
    for message in made["messages"]:
        message |= {"tokens": None, "learned": [], "text": f"word{number} {WORDS * 2}"}
    return made


def make_long_conversation(example: dict[str, Any], tokens: int) -> dict[str, Any]:
    made = copy.deepcopy(example["conversations"][0])
    user, answer = made["messages"][:2]
    shown, text, count = [], "", 0
    for token in answer["tokens"] or []:
        shown.append(token)
        text += token["t"]
        count += max(1, len(token.get("p") or ()))
        if count >= LONG_ANSWER:
            break
    made["title"], made["messages"], parent = "A long conversation", [], None
    for i in range(-(-tokens // count)):
        ids = f"u{i}", f"a{i}"
        made["messages"].append({**user, "id": ids[0], "parent": parent})
        made["messages"].append(
            {**answer, "id": ids[1], "parent": ids[0], "text": text, "tokens": shown, "state": "whole"}
        )
        parent = ids[1]
    return made | {"leaf": parent}


def measure_long_conversation(chrome: Any, address: str, seconds: float) -> dict[str, Any]:
    page = open_page(chrome, address)
    page.evaluate(FRAMES)
    page.get_by_test_id("conversation-link").get_by_text("A long conversation").first.click()
    page.get_by_test_id("message").nth(1).wait_for()
    page.wait_for_timeout(1000)
    opened = page.evaluate(COLLECT)
    page.evaluate(FRAMES)
    page.mouse.move(700, 300)
    begun = time.monotonic()
    while time.monotonic() - begun < min(seconds, 5):
        page.mouse.wheel(0, -1500)
        page.wait_for_timeout(50)
    scrolled = page.evaluate(COLLECT)
    streamed = measure_streaming_frames(page, seconds)
    page.context.close()
    return {"open": summarize_frame_times(opened), "scroll": summarize_frame_times(scrolled), "streaming": streamed}


def time_search(page: Any, trials: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    for i in range(trials):
        for name, text in {"one": f"word{i * 7}", "all": "whale", "none": f"nothing{i}"}.items():
            times.setdefault(name, []).append(page.evaluate(SEARCH, [text])[0])
    return {f"search_{name}_ms": summarize_samples(samples) for name, samples in times.items()}


def print_figures_beside_targets(record: dict[str, Any]) -> None:
    long = record["frames_long"]
    rows = [
        ("page can be used", record["interactive_ms"]["max"], 1000),
        ("longest frame, streaming", record["frames_streaming"]["longest_ms"], 100),
        ("longest frame, long conversation opens", long["open"]["longest_ms"], 100),
        ("longest frame, long conversation scrolls", long["scroll"]["longest_ms"], 100),
        ("longest frame, long conversation, streaming", long["streaming"]["longest_ms"], 100),
        *((f"search, {name}", record[f"search_{name}_ms"]["max"], 100) for name in ("one", "all", "none")),
    ]
    for name, value, bound in rows:
        print(f"{name:45} {value:8.1f} ms   {'met' if value <= bound else 'MISSED'} (at most {bound})", file=sys.stderr)


# ---- a Chromium that is on this machine, driven by Playwright; none is downloaded

VARIABLE = "MLX_ZIP_CHROMIUM"  # names the browser's program
NAMES = ("chromium", "chromium-browser", "google-chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = ("--force-color-profile=srgb", "--font-render-hinting=none", "--disable-dev-shm-usage")


def find_chromium() -> str | None:
    """Returns the path of Chromium or Chrome, None if there is none. MLX_ZIP_CHROMIUM goes before all others."""
    given = os.environ.get(VARIABLE)
    if given:
        return shutil.which(given)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (str(MAC) if MAC.is_file() else None)


def missing_browser_requirement() -> str | None:
    if find_spec("playwright") is None:
        return "needs Playwright (PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 pip install -e '.[browser]')"
    if find_chromium() is None:
        return f"needs Chromium (Debian: apt install chromium), or its path in {VARIABLE}"
    return None


@contextmanager
def running_browser(*flags: str) -> Iterator[Browser]:
    """Starts a browser without a window and ends it after the `with` statement. flags: further flags for it.

    Raises `InstallationError` without Playwright and `MlxZipError` without a browser.
    """
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise missing_library_error("the browser", "playwright", extra="browser") from error
    program = find_chromium()
    if program is None:
        raise MlxZipError(f"a browser is needed: {missing_browser_requirement()}")
    own = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium refuses to run as root in its sandbox
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=[*FLAGS, *own, *flags])
        try:
            yield started
        finally:
            started.close()
