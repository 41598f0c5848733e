"""Processes that use mounts of several hosts, and record what they see."""

import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tests.support import histories
from tests.support.histories import ROOT, History, HostDied, Name
from tests.support.hosts import until
from tests.support.machine import link_open
from tests.support.registers import Change, Register


class Player:
    """A process at a host, in a directory of the mount; one operation after the other."""

    def __init__(self, number: int, root: str, history: History, seed: object) -> None:
        """``number``: of the host. ``root``: the directory, which histories have as ``ROOT``."""
        self._host = number
        self._history = history
        self._chance = random.Random(f"{seed} {number}")
        self._directories = {ROOT: os.open(root, os.O_RDONLY | os.O_DIRECTORY)}
        """Descriptors of the directories that it has found, by inode number."""
        self._temporary = b"t%d.%d" % (number, self._chance.randrange(10**9))

    def close(self) -> None:
        for fd in self._directories.values():
            os.close(fd)

    def step(self) -> None:
        """Raises HostDied."""
        kind, args = histories.draw(self._chance, list(self._directories)[1:][-3:])
        with suppress(OSError):  # it is in the history
            getattr(self, "_" + kind)(*args)

    def _at(self, directory: int) -> int:
        return self._directories[directory]

    def _create(self, name: Name) -> None:
        os.close(self._make(name))

    def _make(self, name: Name) -> int:
        with self._history.doing(self._host, "create", name) as event:
            fd = os.open(name[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=self._at(name[0]))
            event.result = os.fstat(fd).st_ino
        return fd

    def _replace(self, name: Name) -> None:
        temporary = name[0], self._temporary
        fd = self._make(temporary)
        try:
            content = self._chance.randbytes(5000)
            self._history.contents[os.fstat(fd).st_ino] = content
            os.write(fd, content)
        finally:
            os.close(fd)
        try:
            self._rename(temporary, name)
        except OSError:
            self._unlink(temporary)

    def _link(self, old: Name, new: Name) -> None:
        with self._history.doing(self._host, "open", old) as event:
            fd = os.open(old[1], os.O_RDONLY, dir_fd=self._at(old[0]))
            event.result = ino = os.fstat(fd).st_ino
        try:
            with self._history.doing(self._host, "link", ino, new) as event:
                link_open(fd, b"/proc/self/fd/%d/%b" % (self._at(new[0]), new[1]))
                event.result = 0
        finally:
            os.close(fd)

    def _unlink(self, name: Name) -> None:
        with self._history.doing(self._host, "unlink", name) as event:
            os.unlink(name[1], dir_fd=self._at(name[0]))
            event.result = 0

    def _rename(self, old: Name, new: Name) -> None:
        with self._history.doing(self._host, "rename", old, new) as event:
            os.rename(old[1], new[1], src_dir_fd=self._at(old[0]), dst_dir_fd=self._at(new[0]))
            event.result = 0

    def _mkdir(self, name: Name) -> None:
        mode = _new_mode()
        with self._history.doing(self._host, "mkdir", name) as event:
            self._history.make_directory(event, mode)
            os.mkdir(name[1], mode, dir_fd=self._at(name[0]))
            with suppress(OSError):
                self._find(os.stat(name[1], dir_fd=self._at(name[0])))

    def _find(self, found: os.stat_result) -> None:
        """A directory. Its mode tells who has made it."""
        self._history.find_directory(found.st_ino, stat.S_IMODE(found.st_mode))

    def _rmdir(self, name: Name) -> None:
        with self._history.doing(self._host, "rmdir", name) as event:
            os.rmdir(name[1], dir_fd=self._at(name[0]))
            event.result = 0

    def _lookup(self, name: Name) -> None:
        with self._history.doing(self._host, "lookup", name) as event:
            found = os.stat(name[1], dir_fd=self._at(name[0]), follow_symlinks=False)
            is_directory = stat.S_ISDIR(found.st_mode)
            event.result = found.st_ino, 0 if is_directory else found.st_nlink
        if is_directory and found.st_ino not in self._directories:
            self._find(found)
            with suppress(OSError):
                fd = os.open(name[1], os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._at(name[0]))
                self._find(os.fstat(fd))
                self._directories.setdefault(os.fstat(fd).st_ino, fd)
                if self._directories[os.fstat(fd).st_ino] != fd:
                    os.close(fd)

    def _open(self, name: Name) -> None:
        """And read: files are whole when they get a name that is opened."""
        with self._history.doing(self._host, "open", name) as event:
            fd = os.open(name[1], os.O_RDONLY, dir_fd=self._at(name[0]))
            event.result = ino = os.fstat(fd).st_ino
        try:
            found = os.read(fd, 10_000)
        except OSError:
            if self._history.dead:  # perhaps its bytes were there
                return
            raise
        finally:
            os.close(fd)
        assert found == self._history.contents.get(ino, b""), f"file {ino} has other bytes"

    def _list(self, directory: int) -> None:
        with self._history.doing(self._host, "list", directory) as event:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._at(directory))
            try:
                found = set(map(os.fsencode, os.listdir(fd)))
                event.result = {name for name in found if name[:1] in b"fdt"}  # others are not ours
            finally:
                os.close(fd)


