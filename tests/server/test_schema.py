"""schemathesis, from the server's own description: no server error, and answers as described."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from server_tools import byte_engine, local_server

# Not "positive data is accepted": fields have rules besides their types.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def conforms(requests):
    """Every path, with bodies that fit the description and bodies that do not."""
    with local_server(byte_engine(max_model_len=64)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        modes = [schema.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

        @settings(max_examples=requests, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=st.one_of(modes))
        def check(case):
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()
        server.idle(60)


def test_what_is_described_is_what_is_done():
    conforms(40)


@pytest.mark.slow
def test_what_is_described_is_what_is_done_5000_times():
    conforms(5000)
