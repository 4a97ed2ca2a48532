"""Messages and parts that many tests are made of."""

from tests.wire.forge import (
    compressed,
    int64s,
    message,
    message_of_rows,
    node,
    record,
    row_message,
    sparse_coo,
    strided_nested,
    tensor,
    tensordict,
    zstd,
)

# Offsets of two rows of 2 and 3 cells, and cells behind them.
PAYLOAD = int64s(0, 2, 5) + bytes(range(40))
GROUP = [0, 0, 2, 2, 3]


def batch(leaf, rows=2):
    """A TensorDict of one column."""
    return tensordict([rows], {"a": leaf})


def sparse(indices, values, coalesced=0, shape=(3,)):
    return sparse_coo(indices, values, coalesced, shape)


def components_of(shapes, cells, rank=1, components=None):
    """Components of bytes that lie behind their shapes."""
    components = len(shapes) if components is None else components
    sizes = int64s(*(dim for shape in shapes for dim in shape or [1]))
    nested = strided_nested(cells, components, rank, (0, len(sizes)))
    return message(nested, sizes + bytes(range(cells)))


def nodes_inside(levels, leaf=None):
    """A schema of tuples in each other, `levels` of them."""
    part = tensor(shape=(0,)) if leaf is None else leaf
    for _ in range(levels):
        part = node("TUPLE", children=[part])
    return part


def documents_inside(levels, value=1):
    for _ in range(levels):
        value = record("TUPLE", value)
    return value


def rows_inside(levels, kind="OBJECT_ARRAY"):
    """Messages in rows of each other."""
    frames = message(1)
    for _ in range(levels):
        frames = message_of_rows(row_message(frames), kind=kind)
    return frames


def stacks_inside(levels, kind="LAZY_STACK"):
    part = (
        tensordict([1], {})
        if kind == "LAZY_STACK"
        else node("NON_TENSOR_DATA", 1, numbers=[1], children=["x"])
    )
    for _ in range(levels):
        part = node(kind, 0, children=[part])
    return part


# A frame of 100 bytes 07: what is stored of it.
RUN = zstd((b"\7", 100), size=100)


def of_sevens(sent, **changes):
    """A tensor of 100 bytes 07, whose frame is stored as `sent`."""
    return compressed(tensor(shape=[100]), [100], sent, **changes)


def bomb(size):
    """A tensor of `size` bytes in one frame of zstd."""
    runs = zstd(*[(b"\0", 1 << 17)] * (size >> 17), size=size)
    return compressed(tensor(shape=[size]), [size], runs)
