"""Flags that commands of several rooms share, declared once; older names are hidden aliases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

PACK = (
    "pack file (.json, .npz or .npy) whose entries every codebook begins with, for a plain model one that was tuned "
    "for it; repeat the flag to merge packs (default: the model's own pack, if it has one)"
)
_FILLING = "to fill windows with several documents, use --fill-windows"


def add_pack(
    add: Any,
    purpose: str = PACK,
    aliases: Sequence[str] = ("--codebook", "--start-codebook"),
    filled_windows: bool = False,
) -> None:
    """Declares --pack FILE, which may be repeated: `args.pack` is a list of file names, or None without the flag.

    add: a parser's or group's `add_argument`. purpose: the help text. aliases: older names of the flag, which --help
    does not show. filled_windows: True in commands where --pack without a value and --no-pack were once the names of
    --fill-windows; both are then errors that name that flag.
    """
    flag: dict[str, Any] = {"dest": "pack", "metavar": "FILE", "action": "append"}
    add("--pack", help=purpose, **{**flag, **({"action": _FileOrHint, "nargs": "?"} if filled_windows else {})})
    if aliases:
        add(*aliases, help=argparse.SUPPRESS, **flag)
    if filled_windows:
        add("--no-pack", nargs=0, dest="pack", action=_Hint, help=argparse.SUPPRESS)


class _FileOrHint(argparse.Action):
    """Appends the file name to the flag's list; ends with an error that names --fill-windows if there is no value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            parser.error(f"{option_string} needs the FILE of a pack; {_FILLING}")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), values])


class _Hint(argparse.Action):
    """Ends the command with an error that names --fill-windows."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(f"{option_string} is gone: windows are filled with --fill-windows, and not with --no-fill-windows")
