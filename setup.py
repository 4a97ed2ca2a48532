"""The one part of the build that `pyproject.toml` cannot say: the optional C extension."""

import sysconfig

from setuptools import Extension, setup

# One binary for every Python from 3.11 on; _kernel.c sets Py_LIMITED_API to the same version. A
# free-threaded Python has no limited API yet, so there the extension is built for that version.
STABLE_ABI = None if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp311"

setup(
    ext_modules=[
        Extension(
            "jagcodec.rowcopy._kernel",
            ["src/jagcodec/rowcopy/_kernel.c"],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler numpy does what it does, more slowly
            py_limited_api=STABLE_ABI is not None,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if STABLE_ABI else {},
)
