"""The figures of a mount. Each is declared once, in the table below: where it stands in the status
of the mount (vfs/reports.py), its name and unit, its help, and the words of ``aifs status``. Pure.

``aifs status``, ``aifs stats``, Prometheus, the documentation and the checks of /healthz are made
from it. The text for Prometheus is its exposition format, version 0.0.4, or OpenMetrics. Names say
the unit; a counter ends in ``_total``. A value that is not known is left out.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

from aifs.core.served import BUCKETS, UNIT_NS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

COUNTER, GAUGE, HISTOGRAM, INFO = "counter", "gauge", "histogram", "info"

_TABLE = """
mount:
  version info aifs_build_info{version}: The version that serves the mount, and its commit.
  uptime_s gauge aifs_uptime_seconds: Since the store was mounted.
  open_files gauge aifs_open_files: Files that programs have open.
  unsynced_files gauge aifs_unsynced_files: Files with unsynced bytes.
  collector_backlog gauge aifs_collector_backlog: Objects that are to be deleted.
requests:
  {} histogram aifs_request_duration_seconds{operation}: Time until the daemon has answered a
      request of the kernel.
  {}.errors counter aifs_request_errors_total{operation}: Requests that have failed, by the
      error's name in errno.h; that there is no such name or attribute, or one already, is an
      answer.
  {}.bytes counter aifs_request_bytes_total{operation}: Bytes of files that went through the
      daemon; passed-through ones do not.
waits:
  {} histogram aifs_wait_duration_seconds{cause}: How long requests, drains and publishes that
      waited for a server, the journal, a lock, another rank or host, and so on, have done so.
journal:
  transactions counter aifs_journal_transactions_total: Transactions of this host's metadata
      journal.
  bytes counter aifs_journal_bytes_total: Bytes appended to it.
  syncs counter aifs_journal_syncs_total: Barriers: how often it was synced.
publishes:
  count counter aifs_publishes_total: Directories that have got their final name.
servers:
  [].up gauge aifs_server_up{server}: 1: the data server answers.
  [].used_bytes gauge aifs_server_used_bytes{server}: Of its disk.
  [].free_bytes gauge aifs_server_free_bytes{server}: Of its disk.
  [].read_bytes counter aifs_server_read_bytes_total{server}: Bytes that were asked of the data
      server.
bridge:
  requests{} counter aifs_kernel_requests_total{opcode}: Requests that the kernel has sent, by
      their number in linux/fuse.h.
  answered{} counter aifs_bridge_answered_total{opcode}: Those of them that the bridge has
      answered without the daemon.
  read_bytes counter aifs_bridge_read_bytes_total: Bytes of files that the bridge has read for
      programs.
  > in_use: in use, {passthrough:?with|without} passthrough
  > in_use: it answered {answered:sum} of {requests:sum} requests itself
  > !in_use: not in use; aifs doctor says why
keeper "daemon" if keeper.mounted_s:
  restarts counter aifs_daemon_restarts_total: Daemons of the mount that died, and were followed by
      another one.
  > : running for {/uptime_s:duration}, mounted {mounted_s:when}
  > restarts: {restarts:restart}, the last one after {last_death}
drain if burst.devices:
  files gauge aifs_drain_queue_files: Files that wait to be drained.
  bytes gauge aifs_drain_queue_bytes: Bytes that wait to be drained.
  active_files gauge aifs_drain_active_files: Files being drained.
  held_files gauge aifs_drain_held_files: Files that are not drained because they are open for
      writing.
  failing_files gauge aifs_drain_failing_files: Files that could not be drained; it is tried
      again.
  oldest_age_s gauge aifs_drain_lag_seconds: Age of the oldest undrained file.
  late gauge aifs_drain_late: 1: beyond burst.drain_deadline.
  drained_files counter aifs_drain_files_total: Files drained.
  drained_bytes counter aifs_drain_bytes_total: Bytes drained.
  > !files: all is on the capacity tier
  > !files: {drained_files:file} drained since the mount
  > files: {files:file} ({bytes:size}) undrained for up to {oldest_age_s:duration}
  > files: {active_files} active, {/burst.drain_bytes_per_s:rate}
  > held_files: {held_files} open for writing
  > withheld_files: {withheld_files} drained with their groups
  > late: beyond burst.drain_deadline
  > failing_files: {failing_files} to be tried again after: {last_error}
