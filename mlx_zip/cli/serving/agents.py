"""`mlx_zip agent`: prints or writes the settings that make a coding agent use a running server."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from mlx_zip.cli.serving.serving_flags import API_KEY
from mlx_zip.errors import DataError, GenerationError, errors_as, failure_reason
from mlx_zip.files import atomic_file, check_regular_file, expand_home

NAME = "mlx_zip"
MOST_OUTPUT = 8192  # maximum base tokens per answer that agents may ask for
SMALL_CONTEXT = 32_768
WAIT_S = 10.0
BACKUP_SUFFIX = ".before-mlx_zip"
_SET_ONCE = "master_key"  # key whose value is kept if the file already has one


@dataclass(frozen=True)
class RunningServer:
    """A running server. url: without /v1. key: API key, "" for none. context: context length, None for no limit."""

    url: str
    key: str
    model: str
    context: int | None

    @property
    def max_output_tokens(self) -> int:
        """Maximum base tokens per answer that an agent may ask for."""
        return MOST_OUTPUT if self.context is None else min(MOST_OUTPUT, self.context // 2)


AgentSettings = tuple[Mapping[Path, Any], str]  # settings file -> settings to merge into it; command to start the agent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `mlx_zip agent`."""
    add = parser.add_argument
    add("client", metavar="CLIENT", choices=tuple(AGENTS), help=f"the agent: {', '.join(AGENTS)}")
    add("--url", default="http://127.0.0.1:8080", help="address of the server (default: http://127.0.0.1:8080)")
    add(
        "--write",
        action="store_true",
        help="write the settings into the agent's own files; a file that changes is first copied to "
        f"FILE{BACKUP_SUFFIX} (default: print them)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints or writes an agent's settings; returns 0. Raises `MlxZipError`."""
    server = _query_server(args.url)
    files, start = AGENTS[args.client](server)
    if server.context is not None and server.context < SMALL_CONTEXT:
        print(
            f"warning: {server.model} has a context of {server.context} tokens, and what most agents say of themselves "
            "and their tools takes 5,000 to 40,000",
            file=sys.stderr,
        )
    if args.write:
        texts = {path: _read_settings(path) for path in files}
        merged = {
            path: _merge_into_settings_text(path, text, files[path]) for path, text in texts.items()
        }  # all files are merged before any is written
        for path, text in merged.items():
            print(_write_settings(path, texts[path], text))
    else:
        for path, settings in files.items():
            print(f"{path}:\n\n{_merge_into_settings_text(path, '', settings)}")
    print(f"then: {start}")
    return 0


def _query_server(url: str) -> RunningServer:
    """Asks the server at `url` for its model's name and context. Raises `GenerationError` if no server answers."""
    url, key = url.rstrip("/").removesuffix("/v1"), os.environ.get(API_KEY, "")
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or 'none'}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server needs no proxy
        with opener.open(request, timeout=WAIT_S) as answer:
            model = json.load(answer)["data"][0]
        return RunningServer(url, key, model["id"], model.get("context_length"))
    except urllib.error.HTTPError as error:
        hint = f"; set {API_KEY} to its key" if error.code == 401 else ""
        raise GenerationError(f"--url {url}: the server answers {error.code}{hint}") from error
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        why = getattr(error, "reason", None) or error
        raise GenerationError(f"--url {url}: no server of mlx_zip answers ({why}); start one: mlx_zip serve") from error


# ---- the agents


def _codex_settings(server: RunningServer) -> AgentSettings:
    provider = {"name": NAME, "base_url": f"{server.url}/v1", "wire_api": "responses"}
    provider |= {"env_key": API_KEY} if server.key else {}
    window = {} if server.context is None else {"model_context_window": server.context}
    settings = {"model": server.model, "model_provider": NAME, **window, "model_providers": {NAME: provider}}
    return {_config_folder("CODEX_HOME", "~/.codex") / "config.toml": settings}, "codex"


def _claude_settings(server: RunningServer) -> AgentSettings:
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key or "none"}
    env |= {f"ANTHROPIC_{name}": server.model for name in models}
    env |= {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_output_tokens)}
    if server.context is not None:
        env |= {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context)}
    return {_config_folder("CLAUDE_CONFIG_DIR", "~/.claude") / "settings.json": {"env": env}}, "claude"


def _opencode_settings(server: RunningServer) -> AgentSettings:
    limit = {} if server.context is None else {"limit": {"context": server.context, "output": server.max_output_tokens}}
    key = f"{{env:{API_KEY}}}" if server.key else "none"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": f"{server.url}/v1", "apiKey": key},
        "models": {server.model: {"name": server.model, "tool_call": True, **limit}},
    }
    chosen = f"{NAME}/{server.model}"
    settings = {"model": chosen, "small_model": chosen, "provider": {NAME: provider}}
    return {_config_folder("XDG_CONFIG_HOME", "~/.config") / "opencode" / "opencode.json": settings}, "opencode"


def _aider_settings(server: RunningServer) -> AgentSettings:
    """Returns aider's settings. They switch off `reminder`, instructions that aider moves to the newest message of each
    prompt: a prompt would share only the text before them with the next prompt.
    """
    name, home = f"openai/{server.model}", expand_home("~")
    of_server = {"openai-api-base": f"{server.url}/v1", "openai-api-key": server.key or "none"}
    free = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    facts = {"litellm_provider": "openai", "mode": "chat", "max_output_tokens": server.max_output_tokens, **free}
    facts |= {} if server.context is None else {"max_tokens": server.context, "max_input_tokens": server.context}
    files = {
        home / ".aider.conf.yml": {"model": name, "weak-model": name, **of_server},
        home / ".aider.model.settings.yml": [{"name": name, "edit_format": "whole", "reminder": None}],
        home / ".aider.model.metadata.json": {name: facts},
    }
    return files, "aider"


