import json
import re
from pathlib import Path

import pytest
import yaml

from aifs.core import config
from aifs.core.errors import ConfigError


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


MINIMAL = "meta:\n  directory: /m\nservers: [/s0, /s1]\n"


def refusal(source: str, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(source, overrides or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- values and where they come from --------------------------------------------------------------


def test_a_directory_source_implies_all_places(tmp_path: Path) -> None:
    loaded = config.load(str(tmp_path), {})
    assert loaded.source == str(tmp_path)
    assert loaded.meta.directory == f"{tmp_path}/meta"
    assert loaded.servers == tuple(f"{tmp_path}/data/{number}" for number in range(4))
    assert loaded.burst.directories == (f"{tmp_path}/burst",)
    assert loaded.log.file == f"{tmp_path}/log/aifs.log"
    assert (loaded.meta.commit_interval_s, loaded.layout.unit, loaded.kernel.attr_timeout_s) == (
        1.0,
        1 << 20,
        86400.0,
    )


def test_a_directory_source_need_not_exist_and_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.load("store", {}).source == f"{tmp_path}/store"


def test_the_file_in_a_directory_source_overrides_its_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "aifs.yaml", "servers: [/fast/0, far]\nlayout:\n  unit: 4MiB\n")
    loaded = config.load(str(tmp_path), {})
    assert loaded.servers == ("/fast/0", f"{tmp_path}/far")
    assert loaded.layout.unit == 4 << 20
    assert loaded.origins["servers"] == f"{file}:1"
    assert loaded.origins["layout.unit"] == f"{file}:3"
    assert loaded.origins["layout.count"] == "default"
    assert loaded.origins["meta.directory"] == "SOURCE directory"


def test_a_yaml_source_names_its_places_relative_to_itself(tmp_path: Path) -> None:
    source = write(
        tmp_path / "c.yaml",
        "meta: {directory: meta/}\nservers: [a, ../b]\nburst: {directories: [c]}\n",
    )
    loaded = config.load(source, {})
    assert loaded.meta.directory == f"{tmp_path}/meta"
    assert loaded.servers == (f"{tmp_path}/a", f"{tmp_path.parent}/b")
    assert loaded.burst.directories == (f"{tmp_path}/c",)
    assert loaded.log.file == f"{tmp_path}/meta.log"


def test_overrides_win_and_their_paths_start_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "c.yaml", MINIMAL + "layout: {unit: 2MiB}\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    loaded = config.load(
        source,
        {"layout.unit": "4MiB", "servers": "x:/y", "log.file": "log", "burst.capacity": "64MiB"},
    )
    assert loaded.layout.unit == 4 << 20
    assert loaded.servers == (f"{tmp_path}/here/x", "/y")
    assert loaded.log.file == f"{tmp_path}/here/log"
    assert loaded.burst.capacity == 64 << 20
    assert loaded.origins["layout.unit"] == "-o"


def test_settings_can_be_written_back(tmp_path: Path) -> None:
    loaded = config.load(str(tmp_path), {"data.writeback_interval": "90s"})
    settings = {key: value for key, value, _ in loaded.settings()}
    assert config.load(str(tmp_path), settings).model_dump(
        exclude={"origins"}
    ) == loaded.model_dump(exclude={"origins"})


def test_keys_without_a_value_keep_their_default(tmp_path: Path) -> None:
    source = write(tmp_path / "c.yaml", MINIMAL + "layout:\n  unit:\nkernel:\n")
    assert config.load(source, {}).layout.unit == 1 << 20


# --- the documentation ---------------------------------------------------------------------------


def test_the_documented_keys_are_the_keys(tmp_path: Path) -> None:
    assert config.known_keys() == [key for key, _, _ in config.load(str(tmp_path), {}).settings()]


def test_every_key_has_a_comment() -> None:
    commented = True
    for line in Path(config.DEFAULTS_FILE).read_text().splitlines():
        if re.match(r"\s*[a-z_]+: \S", line):
            assert commented, f"nothing explains {line!r}"
        else:
            commented = line.lstrip().startswith("#")


