"""Packing plans on columns and batches: every form, dtype and device, gradients, and refusals."""

import functools
import itertools
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    BatchedDataDict,
    concat_rows,
    encode,
    join_columns,
    kernels,
    materialize,
    open_wire,
    pack_jagged_fields,
    pack_rows,
    plan_micro_batches,
    plan_packing,
    select_rows,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, JagcodecError
from jagcodec.forward import copy_pieces
from jagcodec.testing import jagged_batches, jagged_tensors, tensors
from jagcodec.wire.registry import restore
from tests.device import on_device, watched
from tests.forward.written_out import multiple_of, written_out
from tests.helpers import MESSAGES, make_batch, nested, run_python
from tests.oracle import assert_same, bits, rows_of

CP_LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]


LENGTHS = make_batch()["ids"].offsets().diff().numpy()


def planned(lengths, **options):
    """A plan of any arguments; wrong ones, too."""
    return plan_packing(lengths, **options)


def tokens_of(lengths):
    """Rows of tokens that are all different, and their jagged tensor."""
    ends = [0, *itertools.accumulate(lengths)]
    rows = [[*range(1 + a, 1 + b)] for a, b in itertools.pairwise(ends)]
    values = torch.arange(1, 1 + ends[-1])
    jagged = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor(ends), min_seqlen=0, max_seqlen=max(lengths, default=0)
    )
    return rows, jagged


def rectangle_of(rows, width):
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]).view(len(rows), width)


def padded(cells, pad):
    return [pad if cell is None else cell for cell in cells]


# --- columns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_columns_are_packed_and_unpacked_as_written_out(cp_size):
    lengths = [*range(4 * cp_size + 2), 0, 3]
    rows, jagged = tokens_of(lengths)
    forms = [jagged, jagged.values(), rectangle_of(rows, max(lengths) + 2)]
    forms.append(materialize({"x": jagged}, layout="packed")["x"])
    for cp_layout, tail in itertools.product(CP_LAYOUTS, ["last_row", "own_row"]):
        unit = multiple_of(cp_size, cp_layout)
        options = {"row_multiple": unit, "total_multiple": 7 * unit, "tail": tail}
        options |= {"cp_size": cp_size, "cp_layout": cp_layout}
        expected, plan = written_out(rows, **options), planned(lengths, **options)
        mask = [cell is not None for cell in expected.buffer()]
        computed = torch.arange(plan.total)
        parts = []
        for rank in (None, *range(cp_size)):
            for column, shift in itertools.product(forms, [0, -1, 2]):
                found = plan.pack(column, pad=-7, shift=shift, cp_rank=rank)
                assert found.tolist() == padded(expected.held(expected.buffer(shift), rank), -7)
            labels = plan.pack({"ids": jagged}, labels_of="ids", cp_rank=rank)["labels"]
            assert labels.tolist() == padded(expected.held(expected.buffer(-1), rank), -100)
            assert plan.mask(rank).tolist() == expected.held(mask, rank)
            for pads in ("zero", "continue"):
                positions = expected.positions(through_pads=pads == "continue")
                assert plan.position_ids(rank, pads=pads).tolist() == expected.held(positions, rank)
            parts.append(torch.tensor(expected.held(computed.tolist(), rank)))
        for shift in (0, 1, -2):
            unpacked = [padded(row, -7) for row in expected.unpacked(computed.tolist(), shift)]
            for values in (computed, computed[None], parts[1:], [part[None] for part in parts[1:]]):
                found = plan.unpack(values, shift=shift, pad=-7)
                assert [row.tolist() for row in found.unbind()] == unpacked


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(CP_LAYOUTS), st.integers(-2, 2))
def test_columns_of_every_dtype_shape_and_layout_are_packed_bit_for_bit(
    data, cp_size, cp_layout, shift
):
    column = data.draw(jagged_tensors())
    dim = next((i for i, size in enumerate(column.shape) if not isinstance(size, int)), 1)
    options = {"row_multiple": multiple_of(cp_size, "zigzag"), "cp_size": cp_size}
    options |= {"cp_layout": cp_layout}
    plan = planned(column, **options)
    rank = data.draw(st.sampled_from([None, *range(cp_size)]))
    packed = plan.pack(column, shift=shift, cp_rank=rank)
    width = plan.total if rank is None else plan.local_total
    shape = [size for size in column.shape[1:] if isinstance(size, int)]
    assert (packed.dtype, [*packed.shape]) == (
        column.dtype,
        [*shape[: dim - 1], width, *shape[dim - 1 :]],
    )
    pad = bits(
        torch.zeros(torch.Size(shape[dim - 1 :]).numel() * column.itemsize, dtype=torch.uint8)
        .view(column.dtype)
        .view(shape[dim - 1 :])
    )
    every = rows_of(column)
    for outer in range(shape[0] if dim == 2 else 1):
        rows = [row[outer] for row in every] if dim == 2 else every
        expected = written_out(rows, **options)
        held = padded(expected.held(expected.buffer(shift), rank), pad)
        assert bits(packed[outer] if dim == 2 else packed) == held
    if dim == 1 and not shift and rank is None:
        assert rows_of(plan.unpack(packed)) == every
        parts = [plan.pack(column, cp_rank=rank) for rank in range(cp_size)]
        assert rows_of(plan.unpack(parts)) == every


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), max_size=4))
def test_rectangles_of_every_dtype_and_stride_are_packed_bit_for_bit(data, lengths):
    width = data.draw(st.integers(max(lengths, default=0), 6))
    column = data.draw(
        tensors((len(lengths), width, *data.draw(st.sampled_from([(), (2,), (0,)]))))
    )
    if len(lengths) == sum(lengths):
        with pytest.raises(ArgumentError, match="expected a jagged tensor, because shape"):
            planned(lengths).pack(column)
        return
    plan = planned(lengths, row_multiple=4)
    rows = rows_of(column, lengths)
    expected = written_out(rows, row_multiple=4).buffer()
    found = bits(plan.pack(column))
    assert [cell for cell, real in zip(found, expected, strict=True) if real is not None] == [
        cell for cell in expected if cell is not None
    ]
    assert [cell is not None for cell in expected] == plan.mask().tolist()


