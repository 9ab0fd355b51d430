"""Tensors of a card that is pretended: their values lie in the CPU's memory. See `support.pretend_card`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

CARD = torch.device("cuda", 0)
HUGE = 1 << 40  # what memory of int64 holds that nobody has written


class CardError(AssertionError):
    """What a real card would have refused, or would have computed something wrong of."""


class CardTensor(torch.Tensor):
    """A tensor of the pretended card. held: its values, in the CPU's memory."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> CardTensor:
        kind = {"dtype": held.dtype, "device": "meta"}  # a device that PyTorch knows without a card
        offset = held.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=offset, **kind
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CardError(f"{func}: a tensor of the card is used where the card is not pretended")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, list):  # PyTorch would make indices without values of it
            index = torch.tensor(index)
        if not isinstance(value, torch.Tensor):  # PyTorch would lay the number out where no values are
            value = torch.full((), value, dtype=self.dtype, device=CARD)
        super().__setitem__(index, value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CardTensor({self.held!r})"


class CardGenerator(torch.Generator):
    """Random numbers for a device; those for the card are the host's."""

    where: torch.device

    def __new__(cls, device: Any = "cpu") -> CardGenerator:
        made = super().__new__(cls)
        made.where = CARD if torch.device(device).type == "cuda" else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


def is_card(value: object) -> bool:
    """Returns whether this is a tensor of the card."""
    return isinstance(value, CardTensor)


def place(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all the memory that a tensor is a part of."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody can take for a result."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(min(HUGE, torch.iinfo(tensor.dtype).max))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in arguments: in lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from tensors_in(getattr(value, one.name))
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns arguments with each tensor replaced by what `change` gives for it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: mapped(change, getattr(value, one.name)) for one in fields(value)})
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def held(value: Any) -> Any:
    """Returns arguments with the values of the card's tensors."""
    return mapped(lambda one: one.held if isinstance(one, CardTensor) else one, value)
