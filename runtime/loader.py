"""load: a live build or an exported folder -> ops to serve with, through one door."""

from __future__ import annotations

from pathlib import Path

from kvgen.backends.cpu import artifact, isa
from kvgen.backends.cpu.kernel import CpuKernel
from kvgen.backends.cpu.loader import Library, open_library
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError, brief
from kvgen.ir.plan import entry_name
from kvgen.runtime.base import Launchable
from kvgen.runtime.manifest import NAME, Exported, Manifest, read_manifest
from kvgen.runtime.ops import CacheOps


class ExportedLibrary(CacheOps):
    """The ops of an exported folder on this machine's CPU. Binaries are verified at once and when opened."""

    def __init__(self, folder: Path, manifest: Manifest, target: str, *, checked: bool) -> None:
        self.folder, self.manifest, self.target_name = folder, manifest, target
        self.spec, self.record, self.checked = manifest.spec, manifest.record, checked
        self._entries = {(kernel.op, kernel.variant): kernel for kernel in manifest.targets[target]}
        for kernel in self._entries.values():
            for binary in kernel.binaries:
                binary.verify(folder)
        self._kernels: dict[tuple[str, str], CpuKernel] = {}

    def kernel(self, op: str, variant: str = "") -> Launchable:
        """The kernel of ``op``, opened when first asked for."""
        found = self._kernels.get((op, variant))
        if found is None:
            found = self._kernels[op, variant] = CpuKernel(self._entry(op, variant), self._open(op, variant))
        return found

    def frequencies(self) -> tuple[list[float], float]:
        """As the exporting library had them."""
        if self.manifest.frequencies is None:
            raise ArgumentError("this spec has no [attention.rope]")
        steps, factor = self.manifest.frequencies
        return list(steps), factor

    def source(self, op: str, variant: str = "") -> str:
        """The readable source of ``op``, as exported."""
        return self._entry(op, variant).source.content(self.folder).decode()

    def _entry(self, op: str, variant: str) -> Exported:
        if (op, variant) in self._entries:
            return self._entries[op, variant]
        # An empty variant stands for the default: the one exported first.
        for (name, _), kernel in self._entries.items():
            if name == op and not variant:
                return kernel
        held = ", ".join(" ".join(key).strip() for key in self._entries)
        raise UnsupportedError(f"{self.folder}: no kernel {op} {variant}; it holds {held}")

    def _open(self, op: str, variant: str) -> Library:
        entry = self._entry(op, variant)
        # Once more: the folder may have been written to since it was loaded.
        return open_library(entry.binaries[0].verify(self.folder), artifact.to_sidecar(entry.facts))


def load(source: CacheOps | str | Path, *, target: str = "", checked: bool = True) -> CacheOps:
    """Ops to serve with: a live build as it is, or those of a folder that ``kvgen export`` wrote.

    ``target``: ``cpu-avx512``, ...; by default the best that was exported and that this CPU can run.
    ``checked``: look at lengths, page ids and slots. Raises ``ToolchainError`` for a damaged or altered
    folder or one that others may write to (``KVGEN_TRUST`` says yes), ``UnsupportedError`` where nothing in
    it runs here.
    """
    if isinstance(source, CacheOps):
        return source
    if not isinstance(source, str | Path):
        raise ArgumentError(f"source = {brief(source)}: give a library, or the folder of an exported one")
    try:
        folder = Path(source).resolve()
    except (OSError, ValueError) as error:  # a zero byte, letters that no file name has, a ring of links
        raise ArgumentError(f"source = {brief(source)}: no path ({error}); give a folder") from None
    manifest = read_manifest(folder)
    held = [name for name in manifest.targets if name.startswith("cpu-")]
    if not isinstance(target, str) or (target and target not in held):
        raise ArgumentError(f"target = {brief(target)}: {folder} holds {', '.join(held) or 'no CPU kernels'}")
    names = [target] if target else [name for name in _BEST_FIRST if name in held]
    reasons = []
    for name in names:
        sidecars = [_sidecar(folder, manifest, name, kernel) for kernel in manifest.targets[name]]
        try:
            for needs in sidecars:
                isa.check_runnable(needs.requires, what=f"{folder} ({name})", arch=needs.arch)
        except UnsupportedError as error:
            reasons.append(str(error))
            continue
        return ExportedLibrary(folder, manifest, name, checked=checked)
    if not names:
        raise ToolchainError(f"{folder}: holds no CPU kernels; export with --target cpu")
    raise UnsupportedError("; ".join(reasons))


def _sidecar(folder: Path, manifest: Manifest, target: str, kernel: Exported) -> artifact.Sidecar:
    """What a CPU kernel's build says of it, if it is a kernel of this spec; ``ToolchainError`` else."""
    path, what = folder / NAME, f"{brief(kernel.op)} {brief(kernel.variant)} of {target}"
    try:
        sidecar = artifact.to_sidecar(kernel.facts)
    except ValueError as error:
        raise ToolchainError(f"{path}: damaged: facts of {what} {error}; export again") from None
    if [(file.size, file.sha256) for file in kernel.binaries] != [(sidecar.size, sidecar.sha256)]:
        raise ToolchainError(f"{path}: damaged: binaries of {what} are not those of its facts; export again")
    spec = manifest.spec
    if kernel.features is None:  # no symbol can be told without them, but the source's heading names the spec
        fits = spec.hash8 in kernel.source.content(folder).decode("utf-8", "replace")
    else:
        given = target, kernel.features, kernel.schedule
        fits = kernel.entry == entry_name(kernel.op, kernel.variant, spec, *given)
    if not fits:
        raise ToolchainError(f"{path}: {what} was compiled for another spec than {spec.hash8}; export again")
    return sidecar


_BEST_FIRST = tuple(row.target for row in isa.ROWS.values())
