"""Public names are imported when they are asked for, and by type checkers all the same."""

import ast
import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec


def said_by(code):
    """What Python prints as JSON in a new process, where nothing is imported yet."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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


def test_import_alone_imports_nothing_else():
    heavy = ["torch", "tensordict", "numpy", "msgpack", "jagcodec.wire", "jagcodec.errors"]
    code = (
        f"import json, sys, jagcodec; print(json.dumps([n for n in {heavy} if n in sys.modules]))"
    )
    assert said_by(code) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["tax", "--help"]])
def test_help_waits_for_neither_torch_nor_numpy(arguments):
    code = f"""
import contextlib, io, json, sys
from jagcodec.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
    main({arguments!r})
heavy = ["torch", "tensordict", "numpy", "msgpack"]
print(json.dumps([printed.getvalue(), [name for name in heavy if name in sys.modules]]))
"""
    printed, found = said_by(code)
    assert "jagcodec" in printed
    assert found == []


def test_a_name_brings_its_own_module_and_not_all():
    code = """
import json, sys
from jagcodec import ArgumentError, Limits
print(json.dumps([ArgumentError.__module__, Limits.__module__, "jagcodec.batch" in sys.modules]))
"""
    assert said_by(code) == ["jagcodec.errors", "jagcodec.wire.limits", False]


def test_a_star_brings_every_name_and_nothing_else():
    code = """
import json
names = {}
exec("from jagcodec import *", names)
print(json.dumps(sorted(names.keys() - {"__builtins__"})))
"""
    assert said_by(code) == sorted(vars(jagcodec)["__all__"])


def test_dir_lists_what_was_not_asked_for_yet():
    code = "import json, jagcodec; print(json.dumps(dir(jagcodec)))"
    listed = said_by(code)
    assert {*vars(jagcodec)["__all__"], "errors", "types"} <= set(listed)
    assert len(set(listed)) == len(listed)


def test_public_modules_are_attributes_as_if_they_had_been_imported():
    names = [f"jagcodec.{name}.__name__" for name in vars(jagcodec)["_MODULES"]]
    for name in names:
        code = f"import json, jagcodec; print(json.dumps({name}))"
        assert f"{said_by(code)}.__name__" == name


def test_a_name_is_the_same_object_each_time():
    for name in vars(jagcodec)["__all__"]:
        assert getattr(jagcodec, name) is getattr(jagcodec, name)
        assert name in vars(jagcodec)


def test_what_does_not_exist_is_an_attribute_error():
    assert not hasattr(jagcodec, "__path_of_nothing__")
    with pytest.raises(AttributeError, match="module 'jagcodec' has no attribute 'encod'"):
        getattr(jagcodec, "encod")  # noqa: B009, a checker would refuse the attribute
    with pytest.raises(ImportError, match="cannot import name 'encod'"):
        exec("from jagcodec import encod")


@pytest.mark.parametrize("name", [n for n in vars(jagcodec)["__all__"] if n != "__version__"])
def test_names_are_pickled_by_reference(name):
    value = getattr(jagcodec, name)
    assert copy.deepcopy(value) is value
    if isinstance(value, type) or callable(value):
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_class_is_unpickled_where_nothing_is_imported():
    data = pickle.dumps([jagcodec.Limits(), jagcodec.types.PaddingSide])
    code = f"import pickle, json; print(json.dumps([str(x) for x in pickle.loads({data!r})]))"
    assert said_by(code)[0] == str(jagcodec.Limits())
