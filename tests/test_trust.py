"""Who could have written what is about to be loaded; paths that stay in their folder."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgen import trust
from kvgen.errors import ToolchainError

STRANGER = 54321


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is fit, whatever the umask and the parents of the tests' own."""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_gid=gid, gr_name="team", gr_mem=[]))
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "entry").mkdir(mode=0o700)
    (folder / "entry" / "x.so").write_bytes(b"")
    (folder / "entry" / "x.so").chmod(0o644)
    assert trust.fault(folder, below=True) == ""
    return folder


def owned_by(monkeypatch: pytest.MonkeyPatch, uid: int, *named: Path) -> None:
    """As if these had another owner: only root may give files away."""
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        found = real(path)
        if Path(path) not in named:
            return found
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(os, "lstat", lstat)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda home: (home / "entry/x.so").chmod(0o666), "everybody may write to .*x.so .mode 0666"),
        (lambda home: (home / "entry/x.so").chmod(0o664), "the group team may write to .*x.so"),
        (lambda home: (home / "entry").chmod(0o777), "everybody may write to .*entry .mode 0777"),
        (lambda home: home.chmod(0o770), "the group team may write to .*home .mode 0770"),
    ],
)
def test_what_others_may_write_to_is_not_loaded(
    home: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(home)
    assert trust.fault(home / "entry" / "x.so", below=True)
    with pytest.raises(ToolchainError, match=f"x.so: not loaded, because {reason}.*KVGEN_TRUST="):
        trust.require(home / "entry" / "x.so")


def test_a_sticky_folder_is_fit_above_a_file_but_not_as_the_folder_itself(home: Path) -> None:
    home.chmod(0o1777)
    assert trust.fault(home / "entry", below=True) == ""
    assert "everybody may write" in trust.fault(home)


@pytest.mark.parametrize("part", [".", "entry", "entry/x.so"])
def test_what_a_stranger_owns_is_not_loaded(home: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    owned_by(monkeypatch, STRANGER, home / part)
    assert f"belongs to uid {STRANGER}" in trust.fault(home / "entry" / "x.so")
    assert f"belongs to uid {STRANGER}" in trust.fault(home, below=True)


def test_what_root_owns_is_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    owned_by(monkeypatch, 0, home / "entry" / "x.so")
    assert "x.so" not in trust.fault(home / "entry" / "x.so")


def test_links_are_followed_and_belong_to_the_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "link").symlink_to("entry/../entry")
    assert trust.fault(home / "link" / "x.so") == ""
    owned_by(monkeypatch, STRANGER, home / "link")
    assert "link belongs to" in trust.fault(home / "link" / "x.so")
    (home / "ring").symlink_to("ring")
    assert "too many links" in trust.fault(home / "ring")
    open_folder = home / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (home / "entry" / "away").symlink_to(open_folder / "x.so")
    (open_folder / "x.so").write_bytes(b"")
    assert "everybody may write" in trust.fault(home / "entry" / "away")


def test_the_private_group_of_the_user_is_the_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under umask 002 everything is writable for a group that has no one else in it."""
    home.chmod(0o775)
    me = pwd.getpwuid(home.stat().st_uid)

    def group(members: list[str], name: str = me.pw_name) -> None:
        found = SimpleNamespace(gr_gid=me.pw_gid, gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: found)

    os.chown(home, -1, me.pw_gid)
    for members in ([], [me.pw_name]):
        group(members)
        assert trust.fault(home) == ""
    group(["mallory"])
    assert "may write" in trust.fault(home)
    group([], "users")
    assert "the group users may write" in trust.fault(home)
    group([])
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"list", raising=False)
    assert "may write" in trust.fault(home), "a list of others hides behind the group's bits"


def test_a_path_that_the_user_vouches_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "entry").chmod(0o777)
    owned_by(monkeypatch, STRANGER, home)
    assert trust.fault(home / "entry" / "x.so")
    for value in (str(home), f"/elsewhere:{home}/entry/", "/"):
        monkeypatch.setenv("KVGEN_TRUST", value)
        assert trust.fault(home / "entry" / "x.so") == ""
    for value in ("", "entry", f"{home}/entr", f"{home}/entry/x.so.other"):
        monkeypatch.setenv("KVGEN_TRUST", value)
        assert trust.fault(home / "entry" / "x.so")


def test_what_is_not_there_is_judged_by_its_parents(home: Path) -> None:
    assert trust.fault(home / "new" / "deep") == ""
    home.chmod(0o777)
    assert "everybody may write" in trust.fault(home / "new" / "deep")


@pytest.mark.parametrize(
    "name", ["../x", "entry/../../x", "/etc/passwd", "", "a\0b", 7, None, "out/x", "a" * 5000]
)
def test_a_path_of_a_manifest_stays_in_its_folder(home: Path, name: object) -> None:
    (home / "out").symlink_to("/")
    with pytest.raises(ValueError, match=r"leads out of the folder|is no path") as caught:
        trust.inside(home, name)
    assert len(str(caught.value)) < 400
    assert trust.inside(home, "entry/x.so") == home / "entry" / "x.so"
    (home / "within").symlink_to("entry/x.so")
    assert trust.inside(home, "within").read_bytes() == b""