def test_pads_are_a_number_or_a_value_of_the_trailing_shape_and_fit_the_dtype():
    plan = planned([1, 0], row_multiple=2, total=3, tail="own_row")
    experts = torch.tensor([[[5, 6, 7]]]).to(torch.int16)
    jagged = torch.nested.nested_tensor([experts[0], experts[0][:0]], layout=torch.jagged)
    pad: Any
    for pad in (torch.arange(3), np.arange(3), [0, 1, 2], (0, 1, 2)):
        assert plan.pack(jagged, pad=pad).tolist() == [[5, 6, 7], [0, 1, 2], [0, 1, 2]]
    for pad in (4, torch.tensor(4), np.int64(4), torch.tensor([4]), 4.0):
        assert plan.pack(jagged, pad=pad).tolist() == [[5, 6, 7], [4, 4, 4], [4, 4, 4]]
    for pad in (1 << 20, 0.5, [0, 1, 1 << 20], torch.arange(2), "0", None, [[0, 1], [2]]):
        with pytest.raises(JagcodecError, match=r"PackPlan.pack\(pad\): ") as caught:
            plan.pack(jagged, pad=pad)
        assert caught.value.reason == "bad_pad"
    floats = jagged.float()
    assert plan.pack(floats, pad=float("nan"))[1].isnan().all()
    assert plan.unpack(torch.zeros(3, 3, dtype=torch.int16), shift=1, pad=9).values().tolist() == [
        [9, 9, 9]
    ]


def test_ragged_dim_two_packs_into_three_rows_of_cells():
    rows = [torch.arange(3 * n).view(3, n) + 100 * i for i, n in enumerate([2, 5, 0, 3])]
    values = torch.cat(rows, dim=1)
    offsets = torch.tensor([0, 2, 7, 7, 10])
    mrope = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    plan = planned([2, 5, 0, 3], row_multiple=4, cp_size=2)
    each = [nested([row[i].tolist() for row in rows]) for i in range(3)]
    for rank, shift in itertools.product([None, 0, 1], [0, -1]):
        expected = [plan.pack(one, cp_rank=rank, shift=shift, pad=-1) for one in each]
        found = plan.pack(mrope, cp_rank=rank, shift=shift, pad=-1)
        assert torch.equal(found, torch.stack(expected))
        moved = mrope.float().requires_grad_()
        assert torch.equal(plan.pack(moved, cp_rank=rank, shift=shift, pad=-1), found.float())


# --- batches -----------------------------------------------------------------------------------


def assert_packed(found, expected, kept=()):
    """Columns that were packed from two forms of one batch are equal."""
    assert {*found} == {*expected}
    for name, column in expected.items():
        if name in kept or not isinstance(column, (torch.Tensor, dict)):
            assert_same(
                found[name].tolist() if isinstance(found[name], np.ndarray) else found[name],
                column.tolist() if isinstance(column, np.ndarray) else column,
            )
        elif isinstance(column, dict):
            assert_packed(found[name], column)
        else:
            assert (found[name].dtype, bits(found[name])) == (column.dtype, bits(column))


def batch_of_all_kinds():
    td = make_batch()
    other = [torch.arange(float(n)) for n in (2, 1, 0, 4, 3, 1)]
    td["patches"] = torch.nested.nested_tensor(other, layout=torch.jagged)
    td["mask"] = torch.arange(6 * 7).view(6, 7) % 2 == 0
    td["inner"] = TensorDict({"ids": td["ids"], "reward": td["reward"]}, batch_size=[6])
    return td


OPTIONS: dict[str, Any] = {
    "labels_of": "ids",
    "token_aligned_fields": ["mask"],
    "keep_jagged": ["patches"],
    "pad_value_dict": {"ids": 9, "logprobs": -1.5, "experts": [6, 7], ("inner", "ids"): 3},
}


@functools.cache
def forms_of_all_kinds():
    """One batch in every form, by name; the first is in memory."""
    td = batch_of_all_kinds()
    forms: dict[Any, Any] = {
        "td": td,
        "dict": dict(td.items()),
        "bdd": materialize(td, layout="jagged"),
    }
    forms["packed"] = materialize(td, layout="packed", keep_jagged=["patches"])
    for options in ({}, {"narrow": True}, {"elide": True}, {"compress": "zstd"}):
        frames = encode(td, **options)
        forms |= {(name, *options): form(frames) for name, form in MESSAGES.items()}
    twice = concat_rows([encode(td), encode(td)])
    forms["rows"] = twice.rows([0, 7, 2, 9, 10, 5])
    parts = [encode(select_rows(td, [i])) for i in range(6)]
    forms["join"] = concat_rows(parts)
    first = td.select("ids", "patches", "tag")
    forms["columns"] = join_columns([encode(first), encode(td.exclude(*first.keys()))])
    return forms


def test_every_form_of_a_batch_gives_the_same_columns():
    forms = forms_of_all_kinds()
    td = forms["td"]
    plan = planned(td["ids"], row_multiple=4, total_multiple=8, tail="last_row", cp_size=2)
    for rank in (None, 0, 1):
        expected = {name: td[name] for name in td.keys()}  # noqa: SIM118
        for name in ("ids", "logprobs", "experts"):
            pad = OPTIONS["pad_value_dict"][name]
            expected[name] = plan.pack(td[name], pad=pad, cp_rank=rank)
        expected["mask"] = plan.pack(td["mask"], cp_rank=rank)
        plain = materialize(td, layout="jagged")
        expected |= {name: plain[name] for name in ("embedding", "reward", "message", "tag")}
        inner = plan.pack(td["ids"], pad=3, cp_rank=rank)
        expected["inner"] = {"ids": inner, "reward": td["reward"]}
        expected["labels"] = plan.pack(td["ids"], pad=-100, shift=-1, cp_rank=rank)
        for name, form in forms.items():
            found = plan.pack(form, cp_rank=rank, **OPTIONS)
            assert type(found) is dict, name
            assert [*found][-1] == "labels"
            assert_packed(found, expected, kept=["patches"])


def test_columns_are_copied_once_into_one_block_by_one_call_of_the_kernel(monkeypatch):
    calls, copy = [], kernels.copy_all
    monkeypatch.setattr(copy_pieces, "copy_all", lambda tasks: calls.append(tasks) or copy(tasks))
    frames = encode(make_batch())
    plan = planned(make_batch()["ids"], row_multiple=4, cp_size=2)
    packed = plan.pack(open_wire(frames), labels_of="ids", cp_rank=1)
    ((ids, logprobs, experts, labels),) = calls
    arrays = [packed[name].numpy() for name in ("ids", "logprobs", "experts", "labels")]
    for task, array in zip((ids, logprobs, experts, labels), arrays, strict=True):
        assert task.lengths.sum() * task.cell_bytes == array.nbytes == task.dst.nbytes
    # The cells are read in the memory of the message.
    sent = [np.frombuffer(frame, np.uint8) for frame in frames]
    assert any(np.shares_memory(ids.src[0], frame) for frame in sent)


