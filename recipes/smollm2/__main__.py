"""`python -m recipes.smollm2 --model DIR --out DIR`: teaches SmolLM2 hypertokens.

    data    documents and the model's own conversations, for training and held out, with a card that names all licences
    packs   packs learned from the training texts, measured on those held out
    train   one leg of the training with the mixed pack, and of its control, which reads the same windows as they are

A stage that was interrupted goes on when the same command is given again; a file that exists is not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_zip import cli
from mlx_zip.arguments import Parser
from mlx_zip.errors import DataError, MlxZipError, TrainingError
from mlx_zip.files import whole_file
from mlx_zip.text.tokenizers import load_tokenizer

from .settings import FULL, SMALL, Settings
from .texts import card, make_texts, write


@dataclass(frozen=True)
class Recipe:
    """What every stage gets. model: folder of the base. out: folder of all results. shared: folder that holds
    data/text, None for no data sets. leg: the leg that is trained, counted from 1.
    """

    settings: Settings
    model: Path
    out: Path
    shared: Path | None = None
    leg: int = 1

    @property
    def data(self) -> Path:
        """Folder of the texts: train/NAME.jsonl and held_out/NAME.jsonl."""
        return self.out / "data"


def make_data(recipe: Recipe) -> None:
    """Writes documents, then conversations, then the card. Raises `DataError`, `ModelError`."""
    from .conversations import make_pools, sample, take  # needs PyTorch

    last = recipe.data / "held_out" / "code.jsonl"
    if not last.exists():
        made = make_texts(recipe.settings.texts, recipe.shared, recipe.out / "packages")
        for name in sorted(made, key=lambda name: recipe.data / name == last):
            write(recipe.data / name, made[name])
    tokenizer, seen = load_tokenizer(recipe.model), set[str]()
    for part in "held_out", "train":
        file = recipe.out / "sampled" / f"{part}.jsonl"
        sample(recipe.model, tokenizer, make_pools(recipe.shared, part), part, recipe.settings.talk, file, say)
        take(file, recipe.data / part, seen)
    write_card(recipe)


def write_card(recipe: Recipe) -> None:
    """Writes README.md, which names the licences of the data."""
    with whole_file(recipe.data / "README.md") as partial:
        partial.write_text(card(recipe.data), encoding="utf-8")


def make_packs(recipe: Recipe) -> None:
    """Learns packs/NAME.npz of each domain, and of all, by `mlx_zip vocab pack learn`. Raises `TrainingError`."""
    packs, folder = recipe.settings.packs, recipe.out / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    mixture = folder / "mixed.yaml"
    shares = [f"  - data: ../data/train/{name}.jsonl\n    share: {share}\n" for name, share in packs.mixed]
    mixture.write_text("sources:\n" + "".join(shares), encoding="utf-8")
    for name in (*packs.domains, "mixed"):
        out = folder / f"{name}.npz"
        held_out = [recipe.data / "held_out" / f"{one}.jsonl" for one in ([name] if name != "mixed" else packs.domains)]
        texts = ["--mixture", mixture] if name == "mixed" else ["--data", recipe.data / "train" / f"{name}.jsonl"]
        sizes = {"size": packs.size, "merge-size": packs.merge_size, "codebook-size": packs.codebook_size}
        sizes |= {"window": packs.window, "most-ids": packs.most_ids}
        flags = [word for flag, value in sizes.items() for word in (f"--{flag}", value)]
        words = ["vocab", "pack", "learn", "--tokenizer", recipe.model, *texts, "--held-out", *held_out, *flags]
        if not out.exists() and cli.main([str(word) for word in (*words, "--out", out)]):
            raise TrainingError(f"the pack {name} could not be learned from {recipe.data}")


def train(recipe: Recipe) -> None:
    """Trains the leg that --leg names: leg-N/zip and leg-N/control. Raises `TrainingError`."""
    from .training import prepare_data, train_leg

    folder, leg = recipe.out / f"leg-{recipe.leg}", recipe.settings.leg
    before = None if recipe.leg == 1 else recipe.out / f"leg-{recipe.leg - 1}"
    prepare_data(
        recipe.model, recipe.data, recipe.out / "packs" / "mixed.npz", folder / "data", recipe.settings.packs, leg
    )
    train_leg(recipe.model, folder / "data", folder, leg, before, say)


STAGES: dict[str, Callable[[Recipe], None]] = {"data": make_data, "packs": make_packs, "train": train}


def say(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages; returns exit status 0, 2 after an error, 130 after Ctrl-C (the same command continues)."""
    args = parser().parse_args(argv)
    model, out = (Path(path).expanduser().resolve() for path in (args.model, args.out))
    shared = args.shared and Path(args.shared).expanduser().resolve()
    recipe = Recipe(SMALL if args.small else FULL, model, out, shared, args.leg)
    try:
        if unknown := sorted(set(args.stages) - set(STAGES)):
            raise DataError(f"{', '.join(unknown)} is none of the stages {', '.join(STAGES)}")
        for name in args.stages or STAGES:
            say(f"== {name}")
            STAGES[name](recipe)
    except (MlxZipError, OSError) as error:  # OSError: a full disk, a folder that cannot be written
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same call continues from there")
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    made = Parser(prog="python -m recipes.smollm2", description="Teaches SmolLM2 hypertokens.")
    add = made.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"stages to run: {', '.join(STAGES)} (default: all, in this order)")
    add("--model", required=True, help="folder of the base model, with its tokenizer")
    add("--out", required=True, help="folder to write all results to; the same command continues an interrupted run")
    add(
        "--shared", help="folder that holds the data sets, in data/text (default: none: sources and conversations only)"
    )
    add(
        "--leg",
        type=int,
        default=1,
        help="leg to train; a later one begins with the weights of the one before (default: 1)",
    )
    add("--small", action="store_true", help="make little data without any package, as a test (default: off)")
    return made


if __name__ == "__main__":
    sys.exit(main())
