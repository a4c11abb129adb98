"""What all tests share: the option that runs the tests of endurance at full length."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="tests of endurance at full length: 200 kills, 100,000 steps; -s shows figures",
    )


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether tests of endurance run at full length."""
    return bool(request.config.getoption("--long"))
