"""The ways onto a Mac, as far as another system can check them: Briefcase's settings, the icon, launchd's file."""

import plistlib
import runpy
import struct
import sys
import tomllib
from pathlib import Path

import pytest

from mlx_zip import cli
from support.places import REPO

MAC = REPO / "apps/mac"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
BRIEFCASE = tomllib.loads((MAC / "pyproject.toml").read_text())["tool"]["briefcase"]
APP = BRIEFCASE["app"]["mlx_zip_app"]
AGENT = plistlib.loads((MAC / "org.mlx-zip.serve.plist").read_bytes())


def test_briefcase_reads_the_settings():
    config = pytest.importorskip("briefcase.config", reason="needs Briefcase (pip install briefcase==0.4.7)")
    console = pytest.importorskip("briefcase.console").Console()
    _, apps = config.parse_config(MAC / "pyproject.toml", platform="macOS", output_format="app", console=console)
    assert config.DraftAppConfig(**apps["mlx_zip_app"]).bundle_identifier == "org.mlx-zip.mlx-zip-app"


def test_the_app_has_the_version_and_the_oldest_system_of_the_package():
    oldest = PROJECT["tool"]["cibuildwheel"]["macos"]["environment"]["MACOSX_DEPLOYMENT_TARGET"]
    assert BRIEFCASE["version"] == PROJECT["project"]["version"]
    assert APP["macOS"]["min_os_version"] == oldest


def test_what_the_app_asks_for_is_an_extra_of_the_package():
    (asked,) = [line for line in APP["macOS"]["requires"] if line.startswith("mlx_zip")]
    assert (
        set(asked.removeprefix("mlx_zip[").rstrip("]").split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    )


def test_what_the_app_adds_to_its_plist_can_be_written_as_one():
    assert plistlib.loads(plistlib.dumps(APP["macOS"]["info"])) == APP["macOS"]["info"]


def test_the_program_in_the_app_opens_the_chat_in_a_window(monkeypatch):
    run = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: run.append((name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["mlx_zip_app"])
    (source,) = APP["sources"]
    runpy.run_path(str(MAC / source), run_name="__main__")
    ((name, argv),) = run
    assert name == "mlx_zip"
    assert cli.command_parser(argv[0], "mlx_zip app").parse_args(argv[1:]).window


def test_the_icon_holds_pictures_of_the_sizes_that_it_names():
    sizes = {b"ic07": 128, b"ic08": 256, b"ic09": 512, b"ic10": 1024}
    assert {kind: struct.unpack(">II", data[16:24]) for kind, data in icon_parts(MAC / f"{APP['icon']}.icns")} == {
        kind: (size, size) for kind, size in sizes.items()
    }


def icon_parts(file: Path) -> list[tuple[bytes, bytes]]:
    """The parts of an icns file: type and PNG data."""
    data, parts, at = file.read_bytes(), [], 8
    assert (data[:4], struct.unpack(">I", data[4:8])[0]) == (b"icns", len(data))
    while at < len(data):
        length = struct.unpack(">I", data[at + 4 : at + 8])[0]
        parts.append((data[at : at + 4], data[at + 8 : at + length]))
        at += length
    return parts


def test_the_login_agent_is_named_as_its_file():
    assert AGENT["Label"] == "org.mlx-zip.serve"


def test_the_login_agent_runs_a_command_that_exists():
    program, *argv = AGENT["ProgramArguments"]
    assert program == "MLX_ZIP"  # the guide puts the path in
    args = cli.command_parser(argv[0], "mlx_zip serve").parse_args(argv[1:])
    assert (args.model, args.port, args.host) == ("stories", 8080, "127.0.0.1")


def test_the_login_agent_waits_for_the_server_to_end_its_answers():
    drain_s = cli.command_parser("serve", "mlx_zip serve").parse_args([]).drain
    assert AGENT["ExitTimeOut"] > drain_s + 5


def test_the_guide_puts_in_all_that_the_login_agent_leaves_open():
    text = plistlib.dumps(AGENT).decode()
    guide = (REPO / "docs/guides/mac_app.md").read_text()
    for name in ("MLX_ZIP", "LOGS"):
        assert f">{name}" in text
        assert f"s|>{name}|" in guide
