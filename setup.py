"""The one part of the build that `pyproject.toml` cannot say: the optional C extension."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "jagcodec.rowcopy._compiled",
            ["src/jagcodec/rowcopy/_compiled.c"],
            extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            # Where there is no compiler, the numpy backend takes its place.
            optional=True,
        )
    ]
)
