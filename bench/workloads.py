"""What the engines read and write: texts of a domain cut into prompt and continuation, or requests to a chat model.

A text's continuation can be forced (replay): every engine then emits exactly its bytes, in its own ids. Without text
files a made-up text stands in, so that a fresh machine runs; records call it synthetic.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import MlxZipError
from mlx_zip.text.tokenizers import load_tokenizer

DOMAINS = ("code", "math", "chat", "multilingual", "web")
SYNTHETIC = "synthetic"
CHARACTERS_PER_ID = 16  # more than any tokenizer here reads into one, so that a text is not tokenized to its end
FIELDS = (("text", "code"), ("question", "answer"), ("prompt", "canonical_solution"), ("text",))  # of a JSON line
WHO = ("a dog", "a cat", "a girl", "a boy", "a bird", "a bear", "a fox", "a frog")
WHAT = (
    "a red ball",
    "a small boat",
    "a big tree",
    "a blue hat",
    "the rain",
    "a jar of honey",
    "a lost key",
    "a new friend",
)
REQUESTS = tuple(  # WHO[i] with WHAT[i] first, then each with the next thing, and so on: 64 different stories
    f"Tell me a story about {who} and {WHAT[(i + shift) % len(WHAT)]}."
    for shift in range(len(WHAT))
    for i, who in enumerate(WHO)
)


@dataclass(frozen=True)
class Turn:
    """prompt: base ids to read. text: base ids to write, when they are forced. tokens: base tokens to write at most."""

    prompt: tuple[int, ...]
    tokens: int
    text: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Workload:
    """Turns of one request or conversation. mode: "replay", "free" or "chat". data: where the text is from."""

    domain: str
    mode: str
    data: str
    turns: tuple[Turn, ...]
    window: int = 0

    @property
    def positions(self) -> int:
        """Positions that a plain model needs at most; between turns an eos may be added."""
        return sum(len(turn.prompt) + turn.tokens + 1 for turn in self.turns)


def read_tokenizer(where: str | Path) -> Any:
    """Returns mlx-lm's wrapper of a tokenizer of any kind that is read here, with the streaming detokenizer that mlx-lm
    takes for it, so that mlx-lm's own loop is timed as it runs. Raises `DataError`.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer: Any = load_tokenizer(where)
    return TokenizerWrapper(tokenizer._tokenizer, _mlx_lm_detokenizer(tokenizer))


def _mlx_lm_detokenizer(tokenizer: Any) -> Any:
    """The class that mlx-lm chooses when it finds this decoder in a tokenizer.json."""
    from mlx_lm import tokenizer_utils as utils

    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = None if decoder is None else json.loads(decoder.__getstate__())
    if utils._is_spm_decoder(state):
        return utils.SPMStreamingDetokenizer
    if utils._is_spm_decoder_no_space(state):
        return partial(utils.SPMStreamingDetokenizer, trim_space=False)
    return utils.BPEStreamingDetokenizer if utils._is_bpe_decoder(state) else utils.NaiveStreamingDetokenizer


# ---- texts


def sources(texts: Sequence[str], data: Path | None, domains: Sequence[str]) -> dict[str, list[Path]]:
    """Files by domain: from DOMAIN=FILE items, else from a folder with `<domain>/*`, else none: a made-up text.

    Of a domain's folder the files with `test` in their names are taken, if there are any. Raises `MlxZipError`.
    """
    if texts:
        found: dict[str, list[Path]] = {}
        for item in texts:
            domain, _, name = item.partition("=")
            if not name or not Path(name).is_file():
                raise MlxZipError(f"--text {item}: expected DOMAIN=FILE with a file that exists")
            found.setdefault(domain, []).append(Path(name))
        return found
    if data is None:
        return {SYNTHETIC: []}
    return {domain: _files_of(data, domain) for domain in domains}


def _files_of(data: Path, domain: str) -> list[Path]:
    files = [path for path in sorted((data / domain).glob("*")) if path.is_file()]
    if not files:
        raise MlxZipError(f"--data {data}: no text in {domain}/; choose with --domains")
    return [path for path in files if ".test." in path.name] or files


