"""PNG charts of a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.shapes import DESIGN, REAL_FILL, Case

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
_STYLES: dict[str, dict[str, Any]] = {
    "fused": {"color": "#0b5fa5", "linewidth": 2.6, "marker": "o"},
    "reused": {"color": "#0b5fa5", "linewidth": 1.6, "linestyle": "--", "marker": "o"},
    "composed": {"color": "#5aa9e6", "linewidth": 1.6, "marker": "o"},
    "rows": {"color": "#c0392b", "linewidth": 2.2, "marker": "s"},
    "pickle": {"color": "#7f8c8d", "marker": "^"},
    "pickle_oob": {"color": "#7f8c8d", "marker": "^", "linestyle": "--"},
    "torch_save": {"color": "#b7950b", "marker": "v"},
    "safetensors": {"color": "#8e44ad", "marker": "D"},
    "tensordict": {"color": "#d68910", "marker": "<"},
    "arrow": {"color": "#1e8449", "marker": ">"},
    "floor": {"color": "black", "linestyle": ":", "marker": "."},
}


def draw(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Time against tokens, wire bytes against fill, bandwidth as a share of memcpy."""
    directory.mkdir(parents=True, exist_ok=True)
    trips = [trip for trip in report["trips"] if "skipped" not in trip]
    tailed = [trip for trip in trips if Case.parse(trip["case"]).fill == REAL_FILL]
    note = f"{report['machine']['cpu']}, {report['machine']['cpus']} cores"
    charts = {
        "time": _time(tailed, note),
        "bytes": _bytes([t for t in trips if (t["rows"], t["width"]) == _shape(DESIGN)]),
        "bandwidth": _bandwidth(tailed, note),
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
    figure, axes = _axes("The whole trip", "tokens in the batch", f"milliseconds ({note})")
    for name in _sides(trips):
        points = sorted((t["tokens"], t["sides"][name]["ms"]) for t in trips if name in t["sides"])
        axes.plot(*zip(*points, strict=True), label=LABELS[name], markersize=4, **_STYLES[name])
    axes.set(xscale="log", yscale="log")
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
            axes.plot(*zip(*points, strict=True), label=LABELS[name], **_STYLES[name])
    axes.set(xlim=(0, 1.02), ylim=(0, None))
    return _finished(figure, axes)


def _bandwidth(trips: list[Mapping[str, Any]], note: str) -> Any:
    trips = [trip for trip in trips if "floor" in trip["sides"]]
    if not trips:
        return None
    title = "Bandwidth of the whole trip as a share of memcpy"
    figure, axes = _axes(title, "tokens in the batch", f"share of the floor's speed ({note})")
    for name in _sides(trips):
        if name == "floor":
            continue
        points = sorted(
            (t["tokens"], 1 / t["ratios"][f"{name}/floor"]) for t in trips if name in t["sides"]
        )
        axes.plot(*zip(*points, strict=True), label=LABELS[name], markersize=4, **_STYLES[name])
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xscale="log", ylim=(0, None))
    return _finished(figure, axes)


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
