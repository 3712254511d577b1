"""The proof of the golden checks: each of these mistakes, made alone, is noticed by the check named for it."""

from __future__ import annotations

import pytest
from helpers import faults_attention, faults_compression, faults_experts
from helpers.faults import Fault

FAULTS = (*faults_attention.FAULTS, *faults_compression.FAULTS, *faults_experts.FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.assert_caught(monkeypatch)
