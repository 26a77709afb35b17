"""Users and groups by name: who does not exist is allowed nothing."""

import grp
import os
import pwd

import pytest

from gpuagent.config import Launch
from gpuagent.host.accounts import group_id, starters, user_id
from gpuagent.model.inventory import Level
from gpuagent.model.run import Starter

ME = pwd.getpwuid(os.getuid())
MINE = grp.getgrgid(0).gr_name


def test_by_name_and_by_number() -> None:
    assert user_id(ME.pw_name) == ME.pw_uid
    assert group_id(MINE) == 0
    assert (user_id("54321"), group_id("54321")) == (54321, 54321)


@pytest.mark.parametrize("name", ["no-such-user-here", "a\0b", "\u0661", "x" * 64])
def test_who_is_not_there_is_nobody(name: str) -> None:
    assert user_id(name) is None
    assert group_id(name) is None
    assert starters([Launch(user=name), Launch(group=name), Launch(ME.pw_name, name)]) == ()


def test_each_entry_is_a_starter() -> None:
    entries = [Launch(user=ME.pw_name), Launch(group=MINE, sla=(Level.L1, Level.L2)), Launch()]
    assert starters(entries) == (
        Starter(ME.pw_uid, None, (Level.L3,)),
        Starter(None, 0, (Level.L1, Level.L2)),
        Starter(None, None, (Level.L3,)),
    )
