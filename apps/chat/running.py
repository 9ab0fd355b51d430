"""Runs the app on a local port, with a new key for each run, until a signal arrives or its window is closed."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from mlx_zip.apps.chat import exchange, page_files, routes, state
from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.page_files import OPEN, PageHeaders
from mlx_zip.apps.chat.running_answers import RunningAnswers
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.engine import Engine
from mlx_zip.engine.engines import Engines
from mlx_zip.server.app import make_app
from mlx_zip.server.options import Options
from mlx_zip.server.running import Server, bind_socket

HOST = "127.0.0.1"
PREFERRED_PORT = 7437  # the same at each start, so that the browser finds the page's local storage


@dataclass(frozen=True)
class PageDisplay:
    """How the page is shown: in a window of its own if `window`, else in the browser if `browser`, else not at all.

    storage_folder: where the window keeps the page's local storage; None if it is not kept.
    """

    browser: bool = True
    window: bool = False
    storage_folder: Path | None = None


def open_listener(port: int | None) -> socket.socket:
    """Returns a socket bound to a port of this machine. Raises `OSError` if the port cannot be bound.

    port: None means `PREFERRED_PORT`, or any free port if `PREFERRED_PORT` is taken.
    """
    if port is not None:
        return bind_socket(HOST, port)
    usual = None
    try:
        usual = bind_socket(HOST, PREFERRED_PORT)
        usual.listen()  # claims the port at once: two programs may have bound it while both open their models
    except OSError:
        if usual is not None:
            usual.close()
        return bind_socket(HOST, 0)
    return usual


def new_token() -> str:
    """Returns a random key for one run of the app."""
    return secrets.token_urlsafe(32)


def run_app(
    engines: Engines,
    options: Options,
    listener: socket.socket,
    store: Store,
    settings: Settings,
    showing: PageDisplay,
    open_model: Callable[[str], Engine] | None = None,
    hypertokens: dict[str, bool] | None = None,
) -> BaseException | None:
    """Serves the app until its window is closed or a signal arrives; the signal is then raised again.

    options.api_key: the key in the page's address. open_model, hypertokens: see `Models`. Returns the error that ended
    the main engine's thread if that error stopped the app, else None. Raises `GenerationError` if the model's chat
    template cannot render `settings.system`.
    """
    address = f"http://{HOST}:{listener.getsockname()[1]}/app/#token={options.api_key}"
    models = Models(engines, with_open_page(options), open_model, hypertokens)
    models.check_system(settings.system)
    app = make_chat_app(store, models, settings)

    def say() -> None:
        print(f"mlx_zip app: {address} (Ctrl-C ends)", flush=True)
        if showing.browser and not showing.window:
            threading.Thread(target=_open_browser, args=(address,), daemon=True).start()

    server = Server(models.main, "warning", say, app)
    try:
        if showing.window:
            _serve_in_window(server, listener, address, showing.storage_folder)
        else:
            server.run([listener])
    finally:
        models.close()
    return server.fault


def _open_browser(address: str) -> None:
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)


def _serve_in_window(server: Server, listener: socket.socket, address: str, folder: Path | None) -> None:
    """Serves in a second thread while the main thread shows the page in a window.

    folder: where the window keeps the page's local storage; on a Mac, WebKit chooses the folder instead. None turns on
    pywebview's private mode, which deletes the page's local storage at every start.
    """
    webview: Any = import_module("webview")
    serving = threading.Thread(target=server.run, args=([listener],), daemon=True)
    serving.start()
    ended = threading.Thread(target=_close_windows_after, args=(serving, webview), daemon=True)
    try:
        while serving.is_alive() and not server.started:
            time.sleep(0.02)
        webview.create_window("mlx_zip", address, width=1180, height=820, min_size=(360, 480))
        ended.start()
        webview.start(private_mode=folder is None, storage_path=None if folder is None else str(folder))
    finally:
        server.should_exit = True
        serving.join()


def _close_windows_after(serving: threading.Thread, webview: Any) -> None:
    serving.join()
    for window in list(webview.windows):
        window.destroy()


# ---- the app as an ASGI app: the server's routes, the page's files and the page's own routes


def with_open_page(options: Options) -> Options:
    """Returns the server's settings with the page's files (`OPEN`) readable without a key; the rest still needs it."""
    return replace(options, open_paths=(*options.open_paths, *OPEN))


def make_chat_app(store: Store, models: Models, settings: Settings) -> ASGIApp:
    """Returns the ASGI app. `models.main.options` must come from `with_open_page`."""
    answers = RunningAnswers(store)
    more = [
        *page_files.routes(),
        *state.routes(store, models, settings),
        *routes.routes(store, models, answers, settings.system),
        *routes.race_routes(store, models),
        *exchange.routes(store, models.main),
    ]
    return PageHeaders(make_app(models.main, more))
