from typing import Any

def read(
    data: bytes, group: type, tensor: type, jagged: type, extension: type, dtypes: dict[str, int], /
) -> tuple[list[int], list[Any], bytes, tuple[list[int], dict[str, Any], int]] | None: ...
