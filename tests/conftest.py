"""Settings of the whole suite: deterministic in CI, no deadlines, because no test is timed."""

import os

import pytest
import tensordict
from hypothesis import HealthCheck, settings

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


@pytest.fixture
def own_device():
    """Makes `tests.device.DEVICE` usable."""
    install()
