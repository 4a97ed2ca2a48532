"""The whole trip of one rollout batch: ours, beside the per-row loop of today's frameworks.

A trip takes six padded columns at the write site to the same six padded columns at the fetch site.
Its stages, each timed by itself:

    pack         padded columns and lengths -> a TensorDict of jagged columns
    encode       the TensorDict -> frames
    copy         each frame -> a bytearray of its own, once: what a transport does at the least
    decode       the copied frames -> a TensorDict of jagged columns
    materialize  its columns -> padded rectangles
    touch        one byte of each page of the rectangles is read, so that zero pages which the
                 kernel has only promised are paid for inside the clock

`ours` is `pack_jagged_fields`, `encode`, `decode` and `materialize` of jagcodec. `peer` is what
NeMo-RL's codec does over the encoder of TransferQueue: a slice per row and
`torch.nested.as_nested_tensor` for each column, `encode` and `decode` of
`transfer_queue.utils.serial_utils`, `torch.nested.to_padded_tensor` for each column. The loop is
written anew here, the encoder is TransferQueue's own. `floor` is no codec but what no codec can
beat in memory that it reuses: three copies of the valid bytes (pack, copy, materialize) and one
fill of the rectangles with the pad, all into memory that was written before.

How it is measured: ours, peer and floor are a process each, new for every batch, and take turns,
so that a slow moment of the machine hits all of them. (In one process each would live in the heap
that the other leaves behind, and whether memory is fresh decides more than anything else. The
median page faults of a run are shown.) Times are medians. The ratios are medians too, of each run
over its neighbour in time, because the clock of a shared machine drifts. Garbage is collected
before a run, never in it, and freeing what a trip made is outside the clock. Every rectangle of
every run, warm-up included, is compared bit by bit with the input after the clock stopped; a
difference ends the benchmark with exit status 1. The number of torch threads is left as torch
chose it.

Where the comparison is biased: jagcodec's authors wrote it, and chose the batch. One process plays
producer and consumer, so nothing here measures a network, a store, or a scheduler. Every column is
per-token and none is a Python object: TransferQueue 0.1.11 loses non-tensor columns, so it could
not bring them back. A frame per row is what the peer's encoder makes of jagged columns; batches of
few long rows suit it best, batches of many short rows worst. `bytearray` is new memory for each
frame, as where a transport receives; one that reuses its buffers would help both sides, and ours
more. Lengths are long-tailed: with every row equally long there would be no padding to strip.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.resources
import importlib.util
import itertools
import json
import mmap
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

import jagcodec

STAGES = ("pack", "encode", "copy", "decode", "materialize", "touch")
PLAYERS = ("ours", "peer", "floor")
PACKAGES = ("jagcodec", "TransferQueue", "torch", "tensordict", "numpy", "msgpack", "msgspec")
PADS: dict[str, int | float] = {
    "input_ids": 151643,
    "token_mask": 0,
    "generation_logprobs": 0.0,
    "prev_logprobs": 0.0,
    "reference_logprobs": 0.0,
    "advantages": 0.0,
}
DTYPES = {"input_ids": torch.int64, "token_mask": torch.int32}
REAL_FILL = 0.275  # of all rows of the GSM8K rollouts, in one rectangle
SEED = 0

Lengths = npt.NDArray[np.int64]


# --- the batch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Padded columns (N, S) of the names in `PADS`, and their (N,) lengths."""

    source: str
    lengths: torch.Tensor
    columns: dict[str, torch.Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.columns["input_ids"].shape
        return rows, width

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def valid_bytes(self) -> int:
        return self.tokens * sum(column.itemsize for column in self.columns.values())

    @property
    def padded_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())


