"""The house: its rules, one test each; its front door; and docs/architecture.md, the map of it."""

import ast
import functools
import graphlib
import json
import pickle
import re
import runpy
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import jagcodec
from jagcodec import types
from tests.helpers import ROOT, run_python

SOURCE = Path(jagcodec.__file__).parent

# From the ground up: each may import those before it.
LAYERS = (
    *("errors", "_version", "data", "_dependencies", "_compiling", "_arguments"),
    *("memory", "kernels", "rows", "columns"),
    *("wire", "wire.stored", "wire.write", "wire.read", "wire.many", "wire.blobs", "wire.pickled"),
    *("produce", "forward", "train"),
    *("stdlib", "types", "schema", "record"),
    *("testing", "doctor", "integrations", "cli", "__main__"),
)


def layer_of(module):
    """Where a module of the package is in `LAYERS`: its room's place, or a place of its own."""
    while module not in LAYERS:
        module = module.rpartition(".")[0]
    return LAYERS.index(module)


@functools.cache
def trees():
    """Each module below the front door, by its name within the package: its syntax tree."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    del found["__init__"]
    return found


def imported(tree):
    """The full dotted name of every import in a module, wherever it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def arrows():
    """Which modules of the package each module imports."""
    found = {}
    for name, tree in trees().items():
        inner = {full for full in imported(tree) if full.split(".")[0] == "jagcodec"}
        found[name] = {_module(full.removeprefix("jagcodec.")) for full in inner} - {name, None}
    return found


def _module(full):
    """The module that a name is, or is in; None for a name of the front door."""
    while full and full not in trees():
        full = full.rpartition(".")[0]
    return full or None


