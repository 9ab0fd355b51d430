"""Tokenizers with byte fallback, whose base symbols are characters: read, adapted and written as byte-level ones."""

import json
from itertools import combinations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_zip import generate, load
from mlx_zip.converters.adapt import adapt as convert
from mlx_zip.errors import DataError
from mlx_zip.named import bundled_model_folder
from mlx_zip.vocab.adaptbpe.adapted import adapt_vocabulary, count_words, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.adaptbpe.learn import adapt_merges, most_frequent_merges
from mlx_zip.vocab.adaptbpe.merge_list import BpeEncoder, MergeList, Schedule
from mlx_zip.vocab.adaptbpe.tokenizer_json import exact_tokenizer_json, kept_ids_tokenizer_json, make_tokenizer_exact
from support import adaptbpe_twin as twin
from support.adaptbpe_cases import seeds
from support.slow_cases import slow_but

FILE = bundled_model_folder("stories-base") / "tokenizer.json"
STORY = "Tom’s cat sat — on the café’s red mat. “Hi,” said the cat, “I am 12 years old!”\n\nThe dog… ran away.<s>日本 ò"
TEXTS = st.text("abehst ▁.é“”—‘…日€\nò1", max_size=30) | st.text(max_size=30) | st.just(STORY)
MERGES = 300
METHODS = ["adapt", "top-k"]


@pytest.fixture(scope="module")
def base():
    return read_base_vocabulary(FILE)


@pytest.fixture(scope="module")
def words(base):
    texts = ["The cat and the dog ran to the café. " * 20, "“Oh,” said the cat — and ran away. " * 9]
    return count_words(base.splitter, texts)


@pytest.fixture(scope="module", params=METHODS)
def vocabulary(base, words, request):
    return adapt_vocabulary(base, words, MERGES, method=request.param)


@pytest.fixture(scope="module")
def first(base, words):
    """The vocabulary of the base's first merges."""
    return adapt_vocabulary(base, words, MERGES, method="first-k")


@pytest.fixture(scope="module")
def plain(base, first):
    """The library's tokenizer of the first merges, as its tokenizer.json says."""
    return Tokenizer.from_str(json.dumps(exact_tokenizer_json(first, base.source)))


@pytest.fixture(scope="module")
def library():
    return Tokenizer.from_file(str(FILE))


@pytest.fixture(scope="module")
def exact(base, vocabulary):
    """The library's tokenizer of the adapted vocabulary, made exact."""
    made = Tokenizer.from_str(json.dumps(kept_ids_tokenizer_json(vocabulary, base.source)))
    make_tokenizer_exact(made, vocabulary)
    return made


@given(text=TEXTS)
def test_ids_are_those_of_the_library(base, library, text):
    assert base.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


def test_characters_of_several_bytes_stay_and_come_on_top_of_the_merges(base, vocabulary):
    names = base.source["model"]["vocab"]
    characters = [i for name, i in names.items() if len(name) == 1]
    assert set(characters) <= set(vocabulary.ids.tolist())
    assert vocabulary.actual_merges == MERGES
    letters = sum(len(name) == 1 and ord(name) > 127 for name in names)
    assert vocabulary.letters == letters > 5
    assert len(vocabulary) == 256 + letters + MERGES + len(vocabulary.splitter.added)
    assert base.unreachable == len(names) - len(base.ids) - 6 + len(base.merges.unfinished)


@given(text=TEXTS)
def test_text_comes_back_with_its_blanks(vocabulary, text):
    assert vocabulary.decode(vocabulary.encode(text)).decode() == text.replace("▁", " ")


@given(data=st.binary(max_size=40) | st.text("日月早é—–“", max_size=12).map(str.encode))
def test_any_bytes_come_back(vocabulary, data):
    ids = vocabulary.adapted_ids_of(vocabulary.token_ids[vocabulary.encoder.encode_pieces([data])[0]])
    assert vocabulary.decode(ids) == data.replace("▁".encode(), b" ")


@given(text=TEXTS)
def test_the_librarys_tokenizer_made_exact_gives_the_same_ids(vocabulary, exact, text):
    assert exact.encode(text, add_special_tokens=False).ids == vocabulary.encode(text).tolist()


@given(text=TEXTS)
def test_without_virtual_merges_its_tokenizer_json_says_it_all(first, plain, text):
    assert plain.encode(text, add_special_tokens=False).ids == first.encode(text).tolist()
    assert plain.decode(first.encode("a “cat” ò").tolist()) == "a “cat” ò"


def test_it_compresses_its_own_text_better_than_the_first_merges(base, first, vocabulary):
    text = "The cat and the dog ran away."
    assert len(base.encode(text)) <= len(vocabulary.encode(text)) < len(first.encode(text))


def test_a_saved_one_reads_to_an_equal_one(vocabulary, base, tmp_path):
    vocabulary.save(tmp_path / "adapted.json")
    read = read_adapted_vocabulary(tmp_path / "adapted.json")
    read.check_base(base)
    assert read.merges == vocabulary.merges
    assert read.merges.letters == vocabulary.merges.letters > 0
    assert read.encode(STORY).tolist() == vocabulary.encode(STORY).tolist()


