"""A batch is a list of rows, whatever form it has and whatever was done to it."""

import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from tensordict import TensorDict

from jagcodec import (
    BatchedDataDict,
    WireBatch,
    concat_rows,
    decode,
    encode,
    join_columns,
    materialize,
    open_wire,
    padding_tax,
    repeat_rows,
    select_rows,
    split_rows,
    to_blob,
    to_rows,
)
from tests.batch.plain import indices, rollout_of, table
from tests.helpers import Store
from tests.oracle import bits, pad_rows


class Batch(NamedTuple):
    """A batch in any form, and what it must hold."""

    held: Any
    rows: list[dict[str, Any]]  # as `table` gives them
    names: list[str]  # of its columns, in their order
    kind: type  # of every batch that is made of it
    packed: bool  # whether its jagged columns are packed ones
    meta: dict[str, Any] | None


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"narrow": True, "checksum": True},
    "elided": {"elide": True},
    "all": {"elide": True, "narrow": True, "compress": "zstd", "checksum": True},
}
MESSAGES: dict[str, Any] = {
    "open": open_wire,
    "fetched": lambda frames: open_wire(Store(frames)),
    "frames": lambda frames: [bytes(frame) for frame in frames],
    "tuple": tuple,
    "blob": to_blob,
}
UNPACKED = ("pairs", "views")  # packed, they do not always say which of their dims is ragged
IN_MEMORY: dict[str, Any] = {
    "TensorDict": lambda td, meta: td,
    "dict": lambda td, meta: dict(td.items()),
    "BatchedDataDict": lambda td, meta: BatchedDataDict(td.items(), meta_info=meta),
    "packed": lambda td, meta: BatchedDataDict(
        materialize(td.exclude(*UNPACKED), "packed"), meta_info=meta
    ),
}
FORMS = st.sampled_from([*IN_MEMORY, *MESSAGES])


def opened(batch):
    held = batch.held
    return open_wire(held) if isinstance(held, (list, tuple, bytearray)) else held


def with_columns(batch, names):
    if names == batch.names:
        return batch.held
    held = opened(batch)
    if type(held) is dict:
        return {name: held[name] for name in names}
    return held.select(*names) if isinstance(held, TensorDict) else held.select(names)


def agreed(metas):
    """What all of them have in common; None unless all say."""
    if None in metas:
        return None
    first, *others = metas
    return {k: v for k, v in first.items() if all(m.get(k) == v for m in others)}


def made(form, numbers, tag, step, options):
    td, meta = rollout_of(numbers, tag), {"step": step, "seed": 3}
    rows = table(td)
    if form in MESSAGES:
        held = MESSAGES[form](encode(td, meta=meta, **OPTIONS[options]))
        return Batch(held, rows, list(td.keys()), WireBatch, False, meta)
    held = IN_MEMORY[form](td, meta)
    kept = meta if type(held) is BatchedDataDict else None
    return Batch(held, rows, list(held.keys()), type(held), form == "packed", kept)


BATCHES = st.builds(
    made,
    form=FORMS,
    numbers=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=4),
    tag=st.sampled_from(["gsm8k", "math"]),
    step=st.integers(1, 2),
    options=st.sampled_from(list(OPTIONS)),
)


