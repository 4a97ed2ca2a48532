"""A device of the test suite's own, so that what is written for GPUs runs without one.

Tensors on `DEVICE` are real dense tensors of PyTorch's PrivateUse1 backend. As on a GPU,

* their addresses mean nothing to the host: reading one is a crash, not a wrong number;
* a copy to the host made with `non_blocking=True` is not there before its stream was waited for;
* whatever else brings numbers to the host waits, and waits are counted: see `watch`.

The kernels are the CPU's, run on memory that only they can find. Nothing else in the process
changes: PyTorch still reports no accelerator. That is why there is no backward pass on it.
"""

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch.utils._pytree import tree_map

from benchmarks.gpu import cuda_waits

KIND = "privateuseone"
DEVICE = torch.device(KIND, 0)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [
    pytest.param(DEVICE, id="own"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=[pytest.mark.cuda, needs_cuda]),
]


@dataclass
class Traffic:
    """What went from the device to the host."""

    fetched: list[int] = field(default_factory=list)  # the bytes of each copy
    waits: int = 0


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Traffic]:
    """Gives an object whose `waits` at the end says how often the device was waited for."""
    if device == DEVICE:
        with watch() as traffic:
            yield traffic
        return
    traffic = Traffic()
    with cuda_waits() as waits:
        yield traffic
    traffic.waits = len(waits)


def install() -> None:
    """Make the device known to PyTorch, once per process; skips the test where it cannot."""
    if not hasattr(torch._C, "_acc"):
        pytest.skip("this PyTorch takes no device written in Python")
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, _module())
        torch._C._acc.register_python_privateuseone_device_guard(_GUARD)
        _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
        _FALLBACK.fallback(_run, "PrivateUse1")


@contextlib.contextmanager
def watch() -> Iterator[Traffic]:
    """Record what is copied to the host, and how often it is waited for."""
    global _traffic
    former, _traffic = _traffic, Traffic()
    try:
        yield _traffic
    finally:
        _traffic = former


# --- memory: addresses without meaning to the host ---------------------------------------------

_AWAY = 1 << 60  # how far an address is from the memory: no process can have any there
_EXTERNAL_DEVICE = 12  # kDLExtDev, which PyTorch reads as PrivateUse1

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _device_bytes(memory: torch.Tensor) -> torch.Tensor:
    """A new tensor on the device, whose memory is a tensor of bytes that no one else has.

    DLPack is the only public way to a tensor there. Its structure begins with the address and the
    device: https://dmlc.github.io/dlpack/latest/c_api.html.
    """
    capsule = memory.__dlpack__()
    place = _pointer_of(capsule, b"dltensor")
    ctypes.c_uint64.from_address(place).value += _AWAY
    ctypes.c_int32.from_address(place + 8).value = _EXTERNAL_DEVICE
    return torch.utils.dlpack.from_dlpack(capsule)


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh CPU tensor, as a kernel returns it, as one on the device."""
    tensor = tensor.resolve_conj().resolve_neg()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    items = whole.numel() // tensor.itemsize * tensor.itemsize
    cells = _device_bytes(whole[:items]).view(tensor.dtype)
    return cells.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a kernel sees it."""
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8)
    if storage.nbytes():
        there: Any = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr() - _AWAY)
        there.owner = storage  # which lives as long as anyone reads its memory
        memory = torch.frombuffer(there, dtype=torch.uint8)
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    cells = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), *place)
    cells = cells.conj() if tensor.is_conj() else cells
    return torch._neg_view(cells) if tensor.is_neg() else cells


# --- the stream: what was promised, and the wait for it ----------------------------------------

_traffic = Traffic()
_promised: list[Callable[[], object]] = []


def _wait() -> None:
    _traffic.waits += 1
    while _promised:
        _promised.pop(0)()