NEXT_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NEXT_DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", NEXT_DTYPES)
@pytest.mark.parametrize("form", [dict, lambda columns: encode(TensorDict(columns, [2]))])
def test_only_labels_have_the_pad_of_labels(dtype, form):
    """Integers may be labels or a mask, which no dtype tells: their name or a pad must say it."""
    mask = nested([[1, 1, 0], [1]], dtype)
    batch, plan = form({"mask": mask}), planned(mask, row_multiple=4)
    for name in ("m", "labels", "next labels"):
        next_ones = functools.partial(plan.pack, batch, labels_of={name: "mask"})
        if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
            if name == "labels":
                if dtype is not torch.uint8:  # which cannot hold -100
                    assert next_ones()[name].tolist() == [1, 0, *[-100] * 6]
                continue
            with pytest.raises(ArgumentError, match=r"labels_of\): expected the pad of") as raised:
                next_ones()
            (remedy,) = re.findall(r"pad_value_dict=(\{.*?\})", str(raised.value))
            found = next_ones(pad_value_dict=eval(remedy))
        else:
            found = next_ones()
        assert found[name].dtype == dtype
        assert found[name].tolist() == [1, *[0] * 7]


def test_labels_and_names_of_columns():
    td = pack_rows({"ids": [[5, 6], [7]], "old": [[1.0, 2.0], [3.0]], "reward": [0.0, 1.0]})
    plan = planned(td["ids"], row_multiple=2)
    packed = plan.pack(
        td,
        labels_of={"next": "ids", "next_old": "old"},
        pad_value_dict={"next": -100, "next_old": 0.5, "unknown": 3},
        token_aligned_fields=["unknown"],
        keep_jagged=["unknown"],
    )
    assert packed["next"].tolist() == [6, -100, -100, -100]
    assert packed["next_old"].tolist() == [2.0, 0.5, 0.5, 0.5]
    with pytest.raises(ArgumentKeyError, match=r"labels_of.: .* one of .'ids', 'old'., found 'rew"):
        plan.pack(td, labels_of="reward")
    with pytest.raises(ArgumentError, match="expected no column 'old', found one; pass labels_of="):
        plan.pack(td, labels_of={"old": "ids"})
    with pytest.raises(ArgumentTypeError, match="expected the name of a column, or a dict"):
        plan.pack(td, labels_of=3)
    small = {"ids": nested([[1, 2], [3]], torch.uint8)}
    with pytest.raises(ArgumentError, match=r"\('labels'\).*: expected a pad that torch.uint8"):
        plan.pack(small, labels_of="ids")
    assert plan.pack(small, labels_of="ids", pad_value_dict={"labels": 0})["labels"].sum() == 2


# --- micro-batches -----------------------------------------------------------------------------

PLANS = [
    {"max_tokens": 24},
    {"rows_per_batch": 2},
    {"rows_per_batch": 1, "fill": "repeat"},
    {"max_tokens": 32, "total_multiple": 8},
    {"count": 4, "fill": "repeat"},
    {"count": 2, "count_multiple": 2, "total_multiple": 16, "fill": "repeat"},
]


@settings(deadline=None, max_examples=150)
@given(
    st.data(),
    st.sampled_from(PLANS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(CP_LAYOUTS),
    st.sampled_from(["last_row", "own_row"]),
)
def test_micro_batches_of_a_rank_are_packed_as_one_by_one(
    data, options, ranks, cp_size, cp_layout, tail
):
    """Whatever the form of the batch, and with `total` too."""
    forms = forms_of_all_kinds()
    td = forms["td"]
    unit = 2 * cp_size
    options = {**options, "row_multiple": unit, "max_tokens": options.get("max_tokens")}
    batches = plan_micro_batches(data.draw(st.sampled_from([td["ids"], LENGTHS])), ranks, **options)
    total = data.draw(st.sampled_from([None, 48, 60]))
    totals = {"total_multiple": options.get("total_multiple", 1)}
    totals = totals if total is None else {"total": total * cp_size}
    cp = {"cp_size": cp_size, "cp_layout": cp_layout}
    cp_rank = data.draw(st.sampled_from([None, *range(cp_size)]))
    more = {name: OPTIONS[name] for name in ("keep_jagged", "pad_value_dict")}
    for name in ("labels_of", "token_aligned_fields"):
        more |= {name: OPTIONS[name]} if data.draw(st.booleans()) else {}
    more["keep_jagged"] = [*more["keep_jagged"], *data.draw(st.sampled_from([[], ["logprobs"]]))]
    rank = data.draw(st.integers(0, ranks - 1))
    form = forms[data.draw(st.sampled_from([*forms]))]
    planned_alone = {"tail": tail, "row_multiple": unit, **totals, **cp}
    pack = functools.partial(batches.pack, form, rank, tail=tail, cp_rank=cp_rank, **cp, **more)
    pack = functools.partial(pack, total=totals.get("total"))
    try:
        expected = [planned(LENGTHS[rows], **planned_alone) for rows in batches[rank]]
    except ArgumentError as error:
        with pytest.raises(ArgumentError) as caught:
            pack()
        assert (caught.value.reason, caught.value.detail) == (error.reason, error.detail)  # noqa: PT017
        return
    found = pack()
    for (plan, columns), alone, rows in zip(found, expected, batches[rank], strict=True):
        assert_same_plan(plan, alone, cp_rank)
        same = alone.pack(select_rows(td, rows), cp_rank=cp_rank, **more)
        assert_packed(columns, same, kept=more["keep_jagged"])
        assert [*columns] == [*same] or form is not td


def assert_same_plan(plan, alone, rank):
    for name in ("rows", "total", "local_total", "max_seqlen", "max_seqlen_padded"):
        assert getattr(plan, name) == getattr(alone, name)
    for name in ("lengths", "padded_lengths", "cu_seqlens", "cu_seqlens_padded"):
        assert getattr(plan, name).tolist() == getattr(alone, name).tolist()
    assert (plan.cu_seqlens is plan.cu_seqlens_padded) == (
        alone.cu_seqlens is alone.cu_seqlens_padded
    )
    for pads in ("zero", "continue"):
        assert torch.equal(plan.position_ids(rank, pads=pads), alone.position_ids(rank, pads=pads))
    assert torch.equal(plan.mask(rank), alone.mask(rank))
    computed = torch.arange(plan.total)
    assert rows_of(plan.unpack(computed, shift=1)) == rows_of(alone.unpack(computed, shift=1))
    parts = [*computed.view(plan.layout.cp_size, plan.local_total)]
    assert rows_of(plan.unpack(parts)) == rows_of(alone.unpack(parts))


@settings(deadline=None)
@given(st.data(), jagged_batches(), st.integers(1, 2), st.booleans())
def test_micro_batches_have_columns_of_every_dtype_shape_and_layout(data, rows, cp_size, sent):
    td = pack_jagged_fields(
        rows.fields, lengths=rows.lengths, token_aligned_fields=rows.token_aligned_fields
    )
    td["extra"] = data.draw(jagged_tensors(len(rows.lengths)))
    jagged = {name: column for name, column in td.items() if getattr(column, "is_nested", False)}
    lengths = {name: planned(column).lengths for name, column in jagged.items()}
    own = lengths[data.draw(st.sampled_from([*lengths]))]
    kept = [name for name, other in lengths.items() if not np.array_equal(other, own)]
    batches = plan_micro_batches(own, rows_per_batch=2, row_multiple=2 * cp_size)
    rank = data.draw(st.sampled_from([None, *range(cp_size)]))
    options: Any = {"cp_rank": rank, "keep_jagged": kept}
    found = batches.pack(encode(td) if sent else td, cp_size=cp_size, **options)
    for (_, columns), chosen in zip(found, batches[0], strict=True):
        alone = planned(own[chosen], row_multiple=2 * cp_size, cp_size=cp_size)
        assert_packed(columns, alone.pack(select_rows(td, chosen), **options), kept=kept)


def test_a_rank_is_packed_by_one_call_of_the_kernel_into_slices_of_one_block(monkeypatch):
    calls, copy = [], kernels.copy_all
    monkeypatch.setattr(copy_pieces, "copy_all", lambda tasks: calls.append(tasks) or copy(tasks))
    batch = concat_rows([encode(select_rows(make_batch(), [i])) for i in range(6)])
    batches = plan_micro_batches(LENGTHS, rows_per_batch=2)
    packed = batches.pack(batch, labels_of="ids")
    assert [len(tasks) for tasks in calls] == [4]
    for name in ("ids", "logprobs", "experts", "labels"):
        columns = [columns[name] for _, columns in packed]
        assert len({column.untyped_storage().data_ptr() for column in columns}) == 1
        sizes = [column.nbytes for column in columns]
        starts = [column.data_ptr() for column in columns]
        assert np.diff(starts).tolist() == sizes[:-1]


def test_gradients_flow_into_the_micro_batches_of_a_rank_and_back():
    values = torch.arange(15.0).requires_grad_()
    rewards = torch.ones(6, requires_grad=True)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)])
    ids = torch.nested.nested_tensor_from_jagged(values, offsets)
    batches = plan_micro_batches(ids, ranks=2, rows_per_batch=2, row_multiple=4, fill="repeat")
    for rank in range(2):
        packed = batches.pack({"x": ids, "r": rewards}, rank)
        rows = [plan.unpack(each["x"]).values() * each["r"].sum() for plan, each in packed]
        torch.cat(rows).sum().backward()  # they share one graph
    seen = np.bincount(batches.order, minlength=6)
    found: Any = rewards.grad, values.grad
    assert (found[0] != 0).tolist() == (seen > 0).tolist()
    assert (found[1] > 0).all()


