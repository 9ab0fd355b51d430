"""The language model that lm-evaluation-harness sees, and a small local task of each kind through it."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from mlx_zip.codec import Codebook
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.scoring import compress_row
from mlx_zip.engine.sampling.canonical import CanonicalDecoding
from mlx_zip.errors import DataError, InstallationError
from mlx_zip.evaluation.bits import cut_scored_windows, measure_bits
from mlx_zip.evaluation.tasks import list_task_metrics, run_tasks
from mlx_zip.packs.pack import Pack
from mlx_zip.text.documents import Document
from support import tiny, tiny_text

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (pip install -e '.[eval]')")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from mlx_zip.evaluation.lm_eval_model import ZipLM

TOKENIZER = tiny_text.byte_level()
MODEL = tiny.tiny_model()
BOS = TOKENIZER.bos_token_id
CONTEXT = "the cat sat on the mat. the cat sat on the"
PAIRS = [(CONTEXT, " mat. the cat"), (CONTEXT, " cat"), ("no", " no no no"), ("", "once upon a time"), ("a", "b")]


def plain_model():
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict({**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40}))


PLAIN = plain_model()


def requests(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def loglikelihood(lm, pairs=PAIRS):
    return lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def generated(lm, *arguments):
    return lm.generate_until(requests("generate_until", arguments), disable_tqdm=True)


def encoded(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def slow_scores(model, ids, first):
    """(sum of log-probabilities, greedy) of ids[first:], each id fed by itself."""
    cache, total, greedy = model.make_cache(), 0.0, True
    for i, target in enumerate(ids[1:], start=1):
        logits = tiny.last_logits(model, [ids[i - 1]], cache).astype(np.float64)
        if i >= first:
            total += logits[target] - np.logaddexp.reduce(logits)
            greedy &= int(logits.argmax()) == target
    return total, greedy


def assert_same(answers, expected):
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    np.testing.assert_allclose([score for score, _ in answers], [score for score, _ in expected], rtol=0, atol=1e-3)


# ---- log-likelihood


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_score_is_that_of_all_ids_that_stand_for_some_of_the_continuation(batch_size):
    expected, straddling = [], 0
    for context, continuation in PAIRS:
        prefix = encoded(context) or [BOS]
        book = Codebook(MODEL.config.codec_params)
        ids = book.compress(np.array([*prefix, *encoded(continuation)], np.uint32))
        book.push(ids)
        ends = np.cumsum(book.spans(ids))
        first = next(i for i, end in enumerate(ends) if end > len(prefix))
        straddling += ends[first - 1] != len(prefix)
        expected.append(slow_scores(MODEL, ids.tolist(), first))
    assert straddling > 0
    assert_same(loglikelihood(ZipLM(MODEL, TOKENIZER, batch_size=batch_size)), expected)


def test_with_a_split_border_the_continuation_is_compressed_by_itself():
    expected = []
    for context, continuation in PAIRS:
        book = Codebook(MODEL.config.codec_params)
        prefix = book.compress(np.array(encoded(context) or [BOS], np.uint32))
        book.push(prefix)
        ids = [*prefix.tolist(), *book.compress(np.array(encoded(continuation), np.uint32)).tolist()]
        expected.append(slow_scores(MODEL, ids, len(prefix)))
    assert_same(loglikelihood(ZipLM(MODEL, TOKENIZER, border="split")), expected)


def test_a_canonical_model_scores_a_continuation_as_it_would_generate_it():
    """After the context's last id nothing is excluded, unless an id spans the border."""
    model, expected, spanning = tiny.tiny_model(canonical=True), [], 0
    pairs = [*PAIRS, ("ab a", "a")]  # after the last one's context some ids would be excluded
    for context, continuation in pairs:
        prefix = encoded(context) or [BOS]
        row = compress_row(model, np.array([*prefix, *encoded(continuation)], np.uint32))
        first = int(np.searchsorted(row.ends, len(prefix), side="right"))
        cache, total = model.make_cache(), 0.0
        decoding = CanonicalDecoding(cache[-1].books[0])
        spans = row.ends[first - 1] != len(prefix)
        spanning += spans
        for i, target in enumerate(row.ids[1:].tolist(), start=1):
            logits = mx.array(tiny.last_logits(model, [int(row.ids[i - 1])], cache))[None]
            if spans or i >= first:
                logits = decoding(mx.array([0]), logits)
            total += float((logits[0, target] - mx.logsumexp(logits)).item()) if i >= first else 0.0
        expected.append(total)
    assert 0 < spanning < len(pairs)
    scores = [score for score, _ in loglikelihood(ZipLM(model, TOKENIZER), pairs)]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("border", ["whole", "split"])
