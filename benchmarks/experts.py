"""Routed experts, as rows that engines return: bytes and times of each way to send them.

    python -m benchmarks.experts [--rows 64] [--tokens 4096] [--rounds 5]

Each row is an array (tokens, 48 layers, top 8) of ids of 256 experts: as uint8, which
`smallest_ids` makes, or as int32, which SGLang sends.

    ways      rows to bytes, and bytes to one tensor (rows, tokens, layers, 8) of the same dtype
    columns   one column of all layers, one for each of 8 stages, or one for each layer: written;
              read whole; and the six layers of one stage read from a store that counts bytes

The bytes are those that a transport copies. Every tensor is compared with the rows, outside the
clock. All rows are equally long: nothing is saved on padding.
"""

from __future__ import annotations

import base64
import json
import pickle
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import report
from benchmarks.machine import quieted
from benchmarks.measure import check, copied, ratio, spread, times
from jagcodec import encode_rows, materialize, open_wire, to_blob
from jagcodec.integrations.json_arrays import smallest_ids

try:
    import orjson
except ImportError:
    JSON: tuple[str, Callable[[Any], bytes], Callable[[Any], Any]]
    JSON = "json", lambda value: json.dumps(value).encode(), json.loads
else:
    JSON = "orjson", orjson.dumps, orjson.loads

LAYERS, TOP_K, EXPERTS, STAGES = 48, 8, 256, 8
NAME = "routed_experts"
FIRST_OF_STAGE = 12  # the layers from here on are those of the stage that is read

Rows = Sequence[npt.NDArray[Any]]


class Way(NamedTuple):
    """How rows become bytes, and these a tensor."""

    write: Callable[[], Any]
    read: Callable[[Any], torch.Tensor]
    expected: torch.Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("experts", __doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="of each part")
    given = parser.parse_args(arguments)
    quieted()
    numbers = np.random.default_rng(0)
    shape = (given.tokens, LAYERS, TOP_K)
    rows = [numbers.integers(0, EXPERTS, shape, dtype=np.uint8) for _ in range(given.rows)]

    def found() -> dict[str, Any]:
        shown = {"rows": given.rows, "tokens": given.tokens, "layers": LAYERS, "top_k": TOP_K}
        ways = measure_ways(rows, given.rounds)
        return {"shape": shown, "ways": ways, "columns": measure_columns(rows, given.rounds)}

    return report.run("experts", found, given)


# --- ways --------------------------------------------------------------------------------------


def measure_ways(rows: Rows, rounds: int) -> dict[str, Any]:
    """Bytes of each way, medians, and the ratios of writing and reading to those of the first."""
    ways = ways_of(rows, [row.astype(np.int32) for row in rows])
    calls: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, int] = {}
    for name, way in ways.items():
        sent = copied(way.write())
        sizes[name] = sum(map(len, sent))
        check(torch.equal(way.read(sent), way.expected), name)
        calls |= {f"write {name}": way.write, f"read {name}": partial(way.read, sent)}
    ms = times(calls, 0, rounds)
    trips = {
        name: [a + b for a, b in zip(ms[f"write {name}"], ms[f"read {name}"], strict=True)]
        for name in ways
    }
    first = trips[next(iter(ways))]
    return {
        name: {
            "bytes": sizes[name],
            "write": statistics.median(ms[f"write {name}"]),
            "read": statistics.median(ms[f"read {name}"]),
            "ratio": spread(ratio(trips[name], first)),
        }
        for name in ways
    }


def ways_of(small: Rows, wide: Rows) -> dict[str, Way]:
    """Each way by its name."""
    bytes_of_small, bytes_of_wide = (torch.from_numpy(np.stack(rows)) for rows in (small, wide))
    packer = JSON[0]

    def narrowed() -> Any:
        return encoded([smallest_ids(row, experts=EXPERTS) for row in wide])

    return {
        "`encode_rows`, uint8": Way(partial(encoded, small), padded, bytes_of_small),
        "`smallest_ids` of int32, `encode_rows`": Way(narrowed, padded, bytes_of_small),
        "`encode_rows`, int32, `narrow`": Way(
            partial(encoded, wide, narrow=True), padded, bytes_of_wide
        ),
        "pickle, uint8": Way(partial(pickled, small), unpickled, bytes_of_small),
        "pickle, int32": Way(partial(pickled, wide), unpickled, bytes_of_wide),
        "pickle out of band, uint8": Way(partial(out_of_band, small), unpickled, bytes_of_small),
        f"base64 in JSON ({packer}), uint8": Way(partial(as_json, small), of_json, bytes_of_small),
        f"base64 in JSON ({packer}), int32": Way(partial(as_json, wide), of_json, bytes_of_wide),
    }


