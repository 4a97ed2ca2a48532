"""Public names are imported when they are asked for, and by type checkers all the same."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec

HEAVY = ["torch", "tensordict", "numpy", "msgpack", "pyarrow"]
EXTRAS = ["zmq", "ray", "transfer_queue", "verl", "PIL", "hypothesis", "zstandard"]


def said_by(code):
    """What Python prints as JSON in a new process, where nothing is imported yet."""
    run = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_type_checkers_and_processes_find_the_same_names_in_the_same_modules():
    tree = ast.parse(Path(jagcodec.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    version = {("jagcodec._version", "__version__")}
    homes = {(f"jagcodec.{home}", name) for name, home in vars(jagcodec)["_HOME_OF"].items()}
    modules = {("jagcodec", name) for name in vars(jagcodec)["_MODULES"]}
    found = {(node.module, alias.name) for node in imports for alias in node.names}
    assert found == homes | modules | version


COMMAND = """
import contextlib, io
from jagcodec.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({})
"""


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import jagcodec", HEAVY),
        *((COMMAND.format(arguments), HEAVY) for arguments in (["--version"], ["tax", "--help"])),
        ("from jagcodec.wire import header", ["torch", "tensordict", "numpy"]),
        ("from jagcodec import ArgumentError, Limits", ["jagcodec.batch"]),
        ("from jagcodec import *", [*EXTRAS, "jagcodec.cli", "jagcodec.integrations"]),
        ("import jagcodec.cli", EXTRAS),
    ],
)
def test_what_is_not_needed_is_not_imported(code, names):
    assert said_by(f"{code}\nprint(json.dumps([n for n in {names} if n in sys.modules]))") == []


def test_a_star_and_dir_have_every_name_and_public_modules_are_attributes():
    code = """
import jagcodec
listed = dir(jagcodec)
modules = {name: getattr(jagcodec, name).__name__ for name in vars(jagcodec)["_MODULES"]}
names = {}
exec("from jagcodec import *", names)
print(json.dumps([sorted(names.keys() - {"__builtins__"}), listed, modules]))
"""
    star, listed, modules = said_by(code)
    assert star == sorted(vars(jagcodec)["__all__"])
    assert {*star, "errors", "types"} <= set(listed)
    assert len(set(listed)) == len(listed)
    assert modules == {name: f"jagcodec.{name}" for name in vars(jagcodec)["_MODULES"]}


def test_what_does_not_exist_is_an_attribute_error():
    assert not hasattr(jagcodec, "__path_of_nothing__")
    with pytest.raises(AttributeError, match="module 'jagcodec' has no attribute 'encod'"):
        getattr(jagcodec, "encod")  # noqa: B009, a checker would refuse the attribute
    with pytest.raises(ImportError, match="cannot import name 'encod'"):
        exec("from jagcodec import encod")


def test_a_name_is_one_object_also_after_a_pickle_and_in_a_new_process():
    for name in {*vars(jagcodec)["__all__"]} - {"__version__"}:
        value = getattr(jagcodec, name)
        assert getattr(jagcodec, name) is value
        assert pickle.loads(pickle.dumps(value)) is value
    data = pickle.dumps(jagcodec.Limits())
    code = f"import pickle; print(json.dumps(str(pickle.loads({data!r}))))"
    assert said_by(code) == str(jagcodec.Limits())
