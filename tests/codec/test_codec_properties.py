"""Properties of the codec: the C library against its plain-Python twin, and against itself."""

import random
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_zip import Codebook, CodecError, CodecParams, compress
from support import codec_twin as twin

few = settings(max_examples=60)  # of each property; test_fuzz_targets.py and `make fuzz` try many more inputs

WHERE = st.integers(0, 10**6)  # a place in a sequence, taken modulo its length

# Small alphabets and codebooks, so that merges happen, tables fill up and ids clash.
SLOTS = st.integers(0, 5) | st.integers(0, 24)
SIZES = st.tuples(st.integers(1, 5), SLOTS, st.sampled_from([1, 2, 3, 3, 4, 5, 16]))
POLICY = st.sampled_from(["freeze", "lru", "use-count"])
DRAWS = st.lists(st.integers(0, 999), max_size=120)


@st.composite
def codecs(draw):
    vocab, slots, merge = draw(SIZES)
    disabled = draw(st.sets(st.integers(0, vocab + 6), max_size=2))
    pad = draw(st.none() | st.integers(0, vocab + 6))
    plain = [x for x in range(vocab) if x not in disabled | {pad}]
    start = []
    if plain and merge > 1:
        run = st.lists(st.sampled_from(plain), min_size=2, max_size=merge).map(tuple)
        start = draw(st.lists(run, max_size=min(slots, 4), unique=True))
    return CodecParams(vocab, slots, merge, disabled, pad, start, draw(POLICY))


def base_ids(params, draws):
    """Base ids, and disabled ids wherever they lie."""
    choices = [*range(params.vocab_size), *params.disabled_ids]
    return [choices[x % len(choices)] for x in draws]


def sampled(params, draws):
    """What a masked sampler can emit: at each step a base id or an installed hypertoken, or a lawful next one."""
    book, ids = twin.Codebook(params), []
    for x in draws:
        choices = [*range(params.vocab_size), *params.disabled_ids, *book.entries]
        choices += [params.vocab_size + len(book.entries)] * (x % 5 == 0)
        try:
            book.push([choices[x % len(choices)]])
        except CodecError:
            continue
        ids.append(choices[x % len(choices)])
    return ids


def state(book):
    """Everything that can be seen of a codebook, and of what it would do next."""
    following = book.copy()
    new = [list(following.push(x)) for x in range(book.params.vocab_size)]
    seen = list(book.entries), book.ids.tolist(), book.base_ids().tolist(), book.base_length, len(book), book.mark()
    return *seen, book.to_bytes(), new


def pushed(params, *pieces):
    book = Codebook(params)
    for piece in pieces:
        book.push(piece)
    return book


@few
@given(codecs(), DRAWS)
def test_compressing_agrees_with_the_twin(params, draws):
    ids = base_ids(params, draws)
    try:
        expected, entries = twin.compress(params, ids)
    except CodecError:
        with pytest.raises(CodecError):
            compress(params, ids)
        return
    got = compress(params, ids)
    assert got[0].tolist() == expected
    assert dict(got[1]) == entries


@few
@given(codecs(), DRAWS)
def test_what_is_compressed_expands_to_itself(params, draws):
    ids = base_ids(params, draws)
    try:
        emitted, _ = compress(params, ids)
    except CodecError:
        assume(False)
    assert pushed(params, emitted).base_ids().tolist() == ids


@few
@given(codecs(), DRAWS)
def test_the_reader_ends_with_the_writers_entries(params, draws):
    try:
        emitted, entries = compress(params, base_ids(params, draws))
    except CodecError:
        assume(False)
    assert pushed(params, emitted).entries == entries


