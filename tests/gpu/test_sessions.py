"""Kept sessions on a GPU: states go to the host's memory and back to the bit."""

from __future__ import annotations

import torch
from helpers.talks import PLENTY, conversation, engine, said


def test_a_conversation_says_the_same_with_reuse() -> None:
    device = torch.device("cuda", 0)
    subject = engine(PLENTY, device)
    got, expected = conversation(subject), conversation(engine(0, device))
    assert [said(steps) for steps in got] == [said(steps) for steps in expected]
    assert [steps[0].cached_tokens for steps in got] == [0, 150, 184, 150]