def make_batch(source: str, lengths: Lengths) -> Batch:
    """Random columns as wide as the longest row; cells past a row's length hold its pad."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (len(lengths), int(lengths.max()))
    rows = torch.from_numpy(lengths)
    padding = torch.arange(shape[1]) >= rows[:, None]
    columns = {
        name: _cells(shape, DTYPES.get(name, torch.float32), generator).masked_fill_(padding, pad)
        for name, pad in PADS.items()
    }
    return Batch(source, rows, columns)


def _cells(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=generator)
    high = 2 if dtype == torch.int32 else 151_000
    return torch.randint(high, shape, dtype=dtype, generator=generator)


def lognormal_lengths(rows: int, width: int) -> Lengths:
    """Long-tailed lengths in 1 to `width`, the longest of them `width`, of the real fill."""
    shape = np.random.default_rng(SEED).lognormal(sigma=0.5, size=rows)
    low, high = 0.0, float(width)
    for _ in range(60):  # bisect for the scale that gives the fill after clipping
        scale = (low + high) / 2
        lengths = np.clip(np.rint(shape * scale), 1, width).astype(np.int64)
        lengths[np.argmax(shape)] = width
        low, high = (scale, high) if lengths.mean() < REAL_FILL * width else (low, scale)
    return lengths


def gsm8k_lengths(rows: int) -> Lengths:
    """Prompt + response tokens of whole groups of real GSM8K rollouts, drawn with a fixed seed."""
    resource = importlib.resources.files("jagcodec") / "data" / "gsm8k_rollout_lengths.json"
    data = json.loads(resource.read_text(encoding="utf-8"))
    tokens = np.array([row[:2] for row in data["rows"]], dtype=np.int64).sum(axis=1)
    groups = tokens.reshape(-1, data["group_size"])
    drawn = np.random.default_rng(SEED).permutation(len(groups))[: rows // data["group_size"]]
    lengths: Lengths = groups[drawn].reshape(-1)
    return lengths


# --- the players -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of one player: milliseconds by stage, and what else it took."""

    ms: dict[str, float]
    page_faults: int = 0
    frames: int = 0
    wire_bytes: int = 0

    @property
    def total(self) -> float:
        return sum(self.ms.values())


@dataclass(frozen=True)
class Codec:
    """What one side does, but for copying and touching, which both do alike."""

    pack: Callable[[Batch], Any]
    encode: Callable[[Any], Sequence[Any]]
    decode: Callable[[list[bytearray]], Any]
    materialize: Callable[[Any], Mapping[str, torch.Tensor]]


def our_codec() -> Codec:
    return Codec(
        pack=lambda batch: jagcodec.pack_jagged_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
        ),
        encode=jagcodec.encode,
        decode=jagcodec.decode,
        materialize=lambda td: jagcodec.materialize(td, pad_value_dict=PADS),
    )


def peer_codec() -> Codec:
    """The row loop over TransferQueue's encoder."""
    from transfer_queue.utils.serial_utils import decode, encode

    return Codec(pack=_peer_pack, encode=encode, decode=decode, materialize=_peer_materialize)


def _peer_pack(batch: Batch) -> TensorDict:
    lengths = batch.lengths.tolist()
    columns = {
        name: torch.nested.as_nested_tensor(
            [padded[i, :n] for i, n in enumerate(lengths)], layout=torch.jagged
        )
        for name, padded in batch.columns.items()
    }
    return TensorDict(columns, batch_size=[len(lengths)])


def _peer_materialize(td: TensorDict) -> dict[str, torch.Tensor]:
    return {name: torch.nested.to_padded_tensor(td[name], pad) for name, pad in PADS.items()}


def run_trip(codec: Codec, batch: Batch) -> tuple[Run, Mapping[str, torch.Tensor]]:
    """One trip and its rectangles. All that it makes lives on until the last stage is timed."""
    clock = time.perf_counter
    faults = _page_faults()
    ticks = [clock()]
    packed = codec.pack(batch)
    ticks.append(clock())
    frames = codec.encode(packed)
    ticks.append(clock())
    received = [bytearray(memoryview(frame)) for frame in frames]
    ticks.append(clock())
    decoded = codec.decode(received)
    ticks.append(clock())
    rectangles = codec.materialize(decoded)
    ticks.append(clock())
    for rectangle in rectangles.values():
        rectangle.view(torch.uint8).numpy().reshape(-1)[:: mmap.PAGESIZE].max()
    ticks.append(clock())
    faults = _page_faults() - faults
    ms = [1e3 * (end - start) for start, end in itertools.pairwise(ticks)]
    wire_bytes = sum(map(len, received))
    return Run(dict(zip(STAGES, ms, strict=True)), faults, len(received), wire_bytes), rectangles


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Floor:
    """Three copies of the valid bytes and one fill of the rectangles, in memory held ready."""

    def __init__(self, batch: Batch) -> None:
        valid = torch.arange(batch.shape[1]) < batch.lengths[:, None]
        values = [column[valid].numpy() for column in batch.columns.values()]
        self._hops = [[cells.copy() for cells in values] for _ in range(4)]
        self._rectangles = [
            (np.full(batch.shape, PADS[name], column.numpy().dtype), PADS[name])
            for name, column in batch.columns.items()
        ]

    def run(self) -> Run:
        faults = _page_faults()
        start = time.perf_counter()
        for hop in itertools.pairwise(self._hops):
            for cells, to in zip(*hop, strict=True):
                np.copyto(to, cells)
        for rectangle, pad in self._rectangles:
            rectangle.fill(pad)
        ms = 1e3 * (time.perf_counter() - start)
        return Run({"floor": ms}, _page_faults() - faults)


def difference(batch: Batch, rectangles: Mapping[str, torch.Tensor]) -> str:
    """The first column that is not the batch's, bit for bit; empty if all are."""
    if list(rectangles) != list(batch.columns):
        return f"columns {list(rectangles)}"
    for name, expected in batch.columns.items():
        found = rectangles[name]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return f"column {name!r}, a {found.dtype} tensor of shape {tuple(found.shape)}"
        pieces = zip(_pieces(found), _pieces(expected), strict=True)
        if not all(np.array_equal(a, b) for a, b in pieces):
            return f"column {name!r}"
    return ""


def _pieces(tensor: torch.Tensor) -> list[npt.NDArray[Any]]:
    # Small ones and no torch, so that looking leaves neither a changed heap nor busy threads.
    flat = tensor.contiguous().view(torch.int32).numpy().reshape(-1)
    return np.array_split(flat, max(1, flat.nbytes // 2**18))


# --- measuring ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch to make, and how often to send it."""

    source: str
    rows: int
    width: int  # 0: as wide as the longest row of the source
    repeats: int
    warmups: int = 3

    def lengths(self) -> Lengths:
        if self.source == "gsm8k":
            return gsm8k_lengths(self.rows)
        return lognormal_lengths(self.rows, self.width)


FULL = (
    Case("lognormal", 64, 512, repeats=101),
    Case("gsm8k", 512, 0, repeats=51),
    Case("lognormal", 512, 1536, repeats=41),
    Case("lognormal", 1024, 8192, repeats=21),
)
QUICK = (
    Case("lognormal", 64, 512, repeats=11),
    Case("gsm8k", 128, 0, repeats=7),
)


@dataclass
class Result:
    """What one case measured: the runs of each player, in turns."""

    source: str
    rows: int
    width: int
    tokens: int
    valid_bytes: int
    padded_bytes: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: {name: [] for name in PLAYERS})

    def ms(self, player: str, stage: str | None = None) -> float:
        runs = self.runs[player]
        return statistics.median(run.ms[stage] if stage else run.total for run in runs)

    def ratio(self, above: str, below: str) -> float:
        pairs = zip(self.runs[above], self.runs[below], strict=True)
        return statistics.median(a.total / b.total for a, b in pairs)


def measure(case: Case) -> Result:
    """Ours, peer and floor in turns, over one batch."""
    with ExitStack() as stack:
        players = {name: stack.enter_context(_process(name, case)) for name in PLAYERS}
        results = [_answer(connection) for connection in players.values()]
        result: Result = results[0]
        for turn in range(-case.warmups, case.repeats):
            progress(result, turn, case)
            for name, connection in players.items():
                connection.send("run")
                run = _answer(connection)
                if turn >= 0:
                    result.runs[name].append(run)
    return result


@contextmanager
def _process(player: str, case: Case) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, player, case), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(timeout=30)


def _answer(connection: Connection) -> Any:
    answer = connection.recv()
    if isinstance(answer, str):
        raise SystemExit(f"\n{answer}")
    return answer


def serve(connection: Connection, player: str, case: Case) -> None:
    """A player's process: one run for each message, until the other end closes."""
    # Each process is told once by torch that nested tensors are a prototype.
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
    batch = make_batch(case.source, case.lengths())
    rows, width = batch.shape
    play = _play(player, batch)
    connection.send(
        Result(case.source, rows, width, batch.tokens, batch.valid_bytes, batch.padded_bytes)
    )
    # What lives now lives on; walking all of it before each run would empty the caches.
    gc.collect()
    gc.freeze()
    try:
        while connection.recv():
            connection.send(play())
    except EOFError:
        return


