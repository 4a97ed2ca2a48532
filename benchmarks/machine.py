"""What ran the benchmark: the machine, the versions, and the revision of this repository."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jagcodec.doctor import doctor

ROOT = Path(__file__).parent.parent
PACKAGES = (
    *("torch", "tensordict", "numpy", "msgpack", "ray", "TransferQueue", "verl", "msgspec"),
    *("safetensors", "pyarrow", "zstandard", "orjson"),
)


def provenance() -> dict[str, Any]:
    """The head of a record: when, by which command, of which code, and on which machine."""
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "src": _git("rev-parse", "HEAD:src"),
        "machine": machine(),
        "versions": versions(),
    }


def require_committed_source() -> None:
    """Make sure that the tree of src/ in a record is the code that was measured."""
    changed = _git("status", "--porcelain", "--", "src")
    if changed == "unknown":
        raise SystemExit("a record names the commit: expected git and a checkout; use --json")
    if changed:
        raise SystemExit(f"a record names the commit: commit these files first\n{changed}")


def machine() -> dict[str, str | int | float]:
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1,
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "transparent_huge_pages": _huge_pages(),
        "row_kernel": str(doctor()["row kernel"]).split()[0],
        "load": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def quieted() -> None:
    """Silence torch's warning, once per process, that nested tensors are a prototype."""
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")


def run_python(code: str, *arguments: Any) -> Any:
    """What this code prints last, as JSON, in a process tree of its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQ_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
    except subprocess.SubprocessError as error:
        raise SystemExit(f"{arguments}: {error}") from None
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Ray on this machine, for the length of a `with` block."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
