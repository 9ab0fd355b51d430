"""Tables and picture of the H-BPE report, from the records of `bench hbpe` and `bench hbpe_model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mlx_zip.bench.plots import Figure, Pictures, new_figure
from mlx_zip.bench.records import Cell, Columns, Record, Records, Tables, lines_with, machines_table, make_column_table

CODEC, MODELS = "hbpe", "hbpe_model"  # names of records
GPT2 = partial(lines_with, tokenizer="gpt2_vocab.bpe")
NAMES = {
    "plain": "plain BPE",
    "patches": "patches",
    "equal": "patches, wider latent",
    "bytes": "bytes",
    "space": "patches cut at blanks",
    "entropy": "patches cut by entropy",
}
TABLE2 = {"plain": "1.16", "patches": "1.11", "bytes": "1.16", "space": "1.14", "entropy": "1.20"}  # bits per byte
TABLE2_FLOPS = {"plain": "562", "patches": "554", "bytes": "4214", "space": "534", "entropy": "668"}  # GFLOPs at 8192 B
TABLE2_FERTILITY = {"plain": "1.51", "patches": "1.51", "bytes": "4.5", "space": "1.45", "entropy": "1.83"}
TABLE3 = {"patches": "1.20", "space": "1.24", "entropy": "1.27"}  # bits per byte
TABLE3_PATCHES = {"patches": "3.62", "space": "3.06", "entropy": "1.66"}  # bytes per patch


def models_table(recipe: str, columns: Columns) -> Callable[[Records], str]:
    return make_column_table(MODELS, columns, partial(lines_with, recipe=recipe))


def gflops_cell(name: str) -> Cell:
    return lambda line: f"{line[name] / 1e9:.0f}"


def paper_cell(figures: Mapping[str, str]) -> Cell:
    return lambda line: figures.get(line["model"], "")


def lines_with_text(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if "bytes_per_patch_space" in line]


def _model_label(line: Record) -> str:
    local = line["config"].get("local")
    return NAMES[line["model"]] + (f", local {local['layers']} x {local['width']}" if local else "")


CODEC_COLUMNS: Columns = (
    ("S", "{patch_size}"),
    ("V'", "{merges:,}"),
    ("tokens too long", "{too_long:,}"),
    ("learning, ms", "{learn_ms[median]:.0f} ({learn_ms[min]:.0f} to {learn_ms[max]:.0f})"),
    ("table", lambda line: f"{line['table_bytes'] / 1e6:.2f} MB"),
    ("symbols per patch, `stop`", "{symbols_per_patch_stop:.2f}"),
    ("`full`", "{symbols_per_patch_full:.2f}"),
)
FLOPS_COLUMNS: Columns = (  # GFLOPs of the paper's small model on 8,192 bytes, with patches counted in three ways
    ("S", "{patch_size}"),
    ("plain BPE", gflops_cell("flops_plain")),
    ("patches, the paper's count", gflops_cell("flops_patches_paper")),
    ("with the symbols that there are", gflops_cell("flops_patches_counted")),
    ("with S symbols", gflops_cell("flops_patches_padded")),
)
TEXT_COLUMNS: Columns = (  # "patches, counted": the paper's formula with the text's mean symbols per patch
    ("text", "{text}"),
    ("first stage", lambda line: line["tokenizer"].split(".")[0]),
    ("S", "{patch_size}"),
    ("V'", "{merges:,}"),
    ("bytes per patch", "{bytes_per_patch:.2f}"),
    ("cut at blanks", "{bytes_per_patch_space:.2f}"),
    ("symbols per patch", "{symbols_per_patch_stop:.2f}"),
    ("GFLOPs, plain", gflops_cell("flops_plain")),
    ("patches, paper's", gflops_cell("flops_patches_paper")),
    ("patches, counted", gflops_cell("flops_patches_counted")),
)
SPENT: Columns = (
    ("parameters", "{parameters:,}"),
    ("processor seconds", "{processor_s:.0f}"),
    ("steps", "{steps:,}"),
    ("kB read", lambda line: f"{line['train_bytes_seen'] / 1e3:,.0f}"),
)
KFLOPS: tuple[str, Cell] = ("kFLOPs per byte", lambda line: f"{line['forward_flops_per_byte'] / 1e3:.0f}")
BITS: tuple[str, Cell] = ("bits per byte", "{bits_per_byte:.3f}")
KIND_COLUMNS: Columns = (  # the paper's table 2: bits per byte by kind of model
    ("model", _model_label),
    *SPENT,
    ("fertility", "{fertility:.2f}"),
    ("paper", paper_cell(TABLE2_FERTILITY)),
    KFLOPS,
    ("paper, GFLOPs per 8,192 bytes", paper_cell(TABLE2_FLOPS)),
    BITS,
    ("paper", paper_cell(TABLE2)),
)
CHINESE_COLUMNS: Columns = (  # the paper's table 3: patches of Chinese text by kind
    ("model", _model_label),
    *SPENT,
    ("bytes per patch", "{bytes_per_unit:.2f}"),
    ("paper", paper_cell(TABLE3_PATCHES)),
    KFLOPS,
    BITS,
    ("paper", paper_cell(TABLE3)),
)
SIZE_COLUMNS: Columns = (  # models over patches by patch size, which the paper draws as figure 7
    ("S", "{config[patch_size]}"),
    ("V'", lambda line: f"{line['config']['symbols'] - 257:,}"),
    ("symbols per patch", "{symbols_per_unit:.2f}"),
    *SPENT,
    KFLOPS,
    BITS,
)


def bits_per_byte_figure(records: Records) -> Figure:
    """Returns a figure of held-out bits per byte, a curve per kind of model, in three panels.

    The panels' x axes are text read, training FLOPs and processor seconds. Raises `InstallationError` if matplotlib is
    missing.
    """
    found = lines_with(records.lines(MODELS), recipe="table2")
    over = {
        "text read, MB": lambda line, point: point["train_bytes"] / 1e6,
        "FLOPs of training, 10^12": lambda line, point: _training_flops(line, point) / 1e12,
        "processor seconds": lambda line, point: point["processor_s"],
    }
    figure = new_figure(3.6 * len(over), 3.8)
    for panel, (label, x) in zip(figure.subplots(1, len(over)), over.items(), strict=True):
        for line in found:
            xs, ys = [x(line, point) for point in line["curve"]], [point["bits_per_byte"] for point in line["curve"]]
            panel.plot(xs, ys, marker="o", markersize=3, linewidth=1.5, label=_model_label(line))
        panel.set(xlabel=label, ylabel="bits per byte")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(found), 6), fontsize=9)
    return figure


def _training_flops(line: Record, point: Record) -> float:
    """Returns the FLOPs of training up to a point of a curve; a backward pass counts as two forward passes."""
    return 3 * line["forward_flops_per_byte"] * point["train_bytes"]


TABLES: Tables = {
    "hbpe-codec": make_column_table(CODEC, CODEC_COLUMNS, GPT2),
    "hbpe-kinds": models_table("table2", KIND_COLUMNS),
    "hbpe-chinese": models_table("table3", CHINESE_COLUMNS),
    "hbpe-sizes": models_table("figure7", SIZE_COLUMNS),
    "hbpe-cuts": make_column_table(CODEC, TEXT_COLUMNS, lines_with_text),
    "hbpe-flops": make_column_table(CODEC, FLOPS_COLUMNS, GPT2),
    "hbpe-machines": lambda records: machines_table(records, (CODEC, MODELS)),
}
PICTURES: Pictures = {"docs/reports/hbpe.svg": bits_per_byte_figure}
