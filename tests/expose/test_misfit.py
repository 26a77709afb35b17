"""What is told of a body that does not fit: the field and its bounds, never the decoder's own words."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.api import DOS
from gpuagent.expose.misfit import misfit
from gpuagent.expose.overrides import OverrideBody
from gpuagent.expose.reports import Latencies
from gpuagent.expose.runs import RunBody
from gpuagent.expose.tokens import TokenBody


def told(body: object, kind: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(json.dumps(body), type=kind)
    return misfit(caught.value, kind)


QUIET = {"ttl_seconds": 60, "why": "x"}
LATENCY = {"quantile": 0.99, "seconds": 1}


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (QUIET | {"share_ratio": 0.01}, OverrideBody, "share_ratio must be a number from 0.05 to 1"),
        (QUIET | {"share_ratio": "a"}, OverrideBody, "share_ratio must be a number from 0.05 to 1"),
        (QUIET | {"power_limit_watts": 0}, OverrideBody, "power_limit_watts must be a number, more than 0 and at most 1000000"),
        (QUIET | {"tenant": 1}, OverrideBody, "tenant must be text"),
        ({"why": "x"}, OverrideBody, "ttl_seconds is missing"),
        (QUIET | {"a\x1b`b": 1}, OverrideBody, "there is no field a\\x1b`b; there are ttl_seconds, why, tenant, gpu, share_ratio, power_limit_watts"),
        (1, OverrideBody, "it must be an object"),
        ({"sla": "L4"}, RunBody, "sla must be one of L1, L2, L3"),
        ({"sla": "L3", "name": "a b"}, RunBody, "name must be 1 to 63 letters, digits and ._@-, of which the first is a letter or a digit"),
        ({"sla": "L3", "gpus": ["0", "a b"]}, RunBody, "each of gpus must be the UUID or the index of a card"),
        ({"sla": "L3", "gpus": ["0"] * 65}, RunBody, "gpus must be a list of at most 64 entries"),
        ({"sla": "L3", "gpu_count": 0}, RunBody, "gpu_count must be a whole number from 1 to 64"),
        ({"sla": "L3", "strict": 1}, RunBody, "strict must be true or false"),
        ({"scopes": ["x"], "expires_seconds": 60}, TokenBody, "each of scopes must be read, metrics, latency:TENANT, override or admin"),
        ({"scopes": ["read"], "expires_seconds": 60, "note": "x" * 201}, TokenBody, "note must be text of at most 200 characters"),
        (LATENCY | {"quantile": 1}, Latencies, "quantile must be a number, more than 0 and less than 1"),
        ([LATENCY, LATENCY | {"quantile": 1}], Latencies, "quantile must be a number, more than 0 and less than 1"),
        ([{"quantile": 0.5}], Latencies, "seconds is missing"),
        ([LATENCY | {"x": 1}], Latencies, "there is no field x; there are quantile, seconds, window_seconds, requests"),
        ([], Latencies, "it must be an object or a list of 1 to 4 entries"),
    ],
)  # fmt: skip
def test_a_field_is_told_with_all_that_it_may_be(body: object, kind: Any, words: str) -> None:
    assert told(body, kind) == words


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = sorted(
    {f for k in (OverrideBody, RunBody, TokenBody) for f in k.__struct_fields__} | {*LATENCY}
)


@pytest.mark.parametrize("kind", [do.body for do in DOS if do.body is not None])
@given(body=_JSON | st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5))
def test_no_body_is_told_of_in_the_decoders_words(kind: Any, body: object) -> None:
    try:
        msgspec.json.decode(json.dumps(body), type=kind)
    except msgspec.ValidationError as error:
        words = misfit(error, kind)
        assert words.isprintable()
        assert "Expected" not in words
        assert "`$" not in words or "there is no field" in words
