"""mount(8), umount(8) and fstab with the installed helpers, in a namespace with its own /sbin and
/etc.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs

INSTALL = ROOT / "scripts" / "install-mount-helper"

_SETUP = """
set -e
# Or daemons of other tests would not end:
umount --all --types fuse.aifs --lazy --internal-only --no-canonicalize || true
mkdir "$1/sbin" "$1/etc"
cp -a "$2/mount.fuse" "$2/mount.fuse3" "$1/sbin"
cp -a /etc/. "$1/etc"
: >"$1/etc/fstab"
mount --bind "$1/sbin" "$2"
mount --bind "$1/etc" /etc
echo ready
exec cat
"""


class System:
    """A mount namespace of its own with a formatted store: what is installed there is nowhere
    else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "store"
        self.path = directory / "mnt"
        self.path.mkdir()
        aifs("format", self.source)
        self.command = directory / "aifs"
        self.command.write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m aifs.cli.main "$@"\n'
        )
        self.command.chmod(0o755)
        sbin = os.path.realpath("/sbin")
        self._holder = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                _SETUP,
                "sh",
                directory,
                sbin,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout.readline() == b"ready\n"

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command in the namespace; with ``check`` a failure fails the test with what it said."""
        done = subprocess.run(
            ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *map(str, command)],
            check=False,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def install(
        self, *arguments: str | Path, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.run(INSTALL, "--aifs", self.command, *arguments, check=check)

    def mounts(self) -> list[list[str]]:
        """The lines of /proc/mounts for the store: source, mountpoint, type, options."""
        lines = self.run("cat", "/proc/self/mounts").stdout.splitlines()
        return [line.split() for line in lines if line.split()[1] == str(self.path)]

    def daemons(self) -> list[str]:
        """Processes that have the store's mountpoint or source among their arguments."""
        names = {os.fsencode(self.path), os.fsencode(self.source)}
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    arguments = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                except OSError:  # it ended meanwhile
                    continue
                if names & set(arguments) and b"go-on" not in arguments:  # one that stands by
                    found.append(entry.name)
        return found

    def close(self) -> None:
        while self.mounts():
            self.run("umount", "--internal-only", "--lazy", self.path)
        self._holder.communicate(timeout=TIMEOUT_S)


@contextmanager
def installed_system(directory: Path) -> Iterator[System]:
    made = System(directory)
    try:
        made.install()
        yield made
        aifs("fsck", made.source)
    finally:
        made.close()
        assert not made.daemons()


@pytest.fixture(scope="module")
def shared_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with installed_system(tmp_path_factory.mktemp("helper")) as made:
        yield made


@pytest.fixture
def system(shared_system: System) -> Iterator[System]:
    """With the helpers installed; a test may mount its store, which is unmounted afterwards."""
    yield shared_system
    if shared_system.mounts():
        shared_system.run(shared_system.command, "umount", shared_system.path)


@pytest.fixture
def own_system(tmp_path: Path) -> Iterator[System]:
    """One that the test may spoil."""
    with installed_system(tmp_path) as made:
        yield made


@pytest.mark.sweep
def test_the_namespace_does_not_keep_mounts_of_other_tests_alive(
    mounted: Mounted, own_system: System
) -> None:
    mounted.unmount()
    assert not own_system.mounts()


