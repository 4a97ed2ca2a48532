"""`to_arrow`: the rows of every form of a batch, as other tools read them."""

import datetime as dt
import re
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

import jagcodec
from jagcodec import encode, materialize, pack_jagged_fields, pack_rows, stack_or_nest, to_rows
from jagcodec.testing import jagged_batches
from tests.helpers import MESSAGES
from tests.strategies import arrays, stdlib_values
from tests.strict_json import outcome, strictly
from tests.train.test_json_text import JSON_LIKE

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from jagcodec.integrations.arrow import to_arrow

SAMPLES = [
    {"ids": [5, 6, 7], "reward": 0.5, "grid": torch.ones(2, 2), "text": "a", "raw": b"\x00"},
    {"ids": [8], "reward": 1.0, "grid": torch.zeros(2, 2), "text": None, "raw": b""},
]

FORMS: dict[str, Any] = {
    "TensorDict": lambda td: td,
    "dict of columns": lambda td: dict(td.items()),
    "BatchedDataDict": lambda td: materialize(td, layout="jagged"),
    "packed columns": lambda td: materialize(td, layout="packed"),
    "narrow frames": lambda td: encode(td, narrow=True),
    **{name: lambda td, form=form: form(encode(td)) for name, form in MESSAGES.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_its_rows(form):
    td = pack_rows(SAMPLES)
    assert to_arrow(FORMS[form](td)).to_pylist() == to_rows(td, as_="list")


@pytest.mark.parametrize(
    "kind", [torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor.from_tensor]
)
def test_plain_tensors_of_every_type_are_columns(kind):
    assert to_arrow({"x": kind(torch.eye(2))}).to_pylist() == [{"x": [1, 0]}, {"x": [0, 1]}]


def test_a_batch_without_columns_has_rows_in_a_batch():
    batch = TensorDict({"n": TensorDict({"m": TensorDict({}, [2])}, [2])}, [2])
    for form in (batch, encode(batch)):
        assert to_arrow(form).to_pylist() == to_rows(form) == [{"n": {"m": {}}}] * 2


FLOATS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = {torch.float32, torch.float64, torch.bool, torch.uint8, torch.uint64, *FLOATS} | {
    *(torch.int8, torch.int16, torch.int32, torch.int64)
}


def bits_of(values):
    """Numbers in nested lists, floats by their bits; a NaN of numpy's is any NaN in Python."""
    if isinstance(values, list):
        return [bits_of(value) for value in values]
    if isinstance(values, float | np.float16):  # which older versions of pyarrow return
        return "nan" if values != values else struct.pack("<d", values)
    return values


@given(jagged_batches())
def test_jagged_columns_are_their_rows(batch):
    names = batch.token_aligned_fields
    td = pack_jagged_fields(batch.fields, lengths=batch.lengths, token_aligned_fields=names)
    columns = {
        name: td[name]
        for name in sorted(names)
        if td[name].dtype in DTYPES and 0 not in td[name].shape[2:]
    }
    table = to_arrow(columns)
    for name, column in columns.items():
        wide = torch.float32 if column.dtype in FLOATS else column.dtype
        rows = [row.to(wide).tolist() for row in column.unbind()]
        assert bits_of(table[name].to_pylist()) == bits_of(rows)


MROPE = stack_or_nest([torch.arange(6).view(2, 3), torch.arange(2).view(2, 1)], ragged_dim=2)


def test_columns_of_every_kind():
    for column, rows in (
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), [1.5, -2.0]),
        (torch.tensor([1.5, 2.0]).to(torch.float8_e5m2), [1.5, 2.0]),
        (torch.tensor([True, False]), [True, False]),
        (np.array([1, 2], dtype=np.uint64), [1, 2]),
        (MROPE, [[[0, 1, 2], [3, 4, 5]], [[0], [1]]]),
        (torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 1)]), [[[1, 1]], [[1], [1]]]),
        ([{"role": "user"}, None], ['{"role": "user"}', None]),
        ([None, None], [None, None]),
        (["a", 1], ['"a"', "1"]),
        (TensorDict({"x": torch.ones(2)}, [2]), [{"x": 1.0}, {"x": 1.0}]),
        (NonTensorData("gsm8k", batch_size=[2]), ["gsm8k", "gsm8k"]),
        (NonTensorStack("a", "b"), ["a", "b"]),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    ):
        td = TensorDict({}, [2]) if not isinstance(column, (list, np.ndarray)) else {}
        td["c"] = column
        assert to_arrow(td)["c"].to_pylist() == rows


# --- objects -----------------------------------------------------------------------------------

