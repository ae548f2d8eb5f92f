"""All but one thing about the build stands in pyproject.toml: how ``pip install -e`` links a checkout.

By default setuptools answers ``import kvgen`` from a hook behind ``sys.path``. Where Python is started in the
folder that holds the clone, that folder's kvgen would come first, as an empty namespace package. In a
checkout, whose links put everything under kvgen/, a plain path in a .pth file serves, and a package on a path
goes before a namespace. An unpacked sdist holds no links, so there the hook stays.
"""

from pathlib import Path

from setuptools import setup

LINKED = Path(__file__).with_name("kvgen") / "runtime"

setup(options={"editable_wheel": {"mode": "compat"}} if LINKED.is_dir() else {})
