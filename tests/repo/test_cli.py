"""The command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jagcodec import __version__, cli, dump, encode_fields, pack_jagged_fields, tax_report, to_blob


def test_tax_of_given_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[1, 2, 9]")
    assert cli.main(["tax", "--lengths", str(file)]) == 0
    plain = capsys.readouterr().out
    assert "3 rows, 44.4% of the padded cells are tokens" in plain
    assert plain.splitlines()[2].split() == ["tokens", "jagged", "216", "96", "55.6%"]

    assert cli.main(["tax", "--lengths", str(file), "--width", "12", "--bytes-per-token", "2"]) == 0
    wide = capsys.readouterr().out
    assert wide.splitlines()[2].split() == ["tokens", "jagged", "72", "24", "66.7%"]


def test_tax_of_the_built_in_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tax"]) == 0
    out = capsys.readouterr().out
    assert "openai/grade-school-math" in out.splitlines()[0]
    assert "5276 rows, 27.5% of the padded cells are tokens" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a JSON list of whole numbers; Expecting value"),
        ("[1, 2", "expected a JSON list of whole numbers; "),
        ("[" * 100_000, "expected a JSON list of whole numbers; "),
        ('{"a": 1}', 'expected a JSON list of whole numbers, found {"a": 1}'),
        ("[1, 2.5]", "row 1: expected a whole number of tokens, found 2.5"),
        ("[true]", "row 0: expected a whole number of tokens, found true"),
        ('[1, "2"]', 'row 1: expected a whole number of tokens, found "2"'),
        ("[3, -1]", "row 1: expected a length of 0 or more, found -1"),
        ("[100000000000000000000]", "expected"),
    ],
)
def test_tax_of_what_is_no_list_of_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    assert cli.main(["tax", "--lengths", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jagcodec: error: ")
    assert said in captured.err
    assert captured.out == ""


COLUMNS = {"ids": torch.arange(3000).view(3, 1000), "reward": torch.ones(3)}
LENGTHS = [500, 200, 1000]


@pytest.mark.parametrize("options", [{}, {"narrow": True, "checksum": True}, {"elide": True}])
def test_tax_of_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    td = pack_jagged_fields(COLUMNS, lengths=LENGTHS, token_aligned_fields=["ids"])
    file = tmp_path / "batch.jag"
    dump(td, file, **options)
    assert cli.main(["tax", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{tax_report(file)}\n"
    assert printed.splitlines()[3].split()[:5] == ["ids", "jagged", "24,000", "13,600", "3,400"]
    assert cli.main(["tax", str(file), "--json", "--width", "2000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == tax_report(file, padded_width=2000).as_dict()
    assert report["columns"][0]["padded_bytes"] == 3 * 2000 * 8
    assert report["message"]["message_bytes"] == file.stat().st_size


def test_tax_of_a_message_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = to_blob(encode_fields(COLUMNS, lengths=LENGTHS, token_aligned_fields=["ids"]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(blob))))
    assert cli.main(["tax", "-"]) == 0
    assert f"the message takes {len(blob):,} B now, with none" in capsys.readouterr().out


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"[1, 2, 9]",
        b"1\n2\n9\n",
        b"1 2, 9",
        b"[1, 2]\n[9]\n",
        b"\xef\xbb\xbf1\r\n2\r\n\r\n9",
        npy(np.array([1, 2, 9])),
        npy(np.array([1, 2, 9], dtype=np.uint16)),
    ],
)
@pytest.mark.parametrize("standard_input", [False, True])
def test_tax_of_a_file_of_lengths(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    standard_input: bool,
) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    name = "-" if standard_input else str(file)
    assert cli.main(["tax", name, "--bytes-per-token", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == tax_report([1, 2, 9], bytes_per_token=2).as_dict()


def test_json_of_given_lengths_and_of_the_built_in_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[1, 2, 9]")
    assert cli.main(["tax", "--lengths", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["padded_bytes"] == 216
    assert cli.main(["tax", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"] == 5276
    assert "openai/grade-school-math" in captured.err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "expected a message or lengths, found nothing"),
        (b"1\n2.5\n", "line 2: expected a whole number of tokens, found '2.5'"),
        (b"1\nx\x1b[31m\n", "line 2: expected a whole number of tokens"),
        (b"1\n[2, true]\n", "line 2, row 1: expected a whole number of tokens, found true"),
        (b"1\n[2\n", "line 2: expected a JSON list of whole numbers; "),
        (b'{"a": 1}', "expected a JSON list of whole numbers, found"),
        (b"7.5", "expected a JSON list of whole numbers, found 7.5"),
        (b"[" * 100_000, "expected a JSON list of whole numbers"),
        (b"[3, -1]", "row 1: expected a length of 0 or more, found -1"),
        (b"1\n99999999999999999999999", "expected a whole number"),
        (b"\xff\xfe\x00", "expected a message or lengths"),
        (npy(np.ones((2, 2), dtype=int)), "expected (N,) integers"),
        (npy(np.ones(2)), "expected (N,) integers"),
        (npy(np.ones(2))[:-3], "expected a .npy of lengths"),
        (npy(np.array([None])), "expected a .npy of lengths"),
        (npy(np.ones(2)).replace(b"False", b"((((("), "expected a .npy of lengths"),
        (b'{"columns": ["prompt_tokens"], "rows": [[1.5]]}', "row 0: expected a whole number of"),
        (bytes(to_blob(encode_fields(COLUMNS, lengths=LENGTHS)))[:-1], "expected a blob of"),
        (b"jagcodec" + bytes(16), "preamble"),
    ],
)
def test_tax_of_a_file_that_is_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    assert cli.main(["tax", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"jagcodec: error: {file}")
    assert captured.err.count("\n") == 1
    assert "\x1b" not in captured.err
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("data", [b"9\n", b"9", b"[9]", b"[9]\n"])
def test_tax_of_a_file_of_one_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(data)
    assert cli.main(["tax", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tax_report([9]).as_dict()


def test_tax_of_a_message_that_is_no_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump({"step": 3}, tmp_path / "step.jag")
    for path in (tmp_path / "step.jag", tmp_path, tmp_path / "nowhere"):
        assert cli.main(["tax", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_tax_of_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nowhere.json", tmp_path, binary):
        assert cli.main(["tax", "--lengths", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_tax_of_rows_that_are_wider_than_the_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([3, 9]))
    assert cli.main(["tax", "--lengths", str(file), "--width", "4"]) == 2
    assert "expected rows of at most 4 tokens, found 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["wash"],
        ["tax", "--width", "0"],
        ["tax", "--width", "x"],
        ["tax", "--bytes-per-token", "-8"],
        ["demo"],
        ["tax", "--gpus", "8"],
        ["tax", "FILE", "--lengths", "FILE"],
    ],
)
def test_arguments_that_do_not_parse(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert ": error: " in capsys.readouterr().err


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    assert "tax" in capsys.readouterr().out


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jagcodec.batch.padding_tax.padding_tax", interrupted)
    assert cli.main(["tax"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jagcodec", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"jagcodec {__version__}")
