"""Wire batch to trainer columns: layouts, pads, names, memory, gradients, refusals."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    select_rows,
    stack_or_nest,
    to_rows,
)
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.types import Layout, PackedColumn
from tests.helpers import rollout
from tests.oracle import assert_same, bits

LAYOUTS: list[Layout] = ["padded", "jagged", "packed"]


def ids(*lengths, start=1):
    rows = [torch.arange(start, start + n) for n in lengths]
    return TensorDict({"ids": stack_or_nest(rows, always_nest=True)}, [len(lengths)])


def fetched(lengths):
    """A batch as NeMo-RL's reader makes it: rows of one length are stacked, others are nested."""
    rows = [torch.arange(1, n + 1) for n in lengths]
    columns = {
        "ids": stack_or_nest(rows),
        "logprobs": stack_or_nest([row.float() / 8 for row in rows]),
        "routed": stack_or_nest([torch.stack([row, row + 1], dim=1) for row in rows]),
        "mask": torch.ones(len(lengths)),
    }
    return TensorDict(columns, [len(lengths)])


# --- pads --------------------------------------------------------------------------------------


def padded_cell(dtype, pad):
    """The bits of the two pads in a row of one cell."""
    rows = [torch.ones(n, dtype=torch.uint8).to(dtype) for n in (1, 3)]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    return bits(materialize(td, pad_value_dict={"x": pad, "absent": 1})["x"])[0][1:]


EXACT: dict[torch.dtype, list[Any]] = {
    torch.int64: [2**63 - 1, -(2**53) - 1],
    torch.uint64: [2**64 - 1],
    torch.uint16: [65535],
    torch.int32: [-(2**31), 2**31 - 1],
    torch.bool: [True],
    torch.float32: [-0.0, math.nan, -3.4028235e38, 16777217.0],
    torch.bfloat16: [-math.inf, -1e30],
    torch.float16: [math.inf, 0.1],
    torch.float8_e4m3fn: [447.0],
    torch.float8_e5m2: [-1e4],
    torch.float64: [0.1],
    torch.complex64: [complex(0.1, -1e9), complex(0.0, math.inf)],
    torch.complex128: [3.5],
}
UNFIT: dict[torch.dtype, list[Any]] = {
    torch.int32: [2**31, -(2**31) - 1],
    torch.uint8: [-1],
    torch.bool: [2],
    torch.float16: [151643, -1e9, 1e-9],
    torch.float32: [2**24 + 1, 1e300, 1j, 1e-50],
    torch.complex64: [complex(1, 1e39), complex(1e-50, 1)],
    torch.float8_e4m3fn: [math.inf, -1e4],
    torch.float8_e5m2: [1e9],
    torch.bfloat16: [torch.tensor(2**9 + 1)],
    torch.int64: [
        *(0.5, math.nan, "pad", None, torch.tensor([1, 2]), np.array([], dtype=np.int64)),
        *(torch.tensor(2**63, dtype=torch.uint64), torch.tensor(1, device="meta")),
    ],
}


@pytest.mark.parametrize("dtype", EXACT)
def test_pads_are_exact_or_rounded_as_torch_rounds_them(dtype):
    for pad in EXACT[dtype]:
        assert padded_cell(dtype, pad) == bits(torch.tensor([pad, pad], dtype=dtype))


@pytest.mark.parametrize("dtype", UNFIT)
def test_pads_that_do_not_fit_are_errors(dtype):
    for pad in UNFIT[dtype]:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"materialize\('x'\)"):
            padded_cell(dtype, pad)


def test_one_number_in_any_box_is_a_pad():
    for pad in (torch.tensor(7), torch.tensor([7.0]), np.int32(7), np.array([[7]]), True + 6, 7.0):
        assert padded_cell(torch.int64, pad) == [7, 7]


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch does not have it")
def test_zero_is_no_pad_of_a_dtype_that_lacks_it():
    dtype = torch.float8_e8m0fnu
    for zero in (0, 0.0, -0.0, torch.tensor(0), -1.0, math.inf):
        with pytest.raises(ArgumentError, match=r"'x'.*has no zero"):
            padded_cell(dtype, zero)
    td = TensorDict({"x": stack_or_nest([torch.ones(n).to(dtype) for n in (1, 2)])}, [2])
    assert bits(materialize(td)["x"])[0][1] == 0
    for pad in (1, 0.5, 2.0**-127):
        assert padded_cell(dtype, pad) == bits(torch.tensor([pad, pad]).to(dtype))


