"""Generation on tiny random models: zip2zip ones, and plain mlx-lm ones as the base without hypertokens."""

import functools
import subprocess
import sys
from itertools import islice, zip_longest

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache, trim_prompt_cache

from mlx_zip.codec import Codebook, compress
from mlx_zip.engine.mlx.generate import batch_generate, generate, load, stream_batch, stream_generate
from mlx_zip.engine.mlx.group import Group
from mlx_zip.errors import GenerationError, MlxZipError
from mlx_zip.models.rows.zip_state import find_zip_state
from support import tiny
from support.command_line import WITHOUT_TORCH
from support.generating import ENDLESS, MODEL, PROMPT, TOKENIZER, ids, never_ending, plain_model, run, text
from support.places import SHARED
from support.slow_cases import slow_but

PARAMS = MODEL.config.codec_params
V = PARAMS.vocab_size
STORIES = SHARED / "models" / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="needs the larger shared data (models/stories260K)")


@functools.cache
def usual():
    """What `run` returns without options, generated once for all tests."""
    return tuple(run())


# ---- what is counted


def test_generation_emits_hypertokens_at_all():
    assert usual()[-1].hypertokens > 0


def test_base_ids_are_what_the_emitted_ids_expand_to():
    responses, book = usual(), Codebook(PARAMS)
    book.push(compress(PARAMS, PROMPT)[0])
    book.push(ids(responses))
    counted = [base_id for response in responses[:-1] for base_id in response.base_ids]
    assert counted == book.expand(ids(responses[:-1])).tolist()


def test_generation_tokens_are_base_tokens_and_steps_are_ids():
    responses = usual()
    last = responses[-1]
    assert (last.generation_tokens, last.steps) == (sum(len(r.base_ids) for r in responses), len(responses))


def test_the_prompt_is_counted_in_base_tokens_and_in_compressed_ids():
    first = run(max_tokens=1)[0]
    assert (first.prompt_tokens, first.prompt_ids) == (len(PROMPT), len(compress(PARAMS, PROMPT)[0]))


def test_hypertokens_and_bytes_add_up():
    responses = usual()
    hyper = sum(token >= V for token in ids(responses))
    assert (responses[-1].hypertokens, responses[-1].bytes) == (hyper, len(text(responses).encode()))


def test_shares_are_ratios_of_the_counts():
    last = usual()[-1]
    expected = (last.generation_tokens / last.steps, last.hypertokens / last.steps)
    assert (last.base_tokens_per_step, last.hyper_share) == expected


@pytest.mark.parametrize("limit", range(1, 12))
def test_exactly_max_tokens_base_tokens_are_generated_also_inside_a_hypertoken(limit):
    last = run(max_tokens=limit)[-1]
    assert (last.generation_tokens, last.finish_reason) == (limit, "length")


def test_only_the_last_response_has_a_finish_reason():
    assert [r.finish_reason for r in usual()[:-1]] == [None] * (len(usual()) - 1)


def test_greedy_ids_are_the_largest_logits_of_the_model_itself():
    cache, logits = MODEL.make_cache(), None
    feed, expected = compress(PARAMS, PROMPT)[0].tolist(), []
    for _ in range(12):
        logits = tiny.last_logits(MODEL, feed, cache)
        feed = [int(logits.argmax())]
        expected += feed
    assert ids(usual())[:12] == expected


def test_the_text_ends_at_an_eos_that_the_model_emits():
    emitted = next(r.token for r in usual() if r.token < V)
    tokenizer = never_ending()
    tokenizer._eos_token_ids = {emitted}
    last = run(tokenizer=tokenizer)[-1]
    assert (last.token, last.finish_reason, last.base_ids) == (emitted, "stop", (emitted,))


