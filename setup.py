"""What `pyproject.toml` cannot say of the build: the optional C extensions, and absolute links."""

import os
import re
import runpy
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
VERSION = runpy.run_path(str(HERE / "src/jagcodec/_version.py"))["__version__"]
REPOSITORY = "https://github.com/jagcodec/jagcodec"

# One binary for every Python from 3.11 on; the C files set Py_LIMITED_API to the same version. A
# free-threaded Python has no limited API yet, so there they are built for that version.
STABLE_ABI = None if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp311"

# Without a compiler numpy does what the extensions do, more slowly, and `jagcodec doctor` says so.
# If you would rather have no build than a slow one, set this to 1.
REQUIRE_COMPILED = os.environ.get("JAGCODEC_REQUIRE_COMPILED", "")
if REQUIRE_COMPILED not in ("", "0", "1"):
    raise SystemExit(f"JAGCODEC_REQUIRE_COMPILED: expected 0 or 1, found {REQUIRE_COMPILED!r}")
OPTIONAL = REQUIRE_COMPILED != "1"

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
# Each item of a list is a call or two into Python, which take a sixth less time without a jump.
WITHOUT_JUMPS = [["-fno-plt"]]
HARDENED_LINK = [["-Wl,-z,relro,-z,now"], ["-Wl,-z,noexecstack"]]


class HardenedBuild(build_ext):
    """Builds with those of the flags above that work here."""

    def build_extension(self, ext: Extension) -> None:
        """Try the flags, then build."""
        for flags in HARDENED_COMPILE + ALIGNED + WITHOUT_JUMPS:
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


class HonestWheel(bdist_wheel):
    """A wheel that no extension could be built for is one for every platform, and says so."""

    def run(self) -> None:
        """Build the extensions first: what they are decides the tag."""
        if self.distribution.has_ext_modules():
            build = self.get_finalized_command("build_ext")
            build.inplace = False
            for output in map(Path, build.get_outputs()):
                output.unlink(missing_ok=True)  # of an earlier build, which may have been another
            self.run_command("build_ext")
            if not any(Path(output).exists() for output in build.get_outputs()):
                self.distribution.ext_modules = None
                self.root_is_pure = True
                self.py_limited_api = False
                self.reinitialize_command("build", reinit_subcommands=True)
        super().run()


def page_of_an_index() -> str:
    """The README with links into the repository, since an index has no files beside it."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/v{VERSION}/{link[3]})"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)", absolute, text)


setup(
    cmdclass={"build_ext": HardenedBuild, "bdist_wheel": HonestWheel},
    long_description=page_of_an_index(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "jagcodec.kernels._kernel",
            ["src/jagcodec/kernels/_kernel.c"],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            optional=OPTIONAL,
            py_limited_api=STABLE_ABI is not None,
        ),
        Extension(
            "jagcodec.kernels._cells",
            ["src/jagcodec/kernels/_cells.c"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
            libraries=["m"],
            optional=OPTIONAL,
            py_limited_api=STABLE_ABI is not None,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if STABLE_ABI else {},
)
