"""Samples conversations from a model, many at a time, and filters them.

A conversation begins with a system message. The first user turn is either given (a question, or a request about a text)
or written by the model, which as a chat model can continue the beginning of a user turn. The model answers, and in some
conversations writes a second user turn and answers again. The given text and all random draws of a conversation are
determined by the conversation's number, so an interrupted run continues with the numbers that are missing in its file.
"""

from __future__ import annotations

import ast
import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mlx_zip.cuda.model import open_model
from mlx_zip.cuda.network.linear import has_bfloat16_units
from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import atomic_file
from recipes.stories.commands import print_to_stderr

from .settings import FUNCTION_REQUESTS, PROBLEM_REQUESTS, SYSTEM_MESSAGES, TASK_REQUESTS, TEXT_REQUESTS, TalkSettings
from .texts import DATA_SETS, list_library_files

FIRST_NUMBERS = {"train": 0, "held_out": 10_000_000}  # number of the first conversation of each part
MODEL_LICENCE = "Apache-2.0"  # the model's licence
TEXT_LICENCES = {  # kind of given user turn -> licence of the texts in it
    "functions": "PSF-2.0",
    "problems": DATA_SETS["gsm8k"].licence,
    "tasks": DATA_SETS["mbpp"].licence,
    "abstracts": DATA_SETS["pubmedqa"].licence,
}
MOST_DRAWN_FROM = 256  # maximum number of candidate ids per draw
NOT_ENDED, TOO_LONG = "not ended", "too long"  # a turn, or the whole conversation, reached its maximum length


# --- How conversations begin ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestPool:
    """Parts of given user turns of one kind. requests: patterns in which {} becomes a text. systems: names in
    `SYSTEM_MESSAGES`. share: weight of the kind.
    """

    texts: Sequence[str]
    requests: Sequence[str]
    systems: Sequence[str]
    share: float


def make_pools(shared: Path | None, part: str) -> dict[str, RequestPool]:
    """Returns the request pools by kind. part: "train" or "held_out", which have different texts.

    shared: folder that holds data/text; None: only the kind "functions". Raises `DataError` if a file is unreadable.
    """
    pools = {"functions": RequestPool(list_library_functions(part), FUNCTION_REQUESTS, ("general", "coding"), 0.3)}
    if shared is not None:
        problems, tasks = _read_field(shared, "gsm8k", part, "question"), _read_field(shared, "mbpp", part)
        abstracts = [text for text in _read_field(shared, "pubmedqa", part) if len(text) < 1600]
        pools["problems"] = RequestPool(problems, PROBLEM_REQUESTS, ("general", "maths"), 0.25)
        pools["tasks"] = RequestPool(tasks, TASK_REQUESTS, ("general", "coding"), 0.15)
        pools["abstracts"] = RequestPool(abstracts, TEXT_REQUESTS, ("general", "summary", "science"), 0.3)
    return pools


def _read_field(shared: Path, name: str, part: str, key: str = "text") -> list[str]:
    return [record[key].replace("\r\n", "\n").strip() for record in DATA_SETS[name].read(shared, part)]


def list_library_functions(part: str, least: int = 200, most: int = 1200) -> list[str]:
    """Returns functions with `least` to `most` characters from top-level modules of Python's library."""
    out = []
    for source in (
        file.read_text(encoding="utf-8") for path, file in list_library_files(part).items() if "/" not in path
    ):
        lines = source.split("\n")
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        out += ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return [text for text in out if least <= len(text) <= most]


def begin_conversations(
    pools: Mapping[str, RequestPool], part: str, talk: TalkSettings, tokenizer: Any, have: set[int]
) -> Iterator[ConversationWriter]:
    """Yields an endless sequence of new conversations of a part, skipping the numbers in `have`."""
    names, number = list(pools), FIRST_NUMBERS[part]
    while True:
        if number not in have:
            draw = random.Random(f"seed {number}")
            if draw.random() < talk.alone:
                name = draw.choice(list(SYSTEM_MESSAGES))
                yield ConversationWriter(number, f"own {name}", SYSTEM_MESSAGES[name], None, talk, tokenizer)
            else:
                name = draw.choices(names, [pools[one].share for one in names])[0]
                pool = pools[name]
                user = draw.choice(pool.requests).format(draw.choice(pool.texts))
                system = SYSTEM_MESSAGES[draw.choice(pool.systems)]
                yield ConversationWriter(number, name, system, user, talk, tokenizer)
        number += 1


# --- One conversation -----------------------------------------------------------------------------------------------


