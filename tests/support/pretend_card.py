"""A CUDA card that is pretended: its tensors lie in the CPU's memory, and it refuses or spoils what a card would.

- Operations and kernels must get tensors of one device.
- What is copied without waiting arrives when the host waits for it, and not before. What the host sends must stay as it
  is until then.
- Memory that nobody has written holds NaN or huge integers.
- A CUDA graph computes nothing while it is captured, refuses work that makes the host wait, and works on the same
  addresses each time.
- Memory that one stream uses must not be used by another one that has not waited for it.

Kernels run in Triton's interpreter, or as their references, which is faster.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support.card_graph import Graph
from support.card_streams import Event, Stream, Uses, merge
from support.card_tensor import (
    CARD,
    CardError,
    CardGenerator,
    CardTensor,
    held,
    is_card,
    mapped,
    place,
    poison,
    tensors_in,
)

GIGABYTES = 80 << 30
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # takes indices of the host too
UNSET = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Card(TorchDispatchMode):
    """While this mode is on, tensors on "cuda:0" are the pretended card's.

    queued: how much the card was given to do. replays: of graphs. syncs: how often the host waited, by operation.
    capturing: the graph that is being captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queued = self.replays = self._waited = 0
        self.syncs: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.awaited: dict[Stream, int] = {}  # the newest work of each stream that the host has waited for
        self._uses, self._current, self._main = Uses(), threading.local(), Stream(self)
        self.capturing: Graph | None = None
        self._tensors: dict[int, weakref.WeakSet[CardTensor]] = {}
        self._pinned: dict[int, weakref.ref[torch.Tensor]] = {}
        self._arriving: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._leaving: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    @property
    def stream(self) -> Stream:
        """The thread's current stream."""
        return getattr(self._current, "stream", self._main)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the thread's current one."""
        before, self._current.stream = self.stream, stream
        try:
            yield
        finally:
            self._current.stream = before

    def use(self, name: str, read: Iterable[int], written: Iterable[int]) -> None:
        """Notes that the current stream is given work on memory at these addresses; what is captured is given none."""
        self.queued += 1
        if self.capturing is None:
            self._uses.note(self, name, read, written)

    def lives(self, at: int) -> bool:
        """Returns whether somebody holds a tensor in the memory of this address."""
        return bool(self._tensors.get(at))

    # ---- waiting

    def wait(self, until: int | None = None) -> None:
        """Waits for the card, or for what it was given up to `until`.

        Values that were to arrive are there then. Raises `CardError` if values that were sent have been changed.
        """
        self._refuse_in_graph("the host waits for the card")
        for number, target, values in self._arriving:
            if until is None or number <= until:
                target.copy_(values)
        for _, source, values in self._leaving:
            if not torch.equal(source, values):
                raise CardError(f"a tensor {list(source.shape)} was changed before the card had read it")
        self._waited = max(self._waited, self.queued if until is None else until)
        self._arriving = [one for one in self._arriving if until is not None and one[0] > until]
        self._leaving = [one for one in self._leaving if until is not None and one[0] > until]

    def reached(self, number: int) -> bool:
        """Returns whether the host has waited until the card had done what it was given up to this number."""
        return number <= self._waited

    def wait_for_all(self) -> None:
        """Waits for all streams."""
        self.wait()
        for stream in self.streams:
            merge(self.awaited, stream.seen)

    def _sync(self, name: str) -> None:
        self.wait()
        merge(self.awaited, self.stream.seen)
        self.syncs[name] += 1

    def _refuse_in_graph(self, what: str) -> None:
        if self.capturing is not None:
            raise CardError(f"{what} while a graph is captured")

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, device = func._schema.name.split("::")[1], kwargs.get("device")
        to_card = device is not None and torch.device(device).type in ("cuda", "meta")
        cards = [one for one in tensors_in((args, kwargs)) if is_card(one)]
        if name in ("is_pinned", "_pin_memory"):
            return self._pin(name, args[0])
        if kwargs.pop("pin_memory", False):
            return self._remember_pinned(func(*args, **kwargs))
        if name == "_to_copy":
            return self._to(func, args[0], kwargs, to_card if device is not None else bool(cards))
        if name == "copy_" and is_card(args[0]) != is_card(args[1]):
            return self._copy(*args, **kwargs)
        if not cards and not to_card:
            return func(*args, **kwargs)
        if to_card:
            kwargs["device"] = "cpu"
        elif device is not None:
            raise CardError(f"{name}: a tensor on {device} made of one on the card")
        self._check_devices(name, args, kwargs)
        return self._operate(func, name, args, kwargs)

    def _check_devices(self, name: str, *values: Any) -> None:
        """Raises `CardError` for tensors of several devices; single numbers of the host are taken everywhere."""
        for one in tensors_in(values):
            if not is_card(one) and one.dim():
                if name not in INDEXING:
                    raise CardError(f"{name}: tensors on the card and on the host")
                self._sync(name)

    def _operate(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Runs an operation of PyTorch on the card's tensors."""
        if name in WAITS:
            self._sync(name)
        inputs, options = held(args), held(kwargs)
        written = list(_written(func, inputs, options))
        found = self._work(name, partial(func, *inputs, **options), [*tensors_in((args, kwargs))], written)
        if name in UNSET:
            poison(held(found))
        return found

    def _work(self, name: str, run: Callable[[], Any], read: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        """Does work and notes it if a graph is captured. read: tensors. written: values. Returns the card's tensors."""
        self.use(name, map(place, map(held, filter(is_card, read))), map(place, written))
        known = {id(held(one)): one for one in read}
        places = {place(held(one)) for one in read}
        if self.capturing is not None:
            self.capturing.note_before(name, map(held, filter(is_card, read)), written)
        found = run()
        fresh = [one for one in tensors_in(found) if place(one) not in places]
        for one in fresh:
            self._uses.forget(place(one))
        if self.capturing is None and name not in UNSET:
            self._uses.note(self, name, (), map(place, fresh))
        if self.capturing is not None and (written or fresh) and name not in UNSET:
            self.capturing.note(run, found, fresh)
        elif self.capturing is not None:
            self.capturing.note_memory(fresh)
        return mapped(lambda one: known[id(one)] if id(one) in known else self._card_tensor(one), found)

    def _card_tensor(self, value: torch.Tensor) -> CardTensor:
        """Returns values as a tensor of the card."""
        made = CardTensor(value)
        self._tensors.setdefault(place(value), weakref.WeakSet()).add(made)
        return made

    # ---- kernels and graphs

    def launch(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Launches a kernel, or runs its reference instead. run: computes on values and may write to any of them."""
        read = list(tensors_in((args, kwargs)))
        if not any(map(is_card, read)):
            return run(*args, **kwargs)
        if not all(map(is_card, read)):
            raise CardError(f"{name}: a kernel got tensors on the card and on the host")
        inputs, options = held(args), held(kwargs)

        def alone() -> Any:
            with _disable_current_modes():
                return run(*inputs, **options)

        return self._work(name, alone, read, [*map(held, read)])

    @contextmanager
    def graph(self, graph: Graph, stream: Stream | None = None, **_: object) -> Iterator[None]:
        """Captures what is done inside."""
        self._refuse_in_graph("another one is captured")
        self.wait_for_all()
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
            with _disable_current_modes():
                graph.take_back()

    # ---- copies between host and card

    def _remember_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[place(tensor)] = weakref.ref(tensor)
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return place(tensor) in self._pinned

    def _pin(self, name: str, tensor: torch.Tensor) -> Any:
        """Returns whether a tensor is pinned, or pins it."""
        if is_card(tensor):
            raise CardError(f"{name}: a tensor of the card cannot be pinned")
        if name == "is_pinned":
            return self._is_pinned(tensor)
        return tensor if self._is_pinned(tensor) else self._remember_pinned(tensor.clone())

    def _to(self, func: Any, source: torch.Tensor, kwargs: dict[str, Any], to_card: bool) -> torch.Tensor:
        """Returns a copy on the card or on the host. kwargs: of the operation."""
        waits = not kwargs.pop("non_blocking", False)
        kwargs.pop("device", None)
        if is_card(source) and to_card:
            return self._operate(func, "_to_copy", (source,), kwargs)
        if is_card(source):
            return self._fetch(func(held(source), **kwargs), waits)
        if not to_card:
            return func(source, **kwargs)
        self._send(source, waits)
        values = source.clone()
        self._uses.forget(place(values))
        return self._operate(func, "_to_copy", (self._card_tensor(values),), kwargs)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Fills a tensor with values from the other side."""
        if is_card(target):
            self._send(source, not non_blocking)
            self.use("copy_", (), [place(held(target))])
            held(target).copy_(source)
            return target
        self.use("copy_", [place(held(source))], ())
        target.copy_(held(source))
        return self._fetch(target, not non_blocking)

    def _send(self, source: torch.Tensor, waits: bool) -> None:
        """Notes that the card reads a tensor of the host."""
        self._refuse_in_graph("the host sends a tensor")
        if not waits and self._is_pinned(source):
            self.queued += 1
            self._leaving.append((self.queued, source, source.clone()))
        elif source.dim():
            self._sync("copy from the host")

    def _fetch(self, target: torch.Tensor, waits: bool) -> torch.Tensor:
        """Returns a tensor of the host that holds what the card sends it; without waiting, that comes later."""
        self._refuse_in_graph("the host fetches a tensor")
        if waits:
            values = target.clone()
            self._sync("copy to the host")
            target.copy_(values)
        else:
            self.queued += 1
            self._arriving.append((self.queued, target, target.clone()))
            poison(target)
        return target


def _written(func: Any, inputs: Any, options: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation writes to, by its schema."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(inputs[at] if at < len(inputs) else options.get(argument.name))


@contextmanager
def pretended_card(monkeypatch: Any, kernels: bool = True) -> Iterator[Card]:
    """Makes torch.cuda one pretended card of 80 GB while the block runs, in threads that start inside too.

    kernels: whether they run in Triton's interpreter, which must be on; else their references run.
    """
    card = Card()
    for name, value in _torch_cuda(card).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", CardGenerator)
    for owner, name in ((torch.Tensor, "to"), (torch, "tensor")):
        monkeypatch.setattr(owner, name, _numbered(getattr(owner, name)))
    _patch_bias(monkeypatch)
    (_patch_interpreter if kernels else _patch_dispatchers)(monkeypatch, card)
    _patch_threads(monkeypatch, card)
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with card:
            yield card
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _torch_cuda(card: Card) -> dict[str, Any]:
    """Returns what replaces the parts of torch.cuda."""
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: "a pretended card",
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (GIGABYTES, GIGABYTES),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: card.wait_for_all(),
        "current_stream": lambda device=None: card.stream,
        "stream": card.on_stream,
        "Stream": _of(card, Stream),
        "Event": _of(card, Event),
        "CUDAGraph": _of(card, Graph),
        "graph": card.graph,
        "graph_pool_handle": lambda: object(),
        "is_current_stream_capturing": lambda: card.capturing is not None,
    }


def _of(card: Card, kind: Any) -> type:
    """Returns a class whose instances are made for a card, whatever arguments they get."""
    return type(kind.__name__, (kind,), {"__init__": lambda self, *_, **__: kind.__init__(self, card)})


def _numbered(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of PyTorch that gives the card its number, for which a driver would be asked otherwise."""
    exact = lambda value: CARD if isinstance(value, torch.device) and value.type == "cuda" else value

    def numbered(*args: Any, **kwargs: Any) -> Any:
        return run(*map(exact, args), **{name: exact(value) for name, value in kwargs.items()})

    return numbered


def _patch_bias(monkeypatch: Any) -> None:
    """Makes PyTorch's causal bias, a tensor of a class of its own, outside of the mode, which it does not bear."""
    from mlx_zip.cuda.network import decoder

    make = decoder.causal_mask

    def made(*arguments: Any) -> Any:
        with _disable_current_modes():
            return make(*arguments)

    monkeypatch.setattr(decoder, "causal_mask", made)


def _patch_interpreter(monkeypatch: Any, card: Card) -> None:
    """Makes kernels that run in Triton's interpreter work on the card, and on the card only."""
    from triton.runtime.interpreter import GridExecutor

    from mlx_zip.cuda.kernels import dispatch

    run = GridExecutor.__call__

    def check_runs(on_gpu: bool) -> None:
        if not on_gpu:
            raise CardError("a kernel that is compiled for the card got tensors on the host only")

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        card.launch(self.fn.__name__, partial(run, self), *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(dispatch, "_raise_unless_triton_runs", check_runs)


def _patch_dispatchers(monkeypatch: Any, card: Card) -> None:
    """Makes the references of kernels run on the card, each as one piece of work."""
    from mlx_zip.cuda import kernels

    names = [one.name for one in iter_modules(kernels.__path__) if not one.ispkg and one.name != "dispatch"]
    for name in names:
        module = import_module(f"mlx_zip.cuda.kernels.{name}")
        monkeypatch.setattr(module, "should_use_triton", lambda impl, *tensors: False, raising=False)
        for function in [one for one in vars(module) if one.startswith("reference")]:
            run = getattr(module, function)
            monkeypatch.setattr(module, function, partial(card.launch, f"{name}.{function}", run))


def _patch_threads(monkeypatch: Any, card: Card) -> None:
    """Pretends the card in every thread that starts."""
    run = threading.Thread.run

    def inside(self: threading.Thread) -> None:
        with card:
            run(self)

    monkeypatch.setattr(threading.Thread, "run", inside)