def test_columns_of_micro_batches_on_a_device_cost_no_wait_but_for_offsets_not_met(device):
    here = materialize(concat_rows([encode(make_batch())]), layout="jagged")
    here = here.select(["ids", "logprobs", "experts", "reward"])
    there = TensorDict(dict(here.to(device)), batch_size=[6])
    batches = plan_micro_batches(there["ids"], rows_per_batch=2, row_multiple=4)
    expected = batches.pack(here, labels_of="ids", cp_size=2, cp_rank=1)
    with watched(device) as traffic:
        found = batches.pack(there, labels_of="ids", cp_size=2, cp_rank=1)
    assert traffic.waits == 0
    for (_, columns), (_, same) in zip(found, expected, strict=True):
        assert all(column.device == device for column in columns.values())
        assert_packed(on_device(columns, torch.device("cpu")), same)


def test_micro_batches_of_no_rows_and_batches_of_none():
    batches = plan_micro_batches([], ranks=2, max_tokens=8)
    for batch in ({}, {"x": torch.zeros(0)}, {"ids": tokens_of([])[1]}):
        assert batches.pack(batch, 1) == []
    batches = plan_micro_batches([0, 0], rows_per_batch=1)
    for plan, columns in batches.pack({"ids": tokens_of([0, 0])[1]}, total=4, tail="own_row"):
        assert (plan.total, columns["ids"].tolist()) == (4, [0, 0, 0, 0])


def test_micro_batches_that_cannot_be_packed_are_named():
    batch = {"ids": nested([[1, 2, 3], [4, 5, 6, 7, 8], [9]]), "r": torch.zeros(3)}
    batches = plan_micro_batches([3, 5, 1], rows_per_batch=1, row_multiple=2)
    assert [rows.tolist() for rows in batches[0]] == [[1], [0], [2]]
    options: Any
    for options, path, text in (
        ({"total": 5, "tail": "last_row"}, "(total), micro-batch 0", "6 cells .* raise it by 1"),
        ({"total": 8}, "(tail)", "expected 'last_row' or 'own_row'.* found None"),
        ({"total": -1, "tail": "own_row"}, "(total)", "expected 0 or more, found -1"),
        ({"tail": "row"}, "(tail)", "expected one of 'last_row', 'own_row', found 'row'"),
        ({"rank": 1}, "(rank)", "expected a rank of 0 to 0, found 1"),
        ({"rank": -1}, "(rank)", "expected a rank of 0 to 0, found -1"),
        ({"cp_rank": 1}, "(cp_rank)", "expected a rank of 0 to 0, or None, found 1"),
        ({"cp_size": 0}, "(cp_size)", "expected 1 or more, found 0"),
        ({"cp_layout": "zig"}, "(cp_layout)", "expected one of 'zigzag'"),
        (
            {"cp_size": 4, "cp_layout": "contiguous", "total": 6, "tail": "last_row"},
            "(total), micro-batch 0",
            "found 6 cells; pass total=8",
        ),
        ({"labels_of": "r"}, "(labels_of)", "expected a column that is packed, one of .'ids'."),
        ({"token_aligned_fields": ["r"]}, "('r')", "expected a rectangle of 3 rows"),
        ({"keep_jagged": "ids"}, "(keep_jagged)", "put it in a list"),
        ({"pad_value_dict": {"ids": 0.5}}, "('ids')(pad)", "expected a pad that torch.int64"),
        ({"batch": {"r": torch.zeros(2)}}, "(batch)", "expected the 3 rows of the plan, found 2"),
        ({"batch": [batch, batch]}, "(batch)", "expected one batch, found a list of them"),
        ({"batch": None}, "(batch)", "expected a batch"),
        *(
            ({"batch": column}, "(batch)", "expected a batch, found .*; put the column in a dict")
            for column in (torch.zeros(9), np.zeros(9), batch["ids"], torch.zeros(9).byte())
        ),
        (
            {"batch": {"ids": nested([[1, 2], [3], [4]])}},
            "('ids'), row 0",
            "found 2; name it in align_end .* or name it in keep_jagged",
        ),
    ):
        call: Any = {"batch": batch, **options}
        with pytest.raises(JagcodecError, match=text) as caught:
            batches.pack(**call)
        assert caught.value.path == f"MicroBatches.pack{path}"
    for options, path, text in (
        ({}, "row_multiple), row 1", "4 equal chunks, found 6 cells; pass row_multiple=4"),
        (
            {"cp_layout": "zigzag_buffer"},
            "total_multiple), micro-batch 0",
            "found 6 cells; pass total_multiple=4 and a tail",
        ),
    ):
        call = {"cp_size": 2, **options}
        with pytest.raises(ArgumentError, match=text) as caught:
            batches.pack(batch, **call)
        assert caught.value.path == f"plan_micro_batches({path}"
    padded = plan_micro_batches([3, 5, 1], rows_per_batch=1, total_multiple=4)
    with pytest.raises(ArgumentError, match=r"MicroBatches.pack\(tail\): expected 'last_row' or"):
        padded.pack(batch)
    # Exactly this total takes the place of the multiple.
    totals = [plan.total for plan, _ in padded.pack(batch, total=6, tail="own_row")]
    assert totals == [6, 6, 6]


