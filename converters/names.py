"""Maps a checkpoint's tensor names to the model's names, accounting for every tensor on both sides. No arrays here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_zip.config import SIDES
from mlx_zip.converters.tensors import FLOATS, Table, Tensor, some
from mlx_zip.errors import ConversionError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROTARY_BUFFER = ".rotary_emb.inv_freq"  # older transformers saved it; it follows from the config

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Plan:
    """Which tensor goes where. tensors: model name -> source tensor. dropped: reason -> names that are left out.

    twin: a second copy of a tied matrix, which must equal the embedding before it is left out.
    """

    tensors: Table
    dropped: dict[str, list[str]] = field(default_factory=dict)
    twin: Tensor | None = None


def plan_decoder(found: Table, expected: Shapes) -> Plan:
    """Matches a decoder's tensors with `expected`, the model's names and shapes without the encoders.

    Rotary buffers and the head's copy of a tied matrix are left out. A tied model saved with only the head's name gets
    its embedding from the head. Raises `ConversionError` listing unknown, missing or misshapen names.
    """
    plan = Plan(dict(found))
    buffers = [name for name in found if name.endswith(_ROTARY_BUFFER)]
    if buffers:
        plan.dropped["rotary buffers"] = [plan.tensors.pop(name).key for name in buffers]
    if HEAD in found and HEAD not in expected:
        head = plan.tensors.pop(HEAD)
        if EMBEDDING in plan.tensors:
            plan.twin = head
            plan.dropped["tied head"] = [HEAD]
        else:
            plan.tensors[EMBEDDING] = head
    check(plan.tensors, expected, "decoder")
    return plan


def plan_override(base: Plan, found: Table, expected: Shapes, file_name: str) -> Plan:
    """Returns the plan `base` with tensors replaced by those of a partial decoder.

    found: the partial decoder's tensors. expected: the model's names and shapes. Raises `ConversionError`, naming
    `file_name`, for unknown or misshapen tensors and for a file that replaces nothing.
    """
    extra = {name: t for name, t in found.items() if not name.endswith(_ROTARY_BUFFER)}
    twin = base.twin
    if {EMBEDDING, HEAD} & extra.keys() and HEAD not in expected:
        head = extra.pop(HEAD, None)
        twin = head if EMBEDDING in extra else None
        if head is not None:
            extra.setdefault(EMBEDDING, head)
    if not extra:
        raise ConversionError(f"{file_name} overrides nothing")
    check(extra, {name: shape for name, shape in expected.items() if name in extra}, file_name)
    return Plan({**base.tensors, **extra}, base.dropped, twin)


def plan_encoders(found: Table, expected: Shapes, tied: bool) -> Plan:
    """Matches the tensors of the encoder file with `expected`, the encoders' names and shapes in the model.

    tied: whether input and output share an encoder; the output's tensors are then left out, as in zip2zip. Raises
    `ConversionError` listing unknown, missing or misshapen names.
    """
    plan = Plan(dict(found))
    if tied:
        extra = [name for name in found if name.startswith(SIDES[1])]
        if extra:
            plan.dropped["output_encoder of tied encoders"] = [plan.tensors.pop(name).key for name in extra]
    _check_positions(plan.tensors, expected)
    check(plan.tensors, expected, "encoders")
    return plan


def _check_positions(found: Table, expected: Shapes) -> None:
    """Raises `ConversionError` if an encoder's position embedding has another merge size than the config."""
    for side in SIDES:
        name = f"{side}pos_embed.weight"
        if name in found and name in expected and found[name].shape[:1] != expected[name][:1]:
            raise ConversionError(
                f"max_subtokens is {expected[name][0]} but {name} has positions for {found[name].shape[0]}"
            )


def check(found: Table, expected: Shapes, what: str) -> None:
    """Raises `ConversionError` unless names and shapes are exactly the expected ones and all tensors are floats.

    what: the part of the model, for the message.
    """
    problems = []
    if unknown := found.keys() - expected.keys():
        problems.append(f"unknown: {some(unknown)}")
    if missing := expected.keys() - found.keys():
        problems.append(f"missing: {some(missing)}")
    both = found.keys() & expected.keys()
    if wrong := [n for n in both if found[n].shape != expected[n]]:
        shapes = (f"{n} {list(found[n].shape)} instead of {list(expected[n])}" for n in wrong)
        problems.append(f"misshapen: {some(shapes)}")
    if problems:
        raise ConversionError(f"{what} tensors do not match the config; {'; '.join(problems)}")
    if odd := [f"{n} {found[n].dtype}" for n in both if found[n].dtype not in FLOATS]:
        raise ConversionError(f"{what} tensors that are not {', '.join(FLOATS)}: {some(odd)}")
