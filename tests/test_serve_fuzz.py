"""Requests made from the server's own description of itself (schemathesis): none makes it fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, served

CASES = 60


@pytest.fixture(scope="module")
def up() -> Iterator[Served]:
    # Answers stay short: what is asked matters here.
    with served(context_limit=40, body_limit=100_000) as one:
        yield one


def attack(up: Served, cases: int) -> None:
    schema = schemathesis.openapi.from_dict(up.http.get("/openapi.json").json())
    schema.config.update(base_url=up.url)
    cases_of = [found.ok().as_strategy() for found in schema.get_all_operations()]
    assert len(cases_of) >= 10
    statuses = set()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(data.draw(st.sampled_from(cases_of)))
        response = case.call(session=session)
        statuses.add(response.status_code)
        assert response.status_code not in (500, 502), (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    with requests.Session() as session:
        ask()
    assert {200, 400, 404} <= statuses
    assert up.ask("the flake", max_tokens=5).status_code == 200


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_makes_the_server_fail(up: Served) -> None:
    attack(up, CASES)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_of_a_thousand_makes_the_server_fail(up: Served) -> None:
    attack(up, 1000)
