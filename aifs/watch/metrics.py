"""The metrics of a mount: each is declared once here, with where its value stands in what the mount
says of itself (vfs/reports.py). Pure.

The text is Prometheus's exposition format, version 0.0.4. Names say the unit; what only grows ends
in ``_total``. A value that is not known is left out.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from aifs.core.served import BUCKETS, UNIT_NS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Metric(NamedTuple):
    """One family of samples."""

    name: str
    kind: str
    where: str
    """Keys of the status, with dots; ``x[]``: one for each of a list, by its ``id``; ``x{}``: one
    for each key of a dictionary."""
    help: str
    label: str = ""
    """What ``[]`` or ``{}`` goes through."""


_BY_OPERATION = (
    Metric(
        "aifs_request_duration_seconds",
        HISTOGRAM,
        "requests{}",
        "Time until the daemon has answered a request of the kernel.",
        "operation",
    ),
    Metric(
        "aifs_request_errors_total",
        COUNTER,
        "requests{}.errors",
        "Requests that have failed, by the error's name in errno.h; that there is no such name or "
        "attribute, or one already, is an answer.",
        "operation",
    ),
    Metric(
        "aifs_request_bytes_total",
        COUNTER,
        "requests{}.bytes",
        "Bytes of files that went through the daemon; passed-through ones do not.",
        "operation",
    ),
)

_WAITS = (
    Metric(
        "aifs_wait_duration_seconds",
        HISTOGRAM,
        "waits{}",
        "How long requests, drains and publishes that waited for a server, the journal, a lock, "
        "another rank or host, and so on, have done so.",
        "cause",
    ),
    Metric(
        "aifs_journal_transactions_total",
        COUNTER,
        "journal.transactions",
        "Transactions of this host's metadata journal.",
    ),
    Metric("aifs_journal_bytes_total", COUNTER, "journal.bytes", "Bytes appended to it."),
    Metric(
        "aifs_journal_syncs_total", COUNTER, "journal.syncs", "Barriers: how often it was synced."
    ),
    Metric(
        "aifs_publishes_total",
        COUNTER,
        "publishes.count",
        "Directories that have got their final name.",
    ),
    Metric("aifs_hosts_live", GAUGE, "cluster.hosts", "Hosts with a lease; 0: the store has one."),
    Metric(
        "aifs_hosts_connected", GAUGE, "cluster.connected", "Those of them that this one reaches."
    ),
    Metric("aifs_host_has_role", GAUGE, "cluster.has_role", "1: this one does what is for all."),
    Metric(
        "aifs_host_lease_age_seconds",
        GAUGE,
        "cluster.lease_age_s",
        "Since this host began to renew its lease last, which it does each second; from 5 on it "
        "answers nothing.",
    ),
    Metric(
        "aifs_host_lag_transactions",
        GAUGE,
        "cluster.lag",
        "Changes of other hosts that it knows of, and does not have.",
    ),
    Metric(
        "aifs_host_unshown_transactions",
        GAUGE,
        "cluster.unshown",
        "The same, of what its kernel was not told of; who changed it may wait for that.",
    ),
    Metric(
        "aifs_host_delegations",
        GAUGE,
        "cluster.delegations",
        "Directories that this host changes without waiting for the database.",
    ),
    Metric(
        "aifs_host_delegation_age_seconds",
        GAUGE,
        "cluster.delegation_age_s",
        "Since it was given the oldest of these.",
    ),
    Metric(
        "aifs_host_delegations_granted_total",
        COUNTER,
        "cluster.granted_delegations",
        "How many it was given since the mount.",
    ),
    Metric(
        "aifs_host_delegations_recalled_total",
        COUNTER,
        "cluster.recalled_delegations",
        "How many of these it gave up as another host needed the directory.",
    ),
)

METRICS = (
    Metric("aifs_uptime_seconds", GAUGE, "uptime_s", "Since the store was mounted."),
    *_BY_OPERATION,
    *_WAITS,
    Metric(
        "aifs_kernel_requests_total",
        COUNTER,
        "bridge.requests{}",
        "Requests that the kernel has sent, by their number in linux/fuse.h.",
        "opcode",
    ),
    Metric(
        "aifs_bridge_answered_total",
        COUNTER,
        "bridge.answered{}",
        "Those of them that the bridge has answered without the daemon.",
        "opcode",
    ),
    Metric("aifs_open_files", GAUGE, "open_files", "Files that programs have open."),
    Metric("aifs_unsynced_files", GAUGE, "unsynced_files", "Files with unsynced bytes."),
    Metric("aifs_server_up", GAUGE, "servers[].up", "1: the data server answers.", "server"),
    Metric("aifs_server_used_bytes", GAUGE, "servers[].used_bytes", "Of its disk.", "server"),
    Metric("aifs_server_free_bytes", GAUGE, "servers[].free_bytes", "Of its disk.", "server"),
    Metric(
        "aifs_server_read_bytes_total",
        COUNTER,
        "servers[].read_bytes",
        "Bytes that were asked of the data server.",
        "server",
    ),
    Metric(
        "aifs_burst_up", GAUGE, "burst.devices[].up", "1: the burst directory is in use.", "device"
    ),
    Metric(
        "aifs_burst_dirty_bytes",
        GAUGE,
        "burst.devices[].dirty_bytes",
        "Bytes that are nowhere but in the burst tier.",
        "device",
    ),
    Metric(
        "aifs_burst_clean_bytes",
        GAUGE,
        "burst.devices[].clean_bytes",
        "Bytes of copies that can be dropped.",
        "device",
    ),
    Metric("aifs_burst_free_bytes", GAUGE, "burst.devices[].free_bytes", "Of its disk.", "device"),
    Metric(
        "aifs_burst_high_water_bytes",
        GAUGE,
        "burst.devices[].high_water_bytes",
        "Above it new files go to the data servers.",
        "device",
    ),
    Metric(
        "aifs_burst_mirror_bytes",
        GAUGE,
        "burst.mirror_bytes",
        "Of what other hosts have not drained, and this one keeps for them.",
    ),
    Metric(
        "aifs_burst_throttled_writers",
        GAUGE,
        "burst.throttled_writers",
        "Writers that wait for room in the burst tier.",
    ),
    Metric("aifs_drain_queue_files", GAUGE, "drain.files", "Files that wait to be drained."),
    Metric("aifs_drain_queue_bytes", GAUGE, "drain.bytes", "Bytes that wait to be drained."),
    Metric("aifs_drain_active_files", GAUGE, "drain.active_files", "Files being drained."),
    Metric(
        "aifs_drain_held_files",
        GAUGE,
        "drain.held_files",
        "Files that are not drained because they are open for writing.",
    ),
    Metric(
        "aifs_drain_failing_files",
        GAUGE,
        "drain.failing_files",
        "Files that could not be drained; it is tried again.",
    ),
    Metric(
        "aifs_drain_lag_seconds", GAUGE, "drain.oldest_age_s", "Age of the oldest undrained file."
    ),
    Metric("aifs_drain_late", GAUGE, "drain.late", "1: beyond burst.drain_deadline."),
    Metric("aifs_drain_files_total", COUNTER, "drain.drained_files", "Files drained."),
    Metric("aifs_drain_bytes_total", COUNTER, "drain.drained_bytes", "Bytes drained."),
    Metric("aifs_stage_files_total", COUNTER, "stage.staged_files", "Files staged."),
    Metric("aifs_stage_bytes_total", COUNTER, "stage.staged_bytes", "Bytes staged."),
    Metric("aifs_stage_failed_files_total", COUNTER, "stage.failed_files", "Files not staged."),
    Metric("aifs_evicted_files_total", COUNTER, "evict.evicted_files", "Burst copies dropped."),
    Metric("aifs_groups_open", GAUGE, "groups.open", "Groups whose ranks still write."),
    Metric("aifs_groups_committed", GAUGE, "groups.committed", "Groups that are being drained."),
    Metric("aifs_groups_pending", GAUGE, "groups.pending", "Groups that are not published yet."),
    Metric("aifs_groups_durable_total", COUNTER, "groups.durable", "Groups that became durable."),
    Metric("aifs_group_bytes_total", COUNTER, "groups.stored_bytes", "Bytes stored by groups."),
    Metric(
        "aifs_group_saved_bytes_total",
        COUNTER,
        "groups.saved_bytes",
        "Bytes that other ranks had stored already.",
    ),
    Metric("aifs_movers_running", GAUGE, "movers.running", "Mover processes."),
    Metric("aifs_movers_busy", GAUGE, "movers.busy", "Those of them that work."),
    Metric("aifs_mover_bytes_total", COUNTER, "movers.moved_bytes", "Bytes moved by movers."),
    Metric("aifs_mover_restarts_total", COUNTER, "movers.restarts", "Movers that died."),
    Metric(
        "aifs_aged_files_total",
        COUNTER,
        "aging.files",
        "Old files that have moved to their class of servers, or were compressed.",
    ),
    Metric("aifs_aged_bytes_total", COUNTER, "aging.bytes", "What was moved for that."),
    Metric(
        "aifs_aging_left_files",
        GAUGE,
        "aging.left_files",
        "Old files that have to stay for now; aifs status says why.",
    ),
    Metric("aifs_locks_waiting", GAUGE, "locks.waiting", "Locks of a cluster that are waited for."),
    Metric("aifs_collector_backlog", GAUGE, "collector_backlog", "Objects that are to be deleted."),
    Metric("aifs_doomed_trees", GAUGE, "doomed.trees", "Trees that are being removed."),
    Metric("aifs_trash_entries", GAUGE, "trash.entries", "What can be restored."),
    Metric("aifs_trash_bytes", GAUGE, "trash.bytes", "What it takes, as far as is known."),
    Metric(
        "aifs_trash_given_bytes_total",
        COUNTER,
        "trash.given_bytes",
        "Bytes that went before their time, for lack of space.",
    ),
    Metric("aifs_rebuild_left_bytes", GAUGE, "rebuild.left_bytes", "Bytes to be rebuilt or moved."),
    Metric(
        "aifs_rebuild_moved_bytes_total", COUNTER, "rebuild.moved_bytes", "Bytes rebuilt or moved."
    ),
    Metric("aifs_scrub_running", GAUGE, "scrub.running", "1: a scrub reads all bytes."),
    Metric("aifs_scrub_flaws", GAUGE, "scrub.flaws", "Flaws that the last scrub has found."),
    Metric("aifs_backup_waiting_deletions", GAUGE, "backup.waiting_deletions", "Until a backup."),
    Metric("aifs_cache_hits_total", COUNTER, "cache.hits", "Reads answered by the read cache."),
    Metric("aifs_cache_misses_total", COUNTER, "cache.misses", "Reads that asked data servers."),
    Metric("aifs_cache_bytes", GAUGE, "cache.cached_bytes", "In the read cache."),
    Metric(
        "aifs_read_ahead_bytes_total",
        COUNTER,
        "cache.read_ahead_bytes",
        "Bytes that were fetched before anybody asked.",
    ),
    Metric(
        "aifs_read_ahead_used_bytes_total",
        COUNTER,
        "cache.read_ahead_used_bytes",
        "Those of them that were asked for.",
    ),
    Metric("aifs_hedged_bytes_total", COUNTER, "cache.hedged_bytes", "Asked of a second server."),
    Metric("aifs_buffer_used_bytes", GAUGE, "memory.used_bytes", "Of memory.budget."),
    Metric("aifs_buffer_limit_bytes", GAUGE, "memory.total_bytes", "memory.budget."),
    Metric("aifs_buffer_waits_total", COUNTER, "memory.waits", "Who had to wait for memory."),
    Metric(
        "aifs_background_seconds_total",
        COUNTER,
        "background.seconds",
        "Time of the event loop that background work has taken.",
    ),
    Metric("aifs_cpu_seconds_total", COUNTER, "process.cpu_s", "Processor time of the daemon."),
    Metric("aifs_resident_memory_bytes", GAUGE, "process.resident_bytes", "Memory of the daemon."),
    Metric("aifs_store_descriptors", GAUGE, "process.descriptors", "Open files of the store."),
)

_BOUNDS = [(UNIT_NS << bucket) / 1e9 for bucket in range(1, BUCKETS - 1, 2)]
"""Every second bucket is told: 16 us, 64 us, ... 17 s."""


def expose(status: dict[str, Any]) -> str:
    """All metrics of a mount, from what it says of itself."""
    lines: list[str] = []
    for metric in METRICS:
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for key, value in _values(status, metric.where):
            labels = f'{metric.label}="{key}"' if metric.label else ""
            lines += _samples(metric, labels, value)
    return "\n".join(lines) + "\n"


def problems(status: dict[str, Any]) -> list[str]:
    """What somebody should look at, in words; none: the mount is well."""
    found = [
        f"data server {server['id']} ({server['path']}) is {server['state']}: "
        f"{server['last_error'] or 'no error is known'}"
        for server in status["servers"]
        if server["state"] != "ok"
    ]
    found += [
        f"burst directory {device['id']} ({device['path']}) is {device['state']}"
        for device in status["burst"]["devices"]
        if device["state"] != "ok"
    ]
    drain = status["drain"]
    if drain["late"]:
        found.append(f"draining is late: the oldest file waits for {drain['oldest_age_s']:.0f} s")
    if drain["failing_files"]:
        found.append(f"{drain['failing_files']} files cannot be drained: {drain['last_error']}")
    return found


def _values(status: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """What stands there, each with the value of its label."""
    outer, _, rest = where.partition("[].")
    if rest:
        for entry in _find(status, outer) or ():
            value = entry["state"] == "ok" if rest == "up" else entry.get(rest)
            if value is not None:
                yield str(entry["id"]), value
        return
    outer, braces, rest = where.partition("{}")
    value = _find(status, outer)
    if not braces:
        if value is not None:
            yield "", value
        return
    for key, entry in (value or {}).items():
        yield key, entry[rest[1:]] if rest else entry


def _find(status: dict[str, Any], where: str) -> Any:
    """None, if this mount does not say it."""
    value: Any = status
    for key in where.split("."):
        value = value.get(key)
        if value is None:
            return None
    return value


def _samples(metric: Metric, labels: str, value: Any) -> Iterator[str]:
    if metric.kind == HISTOGRAM:
        counts = value["buckets"]
        for number, bound in enumerate(_BOUNDS):
            count = sum(counts[: 2 * number + 2])
            yield f'{metric.name}_bucket{{{labels},le="{bound:.10g}"}} {count}'
        yield f'{metric.name}_bucket{{{labels},le="+Inf"}} {value["count"]}'
        yield f"{metric.name}_sum{{{labels}}} {value['seconds']}"
        yield f"{metric.name}_count{{{labels}}} {value['count']}"
    elif isinstance(value, dict):
        for error, count in value.items():
            yield f'{metric.name}{{{labels},error="{error}"}} {count}'
    else:
        suffix = f"{{{labels}}}" if labels else ""
        yield f"{metric.name}{suffix} {value + 0}"
