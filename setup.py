"""The one part of the build that `pyproject.toml` cannot say: the optional C extensions."""

from setuptools import Extension, setup


def optional(name: str, source: str) -> Extension:
    """An extension in whose place Python goes where there is no compiler."""
    return Extension(
        name,
        [source],
        extra_compile_args=["-std=c11", "-O3", "-pthread", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    ext_modules=[
        optional("jagcodec.rowcopy._kernel", "src/jagcodec/rowcopy/_kernel.c"),
        optional("jagcodec.wire._batch", "src/jagcodec/wire/_batch.c"),
    ]
)