@dataclass
class ConversationWriter:
    """A conversation that is being written in one row of `ParallelTexts`.

    number: seed of all draws. user: first user turn, None: the model writes it. tokenizer: the model's tokenizer, whose
    special tokens include ChatML's marks.
    """

    number: int
    kind: str
    system: str
    user: str | None
    talk: TalkSettings
    tokenizer: Any
    given: deque[int] = field(default_factory=deque)  # given ids that the model has not read yet
    turn: list[int] = field(default_factory=list)  # ids of the turn that is being written
    messages: list[dict[str, str]] = field(default_factory=list)
    length: int = 0  # base ids read and written
    dropped: str = ""  # reason for an early end, else ""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.number)
        self.temperature = self.draw.choice(self.talk.temperatures)
        self.turns = 4 if self.draw.random() < self.talk.second else 2
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.messages.append({"role": "system", "content": self.system})
        text = f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>user\n"
        if self.user is not None:
            self.messages.append({"role": "user", "content": self.user})
            text += f"{self.user}<|im_end|>\n<|im_start|>assistant\n"
        self._queue_text(text)

    @property
    def role(self) -> str:
        """Role whose turn is being written: "user" or "assistant"."""
        return "assistant" if self.messages[-1]["role"] == "user" else "user"

    def next_id(self, drawn: int | None) -> int | None:
        """Returns the next id to read, None at the end. drawn: the id drawn last, used if no given id is left."""
        if self.length == self.talk.total:
            self.dropped = TOO_LONG
            return None
        self.length += 1
        if self.given:
            return self.given.popleft()
        assert drawn is not None
        if drawn == self.end:
            return self._end_turn()
        self.turn.append(drawn)
        if len(self.turn) > (self.talk.answer if self.role == "assistant" else self.talk.question):
            self.dropped = NOT_ENDED
            return None
        return drawn

    def record(self) -> dict[str, Any]:
        """Returns the JSON record: the messages, or under "dropped" the reason why there are none.

        If the last answer reached its maximum length, the record keeps the answer and has `cut` true.
        """
        cut = False
        if self.dropped in (NOT_ENDED, TOO_LONG) and self.role == "assistant":
            text = self.tokenizer.decode(self.turn)
            self.dropped = find_fault(self.turn, text, self.talk.repeated)
            if cut := not self.dropped:
                self.messages.append({"role": "assistant", "content": text})
        messages = self.messages[: len(self.messages) - (self.messages[-1]["role"] == "user")]
        out = {"number": self.number, "kind": self.kind, "length": self.length}
        if len(messages) < 3:
            return {**out, "dropped": self.dropped or "no answer"}
        return {**out, "messages": messages, "cut": cut}

    def _end_turn(self) -> int | None:
        """Stores the finished turn and begins the next turn. Returns the id that ends the turn, None at the end."""
        text = self.tokenizer.decode(self.turn)
        self.dropped = find_fault(self.turn, text, self.talk.repeated)
        if self.dropped:
            return None
        self.messages.append({"role": self.role, "content": text})
        self.turn = []
        if len(self.messages) > self.turns:
            return None
        self._queue_text(f"\n<|im_start|>{self.role}\n")
        return self.end

    def _queue_text(self, text: str) -> None:
        self.given.extend(self.tokenizer.encode(text, add_special_tokens=False))


def find_fault(ids: Sequence[int], text: str, most: float) -> str:
    """Returns the reason to drop a turn, "" to keep it. most: maximum share of repeated 4-grams."""
    if not text.strip():
        return "empty"
    if "\ufffd" in text or "<|" in text:
        return "not text"
    return "repeats" if repeated_share(ids) > most else ""


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """Returns the share of a sequence's n-grams that occurred earlier in the sequence; 0 if it is shorter than n."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return 1 - len(grams) / grams.total() if grams else 0.0


# --- Many conversations ---------------------------------------------------------------------------------------------


class ParallelTexts:
    """Texts that a plain model reads in parallel: one id per text and pass.

    A text may begin while others are being written. Its prompt is also read id by id, which with dozens of texts costs
    little more per id than reading a long prompt at once.
    """

    def __init__(
        self, model: Path, count: int, length: int, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> None:
        """Loads a model for `count` texts of at most `length` ids. Raises `ModelError` or `ConfigError` on failure."""
        self._model = open_model(model, device, dtype, hypertokens=False)
        self._kv = self._model.decoder.make_kv_cache(count, length)
        none = torch.zeros(count, 0, self._model.width)  # input rows of hypertokens
        self._none = none.to(self._model.device, self._model.dtype)

    def __len__(self) -> int:
        return len(self._none)

    def clear(self, row: int) -> None:
        """Empties the text in a row, so that a new text can begin."""
        self._kv.trim_row(row, 0)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Reads one id per text, ids [count] int64. Returns logits [n, V] for the rows wanted [n] int64."""
        device = self._model.device
        h = self._model.embed(ids.to(device)[:, None], self._none)[:, 0]
        out = self._model.decoder.step(h, self._kv.lengths.clone(), self._kv)
        return self._model.base_logits(out[wanted.to(device)])


def draw_ids(logits: torch.Tensor, temperatures: Sequence[float], top_p: float, points: Sequence[float]) -> list[int]:
    """Returns one id per row of logits [n, V], drawn from the most likely ids with total probability `top_p`.

    temperatures: one per row. points: random numbers in [0, 1), one per row, that determine the drawn id.
    """
    best = logits.topk(min(MOST_DRAWN_FROM, logits.shape[-1]))
    heat, point = (torch.tensor(values, device=logits.device)[:, None] for values in (temperatures, points))
    shares = (best.values / heat).softmax(-1).cumsum(-1)
    places = torch.searchsorted(shares, point * top_p)
    return best.indices.gather(1, places).squeeze(1).tolist()


