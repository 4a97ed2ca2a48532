"""What is installed here: ``jagcodec doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from jagcodec._version import __version__

REQUIRED = ("torch", "tensordict", "numpy", "msgpack")
FOR_TENSORS = ("torch", "tensordict")  # not needed to write rows
OPTIONAL = (  # for integrations and options; the report lists those that are installed
    *("verl", "TransferQueue", "ray", "vllm", "sglang", "pyzmq", "pillow", "omegaconf"),
    *("transformers", "zstandard", "pyarrow", "hypothesis"),
)
# Variables that change how the library works.
VARIABLES = (
    "JAGCODEC_ENCODE",
    "JAGCODEC_ROWCOPY",
    "JAGCODEC_KEEP_BLOCKS",
    "OMP_NUM_THREADS",
)


def doctor() -> dict[str, Any]:
    """What is installed here, which kernel copies rows, and what could be better.

    Example:
        >>> from jagcodec.doctor import doctor
        >>> report = doctor()
        >>> report["row kernel"].split()[0] in ("compiled", "numpy"), report["torch"] is None
        (True, False)

    Returns:
        Names to strings: versions (None for a required package that is missing), what copies rows
        (``row kernel``) and packs lists (``cells``), threads, optional packages, and variables of
        the environment. Last ``problem``, which is None unless the library cannot be imported, and
        ``advice``, a list of sentences.
    """
    report: dict[str, Any] = {
        "jagcodec": f"{__version__}, {Path(__file__).parent}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        **{name: _version(name) for name in REQUIRED},
    }
    advice, problem = [], None
    try:
        for name in FOR_TENSORS:
            if report[name] is not None:
                importlib.import_module(name)
        kernels, lacks_extension = _kernels()
    except Exception as error:  # torch and what it loads raise errors of every kind
        problem = f"{type(error).__name__}: {error}"
        advice.append(f"jagcodec cannot be imported: {problem}")
        kernels = dict.fromkeys(("row kernel", "cells", "threads"), "unknown")
        lacks_extension = False
    absent = [name for name in REQUIRED if report[name] is None]
    if absent and set(absent) <= set(FOR_TENSORS):
        advice.append(
            f"not installed: {', '.join(absent)}; without them, rows are written, and read as "
            "arrays; for tensors, pip install torch tensordict"
        )
    elif absent:
        advice.append(f"not installed: {', '.join(absent)}; install jagcodec again with pip")
    if lacks_extension and os.environ.get("JAGCODEC_ROWCOPY") != "numpy":
        advice.append(
            "the C extensions are not in use, so batches take longer; install a C compiler, and "
            "install jagcodec again with JAGCODEC_REQUIRE_COMPILED=1, which fails without one"
        )
    optional = {name: _version(name) for name in OPTIONAL}
    return {
        **report,
        **kernels,
        **{name: version for name, version in optional.items() if version is not None},
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problem": problem,
        "advice": advice,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """A report as the lines of a table, and its advice."""
    rows = {name: value for name, value in report.items() if name not in ("problem", "advice")}
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value or 'not installed'}" for name, value in rows.items()]
    return [*lines, *(f"! {sentence}" for sentence in report["advice"])]


def _kernels() -> tuple[dict[str, str], bool]:
    """The part of the report on the kernels, and whether a compiled extension is missing."""
    from jagcodec import kernels

    backend, reason = kernels.backend(), kernels.missing_cells()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch_note = " of torch" if "torch" in sys.modules else ""
    rows = {
        "row kernel": backend.name + (f" ({backend.missing})" if backend.missing else ""),
        "cells": f"python ({reason})" if reason else "compiled",
        "threads": f"{kernels.thread_count()}{torch_note}, on {cpus} processors",
    }
    return rows, bool(backend.missing or reason)


def _version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    if name == "zstandard" and sys.version_info >= (3, 14):
        return "in the standard library"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
