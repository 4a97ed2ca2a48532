"""The codec inside the data planes that people run: one thin module each, imported by name.

Importing this package imports none of them, and none of what they need.
"""
