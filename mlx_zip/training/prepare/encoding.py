"""Encodes records as windows of base ids, with a loss mask and the bytes per id, and compresses windows.

Windows are compressed by `Codebook.compress`: canonical LZW that writes an entry only after the entry is installed, as
in generation. So every target can be predicted at its position, which plain LZW (KwKwK) does not guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError, GenerationError
from mlx_zip.text.prompts import render_chat
from mlx_zip.text.sources import Record, Skipped
from mlx_zip.text.token_facts import bytes_before_characters, bytes_by_id, leading_special_ids, special_ids
from mlx_zip.training.prepare.shards import Sample

TRAIN_ON = ("answers", "all")
_EOS_WITHIN = 4  # search this many last ids for a conversation's eos: a template may add text after it


@dataclass(frozen=True)
class EncodedRecord:
    """One document or conversation as base ids, not yet cut into windows.

    ids uint32 [n]. counted bool [n]: whether the loss counts an id. n_bytes int64 [n]: UTF-8 bytes per id, 0 for
    special ids. lead: ids to put in front of every window, not part of `ids`. conversation: True for a conversation
    or a prompt with completion.
    """

    ids: Uint32s
    counted: NDArray[np.bool_]
    n_bytes: NDArray[np.int64]
    lead: tuple[int, ...]
    conversation: bool = False


class RecordEncoder:
    """Turns records into base ids.

    train_on: ids of conversations that the loss counts. "answers": the assistant's turns, or the completion of a
    prompt; "all": all ids. Of documents, the loss always counts all ids.
    """

    def __init__(self, tokenizer: Any, train_on: str = "answers") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError("this tokenizer has no tokenizer.json (it is not a fast one), which preparing data needs")
        self.tokenizer, self.train_on = tokenizer, train_on
        self._fast_tokenizer = tokenizer.backend_tokenizer
        self._fast_tokenizer.no_truncation()
        self._fast_tokenizer.no_padding()
        self.lead = leading_special_ids(tokenizer)
        self._token_bytes = np.array([len(spelled) for spelled in bytes_by_id(tokenizer)], np.int64)
        self._is_special = np.zeros(len(self._token_bytes), np.bool_)
        self._is_special[sorted(special_ids(tokenizer))] = True
        self._eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(self, records: Sequence[Record | Skipped]) -> list[EncodedRecord | Skipped]:
        """Returns for each record, in order, its base ids, or `Skipped` with the reason why the record has none.

        Records that are skipped already stay as they are. Raises `DataError` if the assistant's turns cannot be found
        in the chat template's text.
        """
        texts = [record.text for record in records if _is_document(record)]
        found = iter(self._fast_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        encoded: list[EncodedRecord | Skipped] = []
        for record in records:
            if isinstance(record, Skipped):
                encoded.append(record)
            elif _is_document(record):
                ids, end = np.array(next(found).ids, np.uint32), [] if record.continues else self._eos_ids
                n_bytes = self._count_bytes(record.text or "", ids)
                encoded.append(
                    self._make_encoded_record(record, ids, np.ones(len(ids), np.bool_), n_bytes, end, self.lead)
                )
            else:
                encoded.append(self._encode_conversation(record))
        return encoded

    def _encode_conversation(self, record: Record) -> EncodedRecord | Skipped:
        """Returns the base ids of a conversation, or of a prompt and its completion.

        A prompt and its completion are rendered as a conversation, or concatenated if there is no chat template.
        """
        if record.messages is None and not self.tokenizer.has_chat_template:
            prompt = record.prompt or ""
            text = prompt + (record.text or "")
            return self._encode_with_spans(record, text, [(len(prompt), len(text))], templated=False)
        try:
            text, spans = self._render_conversation(record)
        except GenerationError as error:
            return Skipped(record.where, str(error))
        return self._encode_with_spans(record, text, spans, templated=True)

    def _render_conversation(self, record: Record) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and (begin, end) in characters of each turn that the loss counts."""
        messages = record.messages or (
            {"role": "user", "content": record.prompt},
            {"role": "assistant", "content": record.text},
        )
        tools = {} if record.tools is None else {"tools": record.tools}
        text = render_chat(self.tokenizer, messages, **tools)
        spans: list[tuple[int, int]] = []
        for k, message in enumerate(messages):
            if message["role"] == "assistant" and self.train_on == "answers":
                before = render_chat(self.tokenizer, messages[:k], add_generation_prompt=True, **tools) if k else ""
                upto = text if k + 1 == len(messages) else render_chat(self.tokenizer, messages[: k + 1], **tools)
                if not (upto.startswith(before) and text.startswith(upto)):
                    raise DataError(
                        f"{record.where}: the chat template writes turn {k} otherwise once more turns follow, so the "
                        "assistant's part cannot be found; count everything with --train-on all"
                    )
                spans.append((len(before), len(upto)))
        return text, spans

    def _encode_with_spans(
        self, record: Record, text: str, spans: Sequence[tuple[int, int]], templated: bool
    ) -> EncodedRecord | Skipped:
        """Returns the ids of a text. If `train_on` is "answers", the loss counts only ids within `spans` of characters.

        Returns `Skipped` if it counts none. templated: whether a chat template wrote the text.
        """
        encoding = self._fast_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        counted = np.full(len(ids), self.train_on == "all")
        if self.train_on == "answers":
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            # offsets of some tokenizers leave out the space that a token begins with
            places[1:, 0] = np.minimum(places[1:, 0], places[:-1, 1])
            for begin, end in spans:
                counted |= (places[:, 0] >= begin) & (places[:, 1] <= end)
        if not counted.any():
            return Skipped(record.where, "nothing to learn: no answer in it", empty=True)
        bos, lead = self.tokenizer.bos_token_id, self.lead
        if templated:  # the template writes its own special ids
            lead = (bos,) if bos is not None and ids[0] == bos else ()
        ended = templated and not self.tokenizer.eos_token_ids.isdisjoint(ids[-_EOS_WITHIN:].tolist())
        end = [] if ended else self._eos_ids
        return self._make_encoded_record(
            record, ids, counted, self._count_bytes(text, ids), end, lead, conversation=True
        )

    def _make_encoded_record(
        self,
        record: Record,
        ids: Uint32s,
        counted: NDArray[np.bool_],
        n_bytes: NDArray[np.int64],
        end: Sequence[int],
        lead: tuple[int, ...],
        conversation: bool = False,
    ) -> EncodedRecord | Skipped:
        """Returns an encoded record, with `end` appended to `ids` and `lead` removed from their front."""
        if not len(ids):
            return Skipped(record.where, "the tokenizer makes no ids of its text", empty=True)
        begin = len(lead) if ids[: len(lead)].tolist() == list(lead) else 0  # added to each window later
        return EncodedRecord(
            np.concatenate([ids[begin:], np.array(end, np.uint32)]),
            np.concatenate([counted[begin:], np.full(len(end), counted[-1])]),
            np.concatenate([n_bytes[begin:], np.zeros(len(end), np.int64)]),
            lead,
            conversation,
        )

    # ---- bytes

    def _count_bytes(self, text: str, ids: Uint32s) -> NDArray[np.int64]:
        """Returns the UTF-8 bytes of each id, 0 for special ids. The sum is the text's bytes without special tokens."""
        n_bytes, total = self._token_bytes[ids], len(text.encode("utf-8"))
        first = self._fast_tokenizer.id_to_token(int(ids[0])) if len(ids) else None
        if n_bytes.sum() == total + 1 and (first or "").startswith("▁"):
            n_bytes[0] -= 1  # the space that SentencePiece puts in front of a text
        if n_bytes.sum() != total:
            n_bytes = self._count_bytes_by_offset(text)
        n_bytes[self._is_special[ids]] = 0
        return n_bytes

    def _count_bytes_by_offset(self, text: str) -> NDArray[np.int64]:
        """Returns the UTF-8 bytes of each id, from the ids' end offsets, for tokenizers that alter the text.

        If several ids make one character, the first of these ids gets the character's bytes.
        """
        ends = [end for _, end in self._fast_tokenizer.encode(text, add_special_tokens=False).offsets]
        places = np.maximum.accumulate(np.array(ends, np.int64))
        places[-1:] = len(text)
        return np.diff(bytes_before_characters(text)[places], prepend=0)


