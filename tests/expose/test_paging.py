"""Lists of what happened, in parts: every item once, the newest first, whatever comes meanwhile."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.paging import mark, newest_first, parted, size
from gpuagent.expose.problems import Trouble
from gpuagent.model.inventory import on_gpu
from gpuagent.model.state import Event
from tests.expose import snapshots
from tests.expose.scene import Scene, ask, serving

RUN = snapshots.RUN


def events(first: int, count: int) -> tuple[Event, ...]:
    return tuple(Event("test", 1.0, str(n), number=n) for n in range(first, first + count))


@given(
    first=st.integers(1, 50),
    count=st.integers(0, 60),
    step=st.integers(1, 20),
    grows=st.integers(0, 5),
)
def test_all_parts_together_are_the_list_although_it_grows(
    first: int, count: int, step: int, grows: int
) -> None:
    query = {"limit": str(step)}
    items, seen = events(first, count), []
    while True:
        part, after = newest_first(query, items, RUN)
        assert len(part) <= step
        seen += [e.number for e in part]
        if after is None:
            break
        query["after"] = after
        items += events(items[-1].number + 1, grows)
    assert seen == list(range(first + count - 1, first - 1, -1))


def test_what_has_fallen_out_of_the_list_ends_it() -> None:
    part, after = newest_first({"after": mark(RUN, 5)}, events(10, 5), RUN)
    assert (part, after) == ((), None)


def test_a_mark_of_another_run_is_not_found() -> None:
    with pytest.raises(Trouble) as refused:
        newest_first({"after": "0ther-5"}, events(1, 5), RUN)
    assert refused.value.status == 404
    assert "ended" in refused.value.detail


@given(run=st.from_regex(r"\A[0-9a-zA-Z]{1,32}\Z"), number=st.integers(0, 10**15 - 1))
def test_marks_go_there_and_back(run: str, number: int) -> None:
    assert parted(mark(run, number)) == (run, number)


@given(st.text(max_size=60))
def test_any_other_text_is_refused_with_an_example(text: str) -> None:
    if re.fullmatch("[0-9A-Za-z]{1,32}-[0-9]{1,15}", text):
        return
    with pytest.raises(Trouble) as refused:
        parted(text)
    assert refused.value.status == 400
    assert "such as" in refused.value.remedy


@given(st.text(max_size=12))
def test_a_size_is_a_number_or_refused(text: str) -> None:
    if text.isascii() and text.isdigit() and len(text) < 9 and int(text):
        assert 1 <= size({"limit": text}) <= 1000
        return
    with pytest.raises(Trouble) as refused:
        size({"limit": text})
    assert refused.value.status == 400


async def test_events_come_in_parts() -> None:
    many = msgspec.structs.replace(snapshots.busy(), events=events(1, 5))
    async with serving(Scene(many)) as (_, path):
        first = (await ask(path, "/v1/events?limit=2")).json
        second = (await ask(path, f"/v1/events?limit=2&after={first['next']}")).json
        last = (await ask(path, f"/v1/events?limit=2&after={second['next']}")).json
    assert [e["id"] for p in (first, second, last) for e in p["items"]] == [
        mark(RUN, n) for n in (5, 4, 3, 2, 1)
    ]
    assert last["next"] is None
    assert first["total"] == 5


# -- the audit log -----------------------------------------------------------------------------------------


async def test_the_audit_log_says_what_was_done_and_why() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        page = (await ask(path, "/v1/audit")).json
    (action,) = page["items"]
    assert action["tenant"] == "train"
    assert action["cgroup"] == snapshots.TRAIN_PATH
    assert action["gpu"] is None
    assert (action["before"], action["wrote"]) == ("max 100000", "42000 20000")
    assert action["numbers"] == {"memory_used_ratio": 0.875}
    assert action["why"].startswith("memory of card 0")
    assert (page["next"], page["total"]) == (None, 1)


async def test_its_newest_actions_come_first_and_in_parts() -> None:
    snapshot = snapshots.busy()
    (one,) = snapshot.audit
    many = tuple(
        msgspec.structs.replace(one, number=n, subject=on_gpu(snapshots.GPU0)) for n in range(1, 8)
    )
    async with serving(Scene(msgspec.structs.replace(snapshot, audit=many))) as (_, path):
        first = (await ask(path, "/v1/audit?limit=4")).json
        rest = (await ask(path, f"/v1/audit?limit=4&after={first['next']}")).json
    assert [a["id"] for a in first["items"] + rest["items"]] == [
        mark(RUN, n) for n in range(7, 0, -1)
    ]
    assert first["items"][0]["gpu"] == snapshots.GPU0
    assert rest["next"] is None


@pytest.mark.parametrize("name", snapshots.HOSTILE)
async def test_hostile_names_leave_it_valid(name: str) -> None:
    async with serving(Scene(snapshots.hostile((name,)))) as (_, path):
        reply = await ask(path, "/v1/audit")
    assert reply.status == 200
    assert len(reply.json["items"]) == 1
