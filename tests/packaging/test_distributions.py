"""The wheel, the sdist and the editable install hold exactly the tree: nothing stale, nothing missing.

Built with the environment's own setuptools (no build isolation, so no network) and from a copy, because
setuptools ships whatever an older build left in build/lib.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.faults import small

MAPPED = {f"kvgen/{name}": name for name in ("autotune_cache", "runtime", "schedules", "templates")}
# Explains a folder to whoever reads the repository; no code opens these, so no wheel needs them.
NOT_SHIPPED = {".md", ".gitkeep", ".gitignore"}


def tree_files(root: Path) -> set[str]:
    """Every file of the package as it stands in the tree, under its name in a wheel."""
    found = set()
    for folder in ("kvgen", *MAPPED.values()):
        target = f"kvgen/{folder}" if folder in MAPPED.values() else folder
        for path in (root / folder).rglob("*"):  # rglob does not follow the links in kvgen/
            skipped = "__pycache__" in path.parts or {path.suffix, path.name} & NOT_SHIPPED
            if path.is_file() and not path.is_symlink() and not skipped:
                found.add(f"{target}/{path.relative_to(root / folder).as_posix()}")
    return found


def run_hook(source: Path, hook: str, out: Path) -> Path:
    """Calls one PEP 517 hook as pip does, without pip: it would touch the environment that runs the tests."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import sys, setuptools.build_meta as m; print(m.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{hook} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return out / done.stdout.strip().splitlines()[-1]


