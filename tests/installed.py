"""What is installed is used, in a process that sees no checkout: ``python -I tests/installed.py``.

`make wheel`, `make matrix` and cibuildwheel run this in fresh environments. With torch, a batch
makes the whole trip, and the blocks of the README and the guide run without a warning. Without it,
on a Python that torch has no wheel for, the C modules are called by themselves.
``--compiled`` asks for them, ``--pure`` for none.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import warnings
from array import array
from pathlib import Path


def main() -> None:
    (kind,) = sys.argv[1:] or [""]
    assert kind in ("--compiled", "--pure", ""), f"expected --compiled or --pure, found {kind}"
    spec = importlib.util.find_spec("jagcodec")
    assert spec is not None, "expected jagcodec, found no such package"
    package = Path(spec.origin or "").parent
    source = Path(__file__).resolve().parent.parent / "src"
    assert source not in package.parents, f"expected what is installed, found {package}"
    binaries = sorted(path.name for path in package.rglob("*.so"))
    done = []
    if kind == "--compiled":
        assert binaries == ["_cells.abi3.so", "_kernel.abi3.so"], f"expected both, found {binaries}"
        call_cells(package / "kernels" / "_cells.abi3.so")
        call_kernel(package / "kernels" / "_kernel.abi3.so")
        done.append("C modules")
    assert not (kind == "--pure" and binaries), f"expected no binaries, found {binaries}"
    command()
    done.append("command")
    if importlib.util.find_spec("torch") is not None:
        with warnings.catch_warnings(record=True) as shown:  # with Python's own filters
            for page in ("README.md", "docs/guide.md"):
                run_blocks(Path(__file__).resolve().parents[1] / page)
        assert shown == [], f"expected no warning, found {[str(each) for each in shown]}"
        trip(kind)
        done.append("README, guide, whole trip")
    version = importlib.metadata.version("jagcodec")
    print(f"jagcodec {version} on Python {sys.version.split()[0]}: {', '.join(done)}")


def loaded(path: Path):
    """A C module by its file, without the package around it, which needs torch."""
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)
    return module


def call_cells(path: Path) -> None:
    cells = loaded(path)
    assert cells.narrow_list([1, -2, 300]) == ("int16", b"\x01\x00\xfe\xff,\x01"), "narrow_list"
    found = cells.fill([[5, 6], (7,)], "i", 0, None)
    assert found == ("i", array("i", [5, 6, 7]).tobytes(), (2, 1), None), f"fill made {found}"
    assert cells.fill([[5, 6], (1 << 31,)], "i", 0, None)[3] == (1, 0), "fill of 2**31"


def call_kernel(path: Path) -> None:
    kernel = loaded(path)
    source, end_to_end = bytes(range(12)), bytearray(5)
    starts, lengths = array("q", [1, 8]), array("q", [2, 3])
    kernel.copy([(end_to_end, source, None, starts, lengths, 1)], 2)
    assert end_to_end == bytes([1, 2, 8, 9, 10]), f"copy wrote {bytes(end_to_end)!r}"
    rectangle = bytearray(8)
    kernel.pad([(rectangle, source, starts, lengths, None, 4, 1, b"\xff")], 1)
    assert rectangle == bytes([1, 2, 255, 255, 8, 9, 10, 255]), f"pad wrote {bytes(rectangle)!r}"
    with contextlib.suppress(ValueError):
        kernel.copy([(end_to_end, source, None, array("q", [1, 11]), lengths, 1)], 1)
        raise AssertionError("a row past the end of its source was copied")


def command() -> None:
    """--help and the report, which need no torch; without it the report says so and fails."""
    script = Path(sysconfig.get_path("scripts"), "jagcodec")
    without_torch = importlib.util.find_spec("torch") is None
    for arguments, status in ((["--help"], 0), (["doctor"], int(without_torch))):
        run = subprocess.run([script, *arguments], capture_output=True, text=True, cwd="/")
        found = f"{run.returncode}: {run.stdout}{run.stderr}"
        assert (run.returncode, run.stderr) == (status, ""), f"{arguments} ended with {found}"
    print(run.stdout, end="")


def trip(kind: str) -> None:
    import torch

    from jagcodec import decode, encode_fields, kernels, materialize

    name = kernels.backend().name
    expected = {"--compiled": "compiled", "--pure": "numpy"}.get(kind, name)
    assert name == expected, f"expected the kernel {expected}, found {name}"
    lengths = torch.tensor([2, 4, 3])
    valid = torch.arange(4) < lengths[:, None]
    ids = torch.arange(1, 13).view(3, 4) * valid
    columns = {"ids": ids, "answer": ["42", "", "yes"]}
    frames = encode_fields(columns, lengths=lengths, token_aligned_fields=["ids"])
    received = [bytes(memoryview(frame)) for frame in frames]
    batch = materialize(received, pad_value_dict={"ids": -1})
    assert torch.equal(batch["ids"], torch.where(valid, ids, -1)), f"found {batch['ids']}"
    assert batch["answer"].tolist() == ["42", "", "yes"], f"found {batch['answer']}"
    assert decode(received)["ids"].offsets().tolist() == [0, 2, 6, 9], "offsets"


def run_blocks(page: Path) -> None:
    """The blocks of a page in order, as a reader would run them."""
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        exec(compile(block, str(page), "exec"), names)


if __name__ == "__main__":
    main()
