from typing import Any

def read(
    data: bytes, group: type, tensor: type, jagged: type, extension: type, dtypes: dict[str, int], /
) -> tuple[list[int], list[Any], bytes, list[int], dict[str, Any], int] | None: ...
def write(
    buffers: list[int],
    groups: list[Any],
    batch_size: list[int],
    leaves: dict[str, Any],
    group: type,
    tensor: type,
    jagged: type,
    extension: type,
    /,
) -> bytes | None: ...
