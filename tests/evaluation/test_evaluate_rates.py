"""Rates of generation: what is counted of stories generated alone, in batches, and as turns of a conversation."""

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text, llama
from mlx_lm.models.cache import trim_prompt_cache

from mlx_zip.codec import Codebook, compress_next
from mlx_zip.engine.mlx import prompt_caches
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.errors import DataError
from mlx_zip.evaluation.rates import (
    GeneratedTurn,
    RateSettings,
    count_invalid_ids,
    count_repeated_grams,
    measure_rates,
    summarize_turns,
)
from mlx_zip.packs.pack import Pack
from mlx_zip.text.conversations import Conversation, document_openings, make_conversations, read_prompts
from mlx_zip.text.documents import Document
from support import tiny, tiny_text
from support.slow_cases import slow_but

TOKENIZER = tiny_text.byte_level()
MODEL = tiny.tiny_model()
PARAMS = MODEL.config.codec_params
EOS = TOKENIZER.eos_token_id
TEXTS = ["once upon a time", "a time, a time, a time", "the cat sat on the mat. the cat", "x", "no no no no", "be"]
PROMPTS = list(TEXTS)
SHORT = RateSettings(max_tokens=24, batch_size=4)
CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a {% endif %}"


def plain_model(family="llama", module=llama):
    mx.random.seed(0)
    config = {**tiny.tiny_config(family), "model_type": family, "vocab_size": 40}
    return module.Model(module.ModelArgs.from_dict(config))


def alone(prompts=PROMPTS):
    return [[prompt] for prompt in prompts]


def measured(conversations, settings=SHORT, model=MODEL, tokenizer=TOKENIZER):
    return measure_rates(model, tokenizer, conversations, settings)


def with_template():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer._tokenizer.chat_template = CHAT
    tokenizer.has_chat_template = True
    return tokenizer


def responses(prompt, **options):
    return list(stream_generate(MODEL, TOKENIZER, prompt, **{"max_tokens": 24, **options}))


# ---- one turn


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_stories_are_those_of_stream_generate_in_batches_too(batch_size):
    stories = measured(alone(), RateSettings(max_tokens=24, batch_size=batch_size)).turns[0]
    for text, story in zip(TEXTS, stories, strict=True):
        last = (found := responses(text))[-1]
        assert story.text == "".join(response.text for response in found)
        assert story.base_ids == tuple(base_id for response in found for base_id in response.base_ids)
        assert (story.steps, story.hypertokens) == (last.steps, last.hypertokens)
        assert (story.prompt, story.finish_reason) == (last.prompt_tokens, last.finish_reason)


def test_canonical_steps_are_what_compression_makes_of_the_story_after_its_prompt():
    stories = measured(alone()).turns[0]
    assert sum(story.canonical for story in stories) < sum(len(story.base_ids) for story in stories)
    for text, story in zip(TEXTS, stories, strict=True):
        book = Codebook(PARAMS)
        book.push(book.compress(np.array(TOKENIZER.encode(text), np.uint32)))
        assert story.canonical == len(book.compress(np.array(story.base_ids, np.uint32)))


@pytest.mark.parametrize("prompt", ["no no no no no no no no", "aaaaaaaaaaaaaaaaaaaa"])
def test_the_replayed_prompt_is_the_one_that_was_read(prompt):
    """Else emitted ids would be judged against another codebook than the model's."""
    cache = MODEL.make_cache()
    found = responses(prompt, prompt_cache=cache)
    read = cache[-1].books[0].ids[: found[-1].prompt_ids]
    assert compress_next(Codebook(PARAMS), TOKENIZER.encode(prompt)).tolist() == read.tolist()


def test_of_a_prompt_that_a_cache_holds_whole_the_end_is_read_again():
    cache, prompt = MODEL.make_cache(), TOKENIZER.encode("no no no no no no")
    responses(prompt, prompt_cache=cache)
    kept_ids, kept = prompt_caches.reusable_prefix(cache, prompt)
    prompt_caches.trim_cache_to(cache, kept_ids)
    book = cache[-1].books[0]
    assert book.expand(book.ids).tolist() == prompt[:kept]
    assert kept < len(prompt)


def test_a_random_model_emits_hypertokens_and_no_invalid_ids():
    record = measured(alone(), RateSettings(max_tokens=60, temp=1.0, batch_size=3)).record()
    assert record["hyper_share"] > 0
    assert record["invalid_ids"] == 0


def test_ids_that_are_not_installed_are_invalid_the_next_one_too():
    book = Codebook(PARAMS)
    book.push([5, 6])  # installs one entry, id V
    first = PARAMS.vocab_size
    assert count_invalid_ids(book, [first, 7]) == 0
    assert count_invalid_ids(book, [first + 1, first + 9, 7]) == 2
    assert count_invalid_ids(book, [7, first + 1, -1]) == 1
    assert len(book) == 1


def test_repeated_grams_are_those_seen_before():
    assert count_repeated_grams([1, 2, 3, 4, 1, 2, 3, 4, 1]) == (6, 2)
    assert count_repeated_grams([5] * 6) == (3, 2)
    assert count_repeated_grams([1, 2, 3]) == (0, 0)


