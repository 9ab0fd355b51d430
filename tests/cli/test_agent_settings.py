"""`mlx_zip agent`: what is printed is what is written, and what was in the agents' files stays."""

from __future__ import annotations

import json
import socket
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

from mlx_zip.cli.serving.agents import AGENTS
from mlx_zip.engine import EngineInfo
from mlx_zip.server.options import Options
from support.command_line import outcome
from support.fake_engine import CONTEXT, FakeEngine
from support.http_server import serving

FILES = {
    "codex": (".codex/config.toml",),
    "claude": (".claude/settings.json",),
    "opencode": (".config/opencode/opencode.json",),
    "aider": (".aider.conf.yml", ".aider.model.settings.yml", ".aider.model.metadata.json"),
    "litellm": ("litellm.yaml",),
}
READERS = {".toml": tomllib.loads, ".json": json.loads, ".yml": yaml.safe_load, ".yaml": yaml.safe_load}


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine(), Options(api_key="key")) as server:
        yield server


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLX_ZIP_API_KEY", "key")
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def agent(capsys, served):
    command = outcome(capsys, "agent")
    return lambda client, *words: command(client, "--url", served.url + "/v1/", *words)


def values(path: Path):
    return READERS[path.suffix](path.read_text())


@pytest.mark.parametrize("client", AGENTS)
def test_what_is_printed_is_what_is_written(client, agent, home):
    status, printed, _ = agent(client)
    assert status == 0
    assert not any(home.rglob("*.*"))
    assert agent(client, "--write")[0] == 0
    for name in FILES[client]:
        text = (home / name).read_text()
        if client != "litellm":  # whose own key is new each time
            assert f"{home / name}:\n\n{text}" in printed
        assert (home / name).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in home.rglob("*.*") if path.is_file()} == {Path(name).name for name in FILES[client]}


