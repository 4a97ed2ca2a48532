"""Commands: what they print, what they refuse, and how they end."""

import io
import json
import os
import re
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    __version__,
    cli,
    dump,
    encode,
    padding_tax,
    plan_micro_batches,
    to_rows,
)
from jagcodec.cli.inspection import cells_text, size_text
from jagcodec.errors import WireFormatError
from jagcodec.record import RecordWriter
from jagcodec.train.describe import check_message, describe_message, open_source
from tests.helpers import MESSAGES, nested, run_python
from tests.strict_json import outcome, strictly
from tests.train.test_json_text import JSON_LIKE
from tests.wire.test_golden import BAD, GOOD, NAMES, Point, kept, load, message_of


def batch():
    cells = [torch.arange(6 * i, 6 * i + n) for i, n in enumerate((3, 5, 1, 5))]
    ids = nested([row * 1000 for row in cells])
    halves = nested([row / 2 for row in cells], torch.float32)
    return TensorDict({"ids": ids, "logprobs": halves, "reward": torch.tensor([0.5, 1, 2, 4])}, [4])


def saved(folder, name, value, **options):
    dump(value, folder / f"{name}.jag", **options)
    return folder / f"{name}.jag"


@pytest.fixture
def file(tmp_path):
    return saved(tmp_path, "batch", batch(), checksum=True, meta={"step": 7})


@pytest.fixture
def run(capsys, monkeypatch):
    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status: Any = cli.main([*map(str, arguments)])
        except SystemExit as left:  # of argparse
            status = left.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def printed(run, *arguments, **options):
    """What a command prints that succeeds."""
    status, out, err = run(*arguments, **options)
    assert (status, err) == (0, "")
    return out


def test_inspect_of_one_row_and_chosen_columns(run, file, tmp_path):
    row = ("inspect", file, "--row", 1, "--columns", "ids,reward")
    expected = {"ids": [6000, 7000, 8000, 9000, 10000], "reward": 1.0}
    assert json.loads(printed(run, *row, "--json")) == {"row": 1, "columns": expected}
    assert "ids" not in printed(run, "inspect", file, "--columns", "reward")
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    columns = {str(dtype): torch.tensor([torch.nan]).to(dtype) for dtype in floats}
    numbers = saved(tmp_path, "not numbers", TensorDict(columns, [1]))
    found = json.loads(printed(run, "inspect", numbers, "--row", 0, "--json"))["columns"]
    assert found == dict.fromkeys(columns, "nan")
    path = saved(tmp_path, "next to a batch", {"td": batch(), "step": 3})
    for chosen in ("ids", "$.step"):
        found = json.loads(run("inspect", path, "--columns", chosen, "--json")[1])
        assert [column["name"] for column in found["columns"]] == [chosen]
    found = json.loads(printed(run, "inspect", "-", "--json", stdin=file.read_bytes()))
    assert (found["file"], found["tax"]["rows"]) == ("standard input", 4)
    status, _, err = run("inspect", "-", stdin=file.read_bytes() * 2)
    assert (status, "standard input, file: expected a file of one message" in err) == (2, True)


@given(*[st.none() | st.integers(-6, 6)] * 2, st.none() | st.integers(-3, 3).filter(bool))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_inspect_of_a_range_of_rows_chooses_them_as_a_list_does(run, file, start, stop, step):
    rows = list(enumerate(to_rows(batch(), as_="list")))[start:stop:step]
    text = ":".join("" if end is None else str(end) for end in (start, stop, step))
    status, out, err = run("inspect", file, f"--row={text}", "--json")
    if not rows:
        assert (status, out, "some of 4 rows" in err) == (2, "", True)
        return
    assert json.loads(out) == {"rows": [{"row": i, "columns": row} for i, row in rows]}
    one = [printed(run, "inspect", file, f"--row={i}") for i, _ in rows]
    assert printed(run, "inspect", file, f"--row={text}") == "\n".join(one)
    last = json.loads(printed(run, "inspect", file, f"--row={rows[0][0] - 4}", "--json"))
    assert last == {"row": rows[0][0], "columns": rows[0][1]}


