"""Runs one model on several machines: splits the model over the machines and keeps them in step.

A run on several machines is one command on each, started by `mlx.launch`. If a machine fails, the others stop with an
error instead of waiting for it. All machines must call the collective operations of this file in the same order.

A model is split as in mlx-lm: each machine keeps a share of every layer. A layer's attention heads and its MLP are
split; the attention ends in one sum over the machines, and so does the MLP. Embedding, head, norms and hyper-encoders
are whole on every machine, so that each machine follows the codebook by itself.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import MachineError, MlxZipError, ModelError, first_message_line
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.rows.fingerprints import fingerprint_samples, named_arrays, sample_tensors

T = TypeVar("T")
Group = mx.distributed.Group
_BACKEND_PREFIXES = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")  # how MLX's messages on communication begin


def connect_machines() -> Group | None:
    """Returns the machines of this run, or None if this process is the only one.

    Raises `MachineError` if another machine of the run cannot be reached.
    """
    with lost_machines_as_errors():
        group = mx.distributed.init()
    return group if group.size() > 1 else None


def is_first_machine(group: Group | None = None) -> bool:
    """Returns whether this process writes files and text: it is the first machine of a run, or the only one."""
    return (mx.distributed.init() if group is None else group).rank() == 0


@contextmanager
def lost_machines_as_errors() -> Iterator[None]:
    """Context manager: turns MLX's error about a lost connection into a `MachineError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not str(error).startswith(_BACKEND_PREFIXES):
            raise
        raise MachineError(
            f"another machine of this run has ended or cannot be reached: {first_message_line(error)}"
        ) from error


def run_on_all_machines(group: Group | None, action: Callable[[], T]) -> T:
    """Runs `action` on this machine, as every machine of the run does, and returns its result.

    If the action fails on one machine, raises an error on all: the action's `MlxZipError` where it failed,
    `MachineError` on the other machines. group: None for a single machine.
    """
    if group is None:
        return action()
    try:
        result = action()
    except MlxZipError:
        sum_over_machines(group, 1)
        raise
    if sum_over_machines(group, 0)[0]:
        raise MachineError("another machine of this run could not go on; its own message says why")
    return result


def wait_for_machines(group: Group | None) -> None:
    """Waits until all machines have called this, so that no machine ends while another still needs it."""
    from mlx_lm.generate import generation_stream  # importing it takes a second, so only when needed

    if group is not None:
        mx.synchronize(generation_stream)  # the step in flight, which nobody will read, must finish its sums
        sum_over_machines(group, 0)


def sum_over_machines(group: Group, *counts: int) -> list[int]:
    """Returns each count summed over the machines."""
    if group.size() == 1:
        return list(counts)
    total: Any = mx.distributed.all_sum(mx.array(counts, mx.int64), group=group)
    return total.tolist()


def arrays_of_first_machine(group: Group, tree: Any) -> Any:
    """Returns the first machine's tree of arrays, on every machine.

    tree: this machine's tree; its names, shapes and dtypes must equal those of the first machine's. Arrays are sent in
    the order of their names, because dictionaries may be ordered differently on each machine.
    """
    if group.size() == 1:
        return tree
    sent = {}
    for name, array in sorted(tree_flatten(tree)):
        if isinstance(array, mx.array):
            array = mx.distributed.all_sum(array if group.rank() == 0 else mx.zeros_like(array), group=group)
            mx.eval(array)
        sent[name] = array
    return tree_unflatten(list(sent.items()))


def bytes_of_first_machine(group: Group, data: bytes) -> bytes:
    """Returns the first machine's `data` on every machine. On the others, `data` is not used."""
    size = sum_over_machines(group, len(data) if group.rank() == 0 else 0)[0]
    if size == 0:
        return b""
    own = mx.array(np.frombuffer(data, np.uint8) if group.rank() == 0 else np.zeros(size, np.uint8))
    return bytes(np.array(mx.distributed.all_sum(own, group=group)))


def smallest_over_machines(group: Group, number: int) -> int:
    """Returns the smallest `number` of all machines. Each must be from 0 to 2^63 - 1."""
    least: Any = mx.distributed.all_min(mx.array([number], mx.int64), group=group)
    return int(least.item())