def _is_document(record: Record | Skipped) -> TypeGuard[Record]:
    return isinstance(record, Record) and record.messages is None and record.prompt is None


def cut_training_windows(
    records: Sequence[EncodedRecord], context: int, fill: bool | None, lead: tuple[int, ...]
) -> Iterator[Sample]:
    """Yields windows of at most `context` base ids, in order. Each begins with a lead, which the loss does not count.

    fill: True: join records, so that all windows but the last are full, and begin each window with `lead`. False: cut
    each record separately, and begin each window with the record's own lead. None: True for documents, False for
    conversations. The loss never counts the first id of a window, because no id precedes it.
    """
    for filled, run in groupby(records, lambda record: not record.conversation if fill is None else fill):
        if filled:
            parts = zip(*((record.ids, record.counted, record.n_bytes) for record in run), strict=True)
            ids, counted, n_bytes = (np.concatenate(part) for part in parts)
            yield from _cut_sequence(ids, counted, n_bytes, context, lead)
        else:
            for record in run:
                yield from _cut_sequence(record.ids, record.counted, record.n_bytes, context, record.lead)


def _cut_sequence(
    ids: Uint32s, counted: NDArray[np.bool_], n_bytes: NDArray[np.int64], context: int, lead: tuple[int, ...]
) -> Iterator[Sample]:
    front, room = np.array(lead, np.uint32), context - len(lead)
    uncounted = np.zeros(len(lead), np.bool_)
    for begin in range(0, len(ids), room):
        part = slice(begin, begin + room)
        in_loss = np.concatenate([uncounted, counted[part]])
        in_loss[0] = False
        whole = np.concatenate([front, ids[part]])
        yield Sample(whole, in_loss, len(whole), int(n_bytes[part].sum()))


def compress_window(params: CodecParams, window: Sample) -> Sample:
    """Returns a window of base ids as a compressed sample.

    The loss counts a hypertoken only if it counts all base ids of the hypertoken. Each hypertoken's entry is installed
    before its position, so a causal model can predict it. Raises `DataError` if an id is not a base id of the codec.
    """
    book = Codebook(params)
    try:
        ids = book.compress(window.ids)
        book.push(ids)
        spans = book.logged_base_ids()[1].astype(np.int64)
    except CodecError as error:
        raise DataError(f"the tokenizer does not belong to this codec: {error}") from error
    if len(ids) == len(window.ids):
        return replace(window, ids=ids)
    return replace(window, ids=ids, mask=np.logical_and.reduceat(window.mask, np.cumsum(spans) - spans))
