"""Charts, where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jagcodec.errors import ArgumentError

FORMATS = ("png", "svg", "pdf")
INSTALL = "pip install matplotlib"


def check_plot(path: Path) -> None:
    """See that a chart can be drawn, before anything is measured.

    Raises:
        ArgumentError: matplotlib is not installed, or the file has another ending.
    """
    _figure()
    if path.suffix[1:].lower() not in FORMATS:
        raise ArgumentError(
            "bad_option",
            "--plot",
            f"expected a file that ends in .{', .'.join(FORMATS)}, found {path.name!r:.80}",
        )


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "bad_option", "--plot", f"expected matplotlib, which is not installed; {INSTALL}"
        ) from error
    return Figure


def grouped_bars(
    path: Path,
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
) -> None:
    """Draw a bar of each series for each group, side by side, and write it to a file.

    Raises:
        ArgumentError: As `check_plot`.
        OSError: The file cannot be written.
    """
    from jagcodec.wire.files import write_whole

    figure = _figure()(figsize=(max(6.0, 1.2 * len(groups) + 2), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(series))
    for i, (label, values) in enumerate(series.items()):
        places = [group - 0.4 + width * (i + 0.5) for group in range(len(groups))]
        axes.bar(places, values, width, label=label)
    # Names are text, and no formula of matplotlib's.
    names = [group.replace("$", r"\$") for group in groups]
    axes.set_xticks(range(len(groups)), names, rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend()
    stream = io.BytesIO()
    figure.savefig(stream, format=path.suffix[1:].lower(), dpi=150)
    write_whole(str(path), [stream.getvalue()], "--plot")