def _play(player: str, batch: Batch) -> Callable[[], Run | str]:
    if player == "floor":
        return Floor(batch).run
    codec = our_codec() if player == "ours" else peer_codec()
    rows, width = batch.shape

    def play() -> Run | str:
        gc.collect()
        gc.disable()
        run, rectangles = run_trip(codec, batch)
        gc.enable()
        wrong = difference(batch, rectangles)
        if wrong:
            return f"VERIFICATION FAILED: {player}, {rows} x {width} {batch.source}: {wrong}"
        return run

    return play


def progress(result: Result, turn: int, case: Case) -> None:
    """One line on stderr, rewritten in place on a terminal."""
    name = f"{result.rows} x {result.width} {result.source}"
    if not sys.stderr.isatty():
        if turn == -case.warmups:
            print(f"measuring {name}: {case.repeats} turns", file=sys.stderr, flush=True)
        return
    what = "warming up" if turn < 0 else f"turn {turn + 1} of {case.repeats}"
    end = "\n" if turn == case.repeats - 1 else ""
    print(f"\r\x1b[Kmeasuring {name}: {what}", end=end, file=sys.stderr, flush=True)


# --- reporting ---------------------------------------------------------------------------------


def machine() -> dict[str, str | int | float]:
    """What the numbers depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores or 0,
        "torch_threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Aligned text: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, rule, *rows)
    ]
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """One row per batch."""
    header = ["shape", "lengths", "fill", "floor ms", "ours ms", "peer ms", "peer/ours"]
    header += ["ours/floor", "frames ours", "peer", "valid MB", "ours MB", "peer MB", "padded MB"]
    rows = []
    for result in results:
        ours, peer = result.runs["ours"][0], result.runs["peer"][0]
        row = [f"{result.rows} x {result.width}", result.source]
        row += [f"{100 * result.tokens / (result.rows * result.width):.1f}%"]
        row += [f"{result.ms(player):.3f}" for player in ("floor", "ours", "peer")]
        row += [f"{result.ratio('peer', 'ours'):.1f}", f"{result.ratio('ours', 'floor'):.1f}"]
        row += [f"{ours.frames}", f"{peer.frames}"]
        sizes = (result.valid_bytes, ours.wire_bytes, peer.wire_bytes, result.padded_bytes)
        rows.append([*row, *(f"{size / 1e6:.3f}" for size in sizes)])
    return table(header, rows, left=2)


def by_stage(results: Sequence[Result]) -> str:
    """One row per batch and side: the median of each stage, and the spread of the whole."""
    rows = []
    for result in results:
        for player in ("ours", "peer"):
            totals = [run.total for run in result.runs[player]]
            faults = statistics.median(run.page_faults for run in result.runs[player])
            row = [f"{result.rows} x {result.width}", result.source, player]
            row += [f"{result.ms(player, stage):.3f}" for stage in STAGES]
            row += [f"{result.ms(player):.3f}", f"{min(totals):.3f}", f"{max(totals):.3f}"]
            rows.append([*row, f"{faults:.0f}"])
    header = ["shape", "lengths", "side", *(f"{stage} ms" for stage in STAGES)]
    return table([*header, "trip ms", "min", "max", "page faults"], rows, left=3)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The whole trip of a rollout batch: jagcodec beside a per-row codec over "
        "TransferQueue's encoder."
    )
    parser.add_argument("--quick", action="store_true", help="small batches, few runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every run to PATH")
    return parser.parse_args(argv)


def check_peer() -> None:
    """Exit with the way out where TransferQueue is missing."""
    if importlib.util.find_spec("transfer_queue") is None:
        raise SystemExit(
            "This benchmark compares with TransferQueue, which is not installed. "
            "Install it, from the root of the repository:\n"
            "    pip install -c constraints.txt -e '.[bench]'"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    check_peer()
    about = machine()
    results = [measure(case) for case in (QUICK if args.quick else FULL)]
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"\nThe whole trip, medians\n\n{summary(results)}")
    print(f"\nBy stage, medians\n\n{by_stage(results)}")
    print("\nverified: every rectangle of every run equals the input, bit for bit")
    if args.json:
        report = {"machine": about, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
