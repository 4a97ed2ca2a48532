"""What the library needs of torch and tensordict beyond public names, in versions that lack it."""

import ast
import runpy
from importlib import import_module
from pathlib import Path

import pytest
import torch

from jagcodec._dependencies import private_names
from jagcodec.ragged import nested, non_tensor


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


def test_so_is_an_attribute():
    with (
        pytest.raises(ImportError, match=r"lacks \(.*no attribute 'gone'\); install .*'torch==1'"),
        private_names("torch", tested="1"),
    ):
        _ = torch.gone  # type: ignore[attr-defined]
