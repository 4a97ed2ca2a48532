"""`jagcodec doctor`: what is here, and what is missing, is said."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
import torch
from packaging.requirements import Requirement

import jagcodec
from jagcodec import cells, cli, rowcopy
from jagcodec.doctor import EXTRAS, REQUIRED, doctor
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = {"all", "bench", "dev", "fuzz"}


def names_of(requirements):
    """The packages of requirements, those of other extras of ours among them."""
    for requirement in map(Requirement, requirements):
        if requirement.name == "jagcodec":
            for extra in sorted(requirement.extras):
                yield from names_of(PROJECT["optional-dependencies"][extra])
        else:
            yield requirement.name


def test_packages_are_those_of_the_project():
    assert set(REQUIRED) == set(names_of(PROJECT["dependencies"]))
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - NOT_FOR_USERS
    for extra, packages in EXTRAS.items():
        assert set(packages) == set(names_of(extras[extra])), extra


def test_the_report_is_that_of_this_process():
    report = doctor()
    assert report.version == jagcodec.__version__
    assert Path(report.location) == Path(jagcodec.__file__).parent
    assert report.packages["torch"] == torch.__version__
    assert report.packages["numpy"] == numpy.__version__
    assert report.problem is None
    assert (report.row_kernel, report.row_kernel_missing) == rowcopy.backend()
    assert report.cells_missing == cells.missing()
    assert report.threads == torch.get_num_threads()
    assert report.extras["testing"]["hypothesis"] is not None
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


def lines_without(*names):
    """What the report says, by the first word of each line, where these modules are missing."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({names!r}))  # to None, as if there were no such module
from jagcodec.doctor import doctor
print(doctor())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(re.split(r"  +|(?<=^!) ", line, maxsplit=1) for line in run.stdout.splitlines())


def test_extensions_that_were_not_built_are_named_with_the_remedy(monkeypatch):
    monkeypatch.delenv("JAGCODEC_ROWCOPY", raising=False)
    lines = lines_without("jagcodec.rowcopy._kernel", "jagcodec.cells._cells")
    assert re.match(r"numpy \(.*jagcodec\.rowcopy\._kernel", lines["row kernel"])
    assert re.match(r"python \(.*jagcodec\.cells\._cells", lines["cells"])
    assert lines["!"].startswith("the C extensions are not in use")
    assert "JAGCODEC_REQUIRE_COMPILED=1 pip install" in lines["!"]


def test_a_torch_that_cannot_be_imported_is_what_the_report_says():
    lines = lines_without("torch")
    expected = "jagcodec cannot be imported: ModuleNotFoundError: import of torch halted"
    assert lines["!"].startswith(expected)
    assert lines["row kernel"] == lines["cells"] == "unknown"
    assert lines["torch"] == torch.__version__


def test_a_variable_that_is_wrong_is_what_the_report_says(monkeypatch):
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "fast")
    monkeypatch.setenv("JAGCODEC_KEEP_BLOCKS", "0")
    lines = lines_without()
    assert lines["!"].startswith("jagcodec cannot be imported: ArgumentError: JAGCODEC_ROWCOPY")
    assert lines["JAGCODEC_ROWCOPY"] == "fast"
    assert lines["kept blocks"] == "no"


def test_numpy_that_was_asked_for_is_no_complaint(monkeypatch):
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "numpy")
    lines = lines_without()
    assert lines["cells"] == "python (JAGCODEC_ROWCOPY=numpy)"
    assert "!" not in lines


@pytest.mark.parametrize(
    ("text", "found"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never", "always"), ("", None)],
)
def test_huge_pages_are_read_as_the_system_writes_them(text, found, tmp_path, monkeypatch):
    file = tmp_path / "enabled"
    file.write_text(text)
    monkeypatch.setattr("jagcodec.doctor.HUGE_PAGES", file)
    assert doctor().huge_pages == found
    file.unlink()
    assert doctor().huge_pages is None


def test_the_command_prints_the_report(capsys):
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{doctor()}\n"
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == doctor().as_dict()
