"""Deliberate mistakes, each with the golden check that must notice it: the proof that the suite notices mistakes.

A fault replaces a function of `kernels` or of the model for the length of one test. The mistakes themselves are in the
modules `faults_*`, by the part of the model that they spoil.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import kernels
from helpers import goldens, op_goldens
from helpers.goldens import Setup

Inject = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Check:
    """A golden check and the model it wants: `exact`, `quantised`, `swiglu0.5`, or none for a single operation."""

    kind: str
    run: Callable[[Setup], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """`reload`: the mistake happens while the model is loaded."""

    name: str
    inject: Inject
    check: Check
    reload: bool = False

    def assert_caught(self, patch: pytest.MonkeyPatch) -> None:
        setup = goldens.shared(self.check.kind)
        self.inject(patch)
        if self.reload:
            setup = goldens.load(exact=self.check.kind != "quantised")
        with pytest.raises(AssertionError):
            self.check.run(setup)


def structure(prefill: int, decode: int) -> Check:
    return Check("exact", partial(goldens.check_structure_case, prefill=prefill, decode=decode))


def after_longer(prefill: int, decode: int) -> Check:
    return Check("exact", partial(goldens.check_structure_after_longer, prefill=prefill, decode=decode))


def attention_half(layer: int) -> Check:
    return Check("quantised", partial(goldens.check_attention_half, layer=layer))


def expert_half(layer: int) -> Check:
    return Check("quantised", partial(goldens.check_expert_half, layer=layer))


def operation(check: Callable[..., None], *arguments: str) -> Check:
    """A check of `op_goldens`, which needs no model."""
    return Check("exact", lambda setup: check(*arguments))


STRUCTURE_MTP = Check("exact", goldens.check_structure_mtp)
SWIGLU = Check("swiglu0.5", goldens.check_structure_swiglu)
HEAD = Check("quantised", goldens.check_head)
ROUTER = Check("exact", goldens.check_structure_router)
GEMM = operation(op_goldens.check_gemm, "fp8_gemm_m5_n384_k1024")


def replacing(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Inject:
    """The operation `kernels.<name>` becomes make(the right one)."""
    return lambda patch: patch.setattr(kernels, name, make(getattr(kernels, name)))


def replacing_method(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Inject:
    """As `replacing`, for a method; it gets self as its first argument."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def all_of(*injections: Inject) -> Inject:
    def inject(patch: pytest.MonkeyPatch) -> None:
        for each in injections:
            each(patch)

    return inject
