"""Drafts through the server: OpenAI's predictions, what usage says of them, and answers that they do not change."""

import json
from itertools import product

import pytest

from mlx_zip.engine.mlx.mlx_engine import open_engine
from mlx_zip.server.options import Options
from support import http_server
from support.clients import openai_client
from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, post, serving, until
from support.slow_cases import slow_but

STORY = "Once upon a time there was a boat."
USER = [{"role": "user", "content": "Tell me a story."}]
SLOW_S = 120  # for an answer on a machine that does something else too


def prediction(content):
    return {"type": "content", "content": content}


def details(answer):
    return answer["usage"]["completion_tokens_details"]


# ---- with an engine that replays: fields of requests and answers


@pytest.mark.parametrize(
    "content", [STORY, [{"type": "text", "text": STORY[:9]}, {"type": "text", "text": STORY[9:], "of": "a client"}]]
)
def test_a_prediction_reaches_the_engine_as_base_ids(content):
    engine = FakeEngine()
    with serving(engine) as served:
        assert served.chat(prediction=prediction(content)).status == 200
        assert served.chat(prediction=prediction("")).status == 200
        assert served.chat(prediction=None).status == 200
    ids = tokenizer().encode(STORY, add_special_tokens=False)
    assert [list(one.prediction) for one in engine.told.submissions] == [ids, [], []]


def test_a_prediction_of_invalid_unicode_is_named():
    with serving(FakeEngine()) as served:
        answer = served.chat(prediction=prediction("a\ud800b"))
    assert answer.status == 400
    assert answer.json["error"]["message"] == "prediction is not valid Unicode at character 1"


def test_each_of_n_answers_has_the_prediction():
    engine = FakeEngine()
    with serving(engine) as served:
        assert served.chat(prediction=prediction(STORY), n=2).status == 200
    assert len({tuple(one.prediction) for one in engine.told.submissions}) == 1


def test_completions_of_plain_text_have_no_prediction():
    with serving(FakeEngine()) as served:
        answer = served.ask("POST", "/v1/completions", {"prompt": "x", "prediction": prediction(STORY)})
    assert (answer.status, answer.json["error"]["param"]) == (400, "prediction")


