from collections.abc import Callable, Sequence
from typing import Any

def fill(
    rows: Sequence[Sequence[Any]],
    codes: str,
    precision: int,
    convert: Callable[[Any], Any] | None,
    /,
) -> tuple[str, bytearray, tuple[int, ...], tuple[int, int] | None] | None: ...
def narrow_list(numbers: list[Any], /) -> tuple[str, bytes] | None: ...
def is_native(
    rows: Sequence[Any], levels: int, short_bytes: int, short_list: int, most_items: int, /
) -> bool: ...
