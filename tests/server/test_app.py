"""Routes beside the dialects, and who may come in."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.routing import Route

from mlx_zip.engine import SessionInfo
from mlx_zip.server.app import make_app
from mlx_zip.server.options import Options
from support.fake_engine import CONTEXT, FakeEngine
from support.http_server import serving

USER = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine()) as server:
        yield server


def test_the_model_is_listed_and_described(served):
    (model,) = served.ask("GET", "/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("stories", "model")
    assert served.ask("GET", "/v1/models/stories").json == model


def test_the_list_of_models_says_how_long_their_context_is(served):
    found = served.ask("GET", "/v1/models").json
    (model,), (for_codex,) = found["data"], found["models"]
    assert (model["context_length"], model["max_model_len"]) == (CONTEXT, CONTEXT)
    assert (for_codex["slug"], for_codex["context_window"]) == ("stories", CONTEXT)
    needed = {"display_name", "shell_type", "visibility", "supported_in_api", "priority", "base_instructions"}
    needed |= {"supported_reasoning_levels", "truncation_policy", "experimental_supported_tools"}
    assert needed <= for_codex.keys()


def test_the_metrics_count_requests_and_answers(served):
    served.chat()
    served.ask("GET", "/secret/path")
    text = served.ask("GET", "/metrics").body.decode()
    assert 'mlx_zip_http_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert "secret" not in text
    assert "mlx_zip_alive 1.0" in text
    assert "mlx_zip_first_id_seconds_count" in text


def test_the_routes_are_described_with_their_bodies(served):
    found = served.ask("GET", "/openapi.json").json
    assert found["openapi"].startswith("3.1")
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = found["components"]["schemas"][chat["$ref"].rpartition("/")[2]]
    assert schema["additionalProperties"] is False
    assert {"messages", "temperature", "user"} <= schema["properties"].keys()
    assert "/v1/models/{name}" in found["paths"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}])
def test_nobody_comes_in_without_the_key(headers):
    with serving(FakeEngine(), Options(api_key="kéy")) as served:
        answer = served.ask("POST", "/v1/chat/completions", {"messages": USER}, headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        assert served.ask("GET", "/health").status == 200
        assert served.ask("GET", "/metrics").status == 401


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer key"}, {"x-api-key": "key"}])
def test_the_key_opens(headers):
    with serving(FakeEngine(), Options(api_key="key")) as served:
        assert served.ask("GET", "/v1/models", None, headers).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""])
def test_a_name_that_is_not_this_machines_is_refused(served, host):
    answer = served.ask("GET", "/v1/models", None, {"Host": host})
    assert (answer.status, answer.json["error"]["code"]) == (403, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"])
def test_names_of_this_machine_are_accepted(served, host):
    assert served.ask("GET", "/v1/models", None, {"Host": host}).status == 200


def test_a_page_of_another_origin_is_refused_on_every_route(served):
    routes = [route for route in make_app(served.core).routes if isinstance(route, Route)]
    asked = [(method, route.path) for route in routes for method in route.methods or ()]
    assert len(asked) > 15
    for method, path in asked:
        answer = served.ask(method, path, None, {"Origin": "http://page.example"})
        assert answer.status == 403, (method, path)
    own = {"Origin": served.url}
    assert served.ask("GET", "/v1/models", None, own).status == 200


def test_a_page_of_another_origin_is_refused_before_its_browser_asks_where_others_are_allowed():
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    with serving(FakeEngine(), Options(allowed_origins=("http://other.example",))) as served:
        for headers in (asked, asked | {"Origin": "http://other.example", "Host": "elsewhere.example"}):
            answer = served.ask("OPTIONS", "/v1/chat/completions", None, headers)
            assert (answer.status, answer.json["error"]["type"]) == (403, "permission_error")


def test_pages_of_any_origin_may_ask_if_all_are_allowed():
    with serving(FakeEngine(), Options(allowed_origins=("*",))) as served:
        assert served.ask("GET", "/v1/models", None, {"Origin": "http://page.example"}).status == 200


def test_the_list_of_models_may_end_in_a_slash(served):
    assert served.ask("GET", "/v1/models/").json == served.ask("GET", "/v1/models").json


def test_browsers_are_told_nothing_unless_their_origin_is_allowed(served):
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.ask("OPTIONS", "/v1/models", None, asked).headers
    with serving(FakeEngine(), Options(allowed_origins=("http://page.example",), api_key="key")) as other:
        answer = other.ask("OPTIONS", "/v1/chat/completions", None, asked)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "http://page.example")
        refused = other.ask("GET", "/v1/models", None, asked)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "http://page.example")


def test_sessions_are_listed_and_dropped():
    engine = FakeEngine()
    engine.kept = {name: SessionInfo(name, 10, 8, 1000, False, 1.0) for name in ("a", "b", "c")}
    with serving(engine) as served:
        assert [one["name"] for one in served.ask("GET", "/v1/mlx_zip/sessions").json["data"]] == ["a", "b", "c"]
        assert served.ask("DELETE", "/v1/mlx_zip/sessions/a").status == 200
        assert served.ask("DELETE", "/v1/mlx_zip/sessions/a").status == 404
        assert served.ask("DELETE", "/v1/mlx_zip/sessions").json == {"deleted": 2, "responses": 0}
        assert served.ask("POST", "/v1/mlx_zip/sessions/save", {"session": "b", "file": "b.safetensors"}).status == 403


def test_after_the_engine_has_stopped_sessions_answer_503():
    engine = FakeEngine()
    with serving(engine) as served:
        engine.close()
        for method, path in (("GET", ""), ("DELETE", ""), ("DELETE", "/a")):
            assert served.ask(method, f"/v1/mlx_zip/sessions{path}").status == 503


def test_sessions_are_saved_in_one_folder_alone(tmp_path: Path):
    engine = FakeEngine()
    engine.kept = {"a": SessionInfo("a", 10, 8, 1000, False, 1.0)}
    with serving(engine, Options(session_files=tmp_path)) as served:
        path = "/v1/mlx_zip/sessions/"
        assert served.ask("POST", path + "save", {"session": "a", "file": "a.safetensors"}).status == 200
        assert served.ask("POST", path + "load", {"file": "a.safetensors"}).json["name"] == "a"
        for name in ("../a.safetensors", "/etc/passwd", "a", ".safetensors", "a.safetensors\n"):
            assert served.ask("POST", path + "save", {"session": "a", "file": name}).status == 400
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