@pytest.mark.slow
def test_the_bundled_model_becomes_a_smaller_one_with_the_same_logits_bit_for_bit(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "adapted.json")
    convert(FILE.parent, tmp_path / "adapted.json", tmp_path / "smaller", progress=False)
    (whole, _), (cut, tokenizer) = load(FILE.parent), load(tmp_path / "smaller")
    ids = vocabulary.encode(STORY)
    assert tokenizer.encode(STORY, add_special_tokens=False) == ids.tolist()
    assert tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False) == STORY
    expected, got = (model(mx.array(of)[None])[0] for model, of in ((whole, vocabulary.ids[ids]), (cut, ids)))
    assert mx.array_equal(got, expected[:, mx.array(vocabulary.ids)]).item()


@pytest.mark.parametrize("vocabulary", slow_but(METHODS, "adapt"), indirect=True)
def test_the_bundled_hypertokens_go_on_after_the_new_ids(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "adapted.json")
    convert(bundled_model_folder("stories"), tmp_path / "adapted.json", tmp_path / "smaller", progress=False)
    model, tokenizer = load(tmp_path / "smaller")
    assert model.layout.vocab_size == len(vocabulary)
    assert generate(model, tokenizer, "The cat sat on the mat.", max_tokens=8)


def test_without_the_bases_tokenizer_json_none_can_be_written(vocabulary):
    with pytest.raises(DataError, match=r"the base's tokenizer\.json is needed"):
        kept_ids_tokenizer_json(vocabulary)


# ---- letters


def random_letters(random):
    """(merges, corpus) over characters of one to three bytes, some of which begin alike and are no letters."""
    letters = {
        data[: n + 1]: (data[:n], data[n : n + 1]) for data in map(str.encode, "é日本月") for n in range(1, len(data))
    }
    tokens = [char.encode() for char in "aé日本月"]
    pairs = []
    for _ in range(random.randint(0, 25)):
        left, right = random.choices(tokens, k=2)
        if left + right not in tokens and len(left + right) < 16:
            tokens.append(left + right)
            pairs.append((left, right))
    used = [*random.choices(tokens, k=random.randint(1, 6)), "早".encode()]
    words = {b"".join(random.choices(used, k=random.randint(1, 6))) for _ in range(random.randint(1, 8))}
    corpus = {word: random.randint(1, 6) for word in sorted(words)}
    return MergeList.from_byte_pairs([*letters.values(), *pairs], len(letters)), corpus


with_letters = seeds.map(random_letters)


@given(with_letters, st.floats(0, 1))
def test_letters_never_leave_and_swaps_are_the_twins(case, share):
    merges, corpus = case
    n = merges.letters + round(share * (len(merges) - merges.letters))
    found = adapt_merges(merges, corpus, n)
    expected = twin.adapt(merges, list(corpus.items()), n)
    assert [(s.p, s.p_count, s.q, s.q_count, s.n_tokens) for s in found.swaps] == expected
    assert all(p >= merges.letters for p in found.virtual)
    assert set(range(merges.letters)) <= set(most_frequent_merges(merges, corpus, n))


@given(with_letters, st.floats(0, 1))
def test_unfinished_characters_are_bytes_in_the_end(case, share):
    merges, corpus = case
    n = merges.letters + round(share * (len(merges) - merges.letters))
    found = adapt_merges(merges, corpus, n)
    for form in (Schedule.replay, Schedule.final):
        encoder = BpeEncoder(merges, form(len(merges), n, found.virtual, found.promoted), "whole")
        for word in [*corpus, "早日éa".encode()]:
            tokens = encoder.encode(word)
            assert encoder.decode(tokens) == word
            assert {int(token) - 256 for token in tokens}.isdisjoint([*merges.unfinished, *found.virtual])


@pytest.mark.parametrize("letters", [-1, 2])
def test_there_are_no_more_letters_than_merges(letters):
    with pytest.raises(DataError, match=r"letters are not 0\.\.1"):
        MergeList.from_byte_pairs([(b"a", b"b")], letters)


def test_what_is_unfinished_is_known():
    merges = MergeList.from_byte_pairs([(b"\xc3", b"\xa9"), (b"\xe6", b"\x97"), (b"\xe6\x97", b"\xa5")], 3)
    assert merges.unfinished == [1]
    assert all(a != b for a, b in combinations([merges, MergeList(merges.parts)], 2))


# ---- what cannot be read


def altered(**model):
    data = json.loads(FILE.read_text())
    return data | {"model": data["model"] | model}


def without_byte(data):
    vocabulary = {name: i for name, i in data["model"]["vocab"].items() if name != "<0xE6>"}
    return data | {"model": data["model"] | {"vocab": vocabulary}}


def at_first(data):
    return data | {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (without_byte(altered()), "'<0xE6>' is not in the vocabulary, so not every text"),
        (altered() | {"decoder": None}, "the decoder does not turn '▁' into a blank"),
        (at_first(altered()), "prepend_scheme first"),
        (altered(merges=["a b c"]), "merge 'a b c' is not two tokens"),
        (altered(merges=[["a", 3]]), "is not two tokens"),
        (altered(merges=[["a", "日"]]), "is not made before it"),
        (altered(merges=[["z", "q"]]), "'zq' is not in the vocabulary"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(data, told, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=told) as error:
        read_base_vocabulary(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
