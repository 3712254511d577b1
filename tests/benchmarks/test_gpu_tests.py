"""The table of tests on a GPU counts what pytest says."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.gpu_tests import ALONE, TESTS, Outcome, outcome_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_ops" name="test_a" time="1.5"/>
<testcase classname="tests.gpu.test_ops" name="test_b[2]" time="0.25"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_ops" name="test_c" time="0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.gpu.test_ops" name="test_d" time="0.25"><error message="setup"/></testcase>
</testsuite></testsuites>"""


def test_failures_errors_and_skips_are_not_passes() -> None:
    cases = list(ElementTree.fromstring(REPORT).iter("testcase"))
    assert outcome_of(cases) == Outcome(1, 1, ("test_b[2]", "test_d"), 2.0)


def test_what_compares_free_memory_runs_alone() -> None:
    compares = {path.name for path in TESTS.glob("test_*.py") if ".memory().free" in path.read_text(encoding="utf-8")}
    assert compares == set(ALONE)
