"""The one part of the build that `pyproject.toml` cannot say: the optional C extensions."""

import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# One binary for every Python from 3.11 on; the C files set Py_LIMITED_API to the same version. A
# free-threaded Python has no limited API yet, so there they are built for that version.
STABLE_ABI = None if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp311"

# What makes a fault in C harder to exploit, where the compiler and the linker take it. The level of
# _FORTIFY_SOURCE is undefined first, because some systems set one of their own.
HARDENED_COMPILE = [
    ["-fstack-protector-strong"],
    ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"],
    ["-fcf-protection"],
]
# The loop over equal cells takes a third longer where it straddles lines of the cache, and the
# stack protector's code in front would shift it there.
ALIGNED = [["-falign-functions=64"]]
HARDENED_LINK = [["-Wl,-z,relro,-z,now"], ["-Wl,-z,noexecstack"]]


class HardenedBuild(build_ext):
    """Builds with those of the flags above that work here."""

    def build_extension(self, ext: Extension) -> None:
        """Try the flags, then build."""
        for flags in HARDENED_COMPILE + ALIGNED:
            if self._builds(flags, []):
                ext.extra_compile_args += flags
        for flags in HARDENED_LINK:
            if self._builds([], flags):
                ext.extra_link_args += flags
        super().build_extension(ext)

    def _builds(self, compile_flags: list[str], link_flags: list[str]) -> bool:
        """Whether a shared library of nothing is built with these flags, without a warning."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "flags.c")
            source.write_text("int flags(int x) { return x; }\n")
            # _FORTIFY_SOURCE warns where nothing is optimized.
            options = ["-O3", "-Werror", *compile_flags]
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=options
                )
                self.compiler.link_shared_object(
                    objects, str(Path(folder, "flags.so")), extra_postargs=link_flags
                )
            except Exception:  # of many compilers, each with errors of its own
                return False
        return True


setup(
    cmdclass={"build_ext": HardenedBuild},
    ext_modules=[
        Extension(
            "jagcodec.rowcopy._kernel",
            ["src/jagcodec/rowcopy/_kernel.c"],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler numpy does what it does, more slowly
            py_limited_api=STABLE_ABI is not None,
        ),
        Extension(
            "jagcodec.cells._cells",
            ["src/jagcodec/cells/_cells.c"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
            libraries=["m"],
            optional=True,  # likewise
            py_limited_api=STABLE_ABI is not None,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if STABLE_ABI else {},
)
