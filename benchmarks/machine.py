"""What ran the benchmark."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from jagcodec import rowcopy

PACKAGES = (
    "jagcodec",
    "torch",
    "tensordict",
    "numpy",
    "msgpack",
    "TransferQueue",
    "msgspec",
    "safetensors",
    "pyarrow",
    "zstandard",
)


def machine() -> dict[str, str | int | float]:
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1,
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "transparent_huge_pages": _huge_pages(),
        "row_kernel": _row_kernel(),
        "load": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _row_kernel() -> str:
    """Which backend copies rows, where there is a choice."""
    backend = getattr(rowcopy, "backend", None)
    return "numpy" if backend is None else str(backend().name)


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]
