"""diff: what a change does to the generated kernels: all of them, rendered by two versions of kvgen.

``compare(old, new)`` tells two renderings apart. A rendering is made by ``trees.render_tree``: the code of a
commit or of the working tree, in a process of its own, so that neither version sees the other's modules.
"""

from __future__ import annotations

from kvgen.diff.changes import Change, compare, groups
from kvgen.diff.trees import Tree, commit_tree, find_checkout, render_trees, working_tree

__all__ = [
    "Change",
    "Tree",
    "commit_tree",
    "compare",
    "find_checkout",
    "groups",
    "render_trees",
    "working_tree",
]