@pytest.mark.slow
def test_a_starting_codebook_compresses_the_canonical_text_and_is_generated_with():
    words = Pack(tuple(tuple(TOKENIZER.encode(word, add_special_tokens=False)) for word in ("on", "ti", "cat")))
    settings = RateSettings(max_tokens=24, batch_size=4, pack=words)
    for batch_size in (1, 4):
        rates = measured(alone(), RateSettings(max_tokens=24, batch_size=batch_size, pack=words))
        expected = ["".join(response.text for response in responses(text, pack=words)) for text in TEXTS]
        assert [story.text for story in rates.turns[0]] == expected
    assert (rates.record()["invalid_ids"], settings.record()["start"]) == (0, 3)


def test_a_plain_model_has_no_canonical_rate_and_one_base_token_per_step():
    model = plain_model()
    record = measured(alone(), model=model).record()
    assert (record["base_tokens_per_step"], record["canonical_steps"], record["of_canonical"]) == (1, None, None)


def test_a_plain_model_whose_caches_do_not_batch_runs_one_by_one():
    model = plain_model("gemma3_text", gemma3_text)
    (story, _) = measured(alone(PROMPTS[:2]), model=model).turns[0]
    expected = stream_generate(model, TOKENIZER, TEXTS[0], max_tokens=24)
    assert story.text == "".join(response.text for response in expected)


# ---- turns


def test_a_later_turn_reads_the_earlier_ones_after_an_eos():
    talk = Conversation(TOKENIZER, PROMPTS[:2])
    first = talk.next_prompt()
    talk.answer("ab", [7, 8])
    assert talk.next_prompt() == [*first, 7, 8, EOS, *TOKENIZER.encode(TEXTS[1], add_special_tokens=False)]


def test_an_answer_that_ended_by_itself_gets_no_second_eos():
    talk = Conversation(TOKENIZER, PROMPTS[:2])
    first = talk.next_prompt()
    talk.answer("a", [7, EOS])
    assert talk.next_prompt()[: len(first) + 3] == [*first, 7, EOS, *TOKENIZER.encode("a", add_special_tokens=False)]


def test_chat_turns_are_rendered_by_the_template_with_the_answers_between():
    tokenizer = with_template()
    talk = Conversation(tokenizer, [[{"role": "user", "content": text}] for text in ("be", "no")])
    assert TOKENIZER.decode(talk.next_prompt()) == "u be\na "
    talk.answer("yes", [7, 8])
    assert TOKENIZER.decode(talk.next_prompt()) == "u be\na yes\nu no\na "


def test_the_last_turn_is_what_is_reported_and_every_turn_is_there():
    rates = measured(make_conversations(PROMPTS, 3, 2, repeat=False))
    record = rates.record()
    by_turn = [summarize_turns(stories) for stories in rates.turns]
    assert record["turns"] == by_turn
    assert {key: record[key] for key in by_turn[-1]} == by_turn[-1]
    assert record["texts"] == [story.text for story in rates.turns[-1]]


@pytest.mark.parametrize("batch_size", slow_but([1, 3], 3))
@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_turns_context_is_all_that_was_said_before(keep_cache, batch_size):
    settings = RateSettings(max_tokens=24, batch_size=batch_size, keep_cache=keep_cache)
    first, second = measured([PROMPTS[:2], PROMPTS[2:4]], settings).turns
    for one, two, texts in zip(first, second, (TEXTS[:2], TEXTS[2:4]), strict=True):
        talk = Conversation(TOKENIZER, texts)
        talk.next_prompt()
        talk.answer(one.text, one.base_ids)
        assert two.prompt == len(talk.next_prompt())


def test_without_the_cache_a_later_turn_is_a_request_of_its_own():
    first, second = measured([PROMPTS[:2]]).turns
    talk = Conversation(TOKENIZER, PROMPTS[:2])
    talk.next_prompt()
    talk.answer(first[0].text, first[0].base_ids)
    assert second[0].text == "".join(response.text for response in responses(talk.next_prompt()))


def test_with_the_cache_a_later_turn_goes_on_from_the_ids_that_were_emitted():
    first, second = measured([PROMPTS[:2]], RateSettings(max_tokens=24, keep_cache=True)).turns
    cache = MODEL.make_cache()
    responses(TEXTS[0], prompt_cache=cache)
    book = cache[-1].books[0]
    said = [*TOKENIZER.encode(TEXTS[0]), *first[0].base_ids]
    while book.base_length > len(said):  # the limit fell inside the last id
        trim_prompt_cache(cache, 1)
    assert book.expand(book.ids).tolist() == said[: book.base_length]
    prompt = [*said[book.base_length :], EOS, *TOKENIZER.encode(TEXTS[1], add_special_tokens=False)]
    context = book.copy()
    context.push(context.compress(np.array(prompt, np.uint32)))
    again = responses(prompt, prompt_cache=cache)
    assert second[0].text == "".join(response.text for response in again)
    assert second[0].canonical == len(context.compress(np.array(second[0].base_ids, np.uint32)))