def raise_unless_machines_agree(group: Group, facts: str, what: str) -> None:
    """Raises `MachineError` on all machines unless all have equal facts. what: what these are, for the message."""
    own = sha256(facts.encode()).digest()
    if sum_over_machines(group, int(bytes_of_first_machine(group, own) != own))[0]:
        raise MachineError(f"the machines of this run differ in {what}; give all the same")


# ---- a model that is split

SHARDED_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # the supported model types that mlx-lm can split
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def raise_unless_splittable(config: Mapping[str, Any], size: int) -> None:
    """Raises `ModelError` unless the model with this config.json can be split over `size` machines."""
    section = config.get("zip2zip")
    zip2zip = config["model_type"] == MODEL_TYPE and isinstance(section, Mapping)
    kind = section.get("base_model_type") if zip2zip and isinstance(section, Mapping) else config["model_type"]
    if kind not in SHARDED_TYPES:
        raise ModelError(f"a model of type {kind} cannot be split over machines; these can: {', '.join(SHARDED_TYPES)}")
    heads = config.get("num_attention_heads")
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config.get("intermediate_size"),
    }
    for name, count in counts.items():
        if isinstance(count, int) and count % size:
            raise ModelError(f"the model cannot be split over {size} machines: its {name} is {count}, no multiple")


def shard_layers(layers: Sequence[nn.Module], group: mx.distributed.Group) -> None:
    """Replaces the linear layers in decoder blocks by this machine's share of them; no weights are read yet.

    Raises `ModelError` if a quantized layer's groups cannot be divided.
    """
    for index, layer in enumerate(layers):
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        for module, outward, inward in ((attention, _ATTENTION, "o_proj"), (mlp, _MLP, "down_proj")):
            _raise_unless_groups_divide(module[inward], group.size(), f"layers.{index}: {inward}")
            for name in outward:
                module[name] = shard_linear(module[name], "all-to-sharded", group=group)
            module[inward] = shard_linear(module[inward], "sharded-to-all", group=group)
        attention.n_heads //= group.size()
        attention.n_kv_heads //= group.size()


def _raise_unless_groups_divide(linear: Any, size: int, name: str) -> None:
    """Raises `ModelError` if the groups of a quantized linear layer's input cannot be shared by `size` machines."""
    groups = linear.scales.shape[-1] if "scales" in linear else size
    if groups % size:
        raise ModelError(
            f"the model cannot be split over {size} machines: {name} has {groups} quantization groups per row, no "
            "multiple; convert it with a smaller --q-group-size"
        )


def split_model(model: Any, group: mx.distributed.Group) -> str:
    """Reduces a lazily loaded model to this machine's share of its weights; returns the whole model's fingerprint.

    Weights are read one by one, so that little more than the share is in memory at any time. Sets `model.machines`, so
    that from then on the first machine chooses the ids (`ids_of_first_machine`). Raises `ModelError` as `shard_layers`
    does.
    """
    whole = sample_tensors(model)  # of the weights before the split; lazy until each weight is read below
    try:
        model.shard(group)
    except ValueError as error:
        raise ModelError(f"the model cannot be split over {group.size()} machines: {error}") from error
    shares = dict(named_arrays(model.parameters()))
    for one in whole:
        mx.eval(one.values, shares[one.name])
    mx.clear_cache()
    model.machines = group
    return fingerprint_samples(whole)


def ids_of_first_machine(ids: mx.array, group: mx.distributed.Group) -> mx.array:
    """Returns the first machine's ids on every machine, in the dtype of `ids`.

    The machines' logits may differ in the last bit (other chips, other orders of summing), so the machines might choose
    different ids. The other machines multiply their ids by 0 instead of leaving them out, so that this sum comes after
    the sums of their layers: all machines must sum in the same order.
    """
    return mx.distributed.all_sum(ids if group.rank() == 0 else ids * 0, group=group)


# ---- a machine that ends: MLX's ring may wait for ever for a machine that is gone
#
# An idle connection links the first machine to each other one. The operating system closes the connection when the
# process at either end ends, for whatever reason.

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
