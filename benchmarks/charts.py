"""PNG charts of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.shapes import DESIGN, LARGE, SMALL, Case

SHOWN = (SMALL, Case("gsm8k", 512), DESIGN, LARGE, Case.parse(f"{DESIGN}@1"))

LABELS = {
    "fused": "jagcodec",
    "reused": "jagcodec, buffers reused",
    "composed": "jagcodec, step by step",
    "rows": "per-row loop, TransferQueue",
    "pickle": "padded pickle 5",
    "pickle_oob": "padded pickle 5, out of band",
    "torch_save": "padded torch.save",
    "safetensors": "padded safetensors",
    "tensordict": "padded TensorDict, pickled",
    "arrow": "Arrow IPC",
    "floor": "floor",
}
_COLOURS = {
    "fused": "#0b5fa5",
    "reused": "#3b86c7",
    "composed": "#8fc1ea",
    "rows": "#c0392b",
    "pickle": "#7f8c8d",
    "pickle_oob": "#b4bcbd",
    "torch_save": "#b7950b",
    "safetensors": "#8e44ad",
    "tensordict": "#d68910",
    "arrow": "#1e8449",
    "floor": "black",
}


def draw(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Time and bandwidth, a group of bars for each batch; wire bytes against fill.

    Batches of other shapes are not points of one axis, so no line joins them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    trips = [trip for trip in report["trips"] if "skipped" not in trip]
    shown = [trip for trip in trips if Case.parse(trip["case"]) in SHOWN]
    note = f"{report['machine']['cpu']}, {report['machine']['cpus']} cores"
    charts = {
        "time": _time(shown, note),
        "bytes": _bytes([t for t in trips if (t["rows"], t["width"]) == _shape(DESIGN)]),
        "bandwidth": _bandwidth(shown, note),
    }
    paths = []
    for name, figure in charts.items():
        if figure is not None:
            paths.append(directory / f"{name}.png")
            figure.savefig(paths[-1], dpi=120, metadata={"Software": None})
            plt.close(figure)
    return paths


def _shape(case: Case) -> tuple[int, int]:
    return case.rows, case.width


def _time(trips: list[Mapping[str, Any]], note: str) -> Any:
    if not trips:
        return None
    figure, axes = _axes("The whole trip, less is better", "", f"milliseconds ({note})")
    names = _sides(trips)
    _bars(axes, trips, names, lambda trip, name: trip["sides"][name]["ms"])
    axes.set(yscale="log")
    return _finished(figure, axes)


def _bytes(trips: list[Mapping[str, Any]]) -> Any:
    if len(trips) < 2:
        return None
    title = f"Wire bytes of {DESIGN.rows} x {DESIGN.width}, six per-token columns"
    figure, axes = _axes(title, "share of the cells that are tokens", "megabytes on the wire")
    for name in ("fused", "rows", "arrow", "pickle"):
        points = sorted(
            (t["fill"], t["sides"][name]["wire_bytes"] / 1e6) for t in trips if name in t["sides"]
        )
        if points:
            axes.plot(
                *zip(*points, strict=True), label=LABELS[name], color=_COLOURS[name], marker="o"
            )
    axes.set(xlim=(0, 1.02), ylim=(0, None))
    return _finished(figure, axes)


def _bandwidth(trips: list[Mapping[str, Any]], note: str) -> Any:
    trips = [trip for trip in trips if "floor" in trip["sides"]]
    if not trips:
        return None
    title = "Speed of the whole trip beside memcpy of its tokens, more is better"
    figure, axes = _axes(title, "", f"share of the floor's speed ({note})")
    names = [name for name in _sides(trips) if name != "floor"]
    _bars(axes, trips, names, lambda trip, name: 1 / trip["ratios"][f"{name}/floor"])
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    return _finished(figure, axes)


def _bars(
    axes: Any,
    trips: list[Mapping[str, Any]],
    names: list[str],
    height: Callable[[Mapping[str, Any], str], float],
) -> None:
    """A group for each batch, and in it a bar for each way to send it."""
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        at = [j for j, trip in enumerate(trips) if name in trip["sides"]]
        places = [j + (i - (len(names) - 1) / 2) * width for j in at]
        heights = [height(trips[j], name) for j in at]
        axes.bar(places, heights, width, label=LABELS[name], color=_COLOURS[name])
    axes.set_xticks(range(len(trips)), [_label(trip) for trip in trips])
    axes.grid(visible=False, axis="x")


def _label(trip: Mapping[str, Any]) -> str:
    source = "GSM8K, " if trip["source"] == "gsm8k" else ""
    return f"{trip['rows']} x {trip['width']}\n{source}{trip['fill']:.0%} full"


def _sides(trips: list[Mapping[str, Any]]) -> list[str]:
    return [name for name in LABELS if any(name in trip["sides"] for trip in trips)]


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(8.4, 5.0), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(which="major", color="0.88")
    axes.set_axisbelow(True)
    return figure, axes


def _finished(figure: Any, axes: Any) -> Any:
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure
