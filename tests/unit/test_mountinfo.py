"""Mounts, as the kernel tells them."""

import os

import pytest

from aifs.core import mountinfo
from aifs.core.mountinfo import Mount


def test_the_mount_of_a_path_is_the_lowest_and_of_these_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounts = [
        Mount(1, "/", "ext4", "/dev/sda1"),
        Mount(2, "/burst one", "tmpfs", "none"),
        Mount(3, "/burst", "overlay", "none"),
        Mount(4, "/burst", "xfs", "/dev/sdb"),
    ]
    monkeypatch.setattr(mountinfo, "all_mounts", lambda: mounts)
    paths = ("/x/y", "/burst one/d", "/burst/d", "/burster", "/burst")
    found = [mount and mount.fstype for mount in map(mountinfo.mount_of, paths)]
    assert found == ["ext4", "tmpfs", "xfs", "ext4", "xfs"]
    monkeypatch.setattr(mountinfo, "all_mounts", list)
    assert mountinfo.mount_of("/x") is None


def test_the_mounts_of_this_process_can_be_read() -> None:
    found = mountinfo.mount_of("/proc/self")
    assert found is not None
    assert (found.fstype, found.device) == ("proc", os.stat("/proc").st_dev)
