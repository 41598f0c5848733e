"""``aifs status``: what a mounted daemon says of itself."""

from typing import Any

import click

from aifs.cli import hints, scrub
from aifs.cli.arguments import MOUNTPOINT
from aifs.cli.output import count, describe_time
from aifs.core.limits import within


@click.command(
    "status",
    short_help="Show the state of a mount.",
    epilog="\b\nExamples:\n  aifs status /mnt/store\n  aifs status /mnt/store --json",
)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def status_command(mountpoint: str, as_json: bool) -> None:
    """Show the state of the mount at MOUNTPOINT, or that a path lies in, of its data servers, its
    burst tier and its drain.
    """
    from aifs.cli.answers import ANSWER_S, AwaitsDatabase
    from aifs.cli.mounts import mount_of, read_status
    from aifs.cli.output import print_facts, print_json, print_table

    path = mount_of(mountpoint)
    try:
        status = read_status(path)
    except AwaitsDatabase as error:  # nobody else can be asked
        owner = error.owner
        known = {"pid": owner.pid, "mountpoint": path, "waits_for": owner.doing}
        if as_json:
            print_json(known)
        else:
            print_facts(list(known.items()))
        return
    if as_json:
        print_json(status)
        return
    facts = [(name, value) for name, value in status.items() if not isinstance(value, list | dict)]
    facts += summaries(status)
    if status["cluster"]["hosts"]:
        try:  # the database is asked
            told = _describe_undrained(within(ANSWER_S, hints.read, path, hints.HOSTS))
        except OSError as error:
            told = f"not known: {error.strerror}"
        facts.append(("undrained", told))
    print_facts(facts)
    print()
    right = ("server", "used", "free")
    rows = [
        (
            server["id"],
            server["standing"],
            server["state"],
            server["domain"],
            server["class"],
            _size(server, "used_bytes"),
            _size(server, "free_bytes"),
            server["path"],
            server["last_error"],
        )
        for server in status["servers"]
    ]
    print_table(
        ("server", "standing", "state", "domain", "class", "used", "free", "path", "last error"),
        rows,
        right=right,
    )
    if status["burst"]["devices"]:
        print()
        sizes = ("dirty", "clean", "pinned", "free", "low", "high")
        devices = [_row_of(device) for device in status["burst"]["devices"]]
        print_table(
            ("burst", "state", *sizes, "path", "new files"), devices, right=("burst", *sizes)
        )


def _size(of: dict[str, Any], key: str) -> str:
    from aifs.core.units import describe_size

    return "unknown" if of[key] is None else describe_size(of[key])


def refusal_of(device: dict[str, Any]) -> str:
    """Why a burst directory takes no new files; '' if it does."""
    reasons = (device["refuses"], device.get("last_error"))  # no older daemon says the latter
    return ": ".join(filter(None, reasons))


def _row_of(device: dict[str, Any]) -> tuple[object, ...]:
    keys = (
        "dirty_bytes",
        "clean_bytes",
        "pinned_bytes",
        "free_bytes",
        "low_water_bytes",
        "high_water_bytes",
    )
    refusal = refusal_of(device)
    admission = f"go to the data servers: {refusal}" if refusal else "are admitted"
    return (
        device["id"],
        device["state"],
        *(_size(device, key) for key in keys),
        device["path"],
        admission,
    )


def summaries(status: dict[str, Any]) -> list[tuple[str, str]]:
    """A line for each part of the mount."""
    burst, memory, cache = status["burst"], status["memory"], status["cache"]
    facts = [("bridge", _describe_bridge(status["bridge"]))]
    if burst["devices"]:
        facts += [("drain", _describe_drain(status["drain"], burst["drain_bytes_per_s"]))]
        facts += [("throttle", _describe_throttle(burst))]
        facts += [("groups", _describe_groups(status["groups"]))]
        if "epochs" in status:  # a daemon of an older version says nothing of them
            facts += [("epochs", _describe_epochs(status["epochs"]))]
    share = status["background"]
    taken = f"{share['share']:.1%} of the event loop, {share['seconds']:.1f} s since the mount"
    facts.append(("background", taken))
    facts.append(
        (
            "memory",
            f"{_size(memory, 'used_bytes')} of {_size(memory, 'total_bytes')}, "
            f"peak {_size(memory, 'peak_bytes')}, {memory['waiting']} waiting",
        )
    )
    facts.append(
        (
            "read_cache",
            f"{_size(cache, 'cached_bytes')}, {cache['hits']} hits, {cache['misses']} misses, "
            f"{_size(cache, 'read_ahead_bytes')} read ahead",
        )
    )
    if "movers" in status:  # a daemon of an older version says nothing of them
        facts.append(("movers", _describe_movers(status["movers"])))
    if status.get("cluster", {}).get("hosts"):
        facts.append(("cluster", _describe_cluster(status["cluster"])))
    if "together" in status:
        facts.append(("together", _describe_together(status["together"])))
    if aging := _describe_aging(status.get("aging", {})):
        facts.append(("aging", aging))
    facts.append(("removing", _describe_doomed(status["doomed"])))
    if "trash" in status:
        facts.append(("trash", _describe_trash(status["trash"])))
    facts.append(("backup", _describe_backup(status["backup"])))
    facts.append(("scrub", scrub.summary(status["scrub"])))
    return facts


def _describe_epochs(epochs: dict[str, Any]) -> str:
    """Of datasets: what is in the burst tier ahead of their readers."""
    brought = f"{count(epochs['brought_files'], 'file')} read ahead since the mount"
    if not epochs["epochs"]:
        return f"none is read; {brought}"
    waiting = epochs["waiting"]
    late = f"readers of {waiting} wait for files" if waiting else "no reader waits"
    return (
        f"{epochs['epochs']} being read, {count(epochs['kept_files'], 'file')} "
        f"({_size(epochs, 'kept_bytes')}) ahead of their readers; {late}; {brought}"
    )