def test_cells_without_numbers_are_not_written_out(run, tmp_path):
    path = saved(tmp_path, "huge", TensorDict({"x": torch.empty(2, 1 << 40, 0)}, [2]))
    for options in ((), ("--all",), ("--json",)):
        assert len(printed(run, "inspect", path, "--row", 1, *options)) < 200
    assert "(1099511627776, 0)" in printed(run, "inspect", path, "--row", 1, "--all")
    status, _, err = run("export", path, tmp_path / "x.jsonl")
    assert (status, "column 'x': expected a column that JSON lines can hold" in err) == (2, True)
    assert "--columns" in err


def test_inspect_of_options_and_of_all_cells(run, tmp_path):
    lines = run("inspect", saved(tmp_path, "narrow", batch(), narrow=True))[1].splitlines()
    assert lines[0].endswith("in 2 frames, with narrow; no checksums")
    assert lines[1].endswith(" of the bytes. This message has narrow=True.")
    assert "stored" in lines[3]
    columns = {"ids": torch.arange(3000).view(1, 3000), "text": NonTensorStack("x" * 999)}
    row = ("inspect", saved(tmp_path, "long", TensorDict(columns, [1])), "--row", 0)
    short, whole = printed(run, *row), printed(run, *row, "--all")
    assert "[0 1 2 3 ... 2996 2997 2998 2999]" in short
    assert len(short) < 400
    assert f"[{', '.join(map(str, range(3000)))}]" in whole
    assert "x" * 999 in whole


def test_inspect_of_a_record_lists_its_steps(run, tmp_path):
    with RecordWriter(tmp_path, keep=3) as writer:
        for step in (1, 20, 300, 4000):
            writer.write(step, batch())
    files = [tmp_path / f"step-{step:010d}.jag" for step in (20, 300, 4000)]
    size = str(files[0].stat().st_size)
    head, *steps = printed(run, "inspect", tmp_path).splitlines()
    assert head == f"{tmp_path}: a record of 3 steps"
    expected = [[str(int(x.stem[5:])), "4", size, str(x)] for x in files]
    assert [line.split() for line in steps] == [["step", "rows", "bytes", "file"], *expected]
    files[1].write_bytes(files[1].read_bytes()[:100])
    status, out, err = run("inspect", tmp_path)
    found = [line.split()[:3] for line in out.splitlines()[3:]]
    assert (status, found) == (2, [["300", "?", "100"], ["4000", "4", size]])
    assert err.startswith(f"jagcodec: error: {files[1]}, ")
    assert err.count("\n") == 1
    steps = json.loads(run("inspect", tmp_path, "--json")[1])["steps"]
    assert [step["rows"] for step in steps] == [4, "?", 4]
    assert steps[1]["error"].startswith(f"{files[1]}, ")


def test_help(run):
    out = printed(run)
    assert out.startswith("usage: jagcodec")
    for command in ("inspect", "diff", "verify", "export", "tax", "doctor"):
        assert command in out
        assert f"jagcodec {command}" in printed(run, command, "--help")
    done = jagcodec("--version")
    assert (done.returncode, done.stdout.decode().strip()) == (0, f"jagcodec {__version__}")


def test_tax_of_lengths(run, tmp_path):
    path = tmp_path / "lengths"
    path.write_bytes(b"[1, 2, 9]")
    for name in ("-", path):
        assert printed(run, "tax", name, stdin=b"[1, 2, 9]") == f"{padding_tax([1, 2, 9])}\n"
    found = json.loads(run("tax", path, "--width", 12, "--json")[1])
    assert found["total"]["padded_bytes"] == 3 * 12 * 8
    assert "packing" not in found


