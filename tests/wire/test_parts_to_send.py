"""Rows of one batch in several messages: as if each were encoded by itself, lowered once."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import ArgumentError, UnsupportedTypeError, decode, encode, open_wire
from jagcodec.columns.batch import Columns
from jagcodec.rows import views
from jagcodec.rows.chosen_rows import choose_rows
from jagcodec.rows.non_tensor import stack_of_payloads
from jagcodec.wire.native import written_at_once
from jagcodec.wire.spec import SMALL_BUFFER
from jagcodec.wire.write import lowering_objects
from jagcodec.wire.write.parts import parts_to_send
from tests.helpers import nested, size
from tests.oracle import assert_same
from tests.strategies import indices, tensordicts


def columns_of(td):
    return Columns(len(td), dict(td.items()))


def encode_parts(columns, groups, narrow=False):
    parts = parts_to_send(columns, groups, narrow=narrow, allow_pickle=False)
    return [encode(part, narrow=narrow) for part in parts]


@given(st.data(), tensordicts(lazy=False), st.booleans())
def test_parts_are_the_rows_of_the_message_of_all(data, td, narrow):
    drawn = [data.draw(indices(len(td))) for _ in range(data.draw(st.integers(1, 3)))]
    groups = [choose_rows(index, len(td), "index") for index, _ in drawn]
    whole = open_wire(encode(columns_of(td)))
    for frames, group in zip(encode_parts(columns_of(td), groups, narrow), groups, strict=True):
        assert_same(decode(frames), decode(whole.rows(group).to_frames()))


def every_kind():
    shared = {"role": "user", "text": "x" * 2000}
    pictures = [{"image": np.full((40, 40), i, np.uint8), "id": i} for i in range(6)]
    return TensorDict(
        {
            "ids": nested([range(i) for i in range(6)]),
            "wide": torch.arange(6 * 5000).view(6, 5000),
            "half": torch.arange(6).to(torch.bfloat16),
            "reward": torch.rand(6, requires_grad=True),
            "complex": torch.rand(6, dtype=torch.complex64).conj(),
            "messages": stack_of_payloads([shared, "b", shared, None, 5, shared]),
            "pictures": stack_of_payloads(pictures),
            "arrays": stack_of_payloads([np.arange(i) for i in range(6)]),
            "texts": NonTensorData(np.array(["a", "bcd"] * 3), batch_size=[6]),
            "step": NonTensorData(7, batch_size=[6]),
            "inner": TensorDict({"x": torch.arange(6)}, [6]),
        },
        [6],
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rows", [[0, 3, 5], [5, 5, 1], [], range(2, 5), range(6)])
def test_columns_of_every_kind(rows, narrow):
    rows = rows if isinstance(rows, range) else np.array(rows, dtype=np.int64)
    columns = columns_of(every_kind())
    whole = open_wire(encode(columns))
    for frames in encode_parts(columns, [rows, rows], narrow):
        assert_same(decode(frames), decode(whole.rows(rows).to_frames()))


def test_objects_that_are_one_are_known_as_one_in_a_part():
    columns = columns_of(every_kind().select("messages"))
    (part,) = parts_to_send(columns, [np.array([3, 2, 5, 0, 1])], narrow=False, allow_pickle=False)
    found = open_wire(encode(part, elide=True))["messages"]
    assert found[1] is found[2] is found[3]


def test_objects_are_packed_once_for_all_parts():
    columns = columns_of(every_kind().select("messages", "ids"))
    with mock.patch.object(lowering_objects, "written_at_once", wraps=written_at_once) as packed:
        encode_parts(columns, [np.array([i]) for i in range(6)])
    assert packed.call_count == 1


def test_an_error_names_the_row_of_the_batch():
    columns = Columns(3, {"x": NonTensorStack(1, 2, object())})
    with pytest.raises(UnsupportedTypeError, match=r"^\$\.x\[2\]"):
        encode_parts(columns, [np.array([0]), np.array([2])])


# --- rows of objects with large tensors --------------------------------------------------------

# Tensors from this size on are pieces of a row's message, smaller ones are joined.
EDGE = SMALL_BUFFER // 8
SIZES = st.sampled_from([0, 1, 100, EDGE - 1, EDGE, EDGE + 1, 2 * EDGE])


@st.composite
def large_objects(draw):
    """Rows of objects, of which some are one, some are equal, and some hold large tensors."""
    pool: list[Any] = [None, "text", {"a": [1, None]}]
    for i in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
        pool.append(
            {"name": i, **{f"x{k}": torch.arange(n) * (i + 1) for k, n in enumerate(sizes)}}
        )
        pool.append({**pool[-1]})
    picked = draw(st.lists(st.sampled_from(range(len(pool))), min_size=1, max_size=8))
    return [pool[i] for i in picked]


@given(st.data(), large_objects(), st.booleans(), st.booleans())
def test_objects_with_large_tensors_arrive_whole_and_in_parts(data, rows, narrow, elide):
    columns = TensorDict({"x": stack_of_payloads(rows), "n": torch.arange(len(rows))}, [len(rows)])
    options = {"narrow": narrow, "elide": elide}
    assert_same(decode(encode(columns, **options)), columns)
    memory = bytearray(size(encode(columns, **options)) + 100_000)
    assert_same(decode(memory[: encode(columns, out=memory, **options)]), columns)
    groups = [data.draw(indices(len(rows))) for _ in range(data.draw(st.integers(1, 3)))]
    chosen = [choose_rows(index, len(rows), "index") for index, _ in groups]
    parts = parts_to_send(columns_of(columns), chosen, narrow=narrow, allow_pickle=False)
    for part, (_, expected) in zip(parts, groups, strict=True):
        found = open_wire(encode(part, **options))
        assert found["n"].tolist() == expected
        assert_same(found["x"].tolist(), [rows[i] for i in expected])


def test_large_tensors_of_objects_are_copied_once(monkeypatch):
    """Into the frame that is sent: no join of their bytes comes before."""
    rows = [{"x": torch.full((EDGE,), i), "y": torch.full((3 * EDGE,), i)} for i in range(20)]
    columns = TensorDict({"x": stack_of_payloads(rows)}, [20])
    copied: list[int] = []

    def in_buffers(buffers, *arguments):
        copied.extend(buffer.ctypes.data for buffer in buffers)
        return views.in_buffers(buffers, *arguments)

    monkeypatch.setattr("jagcodec.wire.write.items_to_message.in_buffers", in_buffers)
    encode(columns)
    assert {row[name].data_ptr() for row in rows for name in "xy"} <= {*copied}


def test_memory_of_the_output_that_overlaps_an_object_is_refused():
    memory = np.zeros(40 * EDGE, np.int64)
    rows = [{"x": torch.from_numpy(memory[i * EDGE : (i + 1) * EDGE])} for i in range(3)]
    with pytest.raises(ArgumentError, match="overlap"):
        encode(TensorDict({"x": stack_of_payloads(rows)}, [3]), out=memory)
