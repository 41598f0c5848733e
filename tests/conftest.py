"""What all tests share: the option --long, and how examples are drawn."""

import pytest
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes to hours")


def pytest_configure(config: pytest.Config) -> None:
    """No example fails because the machine has much else to do; new ones are drawn with --long, else always the same."""
    settings.register_profile(
        "aifs", deadline=None, suppress_health_check=[HealthCheck.too_slow],
        derandomize=not config.getoption("--long"),
    )  # fmt: skip
    settings.load_profile("aifs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes long: run with --long"))
