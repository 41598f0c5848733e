"""What each policy survives, on whole filesystems: any servers, up to as many as the policy
tolerates, lost in any way.

Every file reads right with the servers lost, also after a restart; then a scrub and a rebuild make
the store whole again, and fsck, which reads all bytes, has nothing to say.
"""

import os
import random
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import trio

from aifs.core.config import Config
from aifs.meta.keys import ROOT_INO
from tests.fault.test_server_life import make, require_all, write_files
from tests.support.stores import require_sound, served

SERVERS = 5
POLICIES = {
    "replicas=2": ({"layout.replicas": 2, "layout.count": 2}, 1),
    "replicas=3": ({"layout.replicas": 3, "layout.count": 1}, 2),
    "ec=2+1": ({"layout.ec": "2+1"}, 1),
    "ec=3+2": ({"layout.ec": "3+2"}, 2),
    "containers, replicas=2": (
        {"layout.kind": "interleaved", "layout.replicas": 2, "layout.count": 1},
        1,
    ),
    "containers, ec=3+2": ({"layout.kind": "interleaved", "layout.ec": "3+2"}, 2),
}


def objects_of(server: str) -> list[Path]:
    return sorted(path for path in Path(server).glob("objects/*/*/*") if path.is_file())


def remove_objects(server: str, snapshot: Path) -> None:
    shutil.rmtree(Path(server) / "objects")


def empty_objects(server: str, snapshot: Path) -> None:
    for path in objects_of(server):
        os.truncate(path, 0)


def cut_objects(server: str, snapshot: Path) -> None:
    for path in objects_of(server):
        os.truncate(path, path.stat().st_size // 2)


def flip_bits(server: str, snapshot: Path) -> None:
    rng = random.Random(server)
    for path in objects_of(server):
        data = bytearray(path.read_bytes())
        for _ in range(5):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def restore_old_state(server: str, snapshot: Path) -> None:
    """An administrator puts a backup of the directory back, from before half of the files were
    written."""
    shutil.rmtree(Path(server) / "objects", ignore_errors=True)
    shutil.copytree(snapshot / Path(server).name, server, dirs_exist_ok=True)


LOSSES: dict[str, Callable[[str, Path], None]] = {
    "removed": remove_objects,
    "emptied": empty_objects,
    "cut": cut_objects,
    "flipped": flip_bits,
    "stale": restore_old_state,
}


async def fill(scratch: Path, settings: dict[str, object]) -> tuple[Config, dict[str, int]]:
    """A store with files of two times, and a snapshot of its servers between them."""
    config = await make(
        scratch, settings | {"data.verify": "read", "scrub.interval": "0"}, servers=SERVERS
    )
    async with served(config) as fs:
        sizes = await write_files(fs, "old")
    for server in config.servers:
        shutil.copytree(server, scratch / "snapshot" / Path(server).name)
    async with served(config) as fs:
        sizes |= await write_files(fs, "new")
    return config, sizes


async def survive(scratch: Path, policy: str, kind: str, lost: tuple[int, ...]) -> None:
    settings, _ = POLICIES[policy]
    config, sizes = await fill(scratch, settings)
    # Few containers lie on few servers.
    holding = [server for server in config.servers if objects_of(server)]
    for server in {holding[number % len(holding)] for number in lost}:
        LOSSES[kind](server, scratch / "snapshot")
    async with served(config) as fs:
        await require_all(fs, sizes)
    async with served(config) as fs:
        await fs.setxattr(ROOT_INO, b"user.aifs.scrub", b"start")
        await fs.scrub.wait()
        while not fs.rebuild.idle:
            await trio.sleep(0.01)
        await require_all(fs, sizes)
    await require_sound(config)


def cases(chosen: Callable[[int], bool]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Every policy, kind of loss and set of servers; of them every one whose number is
    ``chosen``."""
    found = [
        (policy, kind, lost)
        for policy, (_, tolerated) in POLICIES.items()
        for kind in LOSSES
        for lost in combinations(range(SERVERS), tolerated)
    ]
    return [case for number, case in enumerate(found) if chosen(number)]


@pytest.mark.sweep("lost")
@pytest.mark.parametrize(("policy", "kind", "lost"), cases(lambda number: number % 13 == 0))
async def test_lost_servers_are_made_up_for(
    scratch: Path, policy: str, kind: str, lost: tuple[int, ...]
) -> None:
    await survive(scratch, policy, kind, lost)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "kind", "lost"), cases(lambda number: number % 13 != 0))
async def test_all_lost_servers_are_made_up_for(
    scratch: Path, policy: str, kind: str, lost: tuple[int, ...]
) -> None:
    await survive(scratch, policy, kind, lost)
