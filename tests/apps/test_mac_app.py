"""The ways onto a Mac, as far as another system can check them: Briefcase's settings, the icon, launchd's file."""

import asyncio
import json
import plistlib
import runpy
import struct
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from mlx_zip import cli
from mlx_zip.apps.chat.running_answers import encode_frames
from mlx_zip.apps.mac import build
from support.places import REPO

MAC = REPO / "apps/mac"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
BRIEFCASE = tomllib.loads((MAC / "pyproject.toml").read_text())["tool"]["briefcase"]
APP = BRIEFCASE["app"]["mlx_zip_app"]
WHEELS = json.loads((REPO / "tests/apps/mac_wheels.json").read_text())  # what `build.py --check` found for Python 3.13
AGENT = plistlib.loads((MAC / "org.mlx-zip.serve.plist").read_bytes())


def test_briefcase_reads_the_settings():
    config = pytest.importorskip("briefcase.config", reason="needs Briefcase (pip install briefcase==0.4.7)")
    console = pytest.importorskip("briefcase.console").Console()
    _, apps = config.parse_config(MAC / "pyproject.toml", platform="macOS", output_format="app", console=console)
    assert config.DraftAppConfig(**apps["mlx_zip_app"]).bundle_identifier == "org.mlx-zip.mlx-zip-app"


def test_the_app_has_the_version_and_the_oldest_system_of_the_package():
    oldest = PROJECT["tool"]["cibuildwheel"]["macos"]["environment"]["MACOSX_DEPLOYMENT_TARGET"]
    assert BRIEFCASE["version"] == PROJECT["project"]["version"]
    assert build.app_requirements() == [f"mlx_zip[serve,window]=={PROJECT['project']['version']}"]
    assert APP["macOS"]["min_os_version"] == oldest


def test_what_the_app_asks_for_is_an_extra_of_the_package():
    (asked,) = [line for line in APP["macOS"]["requires"] if line.startswith("mlx_zip")]
    extras = asked.removeprefix("mlx_zip[").partition("]")[0].split(",")
    assert set(extras) <= PROJECT["project"]["optional-dependencies"].keys()