# --- layouts -----------------------------------------------------------------------------------


def test_packed_is_what_varlen_attention_takes():
    fields = {"ids": torch.arange(12).view(3, 4), "logprob": torch.rand(3, 4), "r": torch.ones(3)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([2, 4, 0]))
    columns = materialize(td, layout="packed")
    column = columns["ids"]
    assert column._fields == ("values", "cu_seqlens", "max_seqlen", "position_ids")
    assert column.values.data_ptr() == td["ids"].values().data_ptr()
    assert column.values.tolist() == [0, 1, 4, 5, 6, 7]
    assert_same(column.cu_seqlens, torch.tensor([0, 2, 6, 6], dtype=torch.int32))
    assert column.max_seqlen == 4
    assert_same(column.position_ids, torch.tensor([0, 1, 0, 1, 2, 3]))
    assert columns["logprob"].cu_seqlens is column.cu_seqlens
    assert columns["r"].tolist() == [1, 1, 1]
    turned = TensorDict({"x": stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)])}, [2])
    assert materialize(turned, "packed")["x"].values.shape == (3, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_trainer_made_goes_back_in_and_is_sent_on(layout):
    batch = materialize(rollout(), layout)
    assert type(batch) is BatchedDataDict
    again = materialize(batch, layout, token_aligned_fields=())
    assert to_rows(again, as_="list") == to_rows(batch, as_="list")
    back = decode(encode(batch))
    assert type(back) is BatchedDataDict
    assert type(back["ids"]) is type(batch["ids"])
    assert to_rows(back, as_="list") == to_rows(batch, as_="list")
    if layout == "packed":
        left = materialize(batch, padding_side="left")
        assert left["ids"].tolist() == [[0, 0, 0, 1], [4, 5, 6, 7], [0, 0, 0, 0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_lets_a_longer_row_pass(layout):
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(3)])}, [2])
    with pytest.raises(ArgumentError, match=r"'x'\), row 1.*pad_to_seqlen=2.*found 3"):
        materialize(td, layout, None, 2)
    found = materialize(td, layout, pad_to_seqlen=np.int64(3))["x"]  # type: ignore[arg-type]
    assert (found is td["x"]) == (layout == "jagged")


def test_non_tensors_become_rows():
    array = np.array(["x", ["y"], 3], dtype=object)
    td = TensorDict(
        {
            "stack": NonTensorStack(*map(NonTensorData, ({"a": (1,)}, [1, 2], None))),
            "array": array,
            "whole": NonTensorData({"epoch": 1}, batch_size=[3]),
            "text": "same for all",
        },
        [3],
    )
    for batch in (td, decode(encode(td)), open_wire(encode(td))):
        columns = materialize(batch)
        assert_same(columns["stack"].tolist(), [{"a": (1,)}, [1, 2], None])
        assert_same(columns["array"], array)
        assert_same(columns["whole"].tolist(), [{"epoch": 1}] * 3)
        assert_same(columns["text"].tolist(), ["same for all"] * 3)
        assert {(c.shape, c.dtype) for c in columns.values()} == {((3,), np.dtype(object))}


def test_columns_within_batches_follow_the_same_rule():
    inner = TensorDict({"ids": torch.ones(2, 3), "row": torch.ones(2)}, [2])
    td = TensorDict({"inner": inner, "ids": ids(1, 2)["ids"]}, [2])
    pads: Any = {("inner", "ids"): 9}
    options: dict[str, Any] = {"pad_to_seqlen": 4, "pad_value_dict": pads}
    nested = {"inner": {**dict(inner.items()), "none": {}}, "ids": td["ids"]}
    for batch in (td, open_wire(encode(td)), nested):
        columns = materialize(batch, **options, strict=True)
        assert type(columns["inner"]) is BatchedDataDict
        assert columns["inner"]["ids"].tolist() == [[1, 1, 1, 9]] * 2
        assert columns["inner"]["row"].tolist() == [1, 1]
        alone = materialize(batch, token_aligned_fields=["ids"], **options)
        assert alone["inner"]["ids"].shape == (2, 3)
        named = materialize(batch, token_aligned_fields=list(pads), **options)
        assert named["inner"]["ids"].shape == (2, 4)
    for wrong in ("inner", ("inner", "idz"), "idz"):
        pads = {wrong: 1, "ids": 8}
        with pytest.raises(ArgumentKeyError, match="pad_value_dict"):
            materialize(td, pad_value_dict=pads, strict=True)


