"""The house keeps its shape: directions of import, one place for each outside thing, docstrings."""

import ast
import builtins
import gc
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

PACKAGE = Path(__file__).resolve().parents[2] / "aifs"
MODULES = sorted(PACKAGE.rglob("*.py"))

_META = {"peers", "layout", "core"}
_STORE = {"meta", "data", *_META}
_FILES = {"store", "burst", *_STORE}
_UPKEEP = {"files", "datasets", *_FILES}
_VFS = {"saves", "reads", "upkeep", *_UPKEEP}

BELOW = {
    "core": set(),
    "layout": {"core"},
    "datasets": {"layout", "core"},
    "peers": {"core"},
    "meta": _META,
    "data": {"layout", "core"},
    "burst": _STORE,
    "store": _STORE,
    "files": _FILES,
    "upkeep": _UPKEEP,
    "saves": {"upkeep", *_UPKEEP},
    "reads": {"upkeep", *_UPKEEP},
    "vfs": _VFS,
    "watch": {"core"},
    "fuse": {"watch", "vfs", *_VFS},
    "check": {"vfs", *_VFS},
    "client": {"datasets", "layout", "core"},
    "csi": {"core"},
    "transfer": {"client", "data", "datasets", "layout", "core"},
    "cli": {"transfer", "csi", "client", "fuse", "watch", "check", "vfs", *_VFS},
}
"""What each layer may import besides itself."""

CHANGES = set(
    """
    chmod chown copy_file_range fchmod fchown fdatasync fsync ftruncate lchown link makedirs mkdir
    mkfifo mknod posix_fallocate pwrite pwritev remove removedirs removexattr rename renames
    replace rmdir sendfile setxattr symlink sync truncate unlink utime write writev
""".split()
)
"""Functions of ``os`` that change files."""

MAY_CHANGE_FILES = {
    "core/clock.py": {"utime"},  # of a file in memory
    "core/files.py": CHANGES | {"open"},
    "core/beneath.py": CHANGES | {"open"},
    "core/trees.py": {"link", "mkdir", "open", "rename", "symlink"},
    "client/checkpoints/attributes.py": {"removexattr", "setxattr"},  # of a mount
    "client/startup/marks.py": {"write"},  # to standard output
    "core/limits.py": {"write"},  # to a pipe
    "core/log.py": {"fchmod", "makedirs", "open"},  # the log is no part of the store
    "cli/mount.py": {"write", "open"},  # a pipe, and /dev/null
    "cli/main.py": {"open"},  # /dev/null
    "cli/door.py": {"removexattr", "setxattr"},  # of a mount
    "cli/clone.py": {"mkdir"},  # in a mount
    "cli/trash.py": {"link", "unlink"},  # the same
    "core/ioctl.py": {"open"},  # a directory of a mount
    "core/connections.py": {"open", "write"},  # of fusectl
    "core/binds.py": {"mkdir", "rmdir"},  # where a pod's volume is mounted
    "csi/volumes.py": {"chmod", "chown", "fsync", "mkdir", "open", "rename", "setxattr"},
    "fuse/bridge.py": {"write"},  # to the mount's descriptor
    "fuse/keeper.py": {"open", "pwrite", "write"},  # the log, fusectl, a file in memory
    "fuse/kept.py": {"open", "pwrite", "truncate", "write"},  # in memory, the mount's descriptor
}


