"""`--rerun-failed-alone`: what failed is run once more, with no other test beside it, before the suite is summed up.

A test that passes then failed because of what else ran: it is named, and is to be mended. The closing summary and the
exit status count it as passed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

_MENDED = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rerun-failed-alone", action="store_true", help="run what failed once more, alone")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Behind pytest's own, which writes down what failed; before the terminal's, which sums up."""
    config = session.config
    asked = config.getoption("--rerun-failed-alone") and not hasattr(config, "workerinput")
    if not asked or exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    terminal.ensure_newline()
    terminal.section("once more, alone")
    # What the tests write goes straight there.
    terminal._tw._file.flush()
    alone = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
        + ["-o", f"cache_dir={config.getini('cache_dir')}"]
        + (["-m", config.option.markexpr] if config.option.markexpr else [])
        + (["--hypothesis-profile", profile] if (profile := config.getoption("--hypothesis-profile", None)) else [])
        + config.args,
        check=False,
    )
    if alone.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    cache: pytest.Cache = config.cache
    still = set(cache.get("cache/lastfailed", {}))
    config.stash[_MENDED] = _count_as_passed(terminal.stats, still)
    if not (terminal.stats.get("failed") or terminal.stats.get("error")):
        session.exitstatus = pytest.ExitCode.OK


def _count_as_passed(stats: dict[str, list[Any]], still: set[str]) -> list[Any]:
    """Move the reports of tests that are not in `still` to those that passed; returns them as they were."""
    mended: list[Any] = []
    for kind in ("failed", "error"):
        reports = stats.pop(kind, [])
        if left := [report for report in reports if report.nodeid in still]:
            stats[kind] = left
        for report in reports:
            if report.nodeid in still:
                continue
            mended.append(report)
            # One whose fixture failed behind it is counted already.
            if report.when != "teardown":
                stats.setdefault("passed", []).append(report)
    return mended


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not (mended := config.stash.get(_MENDED, [])):
        return
    terminalreporter.section("failed beside other tests")
    for report in mended:
        terminalreporter.write_sep("_", report.nodeid)
        report.toterminal(terminalreporter._tw)
    for name in dict.fromkeys(report.nodeid for report in mended):
        terminalreporter.write_line(f"passed only alone: a test to mend: {name}")
