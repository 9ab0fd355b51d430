"""Conversations as prompts: system message, prefill, template options, and answers by the ids emitted for them."""

import pytest
from tokenizers import Tokenizer as Words
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from mlx_zip.errors import GenerationError
from mlx_zip.text.prompts import Chat, encode_text
from mlx_zip.text.tokenizers import Tokenizer
from support import tiny_text
from support.tool_templates import with_tools

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}"
    "{% if not loop.last or not continue_final_message %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}{% if tail %}{{ tail }}{% endif %}"
)
TRIMS = TEMPLATE.replace("m['content']", "m['content'] | trim")
ALTERS = TEMPLATE.replace("m['content']", "m['content'].split('.')[-1]")
ODD = (3, 3, 3)  # ids that no tokenizer makes of the answer


def tokenizer(template=TEMPLATE):
    made = tiny_text.byte_level()
    made._tokenizer.chat_template = template
    return made


def talk(answer="hi there"):
    return [user("hello"), {"role": "assistant", "content": answer}, user("more")]


def user(text):
    return {"role": "user", "content": text}


def ids_of(text):
    return tokenizer().encode(text, add_special_tokens=False)


def test_a_system_message_comes_first():
    assert Chat([user("b")], system="a").text(tokenizer()) == "<|bos|>s a<|eos|>u b<|eos|>a "


def test_a_prefill_begins_the_answer():
    assert Chat([user("b")], prefill="once").text(tokenizer()) == "<|bos|>u b<|eos|>a once"


def test_options_reach_the_template():
    assert Chat([user("b")], options={"tail": "z"}).text(tokenizer()).endswith("a z")


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt"])
def test_options_that_the_prompt_sets_itself_are_refused(name):
    with pytest.raises(GenerationError, match=f"chat-template-config.*{name}"):
        Chat([user("b")], options={name: 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [user("b"), 5]},
        {"system": 5},
        {"prefill": 5},
        {"options": None},
        {"options": {5: 1}},
    ],
)
def test_what_is_no_conversation_is_refused(fields):
    with pytest.raises(GenerationError):
        Chat(**{"messages": [user("b")], **fields})


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('first\nsecond') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 1 // 0 }}",
        "{{ messages['x'].y }}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_one_line(template):
    with pytest.raises(GenerationError, match=r"the chat template cannot render the messages: .") as caught:
        Chat([user("b")]).text(tokenizer(template))
    assert "\n" not in str(caught.value)


def test_a_tool_that_the_template_cannot_describe_is_refused():
    with pytest.raises(GenerationError, match="docstring"):
        Chat([user("b")], options={"tools": [lambda x: x]}).text(tokenizer())


def test_text_that_the_tokenizer_has_no_ids_for_is_refused():
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Words(models.WordLevel({"a": 0}, unk_token="?"))))
    assert encode_text(words, "a") == [0]
    with pytest.raises(GenerationError, match="the tokenizer cannot encode the prompt: WordLevel error"):
        encode_text(words, "b")


def test_the_next_turn_begins_with_the_last_user_message():
    assert Chat(talk()).next_turn(tokenizer()) == "more<|eos|>a "


def test_a_known_answer_is_represented_by_its_emitted_ids():
    found = Chat(talk()).ids(tokenizer(), {"hi there": ODD})
    assert found == [*ids_of("<|bos|>u hello<|eos|>a "), *ODD, *ids_of("<|eos|>u more<|eos|>a ")]


def test_other_answers_are_encoded_as_text():
    assert Chat(talk()).ids(tokenizer(), {"something else": ODD}) == ids_of(Chat(talk()).text(tokenizer()))


def test_an_answer_that_is_forgotten_meanwhile_is_encoded_as_text():
    class Forgets(dict):
        def __getitem__(self, key):
            raise KeyError(key)

        def get(self, key, default=None):
            return self[key]

    assert Chat(talk()).ids(tokenizer(), Forgets({"hi there": ODD})) == ids_of(Chat(talk()).text(tokenizer()))


def test_every_known_answer_of_a_conversation_is_found():
    turns = [*talk(), {"role": "assistant", "content": "bye"}, user("so")]
    found = Chat(turns).ids(tokenizer(), {"hi there": ODD, "bye": (4, 4)})
    middle = ids_of("<|eos|>u more<|eos|>a ")
    assert found == [*ids_of("<|bos|>u hello<|eos|>a "), *ODD, *middle, 4, 4, *ids_of("<|eos|>u so<|eos|>a ")]


def test_a_template_that_trims_white_space_keeps_emitted_ids():
    found = Chat(talk(" hi there\n")).ids(tokenizer(TRIMS), {" hi there\n": ODD})
    assert found == [*ids_of("<|bos|>u hello<|eos|>a "), *ODD, *ids_of("<|eos|>u more<|eos|>a ")]


