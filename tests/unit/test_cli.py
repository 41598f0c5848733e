"""The command line in process: what it prints, its exit codes, its options. Mounts:
test_cli_mount.py.
"""

import errno
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from aifs.cli import door, output, umount
from aifs.cli.main import main
from aifs.cli.output import print_table
from aifs.core import config, errors, mountinfo
from aifs.fuse.options import parse


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and message of a command that must fail with one line."""
    code, out, err = run(capsys, *arguments)
    assert out == ""
    assert err.startswith("aifs: ") and err.count("\n") == 1
    return code, err.removeprefix("aifs: ").rstrip("\n")


# --- help and usage -------------------------------------------------------------------------------


def test_help_documents_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    raised = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert "..." not in out.partition("Stores and mounts:")[2], "a summary is cut off: short_help"
    assert raised <= {
        int(line.split()[0]) for line in out.splitlines() if line.strip()[:1].isdigit()
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fromat"], "there is no command aifs fromat; did you mean format?"),
        (["mount", "/a"], "Missing argument 'MOUNTPOINT'."),
        (["fsck", "/a", "--repiar"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, said = refused(capsys, *arguments)
    assert code == 2
    assert said.startswith(message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoint", "plan", ""],
        ["format", ""],
        ["mount", "", "/m"],
        ["mount", "/s", ""],
        ["umount", ""],
        ["server", "add", "/s", ""],
    ],
)
def test_an_empty_path_does_not_mean_the_current_directory(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, said = refused(capsys, *arguments)
    assert code == 2
    assert "it is empty; was a variable not set?" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["format", "s3://bucket"],
        ["mount", "gs://bucket", "/m"],
        ["meta", "backup", "/s", "--to", "s3://bucket/meta"],
    ],
)
def test_an_address_of_another_kind_is_no_local_directory(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = refused(capsys, *arguments)
    assert code == 2 and "bucket" in said and "is not the path of a file or directory" in said
    assert os.listdir(tmp_path) == []


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "Stores and mounts:" in err


# --- config ---------------------------------------------------------------------------------------


def test_config_shows_values_and_origins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "aifs.yaml").write_text("layout:\n  count: 2\n")
    code, out, _ = run(
        capsys, "config", "show", tmp_path, "-o", "layout.unit=4MiB,ro", "-o", "log.level=debug"
    )
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["layout.unit"] == ["4MiB", "-o"]
    assert rows["log.level"] == ["debug", "-o"]
    assert rows["layout.count"] == ["2", f"{tmp_path}/aifs.yaml:2"]
    assert rows["meta.commit_interval"] == ["1s", "default"]


def test_config_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(capsys, "config", "show", tmp_path, "--json")
    assert json.loads(out)["layout.unit"] == {"value": "1MiB", "origin": "default"}
    assert list(json.loads(out)) == config.known_keys()


def test_a_wrong_configuration_exits_with_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = refused(capsys, "config", "show", tmp_path, "-o", "layout.unti=1")
    assert code == 3
    assert said == "-o layout.unti: unknown key; the nearest valid key is layout.unit"


def test_a_configuration_is_checked_before_it_is_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("meta: {directory: /none/meta}\nservers: [/none/a]\nlayout:\n  unit: 4MiB\n")
    code, out, _ = run(capsys, "config", "check", file)
    assert (code, out) == (0, f"{file}: no fault\n")
    file.write_text(file.read_text().replace("4MiB", "5"))
    code, said = refused(capsys, "config", "check", file)
    assert code == 3 and said.startswith(f"{file}:4: layout.unit: 5 is not")


# --- mount options --------------------------------------------------------------------------------

KEYS = ["servers", "layout.unit"]
FSTAB = "auto,noauto,user,users,nofail,_netdev,x-systemd.requires=/a.b,comment=c,user=me,relatime"


@pytest.mark.parametrize(
    ("given", "privileged", "flags", "kept", "overrides"),
    [
        # Root starts from what mount(8) starts from, others start from nothing.
        ([], True, "allow_other", "dev suid", {}),
        (["", "rw,defaults"], False, "", "", {}),
        # Of options that contradict each other the last one counts.
        (
            ["ro,nodev,exec,noatime", "rw,dev,noexec,sync,async,atime,noallow_other"],
            *(True, "", "async dev noexec suid", {}),
        ),
        # Options and keys of the configuration may be mixed.
        (
            ["ro,layout.unit=4MiB,nosuid,servers=/a:/b"],
            *(True, "read_only allow_other", "dev nosuid"),
            {"layout.unit": "4MiB", "servers": "/a:/b"},
        ),
        # What is meant for fstab is ignored.
        ([FSTAB, "default_permissions"], False, "", "", {}),
    ],
)
def test_options_of_a_mount(
    given: list[str], privileged: bool, flags: str, kept: str, overrides: dict[str, str]
) -> None:
    options, found = parse(given, KEYS, privileged)
    names = ("read_only", "allow_other", "remount")
    assert [name for name in names if getattr(options, name)] == flags.split()
    assert sorted(options.fuse_options) == kept.split() and found == overrides


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("", "relatime"),
        ("strictatime", "strictatime"),
        ("noatime,atime", "relatime"),
        ("strictatime,noatime", "noatime"),
        ("strictatime,nostrictatime", "relatime"),
    ],
)
def test_access_times_are_kept_by_the_last_rule(given: str, rule: str) -> None:
    options, _ = parse([given], KEYS, True)
    assert options.atime == rule
    assert ("noatime" in options.fuse_options) == (rule == "noatime")


def test_a_remount_takes_what_mount_8_repeats() -> None:
    options, overrides = parse(["ro,relatime,user_id=0,group_id=0", "remount"], KEYS, True)
    assert options.remount and options.read_only and not overrides


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("noatme", "unknown option 'noatme'; the nearest valid one is noatime"),
        ("nodev=1", "unknown option 'nodev=1'; the nearest valid one is nodev"),
        ("ro=1", "unknown option 'ro=1'; the nearest valid one is ro"),
        ("uid=5", "unknown option 'uid=5'"),
        ("bogus", "unknown option 'bogus'"),
        ("layout.unit", "unknown option 'layout.unit'; the nearest valid one is layout.unit"),
        ("user_id=0", "unknown option 'user_id=0'"),
    ],
)
def test_an_unknown_option_is_named(option: str, message: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse([f"ro,{option},rw"], KEYS, True)
    assert str(caught.value).startswith(message)


def test_a_sloppy_mount_ignores_unknown_options() -> None:
    assert parse(["uid=5,ro"], KEYS, True, sloppy=True) == parse(["ro"], KEYS, True)


# --- commands on what is no store and no mount ----------------------------------------------------


def test_mount_without_a_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "store"
    code, said = refused(capsys, "mount", source, tmp_path)
    assert (code, said) == (4, f"{source}: there is no store; make one with: aifs format {source}")
    assert not source.exists()


def test_a_store_that_has_lost_its_metadata_is_not_made_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "store"
    assert run(capsys, "format", source)[0] == 0
    (source / "meta").rename(source / "elsewhere")
    for command in (["mount", source, tmp_path], ["fsck", source], ["server", "ls", source]):
        code, said = refused(capsys, *command)
        assert code == (8 if command[0] == "fsck" else 4)
        assert said.startswith(f"{source}/meta: is missing, but") and said.endswith(
            f"aifs meta restore {source}"
        )


def test_a_store_that_may_not_be_seen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("aifs.store.store.os.stat", stat)
    assert refused(capsys, "mount", tmp_path, tmp_path) == (
        1,
        f"{tmp_path}/meta: Permission denied",
    )


def test_umount_and_status_want_an_aifs_mount(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in ("umount", "status"):
        assert refused(capsys, command, tmp_path) == (
            6,
            f"{tmp_path}: no AIFS is mounted here; it is not a mountpoint",
        )
        assert refused(capsys, command, "/proc") == (
            6,
            "/proc: no AIFS is mounted here; it is a mount of type proc",
        )
        assert refused(capsys, command, tmp_path / "x") == (6, f"{tmp_path}/x: no such directory")


def test_a_path_below_a_mount_means_the_mount_except_for_umount(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m/d").mkdir(parents=True)
    found = [
        mountinfo.Mount(1, "/", "ext4", "/dev/vda"),
        mountinfo.Mount(2, f"{tmp_path}/m", "fuse.aifs", "/src"),
    ]
    for module in (door, mountinfo):
        monkeypatch.setattr(module, "all_mounts", lambda: found)
    assert door.mount_of(str(tmp_path / "m/d")) == str(tmp_path / "m")
    with pytest.raises(errors.MountError, match="no such directory"):
        door.mount_of(str(tmp_path / "m/none"))
    with pytest.raises(errors.MountError, match=f"it is below the mount {tmp_path}/m"):
        door.require_aifs(str(tmp_path / "m/d"))


def test_info_wants_a_path_in_an_aifs_mount(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert refused(capsys, "info", tmp_path) == (6, f"{tmp_path}: does not lie in an AIFS mount")
    assert refused(capsys, "info", tmp_path / "x") == (
        1,
        f"{tmp_path}/x: No such file or directory",
    )


def test_mountinfo_is_decoded() -> None:
    line = (
        rb"36 35 98:2 / /mnt\040a\134b rw,noatime shared:1 - fuse.aifs /a\040b rw,user_id=0" + b"\n"
    )
    found = (os.makedev(98, 2), "/mnt a\\b", "fuse.aifs", "/a b", "/", ("rw", "noatime"))
    assert mountinfo.parse_line(line) == found


def test_the_mount_that_a_path_leads_into_is_found_without_asking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mountinfo.Mount(2, f"{tmp_path}/a/m", "fuse.aifs", "/src")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "to").symlink_to(f"{tmp_path}/link/m")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(mountinfo, "all_mounts", lambda: [mount])
    monkeypatch.chdir(tmp_path)
    for path, found in (
        ("a/m", (mount, True)),
        ("to", (mount, True)),
        ("a/b/../m/", (mount, True)),
        ("link/./m/below/it", (mount, False)),
        ("to/../other", (mount, False)),
        ("a/b", (None, False)),
        ("loop/m", (None, False)),
        ("missing/m", (None, False)),
    ):
        assert mountinfo.first_aifs(path) == found, path


def test_an_absolute_path_needs_no_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shell whose directory has just been removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert mountinfo.first_aifs("/") == (None, False)


def test_a_file_name_that_is_no_text_is_printed_as_it_is(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert main(["info", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")]) == 1
    assert (
        capsysbinary.readouterr().err
        == b"aifs: %b/\xff: No such file or directory\n" % os.fsencode(tmp_path)
    )


# --- format, server add ---------------------------------------------------------------------------


def test_format_makes_a_store_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "store"
    code, out, _ = run(capsys, "format", source)
    facts = dict(
        line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("server")
    )
    assert code == 0
    assert json.loads((source / "data/3/.aifs").read_text())["store"] == facts["uuid"]
    code, said = refused(capsys, "format", source)
    assert code == 4 and "--force" in said
    code, again, _ = run(capsys, "format", source, "--force")
    assert code == 0 and again != out


def test_format_takes_no_directory_that_holds_something_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    code, said = refused(capsys, "format", tmp_path)
    assert (code, said) == (4, f"{tmp_path}: holds 'thesis.tex'; use an empty directory")
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "thesis.tex").unlink()
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "aifs.yaml").write_text("servers: [hdfs://name, data/0]\n")
    code, said = refused(capsys, "format", tmp_path)
    assert code == 4 and "there are no data servers of kind 'hdfs'" in said
    (tmp_path / "aifs.yaml").write_text("burst: {directories: [s3://bucket]}\n")
    assert refused(capsys, "format", tmp_path)[0] == 3
    (tmp_path / "aifs.yaml").write_text("layout: {count: 2}\n")
    assert run(capsys, "format", tmp_path)[0] == 0


def test_a_server_is_added_to_a_store_that_is_not_mounted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, disk = tmp_path / "store", tmp_path / "disk"
    run(capsys, "format", source)
    disk.mkdir()
    assert run(capsys, "server", "add", source, disk) == (
        0,
        f"added {disk} to the store, as data server 4\n",
        "",
    )
    code, said = refused(capsys, "server", "add", source, disk)
    assert code == 4 and said.startswith(f"{disk}: ")
    burst = tmp_path / "burst"
    assert run(capsys, "server", "add", "--burst", source, burst)[0] == 0
    assert json.loads((burst / ".aifs").read_text())["role"] == "burst"


# --- tables ---------------------------------------------------------------------------------------

COLUMNS = ("server", "state", "class", "free", "path", "last error")
ROWS = [
    (0, "active", "", "100.1 GiB", "/srv/aifs/data/0", ""),
    (1, "draining", "", "7 B", "/mnt/a/disk/of/the/rack/in/the/corner/aifs", "No space left on it"),
]


def printed(monkeypatch: pytest.MonkeyPatch, width: int | None) -> list[str]:
    """The table in a terminal, or a pipe."""
    out = io.StringIO()
    out.isatty = lambda: width is not None  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    if width is not None:
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((width, 24)))
        monkeypatch.setattr(out, "fileno", lambda: 1)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    print_table(COLUMNS, ROWS, right=("free",))
    return out.getvalue().splitlines()


def test_a_table_is_whole_in_a_pipe_and_in_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (None, 200):
        head, *rows = printed(monkeypatch, width)
        assert head.split() == "server state class free path last error".split()
        assert len(rows) == 2 and all(str(cell) in rows[1] for cell in ROWS[1])


def test_a_table_is_folded_between_words_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 70)
    assert all(len(line.rstrip()) <= 70 for line in lines) and len(lines) > 3
    assert "last error" in lines[0] and "100.1 GiB" in lines[1] and "draining" in lines[2]
    start, end = lines[0].index("path"), lines[0].index("last error")
    assert "".join(line[start:end].strip() for line in lines[2:]) == ROWS[1][4]
    assert " ".join(line[end:].strip() for line in lines[2:]).split() == ROWS[1][5].split()


def test_a_table_that_cannot_be_folded_is_printed_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = printed(monkeypatch, 40)  # and what is empty is left out
    assert lines[:4] == [
        "server  0",
        "state   active",
        "free    100.1 GiB",
        "path    /srv/aifs/data/0",
    ]
    assert lines[4] == "" and lines[5] == "server      1"
    assert all(len(line) <= 40 for line in lines)


# --- fsck -----------------------------------------------------------------------------------------


@pytest.fixture
def fsck_finds(monkeypatch: pytest.MonkeyPatch):
    """Let fsck find things: a function of the ``repaired`` of each."""

    def install(*repaired: bool) -> None:
        def check(loaded: config.Config, repair: bool, deep: bool, force: bool) -> SimpleNamespace:
            findings = [
                SimpleNamespace(
                    kind="orphan-inode", where=f"inode {number}", detail="no name", repaired=mended
                )
                for number, mended in enumerate(repaired)
            ]
            return SimpleNamespace(findings=findings, counts={"inodes": 7})

        module = ModuleType("aifs.check.fsck")
        module.check = check
        monkeypatch.setitem(sys.modules, "aifs.check.fsck", module)

    return install


@pytest.mark.parametrize(
    ("repaired", "expected"), [((), 0), ((True, True), 1), ((True, False), 4), ((False,), 4)]
)
def test_fsck_exits_as_fsck_8(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fsck_finds,
    repaired: tuple[bool, ...],
    expected: int,
) -> None:
    fsck_finds(*repaired)
    code, out, _ = run(capsys, "fsck", tmp_path)
    assert code == expected
    assert out.endswith(f"{len(repaired)} findings; checked 7 inodes\n")
    assert out.count("orphan-inode") == len(repaired)


def test_fsck_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, fsck_finds) -> None:
    fsck_finds(False)
    code, out, _ = run(capsys, "fsck", tmp_path, "--json")
    finding = {"kind": "orphan-inode", "where": "inode 0", "detail": "no name", "repaired": False}
    assert (code, json.loads(out)) == (4, {"findings": [finding], "counts": {"inodes": 7}})


def test_fsck_that_cannot_check_exits_with_8(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fsck_finds
) -> None:
    fsck_finds()
    code, said = refused(capsys, "fsck", tmp_path / "missing.yaml")
    assert (code, said) == (8, f"{tmp_path}/missing.yaml: No such file or directory")


def test_the_mount_of_another_user_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "fusermount3: entry for /mnt/s not found in /etc/mtab"
    monkeypatch.setattr(
        umount, "_run", lambda *command, **limits: SimpleNamespace(returncode=1, stderr=said)
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        errors.MountError,
        match="^/mnt/s: was mounted by another user; only that user or root",
    ):
        umount.unmount("/mnt/s")


def test_only_near_names_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "frobnicate") == (2, "there is no command aifs frobnicate; see aifs -h")
    assert refused(capsys, "server", "drian", "/s", "1")[1].endswith("did you mean drain?")
    assert "(Possible" not in refused(capsys, "bench", "--frobnicate", "/s")[1]


def test_sizes_are_exact_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    output.set_exact(True)
    try:
        assert (output.size(3 << 20), output.rate(1.4)) == ("3145728", "1/s")
    finally:
        output.set_exact(False)
    assert output.size(3 << 20) == "3.00 MiB"


def test_durations_have_three_digits_and_a_unit() -> None:
    told = [output.duration(seconds) for seconds in (2e-5, 0.0125, 4.2149, 120, 5400, 9000, 1e7)]
    assert told == ["20 us", "12.5 ms", "4.21 s", "120 s", "90 min", "2.5 h", "116 d"]
