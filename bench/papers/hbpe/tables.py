"""Tables and picture of the H-BPE report, from the records of `bench hbpe` and `bench hbpe_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.plots import Curve, Panel, lines
from mlx_zip.bench.records import machines, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CODEC, MODELS = "hbpe", "hbpe_model"  # names of records
GPT2 = "gpt2_vocab.bpe"
NAMES = {
    "plain": "plain BPE",
    "patches": "patches",
    "equal": "patches, wider latent",
    "bytes": "bytes",
    "space": "patches cut at blanks",
    "entropy": "patches cut by entropy",
}
TABLE2 = {"plain": "1.16", "patches": "1.11", "bytes": "1.16", "space": "1.14", "entropy": "1.20"}  # bits per byte
TABLE2_FLOPS = {"plain": "562", "patches": "554", "bytes": "4214", "space": "534", "entropy": "668"}  # 10^9, 8192 bytes
TABLE2_FERTILITY = {"plain": "1.51", "patches": "1.51", "bytes": "4.5", "space": "1.45", "entropy": "1.83"}
TABLE3 = {"patches": ("3.62", "1.20"), "space": ("3.06", "1.24"), "entropy": ("1.66", "1.27")}  # bytes per patch, bits
SPENT = ("parameters", "processor seconds", "steps", "kB read")  # columns

Line = dict[str, Any]


def _models(records: Any, recipe: str | None) -> list[Line]:
    """Returns the recorded lines of `bench hbpe_model` that were run with a --recipe (None: without one)."""
    return [line for line in records.lines(MODELS) if line["recipe"] == recipe]


def _table_or_command(header: Sequence[str], rows: Sequence[Sequence[str]], recipe: str) -> str:
    """Returns a Markdown table of the rows; if there are none, a sentence with the command that records them."""
    if not rows:
        return f"There is no record yet: `mlx_zip bench hbpe_model --recipe {recipe}` makes one."
    return table(header, rows)


def _codec_table(records: Any) -> str:
    """Returns the table of merges, learning time, table size and patch lengths of GPT-2's tokenizer, by patch size."""
    rows = []
    for line in records.lines(CODEC):
        if line["tokenizer"] != GPT2:
            continue
        ms = line["learn_ms"]
        rows.append(
            [
                str(line["patch_size"]),
                f"{line['merges']:,}",
                f"{line['too_long']:,}",
                f"{ms['median']:.0f} ({ms['min']:.0f} to {ms['max']:.0f})",
                f"{line['table_bytes'] / 1e6:.2f} MB",
                f"{line['symbols_per_patch_stop']:.2f}",
                f"{line['symbols_per_patch_full']:.2f}",
            ]
        )
    header = ["S", "V'", "tokens too long", "learning, ms", "table", "symbols per patch, `stop`", "`full`"]
    return table(header, rows)


def _flops_table(records: Any) -> str:
    """Returns the table of GFLOPs of the paper's small model on 8,192 bytes, by patch size.

    Columns: plain BPE, then patches counted in three ways.
    """
    names = ("flops_plain", "flops_patches_paper", "flops_patches_counted", "flops_patches_padded")
    lines = [line for line in records.lines(CODEC) if line["tokenizer"] == GPT2]
    rows = [[str(line["patch_size"]), *(f"{line[name] / 1e9:.0f}" for name in names)] for line in lines]
    header = ["S", "plain BPE", "patches, the paper's count", "with the symbols that there are", "with S symbols"]
    return table(header, rows)


def _texts_table(records: Any) -> str:
    """Returns the table of bytes per patch and GFLOPs for every measured text and tokenizer.

    The last column counts the symbols that the text's patches have, by the paper's formula.
    """
    rows = [
        [
            line["text"],
            line["tokenizer"].split(".")[0],
            str(line["patch_size"]),
            f"{line['merges']:,}",
            f"{line['bytes_per_patch']:.2f}",
            f"{line['bytes_per_patch_space']:.2f}",
            f"{line['symbols_per_patch_stop']:.2f}",
            f"{line['flops_plain'] / 1e9:.0f}",
            f"{line['flops_patches_paper'] / 1e9:.0f}",
            f"{line['flops_patches_counted'] / 1e9:.0f}",
        ]
        for line in records.lines(CODEC)
        if "bytes_per_patch_space" in line
    ]
    header = [
        "text",
        "first stage",
        "S",
        "V'",
        "bytes per patch",
        "cut at blanks",
        "symbols per patch",
        "GFLOPs, plain",
        "patches, paper's",
        "patches, counted",
    ]
    return table(header, rows)


