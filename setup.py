"""The one part of the build that `pyproject.toml` cannot say: the optional C extensions."""

import sysconfig

from setuptools import Extension, setup

# One binary for every Python from 3.11 on; _kernel.c sets Py_LIMITED_API to the same version. A
# free-threaded Python has no limited API yet, so there the extension is built for that version.
STABLE_ABI = None if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp311"


def optional(name: str, source: str, *, stable_abi: bool) -> Extension:
    """An extension that is left out where there is no compiler; Python code replaces it."""
    return Extension(
        name,
        [source],
        extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        optional=True,
        py_limited_api=stable_abi,
    )


setup(
    ext_modules=[
        optional(
            "jagcodec.rowcopy._kernel",
            "src/jagcodec/rowcopy/_kernel.c",
            stable_abi=STABLE_ABI is not None,
        ),
        optional("jagcodec.wire._batch", "src/jagcodec/wire/_batch.c", stable_abi=False),
    ],
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if STABLE_ABI else {},
)
