"""Inside a function that `torch.compile` compiles, everything is as it is outside."""

import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import jagcodec
from jagcodec import decode, plan_packing
from jagcodec.testing import is_same
from tests.helpers import nested
from tests.test_arguments import CALLS, call, named, places  # noqa: F401

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="torch 2.6 has no way to leave the frames of a function alone",
)


@pytest.fixture(autouse=True)
def compiled_from_nothing():
    torch._dynamo.reset()


def compiled(function, *positional, **named):
    """Call a function inside a compiled one, with graphs before and behind it."""

    @torch.compile(backend="eager")
    def step(x):
        doubled = x * 2
        result = function(*positional, **named)
        return doubled + 1, result

    graph, result = step(torch.ones(2))
    assert torch.equal(graph, torch.full((2,), 3.0))
    return result


def values_of(result):
    """What can be compared of the result of a call."""
    match result:
        case jagcodec.WireBatch():
            return result.to_tensordict()
        case jagcodec.RowBuilder():
            return result.to_row()
        case jagcodec.PackPlan():
            return result.position_ids()
        case jagcodec.MicroBatches():
            return list(result), result.report()
        case Iterator():
            return [values_of(each) for each in result]
        case tuple() | list() if not hasattr(result, "_fields"):
            return [values_of(each) for each in result]
    known = type(result).__eq__ is not object.__eq__ or isinstance(result, (dict, torch.Tensor))
    return result if known or hasattr(result, "batch_size") else type(result)


def functions_of(value):
    members = vars(value).values() if inspect.isclass(value) else [value]
    for member in members:
        function = getattr(member, "fget", getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield function


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_is_marked(name):
    for function in functions_of(named(name)):
        assert inspect.getattr_static(function, "_torchdynamo_disable", False), function


# TorchDynamo cannot hold a read-only array of numpy, which the rest of the function has here.
READ_ONLY = {"integrations.json_arrays.array_of_envelope"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*CALLS} - READ_ONLY))
def test_a_call_returns_what_it_returns_outside(name, places):  # noqa: F811
    expected = values_of(call(name, CALLS[name]))
    assert is_same(values_of(call(name, CALLS[name], compiled)), expected)


@pytest.mark.parametrize("message", [b"", b"no message", [b"\x84\xa8jagcodec"], 7])
def test_an_error_is_the_error_outside(message):
    with pytest.raises(jagcodec.JagcodecError) as expected:
        decode(message)
    with pytest.raises(type(expected.value)) as found:
        compiled(decode, message)
    assert str(found.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # TorchDynamo asks for it
def test_gradients_pass_through_a_plan():
    plan = plan_packing([2, 3])
    column = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    weight = torch.tensor(2.0, requires_grad=True)

    @torch.compile(backend="eager")
    def loss(weight):
        packed = plan.pack({"x": column * weight})["x"]
        return plan.unpack(packed * weight).values().sum()

    loss(weight).backward()
    assert weight.grad == 20.0  # 5 cells of the square of the weight


def test_a_second_call_is_not_compiled_again():
    counts = torch._dynamo.testing.CompileCounter()
    plan = plan_packing([2, 3])

    @torch.compile(backend=counts)
    def step(x, batch):
        y = x + 1
        return plan.pack(batch)["ids"] + y, plan.position_ids()

    batches = [{"ids": nested([[k, 2], [3, 4, 5]])} for k in range(12)]
    found = [step(torch.zeros(5), batch)[0] for batch in batches]
    assert [each[0] for each in found] == [k + 1 for k in range(12)]
    assert counts.frame_count <= 3  # before the first call, between the two, and behind them


# Names that are imported before torch, and asked for first inside the compiled function. Nothing
# here has imported tensordict, with which TorchDynamo comes.
FIRST = """
import numpy as np
from jagcodec import encode_rows, open_wire
import jagcodec
import torch
import sys

assert "torch._dynamo" not in sys.modules
rows = [{"ids": np.arange(3), "call": {"a": 1}}, {"ids": np.arange(2), "call": None}]

@torch.compile(backend="eager")
def step(x):
    y = x + 1
    frames = encode_rows(rows, elide=True)
    batch = open_wire(jagcodec.to_blob(frames))
    return y * 2, frames, jagcodec.to_rows(batch), jagcodec.plan_packing([3, 2]).position_ids()

assert "tensordict" not in sys.modules
y, frames, found, positions = step(torch.zeros(2))
assert y.tolist() == [2.0, 2.0] and positions.tolist() == [0, 1, 2, 0, 1]
assert [row["ids"].tolist() for row in found] == [[0, 1, 2], [0, 1]], found
assert [row["call"] for row in found] == [{"a": 1}, None], found
assert [bytes(frame) for frame in frames] == [
    bytes(frame) for frame in encode_rows(rows, elide=True)
]
"""


def test_names_that_came_before_torch():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
