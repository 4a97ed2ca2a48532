"""What interrupts a reader, such as the exception of a signal handler, is not the message's fault.

Python calls a signal handler between two lines of whatever runs. So does a trace function, but at
the same line each time.
"""

import contextlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from jagcodec import BatchedDataDict, WireFormatError, concat_rows, decode, encode, materialize
from jagcodec import open_wire as opened
from jagcodec.columns.batch import views_of
from jagcodec.columns.outside_errors import pass_on
from jagcodec.rows.nested import nested_tensor, parts_of
from jagcodec.rows.row_splits import RowSplits
from tests.helpers import nested
from tests.oracle import assert_same

ENABLED: list[Any] = []  # guards, each of which is kept: when it is freed, dispatch is off again


class HandlerError(Exception):
    """The exception of a handler: of a type that no library raises."""


class Ended(BaseException):
    """As `SystemExit` is one."""


def interrupted(call, at, error):
    """Raise an error before event number `at` of a call; what came of it, and the events.

    Python itself drops what is raised in a destructor or in a callback of a weak reference, which
    runs wherever memory is freed. Such an error came out of no reader: it is what came of the call.
    """
    events = 0
    dropped: list[Any] = []

    def trace(*_: Any) -> Any:
        nonlocal events
        events += 1
        if events == at:
            sys.settrace(None)
            raise error
        return trace

    before, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda args: dropped.append(args.exc_value)
    sys.settrace(trace)
    try:
        call()
    except BaseException as found:
        return found, events
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
        if (
            not torch._C._is_torch_function_enabled()
        ):  # torch was interrupted at the end of a `with`
            ENABLED.append(torch._C._EnableTorchFunction())
    return dropped[-1] if dropped else None, events


def of_every_kind():
    return TensorDict(
        {
            "jagged": nested([[1], [2, 3], [4, 5, 6]]),
            "rectangle": torch.arange(6).view(3, 2),
            "sparse": torch.eye(3).to_sparse(),
            "strided": torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 1)]),
            "objects": ["a", {"b": 1}, {"c": torch.ones(2), "d": {1, 2}}],
            "payload": NonTensorData((1, 2), batch_size=[3]),
            "inner": TensorDict({"x": torch.ones(3)}, [3]),
        },
        [3],
    )


def of_a_trainer():
    td = of_every_kind().select("jagged", "rectangle")
    packed = materialize(td, layout="packed")["jagged"]
    columns = {
        "packed": packed,
        "dict": {"x": [1, 2, 3]},
        "array": np.array([1, None, "a"], object),
    }
    return BatchedDataDict(columns, meta_info={"step": np.float32(3)})


READ: dict[str, tuple[Any, Any]] = {
    "decode": (of_every_kind, decode),
    "to_tensordict": (of_every_kind, lambda frames: opened(frames).to_tensordict()),
    "columns": (of_every_kind, lambda frames: views_of(opened(frames))),
    "materialize": (lambda: of_every_kind().select("jagged", "objects"), materialize),
    "BatchedDataDict": (of_a_trainer, decode),
    "open_wire": (of_a_trainer, lambda frames: opened(frames).to_tensordict()),
    "a join": (of_a_trainer, lambda frames: views_of(concat_rows([frames, frames]))),
}
PLACES = 50  # of each reader


@pytest.mark.parametrize("reader", READ)
@pytest.mark.parametrize("kind", [HandlerError, Ended, KeyboardInterrupt, TimeoutError])
def test_an_exception_from_outside_leaves_every_reader_as_it_is(reader, kind):
    make, read = READ[reader]
    frames = [bytearray(frame) for frame in encode(make())]
    read(frames)
    _, events = interrupted(lambda: read(frames), 0, None)
    for at in range(1, events, events // PLACES + 1):
        error = kind("from outside")
        found, reached = interrupted(lambda: read(frames), at, error)
        assert found is error or reached < at, at


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError, KeyError])
def test_a_handler_may_raise_what_libraries_raise(monkeypatch, kind):
    frames = encode(of_every_kind())
    error = kind("from outside")

    def handler(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "sparse_coo_tensor", handler)
    for call in (decode, lambda frames: opened(frames)["sparse"]):
        with pytest.raises(kind) as caught:
            call(frames)
        assert caught.value is error


def test_what_was_handled_before_is_not_the_cause():
    """A reader that is called while its caller handles an error still blames a bad message."""
    frames = encode({"s": torch.eye(3).to_sparse()})
    bad = encode(torch.eye(3).to_sparse())
    numbers = bad[1].tobytes() if hasattr(bad[1], "tobytes") else bytes(bad[1])
    forged = [bad[0], numbers.replace((2).to_bytes(8, "little"), (9).to_bytes(8, "little"))]
    assert_same(decode(frames)["s"].to_dense(), torch.eye(3))
    try:
        raise HandlerError("before")
    except HandlerError:
        with pytest.raises(WireFormatError) as caught:
            decode(forged)
    assert caught.value.reason == "bad_sparse"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes."),
    ],
)
def test_too_little_memory_is_not_blamed_on_the_message(error):
    with pytest.raises(MemoryError):
        pass_on(error)


@pytest.mark.parametrize("dim", [1, 2])
def test_what_is_raised_while_a_nested_tensor_is_made_is_not_lost(monkeypatch, dim):
    """Where torch calls Python to read sizes, it turns an exception into a TypeError."""
    node = pytest.importorskip("torch.nested._internal.nested_int").NestedIntNode
    values = torch.arange(3) if dim == 1 else torch.arange(6).view(2, 3)
    calls, stop_at = 0, 0
    is_int = node.is_int

    def interrupted_once(self):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return is_int(self)

    monkeypatch.setattr(node, "is_int", interrupted_once)
    made = None
    while made is None:
        calls, stop_at = 0, stop_at + 1
        with contextlib.suppress(KeyboardInterrupt):
            made = nested_tensor(values, RowSplits.from_lengths(np.array([1, 2])), dim)
    monkeypatch.undo()
    assert [row.shape[dim - 1] for row in made.unbind()] == [1, 2]


def test_reading_a_nested_tensor_never_leaves_the_dispatch_of_torch_off():
    jagged, at = nested([[1], [2, 3]]), 0
    found: Any = HandlerError()
    known = len(ENABLED)
    while found is not None:
        at += 1
        found, _ = interrupted(lambda: parts_of(jagged, detach=False), at, HandlerError())
        assert len(ENABLED) == known
    assert at > 3