def test_the_settings_name_the_server_its_model_and_the_length_of_its_context(agent, home, served):
    for client in AGENTS:
        assert agent(client, "--write")[0] == 0
    codex = values(home / ".codex/config.toml")
    assert (codex["model"], codex["model_context_window"]) == ("stories", CONTEXT)
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (served.url + "/v1", "responses")
    assert provider["env_key"] == "MLX_ZIP_API_KEY"
    claude = values(home / ".claude/settings.json")["env"]
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == (served.url, "key")
    assert {claude[name] for name in claude if name.endswith("MODEL")} == {"stories"}
    assert claude["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(CONTEXT)
    opencode = values(home / ".config/opencode/opencode.json")
    provider = opencode["provider"]["mlx_zip"]
    assert opencode["model"] == "mlx_zip/stories"
    assert provider["options"] == {"baseURL": served.url + "/v1", "apiKey": "{env:MLX_ZIP_API_KEY}"}
    assert provider["models"]["stories"]["limit"] == {"context": CONTEXT, "output": CONTEXT // 2}
    assert values(home / ".aider.conf.yml")["openai-api-base"] == served.url + "/v1"
    assert values(home / ".aider.model.metadata.json")["openai/stories"]["max_input_tokens"] == CONTEXT
    (model,) = values(home / "litellm.yaml")["model_list"]
    assert model["litellm_params"]["api_base"] == served.url + "/v1"


OLD = {
    "codex": '# mine\nmodel = "gpt"\napproval = "never"\n\n[model_providers.mlx_zip]\nbase_url = "old"\n\n'
    '[model_providers.other]\nname = "o"\n\n[[hooks]]\nmodel = "kept"\n',
    "claude": '{"env": {"A": "1", "ANTHROPIC_MODEL": "old"}, "permissions": {"allow": ["Bash"]}}',
    "opencode": '{"provider": {"other": {}, "mlx_zip": {"models": {"old": {}}}}, "theme": "dark"}',
    "aider": "# mine\ndark-mode: true\nmodel: old\n",
    "litellm": "model_list:\n- model_name: stories\n  litellm_params: {model: old}\n- model_name: b\n"
    "general_settings: {master_key: sk-mine, other: 1}\n",
}


@pytest.mark.parametrize("client", AGENTS)
def test_what_was_in_a_file_stays_and_a_copy_is_kept(client, agent, home):
    path = home / FILES[client][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD[client])
    path.chmod(0o640)
    before = READERS[path.suffix](OLD[client])
    status, said, _ = agent(client, "--write")
    copy = path.with_name(path.name + ".before-mlx_zip")
    assert status == 0
    assert str(copy) in said
    assert copy.read_text() == OLD[client]
    assert path.stat().st_mode & 0o777 == 0o640
    now = values(path)
    assert set(before) <= set(now)
    kept = {
        "codex": lambda v: (v["approval"], v["model_providers"]["other"], v["hooks"]),
        "claude": lambda v: (v["env"]["A"], v["permissions"]),
        "opencode": lambda v: (v["theme"], v["provider"]["other"], v["provider"]["mlx_zip"]["models"]["old"]),
        "aider": lambda v: v["dark-mode"],
        "litellm": lambda v: (v["general_settings"], [m for m in v["model_list"] if m["model_name"] == "b"]),
    }[client]
    assert kept(now) == kept(before)
    assert "old" not in json.dumps([now[key] for key in now if key not in ("provider",)])


@pytest.mark.parametrize("client", AGENTS)
def test_writing_twice_changes_nothing_and_makes_one_copy(client, agent, home):
    path = home / FILES[client][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD[client])
    agent(client, "--write")
    first = path.read_text()
    assert f"{path}: unchanged" in agent(client, "--write")[1]
    assert path.read_text() == first
    assert len(list(path.parent.glob("*.before-mlx_zip*"))) == 1


def test_an_earlier_copy_is_not_replaced(agent, home):
    path = home / ".codex/config.toml"
    path.parent.mkdir()
    for text in ('model = "a"\n', 'model = "b"\n'):
        path.write_text(text)
        agent("codex", "--write")
    copies = {one.name: one.read_text() for one in path.parent.glob("*before*")}
    assert copies == {"config.toml.before-mlx_zip": 'model = "a"\n', "config.toml.before-mlx_zip-2": 'model = "b"\n'}


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("codex", "model = \n"),
        ("codex", 'note = """\nmodel = 5\n"""\n'),
        ("opencode", '{"a": 1, // mine\n}'),
        ("aider", "a: [\n"),
    ],
)
def test_a_file_that_cannot_be_changed_safely_stays_as_it_is(client, text, agent, home):
    path = home / FILES[client][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    status, _, told = agent(client, "--write")
    assert status == 2
    assert str(path) in told
    assert "by hand" in told
    assert path.read_text() == text
    assert agent(client)[0] == 0  # what is printed needs no file


def test_no_file_is_written_where_another_one_cannot_be(agent, home):
    (home / ".aider.model.metadata.json").write_text("{")
    assert agent("aider", "--write")[0] == 2
    assert {path.name for path in home.iterdir()} == {".aider.model.metadata.json"}


def test_a_key_for_litellms_clients_stays_as_it_is(agent, home):
    (home / "litellm.yaml").write_text("general_settings:\n  master_key: sk-mine\n")
    agent("litellm", "--write")
    assert values(home / "litellm.yaml")["general_settings"] == {"master_key": "sk-mine"}
    (home / "litellm.yaml").write_text("[")
    assert "sk-" in agent("litellm")[1]


def test_no_server_a_wrong_key_and_a_small_context_are_told(agent, home, monkeypatch, capsys):
    command = outcome(capsys, "agent")
    status, _, told = command("codex", "--url", "http://127.0.0.1:9")
    assert status == 2
    assert "mlx_zip serve" in told
    assert "context of 2000 tokens" in agent("codex")[2]
    monkeypatch.setenv("MLX_ZIP_API_KEY", "wrong")
    status, _, told = agent("codex")
    assert status == 2
    assert "MLX_ZIP_API_KEY" in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://127.0.0.1:9/ x", "localhost", "ftp://127.0.0.1"])
def test_what_is_no_address_of_a_server_is_told_in_one_line(url, home, capsys):
    status, _, told = outcome(capsys, "agent")("codex", "--url", url)
    assert status == 2
    assert f"--url {url}: no server of mlx_zip answers" in told


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.0 200 OK\r\n\r\n" + b'{"data": ["a model"]}'])
def test_what_is_no_server_of_models_is_told_in_one_line(answer, home, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answered, args=(listener, answer), daemon=True).start()
        status, _, told = outcome(capsys, "agent")("codex", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert status == 2
    assert "no server of mlx_zip answers" in told


def answered(listener, answer):
    """Answers one connection with bytes."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(10_000)
        connection.sendall(answer)


def test_a_server_without_a_key_and_a_model_without_a_limit_need_no_settings_for_them(home, monkeypatch, capsys):
    monkeypatch.delenv("MLX_ZIP_API_KEY")
    engine = FakeEngine()
    engine.info = EngineInfo("org/a-model", len(engine.tokenizer), None, 2, 64, "0123456789abcdef0123")
    with serving(engine) as served:
        for client in AGENTS:
            assert outcome(capsys, "agent")(client, "--url", served.url, "--write")[0] == 0
    codex = values(home / ".codex/config.toml")
    assert codex["model"] == "org/a-model"
    assert "model_context_window" not in codex
    assert "env_key" not in codex["model_providers"]["mlx_zip"]
    assert (
        "limit" not in values(home / ".config/opencode/opencode.json")["provider"]["mlx_zip"]["models"]["org/a-model"]
    )
