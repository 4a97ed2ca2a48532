"""What every integration has in common: a missing package is named, and its example runs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec
from tests.helpers import ROOT

SOURCE = str(Path(jagcodec.__file__).parents[1])
PATHS = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": PATHS},
    )


@pytest.mark.parametrize(
    ("integration", "package", "remedy"),
    [
        ("zmq", "zmq", "pip install 'pyzmq>=25'"),
        ("ray", "ray", "pip install 'ray>=2.40'"),
        ("pillow", "PIL", "pip install 'pillow>=10'"),
        ("transfer_queue", "transfer_queue", "pip install 'TransferQueue>=0.1.9'"),
        ("verl", "verl", "docs/verl.md"),
    ],
)
def test_without_its_package_the_error_says_what_to_install(integration, package, remedy):
    if integration == "verl" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed, and named first")
    missing = f"import sys; sys.modules[{package!r}] = None"
    run = python("-c", f"{missing}; import jagcodec.integrations.{integration}")
    assert run.returncode == 1
    *_, last = run.stderr.splitlines()
    assert last.startswith(f"ModuleNotFoundError: jagcodec.integrations.{integration} needs ")
    assert remedy in last


@pytest.mark.parametrize(
    ("example", "needs", "printed"),
    [
        ("zmq_pipeline", "zmq", "384 rows from 2 workers, all cells identical"),
        ("torch_distributed_broadcast", "torch", "every rank has the 64 rows"),
        pytest.param("ray_store", "ray", "4 rows back", marks=pytest.mark.cluster),
        pytest.param("verl_dataproto", "verl", "8 rows back", marks=pytest.mark.cluster),
        pytest.param(
            "transfer_queue_put_get", "transfer_queue", "3 rows back", marks=pytest.mark.cluster
        ),
        pytest.param("mooncake_put_get", "mooncake", "4 rows back", marks=pytest.mark.cluster),
    ],
)
@pytest.mark.slow
def test_its_example_runs(example, needs, printed):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    run = python(str(ROOT / f"examples/{example}.py"))
    assert run.returncode == 0, run.stderr[-4000:]
    assert printed in run.stdout