def encoded(rows: Rows, **options: Any) -> Any:
    return encode_rows({NAME: rows}, **options)


def padded(sent: Any) -> torch.Tensor:
    made: torch.Tensor = materialize(sent)[NAME]
    return made


def pickled(rows: Rows) -> list[bytes]:
    return [pickle.dumps(rows, protocol=5)]


def out_of_band(rows: Rows) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    return [pickle.dumps(rows, protocol=5, buffer_callback=buffers.append), *buffers]


def unpickled(sent: Any) -> torch.Tensor:
    return stacked(pickle.loads(sent[0], buffers=sent[1:]))


def as_json(rows: Rows) -> list[bytes]:
    """An envelope for each row, as servers send them."""
    envelopes = [
        {
            "data": base64.b64encode(row.data).decode(),
            "shape": row.shape,
            "dtype": row.dtype.name,
        }
        for row in rows
    ]
    return [JSON[1](envelopes)]


def of_json(sent: Any) -> torch.Tensor:
    return stacked(
        [
            np.frombuffer(base64.b64decode(each["data"]), each["dtype"]).reshape(each["shape"])
            for each in JSON[2](sent[0])
        ]
    )


def stacked(rows: Rows) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


# --- columns -----------------------------------------------------------------------------------


def measure_columns(rows: Rows, rounds: int) -> dict[str, Any]:
    """One column, and several: times, and what a reader of one stage fetches from a store."""
    whole = stacked(rows)
    size = LAYERS // STAGES
    stage = slice(FIRST_OF_STAGE, FIRST_OF_STAGE + size)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {}
    for name, layers in (
        ("one column", LAYERS),
        (f"a column for each of {STAGES} stages", size),
        ("a column for each layer", 1),
    ):
        columns = {
            f"{NAME}.{first}": slice(first, first + layers) for first in range(0, LAYERS, layers)
        }
        write = partial(written, rows, columns)
        frames = copied(write())
        blob = bytes(to_blob(frames))
        all_layers = partial(read_layers, frames, columns, slice(0, LAYERS))
        fetched: list[int] = []
        one_stage = partial(read_stage, blob, columns, stage, fetched)
        check(torch.equal(all_layers(), whole), f"{name}, all layers")
        check(torch.equal(one_stage(), whole[:, :, stage]), f"{name}, one stage")
        found[name] = {"bytes": sum(map(len, frames)), "fetched": sum(fetched)}
        calls |= {f"write {name}": write, f"all {name}": all_layers, f"stage {name}": one_stage}
    ms = times(calls, 0, rounds)
    return {
        name: {
            **sizes,
            **{step: statistics.median(ms[f"{step} {name}"]) for step in ("write", "all", "stage")},
        }
        for name, sizes in found.items()
    }


def written(rows: Rows, columns: Mapping[str, slice]) -> Any:
    return encode_rows({name: [row[:, of] for row in rows] for name, of in columns.items()})


def read_layers(source: Any, columns: Mapping[str, slice], wanted: slice) -> torch.Tensor:
    """These layers of every row; only columns that have some of them are read."""
    chosen = {
        name: of
        for name, of in columns.items()
        if of.start < wanted.stop and wanted.start < of.stop
    }
    batch = materialize(open_wire(source).select(list(chosen)))
    parts = [
        batch[name][:, :, max(wanted.start - of.start, 0) : wanted.stop - of.start]
        for name, of in chosen.items()
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def read_stage(
    blob: bytes, columns: Mapping[str, slice], wanted: slice, fetched: list[int]
) -> torch.Tensor:
    """The layers of a stage from a store; `fetched` gets the bytes of each range."""
    fetched.clear()

    def fetch(offset: int, size: int) -> bytes:
        fetched.append(size)
        return blob[offset : offset + size]

    return read_layers(fetch, columns, wanted)


if __name__ == "__main__":
    sys.exit(main())