def recorded_wheels(macos: str, folder: Path) -> list[str]:
    """Writes wheels without content under the recorded names; returns pip's options that find those and no others."""
    for name, needed in WHEELS[macos].items():
        if not name.startswith("mlx_zip-"):
            build.write_wheel(folder, name.removesuffix(".whl"), [f"Requires-Dist: {one}" for one in needed])
    build.write_our_wheel(folder, macos)
    return ["--no-index", "--find-links", str(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("macos", build.SYSTEMS)
def test_pip_finds_a_wheel_for_all_that_the_app_needs_under_briefcases_options(tmp_path, macos):
    found = build.resolve_wheels(macos, "3.13", recorded_wheels(macos, tmp_path))
    assert {name.lower() for name in found} == {name.lower() for name in WHEELS[macos]}, "run build.py --check --record"
    (metal,) = [name for name in found if name.startswith("mlx_metal-")]
    assert metal.endswith(f"-macosx_{macos.replace('.', '_')}_arm64.whl")


@pytest.mark.slow
def test_without_the_wheels_that_are_built_here_pip_finds_none_for_pywebview(tmp_path):
    sources = recorded_wheels("14.0", tmp_path)
    for one in build.LOCAL:
        next(tmp_path.glob(f"{one.partition('==')[0]}-*.whl")).unlink()
    with pytest.raises(subprocess.CalledProcessError) as error:
        build.resolve_wheels("14.0", "3.13", sources)
    assert "proxy_tools" in error.value.stderr


def test_briefcase_gives_pip_the_options_that_are_checked(tmp_path):
    venv = pytest.importorskip("briefcase.integrations.virtual_environment.venv", reason="needs Briefcase")
    tools, app = MagicMock(host_os="Darwin"), MagicMock(app_name="mlx_zip_app")
    tools.console.is_deep_debug = False
    env = venv.VenvVirtualEnvironment.__new__(venv.VenvVirtualEnvironment)
    env.__dict__.update(tools=tools, app=app, name="app", platform="macOS", arch="arm64", base_path=MAC)
    packages = {"install_path": tmp_path / "packages", "min_os_version": "26.0"}
    env.install_requirements(build.app_requirements(), require_binary=True, **packages)
    (command,) = tools[app].app_context.run.call_args.args
    words = command[command.index("install") + 1 :]
    words.remove(f"--target={packages['install_path']}")
    assert words == [*build.pip_options("26.0"), *build.app_requirements()]


def test_the_app_is_built_for_the_newest_macos_that_the_machine_has():
    assert [build.newest_usable_system(one) for one in ("14.0", "15.7.1", "26.0", "26.2", "27.1")] == ["14.0"] * 2 + [
        "26.0"
    ] * 3
    assert build.newest_usable_system("16.0") == "26.0"  # as an older Python calls macOS 26
    with pytest.raises(SystemExit, match=r"14\.0 or newer"):
        build.newest_usable_system("13.6")


def test_briefcase_takes_the_chosen_macos_in_place_of_the_one_in_the_settings():
    parse = pytest.importorskip("briefcase.commands.base", reason="needs Briefcase").parse_config_overrides
    command = build.briefcase_command("26.0")
    assert parse([command[command.index("-C") + 1]]) == {"min_os_version": "26.0"}
    assert APP["macOS"]["min_os_version"] in build.SYSTEMS
    assert APP["macOS"]["requirement_installer_args"] == ["--find-links", f"./{build.WHEELS.name}"]


def test_wheels_and_app_are_built_for_one_macos_after_what_was_there_before_is_gone(monkeypatch, tmp_path):
    ran, old = [], tmp_path / "wheels/mlx_zip-0.0.9-py3-none-any.whl"
    old.parent.mkdir()
    old.touch()
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ran.append((command, options)) or done)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(build.platform, "mac_ver", lambda: ("15.6", ("", "", ""), "arm64"))
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "WHEELS", old.parent)
    assert build.main([]) == 0
    assert not old.exists()
    (wheels, made), (briefcase, options) = ran
    assert {str(REPO), *build.LOCAL} < set(wheels)
    assert made["env"]["MACOSX_DEPLOYMENT_TARGET"] == "14.0"
    assert made["env"]["_PYTHON_HOST_PLATFORM"] == "macosx-14.0-arm64"  # or a Python for a newer macOS names its own
    assert (briefcase, options["cwd"]) == (build.briefcase_command("14.0"), tmp_path)
    build.main(["--macos", "26.0"])
    assert ran[-1][0] == build.briefcase_command("26.0")


def test_an_app_is_built_on_a_mac_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SystemExit):
        build.main([])
    assert "on a Mac; --check" in capsys.readouterr().err


def test_a_mac_stays_at_work_while_an_answer_is_written_and_no_longer(monkeypatch):
    now: list[str] = []
    info = types.SimpleNamespace(
        beginActivityWithOptions_reason_=lambda options, reason: now.append(reason) or reason, endActivity_=now.remove
    )
    foundation = types.SimpleNamespace(NSProcessInfo=types.SimpleNamespace(processInfo=lambda: info))
    monkeypatch.setitem(sys.modules, "Foundation", foundation)

    async def frames(count):
        for i in range(count):
            yield {"i": i}
        raise ConnectionError

    async def read(count, leaves):
        seen, stream = [], encode_frames(frames(count))
        try:
            async for _ in stream:
                seen.append(list(now))
                if len(seen) == leaves:
                    break
        except ConnectionError:
            pass
        await stream.aclose()
        return seen

    for leaves in (1, 5):  # the page goes, and the answer fails
        assert asyncio.run(read(2, leaves)) == [["writing an answer"]] * min(leaves, 2)
        assert now == []


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
