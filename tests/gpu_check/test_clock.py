"""The budget: what fits, what does not, and that the latter is told."""

from __future__ import annotations

from kvgen.gpu_check.clock import Clock


def test_steps_that_do_not_fit_are_noted() -> None:
    now = [100.0]
    clock = Clock(10.0, lambda: now[0])
    assert clock.fits("a", 10.0) and clock.left == 10.0
    now[0] = 107.0
    assert not clock.fits("b", 4.0) and clock.fits("c", 3.0)
    part = clock.share(60.0)
    assert part.left == 3.0
    now[0] = 109.0
    assert not part.fits("d", 2.0)
    assert [skip.what for skip in clock.skips] == ["b", "d"]
    assert clock.skips[0].reason == "needs about 4 s, and 3 s of 10 are left"
    now[0] = 111.0
    assert clock.left < 0 and clock.share(5.0).left == 0.0
