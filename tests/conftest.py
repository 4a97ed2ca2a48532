"""Settings of the whole suite: every run draws the same examples, in the same environment."""

import gc
import os
import sys

# Of the environment, before jagcodec is imported and reads it. Tests of this variable set it.
os.environ.pop("JAGCODEC_KEEP_BLOCKS", None)

import pytest
import tensordict
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from jagcodec import stdlib
from jagcodec.wire import registry
from tests.device import DEVICE, DEVICES, install

# No deadlines, because no test looks at the clock.
settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "search",
    parent=settings.get_profile("same"),
    derandomize=False,
    max_examples=int(os.environ.get("JAGCODEC_EXAMPLES", "1000")),
)
settings.load_profile("same")

PYTHON_VARIABLES_KEPT = ("PYTHONHOME", "PYTHONPATH", "PYTHONHASHSEED")


def pytest_configure(config):
    # Tests start Python, and check what it prints: the caller's PYTHONWARNINGS would change that.
    for name in [*os.environ]:
        if name.startswith("PYTHON") and name not in PYTHON_VARIABLES_KEPT:
            del os.environ[name]
    expected = os.environ.get("JAGCODEC_TENSORDICT", tensordict.__version__)
    if tensordict.__version__ != expected:
        raise pytest.UsageError(
            f"expected tensordict {expected}, found {tensordict.__version__} "
            f"in {tensordict.__file__}"
        )
    if config.getoption("--hypothesis-profile") != "search":
        # Hypothesis also draws constants from the source of all modules imported so far. These
        # depend on the tests that ran before.
        nothing = Constants()
        providers._get_local_constants = lambda: nothing


def pytest_collection_finish():
    """What is imported and collected stays, so that no search for garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--max-skips", type=int, help="fail if more tests than this are skipped")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A package that is missing skips tests: on machines that have it, that is an error."""
    most = session.config.getoption("--max-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if most is None or reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = reporter.stats.get("skipped", [])
    if len(skipped) > most:
        reporter.write_line(f"expected {most} skipped tests or fewer, found {len(skipped)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Files here are not doctests, since --doctest-ignore-import-errors would hide broken ones."""
    collectors = yield
    return [each for each in collectors if type(each) is pytest.Module]


# torch 2.11 warns at the first sparse tensor that a test makes, if nobody said so before.
torch.sparse.check_sparse_tensor_invariants.disable()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Tests draw the same numbers, whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _stdlib_types_are_asked_for():
    """No test finds the types of the standard library registered because another one, or an
    example of the documentation, asked for them."""
    for cls, name, _, _ in stdlib._TYPES:
        if registry._name_of.get(cls) == name:
            del registry._name_of[cls], registry._by_name[name]
    if "jagcodec.integrations.verl" not in sys.modules:
        registry._loaded_bases.clear()
    elif tuple in registry._loaded_bases:
        registry._loaded_bases.remove(tuple)


@pytest.fixture(autouse=True)
def _types_of_tests_are_registered_in_one_test_alone():
    """A type of these files that a test registers, also by encoding it, is unknown to the next."""
    known = set(registry._name_of)
    yield
    for cls in registry._name_of.keys() - known:
        if cls.__module__.startswith("tests."):
            del registry._by_name[registry._name_of.pop(cls)]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    """The suite's own device, and a GPU where there is one."""
    if request.param == DEVICE:
        install()
    return request.param
