"""Tensors and arrays of subclasses, and tensors without values, at every door: one rule."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import MemoryMappedTensor, TensorDict

from jagcodec import (
    BatchedDataDict,
    JagcodecError,
    RowBuilder,
    concat_rows,
    decode,
    encode,
    encode_fields,
    encode_rows,
    join_columns,
    materialize,
    maybe_pack_jagged,
    pack_jagged_fields,
    pack_per_token_field,
    pack_rows,
    padding_tax,
    register_type,
    repeat_rows,
    response_from_nested,
    select_rows,
    split_rows,
    stack_or_nest,
    to_nested_by_length,
    to_rows,
)
from jagcodec.memory.plain_types import TENSOR_TYPES
from jagcodec.wire import registry
from tests import odd
from tests.helpers import nested
from tests.oracle import assert_same

IDS = torch.tensor([[5, 6, 0], [7, 8, 9]])


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed(tensor):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)))


def waited_for(tensor):
    from torch.distributed import _functional_collectives as collectives

    return collectives.AsyncCollectiveTensor(tensor)


# What makes each kind of a plain tensor, and the remedy.
KINDS: dict[str, tuple[Any, str]] = {
    "DTensor": (distributed, r"DTensor.*; call \.full_tensor\(\) first"),
    "AsyncCollectiveTensor": (waited_for, r"call \.wait\(\) first"),
    "MaskedTensor": (lambda x: odd.masked(x.tolist()), r"call \.to_tensor\(fill\) first"),
    "FakeTensor": (lambda x: odd.fake(*x.shape), "has no values; leave FakeTensorMode first"),
    "uninitialised": (
        lambda x: torch.nn.parameter.UninitializedBuffer(),
        "no values yet; run its module once first",
    ),
    "own": (odd.own, r"call \.as_subclass\(torch\.Tensor\) first"),
    "own parameter": (
        lambda x: torch.nn.Parameter(odd.own(x.float())),
        r"call \.as_subclass\(torch\.Tensor\) first",
    ),
    "meta": (lambda x: x.to("meta"), "a meta tensor has no values; make it on another device"),
    "freed": (odd.freed, "its storage was made smaller than its cells.*gather it"),
    "MaskedArray": (lambda x: np.ma.masked_array(x.numpy()), r"call \.filled\(fill\) first"),
    "matrix": (lambda x: np.matrix(x.numpy()), r"call numpy\.asarray\(x\) first"),
    "own array": (lambda x: x.numpy().view(odd.OwnArray), r"call numpy\.asarray\(x\) first"),
    "recarray": (
        lambda x: np.zeros(len(x), "i4,f8").view(np.recarray),
        "make a dict of its fields",
    ),
}
ARRAYS = {"MaskedArray", "matrix", "own array", "recarray"}
WITHOUT_VALUES = {"meta", "freed"}  # which have a shape, and so can be passed on as they are


def grown(column):
    row = RowBuilder()
    row.append(x=column)
    return row.to_frames()


def kept(column):
    row = RowBuilder()
    row.set(x=column)
    return row.to_frames()


JAGGED = nested([[1], [2, 3]])
DOORS: dict[str, Any] = {
    "pack_jagged_fields": lambda x: pack_jagged_fields({"x": x}, lengths=[1, 3]),
    "pack_jagged_fields, rectangle": lambda x: pack_jagged_fields({"x": x}),
    "encode_fields": lambda x: encode_fields({"x": x}, lengths=[1, 3]),
    "encode_fields, rectangle": lambda x: encode_fields({"x": x}),
    "encode_fields, mask": lambda x: encode_fields({"y": IDS}, mask=x),
    "pack_rows": lambda x: pack_rows([{"x": x}]),
    "pack_rows, columns": lambda x: pack_rows({"x": x}),
    "pack_rows, dtype": lambda x: pack_rows([{"x": x}], dtypes={"x": torch.float32}),
    "pack_rows, a second row": lambda x: pack_rows([{"x": IDS}, {"x": x}]),
    "encode_rows": lambda x: encode_rows([{"x": x}]),
    "encode_rows, columns": lambda x: encode_rows({"x": x}),
    "encode_rows, several": lambda x: encode_rows([{"x": x}, {"x": x}]),
    "RowBuilder.append": grown,
    "RowBuilder.set": kept,
    "to_nested_by_length": lambda x: to_nested_by_length(x, [1, 3]),
    "maybe_pack_jagged": lambda x: maybe_pack_jagged(x, [1, 3]),
    "pack_per_token_field": lambda x: pack_per_token_field(x, [1, 3]),
    "stack_or_nest": lambda x: stack_or_nest([x, x]),
    "materialize": lambda x: materialize({"x": x}),
    "materialize, padded": lambda x: materialize({"x": x}, pad_to_seqlen=4),
    "materialize, moved": lambda x: materialize({"x": x}, device="cpu"),
    "select_rows": lambda x: select_rows({"x": x}, [1, 0]),
    "select_rows, a slice": lambda x: select_rows({"x": x}, slice(1)),
    "repeat_rows": lambda x: repeat_rows({"x": x}, 2),
    "split_rows": lambda x: split_rows({"x": x}, 2),
    "concat_rows": lambda x: concat_rows([{"x": x}, {"x": x}]),
    "join_columns": lambda x: join_columns([{"x": x}, {"y": IDS}]),
    "to_rows": lambda x: to_rows({"x": x}),
    "to_rows, lists": lambda x: to_rows({"x": x}, as_="list"),
    "BatchedDataDict": lambda x: BatchedDataDict(x=x),
    "BatchedDataDict, set": lambda x: BatchedDataDict(y=IDS).update(x=x),
    "encode": lambda x: encode({"x": x}),
    "encode, in objects": lambda x: encode({"x": np.array([None, {"x": x}], dtype=object)}),
}
OF_TENSORS = {"to_nested_by_length", "maybe_pack_jagged", "pack_per_token_field", "stack_or_nest"}
PASS_ON = {"join_columns", "materialize", "materialize, moved", "to_rows", "split_rows"}
PASS_ON |= {"select_rows, a slice", "BatchedDataDict", "BatchedDataDict, set"}
PASS_ON_META = PASS_ON | {"select_rows", "repeat_rows", "concat_rows", "materialize, padded"}


def answer(call, column):
    """The error of a door, or None if it lets a column pass."""
    try:
        call(column)
    except JagcodecError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_door_refuses_every_kind_with_its_remedy(kind):
    (make, remedy), passed = KINDS[kind], set()
    for door, call in DOORS.items():
        if kind in ARRAYS and door in OF_TENSORS:
            continue
        error = answer(call, make(IDS.clone()))
        if error is None:
            passed.add(door)
        else:
            assert re.search(remedy, error.detail), (door, str(error))
            assert re.search(r"x|mask|\(\w+\)|\(tensors\[0\]\)", error.path), (door, error.path)
    if kind in ARRAYS:
        assert passed <= {"pack_rows"}  # of which it is a row, as any other Python value
    else:
        assert passed <= {"meta": PASS_ON_META, "freed": PASS_ON}.get(kind, set())


JAGGED_DOORS: dict[str, Any] = {
    "pack_jagged_fields": lambda x: pack_jagged_fields({"x": x}),
    "pack_jagged_fields, lengths": lambda x: pack_jagged_fields({"y": IDS}, lengths=x),
    "encode_fields": lambda x: encode_fields({"x": x}),
    "response_from_nested": lambda x: response_from_nested(x, nested([[1], [2]])),
    "response_from_nested, mask": lambda x: response_from_nested(nested([[1, 2], [3, 4]]), x),
    "materialize": lambda x: materialize({"x": x}),
    "materialize, packed": lambda x: materialize({"x": x}, layout="packed"),
    "select_rows": lambda x: select_rows({"x": x}, [1, 0]),
    "concat_rows": lambda x: concat_rows([{"x": x}, {"x": x}]),
    "to_rows": lambda x: to_rows({"x": x}),
    "encode": lambda x: encode({"x": x}),
    "join_columns": lambda x: join_columns([{"x": x}, {"y": IDS}]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["own", "meta", "freed"])
def test_so_do_jagged_columns_of_such_cells(kind):
    make, remedy = KINDS[kind]
    for door, call in JAGGED_DOORS.items():
        values = make(torch.arange(3.0))
        offsets = torch.tensor([0, 1, 3], device=values.device)
        error = answer(call, torch.nested.nested_tensor_from_jagged(values, offsets))
        assert error is not None, door
        assert re.search(remedy, error.detail), (door, str(error))


NUMBERS: dict[str, Any] = {
    "lengths": lambda x: to_nested_by_length(IDS, x),
    "lengths, split_rows": lambda x: split_rows({"y": IDS}, max_tokens=9, lengths=x),
    "lengths, padding_tax": padding_tax,
    "index": lambda x: select_rows({"y": IDS}, x),
    "times": lambda x: repeat_rows({"y": IDS}, x),
    "sizes": lambda x: split_rows({"y": IDS}, sizes=x),
    "prompt_lengths": lambda x: materialize(
        {"y": JAGGED}, padding_side="left_right", prompt_lengths=x
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_numbers_that_callers_pass(kind):
    make, remedy = KINDS[kind]
    for door, call in NUMBERS.items():
        with pytest.raises(JagcodecError) as caught:
            call(make(torch.tensor([1, 1])))
        assert re.search(remedy, caught.value.detail), (door, str(caught.value))
        assert door.partition(",")[0] in caught.value.path or door.endswith("tax")


PLAIN: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.Tensor: lambda x: x,
    torch.nn.Parameter: lambda x: torch.nn.Parameter(x, requires_grad=False),
    torch.nn.Buffer: torch.nn.Buffer,
    MemoryMappedTensor: MemoryMappedTensor.from_tensor,
}


def result(call, tensor):
    """What a door makes of a tensor, without types of memory that the wire does not keep."""
    made = call(tensor)
    if isinstance(made, list) and not isinstance(made[0], (torch.Tensor, dict, TensorDict)):
        return decode(made)
    return made


def test_the_plain_types_are_those_that_every_door_accepts():
    assert set(PLAIN) == TENSOR_TYPES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", PLAIN)
def test_every_door_takes_every_plain_type_for_the_same(kind, door):
    tensor = IDS % 2  # a mask, too
    assert_same(result(DOORS[door], PLAIN[kind](tensor.clone())), result(DOORS[door], tensor))


@pytest.mark.parametrize("door", NUMBERS)
@pytest.mark.parametrize("kind", PLAIN)
def test_so_does_who_reads_numbers(kind, door):
    ones = torch.tensor([1, 1])
    assert_same(result(NUMBERS[door], PLAIN[kind](ones)), result(NUMBERS[door], ones))


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_so_do_tensors_inside_transforms_of_torch(transform):
    refused = []

    def probe(x):
        for name in ("pack_jagged_fields", "encode_fields", "encode_rows", "pack_rows", "encode"):
            with pytest.raises(JagcodecError) as caught:
                DOORS[name](x)
            refused.append(caught.value.detail)
        return x.sum()

    function = torch.vmap if transform == "vmap" else getattr(torch.func, transform)
    function(probe)(torch.ones(2, 2, 3))
    assert len(refused) == 5
    for detail in refused:
        assert re.search("no memory of its own|storage was made smaller", detail), detail


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6, on a CPU
def test_what_is_registered_or_replaced_is_encoded(monkeypatch):
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_name_of", dict(registry._name_of))
    values: dict[str, Any] = {"x": odd.own(IDS), "y": distributed(IDS)}
    replaced = decode(encode(values, default=plain))
    assert_same(replaced, {"x": IDS, "y": IDS})
    batch = TensorDict({"x": odd.own(IDS)}, batch_size=[2])
    assert_same(decode(encode(batch, default=plain)), TensorDict({"x": IDS}, batch_size=[2]))
    rows = [{"x": odd.own(IDS)}, {"x": odd.own(IDS)}]
    assert_same(decode(encode_rows(rows, default=plain)).get("x").tolist(), [IDS, IDS])
    register_type(odd.OwnTensor, to_state=plain, from_state=odd.own)
    for back in (decode(encode({"x": odd.own(IDS)}))["x"], pack_rows(rows).get("x").tolist()[1]):
        assert type(back) is odd.OwnTensor
        assert_same(plain(back), IDS)
    with pytest.raises(JagcodecError, match="as_subclass"):  # as a column it is still none
        select_rows({"x": odd.own(IDS)}, [0])


def plain(tensor):
    return (
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.as_subclass(torch.Tensor)
    )
