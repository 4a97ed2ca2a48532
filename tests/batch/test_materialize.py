"""Wire batch to trainer columns."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.testing import jagged_batches
from tests.oracle import assert_same, bits, pad_rows, rows_of
from tests.strategies import tensordicts


def blank(column, cells):
    """A cell of `column` with all bits 0, as the model writes it."""
    zero = torch.zeros(1, *column.shape[2:], dtype=torch.uint8).to(torch.int64)
    zero = zero.unsqueeze(-1).expand(*zero.shape, 2) if column.itemsize == 16 else zero
    return zero[0].tolist()


@given(jagged_batches(), st.integers(0, 9))
def test_the_whole_way_and_back(batch, wider):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    lengths = batch.lengths.tolist()
    longest = max(lengths, default=0)
    width = max(wider, longest) if wider else longest
    columns = materialize(
        decode(encode(td)), pad_to_seqlen=width if wider else 0, token_aligned_fields=()
    )
    assert type(columns) is BatchedDataDict
    assert list(columns) == list(batch.fields)
    for name, column in batch.fields.items():
        if name in batch.token_aligned_fields:
            expected = pad_rows(rows_of(column, lengths), width, blank(column, width))
            assert bits(columns[name]) == expected
            assert columns[name].shape == (len(lengths), width, *column.shape[2:])
            assert columns[name].is_contiguous()
        else:
            assert_same(columns[name], column)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 2**63 - 1),
        (torch.int64, -(2**53) - 1),
        (torch.uint64, 2**64 - 1),
        (torch.uint16, 65535),
        (torch.int32, -100),
        (torch.bool, True),
        (torch.float32, -0.0),
        (torch.float32, math.nan),
        (torch.bfloat16, -math.inf),
        (torch.float16, math.inf),
        (torch.float8_e4m3fn, 1.5),
        (torch.float64, 0.1),
        (torch.complex64, 1 - 2j),
        (torch.complex128, 3.5),
    ],
)
def test_pads_are_exact(dtype, pad):
    rows = [
        torch.zeros(1, dtype=torch.uint8).to(dtype),
        torch.zeros(3, dtype=torch.uint8).to(dtype),
    ]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    cell = bits(torch.tensor([pad], dtype=dtype))[0]
    padded = materialize(td, pad_value_dict={"x": pad, "absent": 1})["x"]
    assert bits(padded)[0][1:] == [cell, cell]


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int32, 2**31),
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.int64, math.nan),
        (torch.bool, 2),
        (torch.float16, 151643),
        (torch.float32, 2**24 + 1),
        (torch.float32, 1e300),
        (torch.float32, 1j),
        (torch.float16, -1e9),
        (torch.float16, 1e-9),
        (torch.float32, 1e-50),
        (torch.float32, -1e39),
        (torch.complex64, complex(1, 1e39)),
        (torch.complex64, complex(1e-50, 1)),
        (torch.float8_e4m3fn, math.inf),
        (torch.float8_e4m3fn, -1e4),
        (torch.float8_e5m2, 1e9),
        (torch.bfloat16, 2**9 + 1),
        (torch.bfloat16, torch.tensor(2**9 + 1)),
        (torch.int64, torch.tensor(2**63, dtype=torch.uint64)),
        (torch.int64, "pad"),
        (torch.int64, None),
        (torch.int64, torch.tensor([1, 2])),
        (torch.int64, torch.tensor(1, device="meta")),
        (torch.int64, np.array([], dtype=np.int64)),
    ],
)
def test_pads_that_do_not_fit_are_errors(dtype, pad):
    rows = [torch.zeros(n, dtype=torch.uint8).to(dtype) for n in (1, 3)]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    with pytest.raises((ValueError, TypeError), match=r"materialize\('x'\)"):
        materialize(td, pad_value_dict={"x": pad})


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.bfloat16, -1e4),
        (torch.bfloat16, -1e9),
        (torch.bfloat16, -1e30),
        (torch.float16, 0.1),
        (torch.float32, -3.4028235e38),
        (torch.float32, 16777217.0),
        (torch.float8_e5m2, -1e4),
        (torch.float8_e4m3fn, 447.0),
        (torch.complex64, complex(0.1, -1e9)),
        (torch.complex64, complex(0.0, math.inf)),
    ],
)
def test_float_pads_are_rounded_as_torch_rounds_them(dtype, pad):
    td = TensorDict({"x": stack_or_nest([torch.zeros(n).to(dtype) for n in (1, 3)])}, [2])
    padded = materialize(td, pad_value_dict={"x": pad})["x"]
    assert bits(padded)[0][1:] == bits(torch.tensor([pad, pad], dtype=dtype))


@pytest.mark.parametrize(
    "pad", [torch.tensor(7), torch.tensor([7.0]), np.int32(7), np.array([[7]]), True + 6, 7.0]
)
def test_one_number_in_any_box_is_a_pad(pad):
    assert materialize(ids(1, 2), pad_value_dict={"ids": pad})["ids"].tolist() == [[1, 7], [1, 2]]


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch does not have it")
def test_zero_is_no_pad_of_a_dtype_that_lacks_it():
    rows = [torch.full((n,), 2.0).to(torch.float8_e8m0fnu) for n in (1, 2)]
    td = TensorDict({"scales": stack_or_nest(rows)}, [2])
    for pad in (0, 0.0, -0.0, torch.tensor(0), -1.0, math.inf):
        with pytest.raises(ArgumentError, match=r"'scales'.*has no zero"):
            materialize(td, pad_value_dict={"scales": pad})
    assert bits(materialize(td)["scales"])[0][1] == 0
    for pad in (1, 0.5, 2.0**-127):
        padded = materialize(td, pad_value_dict={"scales": pad})["scales"]
        assert padded.to(torch.float32).tolist() == [[2.0, pad], [2.0, 2.0]]


def test_ragged_dim_two_pads_its_own_dim():
    rows = [torch.arange(6).view(3, 2), torch.arange(12).view(3, 4)]
    td = TensorDict({"position_ids": stack_or_nest(rows)}, [2])
    padded = materialize(decode(encode(td)), pad_to_seqlen=5)["position_ids"]
    assert padded.shape == (2, 3, 5)
    assert padded[0].tolist() == [[0, 1, 0, 0, 0], [2, 3, 0, 0, 0], [4, 5, 0, 0, 0]]
    assert padded[1, :, :4].tolist() == rows[1].tolist()


def test_rows_longer_than_the_width_are_named():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(7)])}, [2])
    with pytest.raises(ValueError, match=r"'x'.*row 1.*pad_to_seqlen=4.*found 7"):
        materialize(td, pad_to_seqlen=4)


def test_jagged_passes_through():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(7)])}, [2])
    assert materialize(td, "jagged")["x"] is td["x"]


def test_packed_is_what_varlen_attention_takes():
    fields = {"ids": torch.arange(12).view(3, 4), "logprob": torch.rand(3, 4), "r": torch.ones(3)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([2, 4, 0]))
    columns = materialize(td, layout="packed")
    ids = columns["ids"]
    assert ids._fields == ("values", "cu_seqlens", "max_seqlen", "position_ids")
    assert ids.values.data_ptr() == td["ids"].values().data_ptr()
    assert ids.values.tolist() == [0, 1, 4, 5, 6, 7]
    assert_same(ids.cu_seqlens, torch.tensor([0, 2, 6, 6], dtype=torch.int32))
    assert ids.max_seqlen == 4
    assert_same(ids.position_ids, torch.tensor([0, 1, 0, 1, 2, 3]))
    assert columns["logprob"].cu_seqlens is ids.cu_seqlens
    assert columns["r"].tolist() == [1, 1, 1]


def test_position_ids_of_ragged_dim_two_are_packed_beside_the_tokens():
    td = TensorDict({"x": stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)])}, [2])
    column = materialize(td, "packed")["x"]
    assert column.values.shape == (3, 3)
    assert column.cu_seqlens.tolist() == [0, 1, 3]


def test_what_is_materialized_can_be_sent_on():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(2)])}, [2])
    for layout in ("padded", "packed"):
        columns = materialize(td, layout)
        back = decode(encode(columns))
        assert type(back) is BatchedDataDict
        assert type(back["x"]) is type(columns["x"])
        assert_same([*back["x"]], [*columns["x"]])


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_no_layout_lets_a_longer_row_pass(layout):
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(3)])}, [2])
    with pytest.raises(ValueError, match="row 1"):
        materialize(td, layout, None, 2)
    assert materialize(td, layout, pad_to_seqlen=np.int64(3)) is not None  # type: ignore[arg-type]


def test_non_tensors_become_rows():
    stack = NonTensorStack(NonTensorData({"a": (1,)}), NonTensorData([1, 2]), NonTensorData(None))
    array = np.array(["x", ["y"], 3], dtype=object)
    td = TensorDict(
        {
            "stack": stack,
            "array": array,
            "whole": NonTensorData({"epoch": 1}, batch_size=[3]),
            "text": "same for all",
        },
        [3],
    )
    columns = materialize(decode(encode(td)))
    assert_same(columns["stack"].tolist(), [{"a": (1,)}, [1, 2], None])
    assert_same(columns["array"], array)
    assert_same(columns["whole"].tolist(), [{"epoch": 1}] * 3)
    assert_same(columns["text"].tolist(), ["same for all"] * 3)
    assert {c.shape for c in columns.values()} == {(3,)}
    assert {c.dtype for c in columns.values()} == {np.dtype(object)}


def test_nested_tensordicts_become_nested_columns():
    inner = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(2)])}, [2])
    td = TensorDict({"inner": inner}, [2])
    columns = materialize(td, pad_value_dict={("inner", "x"): 9})  # type: ignore[dict-item]
    assert columns["inner"]["x"].tolist() == [[1, 9], [1, 1]]
    assert type(columns["inner"]) is BatchedDataDict


def test_the_container_is_the_callers_choice():
    td = TensorDict({"x": torch.ones(2)}, [2])
    assert type(materialize(td, container=dict)) is dict
    assert list(materialize(td, container=list)) == ["x"]


def test_gradient_carrying_columns_can_be_padded():
    leaf = torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged, requires_grad=True
    )
    assert materialize(TensorDict({"x": leaf}, [2]))["x"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda td: materialize(td, "Padded"), ValueError, "'padded'.*'Padded'"),  # type: ignore[arg-type]
        (lambda td: materialize(td, pad_to_seqlen=-1), ValueError, "pad_to_seqlen"),
        (lambda td: materialize(td, pad_to_seqlen=2.0), ValueError, "pad_to_seqlen"),  # type: ignore[arg-type]
        (lambda td: materialize(td, pad_to_seqlen=0.0), ValueError, "pad_to_seqlen"),  # type: ignore[arg-type]
        (lambda td: materialize(td, pad_value_dict=0), TypeError, "pad_value_dict"),  # type: ignore[arg-type]
        (lambda td: materialize(td, pad_value_dict=["x"]), TypeError, "found list"),  # type: ignore[arg-type]
        (lambda td: materialize({"x": 7}), TypeError, r"\['x'\]: expected a column of N rows"),
        (lambda td: materialize(TensorDict({}, [])), ValueError, "batch dim"),
        (
            lambda td: materialize(LazyStackedTensorDict(td, td, stack_dim=0)),
            TypeError,
            "stack_or_nest",
        ),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call(TensorDict({"x": torch.ones(2)}, [2]))


# --- where padding goes ------------------------------------------------------------------------


def ids(*lengths, start=1):
    rows = [torch.arange(start, start + n) for n in lengths]
    return TensorDict({"ids": stack_or_nest(rows, always_nest=True)}, [len(lengths)])


def test_widths_are_rounded_up():
    td = ids(2, 5)
    assert materialize(td, pad_to_multiple=4)["ids"].shape == (2, 8)
    assert materialize(td, pad_to_seqlen=9, pad_to_multiple=4)["ids"].shape == (2, 12)
    assert materialize(td, pad_to_multiple=5)["ids"].shape == (2, 5)
    assert materialize(ids(0, 0), pad_to_multiple=4)["ids"].shape == (2, 0)


@given(jagged_batches(), st.integers(0, 9), st.integers(1, 4))
def test_left_is_right_turned_round(batch, wider, multiple):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    lengths = batch.lengths.tolist()
    width = max([wider, *lengths]) if wider else 0
    columns = materialize(td, pad_to_seqlen=width, pad_to_multiple=multiple, padding_side="left")
    width = -(-(width or max(lengths, default=0)) // multiple) * multiple
    for name in batch.token_aligned_fields:
        column = batch.fields[name]
        rows = rows_of(column, lengths)
        expected = [[blank(column, 1)] * (width - len(row)) + row for row in rows]
        assert bits(columns[name]) == expected


def test_prompts_end_where_responses_begin():
    td = ids(5, 3, 4)
    td["prompt_lengths"] = torch.tensor([2, 3, 1])
    pads = {"ids": -1}
    padded = materialize(
        td,
        "padded",
        pads,
        padding_side="left_right",
        prompt_lengths="prompt_lengths",
        attention_mask_of="ids",
    )
    assert padded["ids"].tolist() == [
        [-1, 1, 2, 3, 4, 5],
        [1, 2, 3, -1, -1, -1],
        [-1, -1, 1, 2, 3, 4],
    ]
    assert padded["attention_mask"].tolist() == (padded["ids"] != -1).tolist()
    assert padded["attention_mask"].dtype == torch.bool
    wide = materialize(
        td,
        "padded",
        pads,
        8,
        padding_side={"ids": "left_right"},
        prompt_lengths=torch.tensor([2, 3, 1]),
        prompt_width=4,
    )
    assert wide["ids"].tolist() == [
        [-1, -1, 1, 2, 3, 4, 5, -1],
        [-1, 1, 2, 3, -1, -1, -1, -1],
        [-1, -1, -1, 1, 2, 3, 4, -1],
    ]
    assert (
        materialize(
            open_wire(encode(td)), padding_side="left_right", prompt_lengths="prompt_lengths"
        )["ids"].tolist()
        == (padded["ids"].clamp(min=0)).tolist()
    )


def test_a_side_by_name():
    td = TensorDict({"a": ids(1, 2)["ids"], "b": ids(1, 2)["ids"]}, [2])
    columns = materialize(td, padding_side={"a": "left", "absent": "left"})
    assert columns["a"].tolist() == [[0, 1], [1, 2]]
    assert columns["b"].tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_side": "both"}, "'right', 'left', 'left_right', found 'both'"),
        ({"padding_side": {"ids": "up"}}, "found 'up'"),
        ({"padding_side": "left_right"}, "expected prompt_lengths"),
        ({"prompt_lengths": torch.tensor([1, 1])}, "requires padding_side='left_right'"),
        ({"prompt_width": 3}, "requires padding_side='left_right'"),
        ({"pad_to_multiple": 0}, "1 or more, found 0"),
        ({"pad_to_multiple": 1.5}, "1 or more, found 1.5"),
        ({"layout": "packed", "pad_to_multiple": 8}, r"materialize\(pad_to_multiple\).*'packed'"),
        ({"layout": "jagged", "padding_side": "left"}, r"materialize\(padding_side\).*'jagged'"),
        ({"layout": "jagged", "attention_mask_of": "ids"}, r"\(attention_mask_of\)"),
        ({"layout": "jagged", "out": {}}, r"\(out\)"),
        ({"layout": "jagged", "pin_memory": True}, r"\(pin_memory\)"),
        ({"device": "nowhere"}, r"materialize\(device\)"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        materialize(ids(1, 2), **options)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([2, 1], {}, r"'ids'\), row 0: expected a prompt within its row of 1"),
        ([1, 2], {"prompt_width": 1}, "row 1.*prompt_width=1 tokens, found 2"),
        ([1, 0], {"pad_to_seqlen": 2}, r"row 1.*pad_to_seqlen=2.*found 3"),
        ([1], {}, r"lengths shape \(1,\) != \(2,\)"),
        ([1.0, 1.0], {}, "integer lengths"),
    ],
)
def test_prompts_are_checked(prompts, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        materialize(
            ids(1, 2), padding_side="left_right", prompt_lengths=torch.tensor(prompts), **options
        )


def test_prompt_lengths_by_a_name_that_is_not_there():
    with pytest.raises(KeyError, match="'nope'"):
        materialize(ids(1, 2), padding_side="left_right", prompt_lengths="nope")


@pytest.mark.parametrize("prompts", ["prompt_lengths", torch.tensor([1, 1])])
def test_prompt_lengths_of_a_lazy_stack(prompts):
    members = [TensorDict({"prompt_lengths": torch.ones(n), "x": torch.ones(n)}) for n in (1, 2)]
    stack = LazyStackedTensorDict(*members, stack_dim=0)
    with pytest.raises(ArgumentTypeError, match="found a lazy stack"):
        materialize(stack, padding_side="left_right", prompt_lengths=prompts)
    with pytest.raises(ArgumentError, match="no batch dim"):
        materialize(TensorDict({}, []), padding_side="left_right", prompt_lengths=prompts)


@pytest.mark.parametrize("column", ["ids", "inner", "stack", "text"])
def test_prompt_lengths_of_a_column_that_has_none(column):
    td = ids(1, 2)
    td["inner"] = ids(1, 2)
    td["text"] = NonTensorStack("a", "b")
    td["stack"] = LazyStackedTensorDict(TensorDict({"a": 1}), TensorDict({"a": 2}), stack_dim=0)
    for batch in (td, open_wire(encode(td))):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="prompt_lengths"):
            materialize(batch, padding_side="left_right", prompt_lengths=column)


def test_attention_mask():
    columns = materialize(ids(1, 0, 3), pad_to_seqlen=4, attention_mask_of="ids")
    assert list(columns) == ["ids", "attention_mask"]
    assert columns["attention_mask"].tolist() == [
        [True, False, False, False],
        [False] * 4,
        [True, True, True, False],
    ]
    rows = [torch.ones(3, 1), torch.ones(3, 2)]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    assert materialize(td, attention_mask_of="x")["attention_mask"].tolist() == [
        [True, False],
        [True, True],
    ]
    td["attention_mask"] = torch.ones(2)
    with pytest.raises(ValueError, match="'attention_mask'"):
        materialize(td, attention_mask_of="x")
    for name in ("nope", "attention_mask"):
        with pytest.raises(KeyError, match=name):
            materialize(td, attention_mask_of=name)


def test_named_columns_stay_jagged():
    patches = stack_or_nest([torch.ones(9, 2), torch.ones(4, 2)])
    td = ids(1, 2)
    td["patches"] = patches
    columns = materialize(td, pad_to_seqlen=3, keep_jagged=["patches", "absent"])
    assert columns["patches"] is patches
    assert columns["ids"].shape == (2, 3)
    received = materialize(open_wire(encode(td)), pad_to_seqlen=3, keep_jagged=["patches"])
    assert_same(received["patches"], patches)
    with pytest.raises(ValueError, match=r"'patches'.*found 9"):
        materialize(td, pad_to_seqlen=3)
    with pytest.raises(TypeError, match=r"materialize\(keep_jagged\)"):
        materialize(td, keep_jagged="patches")


# --- memory ------------------------------------------------------------------------------------


def test_rectangles_are_written_again_from_step_to_step():
    pads = {"ids": -1}
    first = materialize(ids(3, 1), "padded", pads, 4, attention_mask_of="ids")
    place = first["ids"].data_ptr()
    second = materialize(ids(1, 4, start=5), "padded", pads, 4, attention_mask_of="ids", out=first)
    assert second["ids"].data_ptr() == place
    assert second["ids"].tolist() == [[5, -1, -1, -1], [5, 6, 7, 8]]
    assert second["attention_mask"].tolist() == [[True, False, False, False], [True] * 4]
    fresh = materialize(ids(3, 1), out={})
    assert fresh["ids"].data_ptr() != place


def test_nested_columns_are_written_again():
    td = TensorDict({"in": ids(1, 2), "x": ids(2, 2)["ids"]}, [2])
    first = materialize(td)
    second = materialize(td, out=first)
    assert second["in"]["ids"].data_ptr() == first["in"]["ids"].data_ptr()
    assert second["x"].data_ptr() == first["x"].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda n: np.empty(n, dtype=np.uint8),
        lambda n: torch.empty(n, dtype=torch.uint8),
        lambda n: torch.empty(-(-n // 8), dtype=torch.float64),
    ],
)
def test_one_buffer_for_all_of_any_sufficient_size(make):
    out = make(1000)
    memory = memoryview(out.numpy() if isinstance(out, torch.Tensor) else out).cast("B")  # type: ignore[arg-type]
    for lengths in ((1, 2), (5, 3, 1)):
        memory[:] = b"\xff" * len(memory)
        td = ids(*lengths)
        td["half"] = stack_or_nest([torch.ones(n, dtype=torch.float16) for n in lengths])
        columns = materialize(td, pad_value_dict={"half": 2}, out=out)
        assert_same(columns["ids"], materialize(td)["ids"])
        assert_same(columns["half"], materialize(td, pad_value_dict={"half": 2})["half"])
        base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        for column in columns.values():
            assert base <= column.data_ptr() < base + len(memory)
            assert column.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (bytearray(10), ValueError, "expected 128 bytes to write to, found 10"),
        (bytes(1000), TypeError, "read-only"),
        (7, TypeError, "found int"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"out\)\['ids'\].*\(2, 2\)"),
        ({"ids": torch.zeros(2, 2)}, ValueError, "torch.int64"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64).T}, ValueError, "contiguous"),
        ({"ids": "x"}, ValueError, "found str"),
    ],
)
def test_memory_that_does_not_fit_is_an_error(out, error, message):
    with pytest.raises(error, match=message):
        materialize(ids(1, 2), out=out)


def test_two_columns_are_not_written_to_one_memory():
    td = ids(4, 2)
    td["more"] = td["ids"] + 1
    room = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
        materialize(td, out={"ids": room, "more": room})
    assert not room.any()


def test_offsets_are_not_written_over_while_they_are_read():
    memory = torch.zeros(32, dtype=torch.int64)
    memory[:3] = torch.tensor([0, 4, 8])
    values = torch.arange(8)
    column = torch.nested.nested_tensor_from_jagged(values, memory[:3])
    with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
        materialize(TensorDict({"a": column}, [2]), out={"a": memory[1:9].view(2, 4)})
    assert memory.tolist() == [0, 4, 8] + [0] * 29


@pytest.mark.parametrize("first", [0, 100, 900])
def test_a_batch_is_not_written_over_while_it_is_read(first):
    memory = bytearray(10_000)
    header, payload = encode(ids(100, 90))
    memory[: len(payload)] = payload
    batch = open_wire([header, memoryview(memory)[: len(payload)]])
    before = bytes(memory)
    for td in (batch, batch.to_tensordict()):
        with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
            materialize(td, out=memoryview(memory)[first:])
    assert memory == before
    columns = materialize(batch, out=memoryview(memory)[len(payload) :])
    assert_same(columns["ids"], materialize(batch)["ids"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be page-locked here")
def test_page_locked_memory_needs_an_accelerator():
    for td in (ids(1, 2), open_wire(encode(ids(1, 2))), TensorDict({"x": torch.ones(2)}, [2])):
        with pytest.raises(ArgumentError, match=r"materialize\(pin_memory\).* an accelerator"):
            materialize(td, pin_memory=True)


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_to_another_device(layout):
    td = ids(1, 2)
    td["row"] = torch.ones(2)
    td["text"] = NonTensorStack("a", "b")
    columns = materialize(td, layout, device="meta")
    tensors = [columns["row"], columns["ids"]]
    if layout == "packed":
        tensors = [columns["row"], columns["ids"].values, columns["ids"].cu_seqlens]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert columns["text"].tolist() == ["a", "b"]


@given(tensordicts(), st.sampled_from(["right", "left"]), st.booleans())
def test_straight_from_a_message_is_the_same(td, side, narrow):
    """The way from bytes to rectangles, which makes no tensors, beside the one that does."""
    frames = encode(td, narrow=narrow)
    try:
        expected = materialize(decode(frames), padding_side=side)
    except TypeError:  # a lazy stack, on either way
        with pytest.raises(TypeError):
            materialize(open_wire(frames), padding_side=side)
        return
    for source in (frames, [bytes(f) for f in frames], [bytearray(f) for f in frames]):
        assert_same(dict(materialize(open_wire(source), padding_side=side)), dict(expected))
        for layout in ("jagged", "packed"):
            assert_same(
                dict(materialize(open_wire(source), layout)),
                dict(materialize(decode(frames), layout)),
            )


def test_a_mask_whose_name_is_taken_can_have_another():
    td = pack_jagged_fields(
        {"ids": torch.ones(2, 3), "attention_mask": torch.zeros(2)},
        lengths=torch.tensor([2, 3]),
        token_aligned_fields=["ids"],
    )
    with pytest.raises(ArgumentError, match=r"attention_mask_of=\{'ids': 'another name'\}"):
        materialize(td, attention_mask_of="ids")
    found = materialize(td, attention_mask_of={"ids": "mask"})
    assert found["mask"].tolist() == [[True, True, False], [True, True, True]]