def test_a_cache_that_holds_more_than_was_said_is_trimmed_first():
    """A stop string inside the text leaves emitted ids in the cache that do not count."""
    text = "".join(response.text for response in responses(TEXTS[1], max_tokens=60))
    settings = RateSettings(max_tokens=60, keep_cache=True, stop=(text[7:9],))
    rates = measured([PROMPTS[1:3], PROMPTS[:2]], settings)
    assert rates.turns[0][0].text == text[:7]
    assert rates.record()["invalid_ids"] == 0


def test_conversations_do_not_share_a_cache():
    settings = RateSettings(max_tokens=24, keep_cache=True)
    both = measured([PROMPTS[:2], PROMPTS[2:4]], settings)
    assert both.turns[1][1] == measured([PROMPTS[2:4]], settings).turns[1][0]


def test_the_cache_makes_no_difference_to_a_plain_model():
    model = plain_model()
    anew, kept = (measured([PROMPTS[:2]], RateSettings(max_tokens=24, keep_cache=k), model) for k in (False, True))
    assert anew.turns == kept.turns


def test_sampling_follows_the_seed():
    texts = [
        measured(alone(), RateSettings(max_tokens=24, temp=1.0, seed=seed)).record()["texts"] for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


# ---- prompts


def test_the_last_prompts_are_the_same_for_any_number_of_turns():
    one, three = (make_conversations(PROMPTS, 4, turns, repeat=False) for turns in (1, 3))
    assert [talk[-1] for talk in one] == [talk[-1] for talk in three] == PROMPTS[:4]
    assert three[0] == [PROMPTS[2], PROMPTS[1], PROMPTS[0]]


def test_more_stories_than_prompts_need_sampling():
    with pytest.raises(DataError, match=r"7 continuations .* of 6 prompts"):
        make_conversations(PROMPTS, 7, 1, repeat=False)
    assert make_conversations(PROMPTS, 7, 1, repeat=True)[6] == [PROMPTS[0]]


def test_no_prompt_is_asked_twice_in_one_conversation():
    """What comes again compresses better, and the rate would measure the repetition."""
    with pytest.raises(DataError, match=r"7 turns .* of 6 prompts"):
        make_conversations(PROMPTS, 1, 7, repeat=True)
    assert len(make_conversations(PROMPTS, 1, 6, repeat=False)[0]) == 6


def test_a_conversation_is_of_one_kind_of_prompt():
    """Neither would see what the other said."""
    mixed = [PROMPTS[0], [{"role": "user", "content": "hi"}]]
    with pytest.raises(DataError, match="prompts are of both kinds"):
        make_conversations(mixed, 2, 2, repeat=False)
    assert make_conversations(mixed, 2, 1, repeat=False) == [[mixed[0]], [mixed[1]]]


def test_prompts_are_text_or_chat_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "once"}) + "\n\n" + json.dumps({"messages": messages}))
    assert read_prompts(tmp_path / "p.jsonl") == ["once", messages]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": ""}', '{"messages": [{"role": "user"}]}', '{"prompt": 3}']
)
def test_a_line_that_is_no_prompt_is_an_error_with_its_number(tmp_path, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "once"}\n' + line)
    with pytest.raises(DataError, match=r"p\.jsonl:2"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_file_that_is_no_list_of_prompts_is_an_error(tmp_path):
    (tmp_path / "p.txt").write_text("")
    (tmp_path / "p.jsonl").write_text("")
    for other in (tmp_path / "p.txt", tmp_path):  # a folder would be a data set
        with pytest.raises(DataError, match=r"read from a \.jsonl file"):
            read_prompts(other)
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(tmp_path / "p.jsonl")


def test_openings_are_the_first_base_ids_of_documents_as_text():
    found = document_openings(TOKENIZER, [Document("once upon", "a"), Document("be", "b"), Document("😀😀", "c")], 6)
    assert found == ["once u", "be", "😀"]


# ---- totals


def test_totals_are_sums_and_ratios_of_sums():
    stories = [
        GeneratedTurn("a", 3, (1, 2, 3, 4), 2, 1, 3, 0, 10, 1, "stop"),
        GeneratedTurn("b", 5, (1, 2), 2, 0, 1, 1, 30, 9, "length"),
    ]
    assert summarize_turns(stories) == {
        "stories": 2,
        "prompt_base_tokens": 8,
        "base_tokens": 6,
        "steps": 4,
        "base_tokens_per_step": 1.5,
        "canonical_steps": 4,
        "canonical_base_tokens_per_step": 1.5,
        "of_canonical": 1.0,
        "hyper_share": 0.25,
        "invalid_ids": 1,
        "repeated_4grams": 0.25,
        "ended": 0.5,
    }


def test_bad_settings_are_refused():
    with pytest.raises(DataError, match="--batch-size"):
        RateSettings(batch_size=0)
    with pytest.raises(DataError, match="--turns"):
        make_conversations(PROMPTS, 1, 0, repeat=False)
    with pytest.raises(DataError, match="--opening"):
        document_openings(TOKENIZER, [Document("a", "a")], 0)
