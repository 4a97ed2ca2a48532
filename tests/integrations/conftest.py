"""One Ray for all tests of integrations, and new processes."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

import jagcodec

# Other processes import this library from where this one has it.
SOURCE = str(Path(jagcodec.__file__).parents[1])
PATHS = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
SECONDS = 120


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


@pytest.fixture
def python():
    """Runs code, or a file, in a new process."""

    def run(code, *, status=0, path=None, **environment):
        command = ["-c", textwrap.dedent(code)] if isinstance(code, str) else [str(code)]
        paths = [str(path)] if path else []
        run = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, PATHS]), **environment},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert run.returncode == status, run.stderr[-4000:]
        return run

    return run


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


def needs(package):
    """Skips a test where a package is missing."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")