def _litellm_settings(server: RunningServer) -> AgentSettings:
    """Returns the settings of litellm's proxy, with a random key that the proxy's clients must send."""
    path = Path("litellm.yaml").absolute()
    key = f"os.environ/{API_KEY}" if server.key else "none"
    length = {} if server.context is None else {"max_input_tokens": server.context}
    model = {
        "model_name": server.model,
        "litellm_params": {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": key},
        "model_info": {"max_output_tokens": server.max_output_tokens, "supports_function_calling": True, **length},
    }
    settings = {"model_list": [model], "general_settings": {_SET_ONCE: f"sk-{secrets.token_hex(16)}"}}
    return {path: settings}, f"litellm --host 127.0.0.1 --config {path.name}"


AGENTS: dict[str, Callable[[RunningServer], AgentSettings]] = {
    "codex": _codex_settings,
    "claude": _claude_settings,
    "opencode": _opencode_settings,
    "aider": _aider_settings,
    "litellm": _litellm_settings,
}


def _config_folder(variable: str, default: str) -> Path:
    return expand_home(os.environ.get(variable) or default)


# ---- files


def _read_settings(path: Path) -> str:
    check_regular_file(path)
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        why = failure_reason(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"{path}: cannot be read: {why}") from error


def _write_settings(path: Path, old: str, new: str) -> str:
    """Writes the text `new` to a file; returns a line that says so. old: the present text. Raises `DataError`."""
    if new == old:
        return f"{path}: unchanged"
    with errors_as(DataError, f"{path}: cannot be written", OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy = _back_up_settings(path, old) if old else None
        with atomic_file(path) as partial:
            partial.touch(mode=0o600)
            partial.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o600)  # the file may hold a key
            partial.write_text(new, encoding="utf-8")
    return f"{path}: written" + ("" if copy is None else f"; what was there is in {copy}")


def _back_up_settings(path: Path, text: str) -> Path:
    """Writes `text`, the content of `path`, to a new file in the same folder; returns that file. Raises `OSError`."""
    number, copy = 1, path.with_name(path.name + BACKUP_SUFFIX)
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}{BACKUP_SUFFIX}-{number}")
    with atomic_file(copy) as partial:
        partial.touch(mode=0o600)
        partial.write_text(text, encoding="utf-8")
    return copy


def _merge_into_settings_text(path: Path, text: str, settings: Any) -> str:
    """Returns a file's text with `settings` merged in. Raises `DataError` if the text is not in the file's format."""
    old = _parse_settings(path, text)
    if path.suffix == ".toml":
        return _merge_toml(path, text, old, settings)
    new = _merge_settings(old, settings)
    if text and new == old:
        return text
    if path.suffix == ".json":
        return json.dumps(new, indent=2, ensure_ascii=False) + "\n"

    import yaml

    return yaml.safe_dump(new, sort_keys=False, allow_unicode=True)


def _parse_settings(path: Path, text: str) -> Any:
    """Returns the values in a file's text, {} for none. Raises `DataError` if the text is not in the file's format."""
    import yaml

    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    try:
        return (readers.get(path.suffix, yaml.safe_load)(text) or {}) if text.strip() else {}
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise DataError(
            f"{path}: cannot be changed here ({why}); add by hand what is printed without --write"
        ) from error


def _merge_settings(old: Any, new: Any) -> Any:
    """Returns `old` updated by `new`: merges maps; replaces list items of the same name, adds other list items."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changed = {key: value for key, value in new.items() if key not in old or key != _SET_ONCE}
        return {
            **old,
            **{key: _merge_settings(old[key], value) if key in old else value for key, value in changed.items()},
        }
    if isinstance(old, list) and isinstance(new, list):
        names = [_item_name(item) for item in new]
        return [*(item for item in old if _item_name(item) not in names), *new]
    return new


def _item_name(item: Any) -> Any:
    return item.get("name", item.get("model_name")) if isinstance(item, Mapping) else item


def _merge_toml(path: Path, text: str, old: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns the TOML `text` with `settings` merged in and all else unchanged. Raises `DataError` if that fails.

    old: the values in `text`. settings: top-level values, and one group that holds one table.
    """
    values = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    ((group, tables),) = ((key, value) for key, value in settings.items() if isinstance(value, Mapping))
    ((name, table),) = tables.items()
    wanted = {**old, **values, group: {**old.get(group, {}), name: table}}
    if old == wanted:
        return text
    kept = _remove_from_toml(text, values, f"{group}.{name}").strip("\n")
    parts = [_format_toml(values), kept, f"[{group}.{name}]\n{_format_toml(table)}"]
    new = "\n\n".join(part for part in parts if part) + "\n"
    if _parse_settings(path, new) != wanted:
        raise DataError(f"{path}: cannot be changed here; add by hand what is printed without --write")
    return new


def _remove_from_toml(text: str, keys: Mapping[str, Any], table: str) -> str:
    """Returns the TOML `text` without the top-level values of `keys` and without the table named `table`."""
    kept, inside = [], ""
    for line in text.splitlines():
        if header := re.match(r"\s*\[+([^\[\]]+)\]+\s*(#.*)?$", line):
            inside = header[1].strip()
        value = re.match(r"\s*([\w-]+)\s*=", line)
        if inside != table and not (not inside and value and value[1] in keys):
            kept.append(line)
    return "\n".join(kept)


def _format_toml(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
