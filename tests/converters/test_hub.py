"""The model hub, by stand-ins: its cache layout, and a loopback server with the few endpoints that are used."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from mlx_zip.converters import source
from support.checkpoints import edit_json, write_adapter, write_base, write_checkpoint
from support.command_line import WITHOUT_TORCH
from support.converting import config_of, convert
from support.places import GOLDEN_MODELS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


class StandIn(ThreadingHTTPServer):
    """Serves `repositories` ({(id, revision): (commit, folder)}) and keeps what is uploaded, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[tuple[str, str], tuple[str, Path]] = {}
        self.created: list[dict[str, Any]] = []
        self.uploaded: dict[str, bytes] = {}
        self.requests: list[str] = []

    def add(self, name: str, folder: Path, revision: str = "main", commit: str = COMMIT) -> None:
        for known in (revision, commit):
            self.repositories[name, known] = (commit, folder)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] in ("revision", "tree"):
            self.listing("/".join(parts[2:4]), parts[4], parts[5])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.reply(404, {"error": "not here"}, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def listing(self, name: str, what: str, revision: str) -> None:
        if (name, revision) not in self.server.repositories:
            known = any(repository == name for repository, _ in self.server.repositories)
            self.reply(404, {"error": "unknown"}, X_Error_Code="RevisionNotFound" if known else "RepoNotFound")
            return
        commit, folder = self.server.repositories[name, revision]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in files]
        if what == "tree":
            pairs = zip(names, files, strict=True)
            entries = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": digest(f)} for n, f in pairs]
            self.reply(200, entries)
        else:
            self.reply(200, {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in names]})

    def file(self, name: str, revision: str, path: str) -> None:
        commit, folder = self.server.repositories.get((name, revision), (None, Path("/nowhere")))
        if commit is None or not (folder / path).is_file():
            self.reply(404, {"error": "no entry"}, X_Error_Code="EntryNotFound")
            return
        self.reply(200, (folder / path).read_bytes(), ETag=f'"{digest(folder / path)}"', X_Repo_Commit=commit)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_standin":
            self.reply(401, {"error": "Invalid token"})
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.reply(200, {"url": f"{self.server.url}/someone/converted"})
        elif path == "/api/validate-yaml":
            self.reply(200, {"warnings": [], "errors": []})
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.reply(200, {"files": [{"path": file["path"], **mode} for file in files]})
        elif path.endswith("/commit/main"):
            self.commit(body)
        else:
            self.reply(404, {"error": "not here"})

    def commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.reply(200, {"commitUrl": f"{self.server.url}/someone/converted/commit/{COMMIT}", "commitOid": COMMIT})


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


COMMAND = (
    WITHOUT_TORCH
    + """
import argparse, sys
from mlx_zip.converters import cli
from mlx_zip.errors import MlxZipError
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
try:
    sys.exit(cli.run(parser.parse_args()))
except MlxZipError as error:
    sys.exit(f"error: {error}")
"""
)
OPEN = """
import json, sys
from mlx_zip.converters.source import locate_model, open_checkpoint
found = open_checkpoint(locate_model(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
print(json.dumps([found.place.revision, found.base.name, found.base.revision, len(found.decoder)]))
"""