def test_the_defaults_can_be_used_as_a_source(tmp_path: Path) -> None:
    text = Path(config.DEFAULTS_FILE).read_text()
    text = text.replace("directory: null", "directory: meta").replace(
        "servers: null", "servers: [s]"
    )
    loaded = config.load(write(tmp_path / "c.yaml", text), {})
    assert loaded.data.threads == yaml.safe_load(text)["data"]["threads"]


# --- many hosts -----------------------------------------------------------------------------------

CLUSTER = """\
meta:
  directory: /m
  engine: postgresql
  url: postgresql://aifs@db:5432/aifs
  secret: secret
servers: [/s0, /s1]
"""


def test_a_host_of_many_names_the_database_and_itself(tmp_path: Path) -> None:
    text = CLUSTER + "host: {name: gpu-1, listen: '[::]:80', address: 'gpu-1.lan:7947'}\n"
    loaded = config.load(write(tmp_path / "c.yaml", text), {})
    assert loaded.is_cluster and loaded.meta.url == "postgresql://aifs@db:5432/aifs"
    assert loaded.meta.secret == f"{tmp_path}/secret"
    assert loaded.host.model_dump() == {
        "name": "gpu-1",
        "listen": "[::]:80",
        "address": "gpu-1.lan:7947",
        "home_wait_s": 15.0,
        "restarts": 0,
        "bandwidth": 0,
    }
    alone = config.load(str(tmp_path / "store"), {})
    assert not alone.is_cluster and alone.meta.engine == "local"


def test_a_host_has_the_machines_name_where_that_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, name in (("node-7.lan", "node-7.lan"), ("(none)", "host"), ("", "host")):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        loaded = config.load(str(tmp_path), {})
        assert loaded.host.name == name
        assert loaded.origins["host.name"] == "this machine's name"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("  url: postgresql://aifs@db:5432/aifs\n", "", 3, "meta.url is missing: "),
        ("  secret: secret\n", "", 3, "meta.secret is missing: "),
        ("engine: postgresql", "engine: local", 4, "meta.url: is for meta.engine postgresql"),
        ("engine: postgresql", "engine: sqlite", 3, "meta.engine: 'sqlite' is not one of local,"),
        ("aifs@db", "aifs:pass@db", 4, "is not postgresql://USER@HOST:PORT/DATABASE"),
        ("5432/aifs", "5432/aifs?password=x", 4, "the password is in the file"),
        ("5432/aifs", "5432", 4, "is not postgresql://USER@HOST:PORT/DATABASE"),
        (":5432", ":port", 4, "is not postgresql://USER@HOST:PORT/DATABASE"),
        ("postgresql://aifs", "mysql://aifs", 4, "is not postgresql://USER@HOST:PORT/DATABASE"),
        ("url: postgresql", "url: 7 #", 4, "is not postgresql://USER@HOST:PORT/DATABASE"),
        ("servers:", "host: {name: 'a b'}\nservers:", 6, "host.name: 'a b' is not a name of up"),
        ("servers:", "host: {listen: ':7'}\nservers:", 6, "host.listen: ':7' is not ADDRESS:PORT"),
        ("servers:", "host: {address: x}\nservers:", 6, "host.address: 'x' is not ADDRESS:PORT"),
    ],
)
def test_a_mistake_about_many_hosts_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, expected: str
) -> None:
    source = write(tmp_path / "c.yaml", CLUSTER.replace(old, new, 1))
    message = refusal(source)
    assert message.startswith(f"{source}:{line}: ") and expected in message


