"""Schemathesis on the description of all routes: requests made from it, and the answers compared with it."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, seed, settings

from mlx_zip.server.options import Options
from support.fake_engine import FakeEngine, Script
from support.http_server import serving

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (pip install schemathesis==4.32.5)")
from schemathesis.specs.openapi import checks as conformance  # noqa: E402

CHECKS = [
    schemathesis.checks.not_a_server_error,
    conformance.status_code_conformance,
    conformance.content_type_conformance,
    conformance.response_schema_conformance,
    conformance.response_headers_conformance,
]
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@cache
def operations():
    """Every method of every route that `/openapi.json` describes, by its name."""
    with serving(FakeEngine()) as server:
        description = server.ask("GET", "/openapi.json").json
    found = [one.ok() for one in schemathesis.openapi.from_dict(description).get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with serving(FakeEngine(Script("Once upon a time.")), Options(session_files=folder)) as server:
        yield server


def cases():
    """Each operation with requests that fit the description, and with others where it has a body."""
    return [(name, mode) for name, one in operations().items() for mode in (RIGHT, WRONG) if mode is RIGHT or one.body]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), cases(), ids=[f"{name} {mode.value}" for name, mode in cases()])
def test_answers_to_requests_made_from_the_description_conform_to_it(served, name, mode):
    @seed(1)
    @settings(max_examples=10, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operations()[name].as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(base_url=served.url, checks=CHECKS, timeout=20)

    check()