def test_every_folder_of_tests_is_a_room_of_the_source():
    """Tests of one module at the top are at the top, and those of the checkout in `tests/repo`."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert folders - {"repo"} <= {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_imports_go_down_and_make_no_circle():
    for name in graphlib.TopologicalSorter(arrows()).static_order():
        for other in arrows()[name]:
            assert layer_of(other) <= layer_of(name), f"{name} imports {other}, which is above it"


def test_no_place_in_an_error_names_a_function_of_a_layer_above():
    """A caller passes its place, such as `materialize(out)`."""
    public = {name: getattr(jagcodec, name) for name in vars(jagcodec)["__all__"]}
    homes = {
        name: layer_of(value.__module__.removeprefix("jagcodec."))
        for name, value in public.items()
        if callable(value)
    }
    for name, tree in trees().items():
        layer = layer_of(name)
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        for text in (value for value in constants if isinstance(value, str)):
            place = re.match(r"(\w+)\(\w+\)", text)
            assert not place or homes.get(place[1], 0) <= layer, f"{name} names {text}"


def test_private_torch_is_in_rows_nested_alone_and_private_tensordict_in_non_tensor():
    private = {"torch": "rows.nested", "tensordict": "rows.non_tensor"}
    for name, tree in trees().items():
        dotted = {*imported(tree)}
        dotted |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for library, home in private.items():
            found = {x for x in dotted if re.match(rf"{library}(\.\w+)*\._[a-z]\w*", x)}
            assert name == home or not found, f"{name} uses {found}"


def test_copies_that_nobody_waits_for_are_made_in_memory_staging_alone():
    """Towards the host such a copy may be read before it has arrived."""
    for name, tree in trees().items():
        found = []
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            named = method and any(word.arg == "non_blocking" for word in call.keywords)
            if named or (method == "copy_" and len(call.args) > 1):
                found.append(ast.unparse(call))
        assert name == "memory.staging" or not found, f"{name}: {found}"


def test_numbers_of_headers_are_found_by_names_that_wire_schema_defines():
    """Nowhere is a `node.number + 3`, a `schema.number_count + 2` or a `numbers[i + 2]`."""
    counted = {"number", "numbers", "number_count", "dims", "first_group", "group_count"}

    def names(node):
        return {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(node)}

    def literals(node):
        found = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
        return {value for value in found if type(value) is int and value > 1}

    for name, tree in trees().items():
        if not name.startswith(("wire", "columns", "train")):
            continue
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
                sides = (node.left, node.right), (node.right, node.left)
                bad = any(literals(a) and names(b) & counted for a, b in sides)
            elif isinstance(node, ast.Subscript):
                bad = bool(names(node.value) & {"numbers", "node_numbers"} and literals(node.slice))
            else:
                continue
            found += [ast.unparse(node)] if bad else []
        assert found == [], name


MOST_LINES, MOST_LEVELS = 70, 4
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def levels(node):
    """How many blocks are in each other in a function, where an `elif` is as its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, levels(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def test_no_body_is_long_or_deep():
    """Lines of a body are those after its docstring."""
    found = set()
    for name, tree in trees().items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            body = function.body[ast.get_docstring(function) is not None :] or function.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
            if lines > MOST_LINES or levels(function) > MOST_LEVELS:
                found.add(f"{name}.{function.name}")
    assert found == set()


# Functions that several modules of one package have, because they are one interface.
INTERFACES = {
    "kernels": {"copy", "pad", "ends", "fill", "narrow_list"},  # each in C and in Python
    "integrations": {"rows_of", "reducers"},  # engines; what Ray writes
}

# These keep the names and the meanings of NeMo-RL's codec, which calls them.
OF_NEMO_RL = {
    *("to_nested_by_length", "maybe_pack_jagged", "pack_per_token_field", "stack_or_nest"),
    *("response_from_nested", "unwrap_wire_stripped_payload", "pack_jagged_fields", "materialize"),
}


HALVES = {
    "columns.user_arrays": "columns.tensor_columns",
    "produce.builder_arrays": "produce.builder_tensors",
    "wire.read.array_values": "wire.read.tensor_values",
}
"""Modules of one set of functions: of arrays, where torch is not installed, and of tensors."""


def public_functions(tree):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {x.name for x in tree.body if isinstance(x, functions) and not x.name.startswith("_")}


@pytest.mark.parametrize("of_arrays", HALVES)
def test_what_makes_arrays_has_no_function_that_what_makes_tensors_lacks(of_arrays):
    names = {
        name
        for module in (trees()[of_arrays], trees()[HALVES[of_arrays]])
        for node in module.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for name in {ast.unparse(x) for x in getattr(node, "targets", None) or [node.target]}
    }
    ours, theirs = (public_functions(trees()[x]) for x in (of_arrays, HALVES[of_arrays]))
    assert ours - theirs - names == set()


# Aliases that several modules define for themselves: the lower one imports nothing to have it.
SHORT_ALIASES = {"IntArray", "ByteArray", "BoolArray", "FloatArray", "B", "K", "V"}


def names_of_types(tree):
    """The classes of a module, and its aliases of types, which are capitalised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.strip("_")
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for name in (x.id for x in targets if isinstance(x, ast.Name)):
            if re.fullmatch(r"_?[A-Z][a-z]+\w*", name):
                yield name.strip("_")


def test_no_two_types_and_no_two_public_functions_have_the_same_name():
    """A type is a class, or an alias of one."""
    found = defaultdict(set)
    for module, tree in trees().items():
        package = module.split(".")[0]
        for name in {*names_of_types(tree)} - SHORT_ALIASES | public_functions(tree):
            home = HALVES.get(module, module)
            found[name].add(package if name in INTERFACES.get(package, ()) else home)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def code_of_callers():
    """The integrations, the commands, the examples, and the blocks of the docs that are run."""
    for folder in (SOURCE / "integrations", SOURCE / "cli", ROOT / "examples"):
        yield from (path.read_text() for path in folder.rglob("*.py"))
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        yield from re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_every_public_name_has_a_caller_outside_the_library():
    used = set()
    for tree in map(ast.parse, code_of_callers()):
        used |= {name.rpartition(".")[2] for name in imported(tree) if "jagcodec" in name}
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used |= {node.attr for node in attributes if ast.unparse(node.value) == "jagcodec"}
    assert {*vars(jagcodec)["__all__"]} - {"__version__"} - OF_NEMO_RL - used == set()


# --- who asks how columns and views are held ---------------------------------------------------

# Types of columns, and functions that stand for a question about one.
COLUMN_TYPES = {
    *("PackedColumn", "NonTensorStack", "NonTensorData", "TensorDictBase", "UnbatchedTensor"),
    *("LazyStackedTensorDict", "RaggedView", "Columns", "WireBatch", "_BATCHES"),
    *("dict", "list", "Tensor", "ndarray"),
}
QUESTIONS = {
    *("is_jagged", "is_non_tensor", "is_tensorclass", "is_leaf", "array_of_leaf", "is_batch"),
}
MOST_ASKING, MOST_NAMING_PACKED, MOST_PEEKING, MOST_BRANCHING = 20, 5, 6, 30


def last_names(node):
    """The names in an expression, each without what is before its last dot."""
    found = (getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node))
    return {name for name in found if name}


def called(node):
    """The name of the function that a node calls; an empty one for any other node."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def last_name(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def types_asked_for(function):
    """The types of columns that a function, and those inside it, ask a value for."""
    found: set[str] = set()
    nodes: Iterable[Any] = ast.walk(function)
    for node in nodes:
        name = called(node)
        if name in QUESTIONS:
            found.add(name)
        elif name in ("isinstance", "issubclass"):
            found |= last_names(node.args[1]) & COLUMN_TYPES
        elif isinstance(node, ast.Compare) and called(node.left) == "type":
            found |= set().union(*map(last_names, node.comparators)) & COLUMN_TYPES
        elif isinstance(node, ast.MatchClass):
            found |= last_names(node.cls) & COLUMN_TYPES
        elif last_name(node) == "is_nested":
            found.add("is_nested")
    return found


def test_few_functions_ask_for_many_types_of_columns():
    """They call the methods of `column_of(value)`, whose table is the place for a new type."""
    found = {}
    for module, tree in trees().items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            types_asked = types_asked_for(function)
            if len(types_asked) >= 3:
                found[f"{module}.{function.name}"] = sorted(types_asked)
    assert len(found) <= MOST_ASKING, found


def test_few_files_name_the_packed_column():
    """Its name in an annotation that is a string, or in a docstring, does not count."""
    found = set()
    for module, tree in trees().items():
        names = {getattr(node, "name", last_name(node)) for node in ast.walk(tree)}
        found |= {module} if "PackedColumn" in names else set()
    assert len(found) <= MOST_NAMING_PACKED, found


def peeks(node):
    """Whether a node asks for the starts of a view, or the type of its memory."""
    if isinstance(node, ast.Compare):
        is_none = isinstance(node.ops[0], (ast.Is, ast.IsNot))
        return is_none and last_name(node.left).endswith("starts")
    asked = called(node) in ("isinstance", "issubclass", "type") and node.args
    return bool(asked) and last_name(node.args[0]).endswith("memory")


def test_few_places_ask_how_the_rows_of_a_view_are_held():
    """`rows.views` answers. A new form of a view must be thought of wherever somebody asks.

    The first bound counts `starts is None` and `type(view.memory)`, by whatever local names. A
    property of the view moves such a question to one place, but its caller still has a branch for
    each answer. So the second bound counts those that ask `is_end_to_end`, `is_tensor` and
    `is_array`, too: it does not fall if a question is only written as a property.
    `uses_row_kernel` is not counted: it decides who copies rows, whatever their form.
    """
    peeking, asking = [], []
    for module, tree in trees().items():
        if module == "rows.views":
            continue
        nodes: Iterable[Any] = ast.walk(tree)
        for node in nodes:
            if peeks(node):
                peeking.append(f"{module}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.Attribute):
                named = node.attr in ("is_end_to_end", "is_tensor", "is_array")
                asking += [f"{module}:{node.lineno} {ast.unparse(node)}"] if named else []
    assert len(peeking) <= MOST_PEEKING, peeking
    assert len(peeking) + len(asking) <= MOST_BRANCHING, asking


PUBLIC_OF_WIRE_BATCH = {
    *("fields", "batch_size", "schema", "meta", "metas", "keys", "items", "values", "get"),
    *("arrays", "select", "rows", "row_lengths", "to_tensordict", "to_frames"),
}


def test_a_wire_batch_has_its_documented_methods_alone_and_each_has_a_docstring():
    """What the library asks of an open batch are functions of `columns.batch`."""
    assert {name for name in dir(jagcodec.WireBatch) if name[0] != "_"} == PUBLIC_OF_WIRE_BATCH
    methods = {*PUBLIC_OF_WIRE_BATCH, "__getitem__", "__len__", "__iter__", "__reduce_ex__"}
    docstrings = {name: getattr(jagcodec.WireBatch, name).__doc__ for name in methods}
    of_python = {getattr(kind, name, None).__doc__ for kind in (object, dict) for name in methods}
    assert {name for name, text in docstrings.items() if not text or text in of_python} == set()


# --- docs/architecture.md ----------------------------------------------------------------------

PAGE = (ROOT / "docs/architecture.md").read_text()
PROSE, _, TABLE = PAGE.partition("<!-- generated: modules -->")
FILE = r"`((?:[\w.]+/)*\w+\.(?:py|c|md|toml))`"


def path_of(name):
    below = SOURCE / name
    return below if below.exists() else ROOT / name


def names_in(path):
    """Names of functions, classes, methods and assignments of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def claims():
    """`file`: `name`, `name`   and   `name`, `name` in `file`   and   `name` (`file`)"""
    for file, names in re.findall(rf"{FILE}: ((?:`\w+`(?:, )?)+)", PROSE):
        yield from ((file, name) for name in re.findall(r"`(\w+)`", names))
    for names, file in re.findall(rf"((?:`\w+`(?:, )?)+)(?: in | \(){FILE}", PROSE):
        yield from ((file, name) for name in re.findall(r"`(\w+)`", names))


def test_what_the_page_names_exists_where_it_says():
    files = set(re.findall(FILE, PROSE))
    assert [name for name in files if not path_of(name).exists()] == []
    found = {*claims()}
    assert len(found) > 50
    defined = {file: {*names_in(path_of(file))} for file, _ in found}
    assert [(file, name) for file, name in found if name not in defined[file]] == []
    source = " ".join(path.read_text() for path in SOURCE.rglob("*.py"))
    words = set(re.findall(r"`(\w+)`", re.sub(r"```.*?```", "", PROSE, flags=re.S)))
    assert words - set(re.findall(r"\w+", source)) - {"LAYERS"} == set()


def section(title):
    return PROSE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_begins_with_the_rooms_from_the_ground_up_and_their_nouns():
    (picture,) = re.findall(r"```text\n(.*?)\n```", PROSE.partition("\n## ")[0], re.S)
    lines = re.findall(r"^ {4}((?:\w+/(?:\w+/)? {2})+)", picture, re.M)[::-1]
    rooms = [name for name in LAYERS if SOURCE.joinpath(*name.split("."), "__init__.py").exists()]
    drawn = [room.removesuffix("/").replace("/", ".") for room in "".join(lines).split()]
    assert drawn == [name for name in rooms if name != "data"]
    nouns = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([\w/]+\.py)` \|", PROSE, re.M)
    assert len(nouns) == 7
    for names, file in nouns:
        assert {*re.findall(r"\w+", names)} <= {*names_in(path_of(file))}
        assert all(name in picture for name in re.findall(r"\w+", names))
    source = " ".join(path.read_text() for path in SOURCE.rglob("*.py"))
    named = set(re.findall(r"[a-z]+_\w+|[A-Z]+[a-z]+[A-Z]\w*", picture))
    assert len(named) > 8
    assert named - set(re.findall(r"\w+", source)) == set()


GROUPS = (
    *("Writing", "Reading", "Joining", "Padding"),
    *("Forward passes", "Errors", "Memory", "Integrations"),
)


def test_where_is_it_decided_has_few_rows_in_groups_and_short_answers():
    """Most answers are where one looks first; those have no row."""
    rows = re.findall(r"^\| (.+?) \| (.*?) ?\|$", section("Where is it decided"), re.M)[1:]
    groups = [question.strip("*") for question, answer in rows if not answer]
    assert groups == [*GROUPS]
    answers = [answer for _, answer in rows if answer]
    assert len(answers) <= 30
    for answer in answers:
        assert 1 <= len(re.findall(FILE, answer)) <= 2, answer


ADDED = (
    *("a type of column", "a way to store cells"),
    *("a layout", "a kind of value", "an integration"),
)


def test_the_page_has_short_lists_of_what_to_change_to_add_something():
    assert re.findall(r"^## Add (.+)$", PROSE, re.M) == [*ADDED]
    for what in ADDED:
        steps, *_ = section(f"Add {what}").split("\n### ")
        assert 4 <= len(re.findall(r"^\d\. ", steps, re.M)) <= 7, what


GLOSSARY = PROSE.partition("## Glossary")[2].partition("\n## ")[0]


def identifiers(tree):
    """Every name that a module gives to something, or uses."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name.strip("_")


def test_the_glossary_has_each_word_once_and_the_code_uses_its_words():
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]*?) \|$", GLOSSARY, re.M)[1:]
    words = [word for cell, _, _ in rows for word in cell.split(", ")]
    assert 25 <= len(words) == len(set(words)) <= 30
    known = {name for tree in trees().values() for name in identifiers(tree)}
    named = {name.strip("_") for *_, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 20
    assert named - known == set()
    retired = set(re.findall(r"~~(\w+)~~", GLOSSARY))
    assert len(retired) > 5
    for module, tree in trees().items():
        assert retired & {*identifiers(tree)} == set(), module


def test_the_table_of_modules_is_that_of_the_docstrings_and_has_every_module():
    names = runpy.run_path(str(ROOT / "docs/modules.py"))
    assert names["rewritten"](PAGE) == PAGE, "run: python docs/modules.py"
    files = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "__" not in path.name
    }
    expected = {name for name in files if not name.startswith("cli/")} - {"_version.py"}
    assert {*re.findall(r"^\| `([\w./]+\.py)`", TABLE, re.M)} == expected