def test_stop_strings_are_not_part_of_the_text():
    whole = text(usual())
    middle = whole[len(whole) // 2 : len(whole) // 2 + 2]
    assert text(run(stop=middle)) == whole[: whole.index(middle)]


# ---- the loop's options


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_ids_do_not_depend_on_how_the_prefill_is_cut(chunk):
    assert ids(run(prefill_step_size=chunk)) == ids(usual())


def test_the_same_seed_gives_the_same_ids():
    assert ids(run(temp=1.0, seed=3, max_tokens=20)) == ids(run(temp=1.0, seed=3, max_tokens=20))


def test_another_seed_gives_other_ids():
    assert ids(run(temp=1.0, seed=3, max_tokens=20)) != ids(run(temp=1.0, seed=4, max_tokens=20))


def test_a_sampler_of_ones_own_is_used():
    assert set(ids(run(sampler=lambda logprobs: mx.array([5])))) == {5}


def test_a_sampler_together_with_sampling_options_is_refused():
    with pytest.raises(GenerationError, match="temp"):
        run(sampler=lambda logprobs: mx.array([5]), temp=0.5)


def test_logits_processors_of_ones_own_are_applied():
    assert ids(run(logits_processors=[lambda _, logits: logits.at[:, 9].add(1e6)], max_tokens=3)) == [9, 9, 9]


def test_a_forbidden_base_token_does_not_come_back_inside_a_hypertoken():
    emitted = [b for r in usual() for b in r.base_ids]
    most = max(emitted, key=emitted.count)
    assert most not in {b for r in run(logit_bias={most: -1e6}) for b in r.base_ids}


def test_progress_reaches_the_number_of_compressed_ids():
    calls = []
    run(prompt_progress_callback=lambda done, total: calls.append((done, total)), prefill_step_size=8)
    total = len(compress(PARAMS, PROMPT)[0])
    assert calls[-1] == (total, total)


def test_kv_quantization_runs_on_a_zip_model():
    model = tiny.tiny_model(hidden=128)  # heads 32 wide
    cache = model.make_cache()
    run(model, prompt_cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert isinstance(cache[0], QuantizedKVCache)


# ---- caches


def test_a_second_turn_goes_on_from_the_first_ones_codebook():
    cache = MODEL.make_cache()
    run(prompt_cache=cache)
    book = find_zip_state(cache).books[0].copy()
    first = run(prompt_cache=cache, max_tokens=1)[0]
    assert first.prompt_ids == len(book.compress(PROMPT))


def test_after_generation_the_cache_holds_the_prompt_and_every_emitted_id():
    cache = MODEL.make_cache()
    emitted = ids(run(prompt_cache=cache))
    assert find_zip_state(cache).books[0].ids.tolist() == [*compress(PARAMS, PROMPT)[0].tolist(), *emitted]


def test_trimming_a_turn_away_brings_back_its_ids():
    cache = MODEL.make_cache()
    run(prompt_cache=cache)
    length = len(find_zip_state(cache).books[0].ids)
    first = ids(run(prompt=PROMPT[:20], prompt_cache=cache))
    trim_prompt_cache(cache, len(find_zip_state(cache).books[0].ids) - length)
    assert ids(run(prompt=PROMPT[:20], prompt_cache=cache)) == first


def test_two_interleaved_conversations_equal_two_separate_ones():
    other = tiny.base_ids(40, seed=9)
    separate = ids(usual()), ids(run(prompt=other))
    streams = (stream_generate(MODEL, ENDLESS, p, max_tokens=40) for p in (PROMPT, other))
    woven = list(zip_longest(*streams))
    assert tuple([r.token for r in column if r] for column in zip(*woven, strict=True)) == separate


def test_a_cache_of_another_kind_of_model_is_refused():
    with pytest.raises(GenerationError, match="not made for this model"):
        run(prompt_cache=make_prompt_cache(plain_model()))


# ---- requests that cannot be met


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [3, V]}, f"prompt id {V} at index 1"),
        ({"prompt": [-1]}, "prompt id -1"),
        ({"prompt": [3] * 10_000}, "the model's context has 512"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"max_tokens": -2}, "--max-tokens"),
        ({"max_tokens": 1.5}, "--max-tokens"),
        ({"max_tokens": float("nan")}, "--max-tokens"),
        ({"max_tokens": None}, "--max-tokens"),
        ({"prefill_step_size": 0}, "--prefill-step-size"),
        ({"kv_bits": 7}, "--kv-bits"),
        ({"kv_bits": 4, "kv_group_size": 48}, "--kv-group-size"),
        ({"kv_bits": 4, "kv_group_size": 64}, "does not divide the head width 16"),
        ({"top_k": 10_000}, "--top-k"),
        ({"stop": [""]}, "--stop"),
        ({"stop": 5}, "--stop"),
        ({"stop": [5]}, "--stop"),
        ({"stop": b"a"}, "--stop"),
        ({"prefill_step_size": 1.5}, "--prefill-step-size"),
        ({"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": "a"}, "--quantized-kv-start"),
        ({"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": -1}, "--quantized-kv-start"),
        ({"prompt": [{"role": "user", "content": "a"}, None]}, "list of messages"),
        ({"sampler": 5}, "sampler: 5 is no function"),
        ({"logits_processors": [5]}, "logits_processors"),
        ({"tokenizer": None}, "not NoneType"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(options, named):
    cache = MODEL.make_cache()
    with pytest.raises(GenerationError, match=named):
        stream_generate(MODEL, **{"tokenizer": ENDLESS, "prompt": PROMPT, "prompt_cache": cache, **options})
    assert find_zip_state(cache).offset == 0


def test_what_is_no_list_of_entries_is_refused_as_a_cache():
    with pytest.raises(GenerationError, match="not made for this model"):
        stream_generate(MODEL, ENDLESS, PROMPT, prompt_cache=5)


def test_a_bare_tokenizer_of_transformers_gives_the_text_of_the_wrapped_one():
    options = {"max_tokens": 20, "temp": 1.0, "seed": 4}
    assert generate(MODEL, TOKENIZER._tokenizer, PROMPT, **options) == generate(MODEL, TOKENIZER, PROMPT, **options)


def test_a_prompt_that_only_fits_compressed_is_taken():
    prompt = [3, 4, 5, 6] * 130
    assert len(prompt) > 512
    assert run(prompt=prompt, max_tokens=1)[0].prompt_ids < 512


def test_generation_ends_where_the_context_ends():
    prompt = np.random.default_rng(0).integers(3, V, 500).tolist()
    left = 512 - len(compress(PARAMS, prompt)[0])
    last = run(prompt=prompt, max_tokens=-1)[-1]
    assert (last.steps, last.finish_reason) == (left, "length")


def test_with_base_token_positions_the_context_is_counted_in_base_tokens():
    model = tiny.tiny_model(position_mode="base_token_end")
    last = run(model, prompt=tiny.base_ids(480), max_tokens=-1)[-1]
    assert (last.generation_tokens, last.finish_reason) == (32, "length")


def test_with_base_token_positions_a_prompt_is_too_long_by_its_base_tokens():
    model = tiny.tiny_model(position_mode="base_token_end")
    with pytest.raises(GenerationError, match="takes 520 positions"):
        run(model, prompt=[3, 4, 5, 6] * 130)


# ---- batches

PROMPTS = [PROMPT, tiny.base_ids(23, seed=1), tiny.base_ids(7, seed=2)]


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_batched_rows_give_the_text_of_the_prompts_alone(mode):
    model = tiny.tiny_model(position_mode=mode)
    alone = [generate(model, ENDLESS, prompt, max_tokens=18) for prompt in PROMPTS]
    assert batch_generate(model, ENDLESS, PROMPTS, max_tokens=18) == alone


def test_batched_rows_of_a_plain_model_give_the_text_of_the_prompts_alone():
    model = plain_model()
    alone = [generate(model, ENDLESS, prompt, max_tokens=20) for prompt in PROMPTS]
    assert batch_generate(model, ENDLESS, PROMPTS, max_tokens=20) == alone


def test_a_batch_may_be_prefilled_in_chunks():
    whole = batch_generate(MODEL, ENDLESS, PROMPTS, max_tokens=12)
    for chunk in (1, 5):
        assert batch_generate(MODEL, ENDLESS, PROMPTS, max_tokens=12, prefill_step_size=chunk) == whole


def test_a_row_that_has_ended_does_not_end_or_disturb_the_others():
    stop = generate(MODEL, ENDLESS, PROMPTS[0], max_tokens=20)[:3]
    alone = [generate(MODEL, ENDLESS, prompt, max_tokens=20, stop=stop) for prompt in PROMPTS]
    assert batch_generate(MODEL, ENDLESS, PROMPTS, max_tokens=20, stop=stop) == alone


def test_a_row_that_has_ended_leaves_the_batch(monkeypatch):
    sizes, launch = [], Group.launch_pass

    def noting(group):
        launch(group)
        sizes.append((len(find_zip_state(group.cache).books), group.cache[0].keys.shape[0]))

    stop = generate(MODEL, ENDLESS, PROMPTS[0], max_tokens=30)[:3]
    monkeypatch.setattr(Group, "launch_pass", noting)
    rows = [row for row, _ in stream_batch(MODEL, ENDLESS, PROMPTS, max_tokens=30, stop=stop)]
    assert (len(PROMPTS), len(PROMPTS)) in sizes
    assert all(books == kv for books, kv in sizes)
    assert sizes[sizes.index((len(PROMPTS),) * 2) :] == sorted(sizes[sizes.index((len(PROMPTS),) * 2) :], reverse=True)
    last = max(at for at, row in enumerate(rows) if row == 0)
    assert 0 not in rows[last + 1 :]
    assert sum(books for books, _ in sizes) <= len(rows) + len(PROMPTS)  # a row takes at most one step after its end


def test_penalties_in_a_batch_are_those_of_each_row():
    options = {"max_tokens": 15, "repetition_penalty": 1.5, "frequency_penalty": 0.3}
    alone = [generate(MODEL, ENDLESS, prompt, **options) for prompt in PROMPTS]
    assert batch_generate(MODEL, ENDLESS, PROMPTS, **options) == alone


@pytest.mark.parametrize("prompts", [[], "one text", None, 5, np.array([[5, 6], [7, 8]])])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(GenerationError, match="no prompts"):
        batch_generate(MODEL, ENDLESS, prompts)


# ---- plain models


@pytest.mark.parametrize("options", [{}, {"max_tokens": 7}])
def test_a_plain_model_says_what_mlx_lm_makes_it_say(options):
    model = plain_model()
    options = {"max_tokens": 25, **options}
    theirs = "".join(r.text for r in mlx_stream_generate(model, ENDLESS, PROMPT, **options))
    assert text(run(model, **options)) == theirs


def test_a_plain_model_takes_a_step_per_base_token():
    last = run(plain_model())[-1]
    assert (last.steps, last.hypertokens, last.prompt_ids) == (last.generation_tokens, 0, len(PROMPT))


def test_a_plain_models_penalties_are_those_of_mlx_lm():
    from mlx_lm.sample_utils import make_logits_processors

    model, options = plain_model(), {"repetition_penalty": 1.4, "presence_penalty": 0.2}
    theirs = mlx_stream_generate(
        model, ENDLESS, PROMPT, max_tokens=20, logits_processors=make_logits_processors(**options)
    )
    assert ids(run(model, max_tokens=20, **options)) == [r.token for r in theirs]


@needs_stories
def test_a_small_story_model_tells_its_story():
    model, tokenizer = load(STORIES)
    story = generate(model, tokenizer, "Once upon a time", max_tokens=20)
    assert story.startswith(", there was a little girl named Lily.")


# ---- the package


FIRST = ["import mlx_zip.engine.mlx.generate", "from mlx_zip import load", "import mlx_zip"]


@pytest.mark.parametrize("first", slow_but(FIRST, "import mlx_zip"))
def test_the_packages_generate_is_the_function_whatever_was_imported_first(first):
    code = f"{WITHOUT_TORCH}{first}\nimport mlx_zip, types\nassert isinstance(mlx_zip.generate, types.FunctionType)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


def test_verbose_prints_the_text_between_rules_and_the_figures(capsys):
    said = generate(MODEL, ENDLESS, PROMPT, verbose=True, max_tokens=5)
    assert capsys.readouterr().out.startswith(f"==========\n{said}\n==========\nPrompt: {len(PROMPT)} tokens, ")


def test_a_stream_can_be_left_early():
    left = MODEL.make_cache()
    made = [r.token for r in islice(stream_generate(MODEL, ENDLESS, PROMPT, prompt_cache=left), 3)]
    straight = MODEL.make_cache()
    MODEL(mx.array([[*left[-1].books[0].ids.tolist()]]), cache=straight)
    assert left[-1].books[0].ids.tolist()[-3:] == made
    assert [r.token for r in run(prompt_cache=left, max_tokens=3)] == [
        r.token for r in run(prompt_cache=straight, max_tokens=3)
    ]


def test_every_error_is_of_the_one_family():
    with pytest.raises(MlxZipError):
        run(prompt="")
