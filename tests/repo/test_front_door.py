"""Public names are imported when they are asked for, and by type checkers all the same."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec

HEAVY = ["torch", "tensordict", "numpy", "msgpack", "matplotlib", "pyarrow", "safetensors", "tqdm"]


def said_by(code):
    """What Python prints as JSON in a new process, where nothing is imported yet."""
    run = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def imports_for_type_checkers():
    tree = ast.parse(Path(jagcodec.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {(node.module, alias.name) for node in imports for alias in node.names}


def test_type_checkers_and_processes_find_the_same_names_in_the_same_modules():
    version = {("jagcodec._version", "__version__")}
    homes = {(f"jagcodec.{home}", name) for name, home in vars(jagcodec)["_HOME_OF"].items()}
    modules = {("jagcodec", name) for name in vars(jagcodec)["_MODULES"]}
    assert imports_for_type_checkers() == homes | modules | version


@pytest.mark.parametrize("arguments", [None, ["--help"], ["--version"], ["tax", "--help"]])
def test_neither_an_import_nor_help_waits_for_torch_or_numpy(arguments):
    code = f"""
import contextlib, io
if {arguments!r} is None:
    import jagcodec
else:
    from jagcodec.cli import main
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main({arguments!r})
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    assert said_by(code) == []


def test_a_name_brings_its_own_module_and_not_all():
    code = """
from jagcodec import ArgumentError, Limits
print(json.dumps([ArgumentError.__module__, Limits.__module__, "jagcodec.batch" in sys.modules]))
"""
    assert said_by(code) == ["jagcodec.errors", "jagcodec.wire.limits", False]


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


@pytest.mark.parametrize("name", [n for n in vars(jagcodec)["__all__"] if n != "__version__"])
def test_a_name_is_one_object_also_after_a_pickle(name):
    value = getattr(jagcodec, name)
    assert getattr(jagcodec, name) is value
    assert pickle.loads(pickle.dumps(value)) is value


def test_a_class_is_unpickled_where_nothing_is_imported():
    data = pickle.dumps(jagcodec.Limits())
    code = f"import pickle; print(json.dumps(str(pickle.loads({data!r}))))"
    assert said_by(code) == str(jagcodec.Limits())
