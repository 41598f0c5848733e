"""Packages whose modules are imported when something of them is asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def by_name(modules: Mapping[str, str]) -> dict[str, str]:
    """By name, the module that has it; ``modules``: by module, its public names."""
    return {name: module for module, names in modules.items() for name in names.split()}


def on_demand(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that gives names of its modules: ``modules``, by name."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