def cut(
    domain: str, files: Sequence[Path], tokenizer: Any, prompt: int, tokens: int, windows: int, mode: str
) -> list[Workload]:
    """`windows` stretches of a domain's text, one after the other: `prompt` base ids to read, then `tokens` to write.

    Raises `MlxZipError` when the text is too short.
    """
    need = windows * (prompt + tokens)
    ids = _first_ids(_text(files), tokenizer, need)
    if ends := set(ids) & set(tokenizer.eos_token_ids):
        raise MlxZipError(f"the text of {domain} holds the end of a text (id {min(ends)}), where engines stop")
    if len(ids) < need:
        raise MlxZipError(f"the text of {domain} has {len(ids)} base ids, {windows} window(s) need {need}")
    data = ", ".join(path.name for path in files) or "synthetic: made-up sentences, not a real text"
    cuts = [(ids[at : at + prompt], ids[at + prompt : at + prompt + tokens]) for at in range(0, need, prompt + tokens)]
    made = [Turn(tuple(head), tokens, tuple(rest) if mode == "replay" else None) for head, rest in cuts]
    return [Workload(domain, mode, data, (turn,), window) for window, turn in enumerate(made)]


def chats(tokenizer: Any, requests: Sequence[str], conversations: int, turns: int, tokens: int) -> list[Workload]:
    """Conversations of `turns` requests each, in the order of the requests, every request answered freely.

    Raises `MlxZipError` for too few requests.
    """
    if turns < 1 or turns * conversations > len(requests):
        wanted = f"{conversations} conversation(s) of {turns} turn(s)"
        raise MlxZipError(f"{wanted} need {turns * conversations} requests, there are {len(requests)}: --requests FILE")
    cuts = [requests[at : at + turns] for at in range(0, turns * conversations, turns)]
    return [_chat(tokenizer, asked, tokens, window) for window, asked in enumerate(cuts)]


def _chat(tokenizer: Any, requests: Sequence[str], tokens: int, window: int) -> Workload:
    from mlx_zip.text.prompts import encode_prompt

    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in requests]
    bos = tokenizer.bos_token_id
    later = [ids[1:] if ids[0] == bos else ids for ids in prompts[1:]]  # only a conversation's first prompt has a bos
    turns = tuple(Turn(tuple(ids), tokens) for ids in (prompts[0], *later))
    return Workload("chat", "chat", "requests", turns, window)


def read_requests(file: Path | None) -> list[str]:
    """The requests of a file, one a line; without a file 64 for stories."""
    if file is None:
        return list(REQUESTS)
    lines = [line.strip() for line in _read(file).splitlines()]
    return [line for line in lines if line]


def _first_ids(pieces: Iterator[str], tokenizer: Any, count: int) -> list[int]:
    text, enough = "", count * CHARACTERS_PER_ID
    while True:
        while len(text) < enough and (piece := next(pieces, None)) is not None:
            text += piece
        ids = tokenizer.encode(text[:enough], add_special_tokens=False)
        if len(ids) > count or len(text) < enough:
            return ids[:count]
        enough *= 2


def _text(files: Sequence[Path]) -> Iterator[str]:
    """Yields documents of the files in turns, each followed by an empty line."""
    if not files:
        yield from _synthetic()
        return
    for documents in zip_longest(*map(_documents, files)):
        yield from (f"{document}\n\n" for document in documents if document)


def _documents(file: Path) -> Iterator[str]:
    text = _read(file)
    if ".jsonl" not in file.name:
        yield from text.split("\n\n")
        return
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
            fields = next(fields for fields in FIELDS if all(isinstance(record.get(name), str) for name in fields))
        except (ValueError, AttributeError, StopIteration) as error:
            raise MlxZipError(f"{file}: line {number} is not a JSON object with a text") from error
        yield "\n".join(record[name] for name in fields)


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.name.endswith(".gz") else data).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise MlxZipError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _synthetic() -> Iterator[str]:
    """Sentences of made-up words, Zipf-distributed, half of them ones that came before."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinsrhldcumfpgwyb"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(3000)]
    known: list[str] = []
    while True:
        if known and rng.random() < 0.5:
            sentence = known[min(int(rng.zipf(1.5)), len(known)) - 1]
        else:
            sentence = " ".join(words[min(int(i), len(words)) - 1] for i in rng.zipf(1.2, rng.integers(5, 15)))
            known.append(sentence)
        yield f"{sentence.capitalize()}. "
