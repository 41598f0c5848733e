"""The chart for Kubernetes with its default values, as plain manifests. Its templates have values
alone, no conditions and no loops, so that this needs no helm."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy/kubernetes/chart"
_NAMESPACE = "aifs"
_HEAD = f"""\
# Made by `scripts/reference` from deploy/kubernetes/chart with its default values.
apiVersion: v1
kind: Namespace
metadata:
  name: {_NAMESPACE}
"""


def render(**changed: Any) -> str:
    """``changed``: values in place of those of values.yaml."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | changed

    def value(found: re.Match[str]) -> str:
        if found["name"] == ".Release.Namespace":
            return _NAMESPACE
        it = values[found["name"].removeprefix(".Values.")]
        if found["indent"]:
            return textwrap.indent(it.rstrip(), " " * int(found["indent"]))
        return json.dumps(it) if found["json"] else str(it)

    template = re.compile(
        r"\{\{ (?:(?P<json>toJson) |indent (?P<indent>\d) )?(?P<name>[\w.]+) \}\}"
    )
    parts = [path.read_text() for path in sorted((CHART / "templates").glob("*.yaml"))]
    return "---\n".join([_HEAD, *(template.sub(value, part) for part in parts)])
