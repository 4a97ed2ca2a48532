"""`jagcodec doctor` names what is here, and what is missing."""

import importlib.metadata
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import jagcodec
from jagcodec import cli, kernels
from jagcodec.doctor import OPTIONAL, REQUIRED, doctor, report_lines
from tests.helpers import ROOT, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = {"all", "bench", "dev", "fuzz"}
WITHOUT_EXTRA = {"verl", "vllm", "sglang"}


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
    used = {name for extra in set(extras) - NOT_FOR_USERS for name in names_of(extras[extra])}
    assert set(OPTIONAL) == used | WITHOUT_EXTRA


def lines_without(*names):
    """What the report says, by the first words of each line, where these modules are missing."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({names!r}))  # to None, as if there were no such module
from jagcodec.doctor import doctor, report_lines
print("\\n".join(report_lines(doctor())))
"""
    lines = run_python(code).stdout.splitlines()
    return dict(re.split(r"  +|(?<=^!) ", line, maxsplit=1) for line in lines)


def test_extensions_that_were_not_built_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "")
    lines = lines_without("jagcodec.kernels._kernel", "jagcodec.kernels._cells")
    assert re.match(r"numpy \(.*jagcodec\.kernels\._kernel", lines["row kernel"])
    assert re.match(r"python \(.*jagcodec\.kernels\._cells", lines["cells"])
    assert lines["!"].startswith("the C extensions are not in use")
    assert "JAGCODEC_REQUIRE_COMPILED=1" in lines["!"]
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "compiled")
    for extension in ("_kernel", "_cells"):
        problem = lines_without(f"jagcodec.kernels.{extension}")["!"]
        expected = rf"ROWCOPY: expected .* found 'compiled', .*{extension}.* install a C compiler"
        assert re.search(expected, problem)


def test_extensions_for_another_machine_are_named_with_the_remedy(tmp_path, monkeypatch):
    shutil.copytree(Path(jagcodec.__file__).parent, tmp_path / "jagcodec")
    for module in ("kernels/_kernel", "kernels/_cells"):
        (tmp_path / f"jagcodec/{module}.abi3.so").write_bytes(b"no machine code of this machine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "")
    lines = lines_without()
    assert lines["jagcodec"].endswith(str(tmp_path / "jagcodec"))
    assert re.match(r"numpy \(.*_kernel\.abi3\.so", lines["row kernel"])
    assert re.match(r"python \(.*_cells\.abi3\.so", lines["cells"])
    assert lines["!"].startswith("the C extensions are not in use")


def test_a_torch_that_cannot_be_imported_is_what_the_report_says():
    lines = lines_without("torch")
    expected = "jagcodec cannot be imported: ModuleNotFoundError: import of torch halted"
    assert lines["!"].startswith(expected)
    assert lines["row kernel"] == lines["cells"] == "unknown"
    assert lines["torch"] == importlib.metadata.version("torch")


def test_variables_are_what_the_report_says(monkeypatch):
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "numpy")
    lines = lines_without()
    assert lines["cells"] == "python (JAGCODEC_ROWCOPY=numpy)"
    assert lines["row kernel"].startswith("numpy")
    assert "!" not in lines
    monkeypatch.setenv("JAGCODEC_ROWCOPY", "fast")
    monkeypatch.setenv("JAGCODEC_KEEP_BLOCKS", "0")
    lines = lines_without()
    assert lines["!"].startswith("jagcodec cannot be imported: ArgumentError: JAGCODEC_ROWCOPY")
    assert lines["JAGCODEC_ROWCOPY"] == "fast"
    assert lines["JAGCODEC_KEEP_BLOCKS"] == "0"


@pytest.mark.parametrize(("problem", "status"), [(None, 0), ("ImportError: no", 1)])
def test_the_command_prints_the_report_of_this_process(monkeypatch, capsys, problem, status):
    theirs = {"verl": "0.9.1", "TransferQueue": "0.1.11", "ray": "2.60.0", "vllm": "0.33.0"}
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: theirs[name] if name in theirs else real(name)
    )
    report = doctor()
    place = Path(jagcodec.__file__).parent
    assert re.fullmatch(rf"{jagcodec.__version__}, .*{place}", report["jagcodec"])
    assert {**report, **theirs, "torch": real("torch"), "problem": None} == report
    assert report["row kernel"].startswith(kernels.backend().name)
    missing = kernels.missing_cells()
    assert report["cells"] == (f"python ({missing})" if missing else "compiled")
    assert report["threads"].startswith(f"{torch.get_num_threads()} of torch")
    report["problem"] = problem
    monkeypatch.setattr("jagcodec.doctor.doctor", lambda: report)
    assert cli.main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines == report_lines(report)
    assert {*theirs.items()} <= {tuple(line.split()) for line in lines}