class Rows(RuleBasedStateMachine):
    batches = Bundle("batches")

    def checked(self, held, rows, names, kind, *, packed=False, meta=None):
        """A batch that an operation made, compared with the list of its rows."""
        assert type(held) is kind
        assert list(held.keys()) == names
        assert table(held, len(rows)) == [{name: row[name] for name in names} for row in rows]
        if meta is not None:
            assert (held.meta if kind is WireBatch else held.meta_info) == meta
        if kind is TensorDict and {"ids", "done"} <= {*names}:
            assert held["ids"].offsets() is held["done"].offsets()
        return Batch(held, rows, names, kind, packed, meta)

    @initialize(target=batches, made=st.lists(BATCHES, min_size=2, max_size=5))
    def begin(self, made):
        return multiple(*made)

    @rule(target=batches, batch=batches, data=st.data())
    def choose(self, batch, data):
        index, chosen = data.draw(indices(len(batch.rows)))
        found = select_rows(batch.held, index)
        return self.checked(found, [batch.rows[i] for i in chosen], *batch[2:4], **last(batch))

    @rule(
        target=batches,
        batch=batches,
        times=st.integers(0, 2) | st.lists(st.integers(0, 2), min_size=4, max_size=4),
        together=st.booleans(),
    )
    def repeat(self, batch, times, together):
        if isinstance(times, list):
            times, together = (times * len(batch.rows))[: len(batch.rows)], True
            rows = [r for r, n in zip(batch.rows, times, strict=True) for _ in range(n)]
            times = torch.tensor(times, dtype=torch.int64)
        else:
            rows = [r for r in batch.rows for _ in range(times)]
            rows = rows if together else batch.rows * times
        found = repeat_rows(batch.held, times, interleave=together)
        return self.checked(found, rows, *batch[2:4], **last(batch))

    @rule(target=batches, batch=batches, parts=st.integers(1, 4))
    def split(self, batch, parts):
        count = len(batch.rows)
        found = split_rows(batch.held, parts)
        sizes = [count // parts + (i < count % parts) for i in range(parts)]
        made, start = [], 0
        for part, size in zip(found, sizes, strict=True):
            rows = batch.rows[start : start + size]
            made.append(self.checked(part, rows, *batch[2:4], **last(batch)))
            start += size
        return multiple(*made)

    @rule(target=batches, batch=batches, data=st.data())
    def choose_columns(self, batch, data):
        names = data.draw(st.lists(st.sampled_from(batch.names), min_size=1, unique=True))
        found = with_columns(batch._replace(held=opened(batch)), names)
        return self.checked(found, batch.rows, names, batch.kind, **last(batch))

    @rule(target=batches, chosen=st.lists(batches, min_size=2, max_size=4))
    def concatenate(self, chosen):
        packed = chosen[0].packed
        like = next((b.kind for b in chosen if b.kind is not WireBatch), WireBatch)
        fit = [
            b
            for b in chosen
            if b.packed == packed
            and (b.kind is WireBatch or issubclass(like, dict) == issubclass(b.kind, dict))
        ]
        kind = next((b.kind for b in fit if b.kind is not WireBatch), WireBatch)
        names = [name for name in fit[0].names if all(name in b.names for b in fit)]
        if not names:
            return multiple()
        parts = [with_columns(b, names) for b in fit]
        meta = agreed([b.meta for b in fit]) if kind in (WireBatch, BatchedDataDict) else None
        rows = [row for b in fit for row in b.rows]
        return self.checked(concat_rows(parts), rows, names, kind, packed=packed, meta=meta)

    @rule(target=batches, batch=batches, other=FORMS, at=st.integers(1, 8))
    def put_columns_side_by_side(self, batch, other, at):
        """The columns from `at` on come from a worker, in a form of its own."""
        left, right = batch.names[:at], batch.names[at:]
        if not right or batch.packed:
            return multiple()
        written = with_columns(batch, right)
        written = written.to_tensordict() if isinstance(written, WireBatch) else written
        if isinstance(written, TensorDict):
            if other in MESSAGES:
                written = MESSAGES[other](encode(written, meta=batch.meta))
            elif other != "packed":
                written = IN_MEMORY[other](written, batch.meta)
        found = join_columns([with_columns(batch, left), written])
        kinds = [batch.kind, WireBatch if other in MESSAGES else type(written)]
        kind = next((kind for kind in kinds if kind is not WireBatch), WireBatch)
        return self.checked(found, batch.rows, batch.names, kind)

    @rule(
        target=batches,
        batch=batches,
        way=st.sampled_from(["decode", "pickle", *MESSAGES]),
        options=st.sampled_from(list(OPTIONS)),
    )
    def send(self, batch, way, options):
        if batch.kind is dict:
            return multiple()
        names, kind = batch.names, batch.kind
        held = opened(batch)
        if way == "pickle" and kind is not TensorDict:
            return self.checked(pickle.loads(pickle.dumps(held)), *batch[1:4], **last(batch))
        frames = encode(held, **OPTIONS[options])
        if way not in MESSAGES:
            kind = TensorDict if kind is WireBatch else kind
            meta = batch.meta if kind is BatchedDataDict else None
            found = decode(frames)
            return self.checked(found, batch.rows, names, kind, packed=batch.packed, meta=meta)
        if kind is BatchedDataDict and batch.packed:
            return multiple()
        meta = {} if kind is TensorDict else batch.meta
        return Batch(MESSAGES[way](frames), batch.rows, names, WireBatch, False, meta)

    @rule(batch=batches, data=st.data(), form=st.sampled_from(["tensor", "numpy", "list"]))
    def rows_out(self, batch, data, form):
        names = data.draw(st.none() | st.lists(st.sampled_from(batch.names), unique=True))
        found = to_rows(batch.held, names, form)
        assert len(found) == len(batch.rows)
        for row, expected in zip(found, batch.rows, strict=True):
            assert list(row) == (batch.names if names is None else names)
            assert_row(row, expected, form)

    @rule(batch=batches, layout=st.sampled_from(["padded", "jagged", "packed"]))
    def make_columns(self, batch, layout):
        names = [name for name in batch.names if layout != "packed" or name not in UNPACKED]
        if not names:
            return
        found = materialize(with_columns(batch, names), layout, {"ids": -7})
        assert list(found) == names
        if layout != "padded":
            assert table(found, len(batch.rows)) == [
                {name: row[name] for name in names} for row in batch.rows
            ]
        for name in {"ids", "pairs", "done"} & {*names} if layout == "padded" else ():
            rows = [row[name][1] for row in batch.rows]
            width = max(map(len, rows), default=0)
            pad = [0, 0] if name == "pairs" else -7 if name == "ids" else 0
            assert bits(found[name]) == pad_rows(rows, width, pad)

    @rule(batch=batches)
    def count(self, batch):
        assert padding_tax(batch.held).rows == len(batch.rows)


def last(batch):
    return {"packed": batch.packed, "meta": batch.meta}


def assert_row(row, expected, form):
    """A row that `to_rows` made is this one of `table`."""
    for name, value in row.items():
        known = expected[name]
        if isinstance(known, dict):
            assert_row(value, known, form)
        elif isinstance(known, str):
            assert repr(value) == known
        else:
            dtype, cells = known
            if form == "numpy":
                assert isinstance(value, (np.ndarray, np.generic))
                value = torch.from_numpy(np.array(value))
            elif form == "list":
                assert isinstance(value, (list, int, float))
                value = torch.tensor(value, dtype=dtype)
            assert value.dtype == dtype
            assert bits(value) == cells or not value.numel()


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=120, stateful_step_count=16)