def _describe_bridge(bridge: dict[str, Any]) -> str:
    if not bridge.get("in_use"):
        return "not in use; aifs doctor says why"
    passthrough = "with" if bridge.get("passthrough") else "without"
    asked, answered = (sum(bridge[which].values()) for which in ("requests", "answered"))
    return f"in use, {passthrough} passthrough; it answered {answered} of {asked} requests itself"


def _describe_movers(movers: dict[str, Any]) -> str:
    if not movers["limit"]:
        return "none (data.movers): the daemon moves bytes itself"
    died = f"; {movers['restarts']} died" if movers["restarts"] else ""
    return (
        f"{movers['running']} of {movers['limit']} running, {movers['busy']} busy; "
        f"{_size(movers, 'moved_bytes')} moved since the mount{died}"
    )


def _describe_cluster(cluster: dict[str, Any]) -> str:
    role = ", with the role of the store's background work" if cluster["has_role"] else ""
    return (
        f"{count(cluster['hosts'], 'host')}, {cluster['connected']} connected; this is "
        f"{cluster['name']}, session {cluster['session']}{role}; aifs hosts shows all"
    )


def _describe_together(together: dict[str, Any]) -> str:
    return (
        f"{count(together['files'], 'file')} that other hosts read, too; since the mount "
        f"{_size(together, 'received_bytes')} came from these and {_size(together, 'given_bytes')} "
        "went to them"
    )


def _describe_undrained(state: dict[str, Any]) -> str:
    """Which host has how much in its burst tier alone."""
    hosts = [f"{host['name']} {_size(host, 'undrained_bytes')}" for host in state["hosts"]]
    return f"{', '.join(hosts)}; what is undrained can be read as long as its host is there"


def _describe_aging(aging: dict[str, Any]) -> str:
    """Of old files; '' if there were none."""
    parts = []
    if aging.get("files"):
        compressed = aging["compressed_files"]
        parts.append(
            f"{count(aging['files'], 'old file')} ({_size(aging, 'bytes')}) moved since the mount, "
            f"{compressed} of them compressed"
        )
    if aging.get("left_files"):
        parts.append(f"{count(aging['left_files'], 'file')} left for now: {aging['reason']}")
    return "; ".join(parts)


def _describe_doomed(doomed: dict[str, Any]) -> str:
    if not doomed["trees"]:
        return f"nothing; {count(doomed['removed_inodes'], 'inode')} removed since the mount"
    return (
        f"{count(doomed['trees'], 'tree')} being taken apart, {doomed['directories']} directories "
        "left as far as is known"
    )


def _describe_trash(trash: dict[str, Any]) -> str:
    given = ""
    if trash["given_entries"]:
        given = f"; gone before their time, for lack of space: {_counted(trash, 'given_')}"
    return f"{_counted(trash)}{given}"


def _counted(trash: dict[str, Any], which: str = "") -> str:
    number = trash[f"{which}entries"]
    return f"{number} {'entry' if number == 1 else 'entries'}, {_size(trash, f'{which}bytes')}"


def _describe_backup(backup: dict[str, Any]) -> str:
    if not backup["interval_s"]:
        return "off (meta.backup_interval)"
    if backup["sequence"] is None:
        text = "none yet"
    else:
        when = describe_time(backup["time_s"]) if backup["time_s"] else "an earlier mount"
        sizes = f"{_size(backup, 'base_bytes')} and {_size(backup, 'increment_bytes')} of changes"
        text = f"of {when}, sequence {backup['sequence']}, {sizes}"
    if backup["waiting_deletions"]:
        text += "; deletions wait for the next one"
    return text + (f"; failing: {backup['last_error']}" if backup["last_error"] else "")


def _describe_throttle(burst: dict[str, Any]) -> str:
    if not burst["pause_s"]:
        return "none"
    pause = f"a new file waits {burst['pause_s'] * 1000:.0f} ms"
    return f"{pause}, {burst['throttled_writers']} do now: draining does not keep up"


def _describe_drain(drain: dict[str, Any], bytes_per_s: int) -> str:
    from aifs.core.units import describe_size

    if not drain["files"]:
        return (
            f"all is on the capacity tier; {count(drain['drained_files'], 'file')} drained "
            "since the mount"
        )
    parts = [
        (
            f"{count(drain['files'], 'file')} ({_size(drain, 'bytes')}) undrained for up to "
            f"{drain['oldest_age_s']:.0f} s"
        ),
        f"{drain['active_files']} active, {describe_size(bytes_per_s)}/s",
    ]
    if drain["held_files"]:
        parts.append(f"{drain['held_files']} open for writing")
    if drain["withheld_files"]:
        parts.append(f"{drain['withheld_files']} drained with their groups")
    if drain["late"]:
        parts.append("beyond burst.drain_deadline")
    if drain["failing_files"]:
        parts.append(f"{drain['failing_files']} to be tried again after: {drain['last_error']}")
    return "; ".join(parts)


def _describe_groups(groups: dict[str, Any]) -> str:
    if not groups["open"] + groups["committed"] + groups["durable"]:
        return "none since the mount"
    saved = f"{_size(groups, 'stored_bytes')} stored, {_size(groups, 'saved_bytes')} saved"
    return (
        f"{groups['open']} open, {groups['committed']} being drained, {groups['durable']} "
        f"durable; {saved}"
    )
