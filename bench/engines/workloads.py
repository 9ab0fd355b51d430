"""Makes the engines' inputs: texts cut into prompt and continuation, and conversations with a chat model.

A text's continuation can be forced (replay): every engine then emits exactly that text, in its own ids. Without text
files a made-up text is used, which records call synthetic, so that every machine can run a bench.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import MlxZipError
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.sources import Item, Record, Skipped, Source, SourceReader, parse_item
from mlx_zip.text.tokenizers import load_tokenizer

SYNTHETIC = "synthetic"
# upper bound on the mean characters per id of any tokenizer here, so that a long text is not tokenized whole
CHARACTERS_PER_ID = 16
COLUMNS = (  # field names tried for records with a prompt and a completion; records with one text fit any of them
    {"prompt": "text", "completion": "code"},
    {"prompt": "question", "completion": "answer"},
    {"completion": "canonical_solution"},
)
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
REQUESTS = tuple(  # 64 requests: each of WHO with each of WHAT
    f"Tell me a story about {who} and {WHAT[(i + shift) % len(WHAT)]}."
    for shift in range(len(WHAT))
    for i, who in enumerate(WHO)
)


@dataclass(frozen=True)
class Turn:
    """One request. prompt: base ids to read. tokens: most base ids to write. text: base ids to replay, or None."""

    prompt: tuple[int, ...]
    tokens: int
    text: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Workload:
    """The turns of one request or conversation.

    mode: "replay", "free" or "chat". data: names of the files that the text is from. window: index of the
    conversation, or of the text among those of its kind.
    """

    domain: str
    mode: str
    data: str
    turns: tuple[Turn, ...]
    window: int = 0

    @property
    def positions(self) -> int:
        """Upper bound on the base tokens that a plain model's context must hold for all turns, one eos per turn."""
        return sum(len(turn.prompt) + turn.tokens + 1 for turn in self.turns)


def read_tokenizer(where: str | Path) -> Any:
    """Reads a tokenizer of any kind and returns it in mlx-lm's wrapper, with the detokenizer that mlx-lm would choose.

    So mlx-lm's loop is timed as it runs for its users. Raises `DataError` if the tokenizer cannot be read.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer: Any = load_tokenizer(where)
    return TokenizerWrapper(tokenizer._tokenizer, _mlx_lm_detokenizer(tokenizer))


def _mlx_lm_detokenizer(tokenizer: Any) -> Any:
    from mlx_lm import tokenizer_utils as utils

    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = None if decoder is None else json.loads(decoder.__getstate__())
    if utils._is_spm_decoder(state):
        return utils.SPMStreamingDetokenizer
    if utils._is_spm_decoder_no_space(state):
        return partial(utils.SPMStreamingDetokenizer, trim_space=False)
    return utils.BPEStreamingDetokenizer if utils._is_bpe_decoder(state) else utils.NaiveStreamingDetokenizer


# ---- texts


def domain_files(texts: Sequence[str]) -> dict[str, list[Path]]:
    """Returns the files of each domain from DOMAIN=FILE items; without items, one domain without files (made-up text).

    Raises `MlxZipError` if an item is not DOMAIN=FILE.
    """
    found: dict[str, list[Path]] = {}
    for item in texts:
        domain, _, name = item.partition("=")
        if not domain or not name or not Path(name).is_file():
            raise MlxZipError(f"--text {item}: expected DOMAIN=FILE with a file that exists")
        found.setdefault(domain, []).append(Path(name))
    return found or {SYNTHETIC: []}


def cut_text(domain: str, files: Sequence[Path], tokenizer: Any, prompt: int, tokens: int, mode: str) -> Workload:
    """Cuts the start of a text into `prompt` base ids to read and `tokens` to write.

    Raises `MlxZipError` if the text is too short or contains an eos.
    """
    need = prompt + tokens
    ids = tokenize_first_ids(read_text_pieces(files), tokenizer, need)
    if ends := set(ids) & set(tokenizer.eos_token_ids):
        raise MlxZipError(f"the text of {domain} holds the end of a text (id {min(ends)}), where engines stop")
    if len(ids) < need:
        raise MlxZipError(f"the text of {domain} has {len(ids)} base ids, {need} are needed")
    data = ", ".join(path.name for path in files) or "synthetic: made-up sentences, not a real text"
    turn = Turn(tuple(ids[:prompt]), tokens, tuple(ids[prompt:]) if mode == "replay" else None)
    return Workload(domain, mode, data, (turn,))


def make_conversations(
    tokenizer: Any, requests: Sequence[str], conversations: int, turns: int, tokens: int
) -> list[Workload]:
    """Makes conversations of `turns` requests each, taken in order. tokens: most base ids of an answer.

    Raises `MlxZipError` if there are too few requests.
    """
    if turns < 1 or turns * conversations > len(requests):
        wanted = f"{conversations} conversation(s) of {turns} turn(s)"
        raise MlxZipError(f"{wanted} need {turns * conversations} requests, there are {len(requests)}: --requests FILE")
    cuts = [requests[at : at + turns] for at in range(0, turns * conversations, turns)]
    return [make_conversation(tokenizer, asked, tokens, window) for window, asked in enumerate(cuts)]


def make_conversation(tokenizer: Any, requests: Sequence[str], tokens: int, window: int) -> Workload:
    from mlx_zip.text.prompts import encode_prompt

    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in requests]
    bos = tokenizer.bos_token_id
    later = [ids[1:] if ids[0] == bos else ids for ids in prompts[1:]]  # only the first prompt has a bos
    turns = tuple(Turn(tuple(ids), tokens) for ids in (prompts[0], *later))
    return Workload("chat", "chat", "requests", turns, window)


def read_requests(file: Path | None) -> list[str]:
    """Returns the requests in a text file, one per line; without a file, 64 built-in requests for stories.

    Raises `DataError` if the file cannot be read or has no requests.
    """
    if file is None:
        return list(REQUESTS)
    lines = [line.strip() for document in read_corpus([file]).documents for line in document.text.splitlines()]
    return [line for line in lines if line]


def tokenize_first_ids(pieces: Iterator[str], tokenizer: Any, count: int) -> list[int]:
    """Returns the first `count` base ids of the text in `pieces`, and tokenizes little more text than needed."""
    text, enough = "", count * CHARACTERS_PER_ID
    while True:
        while len(text) < enough and (piece := next(pieces, None)) is not None:
            text += piece
        ids = tokenizer.encode(text[:enough], add_special_tokens=False)
        if len(ids) > count or len(text) < enough:
            return ids[:count]
        enough *= 2


def read_text_pieces(files: Sequence[Path]) -> Iterator[str]:
    if not files:
        yield from synthetic_sentences()
        return
    for documents in zip_longest(*map(read_documents, files)):
        yield from (f"{document}\n\n" for document in documents if document)


def read_documents(file: Path) -> Iterator[str]:
    for item in SourceReader(Source((str(file),))):
        text = item_text(item)
        yield from text.split("\n\n") if item.kind == "text" else [text]


def item_text(item: Item) -> str:
    found = [parse_item(item, columns) for columns in COLUMNS]
    record = next((one for one in found if isinstance(one, Record)), parse_item(item))
    if isinstance(record, Skipped):
        if record.empty:
            return ""
        raise MlxZipError(f"{record.where}: {record.reason}")
    if record.text is None:
        raise MlxZipError(f"{record.where}: a conversation has no text of its own")
    return record.text if record.prompt is None else f"{record.prompt}\n{record.text}"


def synthetic_sentences() -> Iterator[str]:
    """Yields sentences of made-up words endlessly; about half of them repeat an earlier sentence."""
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
