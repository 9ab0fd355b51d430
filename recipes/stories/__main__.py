"""`python -m recipes.stories --data DIR --out DIR`: makes the stories models; `make model` calls it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_zip import named
from mlx_zip.arguments import Parser
from mlx_zip.errors import MlxZipError
from mlx_zip.training.settings import ENGINES

from .bundle import install_bundle
from .commands import Recipe, run_in_own_process
from .recipe import STAGES, run_stages
from .settings import SCALES
from .texts import describe_sources


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; returns exit status 0, 2 after an error, 130 after Ctrl-C (the same command continues)."""
    args = make_parser().parse_args(argv)
    data, out = (Path(path).expanduser().resolve() for path in (args.data, args.out))
    settings = SCALES[args.scale] if args.seed is None else replace(SCALES[args.scale], seed=args.seed)
    if args.processes < 1:
        print(f"error: --processes must be at least 1, got {args.processes}", file=sys.stderr)
        return 2
    if args.processes > 1 and args.engine == "torch":
        print("error: --engine torch trains in one process; leave out --processes", file=sys.stderr)
        return 2
    call = partial(run_in_own_process, trainers=args.processes)
    recipe = Recipe(settings, data, out, check=not args.no_checksum, call=call, engine=args.engine)
    try:
        run_stages(recipe, args.stage)
        if args.install:
            install_bundle(recipe, named.FOLDER)
    except (MlxZipError, OSError) as error:  # OSError: a full disk, a folder that cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same call continues from there", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    made = Parser(
        prog="python -m recipes.stories",
        description="Makes the stories models from a folder of stories.",
        epilog=describe_sources(),
    )
    add = made.add_argument
    add("--data", required=True, help="folder with the files of stories that are listed below")
    add("--out", required=True, help="folder to write all results to; the same command continues an interrupted run")
    add("--stage", nargs="+", default=[], metavar="NAME", help=f"stages to run (default: all): {', '.join(STAGES)}")
    add(
        "--scale",
        choices=sorted(SCALES),
        default="full",
        help="settings: full makes the bundled models; tiny runs every stage in seconds, as a test (default: full)",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that share each training batch (default: 1)",
    )
    add(
        "--engine",
        choices=ENGINES,
        default="mlx",
        help="what computes the training steps, except those of the draft head; torch is much faster on a CPU "
        "(default: mlx)",
    )
    add("--seed", type=int, help="random seed of texts, weights and training (default: 0)")
    add(
        "--no-checksum",
        action="store_true",
        help="accept files in --data whose checksums differ from the recorded ones (default: off)",
    )
    add(
        "--install",
        action="store_true",
        help=f"copy the finished models into the package, to {named.FOLDER.name}/ (default: off)",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
