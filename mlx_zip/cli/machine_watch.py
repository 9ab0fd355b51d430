"""Ends this process if another machine of its run ends: MLX's ring may wait for ever for a machine that is gone.

An idle connection links the first machine to each other one. The operating system closes the connection when the
process at either end ends, for whatever reason.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlx_zip.errors import MachineError
from mlx_zip.models.machines import Group, bytes_of_first_machine

GRACE_S = 5.0  # time for the process to end by itself, for example with an error of MLX
CONNECT_S = 20.0
ENDED = 2  # exit status
HOSTS = "MLX_HOSTFILE"  # environment variable of mlx.launch: file with the ring's addresses
_TOKEN_BYTES = 16


@contextmanager
def watch_machines(group: Group | None) -> Iterator[None]:
    """Context manager: ends this process with status 2 and one line on stderr if another machine of the run ends.

    All machines must enter it. Does nothing if `group` is None or the backend is not the ring. Raises `MachineError` if
    the machines cannot connect.
    """
    over = threading.Event()
    try:
        links = [] if group is None else _connect_machines(group)
    except OSError as error:
        raise MachineError(f"the machines of this run cannot connect: {error}") from error
    for link in links:
        threading.Thread(target=_end_process_with_connection, args=(link, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        for link in links:
            link.close()


def _end_process_with_connection(link: socket.socket, over: threading.Event) -> None:
    """Waits until a connection is closed; then ends the process unless `over` is set within `GRACE_S` seconds."""
    with suppress(OSError):  # closed by this process, or reset by the other machine
        link.recv(1)
    if not over.wait(GRACE_S):
        print("error: another machine of this run has ended", file=sys.stderr, flush=True)
        os._exit(ENDED)


def _connect_machines(group: Group) -> list[socket.socket]:
    """Returns this machine's connections: on the first machine those to all others, on any other that to the first."""
    if group.rank() > 0:
        place = bytes_of_first_machine(group, b"")
        return [_connect_to_first(*json.loads(place))] if place else []
    host = _first_machine_host()
    if host is None:
        bytes_of_first_machine(group, b"")
        return []
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.settimeout(CONNECT_S)
        bytes_of_first_machine(group, json.dumps([host, listener.getsockname()[1], token]).encode())
        return _accept_connections(listener, token, group.size() - 1)


def _accept_connections(listener: socket.socket, token: str, count: int) -> list[socket.socket]:
    """Accepts `count` connections that send `token` first, and closes others. Raises `OSError` on a timeout."""
    links: list[socket.socket] = []
    while len(links) < count:
        link = listener.accept()[0]
        link.settimeout(CONNECT_S)
        if link.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token.encode():
            link.settimeout(None)
            links.append(link)
        else:
            link.close()
    return links


def _connect_to_first(host: str, port: int, token: str) -> socket.socket:
    """Returns a connection to the first machine, after sending `token`."""
    link = socket.create_connection((host, port), CONNECT_S)
    link.sendall(token.encode())
    link.settimeout(None)
    return link


def _first_machine_host() -> str | None:
    path = os.environ.get(HOSTS)
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        hosts = json.load(file)
    return hosts[0][0].rpartition(":")[0].strip("[]")