_utf8 = st.text(alphabet=st.characters(codec="utf-8"), max_size=4)
_any_text = st.text(alphabet="a\ud83d\ude00\U0001f600", max_size=2)
_naive = st.datetimes().map(lambda at: at.replace(fold=0))
_aware = st.builds(
    lambda at, zone: at.replace(tzinfo=zone),
    st.datetimes(dt.datetime(1980, 1, 1), dt.datetime(2040, 1, 1)),
    st.sampled_from([dt.timezone(dt.timedelta(hours=h)) for h in (-7, 0, 2)]),
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "large_string": _utf8 | _utf8.map(np.str_),
    "large_binary": st.binary(max_size=3) | st.binary(max_size=3).map(np.bytes_),
    "date32[day]": st.dates(),
    "timestamp[us]": _naive,
    "timestamp[us, tz=UTC]": _aware,
    "duration[us]": st.timedeltas(dt.timedelta(-(10**8)), dt.timedelta(10**8)),
}
JSON = pa.json_(pa.large_string())


def column_of_objects(rows):
    return to_arrow({"n": torch.arange(len(rows)), "o": rows})["o"]


def with_none(rows):
    return st.lists(rows | st.none(), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_a_kind_that_arrow_has_arrive_as_arrows(kind):
    @given(with_none(KINDS[kind]))
    def check(rows):
        column = column_of_objects(rows)
        shown = any(row is not None for row in rows)
        assert str(column.type) == (kind if shown else "null")
        assert column.to_pylist() == rows

    check()


@given(with_none(JSON_LIKE | _any_text | st.binary(max_size=2) | stdlib_values()))
def test_any_objects_arrive_equal_or_are_refused(rows):
    error: jagcodec.ArgumentError | None = None
    try:
        column = column_of_objects(rows)
    except jagcodec.ArgumentError as raised:
        error = raised
    if error is not None:
        (number,) = re.findall(r"^column 'o', row (\d+)", error.path)
        assert "leave the column out (--columns of the command, select in Python)" in error.detail
        row = rows[int(number)]
        assert outcome(row) is None or not is_utf8(row)
    elif column.type == JSON:
        texts = zip(column.to_pylist(), rows, strict=True)
        assert all(
            text is row if row is None else read(text) == outcome(row) for text, row in texts
        )
    else:
        assert column.to_pylist() == rows


def read(text):
    return repr(strictly(text))


def is_utf8(text):
    return not isinstance(text, str) or not any("\ud800" <= char <= "\udfff" for char in text)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_join_whichever_rows_show_the_type(kind, tmp_path):
    """Also JSON, and columns in a nested batch; rows of two kinds never join in silence."""
    example = {"large_string": "a", "large_binary": b"a", "date32[day]": dt.date(2026, 1, 2)}
    time = dt.datetime(2026, 1, 2)
    example |= {"timestamp[us]": time, "duration[us]": dt.timedelta(1)}
    value = example.get(kind, time.replace(tzinfo=dt.UTC))
    parts: list[list[Any]] = [[value, None], [None, None], []]
    tables = [
        to_arrow({"x": {"o": rows, "j": [{"a": row is None} for row in rows]}, "o": rows})
        for rows in parts
    ]
    files = [str(tmp_path / f"{i}.parquet") for i in range(len(parts))]
    for table, file in zip(tables, files, strict=True):
        pa.parquet.write_table(table, file)
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        rows = [row for i in order for row in parts[i]]
        some = [tables[i] for i in order]
        joined = pa.concat_tables(some, promote_options="default")
        found = [files[i] for i in order]
        schema = pa.unify_schemas([pa.parquet.read_schema(file) for file in found])
        data_set = pa.dataset.dataset(found, schema=schema).to_table()
        for table in (joined, data_set):
            assert table["o"].to_pylist() == rows
            assert [row["o"] for row in table["x"].to_pylist()] == rows
            assert str(table["o"].type) == kind
    other = column_of_objects([value, {"a": 1}] if kind == "large_string" else ["a", "b"])
    with pytest.raises(pa.ArrowException):
        pa.concat_tables(
            [tables[0].select(["o"]), pa.table({"o": other})], promote_options="default"
        )


# --- arrays ------------------------------------------------------------------------------------


def expected_of(array):
    """The type in Arrow of an array's elements, and these; None if Arrow does not have them."""
    kind, flat = array.dtype.kind, array.reshape(-1)
    if kind in "US":
        return {"U": "large_string", "S": "large_binary"}[kind], flat.tolist()
    if kind in "mM":
        unit, count = np.datetime_data(array.dtype)
        names = {"s": "s", "ms": "ms", "us": "us", "ns": "ns"}
        if kind == "M" and unit == "D" and count == 1:
            numbers = [None if np.isnat(x) else int(x.view("i8")) for x in flat.astype("<M8[D]")]
            fit = all(x is None or -(2**31) <= x < 2**31 for x in numbers)
            return ("date32[day]", numbers) if fit else None
        if unit not in names or count != 1:
            return None
        numbers = [None if np.isnat(x) else int(x.astype("i8")) for x in flat]
        return f"{'timestamp' if kind == 'M' else 'duration'}[{unit}]", numbers
    if kind in "biuf":
        names = {"float16": "halffloat", "float32": "float", "float64": "double"}
        name = array.dtype.newbyteorder("=").name
        return names.get(name, name), flat.tolist()
    return None


_times = st.builds(
    lambda numbers, unit: np.array(numbers, "i8").view(f"{unit}"),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-(2**63), 2**40]), min_size=1),
    st.sampled_from([f"{kind}8[{unit}]" for kind in "mM" for unit in ("D", "h", "s", "ns", "2s")]),
)


