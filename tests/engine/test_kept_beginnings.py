"""Beginnings that are kept change nothing: the rest of a text has the ids that it has when all is read at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_zip import Codebook, CodecParams, compress
from mlx_zip.codec import compress_next
from mlx_zip.engine.sessions.session import Session

VOCAB = 3  # so few that texts repeat themselves all the time
TEXT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


def kept_text(params, base_ids):
    """A session that has read a text; nothing of a model is in it."""
    ids = compress(params, base_ids)[0]
    book = Codebook(params)
    book.push(ids)
    lengths = [len(book.expand([one])) for one in ids]
    return ids, Session("a", "", np.array(base_ids, np.uint32), np.cumsum(lengths).astype(np.uint32), None, True, 0)


@settings(max_examples=100)
@given(common=TEXT, first=TEXT, second=TEXT, merge=st.integers(2, 4))
def test_a_text_that_begins_as_a_kept_one_has_the_ids_that_it_has_alone(common, first, second, merge):
    params = CodecParams(VOCAB, 64, merge)
    ids, kept = kept_text(params, [*common, *first])
    text = [*common, *second]
    shared = next((i for i, (a, b) in enumerate(zip([*common, *first], text, strict=False)) if a != b), len(text))
    held = kept.count_reusable_ids(min(shared, len(text) - 1, len(kept.base_ids)), merge)
    book = Codebook(params)
    book.push(ids[:held])
    base_tokens = int(kept.ends[held - 1]) if held else 0
    assert [*ids[:held], *compress_next(book, text[base_tokens:])] == compress(params, text)[0].tolist()


@settings(max_examples=100)
@given(text=TEXT, answer=TEXT, question=TEXT)
def test_what_follows_an_answer_goes_on_from_the_ids_that_were_emitted(text, answer, question):
    params = CodecParams(VOCAB, 64, 3)
    book = Codebook(params)
    book.push(compress(params, text)[0])
    book.push(answer)  # base ids, where compression would have written hypertokens
    book.push(compress_next(book, question))
    assert book.base_ids().tolist() == [*text, *answer, *question]
