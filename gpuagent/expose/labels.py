"""Labels of /metrics: how a card, a slice, a tenant and a control group are named there."""

from gpuagent.model.declare import On, Signal
from gpuagent.model.inventory import Inventory, Subject
from gpuagent.model.text import wire

Labels = dict[str, str]


class Names:
    """Labels of what is measured. The index is for people, the UUID for joins."""

    def __init__(self, inventory: Inventory) -> None:
        self._cards: dict[str, Labels] = {}
        self._slices: dict[str, Labels] = {}
        for card in inventory.gpus or ():
            self._cards[card.uuid] = {"gpu": str(card.index), "uuid": card.uuid}
            for part in card.mig:
                self._slices[part.uuid] = {**self._cards[card.uuid], "mig": part.uuid}
        self._tenants = {
            t.name: {"tenant": wire(t.name), "level": t.level.name} for t in inventory.tenants or ()
        }

    def of_card(self, uuid: str) -> Labels:
        """Labels of a card; one that has left the inventory keeps its UUID."""
        return self._cards.get(uuid, {"gpu": "", "uuid": uuid})

    def of_tenant(self, name: str) -> Labels:
        return self._tenants.get(name, {"tenant": wire(name), "level": ""})

    def of_subject(self, subject: Subject) -> Labels:
        on = subject.on
        if on is On.GPU:
            return self.of_card(subject.gpu)
        if on is On.MIG:
            return self._slices.get(subject.gpu, {"gpu": "", "uuid": "", "mig": subject.gpu})
        if on in {On.TENANT, On.PROCESS}:  # no metric has a process's number
            return self.of_tenant(subject.tenant)
        if on is On.MPS:
            return {"mps": wire(subject.gpu)}
        if on is On.TENANT_GPU:
            return {**self.of_tenant(subject.tenant), **self.of_card(subject.gpu)}
        if on is On.CGROUP:
            return {**self.of_tenant(subject.tenant), "cgroup": wire(subject.cgroup)}
        return {}

    def of_held(self, subject: Subject) -> Labels:
        """Labels of a tenant or a card, the same for either: what does not apply is empty."""
        tenant = self.of_tenant(subject.tenant) if subject.tenant else {"tenant": "", "level": ""}
        return {**tenant, **self.of_card("" if subject.on is On.MPS else subject.gpu)}

    def of_target(self, subject: Subject) -> Labels:
        """Labels of what a knob turns, the same for all: what does not apply is empty."""
        return {**self.of_held(subject), "cgroup": wire(subject.cgroup)}

    def of_reading(self, signal: Signal, subject: Subject, dims: tuple[str, ...]) -> Labels:
        labels = self.of_subject(subject)
        if not signal.dims:
            return labels
        return {**labels, **dict(zip(signal.dims, map(wire, dims), strict=False))}