burst "throttle" if burst.devices:
  devices[].up gauge aifs_burst_up{device}: 1: the burst directory is in use.
  devices[].dirty_bytes gauge aifs_burst_dirty_bytes{device}: Bytes that are nowhere but in the
      burst tier.
  devices[].clean_bytes gauge aifs_burst_clean_bytes{device}: Bytes of copies that can be dropped.
  devices[].free_bytes gauge aifs_burst_free_bytes{device}: Of its disk.
  devices[].high_water_bytes gauge aifs_burst_high_water_bytes{device}: Above it new files go to
      the data servers.
  mirror_bytes gauge aifs_burst_mirror_bytes: Of what other hosts have not drained, and this one
      keeps for them.
  grown_bytes counter aifs_burst_grown_bytes_total: Bytes by which files in the burst directories
      have grown, passed through or not, as seen at close and every few seconds. Not bytes that
      were overwritten.
  throttled_writers gauge aifs_burst_throttled_writers: Writers that wait for room in the burst
      tier.
  > !pause_s: none
  > pause_s: a new file waits {pause_s:duration}, {throttled_writers} do now
  > pause_s: draining does not keep up
groups if burst.devices:
  open gauge aifs_groups_open: Groups whose ranks still write.
  committed gauge aifs_groups_committed: Groups that are being drained.
  pending gauge aifs_groups_pending: Groups that are not published yet.
  durable counter aifs_groups_durable_total: Groups that became durable.
  stored_bytes counter aifs_group_bytes_total: Bytes stored by groups.
  saved_bytes counter aifs_group_saved_bytes_total: Bytes that other ranks had stored already.
  > !open|committed|durable: none since the mount
  > open|committed|durable: {open} open, {committed} being drained, {durable} durable
  > open|committed|durable: {stored_bytes:size} stored, {saved_bytes:size} saved
epochs if burst.devices:
  > !epochs: none is read
  > epochs: {epochs} being read, {kept_files:file} ({kept_bytes:size}) ahead of their readers
  > epochs !waiting: no reader waits
  > epochs waiting: readers of {waiting} wait for files
  > : {brought_files:file} read ahead since the mount
background:
  seconds counter aifs_background_seconds_total: Time of the event loop that background work has
      taken.
  > : {share:.1%} of the event loop, {seconds:.1f} s since the mount
memory:
  used_bytes gauge aifs_buffer_used_bytes: Of memory.budget.
  total_bytes gauge aifs_buffer_limit_bytes: memory.budget.
  waits counter aifs_buffer_waits_total: Requests that had to wait for memory.
  > : {used_bytes:size} of {total_bytes:size}, peak {peak_bytes:size}, {waiting} waiting
cache "read_cache":
  hits counter aifs_cache_hits_total: Reads answered by the read cache.
  misses counter aifs_cache_misses_total: Reads that asked data servers.
  cached_bytes gauge aifs_cache_bytes: In the read cache.
  read_ahead_bytes counter aifs_read_ahead_bytes_total: Bytes that were fetched before anybody
      asked.
  read_ahead_used_bytes counter aifs_read_ahead_used_bytes_total: Those of them that were asked
      for.
  hedged_bytes counter aifs_hedged_bytes_total: Asked of a second server.
  > : {cached_bytes:size}, {hits} hits, {misses} misses, {read_ahead_bytes:size} read ahead
movers:
  running gauge aifs_movers_running: Mover processes.
  busy gauge aifs_movers_busy: Those of them that work.
  moved_bytes counter aifs_mover_bytes_total: Bytes moved by movers.
  restarts counter aifs_mover_restarts_total: Movers that died.
  > !limit: none (data.movers): the daemon moves bytes itself
  > limit: {running} of {limit} running, {busy} busy
  > limit: {moved_bytes:size} moved since the mount
  > limit restarts: {restarts} died
