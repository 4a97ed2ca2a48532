"""A package with this file, because TransferQueue's wheel installs a package `tests` of its own.

Without it, ours would be a namespace package, which any `tests` in site-packages goes before.
"""
