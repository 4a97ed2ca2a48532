"""What a rollout batch takes through a Mooncake store: by this wire, and by Mooncake's own means.

    python -m benchmarks.mooncake_store [--rounds 31] [--shape 512x1536] [--remote]

A trip takes six per-token columns to six padded rectangles, from one of two states of them:

    padded      rectangles and lengths, as `encode_fields` takes them
    rows        a list of rows per column: tensors, or numpy arrays for `theirs`, which takes half
                the time with them

and the sides are

    jagcodec    padded: `Store.put_fields`; rows: `stack_or_nest` and `Store.put`; then for both
                `materialize(open_wire(store.read(key)))`
    reused      the same with the rectangles of the trip before as `materialize(out=...)`
    theirs      `mooncake.structured_object_store`, given what the state is: rectangles come back
                as such, rows are written into rectangles one by one
    theirs, jagged
                the same store given jagged tensors, which take the fewest calls there: packed by
                `pack_jagged_fields` (padded) or `as_nested_tensor` (rows), padded by
                `to_padded_tensor`
    raw         the bytes of the rectangles, of registered memory to registered memory: no codec

Beside them, as ``parts``, what `Store.open` takes for one column of the batch, and for rows of it;
their ratio is that of the gets.

Every side is a process of its own, with a client of its own, for in one process each would live in
the heap that another leaves behind. TCP; values lie in the segment of the side's own process, which
Mooncake copies without a socket, or with ``--remote`` in that of another process on this machine.

Every round runs every side once, one at a time, in an order drawn anew; a key is new for every trip
and removed after it. Put, get, all conversions, and a read of each page of the rectangles are
inside the clock. Every rectangle of every trip is compared with the input outside it. The first
rounds are not counted. Medians are printed, and the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from mooncake.store import ReplicateConfig
from mooncake.structured_object_store import MooncakeBundleTransfer
from tensordict import TensorDict

from benchmarks.machine import machine, versions
from benchmarks.mooncake_cluster import Master, master, node
from benchmarks.shapes import PADS, Batch, Case, make_batch
from jagcodec import materialize, open_wire, pack_jagged_fields, stack_or_nest
from jagcodec.integrations.mooncake import Store

WARM_UP = 4
SEGMENT, BUFFER = 1 << 29, 1 << 28

Rows: TypeAlias = dict[str, list[torch.Tensor]]


class Side(NamedTuple):
    """One way: a put that returns what its get needs, a get of rectangles, and a removal.

    `expected` are the rectangles, if not those of the batch.
    """

    put: Callable[[], Any]
    get: Callable[[Any], Any]
    remove: Callable[[Any], Any]
    expected: dict[str, torch.Tensor] | None = None


def ours(client: Any, config: Any, batch: Batch, rows: Rows, *, reuse: bool) -> dict[str, Side]:
    """`Store` from both states."""
    store = Store(client)
    keys = _keys()
    kept: dict[str, Any] = {}

    def put_padded() -> str:
        key = next(keys)
        store.put_fields(
            key, batch.columns, lengths=batch.lengths, token_aligned_fields=PADS, config=config
        )
        return key

    def put_rows() -> str:
        key = next(keys)
        columns = {name: stack_or_nest(column, always_nest=True) for name, column in rows.items()}
        store.put(key, TensorDict(columns, batch_size=[len(batch.lengths)]), config=config)
        return key

    def get(key: str) -> Any:
        columns = materialize(open_wire(store.read(key)), pad_value_dict=PADS, **kept)
        if reuse:
            kept["out"] = columns
        return columns

    def remove(key: str) -> None:
        store.remove(key, force=True)

    return {"padded": Side(put_padded, get, remove), "rows": Side(put_rows, get, remove)}


def parts(client: Any, config: Any, batch: Batch, rows: Rows, *, index: Any) -> dict[str, Side]:
    """One column of some rows through `Store.open`."""
    side = ours(client, config, batch, rows, reuse=False)["padded"]
    store = Store(client)
    name = "advantages"
    width = int(batch.lengths[index].max())

    def get(key: str) -> Any:
        return materialize(store.open(key).select([name]).rows(index))

    return {"parts": side._replace(get=get, expected={name: batch.columns[name][index, :width]})}


def theirs(client: Any, config: Any, batch: Batch, rows: Rows) -> dict[str, Side]:
    """Their store, given what there is."""
    transfer = MooncakeBundleTransfer(client)
    arrays = {name: [row.numpy() for row in column] for name, column in rows.items()}

    def get(reference: Any) -> Any:
        return transfer.get(reference, type="dict")

    def get_rows(reference: Any) -> Any:
        found = get(reference)
        width = max(map(len, found["input_ids"]))
        rectangles = {}
        for name, pad in PADS.items():
            column = found[name]
            rectangle = np.full((len(column), width), pad, dtype=column[0].dtype)
            for cells, row in zip(rectangle, column, strict=True):
                cells[: len(row)] = row
            rectangles[name] = torch.from_numpy(rectangle)
        return rectangles

    def put(columns: Any) -> Any:
        return transfer.put(columns, type="dict", config=config)

    return {
        "padded": Side(lambda: put(batch.columns), get, transfer.cleanup_dataproto),
        "rows": Side(lambda: put(arrays), get_rows, transfer.cleanup_dataproto),
    }


def theirs_jagged(client: Any, config: Any, batch: Batch, rows: Rows) -> dict[str, Side]:
    """Their store, given jagged tensors."""
    transfer = MooncakeBundleTransfer(client)

    def put_padded() -> Any:
        packed = pack_jagged_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=list(PADS)
        )
        return transfer.put_object(dict(packed.items()), config=config)

    def put_rows() -> Any:
        nested = {
            name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
            for name, column in rows.items()
        }
        return transfer.put_object(nested, config=config)

    def get(reference: Any) -> Any:
        found = transfer.get_object(reference)
        return {name: torch.nested.to_padded_tensor(found[name], pad) for name, pad in PADS.items()}

    return {
        "padded": Side(put_padded, get, transfer.remove_bundle),
        "rows": Side(put_rows, get, transfer.remove_bundle),
    }


def raw(client: Any, config: Any, batch: Batch, rows: Rows) -> dict[str, Side]:
    """The rectangles as bytes, from memory that is registered to memory that is."""
    keys = _keys()
    columns = {name: column.numpy() for name, column in batch.columns.items()}
    size = sum(column.nbytes for column in columns.values())
    source = np.concatenate([column.reshape(-1).view(np.uint8) for column in columns.values()])
    target = np.empty(size, dtype=np.uint8)
    for memory in (source, target):
        if client.register_buffer(memory.ctypes.data, size):
            raise SystemExit("a buffer could not be registered")
    bounds = np.cumsum([0, *(column.nbytes for column in columns.values())])

    def put() -> str:
        key = next(keys)
        if client.put_from(key, source.ctypes.data, size, config):
            raise SystemExit("a raw put failed")
        return key

    def get(key: str) -> Any:
        if client.get_into(key, target.ctypes.data, size) != size:
            raise SystemExit("a raw get failed")
        return {
            name: torch.from_numpy(target[a:b].view(column.dtype).reshape(column.shape))
            for (name, column), a, b in zip(columns.items(), bounds, bounds[1:], strict=False)
        }

    return {"padded": Side(put, get, lambda key: client.remove(key, True))}


SIDES: dict[str, Callable[..., dict[str, Side]]] = {
    "jagcodec": partial(ours, reuse=False),
    "jagcodec, reused": partial(ours, reuse=True),
    "theirs": theirs,
    "theirs, jagged": theirs_jagged,
    "raw padded bytes": raw,
    "a column": partial(parts, index=slice(None)),
    "64 rows of it": partial(parts, index=slice(64, 128)),
    "1 row of it": partial(parts, index=slice(64, 65)),
    "20 scattered rows": partial(parts, index=list(range(3, 512, 26))),
}
STATES = {
    "padded": ["jagcodec", "jagcodec, reused", "theirs", "theirs, jagged", "raw padded bytes"],
    "rows": ["jagcodec", "jagcodec, reused", "theirs", "theirs, jagged"],
    "parts": ["a column", "64 rows of it", "1 row of it", "20 scattered rows"],
}
RUNS = [(state, name) for state, names in STATES.items() for name in names]


def _keys() -> Iterator[str]:
    return (f"{os.getpid()}_{i}" for i in itertools.count())


def touched(columns: Any) -> int:
    """Read a byte of each page, so that pages which the kernel has only promised are paid for."""
    return sum(int(column.view(-1).view(torch.uint8)[::4096].sum()) for column in columns.values())


def trip(side: Side, batch: Batch) -> tuple[float, float]:
    """Milliseconds of a put and of a get."""
    gc.collect()
    start = time.perf_counter()
    reference = side.put()
    middle = time.perf_counter()
    columns = side.get(reference)
    touched(columns)
    end = time.perf_counter()
    for name, column in (side.expected or batch.columns).items():
        if not torch.equal(columns[name], column):
            raise SystemExit(f"{name}: what was read differs from what was put")
    side.remove(reference)
    return (middle - start) * 1e3, (end - middle) * 1e3


def serve(pipe: Any, run: tuple[str, str], case: Case, running: Master, remote: bool) -> None:
    """A side in a process of its own: a trip for every message."""
    state, name = run
    batch = make_batch(case.lengths())
    rows = {
        column: [cells[i, :n].clone() for i, n in enumerate(batch.lengths.tolist())]
        for column, cells in batch.columns.items()
    }
    client = running.client(segment=0 if remote else SEGMENT, buffer=BUFFER)
    config = ReplicateConfig()
    if not remote:
        config.preferred_segment = client.get_hostname()
    side = SIDES[name](client, config, batch, rows)[state]
    pipe.send("up")
    while pipe.recv():
        pipe.send(trip(side, batch))
    os._exit(0)  # the master is about to go, and its clients would wait for it


def measure(case: Case, rounds: int, remote: bool) -> dict[tuple[str, str], list[Any]]:
    """The times of all trips that count, by state and side."""
    context = get_context("spawn")
    times: dict[tuple[str, str], list[Any]] = {run: [] for run in RUNS}
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(master())
        if remote:
            stack.enter_context(node(running, SEGMENT))
        pipes = {}
        for run in RUNS:
            pipes[run], end = context.Pipe()
            arguments = (end, run, case, running._replace(process=None), remote)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            end.close()
            stack.callback(process.kill)
            pipes[run].recv()
        order = list(RUNS)
        for number in range(WARM_UP + rounds):
            random.shuffle(order)
            for run in order:
                pipes[run].send(True)
                taken = pipes[run].recv()
                if number >= WARM_UP:
                    times[run].append(taken)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--shape", type=Case.parse, default=Case.parse("512x1536"))
    parser.add_argument("--remote", action="store_true", help="values lie in another process")
    arguments = parser.parse_args()
    times = measure(arguments.shape, arguments.rounds, arguments.remote)

    batch = make_batch(arguments.shape.lengths())
    where = "another process" if arguments.remote else "the same process"
    print(f"{arguments.shape}, {arguments.rounds} rounds, values in a segment of {where}")
    print(f"{batch.padded_bytes / 1e6:.1f} MB padded, {batch.valid_bytes / 1e6:.1f} MB of tokens")
    print({**machine(), **versions(), **wheel()})
    for state, names in STATES.items():
        print(f"{state}:")
        # Of parts, only the get is one.
        first = 1 if state == "parts" else 0
        base = [sum(t[first:]) for t in times["rows" if state == "rows" else "padded", "jagcodec"]]
        for name in names:
            put, get = (statistics.median(part) for part in zip(*times[state, name], strict=True))
            own = [sum(t[first:]) for t in times[state, name]]
            factors = [a / b for a, b in zip(own, base, strict=True)]
            print(
                f"  {name:18} put {put:6.1f} ms  get {get:6.1f} ms  both "
                f"{statistics.median(map(sum, times[state, name])):6.1f} ms  "
                f"{statistics.median(factors):5.2f}x jagcodec"
            )


def wheel() -> dict[str, str]:
    """The wheel that Mooncake came in."""
    names = importlib.metadata.packages_distributions()["mooncake"]
    return {name: importlib.metadata.version(name) for name in names}


if __name__ == "__main__":
    main()