def test_usage_counts_accepted_and_rejected_base_tokens_whole_and_streamed():
    # ids of two base tokens each: two of them were proposed, and seven more that were refused
    with serving(FakeEngine(Script(drafted=(1, 2), refused=7))) as served:
        client = openai_client(served)
        asked = {"model": "stories", "messages": USER}
        whole = client.chat.completions.create(**asked)
        *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        completion = served.ask("POST", "/v1/completions", {"prompt": "x"}).json
        several = served.chat(n=2).json
    for usage in (whole.usage, last.usage):
        found = usage.completion_tokens_details
        assert (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == (4, 7)
    assert details(completion)["accepted_prediction_tokens"] == 4
    assert (details(several)["accepted_prediction_tokens"], details(several)["rejected_prediction_tokens"]) == (8, 14)


def test_every_dialect_says_how_many_ids_drafts_have_saved():
    with serving(FakeEngine(Script(drafted=(1, 2), refused=7))) as served:
        answers = [
            served.chat().json,
            served.ask("POST", "/v1/completions", {"prompt": "x"}).json,
            served.ask("POST", "/v1/responses", {"input": "x"}).json,
            served.ask("POST", "/v1/messages", {"messages": USER, "max_tokens": 100, "model": "stories"}).json,
        ]
    for answer in answers:
        figures = answer["mlx_zip"]
        assert (figures["proposed"], figures["accepted"]) == (9, 2)
        passes = figures["steps"] - 2
        assert figures["base_tokens_per_pass"] > figures["base_tokens_per_step"]
        assert round(figures["base_tokens_per_pass"] * passes) == round(
            figures["base_tokens_per_step"] * figures["steps"]
        )


def test_a_shown_token_says_whether_a_draft_had_proposed_it():
    with serving(FakeEngine(Script(drafted=(1, 2)))) as served:
        shown = served.chat(mlx_zip={"tokens": True}).json["mlx_zip"]["tokens"]
    assert [nth for nth, token in enumerate(shown) if "d" in token] == [1, 2]
    assert shown[1]["d"] is True


def test_what_a_stop_string_cuts_off_is_not_counted_as_accepted():
    with serving(FakeEngine(Script(text=STORY + " It was red." * 9, drafted=range(200)))) as served:
        answer = served.chat(stop=["time"]).json
    assert answer["choices"][0]["message"]["content"] == "Once upon a "
    assert details(answer)["accepted_prediction_tokens"] == answer["usage"]["completion_tokens"]
    assert answer["mlx_zip"]["accepted"] == answer["mlx_zip"]["steps"]


# ---- with the bundled model


@pytest.fixture(scope="module")
def both():
    """Servers with drafts and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "WAIT_S", SLOW_S)
        drafted, plain = open_engine("stories", draft="lookup"), open_engine("stories")
        with serving(drafted, Options()) as with_drafts, serving(plain, Options()) as without:
            yield with_drafts, without


def asked(served, **fields):
    answer = served.chat(**{"max_tokens": 40, "temperature": 0, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def test_a_prediction_saves_passes_and_changes_no_word(both):
    alone = asked(both[1])
    answer = asked(both[0], prediction=prediction(text_of(alone)))
    other = asked(both[0], prediction=prediction("The ships of the line sailed before dawn, all of them."))
    unused = asked(both[1], prediction=prediction(text_of(alone)))
    assert text_of(answer) == text_of(other) == text_of(unused) == text_of(alone)
    assert details(answer)["accepted_prediction_tokens"] > 20
    assert answer["mlx_zip"]["base_tokens_per_pass"] > 2 * answer["mlx_zip"]["base_tokens_per_step"]
    assert details(unused) == details(alone)
    assert details(alone)["accepted_prediction_tokens"] == details(alone)["rejected_prediction_tokens"] == 0


def test_a_stop_string_inside_an_accepted_draft_ends_the_text_there(both):
    whole = text_of(asked(both[1]))
    for stop in (whole[20:26], whole[-9:-5]):
        alone = asked(both[1], stop=stop)
        answer = asked(both[0], stop=stop, prediction=prediction(whole))
        assert text_of(answer) == text_of(alone) == whole[: whole.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        assert 0 < details(answer)["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]


def test_a_limit_inside_an_accepted_draft_ends_the_text_there(both):
    whole = text_of(asked(both[1]))
    for limit in (5, 6, 7, 8):
        alone = asked(both[1], max_tokens=limit)
        answer = asked(both[0], max_tokens=limit, prediction=prediction(whole))
        assert text_of(answer) == text_of(alone)
        assert answer["usage"]["completion_tokens"] == limit


SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["a dog", "a cat"]}, "what": {"enum": ["ran to the park", "sat on the mat"]}},
    "required": ["who", "what"],
    "additionalProperties": False,
}


VALID, INVALID, SAMPLED = (
    '{"who": "a dog", "what": "ran to the park"}',
    "{{}} no JSON at all",
    {"temperature": 1.0, "seed": 11},
)
CASES = list(product([VALID, INVALID, ""], [{}, SAMPLED]))


@pytest.mark.parametrize(("predicted", "sampling"), slow_but(CASES, (VALID, SAMPLED), (INVALID, {}), ("", SAMPLED)))
def test_an_answer_by_a_schema_is_valid_and_the_same_with_drafts(both, predicted, sampling):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields = {"response_format": form, "max_tokens": 60, **sampling}
    alone = asked(both[1], **fields)
    answer = asked(both[0], **fields, prediction=prediction(predicted))
    found = json.loads(text_of(answer))
    assert found.keys() == {"who", "what"}
    assert all(found[name] in SCHEMA["properties"][name]["enum"] for name in found)
    assert text_of(answer) == text_of(alone)


def test_a_client_that_leaves_in_the_middle_of_a_draft_ends_its_request_and_harms_no_later_one(both):
    served, engine = both[0], both[0].core.engine
    story = text_of(asked(both[1], max_tokens=120))
    before = engine.figures()
    body = {"messages": USER, "max_tokens": 120, "temperature": 0, "stream": True, "prediction": prediction(story)}
    connection = served.raw(post("/v1/chat/completions", body))
    assert until(lambda: engine.figures().accepted > before.accepted)
    connection.close()
    assert until(lambda: not engine.figures().running)
    again = asked(served, max_tokens=120, prediction=prediction(story))
    assert text_of(again) == story


def test_the_metrics_count_ids_of_drafts_and_passes(both):
    def metrics():
        lines = both[0].ask("GET", "/metrics").body.decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return [float(values[f"mlx_zip_{name}_total"]) for name in ("proposed", "accepted", "passes", "steps")]

    before = metrics()
    figures = asked(both[0], prediction=prediction("Once upon a time"))["mlx_zip"]
    proposed, accepted, passes, steps = (now - then for now, then in zip(metrics(), before, strict=True))
    assert (proposed, accepted, steps) == (figures["proposed"], figures["accepted"], figures["steps"])
    assert passes == steps - accepted


def test_a_prediction_longer_than_any_answer_is_refused_in_one_line(both):
    answer = both[0].chat(prediction=prediction("word " * 40_000))
    assert answer.status == 400
    message = answer.json["error"]["message"]
    assert message.startswith("prediction: it has more than the ")
    assert "\n" not in message


def test_a_streamed_answer_with_a_prediction_is_the_whole_one(both):
    whole = asked(both[0], prediction=prediction(STORY))
    *chunks, _ = events(both[0].chat(prediction=prediction(STORY), max_tokens=40, temperature=0, stream=True).body)
    deltas = [one["choices"][0]["delta"].get("content") or "" for one in chunks]
    assert "".join(deltas) == text_of(whole)