def test_hosts_do_not_share_a_directory_source(tmp_path: Path) -> None:
    file = write(tmp_path / "aifs.yaml", CLUSTER)
    assert refusal(str(tmp_path)).startswith(f"{file}:3: meta.engine: hosts that share a store")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layout.unti", "1MiB", "unknown key; the nearest valid key is layout.unit"),
        ("layout.unit", "3 apples", "'3 apples' is not a size from 4KiB to 1GiB"),
        ("layout.unit", "5000", "5000 is not a size from 4KiB to 1GiB, a multiple of 4096"),
        ("layout.unit", "2GiB", "'2GiB' is not a size from 4KiB to 1GiB"),
        ("layout.unit", "[1]", "[1] is not a size"),
        ("layout.unit", "{a: 1}", "{'a': 1} is not a size"),
        ("layout.count", "true", "True is not a whole number from 0 to 4096"),
        ("layout.count", "1.5", "1.5 is not a whole number"),
        ("data.threads", "0", "0 is not a whole number from 1 to 256"),
        ("data.writeback_interval", "soon", "'soon' is not a duration from 100ms"),
        ("kernel.attr_timeout", "-1", "-1 is not a duration from 0s to 365d"),
        ("log.level", "loud", "'loud' is not one of debug, info, warning, error"),
        ("log.file", "7", "7 is not a path"),
        ("burst.directories", "[/s0]", "/s0 is already used by servers"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_line_and_key(
    tmp_path: Path, key: str, value: str, expected: str
) -> None:
    section, name = key.split(".")
    source = write(tmp_path / "c.yaml", f"{MINIMAL}{section}:\n  {name}: {value}\n")
    assert refusal(source).startswith(f"{source}:5: {key}: {expected}")


SETS = "a YAML source must set it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{MINIMAL}layot: {{}}\n", ":4: layot: unknown key; the nearest valid key is layout"),
        (f"{MINIMAL}stripe_unit: 1\n", ":4: stripe_unit: unknown key"),
        (f"{MINIMAL}layout: 5\n", ":4: layout: is a section that holds layout.unit, layout.count,"),
        (f"{MINIMAL}burst:\n  ioprio: idle\n  ioprio: idle\n", ":6: burst.ioprio: given twice"),
        (f"{MINIMAL}layout: [\n", ":5: not valid YAML: "),
        (f"{MINIMAL}log: !!python/name:os.system x\n", ":4: not valid YAML: could not determine"),
        ("servers: [/s]\n", f": meta.directory is missing: {SETS}"),
        ("", f": meta.directory is missing: {SETS}"),
        ("meta: {directory: /m}\n", f": servers is missing: {SETS}"),
        ("- a\n", ":1: the file must hold keys and values"),
        ("log: {level: 2024-99-99}\n", ": not valid YAML: month must be in 1..12"),
    ],
)
def test_a_source_of_another_form_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    source = write(tmp_path / "c.yaml", text)
    assert refusal(source).startswith(source + expected)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ("[]", "[] is not a list of directories"),
        ("[/a, 5]", "['/a', 5] is not a list of directories"),
        ("[/a, /a/]", "/a is already used by servers"),
        ("[/a/b, /a]", "/a/b lies inside /a, which is used too"),
        ("[/m/s]", "/m/s lies inside /m, which is used too"),
    ],
)
def test_wrong_lists_of_servers_are_refused(tmp_path: Path, servers: str, expected: str) -> None:
    source = write(tmp_path / "c.yaml", f"meta: {{directory: /m}}\nservers: {servers}\n")
    assert refusal(source).startswith(f"{source}:2: servers: {expected}")


@pytest.mark.sweep
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "deep.yaml", "servers: " + "[" * 1000)
    assert refusal(path) == f"{path}: not valid YAML: nested too deeply"


