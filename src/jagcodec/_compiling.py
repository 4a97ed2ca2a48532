"""`untraced`: inside a function that `torch.compile` compiles, public functions run as they are.

TorchDynamo traces a function and all that it calls. Here it would find numpy, views of bytes and
private parts of nested tensors, which it cannot trace, or which it rebuilds as something else. So
a call of a public function breaks the graph, and neither its frame nor those below it are traced.
`torch.compiler.disable` does the same, but it imports torch and wraps the function.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

Marked = TypeVar("Marked")

_REASON = "jagcodec works on bytes and numpy arrays, which a graph cannot hold"
_codes: list[CodeType] = []


def untraced(marked: Marked) -> Marked:
    """Mark a public function, or all methods of a class, as one that a graph must not hold."""
    for function in _functions_of(marked):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        _codes.append(function.__code__)
        if "torch._dynamo" in sys.modules:
            _skip_frames()
    return marked


def _functions_of(marked: object) -> Iterator[FunctionType]:
    members = vars(marked).values() if isinstance(marked, type) else (marked,)
    for member in members:
        for attribute in ("fget", "__func__", "func"):  # property, class method, cached_property
            member = getattr(member, attribute, member)
        if isinstance(member, FunctionType):
            yield member


def _skip_frames() -> None:
    """Tell TorchDynamo not to trace the frames of marked functions, nor the frames below them.

    torch 2.6 has no function for this. There, a marked function breaks the graph, and is traced.
    """
    dynamo: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    while _codes:
        dynamo.set_code_exec_strategy(_codes.pop(), skip)


class _ImportOfDynamo:
    """Notices the import of `torch._dynamo`, before which no frame is traced. Finds no module."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torch._dynamo":
            _skip_frames()


sys.meta_path.insert(0, _ImportOfDynamo)
