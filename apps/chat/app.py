"""The app as an ASGI app: the server's routes, the page and what the page talks to."""

from __future__ import annotations

from dataclasses import replace

from starlette.types import ASGIApp

from mlx_zip.apps.chat import exchange_routes, files, race, routes, state
from mlx_zip.apps.chat.answering import Answers
from mlx_zip.apps.chat.files import OPEN, PageHeaders
from mlx_zip.apps.chat.models import Models
from mlx_zip.apps.chat.state import Settings
from mlx_zip.apps.chat.store import Store
from mlx_zip.server.app import make_app
from mlx_zip.server.options import Options


def guarded(options: Options) -> Options:
    """Returns the server's settings with what the app needs: the page is open to all, the rest to its own page only."""
    return replace(options, open_paths=(*options.open_paths, *OPEN))


def make_chat_app(store: Store, models: Models, settings: Settings) -> ASGIApp:
    """Returns the app. `models.main.options` are `guarded`."""
    answers = Answers(store)
    more = [
        *files.routes(),
        *state.routes(store, models, settings),
        *routes.routes(store, models, answers, settings.system),
        *race.routes(store, models),
        *exchange_routes.routes(store, models.main),
    ]
    return PageHeaders(make_app(models.main, more))
