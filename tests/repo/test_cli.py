"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jagcodec import __version__, cli


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

    monkeypatch.setattr(cli, "padding_tax", interrupted)
    assert cli.main(["tax"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jagcodec", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"jagcodec {__version__}")
