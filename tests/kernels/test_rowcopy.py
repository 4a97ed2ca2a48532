"""Row copies against rows of plain bytes, by every backend; then what only the compiled has."""

import importlib.util
import math
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import kernels
from jagcodec.kernels import numpy_kernel
from jagcodec.rows.copy_rows import gather_by_torch, pad_by_torch
from tests.helpers import run_python

try:
    compiled: Any = importlib.import_module("jagcodec.kernels._kernel")
except ImportError:
    compiled = None
needs_compiled = pytest.mark.skipif(compiled is None, reason=str(kernels.backend().missing))
KERNELS = [
    pytest.param(compiled, marks=needs_compiled, id="compiled"),
    pytest.param(numpy_kernel, id="numpy"),
]

# (dtype, trailing shape): cells of 1, 2, 4, 8 and 16 bytes, and odd ones.
CELLS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    *((getattr(torch, name), ()) for name in ("uint8", "bfloat16", "int32", "int64", "complex128")),
    *((torch.float8_e4m3fn, (3,)), (torch.uint16, (5,)), (torch.float64, (3,))),
    (torch.int64, (2, 0)),
]


def ints(numbers):
    return np.array(numbers, dtype=np.int64)


def tensor(data, dtype, shape):
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def raw(tensor):
    if not tensor.numel():
        return b""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def padded(rows, left, width, pad):
    """The bytes of a rectangle of these rows, whose cells are as long as `pad`."""
    ends = [width - a - len(row) // (len(pad) or 1) for row, a in zip(rows, left, strict=True)]
    parts = zip(left, rows, ends, strict=True)
    return b"".join(pad * a + row + pad * end for a, row, end in parts)


@given(st.data())
def test_torch_gathers_and_pads(data):
    """Rows in any order, overlapping, repeated, empty. On the CPU as on an accelerator."""
    dtype, trailing = data.draw(st.sampled_from(CELLS))
    elements, width = math.prod(trailing), data.draw(st.integers(0, 8))
    size, count = dtype.itemsize * elements, data.draw(st.integers(0, 12))
    memory = data.draw(st.binary(min_size=count * size, max_size=count * size))
    lengths = data.draw(st.lists(st.integers(0, min(count, width)), max_size=6))
    starts = [data.draw(st.integers(0, count - n)) for n in lengths]
    rows = [memory[a * size : (a + n) * size] for a, n in zip(starts, lengths, strict=True)]
    args = (tensor(memory, dtype, (count, *trailing)), ints(starts), ints(lengths))
    result = gather_by_torch(*args, {})
    assert (raw(result), result.dtype) == (b"".join(rows), dtype)
    assert result.shape == (sum(lengths), *trailing)

    places = data.draw(st.booleans())
    left = [data.draw(st.integers(0, width - n)) if places else 0 for n in lengths]
    some = st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    pad_bits = data.draw(st.just(bytes(dtype.itemsize)) | some)
    rectangle = padded(rows, left, width, pad_bits * elements)
    for fresh in (False, True):
        before = (
            pad_bits * (len(rectangle) // dtype.itemsize) if fresh else b"\x5a" * len(rectangle)
        )
        out = tensor(before, dtype, (len(rows), width, *trailing))
        values, at = gather_by_torch(*args, {}), ints(left) if places else None
        result = pad_by_torch(values, ints(lengths), out, at, pad_bits, {}, fresh)
        assert result.data_ptr() == out.data_ptr()
        assert (raw(result), result.shape) == (rectangle, out.shape)
    assert raw(args[0]) == memory


def check_tasks(kernel, columns, threads):
    """Copies to a row of rows, and from one or anywhere to a rectangle; pads; of all columns."""
    copies, pads, expected = [], [], []
    for source, starts, rows, left, width, size, pad in columns:
        cell, lengths = pad * (size // len(pad)), ints([len(row) // size for row in rows])
        packed, fresh = b"".join(rows), cell * (width * len(rows))
        rectangle = padded(rows, [0] * len(rows) if left is None else left, width, cell)
        filled = (b"\x5a" * len(packed), b"\x5a" * len(rectangle), fresh, fresh + b"\x5a" * size)
        outs = [np.frombuffer(before, np.uint8).copy() for before in filled]
        task = kernels.Pad(outs[1], source, starts, lengths, left, width, size, pad)
        end_to_end: Any = {"src": np.frombuffer(packed, np.uint8), "src_starts": None}
        copies += [kernels.Copy(outs[0], source, None, starts, lengths, size)]
        copies += [kernels.rows_only(task)._replace(dst=outs[2], **end_to_end)]
        copies += [kernels.rows_only(task)._replace(dst=outs[3])]
        pads.append(task)
        wanted = packed, rectangle, rectangle, rectangle + b"\x5a" * size
        expected += zip(outs, wanted, strict=True)
    kernel.copy(copies, threads)
    kernel.pad(pads, threads)
    for found, wanted in expected:
        assert found.tobytes() == wanted


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.data(), st.integers(1, 3))
def test_tasks_of_a_batch(kernel, data, threads):
    """Rows in one buffer, or in several, where starts count bytes; some end to end or by stride."""
    buffers = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
    several = tuple(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers)
    bases = np.cumsum([0, *map(len, buffers)]).tolist()
    columns: list[Any] = []
    for _ in range(data.draw(st.integers(0, 3))):
        size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 24]))
        pad = data.draw(st.binary(min_size=1, max_size=1) | st.binary(min_size=size, max_size=size))
        pad = pad[:16] if size % min(len(pad), 16) == 0 else pad[:1]
        rows = data.draw(st.integers(0, 5))
        which = [data.draw(st.integers(0, len(buffers) - 1)) for _ in range(rows)]
        unit = 1
        source: Any = several
        if data.draw(st.booleans()):  # one of them, whose starts count cells
            which, unit = [0] * rows, size
            source = several[0][: len(buffers[0]) // size * size]
        at, lengths, cells = [], [], []
        for i in which:
            end = len(buffers[i]) // size * size if unit > 1 else len(buffers[i])
            start = data.draw(st.integers(0, end // unit))
            lengths.append(data.draw(st.integers(0, (end - start * unit) // size)))
            cells.append(buffers[i][start * unit :][: lengths[-1] * size])
            at.append(start + (bases[i] if unit == 1 else 0))
        width = data.draw(st.integers(0, 3)) + max(lengths, default=0)
        left = ints([data.draw(st.integers(0, width - n)) for n in lengths])
        left = data.draw(st.sampled_from([left, None]))
        columns.append((source, ints(at), cells, left, width, size, pad))
    check_tasks(kernel, columns, threads)


# --- large batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 200])
@pytest.mark.parametrize("kernel", KERNELS)
def test_columns_of_a_batch_are_copied_together(kernel, threads):
    """Tasks of every size, some empty, whose parts the threads take in turns."""
    rng = np.random.default_rng(2)
    columns = []
    for rows, width, size, pad in [
        *((3, 5, 8, b"\1\2"), (0, 4, 1, b"\1"), (700, 900, 8, bytes(8)), (9, 0, 2, b"ab")),
        *((400, 1009, 48, b"abc"), (64, 1000, 16, bytes(range(16))), (3, 300_000, 8, b"12345678")),
    ]:
        lengths = rng.integers(0, width + 1, rows)
        lengths[:1], lengths[1:2] = width, 0  # the first row is much of the work
        cells = rng.integers(0, 256, (rows, width, size), dtype=np.uint8)
        kept = [row[:n].tobytes() for row, n in zip(cells, lengths, strict=True)]
        by_stride: Any = (width, None)
        by_place = np.arange(rows) * width, rng.integers(0, width - lengths + 1)
        starts, left = by_place if size > 8 else by_stride
        columns.append((cells, starts, kept, left, width, size, pad))
    check_tasks(kernel, columns, threads)


def ends_of(row):
    """How many equal cells a row begins with, and how many follow before those it ends with."""
    changes = [i for i in range(1, len(row)) if row[i] != row[i - 1]]
    return (changes[0], changes[-1] - changes[0]) if changes else (0, 0)


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.data())
def test_ends_are_those_of_each_row(kernel, data):
    cell, width = data.draw(st.sampled_from([1, 2, 3, 8, 16, 24])), data.draw(st.integers(1, 7))
    kinds = [bytes([i]) * (cell - 1) + b"\x05" for i in range(2)] + [b"\x05" * cell]
    rows = data.draw(
        st.lists(
            st.lists(st.sampled_from(kinds), min_size=width, max_size=width)
            | st.sampled_from(kinds).map(lambda kind: [kind] * width),
            max_size=5,
        )
    )
    stride = width + data.draw(st.integers(0, 2))
    gap = b"\x09" * (cell * (stride - width))
    source = np.frombuffer(gap.join(b"".join(row) for row in rows), dtype=np.uint8)
    starts, lengths = np.full(len(rows), -7), np.full(len(rows), -7)
    kernel.ends([(source, stride, width, cell, starts, lengths)], 1)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == list(map(ends_of, rows))


@pytest.mark.parametrize("threads", [1, 2, 3, 200])
@pytest.mark.parametrize("cell", [1, 8, 12])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ends_of_large_rectangles(kernel, cell, threads):
    rng = np.random.default_rng(3)
    rows, width = 700, 20_000 // cell
    grid = np.zeros((rows, width, cell), dtype=np.uint8)
    begins = rng.integers(1, width // 2, rows)
    ends = begins + rng.integers(1, width // 2, rows)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        grid[row, end:, -1] = row % 3  # the pad after, which may be that before
        grid[row, begin, 0] = 1 + row % 5  # the first and the last cell alone differ
        grid[row, end - 1, -1] += 7
    grid[13] = 4
    starts, lengths = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    kernel.ends([(grid.reshape(-1), width, width, cell, starts, lengths)], threads)
    begins[13] = ends[13] = 0
    assert np.array_equal(starts, begins)
    assert np.array_equal(starts + lengths, ends)


# --- what the compiled kernel refuses ----------------------------------------------------------

HUGE, MOST, LEAST = 2**62, 2**63 - 1, -(2**63)

# A copy of two rows of 2 and 1 cells of 4 bytes; a pad of such rows to width 3; and the ends of
# three rows of 4 cells of 2 bytes, every 5 cells.
STARTS, LENGTHS = ints([0, 4]), ints([2, 1])
TO, RECTANGLE = np.zeros(12, np.uint8), np.zeros(24, np.uint8)
FROM = np.arange(20, dtype=np.uint8)
GOOD: dict[str, Any] = {
    "copy": kernels.Copy(TO, FROM, None, STARTS, LENGTHS, 4),
    "pad": kernels.Pad(RECTANGLE, FROM, STARTS, LENGTHS, ints([1, 2]), 3, 4, b"ab"),
    "ends": kernels.Ends(np.zeros(28, np.uint8), 5, 4, 2, ints([7, 7, 7]), ints([7, 7, 7])),
}
WRITTEN = {"copy": ["dst"], "pad": ["dst"], "ends": ["starts", "lengths"]}


def task(kind, **changes):
    """A good task, some of it changed; what it writes is its own."""
    own = {name: getattr(GOOD[kind], name).copy() for name in WRITTEN[kind]}
    return GOOD[kind]._replace(**own | changes)


@needs_compiled
def test_good_arguments_are_good():
    for kind in GOOD:
        for threads in (-1, 0, 1, 2**40):
            assert getattr(compiled, kind)([task(kind), task(kind)], threads) is None
    first = task("copy", src_starts=0)
    compiled.copy([first], 1)
    assert first.dst.tolist() == [*range(8), *range(4)]
    number = np.int64(4)  # not an int, but a whole number
    assert compiled.copy((task("copy", cell_bytes=number),), number) is None
    assert compiled.pad([task("pad", cell_bytes=number, width=np.int32(3))], number) is None


SHARED = bytearray(40)
NUMBERS = np.frombuffer(SHARED, dtype=np.int64)  # zeros, which suit everything
WIDE = np.zeros(80, np.uint8)[::2]
LISTS: dict[tuple[str, str], list[Any]] = {
    ("copy", "lengths"): [[-1, 4], [HUGE, 1]],
    ("copy", "dst_starts"): [[0, 3], [-1, 0]],
    ("copy", "src_starts"): [[-1, 4], [0, 5], [0, HUGE], [0, LEAST], [MOST, 0], [0], [0, 4, 4]],
    ("pad", "lengths"): [[-1, 1]],
    ("pad", "starts"): [[0, -1], [0, 5], [0, MOST], [0]],
    ("pad", "left_pad"): [[2, 2], [-1, 2], [HUGE, 2], [1]],
    ("ends", "lengths"): [[7, 7]],
}
OTHERS: dict[tuple[str, str], list[Any]] = {
    ("copy", "dst"): [bytearray(8), bytearray(16), bytearray(13), bytes(12), WIDE[:12]],
    ("copy", "src"): [bytes(19), bytes(16), b"", WIDE[:20], 5, (), (bytes(20), 5), (WIDE[:20],)],
    ("copy", "src_starts"): [None, 5, -1, HUGE, 2**64, 3.0],
    ("copy", "dst_starts"): [3],
    ("copy", "cell_bytes"): [0, -4, HUGE],
    ("pad", "dst"): [*map(bytearray, (20, 28, 25)), bytes(24), WIDE[:24]],
    ("pad", "width"): [4, -3, HUGE, 0],
    ("pad", "starts"): [None, 5, -1],
    ("pad", "pad_bits"): [b"", b"abc"],
    ("pad", "cell_bytes"): [0],
    ("ends", "src"): [bytes(26), b"", bytes(29)],
    ("ends", "width"): [5, 0, -4, HUGE],
    ("ends", "stride"): [6, -5, HUGE],
    ("ends", "cell_bytes"): [0],
    ("ends", "starts"): [None, ints([7] * 3).data.toreadonly()],
}
BAD = [
    *((kind, {name: ints(found)}) for (kind, name), all_ in LISTS.items() for found in all_),
    *((kind, {name: found}) for (kind, name), all_ in OTHERS.items() for found in all_),
    ("copy", {"dst": np.zeros(12, np.uint8).data.toreadonly()}),
    ("copy", {"lengths": ints([HUGE] * 4), "src_starts": ints([0] * 4)}),  # which add up to 0
    ("copy", {"src_starts": MOST, "lengths": ints([1, 1, 1])}),
    # over what is read
    ("copy", {"dst": memoryview(SHARED)[18:30], "src": memoryview(SHARED)[:20]}),
    ("copy", {"dst": memoryview(SHARED)[12:24], "dst_starts": 0, "lengths": NUMBERS[:2]}),
    ("copy", {"dst": memoryview(SHARED)[4:16], "src_starts": NUMBERS[:2]}),
    ("copy", {"dst": memoryview(SHARED)[18:30], "src": (bytes(20), SHARED)}),
    ("pad", {"dst": memoryview(SHARED)[16:], "src": memoryview(SHARED)[:20]}),
    ("pad", {"dst": memoryview(SHARED)[15:39], "left_pad": NUMBERS[:2]}),
    # several buffers: from one into the next, past all of them, before them, by stride, end to end
    ("copy", {"src": (bytes(15), bytes(30)), "src_starts": ints([0, 12])}),
    ("copy", {"src": (bytes(15), bytes(5)), "src_starts": ints([0, 20])}),
    ("copy", {"src": (bytes(20), bytes(20)), "src_starts": ints([0, -4])}),
    ("copy", {"src": (bytes(20),), "src_starts": ints([0, MOST])}),
    ("copy", {"src": (bytes(20),), "lengths": ints([HUGE, 1])}),
    ("copy", {"src": (bytes(20),), "lengths": ints([-1, 4])}),
    ("copy", {"src": (bytes(20),), "src_starts": 1}),
    ("copy", {"src": (bytes(12),), "src_starts": None}),
    ("pad", {"width": MOST, "dst": bytearray(0)}),  # where width and rows overflow
    ("pad", {"lengths": ints([4, 1]), "left_pad": None}),
    ("pad", {"pad_bits": bytes(20), "cell_bytes": 20, "width": 0, "dst": bytearray(0)}),
]

FORMS: dict[str, Any] = {
    "int32": lambda numbers: numbers.astype(np.int32),
    "uint64": lambda numbers: numbers.astype(np.uint64),
    "float64": lambda numbers: numbers.astype(np.float64),
    "big-endian": lambda numbers: numbers.astype(">i8"),
    "bytes": bytes,
    "matrix": lambda numbers: numbers[None],
    "list": lambda numbers: numbers.tolist(),
    "strided": lambda numbers: np.repeat(numbers, 2)[::2],
    "unaligned": lambda numbers: np.frombuffer(bytearray(b"x" + bytes(numbers)), "i8", offset=1),
}
NUMBERS_OF = {
    "copy": ["dst_starts", "src_starts", "lengths"],
    "pad": ["starts", "lengths", "left_pad"],
    "ends": ["starts", "lengths"],
}


def is_refused(kind, changes):
    """With the bad task before, after and between good ones; no byte is written."""
    bad, good = (tuple(task(kind, **each)) for each in (changes, {}))
    outs = [x for x in (*bad, *good) if isinstance(x, (bytearray, np.ndarray, memoryview))]
    before = [bytes(out) for out in outs]
    for tasks in ([bad], [good, bad], (bad, good)):
        with pytest.raises((ValueError, TypeError, BufferError, OverflowError)):
            getattr(compiled, kind)(tasks, 1)
        assert [bytes(out) for out in outs] == before


@needs_compiled
@pytest.mark.parametrize(
    ("kind", "changes"), BAD, ids=[f"{i} {kind} {[*c]}" for i, (kind, c) in enumerate(BAD)]
)
def test_bad_tasks_are_refused_before_a_byte_is_written(kind, changes):
    is_refused(kind, changes)


@needs_compiled
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GOOD)
def test_numbers_are_aligned_contiguous_int64_of_one_dim(kind, form):
    for name in NUMBERS_OF[kind]:
        good = ints([0, 2]) if name == "dst_starts" else getattr(GOOD[kind], name)
        assert getattr(compiled, kind)([task(kind, **{name: good.copy()})], 1) is None
        is_refused(kind, {name: FORMS[form](good)})


@needs_compiled
def test_ends_are_not_written_over_what_is_read():
    numbers, same = ints(range(12)), ints([7] * 3)
    cells = numbers.view(np.uint8)
    for starts, lengths in ((numbers[:3], same), (same, numbers[9:]), (same, same)):
        with pytest.raises(ValueError, match="overlap"):
            compiled.ends([(cells, 4, 4, 8, starts, lengths)], 1)
    assert compiled.ends([(cells, 4, 4, 8, numbers[:0], numbers[:0])], 1) is None
    assert numbers.tolist() == list(range(12))


@needs_compiled
@pytest.mark.parametrize("name", ["dst", "src", "dst_starts", "src_starts", "lengths"])
def test_no_task_writes_what_another_uses(name):
    """Numbers that changed after they were checked would send rows anywhere."""
    memory = bytearray(16)
    numbers = np.frombuffer(memory, dtype=np.int64)
    mine = task("copy", dst=memory, lengths=ints([1, 3]), src_starts=ints([0, 0]))
    use = {"dst": {"dst": memory, "dst_starts": 0}, "src": {"src": memory, "src_starts": 0}}
    other = task("copy", **use.get(name, {"lengths": ints([0, 0]), "dst_starts": 0, name: numbers}))
    for tasks in ([mine, other], [other, mine]):
        with pytest.raises(ValueError, match="expected what is written apart from all else"):
            compiled.copy(tasks, 1)
        assert memory == bytes(16)
    assert compiled.copy([mine, task("copy", src=mine[1])], 1) is None  # sources may be shared


@needs_compiled
@pytest.mark.parametrize("kind", GOOD)
def test_wrong_arguments_are_refused(kind):
    no_tasks: Any = [([bad], 1) for bad in (5, [1, 2], (), (b"", b""))]
    for arguments in (*no_tasks, (7, 1), (), ([],), ([], 1, 2), ([], "1"), ([], 1.0)):
        with pytest.raises(TypeError):
            getattr(compiled, kind)(*arguments)


@needs_compiled
def test_a_refusal_names_the_row_also_where_another_task_has_the_same_numbers():
    """And lets every buffer go."""
    lengths, starts, dst = ints([2, 1]), ints([0, 4]), bytearray(12)
    good = task("copy", lengths=lengths, src_starts=starts)
    for changes, match in (
        ({"src": bytes(16)}, "src, row 1: expected cells within 4, found 1 from 4 on"),
        ({"dst": bytearray(8)}, "dst, row 1"),
        ({"src_starts": ints([0])}, "src_starts: expected 2 numbers, found 1"),
        ({"lengths": ints([3])}, "src_starts: expected 1 numbers, found 2"),
    ):
        bad = {"dst": dst, "lengths": lengths, "src_starts": starts, **changes}
        with pytest.raises(ValueError, match=match):
            compiled.copy([good, task("copy", **bad)], 1)
    with pytest.raises(ValueError, match=r"dst, row 0: expected cells within a width of 3"):
        compiled.pad([task("pad", left_pad=ints([2, 2]))], 1)
    compiled.copy([task("copy", dst=dst)], 1)
    dst.append(0)  # a BufferError while anything holds it


# --- threads and processes ---------------------------------------------------------------------


def run(code):
    """What code prints that has `kernel` and numpy, in a process of its own."""
    load = f"""
import importlib.util, sys, threading
import numpy as np
spec = importlib.util.spec_from_file_location("_kernel", {compiled.__file__!r})
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
    return run_python(load + code).stdout


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        *(("3", 3), ("4,2", 4), (" 2 , 1", 2), ("12,", 12)),
        *((value, None) for value in ("", "0", "0,4", ",4", "-1", "x", "4.5")),
    ],
)
def test_threads_are_those_of_the_environment_or_the_cpus_of_the_process(
    monkeypatch, threads, expected
):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 8, 9}, raising=False)
    assert kernels.thread_count() == (expected or 5)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert kernels.thread_count() == (expected or 1)


@needs_compiled
def test_other_threads_run_during_a_large_copy():
    """With a switch interval of an hour, another thread runs only where the GIL is let go."""
    code = """
sys.setswitchinterval(3600)
ran, go = threading.Event(), threading.Lock()
go.acquire()
threading.Thread(target=lambda: (go.acquire(), ran.set())).start()
memory = np.ones(1 << 26, dtype=np.uint8)
lengths, starts, out = np.array([1 << 26]), np.array([0]), np.empty_like(memory)
assert not ran.is_set()
go.release()
for _ in range(1000):
    kernel.copy([(out, memory, None, starts, lengths, 1)], 2)
    if ran.is_set():
        break
print(ran.is_set())
"""
    assert run(code).split() == ["True"]


@needs_compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_copies_with_threads_of_its_own():
    code = """
import os, warnings
warnings.simplefilter("ignore")
memory = np.arange(1 << 24, dtype=np.uint8)
starts, lengths = np.array([5, 0]), np.array([9 << 20, 5 << 20])
expected = memory[5 : 5 + (9 << 20)].tobytes() + memory[: 5 << 20].tobytes()
def right():
    out = np.zeros(len(expected), dtype=np.uint8)
    kernel.copy([(out, memory, None, starts, lengths, 1)], 4)
    return out.tobytes() == expected
stop = threading.Event()
def busy():
    while not stop.is_set():
        right()
threading.Thread(target=busy).start()
codes = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if right() else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
print(codes == [0] * 5, right())
"""
    assert run(code).split() == ["True", "True"]
