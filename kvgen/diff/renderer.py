"""renderer: the program that renders kernels with the kvgen of the current folder, whatever its version.

Its text is run by ``python -c`` inside the tree of some commit, so it may use only what every version has:
``assemble`` and ``Library.source``, the lists of ops, variants and targets. It reads a request and writes a
rendering, both JSON files named on its command line; see ``main``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any


def main(request_file: str, result_file: str) -> None:
    """Render what the request names.

    The request: ``specs`` (label -> path), ``targets`` and ``ops`` (lists, or None for all that this version
    has). The result: ``kernels``, a list of [label, target, op, variant, text, error] of which text or error
    is empty, and ``hashes`` (label -> hashes of the spec that a rendered text may quote).
    """
    import kvgen
    from kvgen.ir.plan import OPS
    from kvgen.targets import TARGETS

    here = Path(kvgen.__file__).resolve().parent.parent
    if here != Path.cwd().resolve():
        raise SystemExit(f"imported the kvgen of {here}")
    warnings.simplefilter("ignore")
    request = json.loads(Path(request_file).read_text())
    ops = request["ops"] or OPS
    kernels: list[list[str]] = []
    hashes: dict[str, list[str]] = {}
    for label, path in request["specs"].items():
        for target in request["targets"] or TARGETS:
            kernels += _kernels(label, path, target, ops, hashes.setdefault(label, []))
    Path(result_file).write_text(json.dumps({"kernels": kernels, "hashes": hashes}))


def _kernels(label: str, path: str, target: str, ops: Any, hashes: list[str]) -> list[list[str]]:
    """Every kernel of a spec on a target; one row with an empty op where there is not even a library."""
    from kvgen.builder import assemble
    from kvgen.passes.abi import VARIANTS

    try:
        # Default schedules: tuned ones would come from this machine's cache, which no version owns.
        library = assemble(path, target, tune="off")
    except Exception as error:  # noqa: BLE001 - of any version; it is reported
        return [[label, target, "", "", "", _words(error)]]
    if library.spec.hash8 not in hashes:
        hashes.append(library.spec.hash8)
    found = []
    for op in ops:
        for variant in VARIANTS.get(op, ("",)):
            try:
                found.append([label, target, op, variant, library.source(op, variant), ""])
            except Exception as error:  # noqa: BLE001
                found.append([label, target, op, variant, "", _words(error)])
    return found


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