@few
@given(codecs(), DRAWS)
def test_following_a_masked_sampler_agrees_with_the_twin(params, draws):
    ids = sampled(params, draws)
    book, expected = Codebook(params), twin.Codebook(params)
    new, installed = book.push(ids), expected.push(ids)
    assert [(*entry, at) for entry, at in zip(new, new.at.tolist(), strict=True)] == installed
    assert dict(book.entries) == expected.entries
    assert book.expand(ids).tolist() == expected.expand(ids)
    rows, lengths = book.logged_base_ids()
    assert [tuple(row[:n]) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)] == expected.runs
    ends = list(accumulate(map(len, expected.runs)))
    assert book.ends().tolist() == ends
    assert book.ends(len(ends) // 2).tolist() == ends[len(ends) // 2 :]


@few
@given(codecs(), st.lists(st.integers(0, 999), max_size=40))
def test_any_ids_are_accepted_or_refused_as_by_the_twin(params, draws):
    book, expected = Codebook(params), twin.Codebook(params)
    for draw in draws:  # every third time the next hypertoken or the one after it, lawful or not
        known = params.vocab_size + len(expected.entries)
        before, x = state(book), known + draw % 2 if draw % 3 == 0 else draw % known
        try:
            installed = expected.push([x])
        except CodecError:
            with pytest.raises(CodecError):
                book.push(x)
            assert state(book) == before
        else:
            assert [entry[1] for entry in book.push(x)] == [entry[1] for entry in installed]
    assert dict(book.entries) == expected.entries


@few
@given(codecs(), DRAWS, WHERE)
def test_a_codebook_does_not_depend_on_how_its_input_was_cut(params, draws, cut):
    ids = sampled(params, draws)
    cut %= len(ids) + 1
    assert state(pushed(params, ids)) == state(pushed(params, ids[:cut], ids[cut:]))


@few
@given(codecs(), DRAWS)
def test_pushing_one_by_one_installs_what_one_push_does(params, draws):
    ids = sampled(params, draws)
    book, whole = Codebook(params), Codebook(params).push(ids)
    each = [(index, new) for index, new in enumerate(map(book.push, ids)) if new]
    assert [index for index, _ in each] == whole.at.tolist()
    assert [new[0] for _, new in each] == list(whole)
    assert [new.base_ids[0].tolist() for _, new in each] == whole.base_ids.tolist()
    assert [new.lengths.tolist() for _, new in each] == whole.lengths[:, None].tolist()
    assert [int(new.slots[0]) for _, new in each] == whole.slots.tolist()


@few
@given(codecs(), DRAWS, WHERE, WHERE)
def test_rewinding_equals_replaying(params, draws, first, second):
    ids = sampled(params, draws)
    book = pushed(params, ids)
    for mark in (first % (len(ids) + 1), second % (first % (len(ids) + 1) + 1)):
        book.rewind(mark)
        assert state(book) == state(pushed(params, ids[:mark]))


@few
@given(codecs(), DRAWS, WHERE)
def test_after_rewinding_one_can_go_another_way(params, draws, mark):
    ids = sampled(params, draws)
    book, mark = pushed(params, ids), mark % (len(ids) + 1)
    book.rewind(mark)
    other = ids[:mark] + [0] * 9
    book.push(other[mark:])
    assert state(book) == state(pushed(params, other))


@few
@given(codecs(), DRAWS, WHERE)
def test_a_copy_goes_on_like_its_original(params, draws, cut):
    ids = sampled(params, draws)
    cut %= len(ids) + 1
    copy = pushed(params, ids[:cut]).copy()
    copy.push(ids[cut:])
    assert state(copy) == state(pushed(params, ids))


@few
@given(codecs(), DRAWS)
def test_a_copy_does_not_share_anything_with_its_original(params, draws):
    book = pushed(params, sampled(params, draws))
    before, copy = state(book), book.copy()
    copy.push([0] * 40)
    copy.rewind(0)
    copy.push(0)
    assert state(book) == before


@few
@given(codecs(), DRAWS)
def test_a_saved_codebook_loads_to_an_equal_one(params, draws):
    book = pushed(params, sampled(params, draws))
    loaded = Codebook.from_bytes(book.to_bytes())
    assert loaded.params == params
    assert state(loaded) == state(book)


@few
@given(codecs(), DRAWS, WHERE)
def test_an_unlawful_id_anywhere_in_a_push_changes_nothing(params, draws, where):
    ids = sampled(params, draws)
    where %= len(ids) + 1
    unlawful = next(x for x in range(params.vocab_size + 30, 99) if x not in params.disabled_ids)
    book = pushed(params, ids[: where // 2])
    before = state(book)
    with pytest.raises(CodecError, match=str(unlawful)):
        book.push([*ids[where // 2 : where], unlawful, *ids])
    assert state(book) == before


@few
@given(codecs(), DRAWS, DRAWS)
def test_compressing_from_a_running_codebook_agrees_with_the_twin(params, draws, more):
    ids = sampled(params, draws)
    book, expected = pushed(params, ids), twin.Codebook(params)
    expected.push(ids)
    before, text = state(book), base_ids(params, more)
    assert book.compress(text).tolist() == expected.compress(text)
    assert state(book) == before


@few
@given(codecs(), DRAWS, DRAWS)
def test_what_a_running_codebook_compresses_expands_to_itself(params, draws, more):
    book, text = pushed(params, sampled(params, draws)), base_ids(params, more)
    emitted = book.compress(text)
    for x in emitted.tolist():
        assert x < params.vocab_size + len(book) or x in params.disabled_ids  # never one that is not yet installed
        book.push(x)
    assert book.base_ids(book.mark() - len(emitted)).tolist() == text


@st.composite
def crowded(draw):
    """A codec whose table is full soon, and ids so many that entries leave by the dozen."""
    vocab, slots, merge = draw(st.integers(2, 4)), draw(st.integers(1, 6)), draw(st.integers(2, 5))
    start = draw(st.sampled_from([(), ((0, 1),)])) if slots > 1 else ()
    params = CodecParams(vocab, slots, merge, (), None, start, draw(st.sampled_from(["lru", "use-count"])))
    rng = random.Random(draw(st.integers(0, 10**6)))
    return params, sampled(params, [rng.randrange(1000) for _ in range(80)])


@few
@given(crowded(), WHERE)
def test_entries_leave_as_in_the_twin_and_come_back(case, mark):
    params, ids = case
    book, expected = Codebook(params), twin.Codebook(params)
    mark %= len(ids) + 1
    for part in (ids[:mark], ids[mark:]):
        new, installed = book.push(part), expected.push(part)
        assert [(*entry, at) for entry, at in zip(new, new.at.tolist(), strict=True)] == installed
        assert dict(book.entries) == expected.entries
    assert book.base_ids().tolist() == [base for run in expected.runs for base in run]
    book.rewind(mark)
    assert state(book) == state(pushed(params, ids[:mark]))


@few
@given(crowded(), st.integers(0, 10**6))
def test_compressing_agrees_with_the_twin_where_entries_leave(case, seed):
    params, ids = case
    rng = random.Random(seed)
    text = [rng.randrange(params.vocab_size) for _ in range(80)]
    emitted, entries = compress(params, text)
    assert (emitted.tolist(), dict(entries)) == twin.compress(params, text)
    book, expected = pushed(params, emitted), twin.Codebook(params)
    assert book.base_ids().tolist() == text
    assert book.entries == entries
    expected.push(ids)
    assert pushed(params, ids).compress(text).tolist() == expected.compress(text)


@few
@given(codecs(), DRAWS)
def test_spans_are_the_lengths_of_the_expansions(params, draws):
    book = pushed(params, ids := sampled(params, draws))
    assert book.spans(ids).tolist() == [len(book.expand(x)) for x in ids]
    assert book.base_length == len(book.base_ids())


@few
@given(codecs(), st.binary(max_size=40), DRAWS, WHERE)
def test_damaged_bytes_are_refused(params, junk, draws, where):
    data = pushed(params, sampled(params, draws)).to_bytes()
    at = where % len(data)
    for damaged in (data[:at], data + b"\0\0\0\0", junk, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
        with pytest.raises(CodecError):
            Codebook.from_bytes(damaged)