_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _cells(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one dtype as plain bits: not every dtype can be copied by the CPU's kernel."""
    (width, *others) = {tensor.itemsize for tensor in tensors}
    alike = len({tensor.dtype for tensor in tensors}) == 1 and width in _WIDTHS and not others
    if alike and not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return tuple(tensor.view(_WIDTHS[width]) for tensor in tensors)
    return tensors


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    to_host = source.device == DEVICE and target.device != DEVICE
    read, written = _cells(*(_to_cpu(x) if x.device == DEVICE else x for x in (source, target)))
    if not to_host:
        written.copy_(read)
        return target
    _traffic.fetched.append(source.nbytes)
    if non_blocking:
        # The device's memory may be written again before that; its stream keeps the order.
        read = read.clone()
        _promised.append(lambda: written.copy_(read))
    else:
        _wait()
        written.copy_(read)
    return target


def _module() -> types.ModuleType:
    """What PyTorch and this library ask of `torch.<device>`, as `torch.cuda` has it."""
    module: Any = types.ModuleType(f"torch.{KIND}")
    constants: dict[str, object] = {"_is_in_bad_fork": False, "_lazy_init": None}
    constants |= {"current_device": 0, "device_count": 1, "manual_seed_all": None}
    constants |= {"is_available": True, "is_initialized": True}
    for name, value in constants.items():
        setattr(module, name, lambda *args, value=value: value)
    module.synchronize = lambda device=None: _wait()
    module.current_stream = lambda device=None: types.SimpleNamespace(synchronize=_wait)
    return module


# --- kernels: those of the CPU -----------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LIBRARY = torch.library.Library("aten", "IMPL")
_FALLBACK = torch.library.Library("_", "IMPL")
# The shape of their result lies in memory.
_WAITING = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"}

if hasattr(torch._C, "_acc"):

    class _Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    _GUARD = _Guard()


def _run(op: Any, *args: Any, **options: Any) -> Any:
    returns = op._schema.returns
    if op._schema.name == "aten::set_" or any(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    ):
        # A view of the same storage, which no kernel reads.
        return op.redispatch(_CPU, *args, **options)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and as the kernel sees it

    def lowered(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device == DEVICE:
            seen.append((value, _to_cpu(value)))
            return seen[-1][1]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def lifted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for original, alias in seen:
            if value is alias:
                return original
        return _to_device(value)

    result = op(*tree_map(lowered, args), **tree_map(lowered, options))
    if op._schema.name.removeprefix("aten::") in _WAITING or (
        returns and not isinstance(result, (torch.Tensor, tuple, list))
    ):
        _wait()
    for original, alias in seen:
        if alias.shape != original.shape:  # an `out` that was made larger
            new = _to_device(alias)
            original.set_(new.untyped_storage(), 0, new.shape, new.stride())
    return tree_map(lifted, result)


# Torch has no kernel that copies these to a GPU, or anywhere.
_LESS_THAN_A_BYTE = tuple(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


def on_device(value: Any, device: torch.device = DEVICE) -> Any:
    """A value with its tensors on a device, in new containers.

    Sparse and strided nested ones stay, which `DEVICE` cannot hold.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        sparse_or_nested = tensor.layout is not torch.strided or tensor.is_nested
        if device == DEVICE and sparse_or_nested and tensor.layout is not torch.jagged:
            return tensor
        there: Any = tensor.detach()
        if str(tensor.dtype) in _LESS_THAN_A_BYTE:
            if tensor.layout is torch.jagged:
                offsets, lengths = (
                    part if part is None else part.to(device)
                    for part in (there.offsets(), there.lengths())
                )
                values, dim = moved(there.values()), there._ragged_idx
                return torch.nested.nested_tensor_from_jagged(
                    values, offsets, lengths, jagged_dim=dim
                )
            return there.view(torch.uint8).to(device).view(tensor.dtype)
        there = there.to(device)
        return torch.nn.Parameter(there, False) if type(tensor) is torch.nn.Parameter else there

    return with_tensors(value, moved)


def with_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with its tensors replaced, in new containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is TensorDict:
        leaves = {name: with_tensors(value.get(name), function) for name in value.keys()}  # noqa: SIM118
        return TensorDict(leaves, batch_size=value.batch_size, names=value.names)
    if type(value) is LazyStackedTensorDict:
        members = [with_tensors(member, function) for member in value.tensordicts]
        return LazyStackedTensorDict(*members, stack_dim=value.stack_dim)
    if type(value) is NonTensorData:
        return NonTensorData(with_tensors(value.data, function), batch_size=value.batch_size)
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: with_tensors(item, function) for key, item in value.items()}
    if type(value) is slice:
        return slice(*(with_tensors(x, function) for x in (value.start, value.stop, value.step)))
    return value