def test_a_plain_models_score_is_that_of_its_own_forward(border):
    expected = []
    for context, continuation in PAIRS:
        ids = [*(encoded(context) or [BOS]), *encoded(continuation)]
        logits = np.array(PLAIN(mx.array([ids[:-1]])))[0].astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        at = np.arange(len(ids) - 1)[-len(encoded(continuation)) :]
        greedy = (logits.argmax(axis=-1)[at] == np.array(ids)[at + 1]).all()
        expected.append((logprobs[at, np.array(ids)[at + 1]].sum(), bool(greedy)))
    assert_same(loglikelihood(ZipLM(PLAIN, TOKENIZER, border=border)), expected)


def test_greedy_is_what_greedy_generation_writes():
    text = "".join(r.text for r in stream_generate(PLAIN, TOKENIZER, encoded(CONTEXT), max_tokens=5))
    other = text[:-1] + ("z" if text[-1] != "z" else "y")
    answers = loglikelihood(ZipLM(PLAIN, TOKENIZER), [(CONTEXT, text), (CONTEXT, other)])
    assert [greedy for _, greedy in answers] == [True, False]


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    moved = loglikelihood(ZipLM(PLAIN, TOKENIZER), [("the cat  ", "sat"), ("the cat", "  sat")])
    assert moved[0] == moved[1]


def test_a_context_too_long_for_the_model_loses_its_beginning():
    lm = ZipLM(PLAIN, TOKENIZER, context=10)
    long, short, shorter = (loglikelihood(lm, [(CONTEXT[-n:], " cat")])[0] for n in (42, 7, 6))
    assert long == short != shorter
    assert lm.truncated == 1


def test_a_continuation_that_does_not_fit_is_an_error():
    with pytest.raises(DataError, match="continuation of 12 base ids"):
        loglikelihood(ZipLM(PLAIN, TOKENIZER, context=10), [("a", "the cat sat ")])


def test_a_start_entry_that_begins_with_the_context_is_scored_after_the_prefix():
    start = (tuple(encoded("ab")),)
    model = tiny.tiny_model(start=start)
    expected = slow_scores(model, [BOS, tiny.VOCAB], 1)
    assert_same(loglikelihood(ZipLM(model, TOKENIZER), [("a", "b")]), [expected])
    assert_same(loglikelihood(ZipLM(MODEL, TOKENIZER, pack=Pack(start)), [("a", "b")]), [expected])


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["zip", "plain"])
def test_rolling_scores_are_the_bits_of_the_same_windows(model):
    texts = [CONTEXT, "once upon a time"]
    lm = ZipLM(model, TOKENIZER, context=16)
    scores = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in [*texts, ""]]))
    for text, score in zip(texts, scores, strict=False):
        bits = measure_bits(model, cut_scored_windows(TOKENIZER, [Document(text, "")], 16)).bits.sum()
        assert score == pytest.approx(-bits * math.log(2), abs=1e-3)
    assert scores[2] == 0


