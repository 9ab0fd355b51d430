"""The recipe: from a folder of stories to the bundled pair of models, by the project's own commands, in order.

    texts       stories as JSON lines, conversations made of them, requests to test with
    tokenizer   a vocabulary of the stories' own
    short       windows for the base's first stage              base-short   the base, from scratch
    long        longer windows and conversations                base         the base, on those
    compressed  the same windows and conversations, compressed  zip          the base with hyper-encoders, on these
                                                                control      the base on what `long` made, as long
    packs       codebook packs, learned from the stories        packed       zip, on windows that begin with packs, in
                                                                             rounds, the last ones canonical
                                                                packed-control   control, on the same text
    quantized   both models, with fewer bits per weight         tuned        rows of the pack that is bundled
    bundle      both models and the pack                        measure      bits per byte and rates of all of them

A stage whose output is there is passed over, so the same call goes on where the last one stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_zip import bundled
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import whole_folder, write_json

from . import packs
from .lexicon import learn
from .requests import ask, conversations, write_jsonl
from .settings import Settings
from .texts import SOURCES, read_stories
from .tokenizer import train_tokenizer

RECORD = "recipe.json"
QUANTIZED, TUNED = "quantized", f"{packs.PACKS}/{packs.OWN}-tuned.npz"
STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # exit statuses of a command that was told to stop


def in_process_of_its_own(module: str, arguments: Sequence[str], folder: Path, trainers: int = 1) -> int:
    """Runs `python -m MODULE ARGUMENTS` in a folder; its exit status.

    trainers: `mlx_zip train` runs in so many processes, which share its batches over MLX's ring on this machine; the
    first status that is not 0 is theirs. A Ctrl-C reaches all by itself, from the terminal, and a SIGTERM is passed
    on; either way they end as they see fit: a training run saves its last step first.
    """
    command = [sys.executable, "-m", *module.split(), *arguments]
    count = trainers if [module, *arguments[:1]] == ["mlx_zip", "train"] else 1
    with contextlib.ExitStack() as stack:
        places = [{}] if count == 1 else stack.enter_context(ring(count))
        children = [
            stack.enter_context(subprocess.Popen(command, cwd=folder, env={**os.environ, **place})) for place in places
        ]
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: [one.terminate() for one in children]}
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        return next(filter(None, [child.wait() for child in children]), 0)


@contextlib.contextmanager
def ring(count: int) -> Iterator[list[dict[str, str]]]:
    """Environments of `count` processes that make up MLX's ring on free ports of this machine."""
    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
        stack.close()  # free again for the processes
        json.dump(hosts, file)
        file.flush()
        yield [{"MLX_RANK": str(rank), "MLX_HOSTFILE": file.name} for rank in range(count)]


def on_stderr(line: str) -> None:
    """Prints at once, so that the lines of the commands stand in their place."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Recipe:
    """What is made of what, where.

    data: the folder of the stories. out: the folder of all that is made. check: refuse other files than the recorded
    ones. call: runs a module of this Python with arguments in a folder and gives its exit status. say: takes a line.
    """

    settings: Settings
    data: Path
    out: Path
    check: bool = True
    call: Callable[[str, Sequence[str], Path], int] = in_process_of_its_own
    say: Callable[[str], None] = on_stderr

    def run(self, stages: Sequence[str] = ()) -> None:
        """Runs the stages named, or all, each unless it is done. Raises `DataError`, `TrainingError`."""
        if unknown := sorted(set(stages) - set(STAGES)):
            raise DataError(f"--stage: {', '.join(unknown)} is none of {', '.join(STAGES)}")
        self._open()
        for name in stages or STAGES:
            stage = STAGES[name]
            if all((self.out / product).exists() for product in stage.products(self)):
                self.say(f"== {name}: done before")
                continue
            self.say(f"== {name}")
            stage.make(self)

    def _open(self) -> None:
        record = {"settings": asdict(self.settings), "fingerprint": self.settings.fingerprint(), "checked": self.check}
        path = self.out / RECORD
        folders = {Path(product).parts[0] for stage in STAGES.values() for product in stage.products(self)}
        begun = [name for name in sorted(folders) if (self.out / name).exists()]
        if not begun:
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
            return
        if not path.exists():
            raise DataError(f"{self.out} has {begun[0]}, but no {RECORD} that says what made it; choose another --out")
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}; choose another --out") from error
        if not isinstance(before, dict) or before.get("fingerprint") != record["fingerprint"]:
            raise DataError(f"{self.out} holds what other settings made (see {path}); choose another --out")
        if before.get("checked") != self.check:
            raise DataError(
                f"{self.out} was begun {'with' if self.check else 'without'} --no-checksum; call it so, or choose "
                "another --out"
            )

    # ---- running commands

    def command(self, name: str, flags: Mapping[str, Any]) -> None:
        """Runs `mlx_zip name --flags`, shown as a user would type it. Raises `TrainingError` when it fails."""
        self.execute("mlx_zip", [*name.split(), *as_words(flags)])

    def execute(self, module: str, arguments: Sequence[str]) -> None:
        """Runs an installed module of this Python in `out`, so that paths are short and the same everywhere."""
        self.say("$ " + shlex.join([module.replace(" ", "."), *arguments]))
        status = self.call(module, arguments, self.out)
        if status in STOPPED:
            raise KeyboardInterrupt
        if status:
            shown = shlex.join([module, *arguments[:1]])
            raise TrainingError(f"{shown} ended with status {status}; run the same again to go on from its last step")


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line: names with dashes; lists as several words; True as a bare flag."""
    out: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        out.append("--" + name.replace("_", "-"))
        if value is not True:
            out += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return out


