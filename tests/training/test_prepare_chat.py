"""What the loss counts of conversations and completions, carried through compression."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import DataError
from mlx_zip.training.prepare.encoding import compress_window
from mlx_zip.training.prepare.shards import Sample
from support.checkpoints import edit_json
from support.places import GOLDEN_MODELS
from support.prepared import BOS, EOS, FORGETFUL, expanded, ids_of, prepared, tokenizer_folder, write_lines

TALK = [
    {"role": "user", "content": "tell me of the cat."},
    {"role": "assistant", "content": "the cat sat, the cat sat, the cat sat."},
    {"role": "user", "content": "and the cat?"},
    {"role": "assistant", "content": "the cat sat on the mat."},
]


def conversations(path, *talks):
    return write_lines(path, [{"messages": talk} for talk in talks])


def counted(shards, i=0):
    """The base ids that the loss counts, by the ids that it counts."""
    book = Codebook(shards[i].params(shards.params))
    book.push(shards[i].ids)
    return book.expand(shards[i].ids[shards[i].mask]).tolist()


def test_a_conversation_is_one_sample_and_only_the_assistants_turns_with_their_ends_are_learnt(tmp_path):
    data = conversations(tmp_path / "d.jsonl", TALK, TALK[:2])
    shards = prepared(tmp_path / "out", data, context=256, codebook_size=0)
    assert len(shards) == 2
    answers = [x for turn in (TALK[1], TALK[3]) for x in [*ids_of(turn["content"]), EOS]]
    assert counted(shards) == answers
    rendered = [x for turn in TALK for x in [*ids_of(f"<{turn['role']}>{turn['content']}"), EOS]]
    assert expanded(shards)[0] == rendered  # the template writes no bos, and ends with an eos of its own


def test_a_hypertoken_counts_only_if_all_its_base_ids_do(tmp_path):
    plain = prepared(tmp_path / "plain", conversations(tmp_path / "d.jsonl", TALK), context=256, codebook_size=0)
    shards = prepared(tmp_path / "out", str(tmp_path / "d.jsonl"), context=256)
    sample, by_base_id = shards[0], plain[0].mask.tolist()
    book = Codebook(shards.params)
    book.push(sample.ids)
    at = 0
    for x, mask, span in zip(sample.ids.tolist(), sample.mask.tolist(), book.spans(sample.ids).tolist(), strict=True):
        assert mask == all(by_base_id[at : at + span]), x
        at += span
    mixed = [n for n in np.split(np.array(by_base_id), np.cumsum(book.spans(sample.ids))[:-1]) if n.any() > n.all()]
    assert mixed  # else this text proves nothing


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=120))
def test_masks_survive_compression_by_the_rule_of_all_parts(base):
    ids, wanted = (np.array(part) for part in zip(*base, strict=True))
    params = CodecParams(6, 32, 4, (5,))
    sample = compress_window(params, Sample(ids.astype(np.uint32), wanted.astype(np.bool_), len(ids), 0))
    made, mask = sample.ids, sample.mask
    book = Codebook(params)
    book.push(made)
    parts = np.split(wanted, np.cumsum(book.spans(made))[:-1])
    assert mask.tolist() == [bool(part.all()) for part in parts]
    assert book.expand(made).tolist() == ids.tolist()


def test_train_on_all_counts_everything_but_the_first_id(tmp_path):
    data = conversations(tmp_path / "d.jsonl", TALK)
    sample = prepared(tmp_path / "out", data, context=256, train_on="all", codebook_size=0)[0]
    assert sample.mask.tolist() == [False] + [True] * (len(sample.ids) - 1)


def test_the_first_id_of_a_sample_is_never_counted(tmp_path):
    talk = [{"role": "assistant", "content": "hm."}]
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = str(tokenizer_folder(bos=False, template=template))
    sample = prepared(tmp_path / "out", conversations(tmp_path / "d.jsonl", talk), tokenizer=folder)[0]
    assert sample.mask.tolist() == [False, True, True, True][: len(sample.ids)]


def test_a_conversation_longer_than_the_context_is_windowed_and_windows_without_an_answer_are_dropped(tmp_path):
    talk = [{"role": "user", "content": "why? " * 20}, *TALK[1:2]]
    shards = prepared(tmp_path / "out", conversations(tmp_path / "d.jsonl", talk), context=32, codebook_size=0)
    assert shards.index["windowed"] == 1
    assert shards.index["skipped"]["unlearnable windows"] == 3
    assert all(shards[i].mask.any() for i in range(len(shards)))
    answer = [*ids_of(TALK[1]["content"]), EOS]
    learnt = [counted(shards, i) for i in range(len(shards))]
    assert len(learnt) == 2
    assert learnt[0] == answer[: len(learnt[0])]
    assert learnt[1] == answer[len(learnt[0]) + 1 :]  # nothing stands before the first id of the second window


def test_a_templates_own_bos_begins_every_window_once(tmp_path):
    template = "{{ bos_token }}" + "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = str(tokenizer_folder(template=template))
    samples = expanded(prepared(tmp_path / "out", conversations(tmp_path / "d.jsonl", TALK), tokenizer=folder))
    assert [ids.count(BOS) for ids in samples] == [1] * len(samples)
    assert {ids[0] for ids in samples} == {BOS}


def test_an_eos_is_added_where_the_template_ends_without_one(tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    folder = str(tokenizer_folder(template=template))
    sample = prepared(
        tmp_path / "out", conversations(tmp_path / "d.jsonl", TALK[:2]), context=256, codebook_size=0, tokenizer=folder
    )
    assert counted(sample) == [*ids_of(TALK[1]["content"]), EOS]


def test_packed_conversations_fill_windows(tmp_path):
    data = conversations(tmp_path / "d.jsonl", *[TALK] * 5)
    shards = prepared(tmp_path / "out", data, fill_windows=True, context=64)
    assert {shards[i].base_ids for i in range(len(shards) - 1)} == {64}


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_the_line(tmp_path):
    data = conversations(tmp_path / "d.jsonl", TALK[:2], TALK)
    options = {"context": 256, "tokenizer": str(tokenizer_folder(template=FORGETFUL))}
    with pytest.raises(DataError, match=r"d.jsonl:\d: the chat template writes turn \d otherwise.*--train-on all"):
        prepared(tmp_path / "out", data, **options)
    assert len(prepared(tmp_path / "all", data, train_on="all", **options)) == 2


def test_what_the_template_refuses_is_a_wrong_record(tmp_path, capsys):
    template = "{% for m in messages %}{% if m.role == 'cat' %}{{ raise_exception('no cats') }}{% endif %}"
    template += "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    data = conversations(tmp_path / "d.jsonl", [{"role": "cat", "content": "miaow"}], TALK)
    shards = prepared(tmp_path / "out", data, context=256, tokenizer=str(tokenizer_folder(template=template)))
    assert len(shards) == 1
    assert "d.jsonl:1: the chat template cannot render the messages: no cats" in capsys.readouterr().err


def test_a_conversation_without_an_answer_is_skipped(tmp_path):
    shards = prepared(tmp_path / "out", conversations(tmp_path / "d.jsonl", TALK[:1], TALK), context=256)
    assert (len(shards), shards.index["skipped"]["empty"]) == (1, 1)


@pytest.mark.parametrize("templated", [True, False])
def test_of_a_prompt_and_its_completion_the_completion_is_learnt(tmp_path, templated):
    pair = {"prompt": "two and two?", "completion": " four."}
    folder = tokenizer_folder() if templated else tokenizer_folder(template=None)
    data = write_lines(tmp_path / "d.jsonl", [pair, pair])
    shards = prepared(tmp_path / "out", data, context=64, codebook_size=0, tokenizer=str(folder))
    before = (
        [*ids_of("<user>two and two?"), EOS, *ids_of("<assistant>")] if templated else [BOS, *ids_of("two and two?")]
    )
    assert expanded(shards) == [[*before, *ids_of(" four."), EOS]] * 2
    assert counted(shards) == [*ids_of(" four."), EOS]


@pytest.mark.parametrize("prompt", ["The cat sat o", "The cat sat "])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_token_that_begins_in_the_prompt_is_not_learnt(tmp_path, prompt, trimmed):
    folder = tmp_path / "tokenizer"
    shutil.copytree(GOLDEN_MODELS / "llama_transformer_tied_lora" / "base", folder)
    (folder / "chat_template.jinja").unlink()
    if trimmed:  # as GPT-2's: the space of a token is no part of its place
        trim = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        edit_json(folder / "tokenizer.json", post_processor=trim)
    completion = "The cat sat on the mat.".removeprefix(prompt)
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": prompt, "completion": completion}])
    shards = prepared(tmp_path / "out", data, codebook_size=0, tokenizer=str(folder))
    whole = ids_of("The cat sat on the mat.", folder)  # ..., " on" across the border, " the", " m", "at", "."
    assert expanded(shards) == [[*whole, EOS]]
    assert counted(shards) == [*whole[-4:], EOS]


def test_tools_reach_the_template(tmp_path):
    template = (
        "{% if tools %}<tools>{{ tools[0].name }}{% endif %}" + "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    data = write_lines(tmp_path / "d.jsonl", [{"messages": TALK[:2], "tools": [{"name": "hammer"}]}])
    options = {"context": 256, "tokenizer": str(tokenizer_folder(template=template))}
    assert expanded(prepared(tmp_path / "out", data, **options))[0][:13] == ids_of("<tools>hammer")


def test_bytes_of_a_conversation_are_those_of_its_text_without_specials(tmp_path):
    shards = prepared(tmp_path / "out", conversations(tmp_path / "d.jsonl", TALK), context=256)
    assert shards[0].n_bytes == len("".join(f"<{turn['role']}>{turn['content']}" for turn in TALK))
