"""--engine: which one runs, what is missing for it, and which flags it cannot use; each told in one line."""

import json
import os
import subprocess
import sys

import pytest

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


@needs_torch
def test_a_machine_without_mlx_generates_the_same_text():
    expected = run(*SHORT)
    got = run(*SHORT, "--engine", "cuda", missing=WITHOUT_MLX)
    assert (got.returncode, got.stdout) == (0, expected.stdout)
    assert len(got.stdout) > 20


def test_without_mlx_the_message_names_both_ways_to_go_on():
    for command in (SHORT, ("serve",)):
        done = run(*command, missing=WITHOUT_MLX)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "MLX is not installed" in line
        assert "--engine cuda" in line


def test_without_pytorch_the_message_says_what_to_install():
    done = run(*SHORT, "--engine", "cuda", missing=WITHOUT_TORCH)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--engine cuda needs torch, triton" in line
    assert ".[cuda]" in line


@needs_torch
def test_without_a_card_one_line_says_so_and_names_the_cpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = run(*SHORT, "--engine", "cuda", device="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no usable CUDA card" in line
    assert "MLX_ZIP_DEVICE=cpu" in line


@needs_torch
def test_a_card_may_be_asked_for_by_name_where_mlx_has_no_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = run(*SHORT, "--engine", "cuda", device="gpu")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no usable CUDA card" in line


@needs_torch
def test_figures_as_json_name_the_pack_and_the_memory_as_with_mlx():
    expected, got = (json.loads(run(*SHORT, "--json", "--engine", name).stdout) for name in ("mlx", "cuda"))
    for key in ("text", "codebook_size", "codebook_fingerprint", "hypertokens"):
        assert got[key] == expected[key]
    assert got["peak_memory_gb"] > 0.05  # of the process: PyTorch alone is larger


@needs_torch
@pytest.mark.parametrize("entries", [[[300, 301]], [[300] * 9], [[i, 300] for i in range(300, 4500)]])
def test_packs_without_rows_are_used_or_refused_as_with_mlx(tmp_path, entries):
    (tmp_path / "some.json").write_text(json.dumps(entries))
    flags = (*SHORT, "--model", "stories", "--pack", str(tmp_path / "some.json"))
    expected, got = (run(*flags, "--engine", name) for name in ("mlx", "cuda"))
    assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)
    assert got.returncode == (0 if entries == [[300, 301]] else 2)


@pytest.mark.parametrize("engine", ["mlx", pytest.param("cuda", marks=needs_torch)])
@pytest.mark.parametrize("command", [SHORT, ("serve", "--port", "0")])
def test_a_plain_model_refuses_a_pack_that_it_cannot_use(tmp_path, command, engine):
    (tmp_path / "some.json").write_text("[[300, 301]]")
    done = run(*command, "--engine", engine, "--model", "stories-base", "--pack", str(tmp_path / "some.json"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
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
def test_flags_that_only_mlx_has_are_refused(command, flag):
    done = run(command, "--engine", "cuda", flag, "x")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{flag} cannot be used with --engine cuda" in line


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("flag", ["--kv-bits", "--kv-group-size", "--quantized-kv-start"])
def test_flags_of_quantized_kv_caches_are_refused_each_alone(command, flag):
    done = run(command, "--engine", "cuda", flag, "8")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{flag} cannot be used with --engine cuda: its KV caches are not quantized" in line


@pytest.mark.parametrize("command", [SHORT, ("serve",), ("app", "--no-open", "--no-history")])
def test_mlx_launch_is_told_that_one_machine_is_all(command):
    done = run(*command, "--engine", "cuda", MLX_RANK="0")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--engine cuda runs on one machine" in line


def test_kept_conversations_are_listed_and_deleted_without_mlx(tmp_path):
    (tmp_path / f"{'a' * 16}.safetensors").write_bytes(b"x")
    listed = run("sessions", "list", str(tmp_path), missing=WITHOUT_MLX)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "1 file, 1 bytes" in listed.stdout
    assert run("sessions", "purge", str(tmp_path), missing=WITHOUT_MLX).stdout == "removed: 1 file, 1 bytes\n"


@needs_torch
def test_a_machine_without_mlx_keeps_a_conversation_on_disk(tmp_path):
    pytest.importorskip("prompt_toolkit")
    flags = ("chat", "--engine", "cuda", "--no-history", "--max-tokens", "5", "--session-cache", str(tmp_path / "kept"))
    assert run(*flags, typed="Tell me a story.\n", missing=WITHOUT_MLX).returncode == 0
    listed = run("sessions", "list", str(tmp_path / "kept"), missing=WITHOUT_MLX).stdout
    assert "stories" in listed
    assert "1 file" in listed


@needs_torch
def test_the_engine_on_pytorch_loads_no_mlx():
    code = "import sys, mlx_zip.cuda.engine\nprint([name for name in ('mlx', 'mlx_lm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