# ---- texts and tokenizer

TRAIN_SETS = ("t1.train", "mixed.train", "real.train")
TEXTS = {"train", "valid", "t1.test", "real.test"}  # texts/NAME.jsonl


def make_texts(recipe: Recipe) -> None:
    """texts/: all training stories in an order drawn, test stories, conversations (asked: of one turn), requests."""
    settings, stories = recipe.settings, read_stories(recipe.data, recipe.check)
    once = stories["t1.train"] + stories["mixed.train"]
    lexicon = learn(once, rare=8 if len(once) > 1000 else 2)
    rng = random.Random(settings.seed)
    often = {name: stories[name] * settings.repeats.get(name, 1) for name in TRAIN_SETS}
    sampled = often["t1.train"] + often["mixed.train"]
    train = sampled + often["real.train"]
    rng.shuffle(train)
    with whole_folder(recipe.out / "texts") as folder:
        tests = {
            "valid": stories["t1.test"][: settings.validation],
            "t1.test": stories["t1.test"],
            "real.test": stories["real.test"],
        }
        for name, texts in {"train": train, **tests}.items():
            write_jsonl(folder / f"{name}.jsonl", ({"text": text} for text in texts))
        for name, turns, limit in (("asked", 1, settings.asked), ("conversations", None, settings.conversations)):
            talks = conversations(sampled, lexicon, settings.seed, turns, limit)
            write_jsonl(folder / f"{name}.jsonl", talks)
        requests = (ask(story, lexicon, rng) for story in stories["t1.test"][: settings.requests])
        write_jsonl(folder / "requests.jsonl", ({"messages": [{"role": "user", "content": r}]} for r in requests))


def make_tokenizer(recipe: Recipe) -> None:
    """tokenizer/: learnt from the training stories, each once, in the order of the files."""
    texts = [text for name in TRAIN_SETS for text in SOURCES[name].stories(recipe.data, recipe.check)]
    with whole_folder(recipe.out / "tokenizer") as folder:
        settings = recipe.settings
        train_tokenizer(texts, folder, settings.vocab_size, settings.model["max_position_embeddings"])


# ---- preparing

PLAIN = {"codebook_size": 0, "merge_size": 1}
WINDOWS = {  # of a kind: what prepared/KIND-WHAT is made of
    "short": {"train": "train", "chat": "asked", "valid": "valid"},
    "long": {"train": "train", "chat": "conversations", "valid": "valid"},
    "compressed": {"train": "train", "chat": "conversations", "valid": "valid"},
}


def prepared(kind: str) -> dict[str, str]:
    """Folders of the windows of a kind, and the text in each."""
    return {f"prepared/{kind}-{what}": f"texts/{text}.jsonl" for what, text in WINDOWS[kind].items()}


def make_windows(recipe: Recipe, kind: str) -> None:
    """All prepared folders of a kind."""
    settings = recipe.settings
    codec = settings.codec if kind == "compressed" else PLAIN
    context = settings.short if kind == "short" else settings.long
    fixed = {
        "tokenizer": "tokenizer",
        "context": context,
        "shard_samples": settings.shard_samples,
        "protect": settings.protect,
        "workers": settings.workers,
        "fill_windows": kind == "short",
    }
    for folder, text in prepared(kind).items():
        recipe.command("prepare", {**fixed, "data": text, "out": folder, **codec})


