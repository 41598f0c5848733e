"""The manifests, the chart and the examples for Kubernetes are what its API takes."""

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes")
pytest.importorskip("yamllint")

from kubernetes import client
from yamllint import linter
from yamllint.config import YamlLintConfig

from scripts import chart

DEPLOY = chart.CHART.parent
FILES = sorted([DEPLOY / "aifs.yaml", *DEPLOY.glob("examples/*.yaml")])
LINT = YamlLintConfig(
    "{extends: default, rules: {line-length: {max: 130}, document-start: disable,"
    " comments: {min-spaces-from-content: 2}, braces: {max-spaces-inside: 0}}}"
)
SNAPSHOTS = {  # custom resources, of which the client has no models
    "VolumeSnapshotClass": {"driver", "deletionPolicy"},
    "VolumeSnapshot": {"spec"},
}


def documents(text: str) -> Iterator[dict[str, Any]]:
    yield from filter(None, yaml.safe_load_all(text))


def model_of(document: dict[str, Any]) -> str:
    """apps/v1 Deployment is V1Deployment, as all kinds that are used here."""
    version = document["apiVersion"].rpartition("/")[2]
    return f"{version.capitalize()}{document['kind']}"


def faults(kind: str, value: Any, at: str) -> Iterator[str]:
    """What the API does not know, or misses, in an object of a model."""
    if inner := re.fullmatch(r"(list|dict)[\[(](?:str, )?(.+)[\])]", kind):
        expected = list if inner[1] == "list" else dict
        if not isinstance(value, expected):
            yield f"{at}: is no {inner[1]}"
            return
        pairs = enumerate(value) if isinstance(value, list) else value.items()
        for name, each in pairs:
            yield from faults(inner[2], each, f"{at}.{name}")
        return
    model = getattr(client, kind, None)
    if model is None:
        simple = {"str": str, "bool": bool, "int": int}.get(kind, object)
        if not isinstance(value, simple) or (simple is int and isinstance(value, bool)):
            yield f"{at}: {value!r} is no {kind}"
        return
    if not isinstance(value, dict):
        yield f"{at}: is no {kind}"
        return
    fields = {name: attribute for attribute, name in model.attribute_map.items()}
    for name in value.keys() - fields.keys():
        yield f"{at}.{name}: {kind} has no such field"
    known = {fields[name]: it for name, it in value.items() if name in fields}
    try:
        model(**known)  # which refuses what misses a field that is required
    except ValueError as error:
        yield f"{at}: {error}"
    for name in value.keys() & fields.keys():
        yield from faults(model.openapi_types[fields[name]], value[name], f"{at}.{name}")


def all_faults(text: str) -> list[str]:
    found = []
    for document in documents(text):
        if (known := SNAPSHOTS.get(document["kind"])) is not None:
            found += [f"{key}: unknown" for key in document.keys() - known if key not in COMMON]
        else:
            found += faults(model_of(document), document, document["kind"])
    return found


COMMON = {"apiVersion", "kind", "metadata"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_objects_are_what_the_api_takes(path: Path) -> None:
    assert all_faults(path.read_text()) == []


def test_what_the_api_does_not_take_is_found() -> None:
    text = (DEPLOY / "examples/training.yaml").read_text()
    for right, wrong in (
        ("completions: 2", "completion: 2"),
        ("completions: 2", "completions: two"),
        ("mountPath: /runs", "path: /runs"),
        ("- name: train\n          image", "- image"),
        ("args:", "args: x\n          workingDir:"),
    ):
        assert right in text
        assert all_faults(text.replace(right, wrong)), wrong


@pytest.mark.parametrize("path", [*FILES, *chart.CHART.glob("*.yaml")], ids=lambda path: path.name)
def test_form(path: Path) -> None:
    assert not [str(problem) for problem in linter.run(path.read_text(), LINT)]


def test_values_of_the_chart() -> None:
    """Others than the default ones get where they belong, and each is used."""
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    for name, value in values.items():
        changed = {"x": "1"} if isinstance(value, dict) else "changed"
        if isinstance(value, list):
            changed = [{"key": "gpu", "operator": "Exists"}]
        text = chart.render(**{name: changed})
        assert text != chart.render(), name
        if name not in ("daemonResources",):
            assert all_faults(text) == []
    assert "{{" not in chart.render()


def test_programs_in_manifests_can_be_read() -> None:
    [config, *_] = documents((DEPLOY / "examples/training.yaml").read_text())
    assert isinstance(compile(config["data"]["train.py"], "train.py", "exec"), types.CodeType)


def test_the_chart_has_the_version() -> None:
    import aifs

    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert about["version"] == about["appVersion"] == aifs.__version__
    assert values["image"].endswith(f":{aifs.__version__}")


def test_the_generated_module_is_that_of_the_interface(tmp_path: Path) -> None:
    """Whichever version of protoc has made it."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    root, name = DEPLOY.parents[1], "aifs/csi/csi_pb2.py"
    well_known = Path(protoc.__file__).parent / "_proto"
    words = [f"-I{well_known}", f"-I{root}", f"--python_out={tmp_path}", "aifs/csi/csi.proto"]
    assert protoc.main(["protoc", *words]) == 0
    old, new = (
        [line for line in (place / name).read_text().splitlines() if "AddSerializedFile" in line]
        for place in (root, tmp_path)
    )
    assert old == new and len(old) == 1