def _kinds_table(records: Any) -> str:
    """Returns the paper's table 2, bits per byte by kind of model, with our figures next to the paper's."""
    rows = [
        [
            _model_label(line),
            *_spent_cells(line),
            f"{line['fertility']:.2f}",
            TABLE2_FERTILITY.get(line["model"], ""),
            f"{line['forward_flops_per_byte'] / 1e3:.0f}",
            TABLE2_FLOPS.get(line["model"], ""),
            _bits_cell(line),
            TABLE2.get(line["model"], ""),
        ]
        for line in _models(records, "table2")
    ]
    flops = ["kFLOPs per byte", "paper, GFLOPs per 8,192 bytes"]
    header = ["model", *SPENT, "fertility", "paper", *flops, "bits per byte", "paper"]
    return _table_or_command(header, rows, "table2")


def _chinese_table(records: Any) -> str:
    """Returns the paper's table 3, patches of Chinese text by kind, with our figures next to the paper's."""
    rows = [
        [
            _model_label(line),
            *_spent_cells(line),
            f"{line['bytes_per_unit']:.2f}",
            TABLE3.get(line["model"], ("", ""))[0],
            f"{line['forward_flops_per_byte'] / 1e3:.0f}",
            _bits_cell(line),
            TABLE3.get(line["model"], ("", ""))[1],
        ]
        for line in _models(records, "table3")
    ]
    header = ["model", *SPENT, "bytes per patch", "paper", "kFLOPs per byte", "bits per byte", "paper"]
    return _table_or_command(header, rows, "table3")


def _sizes_table(records: Any) -> str:
    """Returns the table of models over patches by patch size S, which the paper draws as figure 7."""
    rows = [
        [
            str(line["config"]["patch_size"]),
            f"{line['config']['symbols'] - 257:,}",
            f"{line['symbols_per_unit']:.2f}",
            *_spent_cells(line),
            f"{line['forward_flops_per_byte'] / 1e3:.0f}",
            _bits_cell(line),
        ]
        for line in _models(records, "figure7")
    ]
    header = ["S", "V'", "symbols per patch", *SPENT, "kFLOPs per byte", "bits per byte"]
    return _table_or_command(header, rows, "figure7")


def _model_label(line: Line) -> str:
    """Returns a model's name in tables, with layers and width of its local models if it has any."""
    local = line["config"].get("local")
    return NAMES[line["model"]] + (f", local {local['layers']} x {local['width']}" if local else "")


def _spent_cells(line: Line) -> list[str]:
    """Returns the cells of the columns `SPENT` for one model."""
    return [
        f"{line['parameters']:,}",
        f"{line['processor_s']:.0f}",
        f"{line['steps']:,}",
        f"{line['train_bytes_seen'] / 1e3:,.0f}",
    ]


def _bits_cell(line: Line) -> str:
    """Formats a model's bits per byte of held-out text."""
    return f"{line['bits_per_byte']:.3f}"


def picture(records: Any) -> Figure:
    """Returns a figure of held-out bits per byte, a curve per kind of model, in three panels.

    The panels' x axes are text read, training FLOPs and processor seconds.
    """
    found = _models(records, "table2")
    over = {
        "text read, MB": lambda line, point: point["train_bytes"] / 1e6,
        "FLOPs of training, 10^12": lambda line, point: _training_flops(line, point) / 1e12,
        "processor seconds": lambda line, point: point["processor_s"],
    }
    return lines([Panel(label, "bits per byte", _curves(found, x)) for label, x in over.items()])


def _curves(lines: Sequence[Line], x: Callable[[Line, Line], float]) -> list[Curve]:
    """Returns a curve of bits per byte for each model. x: returns a point's x value, given the line and the point."""
    return [
        Curve(_model_label(line), [(x(line, point), point["bits_per_byte"]) for point in line["curve"]])
        for line in lines
    ]


def _training_flops(line: Line, point: Line) -> float:
    """Returns the FLOPs of training up to a point of a curve; a backward pass counts as two forward passes."""
    return 3 * line["forward_flops_per_byte"] * point["train_bytes"]


TABLES = {
    "hbpe-codec": _codec_table,
    "hbpe-kinds": _kinds_table,
    "hbpe-chinese": _chinese_table,
    "hbpe-sizes": _sizes_table,
    "hbpe-cuts": _texts_table,
    "hbpe-flops": _flops_table,
    "hbpe-machines": lambda records: machines(records, (CODEC, MODELS)),
}
PICTURES = {"docs/reports/hbpe.svg": picture}