# ---- training


def train(recipe: Recipe, name: str, kind: str, start: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """runs/NAME: a training run on the windows of a kind."""
    *data, valid = prepared(kind)
    fixed = {"data": data, "valid": valid, "out": f"runs/{name}", "seed": recipe.settings.seed}
    recipe.command("train", {**start, **fixed, **settings})


def model(run: str) -> str:
    """The model folder that a run leaves."""
    return f"runs/{run}/model"


def train_base(recipe: Recipe) -> None:
    """The base's first stage, from random weights."""
    write_json(recipe.out / "base.json", dict(recipe.settings.model))
    start = {"from_scratch": "base.json", "tokenizer": "tokenizer"}
    train(recipe, "base-short", "short", start, recipe.settings.base)


def train_chat(recipe: Recipe) -> None:
    """The base's second stage: longer windows, and to tell stories on request."""
    train(recipe, "base", "long", {"model": model("base-short")}, recipe.settings.chat)


def train_zip(recipe: Recipe) -> None:
    """The zip2zip model: the base with new hyper-encoders, all trained."""
    train(recipe, "zip", "compressed", {"model": model("base")}, {**recipe.settings.extra, **recipe.settings.encoder})


def train_control(recipe: Recipe) -> None:
    """What the zip2zip model is compared with: the base after the same training on the same text, not compressed."""
    train(recipe, "control", "long", {"model": model("base")}, recipe.settings.extra)


# ---- bundle and figures


def quantize(recipe: Recipe) -> None:
    """quantized/: the models that are to be bundled, as they are to be stored; the one with packs begins with none."""
    bits = recipe.settings.bits
    with whole_folder(recipe.out / QUANTIZED) as folder:
        for name, run in recipe.settings.bundled.items():
            flags = {
                "hf_path": model(run),
                "mlx_path": f"{folder.name}/{name}",
                "quantize": True,
                "q_bits": bits,
                "q_group_size": 64,
                "dtype": "float32",
            }
            if name == bundled.DEFAULT:
                recipe.command("convert", {**flags, "encoder_bits": bits, "canonical": True})
            else:
                recipe.execute("mlx_lm convert", as_words(flags))


def tune(recipe: Recipe) -> None:
    """packs/own-tuned.npz: the model's own pack, its rows tuned for the weights as they are stored."""
    settings = recipe.settings
    fixed = {"model": f"{QUANTIZED}/{bundled.DEFAULT}", "dequantize": True, "out": TUNED, "seed": settings.seed}
    data = {"data": f"{packs.TEXTS}/learn-{packs.OWN}.jsonl", "run": "runs/tuned"}
    recipe.command(f"vocab pack tune {packs.PACKS}/{packs.OWN}.npz", {**fixed, **data, **settings.packs.tune})


def make_bundle(recipe: Recipe) -> None:
    """bundle/: the models that the package brings along; the one with packs brings its own, tuned."""
    with whole_folder(recipe.out / "bundle") as folder:
        for name in recipe.settings.bundled:
            if name == bundled.DEFAULT:
                flags = {"hf_path": f"{QUANTIZED}/{name}", "mlx_path": f"{folder.name}/{name}", "pack": TUNED}
                recipe.command("convert", flags)
            else:
                shutil.copytree(recipe.out / QUANTIZED / name, folder / name)
            for beside in ("README.md", "model.safetensors.index.json"):
                (folder / name / beside).unlink(missing_ok=True)
        (folder / "README.md").write_text(card(recipe.settings, recipe.check), encoding="utf-8")
        shutil.copy(recipe.out / RECORD, folder / RECORD)


def card(settings: Settings, checked: bool) -> str:
    """What the bundle says of itself. checked: its texts are the recorded ones."""
    used = [source for name, source in SOURCES.items() if name in TRAIN_SETS]
    texts = (
        [f"- `{s.name}` (sha256 {s.sha256}): {s.origin}" for s in used]
        if checked
        else ["- other texts than the recorded ones"]
    )
    lines = [
        "# Bundled models",
        "",
        *(f"- `{name}`: {bundled.NAMES[name]}" for name in settings.bundled),
        "",
        f"Trained from random weights by `make model` with the settings in {RECORD}; stored with {settings.bits} bits "
        "per weight. MIT licence, as the rest of the package. The texts:",
        "",
        *texts,
        "",
        "They tell made-up children's stories and know nothing else; what they say may be wrong or make no sense.",
    ]
    return "\n".join(lines) + "\n"


def measures(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of figures/NAME.json, flags of the evaluation)."""
    size = {"context": settings.long, "batch_size": settings.measure["batch_size"]}
    bundled = [f"bundle/{name}" for name in sorted(settings.bundled, reverse=True)]  # the base first
    every = [model(run) for run in ("control", "base", "zip")] + bundled
    for text, pack in (("t1.test", False), ("t1.test", True), ("real.test", False)):
        name = f"bits-{text}{'-packed' * pack}"
        yield name, {"data": f"texts/{text}.jsonl", "fill_windows": pack, **size, "model": every}
    last = [model(runs[-1]) for runs in packs.runs(settings.packs).values()]
    for pack in packs.unseen(settings.packs):
        flags = {"data": "texts/t1.test.jsonl", **size, "pack": f"{packs.PACKS}/{pack}.npz"}
        yield f"bits-{pack}", {**flags, "model": last[::-1]}
    asked = {"prompts": "texts/requests.jsonl", "generate": settings.requests, **size, **settings.measure}
    for temp in settings.temperatures:
        for turns in (1, settings.test_turns):
            yield f"told-{turns}-temp-{temp:g}", {**asked, "temp": temp, "turns": turns, "model": bundled}


def measure(recipe: Recipe) -> None:
    """figures/: bits per byte of every model; rates of the bundled ones, a story alone and as a later turn."""
    (recipe.out / "figures").mkdir(exist_ok=True)
    for name, flags in measures(recipe.settings):
        file = f"figures/{name}.json"
        if (recipe.out / file).exists():
            continue
        models = [word for one in flags["model"] for word in ("--model", one)]
        rest = as_words({key: value for key, value in flags.items() if key != "model"})
        recipe.execute("mlx_zip", ["evaluate", *models, *rest, "--out", file])


def install(recipe: Recipe, place: Path) -> None:
    """Copies the bundle to `place`, whole or not at all. Raises `TrainingError` when there is none."""
    made = recipe.out / "bundle"
    if not made.is_dir():
        raise TrainingError(f"{made} is not there: run the stage bundle first")
    with whole_folder(place) as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    recipe.say(f"== {place}: {size / 1e6:.2f} MB")


@dataclass(frozen=True)
class Stage:
    """make: does it. products: paths below `out` that are there once it is done."""

    make: Callable[[Recipe], None]
    products: Callable[[Recipe], list[str]]


def _indices(kind: str) -> Callable[[Recipe], list[str]]:
    return lambda _: [f"{folder}/index.json" for folder in prepared(kind)]


def _trained(run: str) -> Callable[[Recipe], list[str]]:
    return lambda _: [f"{model(run)}/config.json"]


def _rounds(name: str) -> Callable[[Recipe], list[str]]:
    return lambda recipe: [f"{model(run)}/config.json" for run in packs.runs(recipe.settings.packs)[name]]


STAGES: dict[str, Stage] = {
    "texts": Stage(make_texts, lambda _: ["texts/requests.jsonl"]),
    "tokenizer": Stage(make_tokenizer, lambda _: ["tokenizer/tokenizer.json"]),
    "short": Stage(lambda recipe: make_windows(recipe, "short"), _indices("short")),
    "base-short": Stage(train_base, _trained("base-short")),
    "long": Stage(lambda recipe: make_windows(recipe, "long"), _indices("long")),
    "base": Stage(train_chat, _trained("base")),
    "compressed": Stage(lambda recipe: make_windows(recipe, "compressed"), _indices("compressed")),
    "zip": Stage(train_zip, _trained("zip")),
    "control": Stage(train_control, _trained("control")),
    "pack-texts": Stage(packs.make_texts, lambda _: [packs.TEXTS]),
    "packs": Stage(packs.learn, lambda recipe: packs.products(recipe.settings.packs)),
    "windows": Stage(packs.make_windows, lambda recipe: packs.windows(recipe.settings.packs)),
    "packed": Stage(packs.train_packed, _rounds(packs.PACKED)),
    "packed-control": Stage(packs.train_control, _rounds(packs.CONTROL)),
    "quantized": Stage(quantize, lambda recipe: [f"{QUANTIZED}/{name}" for name in recipe.settings.bundled]),
    "tuned": Stage(tune, lambda _: [TUNED]),
    "bundle": Stage(make_bundle, lambda _: [f"bundle/{RECORD}"]),
    "measure": Stage(measure, lambda recipe: [f"figures/{name}.json" for name, _ in measures(recipe.settings)]),
}
