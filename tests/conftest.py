"""Settings of the whole suite: deterministic in CI, no deadlines, because no test is timed."""

import os
import sys

import pytest
import tensordict
from hypothesis import HealthCheck, settings

from jagcodec.wire import registry, stdlib_types
from tests.device import install

settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure():
    expected = os.environ.get("JAGCODEC_TENSORDICT", tensordict.__version__)
    if tensordict.__version__ != expected:
        raise pytest.UsageError(
            f"expected tensordict {expected}, found {tensordict.__version__} "
            f"in {tensordict.__file__}"
        )


@pytest.fixture(autouse=True)
def _stdlib_types_are_asked_for():
    """No test finds the types of the standard library registered because another one, or an
    example of the documentation, asked for them."""
    for cls, (name, _, _) in stdlib_types._TYPES.items():
        if registry._name_of.get(cls) == name:
            del registry._name_of[cls], registry._by_name[name]
    if "jagcodec.integrations.verl" not in sys.modules:
        registry._loaded_too.clear()
    elif tuple in registry._loaded_too:
        registry._loaded_too.remove(tuple)


@pytest.fixture
def own_device():
    """Makes `tests.device.DEVICE` usable."""
    install()