def run(home: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with its own cache; never a real endpoint."""
    unset = {"HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    proxies = {name for name in os.environ if name.lower().endswith("_proxy")}
    env = {name: value for name, value in os.environ.items() if name not in unset | proxies}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def opened(home: Path, *arguments: str, **environment: str) -> list[Any]:
    """[revision, base, the base's revision, number of decoder tensors] of a checkpoint that must be found."""
    result = run(home, OPEN, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(home: Path, *flags: str, **environment: str) -> str:
    """The error line of a command that must fail."""
    result = run(home, COMMAND, *flags, **environment)
    assert result.returncode == 1, result.stdout + result.stderr
    return next(line for line in result.stderr.splitlines() if line.startswith("error: "))


def put_in_cache(home: Path, name: str, folder: Path, revision: str = "main", commit: str = COMMIT) -> None:
    """Lays a repository out as the hub's client does."""
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(commit)


LORA = {"model.layers.0.self_attn.q_proj": (32, 32, 2)}


def split_checkpoint(folder: Path) -> None:
    """A checkpoint in folder/zip whose base, folder/base, is meant to be the repository meta/base."""
    write_checkpoint(folder / "zip", "res_latent_attn", alias=True)
    (folder / "zip" / "base").rename(folder / "base")
    edit_json(folder / "zip" / "zip2zip_config.json", base_model_name_or_path="meta/base")


@pytest.mark.slow
def test_the_command_downloads_converts_and_uploads(server: StandIn, tmp_path: Path) -> None:
    split_checkpoint(tmp_path)
    write_adapter(tmp_path / "zip", LORA)
    for unwanted in ("training.log", "optimizer.bin", "model.onnx"):
        (tmp_path / "zip" / unwanted).write_text("large")
    server.add("lab/zip", tmp_path / "zip")
    server.add("meta/base", tmp_path / "base", commit=OTHER)
    out = tmp_path / "out"
    flags = ("--hf-path", "lab/zip", "--mlx-path", str(out), "--upload-repo", "someone/converted")
    result = run(tmp_path / "home", COMMAND, *flags, HF_ENDPOINT=server.url, HF_TOKEN="hf_standin")
    assert result.returncode == 0, result.stderr

    assert not [path for path in server.requests if path.endswith((".log", ".bin", ".onnx"))]
    record = config_of(out)["zip2zip"]["source"]
    assert (record["path"], record["revision"]) == ("lab/zip", COMMIT)
    assert (record["base"], record["base_revision"]) == ("meta/base", OTHER)
    assert "base_model:\n- lab/zip\n- meta/base\n" in (out / "README.md").read_text()

    edit_json(tmp_path / "zip" / "zip2zip_config.json", base_model_name_or_path=str(tmp_path / "base"))
    local = convert(tmp_path / "zip", tmp_path / "local")
    assert (out / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()

    assert [created["name"] for created in server.created] == ["converted"]
    assert server.uploaded == {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert len([path for path in server.requests if path.endswith("/commit/main")]) == 1


# ---- download


def test_a_base_inside_the_repository_is_downloaded_with_it(server: StandIn, tmp_path: Path) -> None:
    server.add("lab/golden", GOLDEN_MODELS / "llama_transformer_tied_lora")
    assert opened(tmp_path, "lab/golden", HF_ENDPOINT=server.url) == [COMMIT, "base", None, 20]


def test_the_revision_chooses_the_commit(server: StandIn, tmp_path: Path) -> None:
    write_base(tmp_path / "raw")
    write_checkpoint(tmp_path / "hf", self_contained=True, shards=2)
    server.add("lab/zip", tmp_path / "raw")
    server.add("lab/zip", tmp_path / "hf", revision="hf", commit=OTHER)
    found = opened(tmp_path / "home", "lab/zip", "hf", HF_ENDPOINT=server.url)
    assert found == [OTHER, "lab/zip", OTHER, 21]


def test_the_cache_serves_without_a_network(tmp_path: Path) -> None:
    split_checkpoint(tmp_path)
    put_in_cache(tmp_path / "home", "lab/zip", tmp_path / "zip", revision="hf")
    put_in_cache(tmp_path / "home", "meta/base", tmp_path / "base", commit=OTHER)
    found = opened(tmp_path / "home", "lab/zip", "hf", HF_HUB_OFFLINE="1")
    assert found == [COMMIT, "meta/base", OTHER, 21]


@pytest.mark.slow
def test_a_plain_model_is_refused_before_its_weights_are_downloaded(server: StandIn, tmp_path: Path) -> None:
    write_base(tmp_path / "raw")
    server.add("lab/plain", tmp_path / "raw")
    flags = ("--hf-path", "lab/plain", "--mlx-path", str(tmp_path / "out"))
    assert "mlx_lm.convert" in refused(tmp_path / "home", *flags, HF_ENDPOINT=server.url)
    assert not [path for path in server.requests if path.endswith(".safetensors")]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("lab/none",), ("lab/zip", "--revision", "v9")], ids=["repository", "revision"])
def test_what_the_hub_does_not_have_is_one_line(flags: tuple[str, ...], server: StandIn, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", self_contained=True)
    server.add("lab/zip", tmp_path / "src")
    error = refused(tmp_path / "home", "--mlx-path", str(tmp_path / "out"), "--hf-path", *flags, HF_ENDPOINT=server.url)
    assert f"{flags[0]} is not a local folder, and the hub did not give it" in error


@pytest.mark.slow
def test_offline_without_a_cached_copy_is_one_line(tmp_path: Path) -> None:
    flags = ("--hf-path", "lab/zip", "--mlx-path", str(tmp_path / "out"))
    assert "the hub did not give it" in refused(tmp_path / "home", *flags, HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_a_plain_adapter_comes_from_the_endpoint_too(server: StandIn, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", LORA)
    server.add("lab/lora", tmp_path / "adapter")
    flags = ("--hf-path", "lab/lora", "--mlx-path", str(tmp_path / "out"), "--lora-only")
    assert run(tmp_path / "home", COMMAND, *flags, HF_ENDPOINT=server.url).returncode == 0
    assert (tmp_path / "out" / "adapters.safetensors").is_file()


# ---- upload


def refused_upload(tmp_path: Path, **environment: str) -> str:
    write_adapter(tmp_path / "adapter", LORA)
    flags = ("--hf-path", str(tmp_path / "adapter"), "--mlx-path", str(tmp_path / "out"), "--lora-only")
    return refused(tmp_path / "home", *flags, "--upload-repo", "someone/x", **environment)


@pytest.mark.slow
def test_a_refused_upload_says_so_and_leaves_the_conversion(server: StandIn, tmp_path: Path) -> None:
    error = refused_upload(tmp_path, HF_ENDPOINT=server.url, HF_TOKEN="hf_wrong")
    assert "is converted, but could not be uploaded to someone/x" in error
    assert (tmp_path / "out" / "adapters.safetensors").is_file()


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    assert "could not be uploaded to someone/x" in refused_upload(tmp_path, HF_TOKEN="hf_standin")


@pytest.mark.parametrize("name", ["a/b/c", "..", "bad name", "x/../y", ""])
def test_a_name_that_is_no_repository_is_not_asked_for(name: str) -> None:
    from mlx_zip.errors import ConversionError

    with pytest.raises(ConversionError, match="neither a folder nor a hub id"):
        source.download_to_cache(name, None, source.CONFIG_FILES)
