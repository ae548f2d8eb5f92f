"""Planted faults: each is a name, a sentence, an edit, and the ordinary test that must fail under it.

``pytest -m mutants`` plants one after another (tests/mutants/test_mutants.py says how). They judge the tests,
and outlive a rebuilt compiler: an edit is of the rendered text of a kernel, or of what a public name does.
"""
