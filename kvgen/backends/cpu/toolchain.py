"""Compile C++ kernels into content-addressed shared objects.

A build's key is the sha256 of its sources, all its flags, and the compiler's version and triple. It is made
in a temporary folder beside its final place and renamed there, without a lock: of two processes building the
same thing the first rename stays and the other process uses it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvgen import paths, trust
from kvgen.backends.cpu import artifact
from kvgen.backends.cpu.compiler import Compiler, find_compiler, first_errors
from kvgen.backends.cpu.isa import required_by
from kvgen.backends.cpu.job import Job
from kvgen.backends.cpu.process import invoke
from kvgen.errors import ToolchainError

_STALE_S = 24 * 3600.0
"""Age in seconds after which a temporary build folder counts as abandoned."""


class CompileError(ToolchainError):
    """The compiler refused a source; ``source`` is the kept copy, ``log`` all it said."""

    def __init__(self, message: str, source: Path, log: str) -> None:
        super().__init__(message)
        self.source = source
        self.log = log

    def __reduce__(self) -> tuple[type, tuple[str, Path, str]]:
        return type(self), (str(self), self.source, self.log)


def compile_shared(
    sources: Sequence[str] | str,
    *,
    flags: Sequence[str] = (),
    opt: str = "-O3",
    fp_contract: Literal["off", "fast"] = "fast",
    sanitize: bool = False,
    name: str = "kernel",
    cache_dir: Path | None = None,
    timeout_s: float = 120.0,
    compiler: Compiler | None = None,
) -> Path:
    """Build C++ texts into a shared object, or find the build in the cache. The fields are those of ``Job``.

    Args:
        cache_dir: folder of builds; default: ``build/`` in the user cache. An unwritable one is replaced by a
            temporary folder, with one warning.
        compiler: default: ``find_compiler()``.

    Returns:
        Path of the ``.so``, checked against its sidecar; the source lies beside it.

    Raises:
        ArgumentError: a flag or option that is refused.
        CompileError: the compiler's first error lines, and where the source is kept.
        CompilerTimeout: it took longer than ``timeout_s``.
        ToolchainError: no working compiler.
    """
    texts = (sources,) if isinstance(sources, str) else tuple(sources)
    job = Job(texts, tuple(flags), opt, fp_contract, sanitize, name, timeout_s)
    return build(job, cache_dir=cache_dir, compiler=compiler)


def build(job: Job, *, cache_dir: Path | None = None, compiler: Compiler | None = None) -> Path:
    """``compile_shared`` for a ready ``Job``."""
    compiler = compiler or find_compiler()
    key = job.key(compiler)
    entry = f"{job.name}-{key[:16]}"
    # Looked up before the folder is probed for writing: a read-only cache that holds the build is a hit.
    wanted = paths.readable("build") if cache_dir is None else cache_dir
    if cache_dir is not None and trust.fault(cache_dir):
        wanted = None
    if wanted is not None and (found := artifact.lookup(wanted / entry, job.name, key)):
        return found
    store = paths.subfolder("build") if cache_dir is None else paths.writable(cache_dir)
    if store != wanted and (found := artifact.lookup(store / entry, job.name, key)):
        return found
    try:
        return _compile_into(store, entry, key, job, compiler)
    except OSError as error:
        if error.errno not in paths.UNWRITABLE:
            raise
        store = paths.fallback(str(store), f"writing a build failed ({error.strerror})")
        return artifact.lookup(store / entry, job.name, key) or _compile_into(
            store, entry, key, job, compiler
        )


def _compile_into(store: Path, entry: str, key: str, job: Job, compiler: Compiler) -> Path:
    """Compile in a temporary folder inside ``store`` and rename it to ``store/entry``.

    Raises:
        OSError: ``store`` cannot take the files.
    """
    _sweep(store)
    # Not mkdtemp: its mode 0700 would stay, and other users of a shared read-only cache couldn't read it.
    work = store / f".tmp-{entry}-{os.getpid()}-{secrets.token_hex(4)}"
    work.mkdir(mode=paths.FOLDER_MODE)
    final = store / entry
    try:
        names = [f"{job.name}{f'_{i}' if i else ''}.cpp" for i in range(len(job.sources))]
        for file, text in zip(names, job.sources, strict=True):
            (work / file).write_text(text)
        library = work / f"{job.name}.so"
        flags, link_flags = job.compile_flags(compiler), job.link_flags(compiler)
        objects = [str(Path(file).with_suffix(".o")) for file in names]
        # Relative names: the binary does not depend on where the cache lies. The map is for debug
        # information, which then names the source's final place. Two steps, because a driver that sees
        # -fopenmp while it links adds an OpenMP runtime (the openmp module says why that is unwanted).
        compile_step = (*compiler.command, *flags, f"-ffile-prefix-map={work}={final}", "-c", *names)
        link_step = (*compiler.command, *link_flags, *objects, "-o", library.name)
        output, seconds = "", 0.0
        for command in (compile_step, link_step):
            done = invoke(command, cwd=work, timeout_s=max(0.001, job.timeout_s - seconds))
            output, seconds = output + done.output, seconds + done.seconds
            if output.strip():
                library.with_suffix(".log").write_text(output)
            if done.returncode:
                if "No space left on device" in output:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store))
                raise _failure(store, entry, work, job, compiler, output)
        for file in objects:
            (work / file).unlink()
        data = library.read_bytes()
        sidecar = artifact.Sidecar(
            schema=artifact.SCHEMA,
            key=key,
            size=len(data),
            sha256=artifact.digest(data),
            arch=compiler.arch,
            requires=list(required_by(flags)),
            sanitize=job.sanitize,
            compiler=compiler.identity,
            flags=list(flags),
            link_flags=list(link_flags),
            seconds=round(seconds, 3),
        )
        library.with_suffix(".json").write_text(sidecar.dump())
        for path in work.iterdir():  # a umask that lets others write would make the build unfit to be loaded
            path.chmod(path.stat().st_mode & ~0o022)
        return _publish(work, final, job.name, key)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when published


def _publish(work: Path, final: Path, name: str, key: str) -> Path:
    """Rename ``work`` to ``final``, or use what another process put there meanwhile."""
    for _ in range(8):
        try:
            os.rename(work, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            # A damaged entry is set aside here, so that the next round's rename can succeed.
            if found := artifact.lookup(final, name, key):
                return found
        else:
            return final / f"{name}.so"
    raise ToolchainError(
        f"{final}: a damaged entry keeps coming back; remove it or set KVGEN_CACHE_DIR to another folder"
    )


def _failure(store: Path, entry: str, work: Path, job: Job, compiler: Compiler, output: str) -> CompileError:
    """Keep the source and the log in ``failed/`` and word the error."""
    keep = store / "failed" / entry
    paths.make(keep.parent)
    if keep.exists():
        shutil.rmtree(keep, ignore_errors=True)
    try:
        os.rename(work, keep)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # those two mean that another process has kept the same failure, which is as good
    source = keep / f"{job.name}.cpp"
    lines = "\n  ".join(first_errors(output))
    program = Path(compiler.command[0]).name
    return CompileError(f"{program} refused {job.name}:\n  {lines}\nsource and log: {source}", source, output)


def _sweep(store: Path) -> None:
    """Remove the temporary folders that builds killed more than a day ago have left in ``store``."""
    for folder in store.glob(".tmp-*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process removed it, or published it
