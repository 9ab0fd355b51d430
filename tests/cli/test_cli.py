"""The `mlx_zip` command, in process: parse, call, print."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

import mlx_zip.generate
from mlx_zip import cli
from mlx_zip.cli import colours, generation
from mlx_zip.generate import GenerationResponse, load, stream_generate
from support import tiny_text
from support.cli_cases import MODEL, PROMPT
from support.places import GOLDEN_MODELS

pytestmark = pytest.mark.usefixtures("home")

FOOTER = re.compile(
    r"Prompt: \d+ tokens, [\d.]+ tokens-per-sec\n"
    r"Generation: (\d+) tokens, [\d.]+ tokens-per-sec\n"
    r"Peak memory: \d+\.\d{3} GB\n"
    r"Hypertokens: \1 base tokens in \d+ steps \([\d.]+ per step\), [\d.]+% of steps hypertokens; "
    r"prompt \d+ base tokens in \d+ ids\n$"
)


@pytest.fixture
def model():
    return str(tiny_text.converted(MODEL))


@pytest.fixture
def run(capsys, model):
    """Runs `mlx_zip generate` -> (status, stdout, stderr)."""

    def generate(*flags, command="generate", name=model):
        with_model = ["--model", name] if command == "generate" and name else []
        status = cli.main([command, *with_model, *map(str, flags)])
        return (status, *capsys.readouterr())

    return generate


def raw(*flags):
    """Flags for a plain continuation of PROMPT, without the chat template."""
    return ("--prompt", PROMPT, "--ignore-chat-template", "--max-tokens", 30, *flags)


def expected(model, **options):
    loaded, tokenizer = load(model)
    return "".join(r.text for r in stream_generate(loaded, tokenizer, PROMPT, **{"max_tokens": 30, **options}))


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# ---- what generate prints


def test_the_text_stands_between_two_rules(run, model):
    _, out, _ = run(*raw())
    assert out.startswith(f"==========\n{expected(model)}\n==========\n")


def test_three_footer_lines_as_in_mlx_lm_and_one_of_ours_follow(run):
    assert FOOTER.search(run(*raw())[1])


def test_success_is_status_0_and_nothing_on_stderr(run):
    status, _, err = run(*raw())
    assert (status, err) == (0, "")


def test_verbose_false_prints_only_the_text(run, model):
    assert run(*raw("--verbose", "False"))[1] == expected(model) + "\n"


def test_json_prints_one_object_with_the_text_and_the_counts(run, model):
    record = json.loads(run(*raw("--json"))[1])
    assert record["text"] == expected(model)
    assert record["generation_tokens"] == 30


def test_a_plain_model_works_in_the_same_command(run):
    record = json.loads(run(*raw("--json"), name=str(GOLDEN_MODELS / MODEL / "base"))[1])
    assert (record["hypertokens"], record["steps"]) == (0, 30)


def test_the_chat_template_is_applied_when_there_is_one(run):
    with_template = json.loads(run("--prompt", PROMPT, "-m", 1, "--json")[1])
    without = json.loads(run(*raw("--json"))[1])
    assert with_template["prompt_tokens"] > without["prompt_tokens"]


def test_a_system_prompt_and_a_prefilled_response_enter_the_template(run):
    short = json.loads(run("--prompt", "a", "-m", 1, "--json")[1])
    flags = ("--prompt", "a", "-m", 1, "--json", "--system-prompt", "Be brief.", "--prefill-response", "Well")
    assert json.loads(run(*flags)[1])["prompt_tokens"] > short["prompt_tokens"]


def test_sampling_flags_reach_the_sampler(run, model):
    record = json.loads(run(*raw("--json", "--temp", 1.5, "--seed", 7, "--top-p", 0.9))[1])
    assert record["text"] == expected(model, temp=1.5, seed=7, top_p=0.9)


def test_penalty_flags_reach_the_penalties(run, model):
    record = json.loads(run(*raw("--json", "--frequency-penalty", 1.5, "--logit-bias", '{"7": -3}'))[1])
    assert record["text"] == expected(model, frequency_penalty=1.5, logit_bias={7: -3.0})


def test_a_stop_string_ends_the_text(run, model):
    whole = expected(model)
    stop = whole[5:8]
    assert json.loads(run(*raw("--json", "--stop", stop))[1])["text"] == whole[: whole.index(stop)]


def test_an_extra_eos_token_ends_the_text(run, model):
    loaded, tokenizer = load(model)
    second = list(stream_generate(loaded, tokenizer, PROMPT, max_tokens=30))[1].base_ids[0]
    assert json.loads(run(*raw("--json", "--extra-eos-token", second))[1])["finish_reason"] == "stop"


def test_written_out_newlines_are_replaced_as_in_mlx_lm():
    assert generation.read_prompt("a\\nb\\tc") == "a\nb\tc"


def test_a_dash_reads_the_prompt_from_standard_input(run, monkeypatch):
    given = run(*raw("--json"))[1]
    stdin(monkeypatch, PROMPT.encode())
    read = run(*raw("--json"), "--prompt", "-")[1]
    assert json.loads(read)["text"] == json.loads(given)["text"]


# ---- colour


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("choice", "out", "no_color", "coloured"),
    [
        ("auto", Terminal(), "", True),
        ("auto", Terminal(), "1", False),
        ("auto", io.StringIO(), "", False),
        ("always", io.StringIO(), "1", True),
        ("never", Terminal(), "", False),
    ],
)
def test_colour_is_for_terminals_and_yields_to_no_color(choice, out, no_color, coloured, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    assert colours.coloured(choice, out) is coloured


def test_colour_changes_nothing_but_the_colour(run, model):
    painted = run(*raw("--color", "always", "--verbose", "False"))[1]
    assert "\x1b[36m" in painted
    assert re.sub(r"\x1b\[\d+m", "", painted) == expected(model) + "\n"


def test_a_pipe_gets_no_colour(run):
    assert "\x1b" not in run(*raw())[1]


# ---- Ctrl-C


def response(text, **changes):
    figures = dict.fromkeys(("prompt_tokens", "prompt_ids", "generation_tokens", "steps", "hypertokens", "bytes"), 1)
    rates = {"prompt_tps": 1.0, "generation_tps": 1.0, "peak_memory": 0.0}
    return GenerationResponse(text=text, token=3, base_ids=(3,), logprobs=None, **figures, **rates, **changes)


def interrupted(*_, **__):
    yield response("half a ")
    yield response("sent")
    raise KeyboardInterrupt


def test_ctrl_c_ends_with_what_was_generated_and_the_footer(run, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_zip.generate"], "stream_generate", interrupted)
    status, out, _ = run(*raw())
    assert (status, out.startswith("==========\nhalf a sent\n==========\nPrompt: 1 tokens")) == (130, True)


def test_ctrl_c_is_named_in_json(run, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_zip.generate"], "stream_generate", interrupted)
    record = json.loads(run(*raw("--json"))[1])
    assert (record["text"], record["finish_reason"]) == ("half a sent", "interrupted")


def test_ctrl_c_while_loading_ends_without_a_traceback(run, monkeypatch):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mlx_zip.generate"], "load", load)
    assert run(*raw()) == (130, "", "")


# ---- bad requests: one line on stderr, status 2


@pytest.mark.skipif(sys.platform == "darwin", reason="there MLX has one flavour")
def test_without_mlx_one_line_says_what_to_install(run, monkeypatch):
    def load(*_, **__):
        raise ModuleNotFoundError("No module named 'mlx'", name="mlx")

    monkeypatch.setattr(sys.modules["mlx_zip.generate"], "load", load)
    status, _, err = run(*raw())
    assert (status, err.count("\n"), "pip install -e '.[cpu]'" in err) == (2, 1, True)


def test_mlx_without_a_gpu_driver_is_one_line_that_names_what_is_missing(run, monkeypatch):
    def load(*_, **__):
        raise ImportError("libcuda.so.1: cannot open shared object file", name="mlx.core")

    monkeypatch.setattr(sys.modules["mlx_zip.generate"], "load", load)
    status, _, err = run(*raw())
    assert (status, err.count("\n"), err[:7]) == (2, 1, "error: ")
    assert "MLX is installed but cannot be loaded (libcuda.so.1" in err


@pytest.mark.parametrize("flags", [["--text", "a.txt"], ["--ids", "/no/such.npy"], ["--length", "0"]])
def test_a_bench_that_cannot_run_is_one_line(flags, capsys):
    assert cli.main(["bench", "codec", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flags[0]} ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-kv-size", 512], "--max-kv-size cannot be used"),
        (["--max-kv-size", 0], "--max-kv-size cannot be used"),
        (["--prompt", "a\udcff"], "not valid Unicode"),
        (["--logit-bias", '{"²": 1}'], "--logit-bias"),
        (["--extra-eos-token", "①"], "--extra-eos-token"),
        (["--draft-model", "x"], "--draft-model cannot be used"),
        (["--num-draft-tokens", 3], "--num-draft-tokens cannot be used"),
        (["--image", "a.png"], "--image cannot be used"),
        (["-qa"], "--quantize-activations cannot be used"),
        (["--prompt", ""], "the prompt is empty"),
        (["--max-tokens", 0], "--max-tokens"),
        (["--top-k", 100_000], "--top-k"),
        (["--temp", -1], "--temp"),
        (["--stop", ""], "--stop"),
        (["--kv-bits", 9], "--kv-bits"),
        (["--logit-bias", "{"], "--logit-bias is not valid JSON"),
        (["--logit-bias", "[1]"], "--logit-bias must be a JSON map"),
        (["--logit-bias", '{"a": 1}'], "--logit-bias"),
        (["--logit-bias", '{"1": 1' + "0" * 400 + "}"], "--logit-bias: a number is too long"),
        (["--logit-bias", "[" * 100_000], "--logit-bias is not valid JSON"),
        (["--chat-template-config", '{"messages": 1}'], "--chat-template-config: messages cannot be set"),
        (["--chat-template-config", '{"tools": 5}'], "the chat template cannot render"),
        (["--repetition-penalty", 2, "--repetition-context-size", 10**23], "--repetition-context-size"),
        (["--extra-eos-token", "9" * 5000], "--extra-eos-token"),
        (["--revision", "main"], "revision (--revision) main does not apply"),
        (["--chat-template-config", "nope"], "--chat-template-config is not valid JSON"),
        (["--extra-eos-token", "<|nonesuch|>"], "--extra-eos-token"),
        (["--ignore-chat-template", "--system-prompt", "a"], "--system-prompt needs a chat template"),
        (["--prompt-cache-file", "/no/such"], "--prompt-cache-file /no/such: no such file"),
        (["--prompt", "word " * 3000], "context has 1024"),
    ],
)
def test_a_bad_request_is_one_line_that_names_the_flag(run, flags, named):
    status, _, err = run(*flags)
    assert (status, err.count("\n"), err.startswith("error: "), named in err) == (2, 1, True, True)


@pytest.mark.parametrize("stream", ["stdout", "stdin"])
def test_closed_streams_are_no_crash(stream, run, monkeypatch, model):
    monkeypatch.setattr(sys, stream, None)
    status = cli.main(["generate", "--model", model, "--prompt", "-" if stream == "stdin" else "a", "-m", "2"])
    assert status == (2 if stream == "stdin" else 0)


def test_output_that_cannot_be_written_is_one_line(monkeypatch, capsys, model):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    status = cli.main(["generate", "--model", model, "--prompt", "a", "-m", "2"])
    assert (status, capsys.readouterr().err) == (2, "error: No space left on device\n")


def test_an_error_cannot_steer_the_terminal(run):
    assert run(name="\x1b[2Jevil")[2].startswith("error: \\x1b[2Jevil: no such model folder")


def test_an_empty_model_name_is_no_model(capsys):
    assert cli.main(["generate", "--model", ""]) == 2
    assert capsys.readouterr().err.startswith("error: no model")


def test_without_a_model_the_bundled_one_is_meant(run, monkeypatch, tmp_path):
    monkeypatch.setattr("mlx_zip.bundled.FOLDER", tmp_path)
    status, _, err = run(name=None)
    assert (status, err.startswith("error: the bundled model stories is not in this installation")) == (2, True)


def test_a_model_that_does_not_exist_is_named(run):
    status, _, err = run(name="/no/such/model")
    assert (status, err.startswith("error: /no/such/model: no such model folder")) == (2, True)


def test_standard_input_that_is_not_utf8_is_refused(run, monkeypatch):
    stdin(monkeypatch, b"abc\xff")
    assert run("--prompt", "-")[::2] == (2, "error: standard input is not valid UTF-8 at byte 3\n")


def test_empty_standard_input_is_refused(run, monkeypatch):
    stdin(monkeypatch, b"")
    assert "the prompt is empty" in run("--prompt", "-")[2]


# ---- saved prompt caches


@pytest.fixture
def cache_file(tmp_path, model):
    loaded, tokenizer = load(model)
    cache = loaded.make_cache()
    list(stream_generate(loaded, tokenizer, PROMPT, prompt_cache=cache, max_tokens=1))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": model, "tokenizer_config": "{}"})
    return file


def test_a_saved_cache_brings_its_model_and_the_prompt_goes_on_from_it(run, cache_file, model):
    loaded, tokenizer = load(model)
    responses = stream_generate(
        loaded, tokenizer, " The dog.", prompt_cache=load_prompt_cache(cache_file), max_tokens=20
    )
    flags = ("--prompt", " The dog.", "--ignore-chat-template", "-m", 20, "--verbose", "F")
    assert run(*flags, "--prompt-cache-file", cache_file, name=None)[1] == "".join(r.text for r in responses) + "\n"


def test_with_a_saved_cache_only_the_message_and_what_follows_it_is_read(run, cache_file):
    whole = json.loads(run("--prompt", "a", "-m", 1, "--json")[1])
    rest = json.loads(run("--prompt", "a", "-m", 1, "--json", "--prompt-cache-file", cache_file)[1])
    assert rest["prompt_tokens"] < whole["prompt_tokens"]


def test_generating_does_not_change_the_cache_file(run, cache_file):
    before = Path(cache_file).read_bytes()
    run(*raw("--prompt-cache-file", cache_file))
    assert Path(cache_file).read_bytes() == before


def test_another_model_than_the_caches_is_refused(run, cache_file):
    base = str(GOLDEN_MODELS / MODEL / "base")
    assert "is not the model that made the prompt cache" in run("--prompt-cache-file", cache_file, name=base)[2]


def test_a_file_that_is_no_cache_is_refused(run, tmp_path):
    (tmp_path / "x").write_bytes(b"\x00" * 100)
    status, _, err = run("--prompt-cache-file", tmp_path / "x")
    assert (status, "is not a saved prompt cache" in err) == (2, True)


# ---- flags


def test_every_flag_of_mlx_lm_generate_is_known_with_its_default():
    ours = {a.dest: a for a in cli.command_parser("generate", "x")._actions}
    theirs = [a for a in setup_arg_parser()._actions if a.dest not in generation.REFUSED]
    wrong = [a.dest for a in theirs if a.dest not in ours or ours[a.dest].option_strings != a.option_strings]
    assert wrong == []
    assert [a.dest for a in theirs if ours[a.dest].default != a.default] == []


def test_flags_of_mlx_lm_generate_that_cannot_work_are_known_too():
    ours = {flag for a in cli.command_parser("generate", "x")._actions for flag in a.option_strings}
    assert {flag for a in setup_arg_parser()._actions for flag in a.option_strings} <= ours


@pytest.mark.parametrize("entry", [cli.generate, cli.convert])
def test_the_dotted_commands_are_the_same_commands(entry, capsys):
    with pytest.raises(SystemExit):
        entry(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: mlx_zip.{entry.__name__} ")


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"mlx_zip {mlx_zip.__version__}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_defaults_and_the_meaning_of_colours(model, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.main(["generate", "--model", str(model), "-m", "4"]) == 0
    told = capsys.readouterr().err
    assert "prompt 'hello' (choose with --model and --prompt)" in told
    lengths = "\x1b[36m2\x1b[0m, \x1b[32m3\x1b[0m, \x1b[33m4\x1b[0m, \x1b[35m5 or more\x1b[0m"
    assert f"one step for {lengths} base tokens" in told


def test_an_adapter_as_training_saves_it_names_the_command_that_merges_it(run, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    status, _, err = run("--adapter-path", tmp_path)
    assert (status, err.count("\n")) == (2, 1)
    assert f"mlx_zip convert --hf-path {tmp_path} --mlx-path OUT" in err
    status, _, err = run("--adapter-path", tmp_path / "none")
    assert (status, "is no folder with an adapter_config.json" in err) == (2, True)


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "command_parser", interrupted)
    assert (cli.main(["train"]), capsys.readouterr().err) == (130, "")