def test_tax_shows_what_packing_would_cost(run, file):
    lengths, options = [3, 5, 1, 5], ("--max-tokens", 8, "--ranks", 2, "--row-multiple", 2)
    plan = plan_micro_batches(lengths, 2, max_tokens=8, row_multiple=2).report()
    text = printed(run, "tax", "-", *options, stdin=json.dumps(lengths).encode())
    *tax, empty, title, head, line = text.splitlines()
    assert "\n".join(tax) == str(padding_tax(lengths))
    assert (empty, title.split(";")[0]) == ("", "packed, at most 8 tokens in a micro-batch")
    fill = f"{14 / plan['cells']:.1%}"
    heaviest = [f"+{plan[name] - 1:.1%}" for name in ("heaviest_rank", "heaviest_micro_batch")]
    assert line.split() == ["2", str(plan["micro_batches_per_rank"]), fill, *heaviest]
    assert head.endswith("heaviest micro-batch")
    # Of a message, whose columns may share one set of row lengths.
    found = json.loads(printed(run, "tax", file, *options, "--json"))
    assert found.pop("packing") == plan
    assert found == json.loads(printed(run, "tax", "-", "--json", stdin=b"[3, 5, 1, 5]"))
    assert json.loads(printed(run, "tax", "-", "--json", stdin=file.read_bytes()))["rows"] == 4


def test_tax_of_a_message_with_several_row_lengths(run, tmp_path):
    columns = {"prompt": nested([[1], [1, 2]]), "answer": nested([[1] * 3, [1]])}
    path = saved(tmp_path, "two", TensorDict(columns, [2]))
    status, _, err = run("tax", path)
    text = "those of 'prompt' and 'answer' differ; choose one with --column NAME"
    assert (status, text in err) == (2, True)
    found = printed(run, "tax", path, "--column", "answer")
    assert found == f"{padding_tax([3, 1])}\n"
    flat = saved(tmp_path, "flat", {"x": TensorDict({"y": torch.ones(2)}, [2])})
    for arguments, text in (
        ([path, "--column", "question"], "expected one of 'prompt', 'answer', found 'question'"),
        ([flat], "expected a jagged column, which has row lengths, found none"),
    ):
        status, _, err = run("tax", *arguments)
        assert (status, text in err) == (2, True), err


def test_tax_of_a_list_imports_no_torch(tmp_path):
    path = tmp_path / "lengths"
    path.write_bytes(b"[1, 2, 9]")
    code = """
    import sys
    from jagcodec.cli import main
    main(["tax", sys.argv[1], "--max-tokens", "9", "--ranks", "2"])
    print([name for name in ("torch", "tensordict") if name in sys.modules])
    """
    assert run_python(code, path).stdout.splitlines()[-1] == "[]"


def test_interrupted(run, monkeypatch):
    monkeypatch.setattr("jagcodec.train.tax.tax_of_lengths", Mock(side_effect=KeyboardInterrupt))
    assert run("tax", "-", stdin=b"[1]") == (130, "", "jagcodec: interrupted\n")