HEAVY = ["torch", "tensordict", "numpy", "msgpack", "pyarrow"]
EXTRAS = ["zmq", "ray", "transfer_queue", "verl", "PIL", "hypothesis", "zstandard"]
ENGINES = "from jagcodec.integrations import json_arrays, sglang, vllm\n"
ENGINES += "vllm.rows_of([]), sglang.rows_of([]), vllm.rows_of_replies([])"


def said_by(code):
    """What Python prints as JSON in a new process, where nothing is imported yet."""
    return json.loads(run_python(f"import json, sys\n{code}").stdout)


def test_a_new_process_writes_types_of_this_library():
    code = (
        "import torch; from jagcodec import decode, encode; from jagcodec.types import PackedColumn"
    )
    code += "\none = PackedColumn(torch.arange(3), torch.tensor([0, 3]), 3, torch.arange(3))"
    assert said_by(f"{code}\nprint(json.dumps(decode(encode(one)).values.tolist()))") == [0, 1, 2]


def test_type_checkers_and_processes_find_the_same_names_in_the_same_modules():
    tree = ast.parse(Path(jagcodec.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    version = {("jagcodec._version", "__version__")}
    homes = {(f"jagcodec.{home}", name) for name, home in vars(jagcodec)["_HOME_OF"].items()}
    modules = {("jagcodec", name) for name in vars(jagcodec)["_MODULES"]}
    found = {(node.module, alias.name) for node in imports for alias in node.names}
    assert found == homes | modules | version
    tree = ast.parse(Path(types.__file__).with_suffix(".pyi").read_text())
    homes = {(f"jagcodec.{home}", name) for name, home in vars(types)["_HOME_OF"].items()}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {(node.module, alias.name) for node in imports for alias in node.names} == homes
    assert {*dir(types)} > {*vars(types)["__all__"]} == {name for _, name in homes}
    assert all(getattr(types, name) is getattr(types, name) for _, name in homes)


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
        ("from jagcodec import ArgumentError, Limits", ["jagcodec.train"]),
        ("from jagcodec import *", [*EXTRAS, "jagcodec.cli", "jagcodec.integrations"]),
        ("import jagcodec.cli", EXTRAS),
        ("import jagcodec.testing", EXTRAS),
        (ENGINES, ["torch", "tensordict", *EXTRAS, "pyarrow", "vllm"]),
        ("import jagcodec.integrations\njagcodec.encode", [*EXTRAS, "pyarrow"]),
    ],
)
def test_what_is_not_needed_is_not_imported(code, names):
    assert said_by(f"{code}\nprint(json.dumps([n for n in {names} if n in sys.modules]))") == []


