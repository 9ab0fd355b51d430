"""A bad request is one line on stderr and status 2."""

import io
import sys

import pytest

from mlx_zip import cli
from support import tiny_text
from support.cli_cases import MODEL, generate_command, raw, stdin

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model():
    return str(tiny_text.converted(MODEL))


@pytest.fixture
def run(capsys, model):
    return generate_command(capsys, model)


@pytest.mark.skipif(sys.platform == "darwin", reason="there MLX has one flavour")
def test_without_mlx_one_line_says_what_to_install(run, monkeypatch):
    def load(*_, **__):
        raise ModuleNotFoundError("No module named 'mlx'", name="mlx")

    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "load", load)
    status, _, err = run(*raw())
    assert (status, err.count("\n"), "pip install -e '.[cpu]'" in err) == (2, 1, True)


def test_mlx_without_a_gpu_driver_is_one_line_that_names_what_is_missing(run, monkeypatch):
    def load(*_, **__):
        raise ImportError("libcuda.so.1: cannot open shared object file", name="mlx.core")

    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "load", load)
    status, _, err = run(*raw())
    assert (status, err.count("\n"), err[:7]) == (2, 1, "error: ")
    assert "MLX is installed but cannot be loaded (libcuda.so.1" in err


@pytest.mark.parametrize("flags", [["--text", "a.txt"], ["--length", "0"]])
def test_a_bench_that_cannot_run_is_one_line(flags, capsys):
    assert cli.main(["bench", "codec", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flags[0]} ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-kv-size", 512], "--max-kv-size cannot be used"),
        (["--max-kv-size", 0], "--max-kv-size cannot be used"),
        (["--prompt", "a\udcff"], "the prompt is not valid Unicode at character 1"),
        (["--system-prompt", "a\udcff"], "the rendered conversation is not valid Unicode"),
        (["--logit-bias", '{"²": 1}'], "--logit-bias"),
        (["--extra-eos-token", "①"], "--extra-eos-token"),
        (["--draft-model", "nowhere/at/all"], "nowhere/at/all"),
        (["--draft-model", ""], "the name of the model is empty"),
        (["--num-draft-tokens", 0], "num_draft_tokens (--num-draft-tokens) must be an integer from 1 to 15, got 0"),
        (["--num-draft-tokens", 10_000], "num_draft_tokens (--num-draft-tokens)"),
        (["--image", "a.png"], "--image cannot be used"),
        (["-qa"], "--quantize-activations cannot be used"),
        (["--prompt", ""], "the prompt is empty"),
        (["--max-tokens", 0], "--max-tokens"),
        (["--top-k", 100_000], "--top-k"),
        (["--temp", -1], "--temp"),
        (["--stop", ""], "--stop"),
        (["--kv-bits", 9], "--kv-bits"),
        (["--codebook-size", -1], "codebook_size (--codebook-size) must be from 0 to 1048576, got -1"),
        (["--logit-bias", "{"], "--logit-bias is not valid JSON"),
        (["--logit-bias", "[1]"], "--logit-bias must be a JSON map"),
        (["--logit-bias", '{"a": 1}'], "--logit-bias"),
        (["--logit-bias", '{"1": 1' + "0" * 400 + "}"], "--logit-bias: a number is too long"),
        (["--logit-bias", "[" * 100_000], "--logit-bias is not valid JSON"),
        (["--logit-bias", '{"1": 1e30}', "--engine", "torch", "--model", "/no/such"], "--logit-bias"),
        (["--chat-template-config", '{"messages": 1}'], "--chat-template-config: messages cannot be set"),
        (["--chat-template-config", '{"tools": 5}'], "the chat template cannot render"),
        (["--repetition-penalty", 2, "--repetition-context-size", 10**23], "--repetition-context-size"),
        (["--extra-eos-token", "9" * 5000], "--extra-eos-token"),
        (["--revision", "main"], "revision (--revision) main does not apply"),
        (["--chat-template-config", "nope"], "--chat-template-config is not valid JSON"),
        (["--chat-template-config", '{"a": 1, "think": False}'], 'the value of "think"'),
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
    assert capsys.readouterr().err == "error: the name of the model is empty\n"


def test_without_a_model_the_bundled_one_is_meant(run, monkeypatch, tmp_path):
    monkeypatch.setattr("mlx_zip.named.FOLDER", tmp_path)
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