NOT_PARSED = [
    (["wash"], "invalid choice"),
    (["tax"], "required"),
    (["tax", "x", "--width", "x"], ": error: "),
    (["tax", "FILE", "--ranks", "2"], "expected --max-tokens N with --ranks"),
    (["tax", "TEXT", "--column", "ids"], "expected a message with --column, found other bytes"),
    (["inspect", "FILE", "--columns", ","], "expected names with commas between them"),
    *(
        (["inspect", "FILE", f"--row={row}"], f"as a slice of Python, found {row!r}")
        for row in ("x", "", "1:x", "1:2:0", "::-0", "1:2:3:4", "1.0", "\u0661", "9" * 19)
    ),
    (["inspect", "FILE", "--all"], "expected --row N with --all"),
    (["inspect", ".", "--row", "0"], "expected the file of a step with --row and --columns"),
    (["export", "FILE", "x.npz"], "an ending of .parquet, .arrow, .jsonl"),
    (["export", "FILE", "-"], "an ending of .parquet, .arrow, .jsonl"),
]
REFUSED: list[tuple[list[Any], str]] = [
    (["inspect", "FILE", "--row", "4"], "FILE.jag: expected rows of 0 to 3, found 4"),
    (["inspect", "FILE", "--row", "-5"], "FILE.jag: expected rows of 0 to 3, found -5"),
    (["inspect", "FILE", "--row", "4:9"], "FILE.jag: expected a range with some of 4 rows, found"),
    (["inspect", "FILE", "--columns", "nothing"], "expected one of 'ids', 'logprobs'"),
    (["inspect", "NOWHERE"], "No such file"),
    (["verify", "FOLDER"], "Is a directory"),
    (["inspect", "TEXT"], "preamble: expected 24 bytes, found 7"),
    (["inspect", "CUT"], "expected a blob of at least"),
    *(([command, "TWO"], "expected a file of one message") for command in ("inspect", "verify")),
    (["diff", "FILE", "TWO"], "TWO.jag, file: expected a file of one message"),
    (["export", "TWO", "x.jsonl"], "TWO.jag, file: expected a file of one message"),
    (["inspect", "DAMAGED"], "expected a CRC-32"),
    (["verify", "DAMAGED"], "expected a CRC-32"),
    (["diff", "FILE", "DAMAGED"], "expected a CRC-32"),
    (["diff", "FILE", "FILE", "--columns", "nothing"], "found 'nothing'"),
    (["export", "DAMAGED", "x.jsonl"], "expected a CRC-32"),
    (["export", "FILE", "x.jsonl", "--columns", "nothing"], "found 'nothing'"),
    (["inspect", "/dev/zero"], "this is not a jagcodec blob"),
    (["tax", "NOWHERE"], "No such file"),
    (["tax", b"[3, 9]", "--max-tokens", "8"], "bytes, row 1: expected at most max_tokens=8 tokens"),
    (["tax", b"[3]", "--max-tokens", "8", "--ranks", "2"], "expected 2 rows or more"),
    (["tax", b"[3, 9]", "--width", "4"], "expected rows of at most 4 tokens, found 9"),
    (["tax", b"[" * 100_000], "expected a JSON list of whole numbers"),
    (["tax", b"\xff\xfe\x00"], "expected a JSON list of whole numbers"),
    (["tax", b'{"a": 1}'], "whole numbers, or a message; found a dict of 1"),
    (["tax", b'[1, "\\u001b[31m"]'], "bytes, row 1: expected integer lengths"),
    (["tax", b"[3, -1]"], "row 1: expected a length of 0 or more"),
    (["tax", b"[100000000000000000000]"], "expected"),
]


