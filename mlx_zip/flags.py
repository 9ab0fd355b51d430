"""Flags that commands of several rooms share, declared once; older names are hidden aliases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

PACK = (
    "pack (.json, .npz or .npy) whose entries the codebook begins with, in place of the model's own pack; several "
    "packs are merged (default: the model's own pack, if it has one)"
)
_FILLING = "to fill windows with several documents, use --fill-windows"


def add_pack(
    add: Any,
    purpose: str = PACK,
    aliases: Sequence[str] = ("--codebook", "--start-codebook"),
    filled_windows: bool = False,
) -> None:
    """Declares --pack FILE, which may be repeated: `args.pack` is a list of file names, or None without the flag.

    add: a parser's or group's `add_argument`. aliases: older names of the flag, which --help does not show.
    filled_windows: True in the commands whose --pack and --no-pack, without a value, once meant --fill-windows: both
    are errors that name that flag.
    """
    flag: dict[str, Any] = {"dest": "pack", "metavar": "FILE", "action": "append"}
    add("--pack", help=purpose, **{**flag, **({"action": _FileOrHint, "nargs": "?"} if filled_windows else {})})
    if aliases:
        add(*aliases, help=argparse.SUPPRESS, **flag)
    if filled_windows:
        add("--no-pack", nargs=0, dest="pack", action=_Hint, help=argparse.SUPPRESS)


class _FileOrHint(argparse.Action):
    """Appends a file name; without one, an error that names --fill-windows."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            parser.error(f"{option_string} needs the FILE of a pack; {_FILLING}")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), values])


class _Hint(argparse.Action):
    """An error that names --fill-windows."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(f"{option_string} is gone: windows are filled with --fill-windows, and not with --no-fill-windows")