def test_the_container_is_the_callers_choice():
    td = TensorDict({"x": torch.ones(2)}, [2])
    assert type(materialize(td, container=dict)) is dict
    assert list(materialize(td, container=list)) == ["x"]


# --- names and widths --------------------------------------------------------------------------


def test_what_is_not_widened_is_the_column_itself():
    td = fetched([3, 3])
    td["grid"], td["text"] = torch.ones(2, 3, 4), NonTensorStack("a", "b")
    cases: list[dict[str, Any]] = [
        {},
        {"padding_side": "left"},
        {"attention_mask_of": "ids"},
        {"pad_to_seqlen": 3},
        {"pad_to_seqlen": 2},
        {"pad_to_seqlen": 8, "token_aligned_fields": ()},
        {"pad_to_seqlen": 8, "keep_jagged": ["ids", "logprobs", "routed", "grid", "absent"]},
        {"layout": "jagged", "pad_to_seqlen": 8},
        {"layout": "packed", "pad_to_seqlen": 8},
    ]
    for options in cases:
        found = materialize(td, **options)
        for name in ("ids", "logprobs", "routed", "mask", "grid"):
            assert found[name].data_ptr() == td[name].data_ptr()
    assert materialize(td, attention_mask_of="ids")["attention_mask"].tolist() == [[True] * 3] * 2
    jagged = ids(1, 2)
    for batch in (jagged, open_wire(encode(jagged))):
        kept = materialize(batch, pad_to_seqlen=1, keep_jagged=["ids"])["ids"]
        assert_same(kept, jagged["ids"])


def test_prompt_lengths_are_a_column_or_numbers():
    td = ids(5, 3, 4)
    td["prompt_lengths"] = torch.tensor([2, 3, 1])
    sides: Any = {"padding_side": {"ids": "left_right"}, "prompt_width": 4}
    for prompts in ("prompt_lengths", torch.tensor([2, 3, 1]), [2, 3, 1], (2, 3, 1)):
        for batch in (td, open_wire(encode(td)), dict(td.items())):
            found = materialize(batch, "padded", {"ids": -1}, 8, prompt_lengths=prompts, **sides)
            assert found["ids"].tolist() == [
                [-1, -1, 1, 2, 3, 4, 5, -1],
                [-1, 1, 2, 3, -1, -1, -1, -1],
                [-1, -1, -1, 1, 2, 3, 4, -1],
            ]


def test_masks_of_several_columns():
    rows = [torch.ones(3, 1), torch.ones(3, 2)]
    td = TensorDict({"x": stack_or_nest(rows), "ids": ids(2, 0)["ids"]}, [2])
    names = {"x": "mask", "ids": "other"}
    found = materialize(td, attention_mask_of=names, padding_side={"ids": "left"})
    assert list(found) == ["x", "ids", "mask", "other"]
    assert found["mask"].tolist() == [[True, False], [True, True]]
    assert found["other"].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_what_cannot_be_widened_is_an_error_only_where_it_would_be(make):
    column = make(torch.eye(2))
    td = TensorDict({"x": column, "ids": ids(1, 2)["ids"]}, [2])
    assert materialize(td, pad_to_seqlen=2)["x"].layout == column.layout
    assert materialize(td, pad_to_seqlen=3, token_aligned_fields=())["x"].layout == column.layout
    for names in (None, ["x"]):
        with pytest.raises(ArgumentError, match=r"'x'\).*a strided rectangle.*3 cells wide"):
            materialize(td, pad_to_seqlen=3, token_aligned_fields=names)


def test_conjugated_cells_are_padded_as_what_they_are():
    column = torch.tensor([[1 + 2j], [3 - 1j]]).conj()
    found = materialize({"x": column}, pad_to_seqlen=2)["x"]
    assert found.tolist() == [[1 - 2j, 0], [3 + 1j, 0]]