@given(arrays() | _times)
def test_arrays_arrive_as_arrows_or_are_refused(array):
    if not array.ndim or array.dtype == object or 0 in array.shape[1:]:
        return
    expected = expected_of(array)
    if expected is None:
        with pytest.raises(jagcodec.ArgumentError, match=r"^column 'x'.*leave the column out \("):
            to_arrow({"x": array})
        return
    column = to_arrow({"x": array})["x"].combine_chunks()
    assert len(column) == len(array)
    for dim in array.shape[1:]:
        assert column.type.list_size == dim
        column = column.flatten()
    assert str(column.type) == expected[0]
    if array.dtype.kind in "mM":
        column = column.view(pa.int32() if expected[0] == "date32[day]" else pa.int64())
    found = column.to_pylist()
    assert bits_of(found) == bits_of(expected[1])


def test_an_array_of_text_with_a_lone_surrogate_names_the_row():
    array = np.array([["a", "b"], ["c", "\ud800"]])
    with pytest.raises(jagcodec.ArgumentError, match=r"row 1: .*\\ud800.*; try \.jsonl") as caught:
        to_arrow({"x": array})
    assert caught.value.path == "column 'x', row 1"


# --- types and rows ----------------------------------------------------------------------------


def test_types_of_columns_of_numbers_do_not_depend_on_their_rows():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool):
        rows = [torch.zeros(2, 1, dtype=dtype), torch.ones(0, 3, dtype=dtype)]
        nested = torch.nested.nested_tensor(rows, dtype=dtype)
        one = torch.nested.nested_tensor(rows[1:], dtype=dtype)
        both = [to_arrow({"x": column})["x"] for column in (nested, one)]
        assert both[0].type == both[1].type
        assert both[0].to_pylist() == [row.tolist() for row in nested.unbind()]


def test_a_batch_without_columns_keeps_its_rows():
    assert to_arrow(encode(TensorDict({}, [3]))).num_rows == 3


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", "\ud83d\ude00"])
def test_names_that_utf8_does_not_have_are_refused(name):
    for batch in ({name: torch.ones(2)}, {"n": {name: torch.ones(2)}}):
        with pytest.raises(jagcodec.ArgumentError, match="a name that UTF-8 has") as caught:
            to_arrow(batch)
        assert repr(name) in caught.value.path


@given(st.dictionaries(_utf8, st.just(torch.arange(2)), min_size=1, max_size=3))
def test_any_other_names_come_back_from_parquet(columns):
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(to_arrow(columns), sink)
    assert pa.parquet.read_table(sink.getvalue()).column_names == [*columns]


def test_an_older_pyarrow_is_refused(monkeypatch):
    monkeypatch.delattr(pa, "json_")
    with pytest.raises(jagcodec.ArgumentError, match="expected pyarrow 19 or newer, found"):
        to_arrow({})


ODD: list[Any] = [
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, 2).to_sparse(),
    torch.ones(2, 0),
    torch.empty(2, device="meta"),
    [object(), object()],
    [{"pixels": torch.eye(2).to_sparse()}, None],
    ["\ud800", "b"],
    np.ones(2, "g"),
    np.zeros(2, "V3"),
]
NO_BATCHES: list[Any] = [3, None, TensorDict({}, []), {"a": torch.ones(2), "b": torch.ones(3)}]
NO_BATCHES += [LazyStackedTensorDict(TensorDict({}, []), TensorDict({}, []))]


def test_what_cannot_be_a_table_is_named():
    odd = [
        ({"fine": [1, 2], "odd": x}, "column 'odd'.*: .* leave the column out \\(--col")
        for x in ODD
    ]
    for source, said in (*odd, *((source, r"to_arrow\(batch\)") for source in NO_BATCHES)):
        with pytest.raises(jagcodec.JagcodecError, match=said):
            to_arrow(source)


@pytest.mark.parametrize("shape", [(1 << 20, 0), (1 << 20, 1)])
def test_lists_that_are_nearly_all_empty_are_an_error_and_no_memory(shape):
    """Each row has a list for each index of the dim before its tokens, with tokens or without."""
    offsets = torch.zeros((1 << 12) + 1, dtype=torch.int64)
    offsets[-1] = shape[1]
    column = torch.nested.nested_tensor_from_jagged(torch.zeros(shape), offsets, jagged_dim=2)
    with pytest.raises(
        jagcodec.ArgumentError, match=r"an Arrow table can hold.*lists of"
    ) as caught:
        to_arrow(encode(TensorDict({"x": column}, [1 << 12])))
    assert caught.value.reason == "bad_type"