@pytest.mark.sweep
def test_thirty_thousand_servers_are_read(tmp_path: Path) -> None:
    """When each place was compared with all others, 3,000 took 20 s."""
    servers = tuple(f"/data/{number}" for number in range(30_000))
    path = write(tmp_path / "s.yaml", "meta: {directory: m}\n")
    assert config.load(path, {"servers": ":".join(servers)}).servers == servers


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "c.yaml"
    source.write_bytes(b"a: \xff\n")
    assert refusal(str(source)).startswith(f"{source}: not valid YAML: ")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(f"{tmp_path}/c.yaml") == f"{tmp_path}/c.yaml: No such file or directory"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layout.unt", "1MiB", "-o layout.unt: unknown key; the nearest valid key is layout.unit"),
        ("layout.unit", "x", "-o: layout.unit: 'x' is not a size from 4KiB to 1GiB"),
        ("servers", "", "-o: servers: '' is not a list of directories"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, key: str, value: str, expected: str) -> None:
    assert refusal(str(tmp_path), {key: value}).startswith(expected)


@pytest.mark.parametrize(
    ("key", "texts", "value"),
    [
        ("burst.high_water", ("0.9", "0.90"), 0.9),
        ("burst.drain_on_fsync", ("true", "True"), True),
        ("burst.passthrough", ("false",), False),
        ("burst.drain_delay", ("0", "0s"), 0.0),
        ("burst.drain_bandwidth", ("100MB",), 100_000_000),
        ("burst.ioprio", ("idle",), "idle"),
        ("layout.compress", ("zstd:3",), 3),
        ("layout.compress", ("none",), 0),
        ("data.verify", ("off",), "off"),
        ("memory.budget", ("64MiB",), 64 << 20),
    ],
)
def test_values_mean_the_same_in_a_file_and_on_the_command_line(
    tmp_path: Path, key: str, texts: tuple[str, ...], value: object
) -> None:
    section, name = key.split(".")
    for text in texts:
        given = config.load(str(tmp_path), {key: text})
        filed = config.load(
            write(tmp_path / "c.yaml", f"{MINIMAL}{section}:\n  {name}: {text}\n"), {}
        )
        for loaded in (given, filed):
            branch = getattr(loaded, section)
            assert getattr(branch, name, getattr(branch, f"{name}_s", None)) == value


@pytest.mark.parametrize(
    ("key", "text", "allowed"),
    [
        ("burst.high_water", "80%", "a fraction from 0.01 to 1"),
        ("burst.low_water", "1", "a fraction from 0 to 0.99"),
        ("burst.high_water", "nan", "a fraction from 0.01 to 1"),
        ("burst.passthrough", "1", "true or false"),
        ("burst.drain_on_fsync", "yes", "true or false"),
        ("burst.ioprio", "realtime", "one of idle, best-effort, none"),
        ("burst.throttle_max", "2min", "a duration from 0s to 1min, such as 1s"),
        ("burst.drain_workers", "0", "a whole number from 1 to 64"),
        ("layout.kind", "mirrored", "one of striped, interleaved"),
        ("layout.container_size", "17MiB", "a size from 16MiB to 1TiB, a multiple of 4194304"),
        ("layout.compress", "zstd:99", "none or zstd:LEVEL with a level from 1 to 19"),
        ("layout.compress", "lz4", "none or zstd:LEVEL with a level from 1 to 19"),
        ("data.verify", "always", "one of off, read"),
        ("memory.budget", "1MiB", "a size from 64MiB to 16TiB"),
    ],
)
def test_a_value_out_of_range_is_told_what_is_allowed(
    tmp_path: Path, key: str, text: str, allowed: str
) -> None:
    assert refusal(str(tmp_path), {key: text}) == f"-o: {key}: {text!r} is not {allowed}"


def test_the_low_mark_is_below_the_high_one(tmp_path: Path) -> None:
    message = refusal(str(tmp_path), {"burst.low_water": "0.85"})
    assert message == "-o: burst.low_water: low_water 0.85 is not below high_water 0.8"
    source = write(tmp_path / "c.yaml", MINIMAL + "burst:\n  high_water: 0.5\n")
    assert (
        refusal(source)
        == f"{source}:5: burst.high_water: low_water 0.6 is not below high_water 0.5"
    )


