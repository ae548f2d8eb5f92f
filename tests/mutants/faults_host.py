"""Faults in what stands around kernels: identities, places, stores, checks, what is read from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.mutants.fault import behaviour

Plain = Callable[..., Any]


@behaviour(
    "identity-knows-no-page-size",
    "Specs that differ in their page size have one identity.",
    "kvgen.ir.spec:Spec.canonical",
    "tests/ir/test_spec.py::test_every_field_is_part_of_the_identity",
)
def _(plain: Plain, spec: Any) -> Any:
    return plain(dataclasses.replace(spec, cache=dataclasses.replace(spec.cache, page_size=16)))


@behaviour(
    "planes-laid-over-each-other",
    "V of a page begins where K begins.",
    "kvgen.passes.place:place",
    "tests/passes/test_place.py::test_no_two_elements_share_a_byte_and_promised_starts_hold",
)
def _(plain: Plain, spec: Any) -> Any:
    record = plain(spec)
    first = record.planes[0]
    planes = [
        dataclasses.replace(p, offset=first.offset) if p.name == "v" and p.pool == first.pool else p
        for p in record.planes
    ]
    return dataclasses.replace(record, planes=tuple(planes))


@behaviour(
    "the-farthest-bucket-answers",
    "A workload is given the winner of the workload least like it.",
    "kvgen.tune.bucket:nearest",
    "tests/tune/test_store.py::test_the_nearest_bucket_answers",
)
def _(plain: Plain, wanted: Any, names: Iterable[str]) -> Any:
    left = sorted(names)
    return next((name for name in reversed(left) if name != plain(wanted, left)), plain(wanted, left))


@behaviour(
    "wrong-kernels-pass",
    "The check of a kernel calls every kernel right.",
    "kvgen.tune.check:check_op",
    "tests/tune/test_check.py::test_a_broken_kernel_is_called_wrong",
)
def _(plain: Plain, *args: Any, **options: Any) -> Any:
    return dataclasses.replace(plain(*args, **options), ok=True, message="")


@behaviour(
    "altered-binaries-are-run",
    "A binary that differs from its sha256 is loaded.",
    "kvgen.runtime.manifest:File.verify",
    "tests/export/test_package.py::test_altered_binary_is_refused",
)
def _(plain: Plain, file: Any, folder: Path) -> Any:
    return folder / file.path


@behaviour(
    "adopted-planes-unchecked",
    "Buffers of any shape are adopted as planes.",
    "kvgen.runtime.adopt:_check_adopted",
    "tests/runtime/test_cache.py::test_adopt_refuses",
)
def _(plain: Plain, *args: Any) -> Any:
    return None


@behaviour(
    "a-known-call-is-known-for-good",
    "Lengths and page ids of a call that was seen before are not looked at again.",
    "kvgen.runtime.quick:Calls.attend",
    "tests/runtime/test_quick.py::test_bad_values_are_refused",
)
def _(plain: Plain, calls: Any, library: Any, *args: Any, **options: Any) -> Any:
    checked, library.checked = library.checked, False
    try:
        return plain(calls, library, *args, **options)
    finally:
        library.checked = checked


@behaviour(
    "one-cut-of-a-cascade-unseen",
    "A cascade merges its states without the sink.",
    "kvgen.runtime.ops:CacheOps.merge",
    "tests/runtime/test_cascade.py::test_ragged_requests_of_one_query",
)
def _(plain: Plain, library: Any, outs: Any, lses: Any, **options: Any) -> Any:
    return plain(library, outs, lses, **{**options, "params": None, "finalize": False})


@behaviour(
    "angles-of-the-neighbour",
    "Every rotary frequency is that of twice the base.",
    "kvgen.variants.rope:plain",
    "tests/reference/test_terms.py::TestRope::test_frequencies_are_those_of_transformers",
)
def _(plain: Plain, rope: Any) -> Any:
    return plain(dataclasses.replace(rope, theta=2 * rope.theta))


@behaviour(
    "proofs-without-reason",
    "Of any two expressions the first counts as never below the second.",
    "kvgen.passes.prove:never_below",
    "tests/passes/test_prove.py::test_no_false_proofs",
)
def _(plain: Plain, node: Any, least: Any, values: Any = None) -> Any:
    return True


@behaviour(
    "a-window-may-be-forgotten",
    "An option that is 0 counts as one that is not given.",
    "kvgen.ir.attention:AttentionSpec.option",
    "tests/conformance/test_trials.py::test_a_window_of_0_shows_the_own_key_only",
)
def _(plain: Plain, att: Any, name: str) -> Any:
    return plain(att, name) or None