FORMS = {
    "aifs": ("-t", "aifs", "{source}"),
    "fuse.aifs": ("-t", "fuse.aifs", "{source}"),
    "fuse": ("-t", "fuse", "mount.aifs#{source}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_mount_8_mounts_and_umount_8_returns_when_all_is_safe(system: System, form: str) -> None:
    arguments = [word.format(source=system.source) for word in FORMS[form]]
    system.run("mount", *arguments, system.path)
    mounted = system.mounts()
    assert [(line[0], line[2]) for line in mounted] == [(str(system.source), "fuse.aifs")]
    assert {"rw", "allow_other"} <= set(mounted[0][3].split(","))
    assert not {"nosuid", "nodev"} & set(mounted[0][3].split(","))
    system.run("sh", "-c", f"echo kept > {system.path}/file")
    system.run("umount", system.path)
    assert system.mounts() == []
    assert system.daemons() == []
    system.run("mount", *arguments, system.path)
    assert system.run("cat", system.path / "file").stdout == "kept\n"


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_mount_8_passes_options_on_and_shows_our_error(system: System, form: str) -> None:
    arguments = [word.format(source=system.source) for word in FORMS[form]]
    failed = system.run("mount", *arguments, system.path, "-o", "noatme", check=False)
    assert failed.returncode != 0
    assert "aifs: unknown option 'noatme'; the nearest valid one is noatime\n" in failed.stderr
    assert system.mounts() == []
    options = "ro,noatime,nosuid,nodev,_netdev,nofail,x-test.unknown,layout.unit=64KiB,user"
    system.run("mount", *arguments, system.path, "-o", options)
    assert {"ro", "noatime", "nosuid", "nodev", "noexec"} <= set(system.mounts()[0][3].split(","))
    system.run("umount", system.path)
    assert system.daemons() == []


@pytest.mark.sweep
def test_mount_8_remounts(system: System) -> None:
    system.run("mount", "-t", "aifs", system.source, system.path)
    system.run("mount", "-o", "remount,ro,noatime", system.path)
    assert {"ro", "noatime"} <= set(system.mounts()[0][3].split(","))
    assert system.run("touch", system.path / "file", check=False).returncode
    system.run("mount", "-o", "remount,rw", system.path)
    system.run("touch", system.path / "file")


@pytest.mark.sweep
def test_a_sloppy_mount_ignores_unknown_options(system: System) -> None:
    system.run("mount", "-s", "-t", "aifs", system.source, system.path, "-o", "noatme")
    assert len(system.mounts()) == 1


@pytest.mark.sweep
def test_fstab(system: System) -> None:
    printed = system.install().stdout
    line = next(line for line in printed.splitlines() if " aifs " in line and "/mnt/store" in line)
    line = line.replace("/srv/store", str(system.source)).replace("/mnt/store", str(system.path))
    (system.directory / "etc" / "fstab").write_text(f"{line}\n")
    system.run("mount", system.path)
    assert len(system.mounts()) == 1
    system.run("mount", "-a")
    assert len(system.mounts()) == 1
    system.run("umount", system.path)
    system.run("mount", "-a")
    assert [mounted[2] for mounted in system.mounts()] == ["fuse.aifs"]
    system.run("umount", "--all-targets", system.path)
    assert system.mounts() == []
    assert system.daemons() == []


@pytest.mark.sweep
def test_umount_8_of_a_busy_mount_says_who_uses_it(system: System) -> None:
    system.run("mount", "-t", "aifs", system.source, system.path)
    script = f"cd {system.path} && umount {system.path}; echo $?"
    done = system.run("sh", "-c", script)
    assert done.stdout != "0\n"
    assert f"aifs: {system.path}: is in use by sh (pid " in done.stderr
    assert len(system.mounts()) == 1
    system.run("umount", "--lazy", system.path)
    assert system.mounts() == []


@pytest.mark.sweep
@pytest.mark.parametrize("what", ["root", "directory", "file"])
def test_umount_8_of_a_bind_mount_leaves_the_mount(system: System, what: str) -> None:
    system.run("mount", "-t", "aifs", system.source, system.path)
    place = system.directory / f"bind-{what}"
    if what == "file":
        place.touch()
    else:
        place.mkdir()
    source = system.path if what == "root" else system.path / what
    make = {"root": "true", "directory": f"mkdir -p {source}", "file": f"touch {source}"}
    system.run("sh", "-c", make[what])
    system.run("mount", "--bind", source, place)
    system.run("umount", place)
    system.run("touch", system.path / "it-serves")
    if what == "root":  # the other way round
        system.run("mount", "--bind", source, place)
        system.run("umount", system.path)
        system.run("touch", place / "it-serves")
        assert system.daemons()
        system.run(system.command, "umount", place)
    else:
        system.run("umount", system.path)
    assert not system.mounts() and not system.daemons()


@pytest.mark.sweep
def test_a_fake_mount_checks_only(system: System) -> None:
    system.run("mount", "--fake", "-t", "aifs", system.source, system.path)
    assert system.mounts() == []


@pytest.mark.sweep
def test_uninstall_leaves_nothing(own_system: System) -> None:
    sbin = own_system.directory / "sbin"
    unit = own_system.directory / "etc" / "systemd" / "system" / "aifs@.service"
    assert len(list(sbin.iterdir())) > 2 and unit.exists()
    own_system.install("--uninstall")
    assert sorted(path.name for path in sbin.iterdir()) == ["mount.fuse", "mount.fuse3"]
    assert not unit.exists()
    assert (
        own_system.run(
            "mount", "-t", "aifs", own_system.source, own_system.path, check=False
        ).returncode
        != 0
    )


@pytest.mark.sweep
def test_a_helper_of_somebody_else_is_left_alone(own_system: System) -> None:
    helper = own_system.directory / "sbin" / "mount.aifs"
    helper.write_text("#!/bin/sh\n")
    for action in ((), ("--uninstall",)):
        refused = own_system.install(*action, check=False)
        assert refused.returncode == 1
        assert (
            refused.stderr
            == "install-mount-helper: /sbin/mount.aifs is not ours; remove it first\n"
        )
    assert helper.read_text() == "#!/bin/sh\n"


@pytest.mark.sweep
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_systemd_unit_is_valid(scratch: Path) -> None:
    command = scratch / "aifs"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    subprocess.run(
        [INSTALL, "--prefix", scratch, "--aifs", command], check=True, capture_output=True
    )
    template = scratch / "etc" / "systemd" / "system" / "aifs@.service"
    instance = template.with_name("aifs@test.service")
    template.rename(instance)
    verified = subprocess.run(
        ["systemd-analyze", "verify", instance],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert verified.returncode == 0
    assert not re.search(r"aifs@", verified.stderr)
    assert f'ExecStart="{command}" mount' in instance.read_text()
