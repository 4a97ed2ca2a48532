"""One Ray for all tests of integrations, and new processes."""

import importlib.util
import multiprocessing
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

import jagcodec

# Other processes import this library from where this one has it.
SOURCE = str(Path(jagcodec.__file__).parents[1])
PATHS = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
SECONDS = 120


def pytest_collection_modifyitems(items):
    theirs = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(theirs)


@pytest.fixture(scope="session")
def cluster():
    """Ray with the hook of this library in every worker."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        runtime_env={
            "worker_process_setup_hook": "jagcodec.integrations.setup",
            "env_vars": {"PYTHONPATH": PATHS},
        },
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def registered(cluster):
    from jagcodec.integrations import ray

    ray.register()
    yield
    ray.unregister()


# New processes come from one that has imported these modules and done nothing with them.
PRELOADED = ["jagcodec.integrations.zmq", "jagcodec.integrations.torch_distributed"]


@contextmanager
def process(work, *arguments):
    """A process that runs `work(pipe, *arguments)`, and the pipe's near end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    near, far = context.Pipe()
    running = context.Process(target=work, args=(far, *arguments), daemon=True)
    running.start()
    far.close()
    try:
        yield running, near
    finally:
        running.kill()
        running.join()
        near.close()


def get(reference):
    import ray

    return ray.get(reference, timeout=SECONDS)


def new_worker(name):
    """Options of a task for a process of its own, which imported nothing before."""
    return {"runtime_env": {"env_vars": {"JAGCODEC_TEST": name}}}


def needs(package):
    """Skips a test where a package is missing."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")
