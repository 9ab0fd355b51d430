"""--engine: which one runs, what is missing for it, and which flags it cannot use; each told in one line."""

import argparse
import json
import os
import subprocess
import sys
import types

import pytest

from mlx_zip.cli import command_parser, engine_choice, main
from mlx_zip.cli.serving.opening import open_chosen_engine
from mlx_zip.errors import EngineError, GenerationError
from support.serving import MISSING

needs_torch = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
WITHOUT_MLX = ("mlx", "mlx_lm")
WITHOUT_TORCH = ("torch", "triton")
SHORT = ("generate", "--prompt", "Once upon a time", "--max-tokens", "9", "--verbose", "False")


def run(*args, missing=(), device="cpu", typed="", **environment):
    """Runs the command in a process in which some libraries cannot be imported."""
    code = f"import os, sys\nfor name in {missing!r}: sys.modules[name] = None\n"
    code += f"os.environ['MLX_ZIP_DEVICE'] = {device!r}\nfrom mlx_zip.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=300,
        input=typed,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def told_here(capsys, monkeypatch):
    """Gives a function that runs a command in this process, which must refuse it -> the one line that says why."""
    monkeypatch.setenv("MLX_ZIP_DEVICE", "cpu")

    def told(*words):
        assert main(list(words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return told


@pytest.fixture
def said_here(capfd, monkeypatch):
    """Gives a function that runs a command in this process -> (exit status, standard output, standard error)."""
    monkeypatch.setenv("MLX_ZIP_DEVICE", "cpu")

    def said(*words):
        status = main(list(words))
        return status, *capfd.readouterr()

    return said


@pytest.mark.slow
@needs_torch
def test_a_machine_without_mlx_generates_the_same_text(said_here):
    expected = said_here(*SHORT)
    got = run(*SHORT, "--engine", "cuda", missing=WITHOUT_MLX)
    assert (got.returncode, got.stdout) == expected[:2]
    assert len(got.stdout) > 20


@pytest.mark.slow
@needs_torch
def test_without_mlx_the_other_engine_is_taken_and_named(said_here):
    expected = said_here(*SHORT)
    got = run(*SHORT, missing=WITHOUT_MLX)
    assert (got.returncode, got.stdout) == expected[:2]
    assert got.stderr == "engine: torch, because MLX is not installed\n"


@pytest.mark.parametrize("command", [SHORT, pytest.param(("serve",), marks=pytest.mark.slow)])
def test_without_both_the_message_names_all_ways_to_go_on(command):
    done = run(*command, missing=(*WITHOUT_MLX, *WITHOUT_TORCH))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "MLX is not installed" in line
    assert "--engine cuda" in line
    assert "--engine torch" in line


@pytest.mark.parametrize(("engine", "libraries"), [("cuda", "torch, triton"), ("torch", "torch")])
def test_without_pytorch_the_message_says_what_to_install(engine, libraries):
    done = run(*SHORT, "--engine", engine, missing=WITHOUT_TORCH)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--engine {engine} needs {libraries}, which" in line
    assert f".[{engine}]" in line


@pytest.mark.slow
@needs_torch
def test_on_a_cpu_pytorch_needs_no_triton():
    assert run(*SHORT, "--engine", "torch", missing=("triton",), device="").returncode == 0


@pytest.mark.slow
@needs_torch
def test_without_a_card_one_line_says_so_and_names_the_cpu(told_here, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    monkeypatch.setenv("MLX_ZIP_DEVICE", "")
    line = told_here(*SHORT, "--engine", "cuda")
    assert "no usable CUDA card" in line
    assert "MLX_ZIP_DEVICE=cpu" in line


@pytest.mark.slow
@needs_torch
def test_a_card_may_be_asked_for_by_name_where_mlx_has_no_gpu(told_here, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    monkeypatch.setenv("MLX_ZIP_DEVICE", "gpu")
    line = told_here(*SHORT, "--engine", "cuda")
    assert "no usable CUDA card" in line


@pytest.mark.slow
@needs_torch
def test_figures_as_json_name_the_pack_and_the_memory_as_with_mlx(said_here):
    expected, got = (json.loads(said_here(*SHORT, "--json", "--engine", name)[1]) for name in ("mlx", "cuda"))
    for key in ("text", "codebook_size", "codebook_fingerprint", "hypertokens"):
        assert got[key] == expected[key]
    assert got["peak_memory_gb"] > 0.05  # of the process: PyTorch alone is larger


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("entries", [[[300, 301]], [[300] * 9], [[i, 300] for i in range(300, 4500)]])
def test_packs_without_rows_are_used_or_refused_as_with_mlx(tmp_path, said_here, entries):
    (tmp_path / "some.json").write_text(json.dumps(entries))
    flags = (*SHORT, "--model", "stories", "--pack", str(tmp_path / "some.json"))
    expected, got = (said_here(*flags, "--engine", name) for name in ("mlx", "cuda"))
    assert got == expected
    assert got[0] == (0 if entries == [[300, 301]] else 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mlx", pytest.param("cuda", marks=needs_torch)])
@pytest.mark.parametrize("command", [SHORT, ("serve", "--port", "0")])
def test_a_plain_model_refuses_a_pack_that_it_cannot_use(tmp_path, said_here, command, engine):
    (tmp_path / "some.json").write_text("[[300, 301]]")
    flags = ("--engine", engine, "--model", "stories-base", "--pack", str(tmp_path / "some.json"))
    status, out, err = said_here(*command, *flags)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert "this model has no hypertokens, so nothing could use it" in line


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("serve", "--adapter-path"),
        ("serve", "--row-cache"),
        ("chat", "--adapter-path"),
        ("generate", "--prompt-cache-file"),
        ("generate", "--row-cache"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "cuda"])
def test_flags_that_only_mlx_has_are_refused(command, flag, engine, told_here):
    line = told_here(command, "--engine", engine, flag, "x")
    assert f"{flag} cannot be used with --engine {engine}" in line


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("flag", ["--kv-bits", "--kv-group-size", "--quantized-kv-start"])
def test_flags_of_quantized_kv_caches_are_refused_each_alone(command, flag, told_here):
    line = told_here(command, "--engine", "cuda", flag, "8")
    assert f"{flag} cannot be used with --engine cuda: its KV caches are not quantized" in line


@pytest.mark.parametrize("command", [SHORT, ("serve",), ("app", "--no-open", "--no-history")])
def test_mlx_launch_is_told_that_one_machine_is_all(command, told_here, monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    assert "--engine cuda runs on one machine" in told_here(*command, "--engine", "cuda")


def test_kept_conversations_are_listed_and_deleted_without_mlx(tmp_path):
    (tmp_path / f"{'a' * 16}.safetensors").write_bytes(b"x")
    listed = run("sessions", "list", str(tmp_path), missing=WITHOUT_MLX)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "1 file, 1 bytes" in listed.stdout
    assert run("sessions", "purge", str(tmp_path), missing=WITHOUT_MLX).stdout == "removed: 1 file, 1 bytes\n"


@pytest.mark.slow
@needs_torch
def test_a_machine_without_mlx_keeps_a_conversation_on_disk(tmp_path):
    pytest.importorskip("prompt_toolkit")
    flags = ("chat", "--engine", "cuda", "--no-history", "--max-tokens", "5", "--session-cache", str(tmp_path / "kept"))
    assert run(*flags, typed="Tell me a story.\n", missing=WITHOUT_MLX).returncode == 0
    listed = run("sessions", "list", str(tmp_path / "kept"), missing=WITHOUT_MLX).stdout
    assert "stories" in listed
    assert "1 file" in listed


@pytest.mark.slow
@needs_torch
def test_the_engine_on_pytorch_loads_no_mlx():
    code = "import sys, mlx_zip.cuda.engine\nprint([name for name in ('mlx', 'mlx_lm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- vllm

VLLM = ("serve", "--port", "0", "--engine", "vllm")


def in_process(capsys, *args):
    """The one line with which a command is refused before it loads anything."""
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_vllm_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: None)
    for variable in ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL"):  # which the command sets
        monkeypatch.setenv(variable, "")
    line = in_process(capsys, *VLLM)
    assert "--engine vllm needs vllm, which is not installed" in line
    assert ".[vllm]" in line


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *[(name, "x") for name in ("--adapter-path", "--row-cache", "--session-cache", "--session-files")],
        *[(name, "8") for name in ("--kv-bits", "--kv-group-size", "--quantized-kv-start", "--prefill-step-size")],
        *[(name, "1G") for name in ("--row-cache-bytes", "--session-disk-bytes", "--prompt-cache-bytes")],
        ("--draft", "lookup"),
        ("--draft-model", "stories"),
    ],
)
def test_flags_that_vllm_has_no_use_for_are_refused(capsys, flag, value):
    assert f"{flag} cannot be used with --engine vllm: " in in_process(capsys, *VLLM, flag, value)


def test_a_chat_on_vllm_has_no_rotating_cache(capsys):
    pytest.importorskip("prompt_toolkit")
    line = in_process(capsys, "chat", "--engine", "vllm", "--model", "stories-base", "--max-kv-size", "64")
    assert "--max-kv-size cannot be used with --engine vllm: " in line


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{", "--vllm-args is not valid JSON"),
        ("[1]", "--vllm-args must be a JSON map"),
        ('{"max_num_seqs": 2}', "--vllm-args: 'max_num_seqs' is set by --decode-concurrency"),
        ('{"model": "x"}', "--vllm-args: 'model' is set by --model"),
    ],
)
def test_arguments_for_vllm_are_checked_before_it_is_imported(capsys, given, expected):
    assert expected in in_process(capsys, *VLLM, "--vllm-args", given)


@pytest.mark.parametrize("engine", ["auto", "mlx", "torch", "cuda"])
def test_arguments_for_vllm_need_vllm(capsys, engine):
    line = in_process(capsys, "serve", "--engine", engine, "--vllm-args", "{}")
    assert f"--vllm-args cannot be used with --engine {engine}: name --engine vllm" in line


@pytest.mark.parametrize("command", [SHORT, ("evaluate", "--model", "stories"), ("cache-prompt", "--prompt", "x")])
def test_commands_without_an_engine_of_many_requests_do_not_offer_vllm(capsys, command):
    with pytest.raises(SystemExit):
        main([*command, "--engine", "vllm"])
    assert "'vllm' is not one of auto, mlx, torch, cuda" in capsys.readouterr().err


def test_mlx_launch_does_not_start_vllm(monkeypatch, capsys):
    monkeypatch.setenv("MLX_RANK", "0")
    assert "--engine vllm runs on one machine" in in_process(capsys, *VLLM)


def test_vllm_gets_the_options_that_it_has_and_its_errors_are_told_in_one_line(monkeypatch):
    asked = {}

    def open_vllm_engine(name, **options):
        asked.update(options, name=name)
        raise ValueError("1 validation error for ModelConfig\n  it is too long")

    engine = types.ModuleType("mlx_zip.vllm.engine")
    engine.open_vllm_engine = open_vllm_engine
    monkeypatch.setitem(sys.modules, "mlx_zip.vllm.engine", engine)
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: object())
    for variable in ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(variable, "")
    args = command_parser("serve", "x").parse_args(
        [
            "--model",
            "some",
            "--engine",
            "vllm",
            "--decode-concurrency",
            "3",
            "--no-canonical",
            "--vllm-args",
            '{"block_size": 32}',
        ]
    )
    with pytest.raises(EngineError, match="vLLM does not start: 1 validation error for ModelConfig it is too long"):
        open_chosen_engine(args, None)
    assert asked == {
        "name": "some",
        "canonical": False,
        "codebook_size": None,
        "keep_sessions": True,
        "max_prompt_tokens": None,
        "max_running": 3,
        "max_waiting": 64,
        "pack": None,
        "tokenizer_config": {},
        "trust_remote_code": False,
        "vllm_args": {"block_size": 32},
    }


