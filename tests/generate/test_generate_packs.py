"""Packs and options of a request by name: a path or a `Pack`, and a clear error for what is misspelled or missing."""

import pytest

from mlx_zip import DataError, GenerationError, Pack, batch_generate, generate, load_pack, stream_generate
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.packs.pack import save_pack
from support.generating import ENDLESS, MODEL, PROMPT

PACK = Pack(((5, 6), (7, 8, 9)))


@pytest.fixture
def file(tmp_path):
    save_pack(tmp_path / "some.npz", PACK)
    return tmp_path / "some.npz"


def ids(**options):
    return [r.token for r in stream_generate(MODEL, ENDLESS, PROMPT, 20, **options)]


@pytest.mark.parametrize("given", ["path", "text", "pack", "entries"])
def test_a_request_begins_with_a_pack_given_as_a_path_or_a_pack(file, given):
    pack = {"path": file, "text": str(file), "pack": load_pack(file), "entries": PACK.entries}[given]
    found = ids(pack=pack)
    cache = MODEL.make_cache(pack=PACK.entries)
    assert found == ids(prompt_cache=cache)
    assert [entry for _, entry in find_zip_state(cache).books[0].entries][:2] == list(PACK.entries)


def test_prompts_of_a_batch_may_begin_with_packs_of_their_own(file):
    one, other = batch_generate(MODEL, ENDLESS, [PROMPT, PROMPT], 20, pack=[file, None])
    assert [one] == batch_generate(MODEL, ENDLESS, [PROMPT], 20, pack=file)
    assert [other] == batch_generate(MODEL, ENDLESS, [PROMPT], 20)


def test_a_pack_that_is_missing_is_named():
    with pytest.raises(DataError, match=r"x\.npz"):
        ids(pack="x.npz")


def test_a_pack_of_another_tokenizer_is_refused():
    with pytest.raises(DataError, match="another tokenizer"):
        ids(pack=Pack(PACK.entries, tokenizer="0" * 64))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temp"),
        ("temperature", "temp"),
        ("topp", "top_p"),
        ("max_token", "max_tokens"),
        ("packs", "pack"),
    ],
)
@pytest.mark.parametrize("call", [stream_generate, generate, batch_generate])
def test_a_misspelled_option_is_named_with_the_one_that_was_meant(call, name, meant):
    prompt = [PROMPT] if call is batch_generate else PROMPT
    with pytest.raises(GenerationError, match=f"no option '{name}'; did you mean {meant}\\?"):
        call(MODEL, ENDLESS, prompt, **{name: 1})


def test_an_option_like_no_other_is_refused_with_the_names_of_all():
    with pytest.raises(GenerationError, match=r"no option 'qqq'; the options are .*top_p"):
        ids(qqq=1)
