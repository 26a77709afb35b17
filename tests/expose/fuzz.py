"""Asks every operation that a listener's document names, with what fits it and with what does not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, CheckFunction, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gpuagent.expose.reports import QUANTILES
from tests.expose.snapshots import GPU0, GPU1

CONFORMANCE: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CHECKS = [*CONFORMANCE, negative_data_rejection, positive_data_acceptance]
Operation = APIOperation[Any, Any, Any, Any]

EXAMPLES = 12
EXAMPLES_REFUSED = 4
"""Of who may not: what it sends is not looked at."""
ALSO: Mapping[str, set[int]] = {
    # Only the agent knows which of its runs a mark is of.
    "GET /v1/events": {400},
    "GET /v1/audit": {400},
    "GET /v1/refusals": {400},
    # What is printable: a scope may name a tenant.
    "POST /v1/tokens": {422},
    # What a card takes, and what can be printed.
    "PUT /v1/overrides/{name}": {422},
    # How often one user has asked already, and what no host can give.
    "POST /v1/runs": {422, 429},
    # Which quantiles are kept: the objective of a tenant is one.
    "PUT /v1/tenants/{name}/latency": {422},
}
"""How what fits its schema may be refused all the same, for what no schema can tell."""
KNOWN = ("train", "serve", GPU0, GPU1)
"""Names that are there, on the busy host."""

_SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who asks, and what that one may."""

    name: str
    audiences: frozenset[str]
    """Those that it belongs to, by their `x-audience`."""
    tenants: frozenset[str] | None = None
    """The tenants that it may report for; None for all."""
    refusal: int = 403
    """The status where it does not belong to the audience."""
    headers: dict[str, str] = {}

    def may_use(self, operation: Mapping[str, Any]) -> bool:
        """Whether an operation of a document is for it. The tenant in the path is another matter."""
        return operation.get("security") == [] or operation["x-audience"] in self.audiences


class Found(msgspec.Struct):
    """What came of it."""

    statuses: dict[str, set[int]] = {}
    """By operation, such as "GET /v1/node"."""
    changes: dict[str, set[str]] = {}
    """Operations by which something was changed, and the names in their paths."""


def ask_all(
    url: str,
    document: Any,
    who: Who,
    changed: Callable[[], object],
    *,
    trusted: str | bool = True,
) -> Found:
    """Ask everything that `document` names, as `who`. `changed` is compared around every request.

    `trusted` is the path of the certificate to trust, over TLS. Raises AssertionError or
    schemathesis's failures where an answer is not as the document says.
    """
    found = Found()
    session = requests.Session()
    session.trust_env = False  # no proxy and no certificates of the machine

    def one(case: Case[Any], name: str | None) -> None:
        label = case.operation.label
        if name is not None:
            _put_in(case, name)
        before = changed()
        response = case.call(base_url=url, session=session, headers=who.headers, verify=trusted)
        found.statuses.setdefault(label, set()).add(response.status_code)
        if changed() != before:
            found.changes.setdefault(label, set()).add(case.path_parameters.get("name", ""))
        excused = response.status_code in {413, *ALSO.get(label, ())}
        case.validate_response(response, checks=CONFORMANCE if excused else CHECKS)

    with session:
        for operation, mode, examples in _operations(document, who):
            cases = operation.as_strategy(generation_mode=mode)
            names = st.sampled_from((*KNOWN, None)) if "{name}" in operation.path else st.none()
            settings(_SETTINGS, max_examples=examples)(given(case=cases, name=names)(one))()
    return found


def _put_in(case: Case[Any], name: str) -> None:
    """Ask about this one: no generator guesses the name of something that is there."""
    case.path_parameters["name"] = name
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for part in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(part, dict):
            part.update({field: name for field in ("tenant", "gpu") if part.get(field)})
            if "quantile" in part:  # nor does it guess one that is kept
                part["quantile"] = QUANTILES[0]
            if "ttl_seconds" in part:  # nor a reason that can be printed
                part["why"] = "a test"


def _operations(document: Any, who: Who) -> Iterator[tuple[Operation, GenerationMode, int]]:
    """Every operation, and once more where there is anything to get wrong; how many examples of it."""
    # Who asks is our part: the generator is to leave the Authorization header alone.
    plain = {key: part for key, part in document.items() if key != "security"}
    for loaded in schemathesis.openapi.from_dict(plain).get_all_operations():
        assert isinstance(loaded, Ok)
        operation = loaded.ok()
        definition = document["paths"][operation.path][operation.method]
        if not who.may_use(definition):
            yield operation, GenerationMode.POSITIVE, EXAMPLES_REFUSED
            continue
        content = definition["responses"].get("200", {}).get("content", {})
        if "text/event-stream" in content:
            continue  # it would not end
        yield operation, GenerationMode.POSITIVE, EXAMPLES
        if "parameters" in definition or "requestBody" in definition:
            yield operation, GenerationMode.NEGATIVE, EXAMPLES
