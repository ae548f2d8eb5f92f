"""Jinja skeletons, one per loop structure and backend; loaded with ``PackageLoader("kvgen.templates", "")``."""