def test_chosen_rows_of_a_small_message_are_padded_as_those_of_a_batch():
    cells = torch.arange(40)
    columns = {
        "ids": cells[:20].view(5, 4),
        "logprobs": cells.view(5, 4, 2).float(),
        "reward": torch.arange(10.0).view(5, 2),
        "mask": cells[:20].view(5, 4) % 3 == 0,
    }
    names = ["ids", "logprobs", "mask"]
    td = pack_jagged_fields(columns, lengths=[2, 3, 1, 4, 0], token_aligned_fields=names)
    td["turns"] = ids(1, 2, 3, 4, 5)["ids"]
    pads = {"ids": -1, "logprobs": 0.5}
    for index in (slice(None), slice(1, 4), slice(2, 3), [3, 0, 3, 1], [4], slice(0, 0)):
        opened = open_wire(encode(td)).rows(index)
        expected = materialize(select_rows(td, index), "padded", pads)
        assert_same(materialize(opened, "padded", pads), expected)


# --- memory ------------------------------------------------------------------------------------


def test_rectangles_are_written_again_from_step_to_step():
    def batch(lengths):
        columns = fetched(lengths)
        columns["in"] = TensorDict({"ids": columns["ids"].clone()}, [2])
        return columns

    options: Any = {"pad_to_seqlen": 4, "attention_mask_of": "ids"}
    first = materialize(batch([3, 3]), **options)

    def places(found):
        columns = {**{k: v for k, v in found.items() if k not in ("mask", "in")}, **found["in"]}
        return [column.data_ptr() for column in columns.values()]

    for lengths in ([1, 2], [2, 2], [4, 1]):
        expected = materialize(batch(lengths), **options)
        again = materialize(batch(lengths), out=dict(first), **options)
        assert_same(dict(again), dict(expected))
        assert places(again) == places(first) != places(expected)


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
        assert_same(dict(columns), dict(materialize(td, pad_value_dict={"half": 2})))
        base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        for column in columns.values():
            assert base <= column.data_ptr() < base + len(memory)
            assert column.data_ptr() % 64 == 0


def test_a_pickled_column_holds_only_itself():
    ones = {"a": torch.ones(64, 512), "b": torch.ones(64, 512)}
    batch = materialize(pack_jagged_fields(ones, lengths=[512] * 64))
    assert len(pickle.dumps(batch["a"])) < 64 * 512 * 4 + 2000


def test_memory_is_not_written_over_while_it_is_read():
    td = ids(4, 2)
    td["more"] = td["ids"] + 1
    room = torch.zeros(2, 4, dtype=torch.int64)
    memory = torch.zeros(32, dtype=torch.int64)
    memory[:3] = torch.tensor([0, 4, 8])  # offsets of the column
    column = torch.nested.nested_tensor_from_jagged(torch.arange(8), memory[:3])
    for batch, out in (
        (td, {"ids": room, "more": room}),
        ({"a": column}, {"a": memory[1:9].view(2, 4)}),
    ):
        with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
            materialize(batch, out=out)
    assert not room.any()
    assert memory.tolist() == [0, 4, 8] + [0] * 29


@pytest.mark.parametrize("first", [0, 100, 900])
def test_a_message_is_not_written_over_while_it_is_read(first):
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_another_device(layout):
    td = fetched([1, 2])
    td["stacked"], td["text"] = torch.ones(2, 2), NonTensorStack("a", "b")
    options: Any = {"attention_mask_of": "ids"} if layout == "padded" else {}
    columns = materialize(td, layout, pad_to_seqlen=4, device="meta", **options)
    assert columns.pop("text").tolist() == ["a", "b"]
    for column in columns.values():
        packed = isinstance(column, PackedColumn)
        parts = [column.values, column.cu_seqlens] if packed else [column]
        assert {part.device.type for part in parts} == {"meta"}
    if layout == "padded":
        shapes = [tuple(columns[name].shape) for name in ("ids", "stacked", "attention_mask")]
        assert shapes == [(2, 4)] * 3


# --- gradients ---------------------------------------------------------------------------------