_BITS = (0o1000, 0o400, 0o200, 0o100, 0o040, 0o010, 0o004, 0o001)
_count = itertools.count()


def _new_mode() -> int:
    """For a directory, so that whoever has made it knows it again."""
    number = next(_count)
    return sum(bit for place, bit in enumerate(_BITS) if number >> place & 1)


class Writer:
    """A process at a host that changes and reads files in place."""

    def __init__(
        self,
        number: int,
        root: Path,
        registers: Sequence[Register],
        history: History,
        seed: object,
    ) -> None:
        """``history``: tells who is dead; then operations may fail, and what was being changed is
        not looked at any more."""
        self._host = number
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        """Where no mount is any more a path would lead to what lies below it."""
        self._registers = registers
        self._dead = history.dead
        self._chance = random.Random(f"{seed} {number}")

    def step(self) -> None:
        register = self._chance.choice(self._registers)
        try:
            if self._chance.random() < 0.5:
                with register.lock:
                    self._change(register)
            if known := register.known(self._host):
                found = self._read(register)
                if not register.is_lost:
                    register.check(known, found)
        except OSError as error:
            if self._host in self._dead:
                raise HostDied from error
            if not self._dead:
                raise

    def _read(self, register: Register) -> bytes:
        with open(register.name, "rb", opener=self._open) as file:
            return file.read()

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags, 0o644, dir_fd=self._root)

    def _change(self, register: Register) -> None:
        try:
            self._change_to(register)
        except BaseException:
            register.is_lost = True
            raise

    def _change_to(self, register: Register) -> None:
        before = register.versions[-1]
        change = Change(self._chance, before, len(register.versions))
        if change.kind == "rewrite":
            register.versions.append(b"")  # on the way
        register.versions.append(change.after)
        flags = {"rewrite": os.O_TRUNC, "append": os.O_APPEND}.get(change.kind, 0)
        fd = self._open(register.name, os.O_RDWR | os.O_CREAT | flags)
        try:
            if change.kind == "truncate":
                os.ftruncate(fd, change.offset)
            else:
                os.lseek(fd, change.offset, os.SEEK_SET)
                assert os.write(fd, change.data) == len(change.data)
            if self._chance.random() < 0.2:
                os.fsync(fd)
        finally:
            os.close(fd)
        version = register.close(self._host)
        if self._chance.random() < 0.5:
            marker = f"marker-{self._host}-{threading.get_ident()}"
            os.close(self._open(marker, os.O_WRONLY | os.O_CREAT))
            os.unlink(marker, dir_fd=self._root)
            register.show(version)

    def close(self) -> None:
        os.close(self._root)


class Playing(Protocol):
    def step(self) -> None:
        """Raises HostDied."""

    def close(self) -> None: ...


Going = Callable[[Callable[[], object], str], None]
"""Waits for a condition, as ``until``; raises what a player raises meanwhile."""


@contextmanager
def playing(players: Sequence[Playing]) -> Iterator[Going]:
    """They do what they draw, all at once, until the block ends."""
    ended, failed = threading.Event(), []

    def play(player: Playing) -> None:
        try:
            while not (ended.is_set() or failed):
                player.step()
        except HostDied:
            pass
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)
        finally:
            player.close()

    threads = [threading.Thread(target=play, args=(player,)) for player in players]

    def going(condition: Callable[[], object], what: str) -> None:
        until(lambda: failed or condition(), what)
        if failed:
            raise failed[0]

    for thread in threads:
        thread.start()
    try:
        yield going
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def players(places: Sequence[Path], history: History, seed: object, each: int = 1) -> list[Playing]:
    """Who uses names, so many at each place; the first one is of host 1."""
    return [
        Player(number, str(place), history, f"{seed} {count}")
        for number, place in enumerate(places, 1)
        for count in range(each)
    ]


def writers(
    places: Sequence[Path],
    registers: Sequence[Register],
    history: History,
    seed: object,
    each: int = 1,
) -> list[Playing]:
    """Who changes files, so many at each place."""
    return [
        Writer(number, place, registers, history, f"{seed} {count}")
        for number, place in enumerate(places, 1)
        for count in range(each)
    ]