def write_conversations(
    texts: ParallelTexts, begun: Iterator[ConversationWriter], top_p: float
) -> Iterator[list[dict[str, Any]]]:
    """Writes conversations without end; yields the records of those that have just ended.

    When a conversation ends, its row begins the next conversation at once, so all rows are always in use. top_p: total
    probability of the ids to draw from.
    """
    rows = [next(begun) for _ in range(len(texts))]
    ids, drawn = [0] * len(rows), dict[int, int]()
    while True:
        finished = []
        for row, writing in enumerate(rows):
            chosen = writing.next_id(drawn.get(row))
            if chosen is None:
                finished.append(writing.record())
                rows[row] = next(begun)
                chosen = rows[row].next_id(None)
                texts.clear(row)
            assert chosen is not None  # a new text always has a first id
            ids[row] = chosen
        if finished:
            yield finished
        drawing = {row: one for row, one in enumerate(rows) if not one.given}
        logits = texts.step(torch.tensor(ids), torch.tensor(list(drawing), dtype=torch.int64))
        points = [one.draw.random() for one in drawing.values()]
        chosen_ids = draw_ids(logits, [one.temperature for one in drawing.values()], top_p, points)
        drawn = dict(zip(drawing, chosen_ids, strict=True))


def sample_conversations(
    model: Path,
    tokenizer: Any,
    pools: Mapping[str, RequestPool],
    part: str,
    talk: TalkSettings,
    file: Path,
) -> None:
    """Appends conversations to a file of JSON lines until the file holds as many ids as `talk` asks for.

    Continues an interrupted run. model: folder of a Llama model, quantized or not. part: "train" or "held_out". Prints
    its progress to stderr. Raises `ModelError` if loading fails, and `DataError` if the file is damaged.
    """
    have = read_records(file)
    wanted, kept = getattr(talk, part), sum(one["length"] for one in have if "messages" in one)
    if kept >= wanted:
        return
    on_card = torch.cuda.is_available()
    low = (on_card or has_bfloat16_units()) and not talk.exact
    # limits the rows: with too many, only short conversations would end before enough ids are kept
    most = max(1, wanted // (2 * talk.total))
    rows, device = (min(talk.card_rows, most), "cuda") if on_card else (talk.rows, "cpu")
    texts = ParallelTexts(model, rows, talk.total, "bfloat16" if low else "float32", device)
    file.parent.mkdir(parents=True, exist_ok=True)
    begun = begin_conversations(pools, part, talk, tokenizer, {one["number"] for one in have})
    with open(file, "a", encoding="utf-8") as out:
        for records in write_conversations(texts, begun, talk.top_p):
            out.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
            out.flush()
            before, kept = kept, kept + sum(one["length"] for one in records if "messages" in one)
            if before * 20 // wanted < kept * 20 // wanted:
                print_to_stderr(f"conversations, {part}: {kept:,} of {wanted:,} base ids")
            if kept >= wanted:
                break


def read_records(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file of JSON lines that `sample_conversations` wrote, [] if there is no file.

    Removes an unfinished last line from the file. Raises `DataError` if any other line is invalid.
    """
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        with atomic_file(file) as partial:
            partial.write_text(whole, encoding="utf-8")
    try:
        return [json.loads(line) for line in whole.split("\n")[:-1]]
    except ValueError as error:
        reason = failure_reason(error)
        raise DataError(f"{file} holds a line that is no JSON: {reason}; delete the file to begin again") from error


def write_chat_files(file: Path, folder: Path, seen: set[str]) -> None:
    """Writes the conversations in a file of `sample_conversations` to chat.jsonl and chat_cut.jsonl in `folder`.

    Conversations whose last answer was cut become texts in chat_cut.jsonl, without an end mark. seen: first user turns
    written before, extended here; a conversation that repeats one of these turns is left out.
    """
    whole, cut = list[dict[str, Any]](), list[dict[str, Any]]()
    for one in read_records(file):
        if "messages" not in one or one["messages"][1]["content"] in seen:
            continue
        seen.add(one["messages"][1]["content"])
        given = TEXT_LICENCES.get(one["kind"])
        facts = {
            "origin": f"sampled: {one['kind']}",
            "licence": f"{MODEL_LICENCE} and {given}" if given else MODEL_LICENCE,
        }
        if one["cut"]:
            turns = [f"<|im_start|>{turn['role']}\n{turn['content']}" for turn in one["messages"]]
            cut.append({"text": "<|im_end|>\n".join(turns), **facts})
        else:
            whole.append({"messages": one["messages"], **facts})
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in ("chat", whole), ("chat_cut", cut):
        with atomic_file(folder / f"{name}.jsonl") as partial, open(partial, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
