"""Sessions of real agents with a server, set up by `mlx_zip agent --write` alone.

MLX_ZIP_CLIENTS names a folder that has what the guide to serving says: the agents of npm in `node_modules/.bin`, and
those of Python in `aider/bin` and `litellm/bin`. Without it these tests are skipped. The model's answers are scripted;
server, cache and sessions are real.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from mlx_zip import cli
from mlx_zip.server.options import Options
from support.http_server import serving
from support.scripted import Scripted

FOLDER = os.environ.get("MLX_ZIP_CLIENTS", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="MLX_ZIP_CLIENTS names no folder with agents")
WAIT_S = 300.0
SAID = "I see a boat on the lake."
QUESTIONS = ("Say what you see.", "Now use a tool.", "Say it once more.")
MADE = "note.txt"
COMMAND = f"echo a boat > {MADE} && echo it is written"
TOOLS = {  # a tool that runs a command: its arguments
    "exec_command": {"cmd": COMMAND},
    "Bash": {"command": COMMAND, "description": "Writes a note"},
    "bash": {"command": COMMAND, "description": "Writes a note"},
}
QUIET = {  # the agents ask their vendors for news otherwise, which these machines cannot reach
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "AIDER_ANALYTICS_DISABLE": "true",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def needs(*parts: str) -> Path:
    """The path of a client. Skips the test without it."""
    path = Path(FOLDER, *parts)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def script(prompt: str) -> str:
    """The answer to a prompt: the first question that asks for a tool gets a call, or for aider a file."""
    last = prompt[prompt.rfind("<|im_start|>user\n") :]
    if QUESTIONS[1] not in prompt[prompt.rfind(QUESTIONS[0]) :] or QUESTIONS[1] not in last:
        return f"It says: {'written' if 'it is written' in last else 'nothing'}." if "tool_response" in last else SAID
    for name, arguments in TOOLS.items():
        if f'"name": "{name}"' in prompt:
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return f"{MADE}\n```\na boat\n```\n"


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    """A folder to work in, with a home of its own. It is no repository, as prompts begin with what git says of one."""
    home = tmp_path_factory.mktemp("home")
    (home / "work").mkdir()
    for name, value in {**QUIET, "HOME": str(home), "PWD": str(home / "work")}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "MLX_ZIP_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(home / "work")
    return home / "work"


@pytest.fixture
def served():
    """A server, with the ends of its answers in `done`."""
    with serving(Scripted(script), Options(max_tokens=4096, show_text=True)) as running:
        running.done = []
        running.core.metrics.observe_answer = running.done.append
        yield running


def set_up(client: str, served) -> None:
    assert cli.main(["agent", client, "--url", served.url, "--write"]) == 0


def run(*words: str, given: str = "") -> str:
    """What a command prints."""
    ran = subprocess.run(words, input=given, text=True, capture_output=True, timeout=WAIT_S, check=False)
    assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]} {ran.stderr[-2000:]}"
    return ran.stdout


def goes_on(served, turns: int = 4) -> list[float]:
    """Asserts that prompts go on from what is kept, and returns how much of each was kept.

    turns: requests of the conversation; agents send others too, for titles, whose prompts are short.
    """
    counts = [done.counts for done in served.done]
    longest = max(one.prompt_tokens for one in counts)
    session = [one for one in counts if one.prompt_tokens > 0.5 * longest]
    shares = [one.cached_tokens / one.prompt_tokens for one in session]
    print("\n", [(one.cached_tokens, one.prompt_tokens) for one in session], [done.differs for done in served.done])
    assert len(session) == turns
    assert shares[1] >= 0.9
    return shares


def wrote(place: Path) -> bool:
    """Whether the command, or the agent, has written the file."""
    return (place / MADE).read_text().strip() == "a boat"


def test_codex_works(served, place):
    codex = str(needs("node_modules", ".bin", "codex"))
    set_up("codex", served)
    free = ("--skip-git-repo-check", "--sandbox", "workspace-write")
    said = [run(codex, "exec", *free, QUESTIONS[0])]
    said += [
        run(codex, "exec", "resume", "--last", "--skip-git-repo-check", "-c", 'sandbox_mode="workspace-write"', one)
        for one in QUESTIONS[1:]
    ]
    check_three_turns(served, place, said)


def test_codex_reads_the_list_of_models(served, place, monkeypatch):
    codex = str(needs("node_modules", ".bin", "codex"))
    monkeypatch.setenv("MLX_ZIP_API_KEY", "any")  # Codex asks for the list with a key only
    set_up("codex", served)
    settings = Path.home() / ".codex" / "config.toml"
    listed = f'model_catalog_url = "{served.url}/v1/models"\n\n[features]\napi_key_model_discovery = true\n'
    settings.write_text(settings.read_text() + listed)
    words = (codex, "exec", "--skip-git-repo-check", QUESTIONS[0])
    ran = subprocess.run(words, input="", text=True, capture_output=True, timeout=WAIT_S, check=True)
    assert SAID in ran.stdout
    assert "metadata" not in ran.stderr
    assert served.core.engine.asked[-1].count("You are a coding agent in a user's terminal.") == 1


def check_three_turns(served, place, said):
    """Checks that the second of three turns called a tool, and that each later turn found its prompt cached."""
    assert [SAID in text for text in said] == [True, False, True]
    assert "It says: written." in said[1]
    assert wrote(place)
    assert min(goes_on(served)[1:]) >= 0.9


def test_claude_code_works(served, place):
    claude = str(needs("node_modules", ".bin", "claude"))
    set_up("claude", served)
    said = [run(claude, "-p", QUESTIONS[0])]
    said += [run(claude, "--allowedTools=Bash", "-p", "-c", one) for one in QUESTIONS[1:]]
    check_three_turns(served, place, said)


def test_opencode_works(served, place):
    opencode = str(needs("node_modules", ".bin", "opencode"))
    set_up("opencode", served)
    said = [run(opencode, "run", QUESTIONS[0]), *(run(opencode, "run", "-c", one) for one in QUESTIONS[1:])]
    check_three_turns(served, place, said)


def test_aider_works(served, place):
    """aider calls no tools: what it is told to write into a file takes the place of a call."""
    aider = str(needs("aider", "bin", "aider"))
    set_up("aider", served)
    for words in ("init -q .", "config user.email me@example.com", "config user.name me"):
        run("git", *words.split())
    said = run(aider, "--yes-always", "--no-fancy-input", "--no-pretty", given="\n".join([*QUESTIONS, "/exit"]))
    assert said.count(SAID) == 2
    assert wrote(place)
    goes_on(served, turns=3)


SESSION = """
import json, sys
import litellm
where, key, questions = json.loads(sys.argv[1])
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": parameters}}]
messages = [{"role": "system", "content": "You help with files and commands. " * 200}]
for question in questions:
    messages.append({"role": "user", "content": question})
    while True:
        asked = dict(model="litellm_proxy/scripted", api_base=where, api_key=key, messages=messages, tools=tools)
        messages.append(litellm.completion(**asked).choices[0].message)
        if not messages[-1].tool_calls:
            print(messages[-1].content)
            break
        for call in messages[-1].tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "it is written"})
"""


def test_litellm_works(served, place):
    folder = needs("litellm", "bin")
    set_up("litellm", served)
    port = free_port()
    words = [str(folder / "litellm"), "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with Path("proxy.log").open("w") as log:
        proxy = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        answers(port, Path("proxy.log"))
        key = re.search(r"master_key: (\S+)", Path("litellm.yaml").read_text())[1]
        asked = json.dumps([f"http://127.0.0.1:{port}", key, QUESTIONS])
        said = run(str(folder / "python"), "-c", SESSION, asked).splitlines()
    finally:
        proxy.terminate()
        proxy.wait(30)
    assert said == [SAID, "It says: written.", SAID]
    assert min(goes_on(served)[1:]) >= 0.9


def free_port() -> int:
    from mlx_zip.server.running import bind_socket

    with bind_socket("127.0.0.1", 0) as found:
        return found.getsockname()[1]


def answers(port: int, log: Path) -> None:
    """Waits until a server answers."""
    last = time.monotonic() + 120
    while time.monotonic() < last:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health/liveliness")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])