# --- gradients, attention ----------------------------------------------------------------------


@pytest.mark.parametrize("cp_layout", CP_LAYOUTS)
def test_gradients_flow_into_the_buffer_and_back(cp_layout):
    plan = planned([3, 0, 5], row_multiple=4, cp_size=2, cp_layout=cp_layout)
    values = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    cells = torch.randn(plan.total, 2, dtype=torch.float64, requires_grad=True)
    halves = [cells[: plan.local_total], cells[plan.local_total :]]
    for rank, shift in itertools.product([None, 0, 1], [0, -1]):
        check = torch.autograd.gradcheck
        assert check(lambda x: plan.pack(x, shift=shift, cp_rank=rank, pad=3.0), values)  # noqa: B023
        assert check(lambda x: plan.unpack(x, shift=shift, pad=2.0).values(), cells)  # noqa: B023
        jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 3, 8]))
        same = [plan.pack(each, shift=shift, cp_rank=rank) for each in (values, jagged)]
        assert torch.equal(*same)
        assert torch.equal(same[0], plan.pack(values.detach(), shift=shift, cp_rank=rank))
        assert all(each.requires_grad for each in same)
    detached = plan.unpack([half.detach() for half in halves])
    assert torch.equal(plan.unpack(halves).values(), detached.values())
    assert plan.unpack(halves).requires_grad
    packed = plan.pack({"x": jagged}, labels_of={"y": "x"})
    (packed["x"] * packed["y"]).sum().backward()
    assert values.grad.count_nonzero()
    with torch.no_grad():
        assert not plan.pack(jagged).requires_grad
        assert not plan.unpack(halves).requires_grad
        out = torch.empty(plan.total, 2, dtype=torch.float64)
        assert plan.pack(values, out=out) is out