def with_gradient(kind):
    """A column of two rows, and the leaves of the graph that it comes from."""
    sizes = (3, 3) if kind == "rectangle" else (2, 3)
    leaves = [torch.arange(1.0, 1 + n).requires_grad_() for n in sizes]
    doubled = [leaf * 2 for leaf in leaves]
    if kind == "rectangle":
        return torch.stack(doubled), leaves
    layout = torch.strided if kind == "strided" else torch.jagged
    return torch.nested.as_nested_tensor(doubled, layout=layout), leaves


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["jagged", "rectangle", "strided"])
def test_gradients_pass_through_a_rectangle(kind, side):
    column, leaves = with_gradient(kind)
    td = TensorDict({"x": column, "ids": torch.ones(2, 2)}, [2])
    options: Any = {"pad_to_seqlen": 4, "padding_side": side, "pad_value_dict": {"x": -1}}
    found = materialize(td, **options)["x"]
    weights = torch.arange(1.0, 9.0).view(2, 4)
    (found * weights).sum().backward()
    for i, leaf in enumerate(leaves):
        place = slice(len(leaf)) if side == "right" else slice(4 - len(leaf), None)
        assert found[i, place].tolist() == (leaf * 2).tolist()
        assert leaf.grad.tolist() == (weights[i, place] * 2).tolist()
    with torch.no_grad():
        cut = materialize(td, **options)["x"]
    assert not cut.requires_grad
    assert cut.tolist() == found.tolist()
    if kind != "rectangle":
        column, leaves = with_gradient(kind)
        materialize({"x": column}, "packed")["x"].values.sum().backward()
        assert [leaf.grad.tolist() for leaf in leaves] == [[2, 2], [2, 2, 2]]


@pytest.mark.parametrize("kind", ["jagged", "rectangle", "strided"])
def test_what_autograd_follows_is_not_written_over_other_memory(kind):
    td = TensorDict({"x": with_gradient(kind)[0]}, [2])
    for out in (bytearray(1000), {"x": torch.zeros(2, 4)}):
        with pytest.raises(ArgumentError, match=r"materialize\(out\)\['x'\].*torch.no_grad"):
            materialize(td, pad_to_seqlen=4, out=out)
        with torch.no_grad():
            materialize(td, pad_to_seqlen=4, out=out)
    assert materialize(td, pad_to_seqlen=4, out={})["x"].requires_grad


def test_gradients_that_torch_cannot_pad_are_an_error():
    values = torch.ones(3).to(torch.float8_e5m2).requires_grad_()
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    with pytest.raises(ArgumentError, match=r"'x'\).*float8_e5m2.*detach"):
        materialize(TensorDict({"x": column}, [2]))


# --- what is refused ---------------------------------------------------------------------------

WIDE = TensorDict({"wide": torch.ones(2, 5), "ids": ids(1, 2)["ids"]}, [2])
TAKEN = TensorDict({"attention_mask": torch.ones(2), "ids": ids(1, 2)["ids"]}, [2])
GRID = {"sizes": torch.ones(2, 2)}
LR = {"padding_side": "left_right"}
INT = torch.int64


REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ArgumentError: [
        ({"layout": "Padded"}, "'padded'.*'Padded'"),
        ({"pad_to_seqlen": -1}, "pad_to_seqlen"),
        ({"pad_to_seqlen": 2.0}, "pad_to_seqlen"),
        ({"pad_to_seqlen": 0.0}, "pad_to_seqlen"),
        ({"padding_side": "both"}, "'left', 'left_right', found 'both'"),
        ({"padding_side": {"ids": "up"}}, "found 'up'"),
        ({"pad_to_multiple": 0}, "1 or more, found 0"),
        ({"pad_to_multiple": 1.5}, "1 or more, found 1.5"),
        ({"prompt_width": -1, **LR}, r"\(prompt_width\)"),
        ({"device": "nowhere"}, r"materialize\(device\)"),
        # layouts
        ({"layout": "packed", "pad_to_multiple": 8}, r"multiple\).*'packed'"),
        ({"layout": "jagged", "padding_side": "left"}, r"side\).*'jagged'"),
        ({"layout": "jagged", "attention_mask_of": "ids"}, r"\(attention"),
        ({"layout": "jagged", "token_aligned_fields": ["x"]}, "aligned"),
        ({"layout": "jagged", "prompt_width": 1}, r"\(prompt_width\)"),
        ({"layout": "jagged", "out": {}}, r"\(out\)"),
        ({"layout": "jagged", "pin_memory": True}, r"\(pin_memory\)"),
        # prompts
        (LR, "expected prompt_lengths"),
        ({"prompt_lengths": [1, 1]}, "requires padding_side='left_right'"),
        ({"prompt_width": 3}, "requires padding_side='left_right'"),
        ({"prompt_lengths": [1], **LR}, r"lengths shape \(1,\) != \(2,\)"),
        ({"prompt_lengths": [2, 1], **LR}, "row 0: .*within its row of 1"),
        ({"prompt_lengths": [1, 2], "prompt_width": 1, **LR}, "row 1.*prompt_width=1.*found 2"),
        ({"prompt_lengths": [1, 0], "pad_to_seqlen": 2, **LR}, "=2.*found 3 with its prompt"),
        # It is not said whether a rectangle has one cell per token: its layout would be a guess.
        (
            {"td": GRID, "prompt_lengths": [3, 1], **LR},
            "row 0.*another padding_side",
        ),
        # names
        ({"td": WIDE, "pad_to_seqlen": 4, "token_aligned_fields": ["wide"]}, "=4.*found 5"),
        ({"attention_mask_of": {"a": "m", "b": "m"}}, "a name for each"),
        ({"td": TAKEN, "attention_mask_of": "ids"}, r"of=\{'ids': 'another name'\}"),
        # memory; a batch of two rows of two cells each of 8 bytes, in lines of 64
        ({"out": bytearray(10)}, "expected 128 bytes to write to, found 10"),
        ({"out": {"ids": torch.zeros(2, 3, dtype=INT)}}, r"\['ids'\].*2, 2"),
        ({"out": {"ids": torch.zeros(2, 2)}}, "torch.int64"),
        ({"out": {"ids": torch.zeros(2, 2, dtype=INT).T}}, "contiguous"),
        ({"out": {"ids": "x"}}, "found str"),
    ],
    ArgumentTypeError: [
        ({"pad_value_dict": 0}, "pad_value_dict"),
        ({"pad_value_dict": ["x"]}, "found list"),
        ({"keep_jagged": "ids"}, r"materialize\(keep_jagged\)"),
        ({"prompt_lengths": [1.0, 1.0], **LR}, "integer lengths"),
        ({"attention_mask_of": 3}, "expected the name of a column"),
        ({"attention_mask_of": {"ids": 3}}, "names of masks"),
        ({"out": bytes(1000)}, "read-only"),
        ({"out": 7}, "found int"),
    ],
    ArgumentKeyError: [
        ({"prompt_lengths": "nope", **LR}, "'nope'"),
        ({"td": WIDE, "attention_mask_of": "wide", "token_aligned_fields": ()}, "wide"),
        ({"attention_mask_of": "nope"}, "nope"),
        ({"td": TAKEN, "attention_mask_of": "attention_mask"}, "attention_mask"),
    ],
}


@pytest.mark.parametrize(
    ("error", "options", "text"), [(error, *case) for error in REFUSED for case in REFUSED[error]]
)
def test_refused(error, options, text):
    with pytest.raises(error, match=text):
        materialize(**{"td": ids(1, 2), **options})


def test_prompt_lengths_of_a_column_without_numbers_and_of_no_batch():
    td = ids(1, 2)
    td["inner"], td["text"] = ids(1, 2), NonTensorStack("a", "b")
    td["stack"] = LazyStackedTensorDict(TensorDict({"a": 1}), TensorDict({"a": 2}), stack_dim=0)
    for batch in (td, open_wire(encode(td))):
        for column in ("ids", "inner", "stack", "text"):
            with pytest.raises((ArgumentError, ArgumentTypeError), match="prompt_lengths"):
                materialize(batch, padding_side="left_right", prompt_lengths=column)
    members = [TensorDict({"prompt_lengths": torch.ones(n), "x": torch.ones(n)}) for n in (1, 2)]
    stack = LazyStackedTensorDict(*members, stack_dim=0)
    for batch, text in ((stack, "found a lazy stack"), (TensorDict({}, []), "no batch dim")):
        for prompts in ("prompt_lengths", torch.tensor([1, 1])):
            with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
                materialize(batch, padding_side="left_right", prompt_lengths=prompts)