# --- data servers and their failure domains -------------------------------------------------------


def test_servers_may_have_failure_domains(tmp_path: Path) -> None:
    text = (
        "meta: {directory: /m}\nservers:\n  - /s0\n  - {path: s1, domain: rack a}\n  - {path: "
        "/s2, bandwidth: 2GiB, class: cold}\n"
    )
    loaded = config.load(write(tmp_path / "c.yaml", text), {})
    assert loaded.places == (
        ("/s0", "", 0, None),
        (f"{tmp_path}/s1", "rack a", 0, None),
        ("/s2", "", 2 << 30, "cold"),
    )
    assert loaded.servers == ("/s0", f"{tmp_path}/s1", "/s2")
    values = {key: value for key, value, _ in loaded.settings()}
    assert values["servers"] == f"/s0:{tmp_path}/s1 (rack a):/s2 (class cold, 2GiB/s)"


@pytest.mark.parametrize(
    "entry",
    [
        "{domain: a}",
        "{path: /s, rack: a}",
        "{path: /s, bandwidth: fast}",
        "{path: /s, domain: 3}",
        "{path: /s, class: Cold}",
        "{path: /s, class: null}",
        "{path: /s, domain: [a]}",
        "{path: ''}",
        '{path: /s, domain: "a\\nb"}',
    ],
)
def test_a_wrong_server_is_refused(tmp_path: Path, entry: str) -> None:
    file = write(tmp_path / "c.yaml", f"meta: {{directory: /m}}\nservers:\n  - {entry}\n")
    message = refusal(file)
    assert message.startswith(f"{file}:2: servers: ")
    assert message.endswith(
        " is not a list of directories, not empty; each a path, or {path: PATH, domain: NAME, "
        "bandwidth: SIZE, class: NAME}"
    )


def test_the_example_with_racks_is_valid() -> None:
    loaded = config.load(str(Path(__file__).parents[2] / "config" / "racks.yaml"), {})
    assert [place.domain for place in loaded.places] == ["rack-a"] * 4 + ["rack-b"] * 4 + [
        "rack-c"
    ] * 4


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["", "127.0.0.1:9464", "[::1]:9464", "localhost:1", "/run/aifs"])
def test_this_machine_may_ask_for_metrics_without_a_secret(tmp_path: Path, listen: str) -> None:
    assert config.load(str(tmp_path), {"metrics.listen": listen}).metrics.listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:9464", "[::]:9464", "10.0.0.1:9464", "node-1:9464"])
def test_other_machines_need_a_secret_for_metrics(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"^-o: metrics.listen: .* needs metrics.secret"):
        config.load(str(tmp_path), {"metrics.listen": listen})
    given = {"metrics.listen": listen, "metrics.secret": "/etc/secret"}
    assert config.load(str(tmp_path), given).metrics.secret == "/etc/secret"


@pytest.mark.parametrize("listen", ["9464", "socket", "/" + "x" * 107, "127.0.0.1:x"])
def test_where_metrics_cannot_be_served(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="is not ADDRESS:PORT, .* or an absolute path"):
        config.load(str(tmp_path), {"metrics.listen": listen})


# --- the schema -----------------------------------------------------------------------------------


def test_the_schema_has_each_key_and_the_values_of_choices(tmp_path: Path) -> None:
    schema = json.loads(
        (Path(__file__).parents[2] / "docs/reference/config.schema.json").read_text()
    )
    properties = schema["properties"]
    sections = {key.split(".")[0] for key in config.known_keys() if "." in key}
    assert properties.keys() == {*config.known_keys(), *sections}
    for key in config.known_keys():
        section, _, name = key.partition(".")
        one = properties[section]["properties"][name] if name else properties[key]
        assert one["description"]
        for value in one.get("enum", ()):
            if key != "meta.engine":
                (tmp_path / "aifs.yaml").write_text(json.dumps({key: value}))
                config.load(str(tmp_path), {})