def attention(mask, q, k, v):
    """Causal attention of (T, heads, dim) cells, where a mask allows it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return made[0].transpose(0, 1)


@pytest.mark.parametrize("tail", ["last_row", "own_row"])
def test_attention_over_packed_rows_is_that_of_each_row_and_so_are_its_gradients(tail):
    generator = torch.Generator().manual_seed(5)
    lengths, heads, dim = [5, 1, 0, 9, 4], 2, 8
    inputs = torch.randn(sum(lengths), 3 * heads * dim, generator=generator)
    weights = torch.randn(sum(lengths), heads * dim, generator=generator)

    def run(rows_of_attention):
        x = inputs.clone().requires_grad_()
        made = rows_of_attention(x)
        (made * weights).sum().backward()
        return made.detach(), x.grad

    def parts(x):
        return (part.view(-1, heads, dim) for part in x.chunk(3, dim=-1))

    def row_by_row(x):
        causal = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
        rows = zip(x.split(lengths), causal, strict=True)
        return torch.cat([attention(mask, *parts(row)).flatten(1) for row, mask in rows])

    plan = planned(lengths, row_multiple=4, total_multiple=16, tail=tail)

    def packed(x):
        # As varlen attention reads it: which row each cell is in, and where.
        offsets = plan.cu_seqlens_padded.long()
        row = torch.bucketize(torch.arange(plan.total), offsets[1:], right=True)
        position = plan.position_ids(pads="continue")
        mask = (row[:, None] == row) & (position[:, None] >= position)
        return plan.unpack(attention(mask, *parts(plan.pack(x))).flatten(1)[None]).values()

    def rectangle(x):
        rows = torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
        causal = torch.ones(9, 9, dtype=torch.bool).tril()
        made = torch.stack([attention(causal, *parts(row)).flatten(1) for row in rows])
        return plan.unpack(plan.pack(made)).values()

    expected = run(row_by_row)
    for way in (packed, rectangle):
        for found, reference in zip(run(way), expected, strict=True):
            torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)


# --- devices -----------------------------------------------------------------------------------


def test_columns_on_a_device_are_packed_without_a_wait_but_for_offsets_not_met(device):
    names = ["ids", "logprobs", "experts", "reward"]
    here = materialize(concat_rows([encode(make_batch())]), layout="jagged").select(names)
    there = TensorDict(dict(here.to(device)), batch_size=[6])  # with one offsets tensor
    plan_here = planned(here["ids"], row_multiple=4, cp_size=2)
    with watched(device) as traffic:
        plan = planned(there["ids"], row_multiple=4, cp_size=2)
    assert traffic.waits == 1
    options = {"labels_of": "ids", "pad_value_dict": OPTIONS["pad_value_dict"]}
    opened = open_wire(encode(here), device=device)
    for rank, source in itertools.product([None, 0, 1], [there, dict(there.items()), opened]):
        expected = plan_here.pack(here, cp_rank=rank, **options)
        with watched(device) as traffic:
            found = plan.pack(source, cp_rank=rank, **options)
        assert traffic.waits == 0
        assert all(column.device == device for column in found.values())
        assert_packed(on_device(found, torch.device("cpu")), expected)
    with watched(device) as traffic:
        found = plan.unpack([plan.pack(there["logprobs"], cp_rank=r) for r in (0, 1)], shift=1)
        sum_of_both = found + there["logprobs"]  # they share offsets
    assert traffic.waits == 0
    values = [plan_here.pack(here["logprobs"], cp_rank=rank) for rank in (0, 1)]
    assert_same(on_device(found, torch.device("cpu")), plan_here.unpack(values, shift=1))
    assert sum_of_both.device == device


def test_six_columns_of_one_other_offsets_tensor_cost_one_wait_and_are_then_known(device):
    lengths = [3, 0, 5, 1]
    offsets = torch.tensor([0, 3, 3, 8, 9], device=device)
    columns = {
        f"c{i}": torch.nested.nested_tensor_from_jagged(
            torch.arange(9.0, device=device) + i, offsets, min_seqlen=0, max_seqlen=5
        )
        for i in range(6)
    }
    for as_one in (True, False):
        plan = planned(lengths, row_multiple=4)
        with watched(device) as traffic:
            packed = plan.pack(columns) if as_one else {n: plan.pack(c) for n, c in columns.items()}
        assert traffic.waits == 1
        for i, column in enumerate(packed.values()):
            mine = plan.pack(torch.arange(9.0) + i)
            assert column.cpu().tolist() == mine.tolist()
        with watched(device) as traffic:
            plan.pack(columns)
            plan.pack(torch.zeros(4, 5, 2, device=device), pad=[1.0, 2.0])
            plan.pack(torch.zeros(9, device=device), shift=-1, out=torch.zeros(16, device=device))
        assert traffic.waits == 0


def test_a_plan_goes_to_a_device_in_one_copy_without_a_wait(device):
    plan = planned([3, 5], row_multiple=4, cp_size=2)
    even = planned([3, 5])
    with watched(device) as traffic:
        there, same = plan.to(device), even.to(str(device))
        tensors = [there.cu_seqlens, there.cu_seqlens_padded, there.position_ids(1), there.mask()]
    assert (traffic.waits, traffic.fetched) == (0, [])
    assert all(tensor.device == device for tensor in tensors)
    expected = [plan.cu_seqlens, plan.cu_seqlens_padded, plan.position_ids(1), plan.mask()]
    for found, tensor in zip(tensors, expected, strict=True):
        assert (found.dtype, found.cpu().tolist()) == (tensor.dtype, tensor.tolist())
    whole = there.cu_seqlens.untyped_storage().data_ptr()
    assert there.cu_seqlens_padded.untyped_storage().data_ptr() == whole
    assert same.cu_seqlens is same.cu_seqlens_padded
    with pytest.raises(ArgumentError, match=r"PackPlan.to\(device\): expected a device of this"):
        plan.to("nowhere")


# --- memory of the caller ----------------------------------------------------------------------


def test_out_is_filled_again_and_refused_where_it_does_not_fit():
    td = make_batch()
    plan = planned(td["ids"], row_multiple=4)
    first = plan.pack(td)
    kept = {name: column.clone() for name, column in first.items() if torch.is_tensor(column)}
    for name in ("ids", "logprobs"):
        first[name].fill_(77)
    again = plan.pack(td, out=first)
    assert all(again[name] is first[name] for name in ("ids", "logprobs", "experts"))
    assert_packed({n: again[n] for n in kept}, kept)
    del first["ids"]
    assert plan.pack(td, out=first)["ids"].tolist() == kept["ids"].tolist()
    ids = td["ids"]
    total = plan.total
    for wrong, text in (
        (torch.empty(total - 1, dtype=torch.int64), r"expected a contiguous torch.int64 tensor \("),
        (torch.empty(total, dtype=torch.int32), "found a .* tensor of torch.int32"),
        (torch.empty(2 * total, dtype=torch.int64)[::2], "expected a contiguous"),
        (torch.empty(total), "expected a contiguous"),
        (ids, "found a nested tensor"),
        (np.empty(total, np.int64), "found ndarray"),
    ):
        with pytest.raises(ArgumentError, match=text) as caught:
            plan.pack(ids, out=wrong)
        assert (caught.value.reason, caught.value.path) == ("bad_shape", "PackPlan.pack(out)")
    memory = torch.arange(2 * total)
    for start in (0, 3):
        with pytest.raises(ArgumentError, match=r"apart from the columns.*overlap"):
            plan.pack(memory[start : start + 15], out=memory[:total])
    out = torch.empty(total, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="overlap"):
        plan.pack({"a": ids, "b": ids}, out={"a": out, "b": out})
    values = torch.zeros(15, requires_grad=True)
    with pytest.raises(ArgumentError, match="expected a column without a gradient"):
        plan.pack(values, out=torch.empty(total))
    with pytest.raises(ArgumentTypeError, match=r"pack\(out\): expected a dict of column names"):
        plan.pack(td, out=torch.empty(total))


def test_out_on_a_device_may_not_overlap(device):
    plan = planned([4, 4])
    memory = torch.arange(16.0, device=device)
    plan.pack(memory[:8], out=memory[8:])
    with pytest.raises(ArgumentError, match="overlap"):
        plan.pack(memory[:8], out=memory[4:12])


# --- empty batches, bad input ------------------------------------------------------------------


def test_batches_without_rows_or_tokens_are_packed():
    for lengths, tail in itertools.product([[], [0], [0, 0]], ["own_row", "last_row"]):
        total = 0 if not lengths and tail == "last_row" else 8
        plan = planned(lengths, total=total, tail=tail, cp_size=2)
        jagged = tokens_of(lengths)[1]
        offsets = torch.tensor([0] * (1 + len(lengths)))
        values = torch.zeros(0, 3, requires_grad=True)
        column = torch.nested.nested_tensor_from_jagged(values, offsets)
        for rank, cells in ((None, total), (1, total // 2)):
            assert plan.pack(jagged, pad=5, cp_rank=rank).tolist() == [5] * cells
            assert plan.pack({"x": jagged}, cp_rank=rank)["x"].tolist() == [0] * cells
            packed = plan.pack(column, pad=[1, 2, 3], cp_rank=rank)
            assert packed.tolist() == [[1, 2, 3]] * cells
            packed.sum().backward()
            assert plan.mask(rank).tolist() == [False] * cells
        assert plan.unpack(torch.zeros(total)).values().tolist() == []
        assert torch.equal(plan.unpack([torch.zeros(total // 2)] * 2).offsets(), offsets)
        assert plan.pack({}) == {}


def test_values_that_are_unpacked_must_be_of_the_plan():
    plan = planned([3, 5], row_multiple=4, cp_size=2)
    half = torch.zeros(6, 2)
    values: Any
    for values, text in (
        (
            torch.zeros(11),
            r"values.: expected \(12, ...\) or \(1, 12, ...\) cells, found shape \(11,",
        ),
        (half, r"expected \(12, ...\) .*, found shape \(6, 2\)"),
        ([half], "expected 2 parts, one per rank in order, found 1"),
        ([half, half, half], "found 3"),
        ([half, torch.zeros(5, 2)], r"values.\[1\]: expected \(6, ...\) .* found shape \(5, 2\)"),
        ([half, torch.zeros(6, 3)], r"\[1\]: expected a \(6, 2\) tensor .* like the first"),
        ([half, half.int()], r"\[1\]: .* found a \(6, 2\) tensor of torch.int32"),
        (torch.tensor(3.0), r"found shape \(\)"),
    ):
        with pytest.raises(ArgumentError, match=text):
            plan.unpack(values)
    for values in (None, "text", np.zeros(12), [half, None], nested([[1], [2]])):
        with pytest.raises(ArgumentTypeError, match=r"expected a padded .strided. tensor"):
            plan.unpack(values)
    with pytest.raises(ArgumentError, match=r"unpack\(pad\): expected a pad that torch.int64"):
        plan.unpack(torch.zeros(12, dtype=torch.int64), pad=0.5)
    with pytest.raises(ArgumentError, match=r"unpack\(shift\): expected an integer, found 0.5"):
        plan.unpack(torch.zeros(12), shift=0.5)


def test_columns_that_are_not_of_the_plan_are_errors_that_name_the_row_and_both_lengths():
    plan = planned([3, 5], row_multiple=4)
    other = nested([[1, 2, 3], [4, 5, 6, 7]])
    longer = nested([[1], [2], [3]])
    for column, text in (
        (other, r"column., row 1: expected the plan's length of 5, found 4; name it in align_end"),
        (longer, r"column.: expected the 2 rows of the plan, found 3$"),
        (torch.zeros(2, 4), r"column., row 1: expected a length of at most 4 .* found 5"),
        (torch.zeros(7), r"column.: expected 8 values end to end, or a rectangle of 2 rows, found"),
        (torch.zeros(3, 5), "found shape .3, 5.$"),
        (torch.tensor(0), r"found shape \(\)"),
    ):
        with pytest.raises(ArgumentError, match=text):
            plan.pack(column)
    with pytest.raises(ArgumentError, match=r"shape \(2, 1\) may be a rectangle of 2 rows or 2 v"):
        planned([1, 1]).pack(torch.zeros(2, 1))
    assert planned([1, 1]).pack(torch.zeros(2)).shape == (2,)
    quantized = torch.quantize_per_tensor(torch.ones(8), 1, 0, torch.qint8)
    for column in (torch.eye(2).to_sparse(), quantized, np.zeros(8)):
        with pytest.raises(ArgumentTypeError, match=r"PackPlan.pack\((column|source)\): expected"):
            plan.pack(column)
    batches = {"ids": nested([[1, 2, 3], [4, 5, 6, 7, 8]]), "other": other}
    for batch in (batches, TensorDict(batches, [2]), open_wire(encode(TensorDict(batches, [2])))):
        text = r"'other'\), row 1: expected .* 5, found 4; name it in align_end .* keep_jagged"
        with pytest.raises(ArgumentError, match=text):
            plan.pack(batch)
        assert plan.pack(batch, keep_jagged=["other"])["other"].offsets().tolist() == [0, 3, 7]
    for aligned in (torch.zeros(2), torch.zeros(2, 4), np.zeros((2, 5)), ["a", "b"]):
        with pytest.raises(JagcodecError, match=r"pack\('x'\).*: expected"):
            plan.pack({"x": aligned}, token_aligned_fields=["x"])
    with pytest.raises(
        ArgumentError, match=r"pack\(batch\): expected the 2 rows of the plan, found 3"
    ):
        plan.pack({"x": torch.zeros(3)})


@given(st.lists(st.sampled_from("abc"), max_size=3), st.booleans())
def test_a_token_aligned_name_is_packed_or_an_error_however_deep_it_is(above, is_tensor):
    """Arrays and lists are not packed."""
    tokens = torch.tensor([[1, 0], [2, 3]])
    column = tokens if is_tensor else tokens.numpy()
    batch: Any = {"x": column, "y": nested([[1], [2, 3]])}
    for name in above[::-1]:
        batch = {name: BatchedDataDict(batch)}
    key = (*above, "x") if above else "x"
    options: dict[str, Any] = {"token_aligned_fields": [key, ("no", "column"), "none"]}
    for pack in (planned([1, 2]).pack, plan_micro_batches([1, 2], max_tokens=4).pack):
        if is_tensor:
            pack(batch, **options)
        else:
            place = re.escape(f"pack('{'.'.join([*above, 'x'])}'): ")
            with pytest.raises(ArgumentTypeError, match=f"{place}expected .* found ndarray"):
                pack(batch, **options)


def test_options_of_a_column_are_not_those_of_a_batch():
    plan = planned([1, 2])
    batch, column = {"x": nested([[1], [2, 3]])}, torch.zeros(3)
    value: Any
    wrong = [("pad", value) for value in (0, 1, None, (), torch.zeros(1), False)]
    for name, value in (*wrong, ("shift", 1), ("shift", None), ("shift", ())):
        with pytest.raises(ArgumentError, match=f"expected a column with {name}, found dict"):
            plan.pack(batch, **{name: value})
    of_batch = {"pad_value_dict": {}, "labels_of": "x"}
    of_batch |= {"keep_jagged": ["x"], "token_aligned_fields": ["x"]}
    for name, value in of_batch.items():
        with pytest.raises(ArgumentError, match=f"expected a batch with {name}, found a "):
            plan.pack(column, **{name: value})
    assert_same(plan.pack(batch, pad=..., shift=0)["x"], torch.tensor([1, 2, 3]))
    for name in ("token_aligned_fields", "align_end", "keep_jagged"):
        for nothing in ((), [], set(), frozenset(), {}.keys()):
            assert_same(plan.pack(column, **{name: nothing}), column)
    for source in (3, None, "text", [1, 2], object()):
        with pytest.raises(ArgumentTypeError):
            plan.pack(source)
    with pytest.raises(ArgumentTypeError, match="expected one batch, found a list of them; conc"):
        plan.pack([batch, batch])
    with pytest.raises(ArgumentError, match=r"pack\(cp_rank\): expected a rank of 0 to 0, or None"):
        plan.pack(column, cp_rank=1)
    with pytest.raises(
        ArgumentError, match=r"position_ids\(pads\): expected one of 'zero', 'conti"
    ):
        plan.position_ids(pads="restart")
    for method in (plan.mask, plan.position_ids):
        with pytest.raises(ArgumentError, match="expected a rank of 0 to 0, or None, found -1"):
            method(-1)
    with pytest.raises(ArgumentTypeError, match=r"pad_value_dict\): expected a dict of column n"):
        plan.pack(batch, pad_value_dict=[1])
    with pytest.raises(ArgumentTypeError, match="put it in a list"):
        plan.pack(batch, keep_jagged="x")


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        (torch.tensor([3, -1]), "lengths., row 1: expected a length of 0 or more, .* found -1"),
        (torch.tensor([3.0]), "expected integer lengths, found torch.float32"),
        (torch.tensor([True]), "expected integer lengths, found torch.bool"),
        (torch.zeros(2, 2, dtype=torch.int64), r"lengths shape \(2, 2\) != \(N,\)"),
        ([3, -1], "lengths., row 1: .* found -1"),
        ([3, 1.5], "lengths., row 1: expected integer lengths, found 1.5"),
        ([True], "lengths., row 0: expected integer lengths, found True"),
        (None, "expected .N,. lengths"),
    ],
)
def test_bad_lengths_name_the_row(lengths, text):
    with pytest.raises(JagcodecError, match=text):
        planned(lengths)


def test_a_plan_is_made_of_lengths_in_any_form_and_keeps_the_offsets_of_a_jagged_tensor():
    jagged = nested([[1, 2], [3]])
    for lengths in ([2, 1], np.array([2, 1]), torch.tensor([2, 1]), jagged):
        plan = planned(lengths)
        assert plan.lengths.tolist() == [2, 1]
        assert (plan.cu_seqlens.dtype, plan.cu_seqlens.tolist()) == (torch.int32, [0, 2, 3])
        assert plan.cu_seqlens is plan.cu_seqlens_padded
    assert plan.unpack(plan.pack(jagged)).offsets() is jagged.offsets()
    moved = torch.nested.nested_tensor_from_jagged(
        torch.zeros(3, 3), torch.tensor([0, 2, 3]), jagged_dim=2
    )
    assert planned(moved).lengths.tolist() == [2, 1]
    assert repr(plan) == "PackPlan(rows=2, total=3, cp_size=1)"


def test_a_list_is_planned_without_torch_and_tensordict():
    run_python(
        """
        import jagcodec, sys
        plan = jagcodec.plan_packing([3, 5], row_multiple=4, cp_size=2)
        assert (plan.total, plan.padded_lengths.tolist(), plan.max_seqlen) == (12, [4, 8], 5)
        assert plan.layout.cu_seqlens_padded.tolist() == [0, 4, 12]
        assert not {"torch", "tensordict"} & {*sys.modules}
        assert plan.cu_seqlens.tolist() == [0, 3, 8]
        """
    )


def test_a_plan_in_a_pickle_is_the_same_plan():
    plan = planned([3, 5], row_multiple=4, cp_size=2, total=16, tail="own_row")
    column = torch.arange(8.0)
    plan.pack(column, cp_rank=1)
    again = pickle.loads(pickle.dumps(plan))
    assert torch.equal(again.pack(column, cp_rank=1), plan.pack(column, cp_rank=1))
    assert again.cu_seqlens_padded.tolist() == plan.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    even = pickle.loads(pickle.dumps(plan_packing([3, 5])))
    assert even.cu_seqlens is even.cu_seqlens_padded
    plan.lengths[:] = plan.padded_lengths[:] = plan.cu_seqlens[:] = 0
    assert plan.pack(column, cp_rank=1).tolist() == again.pack(column, cp_rank=1).tolist()


def test_a_buffer_that_does_not_fit_in_memory_is_an_error_that_names_its_shape():
    plan = planned([1, 0], total=(1 << 31) - 1, tail="own_row")
    wide = torch.zeros(1, 1).expand(1, 1 << 20)
    with pytest.raises(ArgumentError, match=r"found one of shape \(2147483647, 1048576\)"):
        plan.pack(wide)


# --- on the wire -------------------------------------------------------------------------------


def test_a_packed_column_travels_by_names_and_is_read_where_nothing_was_imported():
    column = materialize(pack_rows({"ids": [[5, 6], [7]]}), layout="packed")["ids"]
    batch = materialize(pack_rows({"ids": [[5, 6], [7]]}))
    for value in (column, batch):
        frames = [bytes(frame) for frame in encode(value)]
        code = f"import jagcodec; print(type(jagcodec.decode({frames!r})).__name__)"
        assert run_python(code).stdout.strip() == type(value).__name__
    state = column._asdict()
    for wrong in (
        tuple(column),
        {name: state[name] for name in [*state][1:]},
        {**state, "scale": 2},
        {**state, "max_seqlen": 2.0},
        {**state, "cu_seqlens": state["cu_seqlens"].float()},
    ):
        with pytest.raises(ValueError, match=r"PackedColumn|expected"):
            restore("jagcodec.PackedColumn", wrong)
    backwards = {name: state[name] for name in reversed(state)}
    assert_same(restore("jagcodec.PackedColumn", backwards), column)


@pytest.mark.parametrize("key", ["x", ("inner", "x")])
def test_memory_of_none_is_memory_that_out_lacks_for_pack_and_for_materialize(key):
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    inner = {"x": ids} if key == "x" else {"inner": TensorDict({"x": ids}, batch_size=[2])}
    batch = TensorDict(inner, batch_size=[2])
    for empty in ({"x": None}, {"inner": None}, {"inner": {"x": None}}):
        packed = plan_packing([3, 1]).pack(batch, out=empty)
        padded = materialize(batch, out=empty)
        for found, cells in ((packed, 4), (padded, 6)):
            column = found["x"] if key == "x" else found["inner"]["x"]
            assert column.numel() == cells


def test_arrays_of_micro_batches_are_copies():
    batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
    results = [rows.tolist() for steps in batches for rows in steps]
    arrays = [batches[0][0], batches.order, batches.inverse, batches.is_repeat(0, 0)]
    for written in arrays:
        before = [array.copy() for array in arrays]
        written[:] = 7
        others = [(a, b) for a, b in zip(arrays, before, strict=True) if a is not written]
        assert all(np.array_equal(a, b) for a, b in others)
    assert not batches.is_repeat(0, 0).any()
    assert batches.restore(results) == [0, 1, 2, 3, 4, 5]


def test_errors_of_restore_name_the_micro_batch():
    batches = plan_micro_batches([1, 1], rows_per_batch=1)
    for bad, text in (
        ([torch.ones(1), torch.ones(2)], r"restore\(results\[1\]\): expected 1 rows, .* found 2"),
        ([torch.ones(1), "a"], r"restore\(results\[1\]\): expected a column"),
        ([torch.ones(1), [1]], r"restore\(results\) of batch 1: expected one kind of column"),
        ([torch.ones(1), torch.ones(1, 2)], r"restore\(results\) of batch 1: expected row shape"),
    ):
        with pytest.raises(JagcodecError, match=text):
            batches.restore(bad)
