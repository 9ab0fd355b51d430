"""The app in a process of its own, and pages of it in a real browser that report whatever goes wrong in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.command_line import without_torch
from support.http_server import until
from support.places import TESTS

START_S = 90.0
WAIT_MS = 45_000  # also where both cores are busy
AXE = TESTS / "apps/vendor/axe.min.js"
BAD = ("serious", "critical")
# Runs in every page before its own scripts: counts what a strict content security policy stopped.
SPY = """window.violations = [];
addEventListener('securitypolicyviolation', (e) => violations.push(e.blockedURI || e.violatedDirective));"""
# Whether more than n answers are shown, and the last one has text (begun) or has ended.
BEGUN, ENDED = (
    f"""n => {{
      const all = [...document.querySelectorAll('[data-testid=message][data-role=assistant]')];
      return all.length > n && {holds};
    }}"""
    for holds in (
        "all.at(-1).querySelector('[data-testid=message-text]')?.textContent.length > 3",
        "all.at(-1).dataset.state !== 'running'",
    )
)
FETCH = """async ([method, path, body]) => {
  const headers = {Authorization: `Bearer ${localStorage.getItem('key')}`, 'Content-Type': 'application/json'};
  const answer = await fetch('/app/api/' + path, {method, headers, body: body ?? undefined});
  return answer.status === 204 ? null : await answer.json();
}"""


class App:
    """`mlx_zip app`, or another module that prints an address with a token, in a process of its own.

    words: what comes after `python -m`. home: the folder that stands for the user's home and data folders.
    """

    def __init__(self, home: Path, words: Sequence[str] = ("mlx_zip", "app", "--no-open")) -> None:
        self.home, self.words, self._at = home, list(words), "0"
        self.url, self.printed = "", ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> App:
        """Starts the process and waits until it has printed its address."""
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "MLX_ZIP_DEVICE": "cpu",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.printed = ""
        module, *words = self.words
        process = self._process = subprocess.Popen(
            [*without_torch(module, "-u", "-P"), *words, "--port", self._at],  # -P: not the home's folder mlx_zip
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.home,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        assert until(lambda: self._found() or process.poll() is not None, START_S), self.printed
        assert self._found(), self.printed
        self._at = str(self.port)  # where it is found when it comes back
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.printed += line

    def _found(self) -> bool:
        match = re.search(r"http://127\.0\.0\.1:\d+/app/#token=[\w-]+", self.printed)
        self.url = match[0] if match else self.url
        return bool(match)

    @property
    def port(self) -> int:
        """The port that the app listens on."""
        return int(re.findall(r":(\d+)/", self.url)[0])

    @property
    def token(self) -> str:
        """The key of the app's address."""
        return self.url.partition("#token=")[2]

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ends the process with a signal, at last with SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(by)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


@contextmanager
def running(app: App) -> Iterator[App]:
    """Starts an app and ends it after the `with` statement."""
    try:
        yield app.start()
    finally:
        app.end()


@dataclass
class Noted:
    """What went wrong in a page: errors and warnings on its console, exceptions, dialogs, files that did not come."""

    console: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


class Tab:
    """A page of the app. `noted` holds what went wrong in it; `noted.foreign` every request to another machine."""

    def __init__(self, page: Any, app: App) -> None:
        self.page, self.app, self.noted = page, app, Noted()
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(SPY)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.noted.exceptions.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.noted.console.append(f"{message.text} ({message.location.get('url', '')})")

    def _dialog(self, dialog: Any) -> None:
        self.noted.dialogs.append(dialog.message)
        dialog.dismiss()

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"http://127.0.0.1:{self.app.port}/", "data:", "blob:")):
            self.noted.foreign.append(request.url)

    def forget(self) -> Tab:
        """Has the browser forget what the page kept in it: the key, choices, a draft."""
        whose = {"origin": f"http://127.0.0.1:{self.app.port}", "storageTypes": "local_storage"}
        self.page.context.new_cdp_session(self.page).send("Storage.clearDataForOrigin", whose)
        return self

    def open(self, path: str = "") -> Tab:
        """Opens the address that the app printed, or a path below it with the key that the browser keeps."""
        self.page.goto(self.app.url if not path else f"http://127.0.0.1:{self.app.port}{path}")
        return self.ready()

    def ready(self) -> Tab:
        """Waits until the page has everything that it needs to work."""
        self.page.wait_for_selector("html[data-ready=true]")
        return self

    def __getitem__(self, name: str) -> Any:
        """Returns the elements with a `data-testid`."""
        return self.page.get_by_test_id(name)

    def send(self, text: str, whole: bool = True) -> Tab:
        """Sends a message; waits for the end of the answer if it is to be `whole`, else for its first characters."""
        before = self.page.locator("[data-testid=message][data-role=assistant]").count()
        self["input"].fill(text)
        self["input"].press("Enter")
        return self.answered(before) if whole else self.streaming(before)

    def copied(self, exported: dict[str, Any]) -> Tab:
        """Imports an exported conversation as the newest one and shows it, with its answer."""
        (kept,) = exported["conversations"]
        body = exported | {"conversations": [kept | {"created": time.time(), "updated": time.time()}]}
        (made,) = self.api("POST", "import", body)["ids"]
        self.page.evaluate("id => { location.hash = `#/c/${id}`; }", made)
        self.answered()
        self.page.evaluate("dispatchEvent(new Event('focus'))")  # the page looks again: the list shows it, too
        self.page.locator(f"[data-testid=conversation].current[data-id='{made}']").wait_for()
        return self

    def answers(self) -> Any:
        """Returns the answers on the page."""
        return self.page.locator("[data-testid=message][data-role=assistant]")

    def streaming(self, before: int = 0) -> Tab:
        """Waits until the answer after the first `before` ones has begun."""
        self.page.wait_for_function(BEGUN, arg=before)
        return self

    def answered(self, before: int = 0) -> Tab:
        """Waits until the answer after the first `before` ones has ended."""
        self.page.wait_for_function(ENDED, arg=before)
        return self

    def raced(self) -> Tab:
        """Starts the race that is shown and waits for its verdict."""
        self["race-start"].click()
        verdict = "() => document.querySelector('[data-testid=race-verdict]').textContent.length > 10"
        self.page.wait_for_function(verdict, timeout=4 * WAIT_MS)
        return self

    def text(self, nth: int = -1) -> str:
        """Returns the text of an answer as it is shown."""
        return self.answers().nth(nth).get_by_test_id("message-text").inner_text()

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Asks the app's server from within the page and returns the JSON of its answer."""
        return self.page.evaluate(FETCH, [method, path, None if body is None else json.dumps(body)])

    def violations(self) -> list[str]:
        """Returns what the page's content security policy has stopped."""
        return self.page.evaluate("window.violations")

    def flaws(self, *within: str) -> list[str]:
        """Returns what axe-core finds serious or critical: rule, element, what to do. within: CSS selectors."""
        if not self.page.evaluate("!!window.axe"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        context = {"include": [list(within)]} if within else {}
        found = self.page.evaluate("context => axe.run(Object.keys(context).length ? context : document)", context)
        return [
            f"{one['id']}: {node['html'][:120]}: {node['failureSummary'][:300]}"
            for one in found["violations"]
            if one["impact"] in BAD
            for node in one["nodes"]
        ]
