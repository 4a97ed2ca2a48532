"""What type checkers say of calls: mypy reads this file, and nobody runs it.

`assert_type` says what a call returns. A line with `type: ignore` has to be refused for the reason
that it names: mypy reports those that are not needed.
"""

import mmap
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from tensordict import TensorDict

import jagcodec
from jagcodec.wire.frames import Frame
from jagcodec.wire.read.wire_batch import WireBatch

columns = {"ids": torch.arange(12).view(3, 4)}


def messages_are_buffers(frames: list[Frame], mapped: mmap.mmap) -> None:
    jagcodec.decode((b"", memoryview(b""), np.zeros(3, dtype=np.uint8)))
    jagcodec.decode(mapped)
    jagcodec.decode(torch.zeros(3, dtype=torch.uint8))
    assert_type(jagcodec.encode(columns), list[Frame])
    assert_type(jagcodec.to_blob(frames), bytearray)

    jagcodec.decode("batch.jag")  # type: ignore[arg-type]
    jagcodec.decode(None)  # type: ignore[arg-type]
    jagcodec.decode(["ids"])  # type: ignore[list-item]
    jagcodec.MsgpackDecoder().decode(3)  # type: ignore[arg-type]
    jagcodec.to_blob({"ids": 1})  # type: ignore[arg-type]


def memory_is_writable() -> None:
    assert_type(jagcodec.encode(columns, out=bytearray(100)), int)
    jagcodec.encode(columns, out=np.zeros(100, dtype=np.uint8))
    jagcodec.encode(columns, out=torch.zeros(100, dtype=torch.uint8))
    jagcodec.encode(columns, out=mmap.mmap(-1, 100))

    jagcodec.encode(columns, out=b"read-only")  # type: ignore[call-overload]
    jagcodec.encode(columns, out=bytes)  # type: ignore[arg-type]
    jagcodec.encode_fields(columns, lengths=[3, 4, 3], out=b"")  # type: ignore[call-overload]


def a_source_is_a_message_a_file_or_a_callable(frames: list[Frame], blob: bytearray) -> None:
    assert_type(jagcodec.open_wire(frames), WireBatch)
    jagcodec.open_wire("batch.jag")
    jagcodec.open_wire(Path("batch.jag"))
    jagcodec.open_wire(lambda offset, size: blob[offset : offset + size])
    jagcodec.open_wire(jagcodec.open_wire(frames))
    jagcodec.open_wire({"ids": columns})
    jagcodec.load(Path("batch.jag"), mmap=True)

    jagcodec.open_wire(3)  # type: ignore[arg-type]
    jagcodec.open_wire(lambda offset: blob[offset:])  # type: ignore[arg-type]
    jagcodec.load(b"")  # type: ignore[arg-type]
    jagcodec.dump("batch.jag", columns)  # type: ignore[arg-type]


def options_are_spelled_out(blob: bytearray) -> None:
    jagcodec.encode(columns, narrow=True, elide=True, compress="zstd")
    jagcodec.encode(columns, compress=("zstd", 3))
    jagcodec.encode(columns, out=blob, narrow=["ids"], meta={"step": 3})
    jagcodec.decode(blob, copy=True, device="cpu", limits=jagcodec.Limits())

    jagcodec.encode(columns, narow=True)  # type: ignore[call-overload]
    jagcodec.encode(columns, compress="gzip")  # type: ignore[call-overload]
    jagcodec.encode(columns, out=blob, narow=True)  # type: ignore[call-overload]
    jagcodec.encode(columns, out=blob, checksum="yes")  # type: ignore[call-overload]
    jagcodec.dump(columns, "batch.jag", compression="zstd")  # type: ignore[call-arg]
    jagcodec.MsgpackEncoder(compress="gzip")  # type: ignore[arg-type]
    jagcodec.decode(blob, cpy=True)  # type: ignore[call-arg]
    jagcodec.decode(blob, limits=1 << 30)  # type: ignore[arg-type]


def results_depend_on_what_is_asked_for(td: TensorDict, frames: list[Frame]) -> None:
    lengths = [3, 4, 3]
    assert_type(jagcodec.encode_fields(columns, lengths=lengths), list[Frame])
    assert_type(jagcodec.encode_fields(columns, lengths=lengths, out=bytearray(500)), int)
    assert_type(jagcodec.encode_rows([{"ids": [1]}]), list[Frame])
    assert_type(jagcodec.materialize(td), jagcodec.BatchedDataDict)
    assert_type(jagcodec.materialize(frames), jagcodec.BatchedDataDict)
    jagcodec.materialize([jagcodec.open_wire(frames), jagcodec.open_wire(frames)])
    assert_type(jagcodec.materialize(td, container=tuple[str, ...]), tuple[str, ...])
    assert_type(jagcodec.to_rows(columns, ["ids"], as_="list"), list[dict[str, Any]])
    assert_type(jagcodec.select_rows(jagcodec.open_wire(frames), [0]), WireBatch)
    assert_type(jagcodec.select_rows(frames, [0]), WireBatch)
    assert_type(jagcodec.select_rows(td, [0]), TensorDict)
    assert_type(jagcodec.concat_rows([td, td]), TensorDict)
    assert_type(jagcodec.concat_rows([frames, frames]), WireBatch)
    assert_type(jagcodec.split_rows(frames, 2), list[WireBatch])

    jagcodec.materialize(td, layout="nested")  # type: ignore[arg-type]
    jagcodec.materialize(td, padding_side="middle")  # type: ignore[arg-type]
    jagcodec.materialize(td, out=b"read-only")  # type: ignore[arg-type]
    jagcodec.to_rows(columns, as_="arrays")  # type: ignore[arg-type]
    jagcodec.to_rows(columns, 3)  # type: ignore[arg-type]
