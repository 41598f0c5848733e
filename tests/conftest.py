"""What all tests share: the option --long, how examples are drawn, directories in memory, no fault
that outlives its test.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from aifs.core import faults
from aifs.meta import journal
from aifs.store import ownership, store
from tests.support import collecting, engines, postgres, processor, tiers
from tests.support.data_servers import threads_end
from tests.support.memory import in_memory
from tests.support.powercut import make_copies_one_disk

_NEEDED_BYTES = 4 << 30
"""What the stores of a run take at a time, on the disk of the temporary directory."""

_IN_PROCESS = ("contract", "fault", "model")
"""The suites that open stores in the test's own process, or in children that it forks."""

_ALSO_IN_PROCESS = ("test_fsck", "test_store.py")
"""How the names of unit tests begin that do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines",
        help=f"metadata engines to run on: all, or some of {', '.join(engines.ENGINES)}; without it"
        " lmdb, and all for what is marked so, or with --long for all suites in process",
    )
    parser.addoption("--engine-seed", type=int, default=0, help="when hostile engines suspend")
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """No example fails because the machine has much else to do; new ones are drawn with --long,
    else always the same. The hundreds of processes that are started share what one has compiled,
    and end by SIGINT, also where the tests run in the background of a shell, which ignores it."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _NEEDED_BYTES:
        pytest.exit(
            f"the tests need {_NEEDED_BYTES >> 30} GiB in {tempfile.gettempdir()}, where"
            f" {free / (1 << 30):.1f} GiB are free; make room, or set TMPDIR to another disk",
            returncode=1,
        )
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile(
        "aifs",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=not config.getoption("--long"),
        max_examples=100 if config.getoption("--all") or config.getoption("--long") else 40,
    )
    settings.load_profile("aifs")
    config.pluginmanager.register(tiers.Tiers(config), "tiers")
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        config.pluginmanager.register(processor.Measuring())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(processor.Report())


def pytest_sessionstart(session: pytest.Session) -> None:
    chosen = session.config.pluginmanager.get_plugin("tiers")
    assert chosen is not None
    collecting.import_ahead(session.config, chosen.wants)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are no garbage: they are not looked through while they are collected, nor
    at each collection of garbage in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    asked = config.getoption("--engines") or "lmdb, and others where marked"
    return f"engines: {asked}; seed {config.getoption('--engine-seed')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where a store is opened in the test's process, the test runs once on each engine that is
    asked for."""
    asked = metafunc.config.getoption("--engines")
    if asked is None:
        path = metafunc.definition.path
        in_process = path.parent.name in _IN_PROCESS or path.name.startswith(_ALSO_IN_PROCESS)
        marked = metafunc.definition.get_closest_marker("engines") is not None
        everywhere = marked or (in_process and metafunc.config.getoption("--long"))
        asked = "all" if everywhere else "lmdb"
    names = list(engines.ENGINES) if asked == "all" else asked.split(",")
    if names != ["lmdb"]:
        metafunc.parametrize("engine_kind", names, indirect=True)


@pytest.fixture(autouse=True)
def nobody_else(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the owner of a store lives needs no watching: it is of this process. Journals are
    short: to make one and to read it again was half of what it costs to open a store in memory. In
    modules that cut the power a state that a cut left is opened by the owner that had the store,
    wherever it was written to."""
    monkeypatch.setattr(ownership, "WATCH_S", 0.0)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 512 << 10)
    if hasattr(request.module, "PowerCut"):
        make_copies_one_disk(monkeypatch)


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    """What a test armed is reached by no other."""
    yield
    faults.disarm_all()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The threads of data servers that a test started in its own process have ended."""
    with threads_end():
        yield


@pytest.fixture(autouse=True)
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of the stores that the test opens in its own process."""
    kind = getattr(request, "param", "lmdb")
    if kind != "lmdb":
        engines.seed(request.config.getoption("--engine-seed"))
        monkeypatch.setattr(store, "LmdbEngine", engines.ENGINES[kind])
    return kind


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty directory in memory, gone afterwards."""
    with in_memory() as path:
        yield path


@pytest.fixture
def directory(scratch: Path) -> Path:
    """Where the test's store will be."""
    return scratch / "store"


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, scratch: Path, tmp_path: Path) -> Path:
    """An empty directory, of either kind: where calls may stay on the trio thread, and where they
    go to workers."""
    return tmp_path if request.param == "disk" else scratch


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[postgres.Servers]:
    """The PostgreSQLs of this process, by kind; started when they are first asked for."""
    servers = postgres.Servers()
    yield servers
    servers.close()


@pytest.fixture(params=["wheel"])
def a_postgres(
    request: pytest.FixtureRequest, postgres_servers: postgres.Servers
) -> postgres.Postgres:
    """A running PostgreSQL of the wheel; of both kinds where the test is marked with
    ``tests.support.postgres.BOTH``. It may be killed, stopped and started again."""
    return postgres_servers.get(request.param)


@pytest.fixture
def database(a_postgres: postgres.Postgres) -> Iterator[postgres.TestDatabase]:
    """An empty database of a PostgreSQL."""
    with a_postgres.new_database() as made:
        yield made
