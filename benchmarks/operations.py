"""Operations that `before` measures in two versions of the library, by name and number of rows.

``select_rows:8`` is `select_rows` of 8 rows; any number will do. Rows are those of
`rows.make_samples`, and ``real`` ones those of `rows.make_real_samples`. Only public functions are
called, so that earlier versions can run this; `put` alone calls a method of the backend.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import jagcodec
from benchmarks.before_values import outcome
from benchmarks.loop import ROWS_OF_A_MESSAGE, by_jagcodec, encoded
from benchmarks.machine import quieted
from benchmarks.measure import check, collector_off, copied
from benchmarks.rows import make_real_samples, make_samples, make_trajectories

SECONDS, MOST_CALLS = 0.03, 200  # of a turn


class Operation(NamedTuple):
    """A call, and what of its result must be the same in both versions."""

    call: Callable[[], Any]
    seen: Callable[[Any], Any] = lambda result: result


def _message(rows: int) -> list[Any]:
    return copied(jagcodec.encode_rows(make_samples(rows)))


def _every_second(rows: int) -> list[int]:
    """Half of the rows, the last one first."""
    return list(range(rows - 1, -1, -2))


def materialize(rows: int) -> Operation:
    """One message to rectangles."""
    return Operation(partial(jagcodec.materialize, _message(rows)))


def options(rows: int) -> Operation:
    """The same with an option."""
    return Operation(partial(jagcodec.materialize, _message(rows), pad_to_multiple=8))


def dicts(rows: int) -> Operation:
    """The same with a column of dicts in addition."""
    calls = [{"name": "calc", "arguments": {"x": i}} for i in range(rows)]
    samples = [{**x, "call": y} for x, y in zip(make_samples(rows), calls, strict=True)]
    return Operation(partial(jagcodec.materialize, copied(jagcodec.encode_rows(samples))))


def chosen(rows: int) -> Operation:
    """Half of the rows of a message, all columns read."""
    frames, index = _message(rows), _every_second(rows)
    return Operation(lambda: jagcodec.open_wire(frames).rows(index).to_tensordict())


def select_rows(rows: int) -> Operation:
    """Half of the rows of a TensorDict."""
    batch = jagcodec.decode(_message(rows))
    return Operation(partial(jagcodec.select_rows, batch, _every_second(rows)))


def concat_rows(rows: int) -> Operation:
    """Three TensorDicts of so many rows."""
    return Operation(partial(jagcodec.concat_rows, [jagcodec.decode(_message(rows))] * 3))


def restore(rows: int) -> Operation:
    """Results of micro-batches to the order of the rows, 2,000 floats per row."""
    lengths = [len(row["input_ids"]) for row in make_samples(rows)]
    batches = jagcodec.plan_micro_batches(lengths, 2, max_tokens=4096)
    draw = torch.Generator().manual_seed(0)
    results = [torch.randn(len(part), 2000, generator=draw) for steps in batches for part in steps]
    return Operation(partial(batches.restore, results))


def micro_batches(rows: int) -> Operation:
    """A message to packed micro-batches."""
    frames = _message(rows)
    lengths = [len(row["input_ids"]) for row in make_samples(rows)]
    batches = jagcodec.plan_micro_batches(lengths, max_tokens=8192)
    return Operation(
        lambda: batches.pack(jagcodec.open_wire(frames)),
        lambda packed: [columns for _, columns in packed],
    )


def user_step(rows: int) -> Operation:
    """The data path of `benchmarks.loop`, in memory: rows to messages, micro-batches and losses."""
    samples = make_trajectories(rows)
    groups = [samples[i : i + ROWS_OF_A_MESSAGE] for i in range(0, rows, ROWS_OF_A_MESSAGE)]
    return Operation(lambda: by_jagcodec([copied(encoded(group)) for group in groups]))


@cache
def _real_messages(rows: int) -> list[Any]:
    return [copied(jagcodec.encode_rows([sample])) for sample in make_real_samples(rows)]


def join(rows: int) -> Operation:
    """A real message for each row to rectangles, all at once."""
    return Operation(partial(jagcodec.materialize, _real_messages(rows)))


def open_and_join(rows: int) -> Operation:
    """The same, opened one by one."""

    def joined() -> Any:
        opened = list(map(jagcodec.open_wire, _real_messages(rows)))
        return jagcodec.materialize(jagcodec.concat_rows(opened))

    return Operation(joined)


def put(rows: int, units: int = 1) -> Operation:
    """The messages that TransferQueue's client makes for its storage units, without a cluster."""
    from jagcodec.integrations import transfer_queue as backend
    from jagcodec.integrations._transfer_queue_messages import StorageOptions

    client: Any = SimpleNamespace(_options=StorageOptions())
    batch = jagcodec.decode(jagcodec.encode_rows(make_real_samples(rows)))
    groups = [list(range(unit, rows, units)) for unit in range(units)]
    return Operation(
        partial(backend._JagcodecStorageManager._message_for_each, client, batch, groups),
        lambda messages: list(map(jagcodec.decode, messages)),
    )


_ALL = (
    *(materialize, options, dicts, chosen, select_rows, concat_rows, restore, micro_batches),
    *(user_step, join, open_and_join, put),
)
MAKERS: dict[str, Callable[[int], Operation]] = {make.__name__: make for make in _ALL}
MAKERS["put_to_two"] = partial(put, units=2)

# The operations whose time is also compared with that of another one of the same version.
COMPARED = {"options": "materialize", "dicts": "materialize", "put_to_two": "put"}

NAMES = (
    *("materialize:1", "materialize:8", "options:8", "dicts:8", "dicts:64", "chosen:64"),
    *("select_rows:8", "select_rows:64", "concat_rows:64", "restore:64"),
    *("micro_batches:64", "micro_batches:512", "user_step:64", "user_step:512"),
    *("join:512", "open_and_join:512"),
    *(("put:64", "put_to_two:64") if importlib.util.find_spec("transfer_queue") else ()),
)


def compared_with(name: str) -> str | None:
    """The operation that an operation is compared with: ``materialize:8`` for ``dicts:8``."""
    operation, _, rows = name.partition(":")
    other = COMPARED.get(operation)
    return other and f"{other}:{rows}"


def serve(connection: Connection, source: Path) -> None:
    """One turn of each operation that is asked for, until the other end closes."""
    quieted()
    check(Path(jagcodec.__file__).is_relative_to(source), f"imported {jagcodec.__file__}")
    try:
        while True:
            connection.send(_turn(connection.recv()))
    except EOFError:
        return


def _turn(name: str) -> tuple[float, str]:
    """The median milliseconds of some calls, and the digest of the result."""
    operation, digest, calls = _made(name)
    ms = []
    with collector_off():
        for _ in range(calls):
            start = time.perf_counter()
            operation.call()
            ms.append(1e3 * (time.perf_counter() - start))
    return median(ms), digest


@cache
def _made(name: str) -> tuple[Operation, str, int]:
    """An operation, the digest of its result, and how many calls a turn has."""
    maker, _, rows = name.partition(":")
    operation = MAKERS[maker](int(rows))
    digest = outcome(lambda: operation.seen(operation.call()))
    operation.call()
    start = time.perf_counter()
    operation.call()
    calls = int(SECONDS / (time.perf_counter() - start))
    gc.collect()
    gc.freeze()
    return operation, digest, min(max(calls, 1), MOST_CALLS)
