"""The `mlx_zip` command, in process: parse, call, print."""

import io
import json
import re
import subprocess
import sys

import pytest
from mlx_lm.generate import setup_arg_parser

import mlx_zip.engine.mlx.generate
from mlx_zip import cli
from mlx_zip.cli import colours, generation
from mlx_zip.cli.generation_flags import RefusedFlag
from mlx_zip.engine.mlx.generate import GenerationResponse, load, stream_generate
from support import tiny_text
from support.cli_cases import MODEL, PROMPT, expected, generate_command, raw, stdin
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
    return generate_command(capsys, model)


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
    assert colours.should_colour(choice, out) is coloured


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
    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "stream_generate", interrupted)
    status, out, _ = run(*raw())
    assert (status, out.startswith("==========\nhalf a sent\n==========\nPrompt: 1 tokens")) == (130, True)


def test_ctrl_c_is_named_in_json(run, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "stream_generate", interrupted)
    record = json.loads(run(*raw("--json"))[1])
    assert (record["text"], record["finish_reason"]) == ("half a sent", "interrupted")


def test_ctrl_c_while_loading_ends_without_a_traceback(run, monkeypatch):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "load", load)
    assert run(*raw()) == (130, "", "")


# ---- flags


def test_every_flag_of_mlx_lm_generate_is_known_with_its_default():
    ours = {a.dest: a for a in cli.command_parser("generate", "x")._actions}
    theirs = [a for a in setup_arg_parser()._actions if not isinstance(ours.get(a.dest), RefusedFlag)]
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


@pytest.mark.parametrize("module", ["argparse", "mlx_zip.files", "mlx_zip.device"])
def test_ctrl_c_while_the_command_line_itself_is_imported_is_no_traceback(module):
    code = "import sys\nclass Interrupting:\n"
    code += f"    def find_spec(self, name, *_):\n        if name == {module!r}:\n            raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Interrupting())\nfrom mlx_zip.cli import main\nsys.exit(main(['agent', 'list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
