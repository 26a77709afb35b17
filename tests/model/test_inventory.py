"""Who and what exists: subjects, and the questions that an inventory answers."""

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.model.declare import On
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    Inventory,
    Level,
    Subject,
    Tenant,
    on_cgroup,
    on_gpu,
    on_mig,
    on_tenant,
    on_tenant_gpu,
)

words = st.text(max_size=5)
subjects = st.one_of(
    st.just(NODE),
    words.map(on_gpu),
    words.map(on_mig),
    words.map(on_tenant),
    st.builds(on_tenant_gpu, words, words),
    st.builds(on_cgroup, words, words, st.integers(0, 2**63)),
)


@given(subjects, subjects)
def test_equal_parts_equal_subject(one: Subject, other: Subject) -> None:
    parts = [(s.on, s.gpu, s.tenant, s.cgroup, s.inode) for s in (one, other)]
    assert (one == other) == (parts[0] == parts[1])
    assert (one < other) == (parts[0] < parts[1])
    if one == other:
        assert hash(one) == hash(other)


def test_what_is_about_different_things_differs() -> None:
    same_word = [NODE, on_gpu("a"), on_mig("a"), on_tenant("a"), on_tenant_gpu("a", "a")]
    assert len({*same_word, on_cgroup("a", "/a", 1), on_cgroup("a", "/a", 2)}) == 7


def test_a_subject_reads_as_people_would_name_it() -> None:
    assert str(NODE) == "node"
    assert str(on_gpu("GPU-1")) == "gpu:GPU-1"
    assert str(on_tenant_gpu("chat", "GPU-1")) == "tenant_gpu:chat:GPU-1"
    assert str(on_cgroup("chat", "/a.slice/b", 7)) == "cgroup:chat:/a.slice/b"
    assert on_cgroup("chat", "/a", 7).on is On.CGROUP


def test_an_inventory_knows_its_own() -> None:
    cards = (Gpu("GPU-1", 0, "H100"), Gpu("GPU-2", 1, "H100"))
    tenants = (
        Tenant("chat", Level.L1, gpus=("GPU-1",)),
        Tenant("train", Level.L3, gpus=("GPU-1", "GPU-2")),
        Tenant("cpu-only", Level.L3),
    )
    known = Inventory(gpus=cards, tenants=tenants)
    assert known.gpu("GPU-2") is cards[1]
    assert known.gpu("GPU-3") is None
    assert known.tenant("train") is tenants[1]
    assert known.tenant("GPU-1") is None
    assert known.on_card("GPU-1") == tenants[:2]
    assert known.on_card("GPU-3") == ()


def test_what_could_not_be_read_answers_as_nothing() -> None:
    unknown = Inventory()
    assert (unknown.gpus, unknown.gpu_processes, unknown.tenants) == (None, None, None)
    assert unknown.gpu("GPU-1") is None
    assert unknown.tenant("chat") is None
    assert unknown.on_card("GPU-1") == ()


def test_the_first_to_be_held_back_is_the_highest_number() -> None:
    assert sorted(Level, reverse=True) == [Level.L3, Level.L2, Level.L1]