@pytest.fixture(scope="module", autouse=True)
def without_the_collector() -> Iterator[None]:
    """It would walk all that is parsed again and again, for half of the time."""
    gc.disable()
    yield
    gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def of_each(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """A test that checks each of these files, and names those that fail. Not one test for each
    file: of 3,000 tests most of the time goes to their number."""

    def test_of(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong.append(f"{path.relative_to(PACKAGE.parent)}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All that is in a file, from the top down: first the module."""
    return list(ast.walk(ast.parse(path.read_bytes())))


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that are imported, anywhere in the file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def calls(path: Path) -> list[tuple[str, int, ast.Call]]:
    """Dotted names of what is called, with line numbers."""
    return [
        (ast.unparse(node.func), node.lineno, node)
        for node in nodes(path)
        if isinstance(node, ast.Call)
    ]


def _is_one_of(value: ast.expr, *names: str) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def users_of(package: str) -> set[str]:
    return {
        name_of(path)
        for path in MODULES
        if any(name.split(".")[0] == package for name in imports(path))
    }


def test_every_layer_is_known() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert found == set(BELOW)


@of_each(MODULES)
def test_imports_go_down(path: Path) -> None:
    if path.parent == PACKAGE:
        assert not [name for name in imports(path) if name.startswith("aifs")]
        return
    layer = layer_of(path)
    allowed = BELOW[layer] | {layer}
    upward = {
        name
        for name in imports(path)
        if name.startswith("aifs.") and name.split(".")[1] not in allowed
    }
    assert not upward


def test_the_layers_have_an_order() -> None:
    for layer, below in BELOW.items():
        assert layer not in below
        for lower in below:
            assert BELOW[lower] <= below, f"{layer} may use {lower}, but not all that {lower} may"


def folders_imported() -> dict[str, set[str]]:
    """By folder of the package, at any depth, the other folders that its modules import."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        folder = path.parent.relative_to(PACKAGE.parent)
        for name in imports(path):
            if name.startswith("aifs."):
                place = Path(*name.split("."))
                while not (PACKAGE.parent / place).is_dir():
                    place = place.parent
                if place not in (folder, Path(PACKAGE.name)):
                    found.setdefault(str(folder), set()).add(str(place))
    return found


def test_folders_import_each_other_in_no_circle() -> None:
    below = folders_imported()

    def reached(folder: str, seen: set[str]) -> set[str]:
        for lower in below.get(folder, set()) - seen:
            seen.add(lower)
            reached(lower, seen)
        return seen

    assert not [folder for folder in below if folder in reached(folder, set())]


SERVICES = set(
    """
    collector config engine heirlooms ids kernel looked_up options peers quotas refusals servers
    table upkeep
""".split()
)


def test_services_are_leaves() -> None:
    """The record that is handed to all parts has these fields, and no service takes the record."""
    named = dict[str, str]()
    [services] = [node for _, node in classes() if node.name == "Services"]
    for node in services.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named[node.target.id] = ast.unparse(node.annotation).split(" | ")[0]
    assert named.keys() == SERVICES
    takers = {node.name for _, node in classes() if "services: Services" in ast.unparse(node)}
    assert takers and not takers.intersection(named.values())


def test_few_ask_whether_the_store_has_other_hosts() -> None:
    """Parts are given services that do nothing where the store has one host (peers.Alone,
    LookedUpAlone, HomeHere, NoMirrors, OwnBarrier). The metadata and fsck know the hosts."""
    asked = Counter[str]()
    for path in MODULES:
        if layer_of(path) not in ("meta", "store", "check"):
            for node in nodes(path):
                if isinstance(node, ast.Attribute):
                    asked[f"{_last_name(node.value)}.{node.attr}"] += 1
                elif isinstance(node, ast.Compare) and _last_name(node.left) == "peers":
                    asked["peers"] += 1
    assert asked["peers"] == 0
    assert 0 < asked["engine.host"] <= 10
    assert 0 < asked["peers.is_shared"] + asked["role.is_shared"] <= 8


def _last_name(value: ast.expr) -> str:
    """Of ``self._engine``: ``engine``."""
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return str(name).lstrip("_")


def test_pyfuse3_is_known_to_the_edge_alone_and_lmdb_to_one_module() -> None:
    assert {name.split("/")[0] for name in users_of("pyfuse3")} == {"fuse"}
    assert users_of("lmdb") == {"meta/lmdb_database.py"}


@of_each(path for path in MODULES if layer_of(path) != "cli")
def test_only_commands_print_and_exit(path: Path) -> None:
    assert not [
        line for name, line, _ in calls(path) if name in ("print", "sys.exit", "exit", "quit")
    ]


@of_each(MODULES)
def test_files_are_changed_in_one_place(path: Path) -> None:
    allowed = MAY_CHANGE_FILES.get(name_of(path), set())
    wrong = [
        (line, name)
        for name, line, call in calls(path)
        if (name.startswith("os.") and name[3:] in CHANGES | {"open"} and name[3:] not in allowed)
        or name.startswith(("shutil.", "tempfile."))
        or name.endswith((".write_text", ".write_bytes"))
        or (
            name == "open"
            and _writes(call)
            and name_of(path) not in ("core/log.py", "fuse/session.py")
        )
    ]
    assert not wrong


def _writes(call: ast.Call) -> bool:
    modes = [
        *call.args[1:2],
        *(keyword.value for keyword in call.keywords if keyword.arg == "mode"),
    ]
    return any(
        not isinstance(mode, ast.Constant) or set(mode.value) & set("wax+") for mode in modes
    )


def test_sysfs_is_all_that_the_edge_writes() -> None:
    opened = [
        call
        for name, _, call in calls(PACKAGE / "fuse/session.py")
        if name == "open" and _writes(call)
    ]
    assert [ast.unparse(call.args[0]).startswith("f'/sys/class/bdi/") for call in opened] == [True]


@of_each(MODULES)
def test_modules_say_what_they_are_for(path: Path) -> None:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module) and ast.get_docstring(module), "no docstring"


@of_each(MODULES)
def test_no_error_is_hidden(path: Path) -> None:
    bare = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


WIRES = set(
    """
    clean_up commit_pending covered edge_status find_needed forget_names hedging is_urgent
    leave_backups passthrough publish recovered rescue restore stager wrong_objects
""".split()
)
"""Attributes that parts were once connected by, after they had been made."""


def assigned_outside(path: Path) -> Iterator[tuple[int, str]]:
    """Attributes that are assigned, and not by a method of their own object: line, and which."""
    for node in nodes(path):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else ():
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and not _is_one_of(part.value, "self"):
                    yield part.lineno, part.attr


def called_back(path: Path) -> Iterator[str]:
    """Attributes that hold functions, as their annotations say."""
    for node in nodes(path):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            if "Callable" in ast.unparse(node.annotation):
                yield node.target.attr


@cache
def all_called_back() -> set[str]:
    return {attribute for path in MODULES for attribute in called_back(path)}


MAY_BE_SET = {"on_object": {"files/handles.py"}, "on_cancel": {"saves/group_drain.py"}}
"""What is the state of a file, and no wire."""


@of_each(MODULES)
def test_parts_are_not_wired_after_they_are_made(path: Path) -> None:
    """What a part calls is given to its constructor, or to a small object that is made before."""
    wrong = [
        (line, attribute)
        for line, attribute in assigned_outside(path)
        if (attribute.startswith("on_") or attribute in all_called_back() | WIRES)
        and name_of(path) not in MAY_BE_SET.get(attribute, ())
    ]
    assert not wrong


@pytest.mark.parametrize("name", ["vfs/filesystem.py", "vfs/lifecycle.py", "fuse/session.py"])
def test_who_makes_the_parts_assigns_to_none_of_them(name: str) -> None:
    assigned = {attribute for _, attribute in assigned_outside(PACKAGE / name)}
    assert assigned <= {"handles"}, "a wire"  # of an open inode, which is closed


@of_each(path for path in MODULES if layer_of(path) in ("saves", "reads", "vfs"))
def test_the_filesystem_is_composed(path: Path) -> None:
    """Of parts that are given to one another: no class is a layer of another one, and no protocol
    says what such a layer expects of the rest."""
    bases = {
        ast.unparse(base)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert bases <= {"NamedTuple", "Enum", "Draining"}


FORM = {"layout", "oid", "data", "copy"}
"""Fields of an inode that say where its bytes are; with those of an open inode that go with them:
"""
IN_CORE = {"objects", "copy", "marked", "lease"}


def _form_assigned(path: Path) -> Iterator[int]:
    """Lines that assign to the form of an open inode: of ``file``, or of its ``inode``."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            value = node.value
            owner = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            if (owner == "inode" and node.attr in FORM) or (
                owner == "file" and node.attr in IN_CORE
            ):
                yield node.lineno


@of_each(path for path in MODULES if layer_of(path) in ("files", "upkeep", "saves", "reads", "vfs"))
def test_one_module_changes_the_form_of_an_open_file(path: Path) -> None:
    if path.name not in ("transitions.py", "recovery.py"):  # the latter before any file is open
        assert not list(_form_assigned(path))


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Of the package."""
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_public_classes_have_different_names() -> None:
    """So a name says which class it is, wherever it is read."""
    places: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_"):
            places.setdefault(node.name, []).append(name_of(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice.keys() - {"Source", "Stager", "Subject"}


MAY_BE_UNEXPLAINED = 5
"""A class with more fields says what each of them is."""


EXPLAINED_ELSEWHERE = {
    "ServerRecord": "the first lines of meta/servers.py",
}


class Fields:
    """The fields of a class: those that ``__init__`` sets, or that the class lists, where it is a
    record. What it was given, or has of others, as it is, and parts that are made there, are
    explained where they are from, and are left out."""

    def __init__(self, node: ast.ClassDef, lines: list[str], classes: set[str]) -> None:
        self._lines = lines
        self._classes = classes
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        self._given: set[str] = set()
        if any(isinstance(statement, ast.AnnAssign) for statement in node.body) or not inits:
            self._body = node.body
        else:
            arguments = inits[0].args
            self._given = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
            self._body = inits[0].body

    def explained(self) -> dict[str, bool]:
        """By name, whether there is a comment on its line or before it, or a docstring after."""
        found: dict[str, bool] = {}
        for statement, follows in zip(self._body, [*self._body[1:], None], strict=True):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                continue
            first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
            near = self._lines[first:last]
            if self._lines[first - 1].lstrip().startswith("#"):
                near.append("#")
            is_explained = any("#" in line for line in near) or (
                isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant)
            )
            for name in self._names(statement):
                found.setdefault(name, is_explained)
        return found

    def _names(self, statement: ast.Assign | ast.AnnAssign) -> Iterator[str]:
        if self._given:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                value = statement.value
                values = value.elts if isinstance(value, ast.Tuple) else [value] * len(parts)
                for part, made_of in zip(parts, values, strict=False):
                    is_own = isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
                    if is_own and not self._says_itself(made_of):
                        yield part.attr
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            if kind not in self._classes and not kind.startswith("ClassVar"):
                yield statement.target.id

    def _says_itself(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return value.func.id in self._classes
        if isinstance(value, ast.Attribute):
            return True
        return isinstance(value, ast.Name) and value.id in self._given


def test_fields_are_explained() -> None:
    names_of_all, lacking = {node.name for _, node in classes()}, []
    for path, node in classes():
        if name_of(path) == "core/config.py" or node.name in EXPLAINED_ELSEWHERE:
            continue  # config/default.yaml explains the former
        fields = Fields(node, path.read_text().splitlines(), names_of_all).explained()
        if len(fields) > MAY_BE_UNEXPLAINED and not all(fields.values()):
            names = [name for name, is_explained in fields.items() if not is_explained]
            lacking.append(f"{name_of(path)}: {node.name}: {', '.join(names)}")
    assert not lacking


WORD = re.compile(r"[A-Z]\w+")
RAISED = re.compile(r"\b[Rr]aises? ((?:(?:, | and | or )?[A-Z]\w+)+)")


def test_errors_that_docstrings_name_exist() -> None:
    """A name that has changed has changed there, too."""
    known = set(dir(builtins)).union(*map(own_names, MODULES))
    unknown = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                text = " ".join((ast.get_docstring(node) or "").split())
                named = {name for found in RAISED.findall(text) for name in WORD.findall(found)}
                unknown += [f"{name_of(path)}: {name}" for name in named - known]
    assert not unknown


TESTS = PACKAGE.parent / "tests"
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def own_names(path: Path) -> set[str]:
    """Names of attributes, functions and variables that a file itself sets."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@cache
def private_names() -> set[str]:
    """Of the package."""
    names = set().union(*map(own_names, MODULES))
    return {name for name in names if name.startswith("_") and name[:2] != "__"} - OF_TUPLES


def reached_into(path: Path) -> set[str]:
    """Private names of ours that a test uses of an object, or imports."""
    if private_names().isdisjoint(re.findall(r"\b_\w+", path.read_text())):
        return set()  # most of them, and they need not be parsed
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and not _is_one_of(node.value, "self", "cls", "os"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aifs."):
            found |= {alias.name for alias in node.names}
    return (found & private_names()) - own_names(path)


STILL_REACHED = {
    "contract/test_group_drain.py": {"_flip", "_hasher", "_lanes"},
    "fault/test_column_races.py": {"_hand_out"},
    "fault/test_file_races.py": {"_discard"},
}
"""What tests still use that is private. Nothing may be added."""


@of_each(sorted(TESTS.rglob("*.py")))
def test_tests_use_what_is_public(path: Path) -> None:
    """As far as names tell: what a test needs to see, a class shows to all."""
    assert reached_into(path) == STILL_REACHED.get(str(path.relative_to(TESTS)), set())


def test_names_that_scripts_import_are_there() -> None:
    """Nothing else runs most benchmarks when a name goes."""
    missing = []
    for path in (PACKAGE.parent / "scripts").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aifs"):
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{path.name}: {node.module}.{name.name}"
                    for name in node.names
                    if not hasattr(module, name.name)
                    and importlib.util.find_spec(f"{node.module}.{name.name}") is None
                ]
    assert not missing, missing
