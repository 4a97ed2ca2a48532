"""Batches on a GPU: to messages and back, and padded or packed there: ``make gpu``.

    send       padded columns on the device -> bytes of the host, in page-locked memory
    receive    bytes of the host -> padded columns on the device; they arrive in pageable memory, or
               in page-locked memory where a way says so
    pad        jagged columns on the device -> padded columns there
    pack       jagged columns on the device -> one buffer each there, rows at multiples of 8 cells;
               a trainer's own loop copies row by row

The ways of a part take turns in one process. A call ends when the device is done. The last way,
`floor`, is one copy by the device: of the valid bytes from or to page-locked memory, or on the
device of as many bytes as padding or packing reads and writes. Every result is compared with the
batch, outside the clock. Waits for the device are counted in one call, as far as torch reports them
(`torch.cuda.set_sync_debug_mode`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import jagcodec
from benchmarks import report
from benchmarks.machine import quieted
from benchmarks.measure import Columns, check, copied, same_columns, summary, times
from benchmarks.shapes import DESIGN, LARGE, PADS, Batch, lengths_of, make_batch

CPU = torch.device("cpu")


class Way(NamedTuple):
    """One way to do a part; `same` tells whether a result is right, or ends the run."""

    call: Callable[[], Any]
    same: Callable[[Any], bool | None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("gpu", __doc__)
    parser.add_argument("--device", type=torch.device, default="cuda", help="as torch names it")
    parser.add_argument("--shapes", nargs="+", default=[DESIGN, LARGE], help="as for bench")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each part, about")
    given = parser.parse_args(arguments)
    quieted()
    if given.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a GPU that torch can use, found none; run `make gpu` on one")

    def measured() -> dict[str, Any]:
        shapes = {shape: measure(shape, given.device, given.seconds) for shape in given.shapes}
        return {"device": name_of(given.device), "shapes": shapes}

    return report.run("gpu", measured, given)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def measure(shape: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Each part over one batch: times, ratios to the floor, and how often each way waits."""
    batch = make_batch(lengths_of(shape))
    rows, width = batch.shape
    found: dict[str, Any] = {"rows": rows, "width": width, "parts": {}}
    for name, part in PARTS.items():
        ways = part(batch, device)
        for way, (call, same) in ways.items():
            check(same(_finished(call, device)) is not False, f"{shape}, {name}: {way}")
        waits = {way: waits_of(call, device) for way, (call, _) in ways.items()}
        calls = {way: partial(_finished, call, device) for way, (call, _) in ways.items()}
        *others, floor = ways
        ratios = [(way, floor) for way in others]
        found["parts"][name] = {**summary(times(calls, seconds), ratios), "waits": waits}
    return found


def _finished(call: Callable[[], Any], device: torch.device) -> Any:
    """What a call made, once the device is done."""
    made = call()
    torch.get_device_module(device).synchronize(device)
    return made