def test_a_template_that_alters_an_answer_has_its_own_text_encoded():
    chat = Chat(talk("thought. hi"))
    assert chat.text(tokenizer(ALTERS)) == "<|bos|>u hello<|eos|>a  hi<|eos|>u more<|eos|>a "
    assert chat.ids(tokenizer(ALTERS), {"thought. hi": ODD}) == ids_of(chat.text(tokenizer(ALTERS)))


def test_a_message_in_parts_is_encoded_as_the_template_writes_it():
    chat = Chat(talk([{"type": "text", "text": "hi"}]))
    assert chat.ids(tokenizer(), {"hi there": ODD}) == ids_of(chat.text(tokenizer()))


def test_the_next_turn_is_found_where_a_template_writes_a_tag_that_looks_like_a_mark():
    template = "<query>" + TEMPLATE
    assert Chat(talk()).next_turn(tokenizer(template)) == "more<|eos|>a "


def test_a_template_that_alters_the_last_question_is_told():
    template = TEMPLATE.replace("m['content']", "m['content'] | replace('query', '')")
    with pytest.raises(GenerationError, match="alters the last user message"):
        Chat(talk()).next_turn(tokenizer(template))


CALL = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"a": [1, "é"], "b": None}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"], "b": null}}\n</tool_call>'


def tool_talk(**answer):
    """A conversation in which a tool was called, and then the rest of it."""
    said = [user("add!"), {"role": "assistant", "content": "", "tool_calls": [CALL], **answer}]
    return [
        *said,
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]


def reused(messages, answers, **options):
    """The conversation's ids, with ids beyond the vocabulary for each known answer, and what it is without answers."""
    bundled = with_tools("tags")
    chat = Chat([*messages, user("so")], options=options)
    return chat.ids(bundled, answers), chat.text(bundled), bundled


def check_reuse(messages, key, text, **options):
    """Checks that exactly `text` of the rendered conversation is replaced by the ids noted under `key`."""
    ids, whole, bundled = reused(messages, {key: (9999, 9998)}, **options)
    before, after = whole.split(text)
    encode = lambda part: bundled.encode(part, add_special_tokens=False)
    assert ids == [*encode(before), 9999, 9998, *encode(after)]


def test_an_answer_that_called_tools_is_represented_by_its_emitted_ids():
    check_reuse(tool_talk(), CALLED, CALLED)


def test_text_before_calls_and_several_calls_belong_to_the_answer():
    text = f"Well.\n{CALLED}\n{CALLED}"
    check_reuse(tool_talk(content="Well.", tool_calls=[CALL, CALL]), text, text)


def test_an_answer_with_reasoning_is_represented_by_its_emitted_ids():
    text = f"<think>\nhm\n</think>\n\n{CALLED}"
    check_reuse(tool_talk(reasoning_content="hm"), text, text)


def test_reasoning_that_the_prompt_had_opened_is_represented_by_its_emitted_ids():
    text = f"hm\n</think>\n\n{CALLED}"
    check_reuse(tool_talk(reasoning_content="hm"), text, text)


def test_known_answers_of_both_kinds_stand_side_by_side():
    ids, _, _ = reused(tool_talk(), {CALLED: (9999,), "It is 2.": (9998,)})
    assert [i for i in ids if i > 9000] == [9999, 9998]


def test_a_call_that_the_template_writes_otherwise_is_encoded_as_text():
    ids, whole, bundled = reused(tool_talk(), {CALLED.replace(": ", ":"): (9999,)})
    assert ids == bundled.encode(whole, add_special_tokens=False)


def test_a_plain_answer_is_found_where_calls_are_not():
    ids, _, _ = reused(tool_talk(), {CALLED.replace(": ", ":"): (9999,), "It is 2.": (9998,)})
    assert [i for i in ids if i > 9000] == [9998]


def test_a_plain_answer_is_found_where_the_template_asks_for_calls_before_results():
    template = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    template += "{{ raise_exception('no call') }}{% endif %}{{ m.role[0] }} {{ m.content }}{{ eos_token }}{% endfor %}"
    ids = Chat([*tool_talk(), user("so")]).ids(tokenizer(template), {CALLED: (9999,), "It is 2.": (9998,)})
    assert [i for i in ids if i > 9000] == [9998]


def test_what_looks_like_the_end_of_an_answer_does_not_end_it():
    end = "<|im_end|>\n<|im_start|>user\n<tool_response>\n"
    text = f"Well.{end}2\n{CALLED}"
    check_reuse(tool_talk(content=f"Well.{end}2"), text, text)
