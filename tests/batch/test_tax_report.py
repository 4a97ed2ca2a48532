"""The report of the taxes says what messages weigh."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentTypeError,
    BatchedDataDict,
    WireFormatError,
    concat_rows,
    dump,
    encode,
    open_wire,
    pack_jagged_fields,
    padding_tax,
    tax_report,
    to_blob,
)
from jagcodec.testing import jagged_batches
from tests.helpers import size
from tests.wire.test_elide import rollouts

FORMS: dict[str, Any] = {
    "jagged": {},
    "narrow": {"narrow": True},
    "elide": {"elide": True},
    "both": {"narrow": True, "elide": True},
}


def report_of(source: Any, **options: Any) -> Any:
    """The report, whose sizes are None of bare lengths alone; and with wrong types, too."""
    return tax_report(source, **options)


def check_sums(report, value):
    """Every sum is the size of a message that was made by itself."""
    for name, options in FORMS.items():
        total = getattr(report, f"{name}_bytes")
        assert total == size(encode(value, **options)), name
        parts = [getattr(part, f"{name}_bytes") for part in (*report.columns, report.overhead)]
        assert sum(parts) == total
        assert min(parts) >= 0
    assert report.padded_bytes == sum(column.padded_bytes for column in report.columns)


# --- batches -----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(jagged_batches(), st.integers(1, 3))
def test_sums_are_the_sizes_of_messages(batch, times):
    options = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    report = report_of(batch.fields, compress=None, **options)
    td = pack_jagged_fields(batch.fields, **options)
    check_sums(report, td)
    tax = padding_tax(batch.fields, **options)
    assert (report.rows, report.fill) == (tax.rows, tax.fill)
    assert [column.name for column in report.columns] == [field.name for field in tax.fields]
    for column, field in zip(report.columns, tax.fields, strict=True):
        assert column.layout == field.layout
        if field.layout != "object":
            assert column.padded_bytes == field.padded_bytes
            assert column.jagged_bytes == field.wire_bytes
        assert column.padding_bytes >= 0
    assert report.elide_bytes <= report.jagged_bytes
    assert report.both_bytes <= report.narrow_bytes
    assert min(report.padding_bytes, report.repeats_bytes) >= 0
    json.dumps(report.as_dict())
    assert all(len(line) <= 100 for line in str(report).splitlines())


def test_what_columns_share_is_counted_at_the_first():
    td = rollouts()
    report = report_of(td, compress=None)
    check_sums(report, td)
    columns = {column.name: column for column in report.columns}
    ids = columns["input_ids"]
    # Prompts and responses stand before it: nothing but a table is its own.
    assert ids.elide_bytes < 300
    assert ids.repeats_bytes == ids.jagged_bytes - ids.elide_bytes
    assert columns["prompts"].elide_bytes * 3 < columns["prompts"].jagged_bytes
    assert columns["responses"].elide_bytes == columns["responses"].jagged_bytes
    assert columns["responses"].width_bytes == columns["responses"].jagged_bytes * 3 // 4
    assert columns["attention_mask"].narrow_bytes == -(
        -columns["attention_mask"].jagged_bytes // 64
    )
    assert report.padding_bytes == sum(c.padded_bytes - c.jagged_bytes for c in report.columns)
    assert report.repeats_bytes + report.width_bytes == report.jagged_bytes - report.both_bytes


def test_columns_that_are_no_tensors():
    words = ["alpha" * 300, "beta"] * 20
    fields = {
        "ids": torch.arange(400).view(40, 10),
        "words": np.array(words, dtype=object),
        "reward": torch.zeros(40),
    }
    td = pack_jagged_fields(fields, lengths=[5] * 40, token_aligned_fields=["ids"])
    report = report_of(td, compress=None)
    check_sums(report, td)
    layouts = {column.name: column.layout for column in report.columns}
    assert layouts == {"ids": "jagged", "words": "object", "reward": "rectangular"}
    column = report.columns[1]
    assert column.jagged_bytes > 20 * 1500
    assert column.padding_bytes == 0
    assert column.elide_bytes < 3000
    nested = TensorDict({"inner": td, "step": torch.ones(40, 2)}, [40])
    report = report_of(nested, compress=None)
    check_sums(report, nested)
    assert [c.name for c in report.columns] == ["inner.ids", "inner.words", "inner.reward", "step"]


def test_widths_are_those_of_padding_tax():
    td = rollouts()
    report, tax = report_of(td, padded_width=512, compress=None), padding_tax(td, padded_width=512)
    assert report.padded_bytes == tax.padded_bytes
    assert report.jagged_bytes == tax.wire_bytes
    assert report.fill == tax.fill


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(50, 60))
def test_bare_lengths(lengths, width):
    report = report_of(lengths, padded_width=width, bytes_per_token=4)
    tax = padding_tax(lengths, padded_width=width, bytes_per_token=4)
    assert (report.padded_bytes, report.jagged_bytes) == (tax.padded_bytes, tax.wire_bytes)
    assert (report.fill, report.rows) == (tax.fill, tax.rows)
    assert report.narrow_bytes is report.both_bytes is report.compressed_bytes is None
    assert report.repeats_bytes is report.width_bytes is None
    assert "A batch or a message says" in str(report)


# --- compressed --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zstd", ("zstd", 9)])
def test_compressed_in_all(how):
    pytest.importorskip("zstandard")
    td = rollouts(repeats=1, prompts=60)
    report = report_of(td, compress=how)
    frames = encode(td, narrow=True, elide=True, compress=how)
    assert (report.compress, report.compressed_bytes) == ("zstd", size(frames))


def test_a_library_that_is_not_installed(monkeypatch):
    def missing():
        raise ArgumentError("bad_option", "compress", "zstandard is not installed")

    monkeypatch.setitem(tax_report.__globals__, "library", missing)
    report = report_of(rollouts(), compress="zstd")
    assert (report.compress, report.compressed_bytes) == ("zstd", None)
    assert report.both_bytes is not None


# --- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"narrow": True, "checksum": True},
        {"elide": True},
        {"narrow": True, "elide": True, "compress": "zstd"},
    ],
)
def test_a_message_as_it_is_and_as_it_would_be(tmp_path, options):
    if "compress" in options:
        pytest.importorskip("zstandard")
    td = rollouts()
    expected = report_of(td, compress=None)
    frames = encode(td, **options)
    before = [bytes(frame) for frame in frames]
    path = tmp_path / "batch.jag"
    dump(td, path, **options)
    blob = to_blob(frames)
    for source in (
        frames,
        blob,
        open_wire(frames),
        path,
        str(path),
        torch.frombuffer(blob, dtype=torch.uint8),
    ):
        report = report_of(source, compress=None)
        assert (report.columns, report.overhead) == (expected.columns, expected.overhead)
        now = report.message
        assert now.narrow == bool(options.get("narrow"))
        assert now.elide == bool(options.get("elide"))
        assert now.checksum == bool(options.get("checksum"))
        assert now.compress == options.get("compress")
        in_frames = source is frames or not isinstance(
            source, (bytes, bytearray, str, torch.Tensor, type(path))
        )
        assert now.message_bytes == (size(frames) if in_frames else len(blob))
    assert [bytes(frame) for frame in frames] == before
    assert path.read_bytes() == bytes(blob)


def test_what_stands_beside_the_batch_is_overhead():
    td = rollouts()
    alone = report_of(td, compress=None)
    value = {"step": torch.arange(5000), "batch": td}
    report = report_of(encode(value), compress=None)
    check_sums(report, value)
    assert report.columns == alone.columns
    assert report.overhead.jagged_bytes > alone.overhead.jagged_bytes + 5000 * 8
    with_meta = report_of(encode(td, meta={"step": 7}), compress=None)
    assert with_meta.columns == alone.columns
    assert with_meta.jagged_bytes == size(encode(td, meta={"step": 7}))


def test_a_batched_data_dict():
    data = BatchedDataDict({"ids": torch.arange(12).view(3, 4)}, meta_info={"step": 1})
    report = report_of(encode(data), compress=None)
    assert [(c.name, c.jagged_bytes, c.narrow_bytes) for c in report.columns] == [("ids", 96, 12)]
    assert report.jagged_bytes == size(encode(data))


def test_a_choice_and_a_join_are_messages_of_their_own():
    td = rollouts()
    batch = open_wire(encode(td, elide=True))
    part = batch.select(["responses"]).rows(slice(2, 9))
    report = report_of(part, compress=None)
    assert report.rows == 7
    assert report.jagged_bytes == size(part.to_frames())
    both = concat_rows([batch, batch])
    assert report_of(both, compress=None).rows == 2 * len(batch)


# --- what people read --------------------------------------------------------------------------


def test_the_table_fits_and_ends_with_advice():
    td = rollouts()
    td["a" * 60 + "\n\x1b[31m"] = torch.ones(len(td))
    lines = str(report_of(encode(td, narrow=True), compress=None)).splitlines()
    assert max(map(len, lines)) <= 100
    assert "with narrow" in lines[1]
    assert lines[2].split() == [
        "column",
        "layout",
        *(w for f in ("padded", *FORMS) for w in (f, "B")),
    ]
    assert lines[-1].startswith("Worth it: narrow=True with elide=True saves ")
    used = report_of(encode(td, narrow=True, elide=True), compress=None).advice
    assert used == lines[-1].replace("Worth it", "Used already")
    noise = TensorDict({"x": torch.rand(50, 50, dtype=torch.float64)}, [50])
    assert report_of(noise, compress=None).advice.startswith("No option is worth it")
    wide = TensorDict({"x": torch.randint(0, 1000, (50, 50))}, [50])
    assert report_of(wide, compress=None).advice.startswith("Worth it: narrow=True saves 7")


def test_large_sizes_are_shown_in_larger_units():
    report = report_of([2**30, 2**31])
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].split() == ["tokens", "jagged", "34,359,738", "25,769,804", "-", "-", "-"]
    assert "padded kB" in lines[1]


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: report_of([3, 9], padded_width=8), ArgumentError, "at most 8.*found 9"),
        (lambda: report_of(rollouts(), padded_width=8), ArgumentError, "'prompts'.*at most 8"),
        (lambda: report_of([3], padded_width=-1), ArgumentError, "padded_width.*0 or more"),
        (lambda: report_of([3], padded_width="8"), ArgumentTypeError, "padded_width"),
        (lambda: report_of([3], padded_width=True), ArgumentTypeError, "padded_width"),
        (lambda: report_of([-1]), ArgumentError, "row 0"),
        (lambda: report_of([0.5]), ArgumentTypeError, "integer"),
        (lambda: report_of(7), ArgumentTypeError, "lengths"),
        (lambda: report_of(None), ArgumentTypeError, "lengths"),
        (lambda: report_of([1], bytes_per_token=0), ArgumentError, "bytes_per_token"),
        (lambda: report_of([1], compress="lz4"), ArgumentError, "'zstd' or"),
        (lambda: report_of([1], compress=3), ArgumentError, "compress"),
        (lambda: report_of({"x": torch.ones(2, 2)}), ArgumentError, r"tax_report\(lengths\)"),
        (lambda: report_of(TensorDict({}, [])), ArgumentError, "batch dim"),
        (lambda: report_of(b"nonsense"), WireFormatError, "jagcodec"),
        (lambda: report_of(encode({"step": 3})), WireFormatError, "use decode"),
        (lambda: report_of("/nowhere/batch.jag"), FileNotFoundError, "nowhere"),
        (
            lambda: report_of(TensorDict.lazy_stack([TensorDict({"x": torch.ones(1)}, [])])),
            ArgumentTypeError,
            "lazy stack.*contiguous",
        ),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()