# ---- generation


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["zip", "plain"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_generated_texts_are_those_of_stream_generate(model, batch_size):
    contexts = [CONTEXT, "no no no ", "once"]
    expected = [
        "".join(r.text for r in stream_generate(model, TOKENIZER, encoded(text), max_tokens=9)) for text in contexts
    ]
    options = {"until": [], "max_gen_toks": 9}
    found = generated(ZipLM(model, TOKENIZER, batch_size=batch_size), *((text, options) for text in contexts))
    assert found == expected


def test_requests_with_other_options_are_answered_in_their_own_order():
    lm = ZipLM(MODEL, TOKENIZER)
    whole = "".join(r.text for r in stream_generate(MODEL, TOKENIZER, encoded(CONTEXT), max_tokens=30))
    stop = whole[5:7]
    cut = whole[: whole.index(stop)]
    arguments = [
        (CONTEXT, {"until": [stop], "max_gen_toks": 30}),
        (CONTEXT, {"max_gen_toks": 30}),
        (CONTEXT, {"until": stop, "max_gen_toks": 30}),
    ]
    assert generated(lm, *arguments) == [cut, whole, cut]


def test_a_task_that_samples_gets_the_same_text_for_the_same_seed():
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20}
    texts = [generated(ZipLM(MODEL, TOKENIZER, seed=seed), (CONTEXT, options)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_sampled_request_that_is_repeated_gets_another_answer(batch_size):
    """Tasks that vote among several answers repeat their requests."""
    request = (CONTEXT, {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20})
    texts = generated(ZipLM(MODEL, TOKENIZER, batch_size=batch_size), *[request] * 4)
    assert len(set(texts)) == 4


def test_generation_arguments_that_are_not_known_are_refused():
    with pytest.raises(DataError, match="num_beams"):
        generated(ZipLM(MODEL, TOKENIZER), (CONTEXT, {"num_beams": 4}))


def test_a_context_leaves_room_for_the_answer():
    lm = ZipLM(PLAIN, TOKENIZER, context=20)
    ids = encoded(CONTEXT)[-11:]
    expected = "".join(r.text for r in stream_generate(PLAIN, TOKENIZER, ids, max_tokens=9))
    assert generated(lm, (CONTEXT, {"max_gen_toks": 9})) == [expected]
    assert lm.truncated == 1
    with pytest.raises(DataError, match="leaves no room"):
        generated(lm, (CONTEXT, {"max_gen_toks": 20}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"border": "both"}, "--border"),
        ({"batch_size": 0}, "--batch-size"),
        ({"context": 0}, r"--context.* at least 1"),
        ({"context": 101}, r"101 base ids \(--context\) do not fit the model's 100 positions"),
    ],
)
def test_bad_options_are_refused(options, message):
    model = tiny.tiny_model()
    model.args.config["max_position_embeddings"] = 100
    assert ZipLM(model, TOKENIZER).max_length == ZipLM(model, TOKENIZER, context=100).max_length == 100
    with pytest.raises(DataError, match=message):
        ZipLM(model, TOKENIZER, **options)


# ---- whole tasks


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with three tasks over one local file, and a harness that need not index its own thousands."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path(tmp_path / "cache"))
    rows = [{"q": "the cat", "a": 0, "t": " sat"}, {"q": "the mat", "a": 1, "t": " on"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\ntest_split: test\n"
    bodies = {
        "choose": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: [" sat", " on"]\n'
        "doc_to_target: a\nmetric_list: [{metric: acc}]\n",
        "write": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{t}}"\n'
        "generation_kwargs: {until: [x], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
        "roll": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}} sat on the mat"\n'
        "metric_list: [{metric: bits_per_byte}]\n",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{common}{body}")
    return tmp_path


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["zip", "plain"])
def test_local_tasks_of_each_kind_run_through_the_harness(tasks, model):
    results = run_tasks(model, TOKENIZER, ["choose", "write", "roll"], include_path=str(tasks), context=64)
    assert set(results["results"]) == {"choose", "write", "roll"}
    json.dumps(results, allow_nan=False)
    assert (results["context"], results["truncated"]) == (64, 0)
    scores = [loglikelihood(ZipLM(model, TOKENIZER), [(q, " sat"), (q, " on")]) for q in ("the cat", "the mat")]
    right = [np.argmax([score for score, _ in pair]) == a for pair, a in zip(scores, (0, 1), strict=True)]
    assert results["results"]["choose"]["acc,none"] == np.mean(right)
    texts = [f"{q} sat on the mat" for q in ("the cat", "the mat")]
    found = cut_scored_windows(TOKENIZER, [Document(text, "") for text in texts], 64)
    expected = measure_bits(model, found).bits_per_byte
    assert results["results"]["roll"]["bits_per_byte,none"] == pytest.approx(expected, abs=1e-4)


def test_the_figures_of_tasks_are_metrics_with_their_errors():
    metrics = {
        "alias": "t",
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,strict": 1,
        "exact_match_stderr,strict": "N/A",
    }
    rows = list_task_metrics({"results": {"t": metrics}})
    assert rows == [("t acc", 0.5, 0.1), ("t exact_match (strict)", 1.0, None)]


def test_an_unknown_task_is_an_error_that_names_it(tasks):
    with pytest.raises(DataError, match="knows no task nonesuch"):
        run_tasks(MODEL, TOKENIZER, ["choose", "nonesuch"], include_path=str(tasks))


def test_without_the_harness_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx_zip.evaluation.lm_eval_model")
    monkeypatch.delattr("mlx_zip.evaluation.lm_eval_model")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InstallationError, match=r"pip install -e '\.\[eval\]'"):
        run_tasks(MODEL, TOKENIZER, ["choose"])
