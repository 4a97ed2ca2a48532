"""What messages that are read together may cost, whatever they claim."""

import tracemalloc

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from benchmarks.shapes import DESIGN, PADS, lengths_of, make_batch
from jagcodec import (
    BatchedDataDict,
    JagcodecError,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    materialize,
    open_wire,
)
from tests.oracle import assert_same
from tests.wire.forge import map_of, message, tensor
from tests.wire.readers import peak_of


def test_a_hundred_thousand_messages():
    frames = [bytes(f) for f in encode_fields({"ids": torch.arange(2).view(1, 2)}, lengths=[2])]
    found = materialize([frames] * 100_000)["ids"]
    assert found.shape == (100_000, 2)
    assert found[-1].tolist() == [0, 1]


def test_columns_of_very_many_dims_are_joined_one_by_one():
    deep = torch.arange(12).view(2, *[1] * 8, 2, 3)
    batch = TensorDict({"deep": deep, "flat": torch.ones(2)}, [2])
    assert_same(concat_rows([encode(batch)] * 3).to_tensordict(), concat_rows([batch] * 3))
    many = {f"c{i}": tensor("uint8", (), 0, i) for i in range(2000)}
    many["deep"] = tensor("uint8", (1,) * 64, 0, 2000)
    frames = message(map_of(many), bytes(2001))

    def refuse():
        with pytest.raises(JagcodecError):
            concat_rows([frames] * 16)

    assert peak_of(refuse) < 20 * 16 * len(bytes(frames[0]))


def test_rows_that_messages_claim_take_no_memory_for_each():
    rows = 1 << 22
    frames = encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows]))
    assert sum(map(len, frames)) < 200

    def join():
        batch = concat_rows([frames, frames])
        assert (len(batch), batch.rows([5, rows + 7])["x"].data) == (2 * rows, 1)
        assert batch.to_tensordict().batch_size == (2 * rows,)
        batch = concat_rows([open_wire(frames), open_wire(frames).rows([0]), open_wire(frames)])
        assert len(batch) == 2 * rows + 1
        assert batch.to_tensordict().get("x").data == 1
        assert batch.rows(slice(5, None)).to_tensordict().batch_size == (2 * rows - 4,)
        assert decode(batch.to_frames()).get("x").data == 1

    assert peak_of(join) < 1 << 20


def test_a_dict_of_columns_claims_no_more_rows_than_a_tensordict():
    def claims(rows):
        return encode(BatchedDataDict({"x": torch.empty(rows, 0), "y": torch.empty(rows, 0, 2)}))

    def join():
        batches = [open_wire(claims(1 << 24)), open_wire(claims(1 << 24)).rows([3])]
        batch = concat_rows(batches)
        assert batch.to_tensordict()["y"].shape == ((1 << 24) + 1, 0, 2)
        assert batch["x"].shape == ((1 << 24) + 1, 0)

    assert peak_of(join) < 1 << 20
    with pytest.raises(WireFormatError, match="16777216 rows at most"):
        open_wire(claims(1 << 28))


def test_rows_of_all_batches_add_up_below_two_to_the_63():
    rows = 1 << 24
    batch = open_wire(encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows])))
    for _ in range(3):
        batch = concat_rows([batch.rows(slice(None))] * (1 << 12))
    assert len(batch) == 1 << 60
    assert len(concat_rows([batch.rows(slice(None))] * 7)) == 7 << 60
    with pytest.raises(WireFormatError, match=r"fewer than 2\*\*63 rows"):
        concat_rows([batch.rows(slice(None))] * 8)


@pytest.mark.parametrize("inside", [True, False])
def test_nested_batches_over_one_ragged_group_share_its_rows(inside):
    """Else memory grows with the number of columns times the number of rows."""
    rows = 4000
    none = torch.nested.nested_tensor_from_jagged(
        torch.zeros(0), torch.zeros(rows + 1, dtype=torch.int64), min_seqlen=0, max_seqlen=0
    )
    leaf = TensorDict({"x": none}, [rows]) if inside else none
    frames = [bytes(f) for f in encode(TensorDict({f"c{i}": leaf for i in range(200)}, [rows]))]
    assert sum(map(len, frames)) < 60_000
    found = []
    peak = peak_of(lambda: found.append(materialize([frames, frames], "jagged")))
    assert peak < 3 << 20
    columns = [column["x"] if inside else column for column in found[0].values()]
    assert len({id(column.offsets()) for column in columns}) == 1


def test_cells_smaller_than_their_place_are_gathered():
    """Where a row begins takes 8 bytes; of columns with less, nothing is kept for each row."""
    rows, columns = 5000, 100
    mask = torch.ones(rows, 1, dtype=torch.bool)
    frames = encode_fields({f"m{i}": mask for i in range(columns)}, lengths=[1] * rows)
    batch = concat_rows([open_wire(frames), open_wire(frames)])
    for part in (batch, batch.rows(torch.arange(2 * rows).flip(0))):
        assert peak_of(part.columns) < 4 << 20
        assert materialize(part)["m7"].sum() == 2 * rows


def test_what_was_chosen_of_a_join_is_not_kept():
    frames = encode_fields({"ids": torch.arange(14).view(2, 7)}, lengths=[3, 7])
    batch = concat_rows([open_wire(frames) for _ in range(4)])

    def read():
        for i in range(300):
            materialize(batch.rows([i % 7, 0, 1, 2] * 50))

    tracemalloc.start()
    try:
        read()
        first = tracemalloc.get_traced_memory()[0]
        read()
        assert tracemalloc.get_traced_memory()[0] - first < 100_000
    finally:
        tracemalloc.stop()


def test_packing_and_padding_hold_the_result_once():
    batch = make_batch(lengths_of(DESIGN)[:512])

    def packed():
        return encode_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=PADS)

    frames = packed()
    assert peak_of(packed) <= 1.1 * batch.valid_bytes + 2**18
    assert sum(memoryview(frame).nbytes for frame in frames) <= 1.01 * batch.valid_bytes + 8192
    padded = peak_of(lambda: materialize(frames, pad_value_dict=PADS))
    assert padded <= 1.1 * batch.padded_bytes + 2**18
