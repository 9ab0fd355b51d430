"""`bench pack_transfer`: its halves, its lines compared with what the library measures, shares of the possible gain."""

import json

import numpy as np
import pytest

from mlx_zip.bench.papers.packs.pack_transfer import split_at_half_of_bytes
from mlx_zip.codec import Codebook, compress
from mlx_zip.engine.mlx.generate import load, stream_generate
from mlx_zip.errors import CodecError, DataError, MlxZipError
from mlx_zip.evaluation.bits import cut_scored_windows, measure_bits
from mlx_zip.packs.learner import learn_pack
from mlx_zip.packs.pack import Pack, save_pack
from mlx_zip.text.documents import Document, read_corpus
from mlx_zip.text.prompts import encode_prompt
from support import tiny_bench, tiny_text
from support.places import GOLDEN_MODELS

NAME = "llama_transformer_tied_lora"
PHRASES = [
    "a cat and a dog sat on the mat",
    "the dog sat on the cat, and the cat",
    "the cat sat on the mat and the cat sat",
    "the mat on the cat and the dog on it",
]
TEXTS = [f"{phrase} and {phrase} and {phrase}" for phrase in PHRASES]
FIRST, SIZE, OPENING, TOKENS = 40, 3, 6, 10


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "text.txt").write_text("\n<end>\n".join(TEXTS))
    save_pack(tmp_path / "own.npz", Pack(tuple((FIRST, FIRST + n) for n in range(1, 8))))
    models = {"--model": tiny_text.converted(NAME), "--base": GOLDEN_MODELS / NAME / "base"}
    sizes = ["--sizes", SIZE, "--stories", 2, "--opening", OPENING, "--tokens", TOKENS]
    text = ["--data", tmp_path / "text.txt", "--separator", "<end>"]
    return [*(word for pair in models.items() for word in pair), *text, *sizes]


def documents(*sizes):
    return [Document("x" * size, f"{n}") for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "known"), [((1, 1), 1), ((5, 1), 1), ((1, 5), 1), ((1, 1, 1, 1), 2), ((3, 1, 1, 1, 1), 1), ((1, 1, 9), 2)]
)
def test_the_first_documents_up_to_half_of_the_bytes_are_learned_from(sizes, known):
    both = split_at_half_of_bytes(documents(*sizes))
    assert [len(half) for half in both] == [known, len(sizes) - known]
    assert [*both[0], *both[1]] == documents(*sizes)


def test_a_line_per_start_holds_what_the_library_measures(flags, tmp_path, capsys):
    assert tiny_bench.run("pack_transfer", *flags, "--pack", f"own={tmp_path / 'own.npz'}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (model, tokenizer), (base, _) = load(str(flags[1])), load(str(flags[3]))
    known, held_out = split_at_half_of_bytes(read_corpus([tmp_path / "text.txt"], "<end>").documents)
    assert (len(known), len(held_out)) == (2, 2)
    ids = [np.array(tokenizer.encode(one.text, add_special_tokens=False), np.uint32) for one in known]
    learned = learn_pack(model.config.codec_params, ids, SIZE).entries
    own = tuple((FIRST, FIRST + n) for n in range(1, SIZE + 1))
    assert [(line["curve"], line["pack"], line["entries"]) for line in lines] == [
        ("empty", None, 0),
        ("learned", None, len(learned)),
        ("own", "own.npz", SIZE),
    ]
    assert learned
    windows = cut_scored_windows(tokenizer, held_out, 1024)
    control = measure_bits(base, windows).bits_per_byte
    for line, entries in zip(lines, ((), learned, own), strict=True):
        bits = measure_bits(model, windows, pack=Pack(entries))
        assert line["bits_per_byte"] == pytest.approx(bits.bits_per_byte, rel=1e-6)
        assert line["over_base"] == pytest.approx(bits.bits_per_byte / control - 1, abs=1e-6)
        assert line["base_ids_per_id"] == bits.base_ids / bits.ids
        written = [told(model, tokenizer, one.text, entries) for one in held_out]
        steps, base_tokens, canonical, theirs = np.sum(written, axis=0)
        greedy = line["greedy"]
        assert (greedy["steps"], greedy["base_tokens"]) == (steps, base_tokens)
        assert line["own_base_tokens_per_step"] == 2 * TOKENS / theirs
        assert greedy["canonical_base_tokens_per_step"] == base_tokens / canonical
        for name, possible in (("of_gain", base_tokens / canonical), ("of_own_gain", 2 * TOKENS / theirs)):
            share = (base_tokens / steps - 1) / (possible - 1) if possible > 1 else None
            assert greedy[name] == pytest.approx(share)


def told(model, tokenizer, text, entries):
    """Of one story: steps and base tokens that the model writes, and canonical ids of those and of the text's own."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = encode_prompt(tokenizer, tokenizer.decode(ids[:OPENING]))
    made = list(stream_generate(model, tokenizer, prompt, max_tokens=TOKENS, pack=entries))
    base_ids = [one for response in made for one in response.base_ids]
    book = Codebook(model.make_cache(pack=entries)[-1].books[0].params)
    book.push(compress(book.params, np.array(prompt, np.uint32))[0])
    both = (len(book.compress(np.array(x, np.uint32))) for x in (base_ids, ids[OPENING : OPENING + TOKENS]))
    return len(made), len(base_ids), *both


def test_so_much_of_the_held_out_text_is_scored(flags, capsys):
    assert tiny_bench.run("pack_transfer", *flags, "--limit-bytes", 40) == 0
    assert {json.loads(line)["documents"] for line in capsys.readouterr().out.splitlines()} == {1}


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (["--sizes", "0"], MlxZipError, "--sizes must be at least 1"),
        (["--stories", "9"], MlxZipError, "2 held-out documents are 6 . 10 base ids long, not 9"),
        (["--separator", "<none>"], MlxZipError, "holds one document"),
        (["--sizes", "99999"], DataError, "does not fit a codebook"),
        (["--pack", "own.npz"], MlxZipError, "NAME=FILE"),
        (["--pack", "far=far.npz"], CodecError, "disabled or not a base id"),
    ],
)
def test_what_cannot_be_is_told_before_scoring(change, error, told, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_pack(tmp_path / "far.npz", Pack(((1, 999_999),)))
    with pytest.raises(error, match=told):
        tiny_bench.run("pack_transfer", *flags, *change)
    assert capsys.readouterr().out == ""
