"""Who may use the app's server, and what its answers forbid."""

from __future__ import annotations

import pytest

from support.chat_app import API, KEY, chatting
from support.http_server import read_all

ROUTES = [
    ("GET", "/app/api/state"),
    ("GET", "/app/api/conversations"),
    ("POST", "/app/api/conversations"),
    ("DELETE", "/app/api/conversations"),
    ("GET", "/app/api/conversations/x"),
    ("PATCH", "/app/api/conversations/x"),
    ("DELETE", "/app/api/conversations/x"),
    ("POST", "/app/api/conversations/x/answer"),
    ("POST", "/app/api/conversations/x/stop"),
    ("GET", "/app/api/conversations/x/export"),
    ("GET", "/app/api/export"),
    ("POST", "/app/api/import"),
    ("POST", "/app/api/models"),
    ("POST", "/app/api/race"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/app/page/../api/state"),
    ("GET", "/app/page/..%2fapi/state"),
    ("GET", "/app/nothing"),
]


@pytest.fixture(scope="module")
def chat():
    with chatting() as served:
        yield served


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_nothing_but_the_page_is_open_without_the_key(chat, method, path, headers):
    answer = chat.ask(method, path, {} if method == "POST" else None, headers)
    wanted = 404 if path.startswith("/app/page/") else 401
    assert (answer.status, "error" in answer.json) == (wanted, True)


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:{port}", "null"])
@pytest.mark.parametrize("path", ["/app/api/state", "/app/", "/health", "/v1/models"])
def test_a_page_of_another_origin_is_refused_with_the_key_too(chat, origin, path):
    headers = {"Authorization": f"Bearer {KEY}", "Origin": origin.format(port=chat.port)}
    answer = chat.ask("GET", path, None, headers)
    assert (answer.status, answer.json["error"]["code"]) == (403, "wrong_origin")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_own_page_comes_in(chat):
    assert chat.call("GET", "state", None, {"Origin": chat.url}).status == 200
    local = {"Origin": f"http://localhost:{chat.port}", "Host": f"localhost:{chat.port}"}
    assert chat.call("GET", "state", None, local).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
def test_a_name_that_is_not_this_machines_is_refused(chat, host):
    for path in ("/app/", "/app/api/state"):
        answer = chat.ask("GET", path, None, {"Host": host, "Authorization": f"Bearer {KEY}"})
        assert (answer.status, answer.json["error"]["code"]) == (403, "wrong_host")


def test_the_key_opens_the_servers_other_routes_too(chat):
    assert chat.ask("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY}"}).status == 200


def test_the_page_and_all_answers_below_it_forbid_inline_code_frames_and_other_hosts(chat):
    for answer in (chat.ask("GET", "/app/"), chat.call("GET", "state"), chat.ask("GET", "/app/api/state")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert chat.call("GET", "state").headers["cache-control"] == "no-store"


def test_the_page_is_kept_by_the_browser_until_it_changes(chat):
    page = chat.ask("GET", "/app/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["cache-control"] == "no-cache"
    again = chat.ask("GET", "/app/", None, {"If-None-Match": page.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert chat.ask("GET", "/app").headers["location"] == "/app/"


@pytest.mark.parametrize(
    "name",
    [
        "../__init__.py",
        "..%2f__init__.py",
        "%2e%2e/store.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "page/../../store.py",
        ".hidden.js",
        "",
        "nothing.js",
        "index.html%00.js",
        "index.html/",
        "store.py",
        f"{'a' * 300}.js",
        f"{'a/' * 3000}a.js",
    ],
)
@pytest.mark.parametrize("part", ["page", "vendor"])
def test_no_other_file_of_the_machine_is_served(chat, part, name):
    connection = chat.raw(f"GET /app/{part}/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert read_all(connection).split(b" ")[1] in (b"404", b"400")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path, monkeypatch):
    from mlx_zip.apps.chat import page_files

    (tmp_path / "page").mkdir()
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "page" / "own.js").write_text("own")
    (tmp_path / "page" / "link.js").symlink_to(tmp_path / "secret.js")
    routes = page_files.routes
    monkeypatch.setattr(page_files, "routes", lambda: routes(tmp_path))
    with chatting() as chat:
        own = chat.ask("GET", "/app/page/own.js")
        assert (own.status, own.body, own.headers["content-type"]) == (200, b"own", "text/javascript; charset=utf-8")
        assert chat.ask("GET", "/app/page/link.js").status == 404


def test_a_body_that_is_too_large_or_too_deep_is_refused():
    with chatting(max_body_bytes=1000) as chat:
        assert chat.call("POST", "conversations", {"system": "x" * 2000}).status == 413
        deep = b'{"packs":' + b"[" * 300 + b"]" * 300 + b"}"
        assert chat.call("POST", "conversations", deep).status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"title": NaN}', b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(chat, body):
    assert chat.call("POST", "conversations", body).status == 400


def test_a_form_of_another_page_is_no_json(chat):
    headers = {"Content-Type": "text/plain", "Authorization": f"Bearer {KEY}"}
    assert chat.ask("POST", API + "conversations", b"{}", headers).status == 415
