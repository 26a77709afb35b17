"""Card settings as declared, by a real daemon over the fake driver and the fake nvidia-smi."""

import os

from tests.fakes.nvidia_smi import FakeSmi
from tests.stage import until
from tests.whole.conftest import Host

DECLARED = """
[[cards]]
gpu = "*"
compute_mode = "default"
persistence_mode = true
time_slice = "short"
"""
BEFORE, AFTER = (3, False, 0), (0, True, 1)


def test_settings_are_kept_as_declared_and_put_back_by_stop_reload_and_rescue(host: Host) -> None:
    folder = host.stage.folder / "bin"
    folder.mkdir()
    smi = FakeSmi(folder, [host.card.uuid])
    host.stage.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    host.card.compute_mode, host.card.persistence = 3, False

    def settings() -> tuple[int, bool, int]:
        return host.card.compute_mode, host.card.persistence, smi.slices[host.card.uuid]

    def become(what: tuple[int, bool, int], why: str) -> None:
        until(why, lambda: host.work() or settings() == what)  # type: ignore[func-returns-value]

    host.stage.configure(host.rules + DECLARED)
    daemon = host.run()
    become(AFTER, "the card is as declared")
    daemon.process.kill()
    daemon.process.wait()
    assert settings() == AFTER
    done = host.stage.command("restore")
    assert (done.returncode, settings()) == (0, BEFORE), done.stderr
    daemon = host.run()
    become(AFTER, "it is so again")
    host.stage.configure(host.rules)
    host.stage.command("reload")
    become(BEFORE, "it is declared no longer")
    host.stage.configure(host.rules + DECLARED)
    host.stage.command("reload")
    become(AFTER, "and declared again")
    assert daemon.stop() == 0
    assert settings() == BEFORE
