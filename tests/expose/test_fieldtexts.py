"""What the source says of types and their fields."""

import sys
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from gpuagent.expose.fieldtexts import field_texts, structs_of
from gpuagent.expose.openapi import Offer, document
from gpuagent.expose.routes import Ask, For, Get, Told
from gpuagent.expose.views import HoldView, NodeView, Page, TenantRow, View
from gpuagent.model.inventory import Limits, Seat, Tenant


def test_fields_are_explained_as_in_the_source() -> None:
    assert field_texts(NodeView)["acts"] == "Whether anything on the host may be changed now."
    assert "version" not in field_texts(NodeView)
    assert "\n" not in "".join(field_texts(Tenant).values())


def test_what_is_inherited_is_explained_too() -> None:
    class More(Limits, frozen=True):
        extra: int = 0

    assert field_texts(More)["min_share_ratio"] == field_texts(Limits)["min_share_ratio"] != ""


def test_they_stand_in_the_document() -> None:
    def never(_told: Told, _ask: Ask) -> View:
        raise NotImplementedError

    get = Get(
        path="/v1/x", audience=For.ANYONE, about="A test.", answer=never, view=Page[TenantRow]
    )
    schemas = document("1", Offer(about="A test.", gets=(get,)))["components"]["schemas"]
    row, page = schemas["TenantRow"], schemas["Page_TenantRow_"]
    assert row["description"] == "A tenant in a list."
    assert row["properties"]["kind"]["description"] == "As declared; empty where it is not."
    assert page["properties"]["next"]["description"].startswith("Pass it as `after`")


def test_structs_are_found_in_whatever_holds_them() -> None:
    found = structs_of([dict[str, tuple[Page[TenantRow] | None, ...]]])
    assert {Page, TenantRow, HoldView} <= set(found)
    assert structs_of([Annotated[Seat, Meta(description="it holds itself")]]) == [Seat]


def test_without_the_source_there_are_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    homeless = msgspec.defstruct("Homeless", [("a", int)], module="gpuagent.nowhere")
    assert field_texts(homeless) == {}
    monkeypatch.setitem(sys.modules, "gpuagent.made_up", type(sys)("gpuagent.made_up"))
    unwritten = msgspec.defstruct("Unwritten", [("a", int)], module="gpuagent.made_up")
    assert field_texts(unwritten) == {}