# Writers of rows that are not tensors start without torch, which takes a second to import.
WITHOUT_TORCH = (
    *("errors", "_arguments", "memory.arrays", "memory.blocks", "memory.buffers"),
    *("kernels", "kernels.numpy_kernel", "kernels.tasks", "kernels.python_cells"),
    *("wire.spec", "wire.checks", "wire.documents", "wire.native", "wire.header", "wire.schema"),
    *("wire.limits", "wire.frames", "wire.dtypes", "wire.items", "wire.write.place"),
    *("wire.stored.narrow", "wire.stored.elide_cells", "wire.stored.elide_documents"),
    "wire.write.items_to_message",
    *("rows.row_splits", "rows.views", "rows.chosen_rows", "rows.chosen_rows"),
    *("produce.cell_dtypes", "produce.row_kinds", "produce.number_types"),
    *("produce.numbers", "produce.cells", "train.json_text", "memory.small_floats"),
    *("columns.batch", "columns.held", "columns.memory", "columns.join", "columns.user_arrays"),
    *("wire.read.decoder", "wire.read.array_values", "wire.read.message_source"),
    *("wire.read.wire_batch", "train.rows"),
    *("wire.many.joined", "wire.compare", "train.describe", "train.tax", "train.to_rows", "record"),
)


def test_makers_of_rows_import_neither_torch_nor_tensordict():
    """Nor do rows of numbers, lists, arrays and objects, when they become cells."""
    code = f"""
import importlib
found = []
def look(at):
    found.extend(at for name in ("torch", "tensordict") if name in sys.modules)
for name in {WITHOUT_TORCH}:
    importlib.import_module(f"jagcodec.{{name}}")
    look(name)
import numpy as np
from jagcodec.errors import JagcodecError
from jagcodec.produce.cells import cells_of_rows
for dtype in (None, "float64", "bfloat16"):
    for rows in ([1, 2], [[1, 2.5], (3,)], [[[1], [2]]], [[np.int8(1)]], [np.arange(3)]):
        cells_of_rows(rows, dtype)
for rows in (["a"], [None, {{}}], [[{{}}]], [object()], [[np.arange(3)]]):
    cells_of_rows(rows)
for rows in ([[1, "a"]], [[1], [None]], [True, 1], [[1], {{}}]):
    try:
        cells_of_rows(rows)
    except JagcodecError:
        continue
    found.append(str(rows))
look("cells_of_rows")
print(json.dumps(found))
"""
    assert said_by(code) == []


def test_a_star_and_dir_have_every_name_and_nothing_else_is_an_attribute():
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
