"""Holds the settings and folders of a run, and runs commands for its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.stories.commands import RunModule, Word, run_command, run_in_own_process

from .settings import Leg, Settings

MIXED = "mixed"  # name of the pack that the model is trained with


@dataclass(frozen=True)
class Recipe:
    """Settings and folders for all stages.

    model: folder of the base. out: folder of all results. shared: folder that holds data/text, None for no data sets.
    leg: number (from 1) of the leg to train and measure; None to train all legs of the settings and measure the last.
    call: runs a Python module with arguments in a folder and returns the exit status.
    """

    settings: Settings
    model: Path
    out: Path
    shared: Path | None = None
    leg: int | None = None
    call: RunModule = run_in_own_process

    @property
    def data(self) -> Path:
        """Folder of the texts: train/NAME.jsonl and held_out/NAME.jsonl."""
        return self.out / "data"

    def pack(self, name: str) -> Path:
        """Returns the file of a learned pack."""
        return self.out / "packs" / f"{name}.npz"

    @property
    def last(self) -> int:
        """Number of the leg to measure."""
        return len(self.settings.legs) if self.leg is None else self.leg

    def legs(self) -> list[Leg]:
        """Returns the settings of the legs 1 to `last`."""
        known = self.settings.legs
        return [known[min(number, len(known)) - 1] for number in range(1, self.last + 1)]

    def folder(self, leg: int) -> Path:
        """Returns the folder of a leg."""
        return self.out / f"leg-{leg}"

    @property
    def last_folder(self) -> Path:
        """Folder of the leg to measure."""
        return self.folder(self.last)

    def run(self, *words: Word, module: str = "mlx_zip") -> None:
        """Runs `python -m MODULE WORDS`. Raises `TrainingError` if the command fails."""
        run_command(self.call, module, words, self.out)

    def make(self, made: Path, *words: Word, flag: str = "--out", module: str = "mlx_zip") -> Path:
        """Runs `python -m MODULE WORDS FLAG MADE`, which writes `made`, unless `made` exists; returns `made`.

        Raises `TrainingError` if the command fails.
        """
        if not made.exists():
            self.run(*words, flag, made, module=module)
        return made
