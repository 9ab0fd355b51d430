"""A toy corpus in the files of the stories recipe: a few dozen stories from a handful of words."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from recipes.stories.texts import SEPARATOR, SOURCES

NAMES, ANIMALS = ("Lily", "Tom", "Sue"), ("dog", "cat", "bird", "frog")
OBJECTS, COLOURS, PLACES = ("ball", "hat", "box", "cake"), ("red", "big", "shiny"), ("park", "garden", "forest")


def story(rng: random.Random) -> str:
    """A made-up story of two paragraphs."""
    name, animal, place = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(PLACES)
    colour, thing = rng.choice(COLOURS), rng.choice(OBJECTS)
    return (
        f"Once upon a time, there was a little girl named {name}. She had {rng.randrange(10)} hats and a {animal}. The "
        f"{animal} was in the {place}.\nOne day, {name} found a {colour} {thing} in the {place}. The {thing} "
        f"was for the {animal}. It was a {colour} {thing}. The {animal} and {name} were happy."
    )


def corpus(folder: Path, stories: int = 30, seed: int = 0) -> Path:
    """Writes every input file of the recipe into `folder`; none has the recorded checksum."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES.values():
        texts = [story(rng) for _ in range(stories if "train" in source.name else 6)]
        if source.real:
            text = "\n".join(one.replace("\n", "\n\n") for one in texts)
        else:
            text = "".join(f"{one}\n{SEPARATOR}\n" for one in texts)
        (folder / source.name).write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
    return folder
