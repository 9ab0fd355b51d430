"""`mlx_zip sessions`: shows or deletes the conversations that a server keeps on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_zip.cli.actions import escape_unprintable
from mlx_zip.errors import GenerationError, errors_as, failure_reason
from mlx_zip.progress import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `mlx_zip sessions`."""
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=("list", "purge"),
        help="list: print each session's size in bytes, base tokens, model and file; purge: delete the sessions of all "
        "models, the stored responses and unfinished files, then the folder if it is empty",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of sessions, as given to the server")


def run(args: argparse.Namespace) -> int:
    """Prints the folder's sessions, or the number of deleted files; returns 0. Raises `GenerationError`."""
    from mlx_zip.files import expand_home

    folder = expand_home(args.folder)
    with errors_as(GenerationError, str(folder), OSError):
        if args.action == "purge":
            from mlx_zip.engine.sessions.folder import purge_session_folder

            count, size = purge_session_folder(folder)
            print(f"removed: {pluralize(count, 'file')}, {size} bytes")
        else:
            _print_sessions(folder)
    return 0


def _print_sessions(folder: Path) -> None:
    """Prints one line per session, then the number of files and their total size in bytes. Raises `OSError`."""
    from mlx_zip.engine.sessions.file_format import BadFileError, read_session_file
    from mlx_zip.engine.sessions.folder import list_session_files, with_machine_folders

    sizes = []
    for path in (path for one in with_machine_folders(folder) for path in list_session_files(one)):
        size = path.lstat().st_size
        sizes.append(size)
        try:
            facts = read_session_file(path, whole=False).facts
            about = f"{facts.get('base_tokens', '?'):>8}  {facts.get('model', 'unknown model')}"
        except (BadFileError, OSError) as error:  # OSError: a folder, a dangling link
            about = f"{'-':>8}  cannot be used: {failure_reason(error)}"
        print(escape_unprintable(f"{size:>12}  {about}  {path.relative_to(folder)}"))
    print(f"{pluralize(len(sizes), 'file')}, {sum(sizes)} bytes")