# ---- auto


def choice(monkeypatch, folder, *, installed=("torch", "mlx"), platform="linux", group=None, **flags) -> tuple:
    """What --engine auto becomes for a model's folder, and the line that says so."""
    monkeypatch.delenv("MLX_RANK", raising=False)
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(engine_choice.sys, "platform", platform)
    return engine_choice._pick_engine(
        argparse.Namespace(engine="auto", **flags), [] if folder is None else [folder], group
    )


@pytest.fixture
def large(tmp_path):
    """A folder of a model that is large enough for PyTorch, on a disk that holds no zeros."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(engine_choice.SMALL_MB << 20)
    return tmp_path


def test_auto_takes_pytorch_for_a_large_model_where_it_is_installed(monkeypatch, large):
    assert choice(monkeypatch, large) == ("torch", "usually the faster one on this system (--engine mlx takes MLX)")
    assert choice(monkeypatch, large, installed=("mlx",)) == ("mlx", None)
    assert choice(monkeypatch, large, installed=("torch",)) == ("torch", "because MLX is not installed")
    assert choice(monkeypatch, large, installed=()) == ("mlx", None)


def test_auto_takes_mlx_on_a_mac_on_several_machines_and_for_a_small_model(monkeypatch, large):
    assert choice(monkeypatch, large, platform="darwin") == ("mlx", None)
    assert choice(monkeypatch, large, group=object()) == ("mlx", None)
    with open(large / "model.safetensors", "wb") as file:
        file.truncate((engine_choice.SMALL_MB << 20) - 1)
    assert choice(monkeypatch, large) == ("mlx", None)


def test_auto_takes_mlx_for_what_only_mlx_can_do_and_says_so(monkeypatch, large):
    assert choice(monkeypatch, large, kv_bits=8) == ("mlx", "because torch does not take --kv-bits")
    assert choice(monkeypatch, large, kv_group_size=64, row_cache="off", draft="lookup")[0] == "torch"
    assert choice(monkeypatch, None, prompt_cache_file="x")[1] == "because torch does not take --prompt-cache-file"
    (large / "config.json").write_text('{"model_type": "gemma2"}')
    assert choice(monkeypatch, large) == ("mlx", "because torch does not run models of type 'gemma2'")
    packed = {"bits": 4, "group_size": 64, "lm_head": {"bits": 6, "group_size": 64}}
    (large / "config.json").write_text(json.dumps({"model_type": "llama", "quantization": packed}))
    expected = "because torch does not run weights of 6 bits in groups of 64, mode affine"
    assert choice(monkeypatch, large) == ("mlx", expected)


def test_an_engine_that_is_named_stays_and_one_that_is_chosen_is_told(monkeypatch, capsys):
    named, auto = argparse.Namespace(engine="cuda"), argparse.Namespace(engine="auto")
    monkeypatch.setattr(engine_choice, "_pick_engine", lambda *_: ("torch", "because it is"))
    for args in (named, auto):
        engine_choice.choose_engine(args, "stories")
    assert (named.engine, auto.engine) == ("cuda", "torch")
    assert capsys.readouterr().err == "engine: torch, because it is\n"


def test_a_further_model_of_the_app_gets_an_engine_of_its_own(monkeypatch):
    from mlx_zip.cli.serving import app

    monkeypatch.setattr(
        engine_choice, "_pick_engine", lambda _, models, __: ("torch" if models == ["large"] else "mlx", None)
    )
    monkeypatch.setattr(engine_choice, "set_device_from_environment", lambda: None)
    monkeypatch.setattr(app, "open_chosen_engine", lambda args, *_, **options: (args.model, args.engine))
    for asked, expected in (("auto", "torch"), ("mlx", "mlx")):
        args = argparse.Namespace(engine=asked)
        assert app._open_other_model(args, "large") == ("large", expected)
        assert args.engine == asked


def test_where_only_pytorch_is_installed_auto_refuses_the_flags_that_it_refuses(monkeypatch, large):
    monkeypatch.delenv("MLX_RANK", raising=False)
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: object() if name == "torch" else None)
    args = argparse.Namespace(engine="auto", kv_bits=4)
    with pytest.raises(GenerationError, match="--kv-bits cannot be used with --engine torch: its KV"):
        engine_choice.choose_engine(args, large)
