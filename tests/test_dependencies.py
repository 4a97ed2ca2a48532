"""What the library needs of torch and tensordict beyond public names, in versions that lack it."""

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack

from jagcodec import _dependencies
from jagcodec._dependencies import private_names
from jagcodec.rows import nested, non_tensor


def private():
    """Each module of ours, and each name that it imports where `private_names` is."""
    for ours in (nested, non_tensor):
        for guard in ast.walk(ast.parse(Path(str(ours.__file__)).read_text())):
            if isinstance(guard, ast.With) and "private_names" in ast.unparse(guard.items[0]):
                for node in guard.body:
                    if isinstance(node, ast.ImportFrom):
                        yield from ((ours, node.module, each.name) for each in node.names)


@pytest.mark.parametrize(("ours", "module", "name"), [*private()])
def test_a_private_name_that_is_gone_is_named_with_a_remedy(monkeypatch, ours, module, name):
    package = module.partition(".")[0]
    monkeypatch.delattr(import_module(module), name)
    expected = rf"jagcodec needs private names of {package}, .*\b{name}\b.*pip install '{package}=="
    with pytest.raises(ImportError, match=expected):
        runpy.run_path(ours.__file__, run_name="another")


JAGGED = ("_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache")
INSTANCES = [
    *((nested, nested.NESTED_TENSOR, name) for name in JAGGED),
    *((non_tensor, NonTensorData, name) for name in ("_non_tensordict", "_tensordict")),
    *((non_tensor, NonTensorStack, name) for name in ("tensordicts", "_batch_size")),
]


@pytest.mark.parametrize(("ours", "cls", "name"), INSTANCES)
def test_so_is_an_attribute_of_instances_that_is_read_later(monkeypatch, ours, cls, name):
    known = _dependencies.check_attributes

    def check(instance, *names):
        if type(instance) is cls:
            del vars(instance)[name]
        known(instance, *names)

    monkeypatch.setattr(_dependencies, "check_attributes", check)
    with pytest.raises(ImportError, match=rf"private names of .*no attribute '{name}'.*=="):
        runpy.run_path(ours.__file__, run_name="another")


METHODS = ("_coalesced_", "_indices", "_is_zerotensor", "_nested_tensor_size", "_values")


@pytest.mark.parametrize("name", METHODS)
def test_so_is_a_method_of_tensors(monkeypatch, name):
    class Meta(type(torch.Tensor)):  # type: ignore[misc]
        def __getattribute__(cls, attribute):
            if attribute == name:
                raise AttributeError(f"type object 'Tensor' has no attribute {name!r}")
            return super().__getattribute__(attribute)

        def __instancecheck__(cls, value):
            return isinstance(value, cls.__base__)

    stand_in = Meta("Tensor", (torch.Tensor,), {})
    monkeypatch.setattr(torch, "Tensor", stand_in)
    with pytest.raises(ImportError, match=rf"private names of torch.*no attribute '{name}'"):
        runpy.run_path(str(nested.__file__), run_name="another")


def test_so_is_a_name_of_a_class_of_tensordict(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(LazyStackedTensorDict, "_td_dim_name")
        with pytest.raises(ImportError, match=r"names of tensordict.*no attribute '_td_dim_name'"):
            runpy.run_path(non_tensor.__file__, run_name="another")
    monkeypatch.setattr(tensordict, "TensorDict", SimpleNamespace())
    with pytest.raises(ImportError, match=r"names of tensordict.*no attribute '_new_unsafe'"):
        runpy.run_path(non_tensor.__file__, run_name="another")


def test_every_private_attribute_that_is_read_is_checked_at_import():
    """Names of attributes, and keys of `vars`, that begin with one underscore."""
    # Read with a default, or under a guard of its own.
    guarded = {"_source", "_data"}
    for ours in (nested, non_tensor):
        tree = ast.parse(Path(str(ours.__file__)).read_text())
        guards = [ast.unparse(node) for node in tree.body if isinstance(node, ast.With)]
        checked = {word for guard in guards for word in re.findall(r"\b_[a-z]\w*", guard)}
        nodes = [*ast.walk(tree)]
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        keys = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
        read |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
        private = {name for name in read if re.match(r"_[a-z]", name)}
        assert private - checked - guarded == set()


def test_so_is_an_attribute():
    with (
        pytest.raises(ImportError, match=r"lacks \(.*no attribute 'gone'\); install .*'torch==1'"),
        private_names("torch", tested="1"),
    ):
        _ = torch.gone  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "is_stored"),
    [
        *(("0.9.1", True), ("0.14rc1", True), ("0.14.0+abc", True), ("0.15.0", False)),
        *(("0.16rc1", False), ("1.0a0", False), ("2026.1", False), ("main", False)),
    ],
)
def test_a_candidate_or_a_build_of_tensordict_can_be_imported(monkeypatch, version, is_stored):
    monkeypatch.setattr(tensordict, "__version__", version)
    assert runpy.run_path(str(non_tensor.__file__))["_NONE_IS_STORED"] is is_stored
