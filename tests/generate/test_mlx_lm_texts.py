"""mlx-lm's own functions that return text: hypertokens have their text there, or are refused in one line."""

import subprocess
import sys

import mlx_lm
import pytest

from mlx_zip.errors import GenerationError
from support import tiny_text
from support.command_line import WITHOUT_TORCH
from support.generating import ENDLESS, MODEL, PROMPT, ids, never_ending, plain_model, run, text
from support.places import TESTS

LETTERS = " \nabcdefghijklmnopqrstuvwxyz.,;:?"  # a text for each of the model's base ids
KINDS = {
    "byte level": tiny_text.byte_level(LETTERS),
    "sentencepiece": tiny_text.sentencepiece(),
    "naive": tiny_text.naive(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mlx_lms_generate_gives_the_text_of_hypertokens(kind):
    tokenizer = never_ending(KINDS[kind])
    ours = run(tokenizer=tokenizer)
    assert max(ids(ours)) >= MODEL.layout.vocab_size
    assert mlx_lm.generate(MODEL, tokenizer, PROMPT, max_tokens=40) == text(ours)


def test_mlx_lms_stream_counts_base_tokens():
    responses = list(mlx_lm.stream_generate(MODEL, ENDLESS, PROMPT, max_tokens=40))
    assert [response.generation_tokens for response in responses] == list(range(1, 41))
    assert all(response.token < MODEL.layout.vocab_size for response in responses)


@pytest.mark.slow
def test_a_name_of_mlx_lm_that_was_imported_before_mlx_zip_gives_the_text_too():
    lines = [
        WITHOUT_TORCH,
        "from mlx_lm import stream_generate",
        "import sys; sys.path.insert(0, sys.argv[1])",
        "from support import tiny_text",
        "from support.generating import MODEL, PROMPT, never_ending, run, text",
        f"tokenizer = never_ending(tiny_text.byte_level({LETTERS!r}))",
        "theirs = ''.join(one.text for one in stream_generate(MODEL, tokenizer, PROMPT, max_tokens=40))",
        "assert theirs == text(run(tokenizer=tokenizer)), theirs",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), str(TESTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_mlx_lms_texts_of_a_plain_model_are_what_they_were():
    model = plain_model()
    theirs = mlx_lm.generate(model, ENDLESS, PROMPT, max_tokens=20)
    assert theirs == text(run(model, max_tokens=20))


def test_a_draft_model_is_refused_in_one_line_where_a_model_has_hypertokens():
    plain = plain_model()
    for model, draft in ((MODEL, plain), (plain, MODEL)):
        with pytest.raises(GenerationError, match=r"^draft_model: mlx_lm cannot check .*: use mlx_zip.stream_generate"):
            mlx_lm.generate(model, ENDLESS, PROMPT, max_tokens=4, draft_model=draft)
    assert len(list(mlx_lm.stream_generate(plain, ENDLESS, PROMPT, max_tokens=4, draft_model=plain))) == 4


def test_mlx_lms_batch_generate_refuses_a_model_with_hypertokens_in_one_line():
    with pytest.raises(GenerationError, match=r"use mlx_zip\.batch_generate$"):
        mlx_lm.batch_generate(MODEL, ENDLESS, [PROMPT, PROMPT], max_tokens=4)
    plain = plain_model()
    assert len(mlx_lm.batch_generate(plain, ENDLESS, [PROMPT], max_tokens=4).texts) == 1