def run_isolated(code: str, *, site: Path, cwd: Path) -> str:
    """Runs ``code`` with ``site`` as its first site folder (.pth files too), the environment's others after.

    ``-S`` keeps the environment's own .pth files out: a kvgen installed there must not answer for this one.
    """
    prologue = (
        "import site, sys\n"
        f"sys.path.extend({sorted({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')})!r})\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        f"site.addsitedir({str(site)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", prologue + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


READ_EVERYTHING = """
import importlib.resources, sys
import kvgen.autotune_cache, kvgen.runtime, kvgen.schedules, kvgen.templates
from jinja2 import Environment, PackageLoader
names = Environment(loader=PackageLoader("kvgen.templates", "")).list_templates()
print(*sorted(n for n in names if n.endswith(".jinja")), sep="\\n")
print("--")
files = importlib.resources.files("kvgen.schedules").iterdir()
print(*sorted(f.name for f in files if f.name.endswith(".toml")), sep="\\n")
"""


@pytest.fixture(scope="module")
def checkout(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, without what earlier builds left."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs setuptools in this environment (pip install -e '.[test]')")
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77 or newer in this environment, found {version}")
    target = tmp_path_factory.mktemp("checkout")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for folder in ("kvgen", *MAPPED.values()):
        shutil.copytree(repo_root / folder, target / folder, symlinks=True, ignore=junk)
    alone = (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "Makefile",
        "constraints.txt",
    )
    for name in alone:
        shutil.copy(repo_root / name, target / name)
    ship_a_record(target / "autotune_cache")
    return target


def ship_a_record(folder: Path) -> None:
    """Put a winner of decode for sm_90 into a tree, which only a build that reads it would choose."""
    from kvgen.ir import Schedule
    from kvgen.targets import known_target
    from kvgen.tune import store
    from kvgen.tune.key import key_of
    from kvgen.tune.space import space_of, spec_facts

    spec, target, space = small(), known_target("sm_90"), space_of("decode", known_target("sm_90"))
    default = space.default(target, spec_facts(spec, target))
    other = max(space.candidates(spec_facts(spec, target)), key=lambda s: (s["num_warps"], space.order(s)))
    assert isinstance(other, Schedule) and other != default
    winners = store.Winners(other, {}, "predicted", "quick", "", "2026-01-02")
    store.write(winners, key_of("decode", spec, target, {}, space), cache_dir=folder)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_hook(checkout, "build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_hook(checkout, "build_sdist", tmp_path_factory.mktemp("sdist"))


def wheel_files(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def explain_difference(found: set[str], wanted: set[str]) -> str:
    return (
        f"missing: {sorted(wanted - found)}\nstale: {sorted(found - wanted)}\n"
        "A new package goes into [tool.setuptools] packages, a new kind of data file into package-data."
    )


def test_every_package_is_listed(repo_root: Path) -> None:
    """Discovery cannot be used (see pyproject.toml), so the list names each folder with an __init__.py."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        str(Path(name).parent).replace("/", ".")
        for name in tree_files(repo_root)
        if name.endswith("/__init__.py")
    }
    assert listed == found, f"add to packages: {sorted(found - listed)}; remove: {sorted(listed - found)}"


def test_every_python_file_is_in_a_package(repo_root: Path) -> None:
    """A folder of modules without an __init__.py would be left out of the wheel without a word."""
    files = tree_files(repo_root)
    orphans = sorted(
        name
        for name in files
        if name.endswith(".py") and f"{Path(name).parent.as_posix()}/__init__.py" not in files
    )
    assert not orphans, f"no __init__.py beside {orphans}"


@pytest.mark.parametrize(("link", "folder"), MAPPED.items())
def test_links_match_the_mapping(repo_root: Path, link: str, folder: str) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-dir"][link.replace("/", ".")] == folder
    if not (repo_root / ".git").exists():
        pytest.skip("not a checkout: an sdist holds no links")
    assert (repo_root / link).is_symlink(), f"{link} must be a link to ../{folder}"
    assert (repo_root / link).readlink() == Path("..") / folder


def test_no_stale_build_folder(repo_root: Path) -> None:
    """`pip install .` here would ship what build/lib still holds of files deleted since."""
    stale = {
        path.relative_to(repo_root / "build/lib").as_posix()
        for path in (repo_root / "build/lib").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } - tree_files(repo_root)
    assert not stale, f"build/lib holds files that the tree no longer has; run make clean: {sorted(stale)}"


def test_wheel_is_the_tree(checkout: Path, wheel: Path) -> None:
    found, wanted = wheel_files(wheel), tree_files(checkout)
    assert found == wanted, explain_difference(found, wanted)


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: torch>=2.10\n" in metadata, "torch must not be pinned in a wheel"
    assert "kvgen = kvgen.cli:main" in scripts


def test_sdist_builds_the_same_wheel(checkout: Path, sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive if member.issym() or member.islnk()]
        assert not links, f"links do not survive every unpacker: {links}"
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for name in ("Makefile", "constraints.txt"):
        assert (unpacked / name).is_file()
    again = run_hook(unpacked, "build_wheel", tmp_path / "out")
    assert wheel_files(again) == wheel_files(wheel), explain_difference(
        wheel_files(again), wheel_files(wheel)
    )


def expected_listing(root: Path) -> str:
    folder = root / "templates"
    templates = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jinja"))
    schedules = sorted(p.name for p in (root / "schedules").glob("*.toml"))
    return "\n".join(templates) + "\n--\n" + "\n".join(schedules) + "\n"


def test_installed_wheel_finds_its_data(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    """Unzipping is all that installing a pure wheel does."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert run_isolated(READ_EVERYTHING, site=site, cwd=tmp_path) == expected_listing(checkout)


READ_A_RECORD = """
import json, warnings
from kvgen.builder import assemble
warnings.simplefilter("ignore")
spec = json.loads(SPEC)
chosen = {tune: assemble(spec, "sm_90", tune=tune).schedules["decode"].to_dict() for tune in ("cache", "off")}
print(json.dumps(chosen))
"""


def test_installed_wheel_finds_its_winners(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (record,) = (checkout / "autotune_cache/sm_90").glob(f"decode__{small_key()}.json")
    text = READ_A_RECORD.replace("SPEC", repr(json.dumps(small().to_dict())))
    chosen = json.loads(run_isolated(text, site=site, cwd=tmp_path))
    assert chosen["cache"] == json.loads(record.read_text())["schedule"] != chosen["off"]


def small_key() -> str:
    from kvgen.targets import known_target
    from kvgen.tune.key import key_of
    from kvgen.tune.space import space_of

    target = known_target("sm_90")
    return key_of("decode", small(), target, {}, space_of("decode", target)).spec8


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site folder of an editable install."""
    site = tmp_path_factory.mktemp("editable")
    with zipfile.ZipFile(run_hook(checkout, "build_editable", site / "out")) as archive:
        archive.extractall(site)
    return site


def test_editable_install_follows_the_tree(checkout: Path, editable: Path, tmp_path: Path) -> None:
    assert run_isolated(READ_EVERYTHING, site=editable, cwd=tmp_path) == expected_listing(checkout)
    where = run_isolated("import kvgen.schedules as s; print(s.__file__)", site=editable, cwd=tmp_path)
    assert Path(where.strip()).resolve() == (checkout / "schedules/__init__.py").resolve()


def test_editable_install_beside_the_clone(checkout: Path, editable: Path, tmp_path: Path) -> None:
    """Where Python starts in the folder that holds a clone named kvgen: that is no package."""
    (tmp_path / "kvgen").symlink_to(checkout, target_is_directory=True)
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport kvgen\nprint(kvgen.build.__module__)"
    assert run_isolated(code, site=editable, cwd=tmp_path).strip() == "kvgen.builder"


def test_editable_install_of_an_unpacked_sdist(sdist: Path, checkout: Path, tmp_path: Path) -> None:
    """It holds no links, so a plain path would not do."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    site = tmp_path / "site"
    with zipfile.ZipFile(run_hook(unpacked, "build_editable", tmp_path / "out")) as archive:
        archive.extractall(site)
    assert run_isolated(READ_EVERYTHING, site=site, cwd=tmp_path) == expected_listing(checkout)