cluster if cluster.hosts:
  hosts gauge aifs_hosts_live: Hosts with a lease; 0: the store has one.
  connected gauge aifs_hosts_connected: Those of them that this one reaches.
  has_role gauge aifs_host_has_role: 1: this one does what is for all.
  lease_age_s gauge aifs_host_lease_age_seconds: Since this host began to renew its lease last,
      which it does each second; from 5 on it answers nothing.
  lag gauge aifs_host_lag_transactions: Changes of other hosts that it knows of, and does not
      have.
  unshown gauge aifs_host_unshown_transactions: The same, of changes that its kernel does not know
      of; the host that made them may wait for that.
  delegations gauge aifs_host_delegations: Directories that this host changes without waiting for
      the database.
  delegation_age_s gauge aifs_host_delegation_age_seconds: Since it was given the oldest of these.
  granted_delegations counter aifs_host_delegations_granted_total: How many it was given since the
      mount.
  recalled_delegations counter aifs_host_delegations_recalled_total: How many of these it gave up
      as another host needed the directory.
  > : {hosts:host}, {connected} connected
  > : this is {name}, session {session}{has_role:?, with the role of the store's background work|}
  > : aifs host ls shows all
together if cluster.hosts:
  > : {files:file} that other hosts read, too
  > : since the mount {received_bytes:size} came from these and {given_bytes:size} went to them
aging:
  files counter aifs_aged_files_total: Old files that have moved to their class of servers, or
      were compressed.
  bytes counter aifs_aged_bytes_total: Bytes moved for that.
  left_files gauge aifs_aging_left_files: Old files that have to stay for now; aifs status says
      why.
  > files: {files:old file} ({bytes:size}) moved since the mount, {compressed_files} of them
      compressed
  > left_files: {left_files:file} left for now: {reason}
doomed "removing":
  trees gauge aifs_doomed_trees: Trees that are being removed.
  > !trees: nothing
  > !trees: {removed_inodes:inode} removed since the mount
  > trees: {trees:tree} being taken apart, {directories} directories left as far as is known
trash:
  entries gauge aifs_trash_entries: Entries that can be restored.
  bytes gauge aifs_trash_bytes: Bytes that they take, as far as is known.
  given_bytes counter aifs_trash_given_bytes_total: Bytes that went before their time, for lack of
      space.
  > : {entries:entry}, {bytes:size}
  > given_entries: gone before their time, for lack of space: {given_entries:entry},
      {given_bytes:size}
backup:
  time_s gauge aifs_backup_timestamp_seconds: When the metadata were backed up last, since the
      epoch; not known before the first time of a mount.
  changed_bytes gauge aifs_backup_changed_bytes: Of changes since.
  waiting_deletions gauge aifs_backup_waiting_deletions: Until a backup.
  > !interval_s: off (meta.backup_interval)
  > interval_s !sequence?: none yet
  > interval_s sequence?: of {time_s:when|an earlier mount}, sequence {sequence},
      {base_bytes:size} and {increment_bytes:size} of changes
  > interval_s waiting_deletions: deletions wait for the next one
  > interval_s last_error: failing: {last_error}
scrub:
  running gauge aifs_scrub_running: 1: a scrub reads all bytes.
  flaws gauge aifs_scrub_flaws: Flaws that the last scrub has found.
  > !running !ended_s: none yet
  > running: runs since {begun_s:when}
  > !running ended_s: last one of {begun_s:when}
  > running|ended_s !objects: nothing verified yet
  > objects: {objects} files and containers verified
  > flaws: {flaws:flaw}, {repaired} repaired
  > wrong_ranges: {wrong_ranges:range} of files wrong; aifs scrub show names them
rebuild:
  left_bytes gauge aifs_rebuild_left_bytes: Bytes to be rebuilt or moved.
  moved_bytes counter aifs_rebuild_moved_bytes_total: Bytes rebuilt or moved.
blocks if burst.devices:
  cached_bytes gauge aifs_block_bytes: Of clean files, in blocks in the burst directories.
  limit_bytes gauge aifs_block_limit_bytes: That blocks may take there now.
  hit_bytes counter aifs_block_hit_bytes_total: Bytes that were read from blocks.
  filled_bytes counter aifs_block_filled_bytes_total: Bytes that came into blocks.
  evicted_bytes counter aifs_block_evicted_bytes_total: Bytes of blocks that gave way.
  wrong_blocks counter aifs_block_wrong_total: Blocks that were not what they had been.
  > : {cached_bytes:size} of {limit_bytes:size}, {hit_bytes:size} read, {filled_bytes:size} filled
  > wrong_blocks: {wrong_blocks} were damaged, and came from the servers
stage:
  staged_files counter aifs_stage_files_total: Files staged.
  staged_bytes counter aifs_stage_bytes_total: Bytes staged.
  failed_files counter aifs_stage_failed_files_total: Files not staged.
evict:
  evicted_files counter aifs_evicted_files_total: Burst copies dropped.
locks:
  waiting gauge aifs_locks_waiting: Locks of a cluster that are waited for.
process:
  cpu_s counter aifs_cpu_seconds_total: Processor time of the daemon.
  resident_bytes gauge aifs_resident_memory_bytes: Memory of the daemon.
  descriptors gauge aifs_store_descriptors: Open files of the store.
"""
"""Sections are parts of the status: ``PART "TITLE" if KEY:``. A row is a figure, ``WHERE KIND
NAME{LABEL}: help``; ``x[]``: one for each of a list, by its ``id``; ``x{}``: one for each key of a
dictionary. A row with ``>`` is a clause that ``aifs status`` says of the part, if its conditions
hold: ``key`` is not zero, ``!key`` is, ``a|b`` one of both is not, ``key?`` is known. In a clause
``{key:file}`` is a number of files, ``{key:?yes|no}`` one of two words; a key after ``/`` is in
another part.
"""


class Figure(NamedTuple):
    """One figure: a family of samples."""

    name: str
    kind: str
    where: str
    """Keys of the status, with dots, as in the table."""
    help: str
    label: str = ""
    """The meaning of the keys or ids that ``[]`` or ``{}`` goes through."""


class Part(NamedTuple):
    """A part of the status, and the clauses that are said of it."""

    key: str
    title: str
    condition: str
    """A key of the status without which nothing is said of the part."""
    clauses: list[tuple[list[str], str]]
    """Conditions and words."""


def read_table(table: str) -> tuple[list[Figure], list[Part]]:
    """The figures and parts that a table declares."""
    figures, parts = list[Figure](), list[Part]()
    for row in re.split(r"\n(?! {6})", table.strip()):
        text = " ".join(row.split())
        if row[0] != " ":
            key, title, condition = re.findall(r'(\w+)(?: "(\w+)")?(?: if (\S+))?:', text)[0]
            parts.append(Part(key, title or key, condition, []))
        elif text[0] == ">":
            conditions, _, words = text[1:].partition(": ")
            parts[-1].clauses.append((conditions.split(), words))
        else:
            where, kind, rest = text.split(maxsplit=2)
            name, _, help_text = rest.partition(": ")
            name, _, label = name.rstrip("}").partition("{")
            key = "" if parts[-1].key == "mount" else parts[-1].key
            where = f"{key}.{where}".strip(".") if where[0] not in "[{" else f"{key}{where}"
            figures.append(Figure(name, kind, where, help_text, label))
    return figures, parts


FIGURES, PARTS = read_table(_TABLE)


def describe(
    status: dict[str, Any],
    shows: Mapping[str, Callable[[Any], str]],
    parts: Sequence[Part] = PARTS,
) -> list[tuple[str, str]]:
    """A title and a line for each part of the mount. ``shows``: how a ``size``, ``rate``,
    ``duration`` and time (``when``) are printed."""
    lines = []
    for part in parts:
        own = status.get(part.key)
        if (
            own is None
            or not part.clauses
            or (part.condition and not _find(status, part.condition))
        ):
            continue
        words = _Words(status, own, shows)
        said = [words.format(text) for tests, text in part.clauses if all(map(words.holds, tests))]
        if said:
            lines.append((part.title, "; ".join(said)))
    return lines


class _Words(Formatter):
    """Fills the clauses of one part."""

    def __init__(
        self, status: dict[str, Any], own: dict[str, Any], shows: Mapping[str, Callable[[Any], str]]
    ) -> None:
        self._status, self._own, self._shows = status, own, shows

    def holds(self, test: str) -> bool:
        if test.endswith("?"):
            return (self._own[test.strip("!?")] is not None) != test.startswith("!")
        return any(map(self._own.get, test.lstrip("!").split("|"))) != test.startswith("!")

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if field_name.startswith("/"):
            return _find(self._status, field_name[1:]), field_name
        return self._own[field_name], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        spec, _, otherwise = format_spec.partition("|")
        if spec.startswith("?"):
            return spec[1:] if value else otherwise
        if spec == "sum":
            return str(sum(value.values()))
        if spec in self._shows:
            return self._shows[spec](value) if value or not otherwise else otherwise
        if not spec or not spec[0].isalpha():
            return super().format_field(value, spec)
        many = f"{spec[:-1]}ies" if spec[-1] == "y" else f"{spec}s"
        return f"{value} {spec if value == 1 else many}"


_BOUNDS = [(UNIT_NS << bucket) / 1e9 for bucket in range(1, BUCKETS - 1, 2)]
"""Every second bucket is told: 16 us, 64 us, ... 17 s."""


def expose(
    status: dict[str, Any], declared: Sequence[Figure] = FIGURES, as_open: bool = False
) -> str:
    """All metrics of a mount, from its status. ``as_open``: as OpenMetrics, in which a family's
    name has no ``_total`` and ``_info``."""
    lines: list[str] = []
    for figure in declared:
        name, kind = figure.name, figure.kind
        if as_open:
            name = name.removesuffix("_total").removesuffix("_info")
        elif kind == INFO:
            kind = GAUGE
        lines += [f"# HELP {name} {figure.help}", f"# TYPE {name} {kind}"]
        for key, value in _values(status, figure.where):
            labels = f'{figure.label}="{key}"' if figure.label else ""
            lines += _samples(figure, labels, value)
    return "\n".join([*lines, *["# EOF"] * as_open]) + "\n"


def problems(status: dict[str, Any]) -> list[str]:
    """The faults that somebody should look at, in words; none: the mount is well."""
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
    """The values there, each with the value of its label."""
    outer, kind, rest = re.findall(r"(.*?)(\[\]|\{\}|$)\.?(.*)", where)[0]
    value = _find(status, outer)
    if not kind:
        if value is not None:
            yield "", value
    elif kind == "[]":
        for entry in value or ():
            found = entry["state"] == "ok" if rest == "up" else entry.get(rest)
            if found is not None:
                yield str(entry["id"]), found
    else:
        for key, entry in (value or {}).items():
            yield key, entry[rest] if rest else entry


def _find(status: dict[str, Any], where: str) -> Any:
    """None if this mount does not report it."""
    value: Any = status
    for key in where.split("."):
        value = value.get(key)
        if value is None:
            return None
    return value


def _samples(figure: Figure, labels: str, value: Any) -> Iterator[str]:
    if figure.kind == INFO:
        yield f'{figure.name}{{{figure.label}="{value}"}} 1'
    elif figure.kind == HISTOGRAM:
        counts = value["buckets"]
        for number, bound in enumerate(_BOUNDS):
            count = sum(counts[: 2 * number + 2])
            yield f'{figure.name}_bucket{{{labels},le="{bound:.10g}"}} {count}'
        yield f'{figure.name}_bucket{{{labels},le="+Inf"}} {value["count"]}'
        yield f"{figure.name}_sum{{{labels}}} {value['seconds']}"
        yield f"{figure.name}_count{{{labels}}} {value['count']}"
    elif isinstance(value, dict):
        for error, count in value.items():
            yield f'{figure.name}{{{labels},error="{error}"}} {count}'
    else:
        suffix = f"{{{labels}}}" if labels else ""
        yield f"{figure.name}{suffix} {value + 0}"
