"""Jinja skeletons, one per loop structure and backend.

Loaded with ``PackageLoader("kvgen.templates", "")``, from a checkout, a wheel or an editable install alike.
"""
