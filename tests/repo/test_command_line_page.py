"""What docs/command-line.md shows is what the commands print."""

import re
import shlex

import pytest

from jagcodec import cli
from jagcodec.doctor import OPTIONAL, VARIABLES
from tests.helpers import ROOT

TEXT = (ROOT / "docs/command-line.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the page makes first."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```py\n(.*?)^```", TEXT, re.M | re.S)
    exec(compile(block, "docs/command-line.md", "exec"), {})
    return tmp_path


def sessions():
    """Each command on the page with what it prints there."""
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S):
        for part in re.split(r"^\$ jagcodec ", block, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


def test_commands_print_what_the_page_shows(folder, capsys):
    """In order, since some read what others wrote."""
    shown = [*sessions()]
    for command, printed in shown:
        status = cli.main(shlex.split(command))
        assert status == (1 if command.startswith("diff") and printed else 0), command
        out = capsys.readouterr().out
        if command == "doctor":
            names = [[line.split()[0] for line in text.splitlines()] for text in (out, printed)]
            # What is installed differs.
            assert [name for name in names[1] if name not in OPTIONAL] == [
                name for name in names[0] if name not in (*OPTIONAL, *VARIABLES)
            ]
        else:
            assert out == printed, command
    assert {command.split()[0] for command, _ in shown} == {
        module.__name__.rpartition(".")[2].replace("inspection", "inspect")
        for module in cli.COMMANDS
    }