def waits_of(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often a call waits for the device; None where torch does not tell."""
    if device.type != "cuda":
        return None
    with cuda_waits() as waits:
        call()
    return len(waits)


@contextmanager
def cuda_waits() -> Iterator[list[str]]:
    """A list that gets, at the end, a message for each wait for the CUDA device inside."""
    waits: list[str] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    waits += [message for message in messages if "synchronizing CUDA operation" in message]


# --- parts -------------------------------------------------------------------------------------


def send(batch: Batch, device: torch.device) -> dict[str, Way]:
    columns, options = moved(batch.columns, device), _packing(batch)
    message = partial(_same_message, batch)
    return {
        "`encode_fields`": Way(lambda: jagcodec.encode_fields(columns, **options), message),
        "`pack_jagged_fields`, `encode`": Way(
            lambda: jagcodec.encode(jagcodec.pack_jagged_fields(columns, **options)), message
        ),
        "`.cpu()` of each padded column": Way(lambda: moved(columns, CPU), _padded(batch)),
        "floor": _copy(
            _noise(batch.valid_bytes).to(device), _host_bytes(batch.valid_bytes, device)
        ),
    }


def receive(batch: Batch, device: torch.device) -> dict[str, Way]:
    frames = copied(jagcodec.encode_fields(batch.columns, **_packing(batch)))
    materialize = partial(jagcodec.materialize, pad_value_dict=PADS)
    made: dict[str, Callable[[], Any]] = {
        "`materialize(device=)`": lambda: materialize(frames, device=device),
        "`decode(device=)`, `materialize`": lambda: materialize(
            jagcodec.decode(frames, device=device)
        ),
        "`materialize`, then `.to(device)`": lambda: moved(materialize(frames), device),
        "padded columns, `.to(device)`": lambda: moved(batch.columns, device),
    }
    if device.type == "cuda":
        pinned = [_page_locked(frame) for frame in frames]
        made["page-locked frames, `materialize(device=)`"] = lambda: materialize(
            pinned, device=device
        )
        made["`materialize(pin_memory=True)`, then `.to(device)`"] = lambda: moved(
            materialize(frames, pin_memory=True), device
        )
    host = _host_bytes(batch.valid_bytes, device).copy_(_noise(batch.valid_bytes))
    floor = _copy(host, torch.empty_like(host, device=device))
    return {**{name: Way(call, _padded(batch)) for name, call in made.items()}, "floor": floor}


def pad(batch: Batch, device: torch.device) -> dict[str, Way]:
    td = jagcodec.pack_jagged_fields(moved(batch.columns, device), **_packing(batch))
    half = (batch.valid_bytes + batch.padded_bytes) // 2
    there = _noise(half).to(device)

    def by_torch() -> dict[str, torch.Tensor]:
        return {
            name: torch.nested.to_padded_tensor(td[name], pad, batch.shape)
            for name, pad in PADS.items()
        }

    return {
        "`materialize`": Way(lambda: jagcodec.materialize(td, pad_value_dict=PADS), _padded(batch)),
        "`to_padded_tensor` of each column": Way(by_torch, _padded(batch)),
        "floor": _copy(there, torch.empty_like(there)),
    }


def pack(batch: Batch, device: torch.device) -> dict[str, Way]:
    td = jagcodec.pack_jagged_fields(moved(batch.columns, device), **_packing(batch))
    here = jagcodec.pack_jagged_fields(batch.columns, **_packing(batch))
    lengths = batch.lengths.tolist()

    def planned(td: Any = td) -> Columns:
        plan = jagcodec.plan_packing(lengths, row_multiple=_ROW_MULTIPLE)
        found: Columns = plan.pack(td, pad_value_dict=PADS)
        return found

    def row_by_row() -> Columns:
        made: dict[str, torch.Tensor] = {}
        padded = [-(-length // _ROW_MULTIPLE) * _ROW_MULTIPLE for length in lengths]
        for name, column in td.items():
            values: Any = column.values()
            buffer = torch.full((sum(padded),), PADS[name], dtype=values.dtype, device=device)
            at = start = 0
            for length, cells in zip(lengths, padded, strict=True):
                buffer[start : start + length] = values[at : at + length]
                at, start = at + length, start + cells
            made[name] = buffer
        return made

    expected = planned(here)
    there = _noise(sum(column.nbytes for column in expected.values())).to(device)

    def same(found: Columns) -> None:
        same_columns(moved(found, CPU), expected, "packed columns")

    return {
        "`plan_packing`, `plan.pack`": Way(planned, same),
        "a copy of each row": Way(row_by_row, same),
        "floor": _copy(there, torch.empty_like(there)),
    }


_ROW_MULTIPLE = 8

PARTS = {part.__name__: part for part in (send, receive, pad, pack)}


# --- inputs and results ------------------------------------------------------------------------


def _packing(batch: Batch) -> dict[str, Any]:
    return {"lengths": batch.lengths, "token_aligned_fields": PADS}


def moved(columns: Columns, device: torch.device) -> dict[str, torch.Tensor]:
    """On the device; page-locked columns are not waited for."""
    return {
        name: column.to(device, non_blocking=column.is_cpu and column.is_pinned())
        for name, column in columns.items()
    }


def _padded(batch: Batch) -> Callable[[Columns], None]:
    """Compares padded columns, wherever they are, with the batch."""
    return lambda found: same_columns(moved(found, CPU), batch.columns, "padded columns")


def _same_message(batch: Batch, frames: Sequence[Any]) -> None:
    _padded(batch)(jagcodec.materialize(copied(frames), pad_value_dict=PADS))


def _noise(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8)


def _host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Memory of the host that is reused, page-locked where the device can."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _page_locked(frame: Any) -> memoryview:
    there: Any = torch.empty(len(frame), dtype=torch.uint8, pin_memory=True).numpy()
    there[:] = memoryview(frame)
    return memoryview(there)


def _copy(source: torch.Tensor, target: torch.Tensor) -> Way:
    """A copy by the device, into memory that is reused."""
    return Way(
        lambda: target.copy_(source, non_blocking=True),
        lambda found: torch.equal(found.cpu(), source.cpu()),
    )


if __name__ == "__main__":
    sys.exit(main())