@pytest.mark.parametrize(
    ("arguments", "said", "usage"),
    [*((*case, "usage: ") for case in NOT_PARSED), *((*case, "") for case in REFUSED)],
)
def test_bad_input_is_one_line_and_status_2(run, file, tmp_path, arguments, said, usage):
    data = file.read_bytes()
    damaged = bytearray(data)
    damaged[-3] ^= 1
    files = {"FILE": data, "TEXT": b"one two", "CUT": data[:-1], "DAMAGED": damaged}
    files["TWO"] = data + data
    names: dict[Any, Any] = {"NOWHERE": tmp_path / "nowhere", "FOLDER": tmp_path}
    for name, content in (*files.items(), *((x, x) for x in arguments if type(x) is bytes)):
        names[name] = tmp_path / ("bytes" if type(name) is bytes else f"{name}.jag")
        names[name].write_bytes(content)
    status, out, err = run(*(names.get(argument, argument) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith(usage or "jagcodec: error: ")
    assert usage or err.count("\n") == 1
    assert "\x1b" not in err
    assert said in err


def test_diff_says_where_and_its_status_is_that_of_diff(run, file, tmp_path):
    changed = batch()
    changed["ids"].values()[0] = 77
    changed["logprobs"].values()[4] = -1.0  # row 1, token 1
    changed["more"] = torch.ones(4)
    other = saved(tmp_path, "other", changed, narrow=True, meta={"step": 8})
    said = [
        "the whole: columns only none in the first and more in the second",
        "column ids, row 0, cell [0]: value 0 and 77",
        "column logprobs, row 1, cell [1]: value 3.5 and -1.0",
        "column meta, $.step: value 7 and 8",
    ]
    for options, expected in (([], said[:1]), (["--all"], said), (["--columns", "ids"], said[1:2])):
        status, out, _ = run("diff", file, other, *options)
        assert status == 1
        assert out.splitlines() == [f"{file} {other} differ: {each}" for each in expected]
        found = json.loads(run("diff", file, other, *options, "--json")[1])
        assert len(found["differences"]) == len(expected)
    assert [each["row"] for each in found["differences"]] == [0]
    for options in ([], ["--all"]):
        assert run("diff", file, file, *options) == (0, "", "")
        assert run("diff", file, other, *options, "--columns", "reward") == (0, "", "")


def test_the_file_that_cannot_be_read_is_named_and_verify_goes_on(run, tmp_path):
    """Without checksums damage shows when the cells are read."""
    td = TensorDict({"text": NonTensorStack("a" * 40, "b")}, [2])
    files = [saved(tmp_path, name, td) for name in ("good", "bad")]
    files[1].write_bytes(files[0].read_bytes().replace(b"a" * 40, b"\xff" * 40))
    for order in (files, files[::-1]):
        status, out, err = run("diff", *order)
        assert (status, out) == (2, "")
        assert f"{files[1]}, $.text[0]: expected" in err
        assert str(files[0]) not in err
        status, out, err = run("verify", *order)
        assert (status, out[: out.index(",")]) == (2, f"{files[0]}: sound")
        assert str(files[1]) in err


def exported(path):
    """The rows of a file, as the tools read them that it is made for."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    return pyarrow.ipc.open_file(path).read_all().to_pylist()


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_export_writes_the_rows(run, file, tmp_path, ending):
    out = tmp_path / f"rows.{ending}"
    status, text, err = run("export", file, out)
    assert (status, text) == (0, f"{out}: 4 rows, 3 columns\n")
    assert err == "jagcodec: left out, because it belongs to the whole batch: step\n"
    expected = to_rows(batch(), as_="list")
    assert exported(out) == expected
    assert run("export", file, out, "--columns", "reward")[0] == 0
    assert exported(out) == [{"reward": row["reward"]} for row in expected]


def test_export_names_what_is_left_out_and_nothing_else(run, tmp_path):
    columns, out = {"x": torch.ones(3)}, tmp_path / "x.jsonl"
    for value in ({"td": batch(), "step": 3}, BatchedDataDict(columns, meta_info={"step": 3})):
        assert run("export", saved(tmp_path, "x", value), out)[2].endswith("whole batch: step\n")
    path = saved(tmp_path, "x", BatchedDataDict(columns))
    assert printed(run, "export", path, out) == f"{out}: 3 rows, 1 column\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON_LIKE, min_size=1, max_size=3), st.text("\ud83d\ude00x", max_size=3))
def test_json_lines_give_every_value_back_or_name_what_they_lack(run, tmp_path, rows, name):
    columns = BatchedDataDict({"n": torch.arange(len(rows)), name: rows})
    out = tmp_path / "x.jsonl"
    status, _, err = run("export", saved(tmp_path, "x", columns), out)
    lines = [{"n": i, name: row} for i, row in enumerate(rows)]
    if status:
        assert None in map(outcome, lines)
        assert re.search(r"column '.*', row \d|column '.*rename the column", err)
        assert "with --columns" in err
    else:
        assert [repr(strictly(line)) for line in out.read_text().splitlines()] == [
            outcome(line) for line in lines
        ]


NO_JSON = {1: 0, "1": 0}
NOT_HELD: list[tuple[Any, str, str]] = [  # a column, the formats that lack it, and why
    (torch.tensor([0.5, float("nan")]), "jsonl", "row 1: .* found nan; .* try .parquet"),
    ([b"a", None], "jsonl", "row 0: expected a value that JSON has, found b'a'; .* try .parquet"),
    (np.array([1, 2]).view("M8[ns]"), "jsonl", r"row 0: .*datetime64\[ns\]; .* try .parquet"),
    (torch.eye(2).to_sparse(), "jsonl parquet arrow", "expected a column that"),
    (TensorDict({"s": torch.eye(2).to_sparse()}, [2]), "jsonl parquet arrow", r"\['s'\]: expected"),
    (["\ud800", "b"], "parquet arrow", r"row 0: .*\\ud800.*; try \.jsonl"),
    (["b", "\ud83d\ude00"], "jsonl parquet arrow", "row 1: .*surrogates"),
    ([None, {"a": [NO_JSON]}], "jsonl parquet arrow", r"row 1, \$.a\[0\]: .* found 1 and '1'"),
    ([{"a": [0, float("inf")]}, 1], "jsonl parquet arrow", r"row 0, \$.a\[1\]: .* found inf"),
    ([{1: 0, None: np.int64(1)}, np.arange(2)], "", ""),
    ([None, None], "", ""),
    (np.array(["a", "b"]), "", ""),
]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize(("column", "without", "why"), NOT_HELD)
def test_a_format_holds_a_column_or_names_it_with_a_remedy(
    column, without, why, ending, run, tmp_path
):
    columns = BatchedDataDict(n=torch.arange(2), odd=column)
    out = tmp_path / f"x.{ending}"
    status, _, err = run("export", saved(tmp_path, "x", columns), out)
    assert (status, out.exists()) == ((2, False) if ending in without.split() else (0, True))
    if status:
        assert re.search(f"x.jag, column 'odd'.*{why}", err)
        assert "--columns" in err
        assert run("export", tmp_path / "x.jag", out, "--columns", "n")[0] == 0


def test_rows_without_columns_are_lines_and_no_parquet(run, tmp_path):
    source = saved(tmp_path, "x", TensorDict({}, [2]))
    assert run("export", source, tmp_path / "x.jsonl")[0] == 0
    assert exported(tmp_path / "x.jsonl") == [{}, {}]
    assert run("export", source, tmp_path / "x.arrow")[0] == 0
    assert pyarrow.ipc.open_file(tmp_path / "x.arrow").read_all().num_rows == 2
    status, _, err = run("export", source, tmp_path / "x.parquet")
    assert (status, "write .arrow or .jsonl" in err) == (2, True)


@pytest.mark.parametrize("ending", ["arrow", "jsonl"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(run, tmp_path, ending):
    payloads = NonTensorStack("a", {"image": {1, 2}})
    source, out = saved(tmp_path, "odd", TensorDict({"x": payloads}, [2])), tmp_path / f"x.{ending}"
    out.write_bytes(b"old")
    status, _, err = run("export", source, out)
    assert (status, out.read_bytes()) == (2, b"old")
    assert f"{source}, column 'x'" in err
    assert sorted(tmp_path.iterdir()) == sorted([source, out])


def test_a_batch_that_parquet_cannot_hold_is_refused_with_what_can(run, tmp_path):
    source = saved(tmp_path, "empty", TensorDict({"n": TensorDict({}, [2])}, [2]))
    status, _, err = run("export", source, tmp_path / "x.parquet")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"expected columns that Parquet can hold.*'n'.*write \.arrow or \.jsonl", err)
    assert run("export", source, tmp_path / "x.arrow")[0] == 0


def golden(name):
    return message_of(kept(name))


def stored(folder, name):
    path = folder / f"{name}.jag"
    path.write_bytes(MESSAGES["blob"](golden(name)))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_golden_messages_are_described_verified_and_compared(name, run, tmp_path):
    path = stored(tmp_path, name)
    assert f"{size_text(path.stat().st_size)} in" in printed(run, "inspect", path)
    found = json.loads(printed(run, "inspect", path, "--json"))
    assert found["bytes"] == path.stat().st_size
    assert found["checksum"] == ("checksum" in kept(name)["options"])
    entries = found["columns"]
    # All bytes belong to a column, or to none.
    assert sum(entry["bytes"] for entry in entries) + found["overhead"] == found["plain_bytes"]
    assert found["overhead"] > 0
    for entry in entries:
        if entry["rows"] is not None:
            assert entry["name"] in found["rows_of"][entry["rows"]]["columns"]
    assert ("not read" in printed(run, "verify", path)) == (name == "pickle")
    # It is the same as itself, however it is stored, and as no other.
    if name == "rollout_narrow":
        assert run("diff", path, stored(tmp_path, "rollout")) == (0, "", "")
    other = stored(tmp_path, "small_batch" if name != "small_batch" else "rollout")
    for left, expected in ((path, 0), (other, 1)):
        expected = 2 if name == "pickle" else expected  # whose value cannot be looked at
        status, out, err = run("diff", left, path)
        assert (status, out.count("\n")) == (expected, int(expected == 1))
        assert ("pickle" in err) == bool(err) == (expected == 2)
    if name == "pickle":
        return
    status, out, _ = run("diff", other, path, "--json")
    assert (status, json.loads(out)["same"]) == (1, False)
    status, out, err = run("inspect", path, "--row", "0")
    if status == 2:  # a value that is not a batch of rows
        assert "expected the message of a TensorDict" in err or "expected batch size" in err
        return
    assert (status, out[:6], err) == (0, "row 0\n", "")
    assert json.loads(printed(run, "inspect", path, "--row", "0", "--json"))["row"] == 0


def test_rows_that_are_separate_tensors_are_one_value():
    mixed = encode({"mixed": [torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int32), 1]})
    for message, column in (
        (golden("lazy_stack"), ("$", "lazy_stack", None, None, 24)),
        (golden("tensor_views"), ("$", "tensor_views", "int16", (3, None, 2), 60)),
        (golden("strided_nested"), ("$", "strided_nested", "float32", None, 48)),
        (mixed, ("$.mixed", "list", None, None, 24 + 24 + 1)),
    ):
        (found,) = describe_message(open_source(message, "x")).columns
        assert (found.name, found.kind, found.dtype, found.shape, found.bytes) == column


@pytest.mark.parametrize(
    ("file", "name"),
    [*(("good.json", name) for name in GOOD), *(("bad.json", name) for name in BAD)],
)
def test_messages_are_sound_or_not_for_the_reason_that_decode_gives(file, name):
    entry = load(file)[name]
    message = message_of(entry)
    if file == "good.json":
        found = describe_message(open_source(message, "x"))
        assert sum(c.bytes for c in found.columns) + found.overhead > 0
        assert check_message(message)[1] == {}
    elif entry["reason"] in ("unknown_type", "pickle_refused"):
        # What this process does not know says nothing of the message.
        assert check_message(message)[1]
    else:
        with pytest.raises(WireFormatError) as raised:
            check_message(message)
        assert raised.value.reason == entry["reason"]


def test_types_that_are_not_registered_are_named_and_the_rest_described(run, tmp_path):
    points = NonTensorStack(Point(1, 2), Point(3, 4))
    td = TensorDict({"ids": torch.arange(2), "points": points}, [2])
    path, batch = stored(tmp_path, "user"), saved(tmp_path, "batch", td)
    for file in (path, batch):
        file.write_bytes(file.read_bytes().replace(b"golden.Point", b"golden.Other"))
    printed(run, "inspect", path)
    assert "ids     1\npoints  unknown: " in printed(run, "inspect", batch, "--row", 1)
    assert '"unknown": "' in printed(run, "inspect", batch, "--row", 1, "--json")
    said = printed(run, "verify", path, batch)
    assert said.count("  not read: ") == said.count("golden.Other") == 3
    printed(run, "diff", batch, batch, "--columns", "ids")
    status, _, err = run("diff", batch, batch)
    assert (status, "points" in err) == (2, True)


def test_cells_are_shortened_and_safe_to_print():
    for value, text in (
        (torch.arange(100), "[0 1 2 3 ... 96 97 98 99]"),
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "[1.5 -2. ]"),
        (torch.tensor(1.5).to(torch.float8_e5m2), "1.5"),
        (np.array([True, False]), "[True False]"),
        ("a\x1b[31m", '"a\\u001b[31m"'),
        ({"role": "user"}, '{"role": "user"}'),
        (np.array("a\x1b\n"), "a\\x1b\\n"),
        ([10**5000], '["an int of 16610 bits"]'),
        ({10**5000}, '"set"'),
        (torch.tensor([1, 2], dtype=torch.uint8).view(torch.bits8), "[1 2]"),
        (torch.tensor([[1.5, -2.0], [100.0, 3.0]]), "[[1.5 -2. ] [100. 3. ]]"),
        (np.array([["a  b", "[ c"], ["\n", "d\t"]]), r"[['a  b' '[ c'] ['\n' 'd\t']]"),
        (np.array([b"a  b"]), "[b'a  b']"),
    ):
        assert cells_text(value) == text


@given(st.integers(0, 10**13))
@example(9_999)
@example(9_999_949)
@example(9_999_950)
@example(9_999_999_999)
def test_sizes_are_below_ten_thousand_of_a_unit(size):
    number, unit = size_text(size).split()
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit]
    shown = float(number.replace(",", ""))
    assert abs(shown * scale - size) <= scale / 20 * 1.001
    assert shown < 10_000 or unit == "GB"
    assert shown >= 10 or unit == "B"


def jagcodec(*arguments, **options):
    command = [sys.executable, "-m", "jagcodec", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, timeout=120, **streams)


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_standard_streams_that_are_closed(file, closed):
    command = f"exec {sys.executable} -m jagcodec verify {file if closed == 'stdout' else '-'}"
    close = "<&-" if closed == "stdin" else ">&-"
    done = subprocess.run(["/bin/sh", "-c", f"{command} {close}"], capture_output=True, timeout=120)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (2 if closed == "stdin" else 0)


# What Python's standard output lacks, in the locales of containers and of old terminals.
TERMINALS = {
    "ascii:strict": {"PYTHONIOENCODING": "ascii:strict"},
    "C": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},  # surrogateescape
    "latin": {"PYTHONIOENCODING": "latin-1"},
    "surrogatepass": {"PYTHONIOENCODING": "utf-8:surrogatepass"},
}


@pytest.mark.parametrize("terminal", TERMINALS)
def test_names_of_files_that_a_terminal_cannot_print(file, terminal):
    odd = os.fsencode(file.parent) + b"/\xff\n.jag"
    os.rename(file, odd)
    done = jagcodec("verify", odd, env={**os.environ, **TERMINALS[terminal]})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1
    assert b"\\udcff\\n.jag: sound" in done.stdout


NAME = "\U0001f600 \u20ac"


COMMANDS = [
    (["inspect", "A"], 0, True),
    (["inspect", "A", "--row", "0"], 0, True),
    (["inspect", "A", "--row", "0", "--all"], 0, True),
    (["inspect", "A", "--json"], 0, False),
    (["diff", "A", "B"], 1, True),
    (["diff", "A", "A", "--columns", "none"], 2, True),
    (["tax", "A", "--column", "none"], 2, True),
    (["export", "A", "OUT"], 0, True),
    (["verify", "A"], 0, False),
    (["doctor"], 0, False),
]


@pytest.mark.parametrize(
    ("terminal", "command", "status", "names"),
    [*(("C", *case) for case in COMMANDS), *((name, *COMMANDS[0]) for name in TERMINALS)],
)
def test_every_command_escapes_what_a_terminal_cannot_print(
    tmp_path, terminal, command, status, names
):
    files = {"OUT": tmp_path / "A.jsonl"}
    for name, reward in (("A", 1.0), ("B", 2.0)):
        columns = {NAME: torch.full((1,), reward), "text": NonTensorStack(NAME)}
        files[name] = saved(tmp_path, name, TensorDict(columns, [1]), meta={NAME: NAME})
    command = [files.get(word, word) for word in command]
    done = jagcodec(*command, env={**os.environ, **TERMINALS[terminal]})
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False)
    if names:
        escaped = NAME if terminal == "surrogatepass" else r"\U0001f600 \u20ac"
        assert escaped.encode() in done.stdout + done.stderr.replace(b"\\\\", b"\\")


def test_a_closed_pipe_is_quiet(file):
    """As of `head`, which closes it after a few lines."""
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = jagcodec("inspect", file, "--json", stdout=reader.stdin)
    assert done.stderr == b""
    assert done.returncode == 141
