"""The house: imports run one way, and the front door has exactly these names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec

SOURCE = Path(jagcodec.__file__).parent

# From the ground up. A room may import rooms of lower floors only, never beside it or above.
FLOORS = (
    ("_version", "errors", "wire.spec"),
    ("memory.blocks",),
    ("memory.tensor_bytes", "wire.checks"),
    ("memory.staging", "rowcopy"),
    (
        "ragged.nested",
        "ragged.pad_values",
        "ragged.row_index",
        "wire.dtypes",
        "wire.frames",
        "wire.payload",
    ),
    ("wire.records", "wire._batch"),
    ("ragged.views", "wire.header"),
    (
        *("pack.tensors", "ragged.varlen", "ragged.non_tensor"),
        *("wire.numpy_dtypes", "wire.narrow", "wire.views", "wire.registry"),
    ),
    ("pack.fields", "wire.encoder", "wire.decoder"),
    ("batch.leaves",),
    (
        "pack.columns",
        "pack.masked",
        "integrations._trimmed",
        "wire.blobs",
        "wire.resident",
        "wire.lazy",
    ),
    ("batch.rows",),
    ("batch.batched_data_dict",),
    ("batch.materialize", "batch.padding_tax", "scaling", "testing"),
    ("integrations",),
    ("demo",),
    ("cli",),
    ("__main__",),
)


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def floor_of(module):
    for floor, rooms in enumerate(FLOORS):
        for room in rooms:
            if module == room or module.startswith(f"{room}."):
                return floor, room
    raise AssertionError(f"{module} is in no room: give it a floor in FLOORS")


def imports_of(path):
    """Modules of this package that a file imports, as the rooms see them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = (node.module or "").removeprefix("jagcodec").removeprefix(".")
            if (node.module or "").split(".")[0] != "jagcodec":
                continue
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                room = SOURCE / Path(*inner.split("."))
                files = [room, room.with_suffix(".py"), room.with_suffix(".c")]
                yield inner if any(file.exists() for file in files) else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jagcodec":
                    yield alias.name.removeprefix("jagcodec").removeprefix(".")


@pytest.mark.parametrize(
    ("module", "path"),
    [
        pair
        for pair in modules()
        if pair[0] not in ("__init__", "wire", "memory", "ragged", "pack", "batch")
    ],
)
def test_imports_run_down(module, path):
    floor, room = floor_of(module)
    for imported in imports_of(path):
        below, other = floor_of(imported)
        assert below < floor or other == room, f"{module} imports {imported}, which is not below it"


def test_front_door_is_exactly_this():
    assert set(jagcodec.__all__) == {
        "ArgumentError",
        "ArgumentIndexError",
        "ArgumentKeyError",
        "ArgumentTypeError",
        "BatchedDataDict",
        "FieldSchema",
        "JagcodecError",
        "Layout",
        "MsgpackDecoder",
        "MsgpackEncoder",
        "PackedColumn",
        "PaddingSide",
        "TransportError",
        "TransportTimeoutError",
        "UnsupportedTypeError",
        "WireBatch",
        "WireFormatError",
        "__version__",
        "balance_rows",
        "concat_rows",
        "decode",
        "decode_batch",
        "dump",
        "encode",
        "encode_batch_into",
        "encode_fields",
        "encode_into",
        "encoded_size",
        "load",
        "materialize",
        "open_wire",
        "maybe_pack_jagged",
        "merge_columns",
        "pack_jagged_fields",
        "pack_masked_fields",
        "pack_per_token_field",
        "padding_tax",
        "register_type",
        "repeat_rows",
        "response_from_nested",
        "select_rows",
        "split_rows",
        "response_to_nested",
        "stack_or_nest",
        "to_blob",
        "to_nested_by_length",
        "unpack_masked_fields",
        "unwrap_wire_stripped_payload",
    }
    for name in jagcodec.__all__:
        assert getattr(jagcodec, name) is not None


def loaded_by(statement, *names):
    code = f"import sys; {statement}; print([n for n in {names!r} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(run.stdout)


def test_extras_load_only_when_asked():
    extras = ("zmq", "ray", "hypothesis", "jagcodec.cli", "jagcodec.integrations")
    assert loaded_by("import jagcodec", *extras) == []
    assert loaded_by("import jagcodec.integrations", "zmq", "ray", "mooncake") == []


def test_the_header_layer_needs_no_torch():
    # Not by way of the package's front door, which re-exports everything.
    code = (
        "import sys, types; package = types.ModuleType('jagcodec'); "
        f"package.__path__ = [{str(SOURCE)!r}]; sys.modules['jagcodec'] = package; "
        "import jagcodec.wire.header; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
