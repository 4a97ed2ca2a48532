"""How the extensions were built: what makes a fault in C harder to exploit."""

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("readelf") is None, reason="reads ELF with readelf"
)


@pytest.fixture(scope="module", params=["kernels._kernel", "kernels._cells"])
def elf(request):
    kernel = pytest.importorskip(f"jagcodec.{request.param}")
    options = ["--wide", "--dynamic", "--segments", "--symbols"]
    found = subprocess.run(
        ["readelf", *options, kernel.__file__], capture_output=True, text=True, check=True
    )
    if "asan" in found.stdout:
        pytest.skip("built for a sanitizer")
    return found.stdout.splitlines()


def test_symbols_are_bound_when_it_is_loaded_and_read_only_then(elf):
    assert any("FLAGS" in line and "NOW" in line for line in elf)
    assert any(line.split()[:1] == ["GNU_RELRO"] for line in elf)


def test_the_stack_is_protected_and_holds_no_code(elf):
    assert any("__stack_chk_fail" in line for line in elf)
    (stack,) = (line.split() for line in elf if line.split()[:1] == ["GNU_STACK"])
    assert "RW" in stack
    assert not any("RWE" in line.split() for line in elf)
