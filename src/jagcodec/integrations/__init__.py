"""The codec inside existing data planes: one thin module for each, imported by name.

Importing this package imports none of these modules and none of their dependencies.
"""
