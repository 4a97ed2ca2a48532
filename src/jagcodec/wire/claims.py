"""What the numbers of a header may claim: a quick check, and the rule, which explains.

Every message passes through `check_claims`. The quick check knows the numbers that nearly all
messages have. It says yes, or it says nothing: then the rule decides, and names the fault. It never
says yes where the rule says no (`tests/wire/test_claims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from jagcodec.errors import WireFormatError
from jagcodec.memory import INT64_MAX, extent_of
from jagcodec.wire import spec
from jagcodec.wire.checks import elements_of, expect, fail, inside
from jagcodec.wire.limits import Limits, exceeded
from jagcodec.wire.schema import (
    BUFFER,
    DOCUMENT_ROWS,
    GROUP,
    INTEGER_ROWS,
    OFFSET,
    ROW_KINDS,
    SIZE,
    STORAGE_CODE,
    Group,
    Node,
    Schema,
    child_step,
    numpy_itemsize,
    runs_of,
    size_at_code,
)
from jagcodec.wire.spec import (
    ARRAY_COST,
    EXPANSION,
    MAX_BYTES,
    MAX_NDIM,
    MAX_UNBACKED_ROWS,
    PLAIN,
    Kind,
)


def check_claims(
    schema: Schema,
    numbers: Sequence[int],
    groups: Sequence[Group],
    sizes: Sequence[int],
    sent_sizes: Sequence[int],
    header: int,
    limits: Limits,
    in_row: bool,
) -> tuple[int, int]:
    """Check the numbers of a header of `header` bytes; the caller has refused negative ones.

    `sizes` are the bytes of each frame, and `sent_sizes` the bytes that are sent: `sizes` itself if
    no frame is compressed. Returns the bytes of the message as it is sent, and the number of
    objects that it asks for.
    """
    # Nearly all messages end here. One tuple of these numbers would take a tenth of the time.
    counts = None
    if sent_sizes is sizes:
        sound, claimed, expanded, objects = sound_at_sight(
            schema, numbers, groups, sizes, header, limits
        )
        if sound and not schema.plan.others:  # `sound_at_sight` made the plan
            return header + sum(sizes), objects
        counts = _Counts(claimed, expanded, objects) if sound else None
    header_numbers = _HeaderNumbers(schema, numbers, groups, sizes, sent_sizes, header)
    return _check_one_by_one(header_numbers, limits, counts, in_row=in_row)


# --- the quick check ---------------------------------------------------------------------------


class Plan:
    """The indices, among all numbers of a schema, of those that the quick check knows."""

    __slots__ = (
        "arrays",
        "batches",
        "documents",
        "groups",
        "others",
        "places",
        "scalars",
        "shapes",
        "storage_codes",
    )

    def __init__(self, schema: Schema) -> None:
        # For each list, the indices of these numbers, but not of the bytes of an element.
        # Elements: the buffer, the offset, the first dim, the other dims; bytes of an element.
        self.places: list[tuple[int, int, int, Sequence[int], int]] = []
        self.scalars: list[tuple[int, int, int]] = []  # elements without dims
        self.shapes: list[tuple[Sequence[int], int]] = []  # two or more dims; bytes of an element
        self.documents: list[tuple[int, int]] = []  # the ragged group, and the bytes
        self.arrays: list[tuple[int, int]] = []  # the ragged group, and the rows of dims
        self.batches: list[int] = []  # the rows of a batch
        self.others: list[Node] = []  # nodes that only the rule can check
        storage_codes: list[int] = []
        groups: list[int] = []  # the ragged groups
        for node in schema.nodes:
            kind, number, dims = node.kind, node.number, tuple(range(node.dims, node.end))
            if kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA) and len(dims) < 2:
                self.batches += dims
            elif kind in _IN_BUFFERS:
                self._add_place(node, dims)
                storage_codes += [number + STORAGE_CODE] if kind in ROW_KINDS else []
                groups += [number + GROUP] if kind in ROW_KINDS and kind is not Kind.TENSOR else []
            elif kind is Kind.ARRAY_ROWS:
                cells, table = node.children
                self.arrays.append((cells.number + GROUP, table.dims))
            else:
                self.others.append(node)
        self.storage_codes: _Picks | None = _picks(storage_codes)
        self.groups: _Picks | None = _picks(groups)

    def _add_place(self, node: Node, dims: tuple[int, ...]) -> None:
        place, size = dims, _element_bytes(node)
        if len(dims) > 1:
            self.shapes.append((dims, size or 1))
        if node.kind in DOCUMENT_ROWS:
            place, size = (node.number + SIZE,), 1
            self.documents.append((node.number + GROUP, node.number + SIZE))
        buffer, offset = node.number + BUFFER, node.number + OFFSET
        if place:
            self.places.append((buffer, offset, place[0], place[1:], size))
        else:
            self.scalars.append((buffer, offset, size))


def plan_of(schema: Schema) -> Plan:
    """The plan of a schema, which the schema keeps."""
    if schema.plan is None:
        schema.plan = Plan(schema)
    return schema.plan  # type: ignore[no-any-return]


_IN_BUFFERS = (*ROW_KINDS, Kind.ARRAY)  # not BYTES: its entry would be larger than the node


_Picks: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]


def _picks(indices: Sequence[int]) -> _Picks | None:
    """A function that returns the numbers at these indices; None without indices."""
    # The repeated index makes `itemgetter` return a tuple even for one index.
    return itemgetter(*indices, indices[0]) if indices else None


EXACT = 1 << 52
"""Integers up to this one are exact as floats, and so is the sum of two."""


def sound_at_sight(
    schema: Schema,
    numbers: Sequence[Any],
    groups: Sequence[Sequence[Any]],
    sizes: Sequence[Any],
    header: int,
    limits: Limits,
    table: Callable[[list[Any]], Any] = list,
    largest: Callable[[Sequence[Any]], Any] = max,
) -> tuple[Any, Any, Any, Any]:
    """Check the numbers of one message, or of many that have one schema, at once.

    Each number is an int, or for many messages an array with one float per message. For many
    messages `table` builds a lookup, and `largest` returns the elementwise maximum. No number is
    negative, and no frame is compressed. Floats above
    `EXACT` may be rounded, but they and the results computed from them stay above every bound, so
    the check never accepts them.

    It leaves out `Plan.others`. Returns whether the numbers are sound, the bytes of the payload
    that they claim, the bytes of memory that documents and offsets need, and the number of objects.
    (They are a bare tuple, because a named one takes longer to make, and each message needs one.)
    For one message, `sound` is a bool, and the check ends early if the cells are not stored plain.
    For many, `sound` is an array, and all steps run.
    """
    plan = schema.plan or plan_of(schema)  # most messages have a plan: no call
    # Storage codes: no number is negative, so a sum of 0 means that all are 0.
    sound = plan.storage_codes is None or sum(plan.storage_codes(numbers)) == PLAIN
    if sound is False:  # one message, most often with narrow cells; an array is never `False`
        return _UNSOUND
    # The payload.
    payload = sum(sizes)
    sound &= (payload <= EXACT) & (header + payload <= limits.bytes)
    room = table([*sizes, 0 * payload])  # a missing buffer counts as an empty one
    claimed = expanded = 0
    try:
        # The ragged groups and their offsets.
        for buffer, offset, rows, low, high in groups:
            has_offsets = rows > 1
            size = has_offsets * (8 * rows + 8)
            sound &= (low <= high) & (has_offsets | (low == high)) & (high <= (rows > 0) * EXACT)
            sound &= offset + size <= room[buffer]
            expanded += size
        claimed += expanded
        # The places of cells.
        for buffer, offset, dim, others, size in plan.places:
            size = size * numbers[dim]
            for other in others:
                size = size * numbers[other]
            sound &= numbers[offset] + size <= room[numbers[buffer]]
            claimed += size
        for buffer, offset, size in plan.scalars:
            sound &= numbers[offset] + size <= room[numbers[buffer]]
            claimed += size
        # The objects, and rows of documents and arrays.
        objects = schema.node_count + len(groups) + len(sizes)
        if plan.documents or plan.arrays:
            rows_of = table([*[rows for _, _, rows, _, _ in groups], 0 * payload])
            fit, rows, size = _count_rows(plan, numbers, rows_of)
            sound &= fit
            objects += rows
            expanded += size
    except IndexError:  # no such buffer, or no such group
        return _UNSOUND
    # The indices of groups, the sizes of batches, the shapes, and the limits.
    if plan.groups is not None:
        sound &= largest(plan.groups(numbers)) < len(groups)
    for i in plan.batches:
        sound &= numbers[i] <= MAX_UNBACKED_ROWS
    if plan.shapes:
        sound &= _fit_memory(plan.shapes, numbers)
    sound &= (claimed <= payload) & (objects <= limits.objects) & (schema.depth <= limits.depth)
    return sound, claimed, EXPANSION * expanded, objects


def _count_rows(plan: Plan, numbers: Sequence[Any], rows_of: Any) -> tuple[Any, Any, Any]:
    """Whether the dims of arrays in rows fit, the number of objects in rows, and their bytes."""
    fit, objects, size = True, 0, 0
    for group, number in plan.documents:
        objects += rows_of[numbers[group]]
        size += numbers[number]
    for group, dim in plan.arrays:
        rows, width = rows_of[numbers[group]], numbers[dim + 1]
        objects += rows
        size += ARRAY_COST * rows
        fit &= (rows == numbers[dim]) & (width >= 1) & (width <= 1 + MAX_NDIM)
    return fit, objects, size


_UNSOUND = False, 0, 0, 0


def _fit_memory(shapes: Sequence[tuple[Sequence[int], int]], numbers: Sequence[Any]) -> Any:
    """Whether shapes stay small if each dim grows by one; the rule bounds dims next to a 0."""
    fit = True
    for dims, size in shapes:
        for dim in dims:
            size = size * (numbers[dim] + 1)
        fit &= size <= EXACT
    return fit


# --- the rule ----------------------------------------------------------------------------------


class _HeaderNumbers(NamedTuple):
    """The numbers of a header, of which none is negative."""

    schema: Schema
    numbers: Sequence[int]  # those of the schema's nodes first
    groups: Sequence[Group]
    sizes: Sequence[int]  # bytes of each frame, before it was compressed
    sent_sizes: Sequence[int]  # bytes of each frame as sent; `sizes` itself if none is compressed
    header: int  # bytes of the header


class _Counts(NamedTuple):
    """What the quick check counted, which is all but `Plan.others`."""

    claimed: int  # bytes of the payload
    expanded: int  # bytes of memory of documents and offsets
    objects: int


def _check_one_by_one(
    header_numbers: _HeaderNumbers, limits: Limits, counts: _Counts | None, *, in_row: bool
) -> tuple[int, int]:
    """As `check_claims`, number by number; with `counts`, only the nodes of `Plan.others`."""
    schema, numbers, groups, sizes, sent_sizes, header = header_numbers
    payload = sum(sizes)
    expect(payload < MAX_BYTES, "bad_header", "sizes below 2**56 in all", sizes, "header")
    total = header + payload
    if total > limits.bytes:
        raise exceeded("bytes", limits.bytes, total, "bytes of header and frames", "header")
    if schema.depth > limits.depth:
        raise exceeded("depth", limits.depth, schema.depth, "levels", "header")
    if sent_sizes is not sizes:
        _check_sent_sizes(sent_sizes, sizes, in_row=in_row)
        total = header + sum(sent_sizes)
    claims = Claims(sizes, in_row=in_row)
    if counts is not None:
        nodes = plan_of(schema).others
        claims.left = payload - counts.claimed
        claims.expanded, claims.objects = counts.expanded, counts.objects
    else:
        nodes = schema.nodes
        claims.objects = schema.node_count + len(groups) + len(sizes)
        check_groups(groups, claims)
    for node in nodes:
        try:
            check_node(node, numbers, groups, claims)
        except WireFormatError as error:
            raise _with_path(error, schema.root, node) or error from error
    beyond = claims.expanded - EXPANSION * total
    if sent_sizes is not sizes:
        beyond += payload
        _check_rectangles(header_numbers, total, limits)
    if beyond > limits.expanded:
        what = f"bytes of values and frames beyond {EXPANSION} for each byte of the message"
        raise exceeded("expanded", limits.expanded, beyond, what, "header")
    if claims.objects > limits.objects:
        raise exceeded("objects", limits.objects, claims.objects, "objects", "header")
    return total, claims.objects


def _check_sent_sizes(sent_sizes: Sequence[int], sizes: Sequence[int], *, in_row: bool) -> None:
    if in_row:
        raise fail("bad_record", "expected no compressed frames in a row, found some")
    for i, (sent, size) in enumerate(zip(sent_sizes, sizes, strict=True)):
        expect(sent <= size, "bad_header", f"at most {size} bytes", sent, f"frame {i + 1}")


def _check_rectangles(header_numbers: _HeaderNumbers, total: int, limits: Limits) -> None:
    """Refuse compressed rows that ask for larger rectangles than plain rows could."""
    schema, numbers, groups, *_ = header_numbers
    # The cells of plain rows are in the message: rectangles are less than the square of its bytes.
    padded = 0
    arrays = {id(node.children[0]) for node in schema.nodes if node.kind is Kind.ARRAY_ROWS}
    for node in schema.nodes:
        if node.kind is Kind.JAGGED and id(node) not in arrays:  # arrays are never padded
            inner = list(numbers[node.dims : node.end])
            del inner[node.fields[2] - 1]
            group = groups[numbers[node.number + GROUP]]
            padded += group.rows * group.max * math.prod(inner) * node.itemsize
    if padded > max(total**2, limits.expanded):
        what = "bytes of padded rows, more than the square of the message's bytes"
        raise exceeded("expanded", limits.expanded, padded, what, "header")


class Claims:
    """Counts what the numbers of a message claim of its buffers, and of the limits."""

    def __init__(self, sizes: Sequence[int], *, in_row: bool = False) -> None:
        self.sizes: Sequence[int] = sizes
        self.payload: int = sum(sizes)
        self.left: int = self.payload  # bytes that no value has claimed yet
        self.objects: int = 0  # objects to make, such as rows of objects, views and components
        self.expanded: int = 0  # bytes of memory that values need at full width
        self.in_row: bool = in_row  # whether the message is a row of another

    def claim(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """Check that bytes are in a buffer, and that all values fit the payload."""
        if size == 0:
            return
        self.left -= size
        if buffer >= len(self.sizes):
            detail = f"a buffer below {len(self.sizes)}, found buffer {buffer}"
        elif offset + size > self.sizes[buffer]:
            at = f"{size} bytes at {offset} of buffer {buffer}"
            detail = f"{at}, found a buffer of {self.sizes[buffer]}"
        elif self.left < 0:
            excess = f"more bytes of them than the {self.payload} of the payload"
            detail = f"values that do not overlap, found {excess}"
        else:
            return
        raise fail("out_of_bounds", f"expected {detail}", path=path)

    def claim_rows(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """Claim bytes of documents or offsets, and count the memory that their rows need."""
        self.claim(buffer, offset, size, path)
        self.expanded += EXPANSION * size


def check_groups(groups: Sequence[Group], claims: Claims) -> None:
    """Check the numbers of the ragged groups."""
    for i, group in enumerate(groups):
        path, (buffer, offset, rows, low, high) = f"ragged group {i}", group
        expect(low <= high, "bad_offsets", "min <= max", [low, high], path)
        if rows > 1:
            claims.claim_rows(buffer, offset, 8 * (rows + 1), path)
        else:
            fits = low == high and (rows == 1 or not high)
            expect(fits, "bad_offsets", "one length of one row, 0 without rows", [low, high], path)


def _claim_table(
    node: Node, node_numbers: list[int], shape: list[int], groups: Sequence[Group], claims: Claims
) -> None:
    """Claim the table of runs of an indirect column, and count the memory that its rows need.

    The places in the table are checked when the column is read: `_check_place` in
    `wire/stored/elided_rows.py`.
    """
    kind, runs = node.kind, runs_of(node.kind, node_numbers[STORAGE_CODE])
    # Indirect columns in rows would multiply their repeats at each level of rows.
    expect(not claims.in_row, "out_of_bounds", "no indirect columns in a message in a row", "some")
    rows = shape[0] if kind is Kind.TENSOR and shape else 0
    if kind is Kind.TENSOR:
        # Each row has a number in an index, which is stored in one bit or more.
        expect(0 < rows <= 8 * claims.payload, "bad_record", "rows with an index", rows)
    else:
        rows = groups[node_numbers[GROUP]].rows
    if kind is Kind.JAGGED:
        expect(node.fields[2] == 1, "bad_record", "indirect rows of ragged dim 1", node.fields[2])
    claims.claim(node_numbers[BUFFER], node_numbers[OFFSET], 8 * len(spec.RUN_NUMBERS) * runs)
    size = node_numbers[SIZE] if kind in DOCUMENT_ROWS else math.prod(shape) * node.itemsize
    # Count rows without cells, too: each costs a step.
    claims.expanded += size + spec.ROW_COST * rows * runs


def _element_bytes(node: Node) -> int:
    """Bytes of memory per element of a node; 0 if its dims are not those of elements."""
    if node.kind is Kind.ARRAY:
        return numpy_itemsize(node.fields[0])
    return 8 if node.kind is Kind.OBJECT_ARRAY else node.itemsize


def check_node(node: Node, numbers: Sequence[int], groups: Sequence[Group], claims: Claims) -> None:
    """Check the numbers of one node, and claim every place that they name.

    Each kind of `FORMS` that has numbers needs a branch here, even if it has nothing to check.
    """
    kind, i = node.kind, node.number
    node_numbers = list(numbers[i : node.end])
    shape = node_numbers[node.dims - i :]
    elements = elements_of(shape, _element_bytes(node))
    # Ignore the storage code of a node without bytes.
    filled = node_numbers[SIZE] if kind in DOCUMENT_ROWS else elements
    if kind is Kind.JAGGED or kind in DOCUMENT_ROWS:
        most = len(groups)
        expect(
            node_numbers[GROUP] < most,
            "bad_record",
            f"a ragged group below {most}",
            node_numbers[GROUP],
        )
    if kind in DOCUMENT_ROWS:
        claims.objects += groups[node_numbers[GROUP]].rows
    if kind in ROW_KINDS and filled and runs_of(kind, node_numbers[STORAGE_CODE]):
        _claim_table(node, node_numbers, shape, groups, claims)
    elif kind in (Kind.TENSOR, Kind.JAGGED):
        size = size_at_code(node.fields[0], node_numbers[STORAGE_CODE], elements)
        claims.claim(node_numbers[BUFFER], node_numbers[OFFSET], size)
        claims.expanded += 0 if node_numbers[STORAGE_CODE] == PLAIN else elements * node.itemsize
    elif kind is Kind.ARRAY:
        size = elements * _element_bytes(node)
        expect(size <= INT64_MAX, "bad_record", "fewer than 2**63 bytes", shape)
        claims.claim(node_numbers[BUFFER], node_numbers[OFFSET], size)
    elif kind is Kind.BYTES:
        buffer, offset, size = node_numbers
        claims.claim(buffer, offset, size)
    elif kind in DOCUMENT_ROWS:
        code = node_numbers[STORAGE_CODE]
        is_plain = code & ~spec.BLOBS == PLAIN or not node_numbers[SIZE]
        expect(is_plain, "bad_record", "documents or messages as they are", code)
        claims.claim_rows(node_numbers[BUFFER], node_numbers[OFFSET], node_numbers[SIZE])
    elif kind in INTEGER_ROWS:
        _count_integer_rows(node, numbers, groups, claims)
    elif kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA):
        bounded = extent_of(shape) <= max(MAX_UNBACKED_ROWS, claims.payload)
        expected = f"at most {MAX_UNBACKED_ROWS} rows, or a payload of as many bytes"
        expect(bounded, "bad_rows", expected, shape)
    elif kind is Kind.SPARSE_COO:
        pass  # `elements_of` checked its shape; its children, two TENSORs, claim indices and values
    else:
        raise fail("unknown_kind", f"expected a kind whose numbers have a rule, found {kind.name}")


def _count_integer_rows(
    node: Node, numbers: Sequence[int], groups: Sequence[Group], claims: Claims
) -> None:
    """Count the memory of views, components and arrays; the children claimed their bytes."""
    cells, child = node.children
    rows, width = numbers[child.dims : child.end]
    if node.kind is Kind.ARRAY_ROWS:
        wanted = groups[numbers[cells.number + GROUP]].rows
        expect(rows == wanted, "bad_rows", f"dims of {wanted} rows", rows)
        fits = 1 <= width <= 1 + MAX_NDIM
        expect(fits, "bad_record", f"rows of 1 to {1 + MAX_NDIM} integers", width)
        claims.objects += rows
        claims.expanded += EXPANSION * ARRAY_COST * rows
        return
    storage_code = numbers[child.number + STORAGE_CODE]
    expect(storage_code == PLAIN, "bad_record", "integers as wide as their dtype", storage_code)
    wanted = 2 if node.kind is Kind.TENSOR_VIEWS else node.fields[0] or 1
    expect(width == wanted, "bad_record", f"rows of {wanted} integers", width)
    claims.objects += rows
    claims.expanded += EXPANSION * 8 * width * rows


def _with_path(error: WireFormatError, node: Node, target: Node) -> WireFormatError | None:
    """The error, with the path from `node` to `target`; None if `target` is not within `node`."""
    if node is target:
        return inside(error, None)
    for i, child in enumerate(node.children):
        with_path = _with_path(error, child, target)
        if with_path is not None:
            return inside(with_path, child_step(node, i))
    return None
