"""What is installed here and what the library makes of it: ``jagcodec doctor``."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jagcodec._version import __version__

REQUIRED = ("torch", "tensordict", "numpy", "msgpack")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "zmq": ("pyzmq",),
    "zstd": ("zstandard",),
    "ray": ("ray",),
    "transfer-queue": ("TransferQueue", "ray"),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
    "pillow": ("pillow",),
    "verl": ("ray", "pillow", "omegaconf", "transformers"),
    "arrow": ("pyarrow",),
    "testing": ("hypothesis",),
}
"""The packages that each extra for users adds."""

IN_PLACE_OF: Mapping[str, tuple[str, ...]] = {
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine",),
}
"""Packages with the same modules."""


@dataclass(frozen=True)
class DoctorReport:
    """What is installed here. `str()` is what ``jagcodec doctor`` prints.

    Attributes:
        version: Of jagcodec.
        location: The folder that it is imported from.
        wheel: The tag of the wheel that it was installed from; None of a checkout.
        python: The version of Python.
        system: The operating system, its version and the processor.
        packages: What the library requires, and each version; None of what is not installed.
        problem: Why the library cannot be imported; None if it can. If it cannot, the four below
            are None.
        row_kernel: What copies rows: ``"compiled"``, or ``"numpy"``, which is slower.
        row_kernel_missing: Why that is not the compiled one; None if it could be.
        cells_missing: Why lists of numbers are not packed by the compiled extension; None if they
            are.
        threads: How many threads copy rows, as torch has it; numpy uses one.
        cpus: How many processors this process may use.
        huge_pages: How the system gives transparent huge pages: ``"always"``, ``"madvise"`` or
            ``"never"``; None where it does not say.
        kept_blocks: Whether large blocks of memory are kept for the next batch.
        extras: For each extra, its packages and their versions, as in `packages`.
        environment: The variables that change how the library works.
    """

    version: str
    location: str
    wheel: str | None
    python: str
    system: str
    packages: dict[str, str | None]
    problem: str | None
    row_kernel: str | None
    row_kernel_missing: str | None
    cells_missing: str | None
    threads: int | None
    cpus: int
    huge_pages: str | None
    kept_blocks: bool
    extras: dict[str, dict[str, str | None]]
    environment: dict[str, str]

    @property
    def advice(self) -> list[str]:
        """What to do about what is missing, one sentence each."""
        said = []
        if self.problem is not None:
            said.append(f"jagcodec cannot be imported: {self.problem}")
        missing = [name for name, version in self.packages.items() if version is None]
        if missing:
            said.append(f"not installed: {', '.join(missing)}; pip install jagcodec brings them")
        if self.environment.get("JAGCODEC_ROWCOPY") != "numpy" and (
            self.row_kernel_missing or self.cells_missing
        ):
            said.append(
                "the C extensions are not in use, so batches take longer; install a C compiler, "
                "then run JAGCODEC_REQUIRE_COMPILED=1 pip install --force-reinstall --no-deps "
                "--no-binary jagcodec jagcodec, which fails if it cannot build them"
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON: names to numbers, strings, None, lists and dicts."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        return "\n".join([*_lines(self), *(f"! {sentence}" for sentence in self.advice)])


def doctor() -> DoctorReport:
    """Say what is installed here, which kernel copies rows, and what could be better.

    It is never an error: a library that cannot be imported is what the report says.

    Example:
        >>> from jagcodec.doctor import doctor
        >>> report = doctor()
        >>> report.row_kernel in ("compiled", "numpy"), report.packages["torch"] is None
        (True, False)
    """
    try:
        kernel = _kernel()
    except Exception as error:  # of torch and of whatever it loads, with errors of every kind
        kernel = _Kernel(problem=f"{type(error).__name__}: {error}")
    return DoctorReport(
        version=__version__,
        location=str(Path(__file__).parent),
        wheel=_wheel(),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=platform.platform(),
        packages={name: _version(name) for name in REQUIRED},
        problem=kernel.problem,
        row_kernel=kernel.name,
        row_kernel_missing=kernel.missing,
        cells_missing=kernel.cells_missing,
        threads=kernel.threads,
        cpus=_cpus(),
        huge_pages=_huge_pages(),
        kept_blocks=_keeps_blocks(),
        extras={
            extra: {name: _version(name) for name in packages} for extra, packages in EXTRAS.items()
        },
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VARIABLES = ("JAGCODEC_ROWCOPY", "JAGCODEC_KEEP_BLOCKS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class _Kernel:
    problem: str | None = None
    name: str | None = None
    missing: str | None = None
    cells_missing: str | None = None
    threads: int | None = None


def _kernel() -> _Kernel:
    import torch

    from jagcodec import cells, rowcopy

    backend = rowcopy.backend()
    return _Kernel(
        name=backend.name,
        missing=backend.missing,
        cells_missing=cells.missing(),
        threads=torch.get_num_threads(),
    )


def _version(name: str) -> str | None:
    if name == "zstandard" and sys.version_info >= (3, 14):
        return "in the standard library"
    for package in (name, *IN_PLACE_OF.get(name, ())):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _wheel() -> str | None:
    """The first tag of the wheel, if what is installed is what is imported."""
    try:
        installed = importlib.metadata.distribution("jagcodec")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(installed.locate_file("jagcodec"))).resolve() != Path(__file__).resolve().parent:
        return None
    lines = (installed.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return tags[0] if tags else None


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _huge_pages() -> str | None:
    """The word in brackets, as in ``always [madvise] never``."""
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _keeps_blocks() -> bool:
    return hasattr(mmap, "MADV_FREE") and os.environ.get("JAGCODEC_KEEP_BLOCKS") != "0"


def _lines(report: DoctorReport) -> list[str]:
    threads = "unknown" if report.threads is None else str(report.threads)
    rows = {
        "jagcodec": f"{report.version}, {report.wheel or 'a checkout'}, {report.location}",
        "python": report.python,
        "system": report.system,
        **{name: version or "not installed" for name, version in report.packages.items()},
        "row kernel": _in_use(report.row_kernel, report.row_kernel_missing),
        "cells": _in_use(
            report.row_kernel and ("python" if report.cells_missing else "compiled"),
            report.cells_missing,
        ),
        "threads": f"{threads} of torch, on {report.cpus} processors",
        "huge pages": report.huge_pages or "not known",
        "kept blocks": "yes" if report.kept_blocks else "no",
        **{f"[{extra}]": _installed(packages) for extra, packages in report.extras.items()},
        **report.environment,
    }
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _in_use(name: str | None, missing: str | None) -> str:
    return (name or "unknown") + (f" ({missing})" if missing else "")


def _installed(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())
