"""Warming up goes through the whole model and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from helpers import goldens
from helpers.toy_kernels import target, toy_kernels

import kernels
from kernels.rehearsal import rehearsal
from kernels.tile import KERNELS
from services.worker.model.attention import Attention
from services.worker.model.grouped import GroupedExperts
from services.worker.warm_up import compile_ahead, warm_up, warm_up_engine


@pytest.mark.parametrize("context", [2, 5, 100, 1024])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_leaves_the_state_as_it_was(context: int, chunk: int) -> None:
    setup = goldens.shared("quantised")
    fresh, used, ids = setup.model.new_state(context), setup.model.new_state(context), goldens.token_ids()
    warm_up(setup.model, used, chunk)
    assert used.position == 0
    length = min(context, 40)
    expected = setup.model.forward(fresh, ids[:length], setup.experts)
    assert setup.model.forward(used, ids[:length], setup.experts).equal(expected)


@pytest.mark.parametrize(("chunk", "longest"), [(1, 256), (512, 512), (4096, 2052)])
def test_takes_no_more_tokens_at_a_time_than_a_prompt(chunk: int, longest: int) -> None:
    """Nor so few that it takes long. At least 2,052 in all: only then the indexer chooses."""
    model, state = MagicMock(), MagicMock(position=0, max_context=8192)
    model.config = SimpleNamespace(index_topk=512, compress_ratios=(4, 128), n_routed_experts=1)
    with patch("services.worker.warm_up.RecordLayout"), patch("services.worker.warm_up._ZeroExperts"):
        warm_up_engine(MagicMock(model=model, state=state, prefill_chunk=chunk))
    lengths = [len(call.args[1]) for call in model.forward.call_args_list]
    assert max(lengths) == longest
    assert sum(lengths[:-2]) == 2052


@pytest.mark.parametrize("chunk", [16, 2048])
def test_reaches_every_operation_of_the_model(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that a long prompt and a decode step use is used before the first request."""
    setup = goldens.shared("quantised")
    with pytest.MonkeyPatch.context() as temporarily:
        wanted = _noted(temporarily)
        goldens.run_case(setup, 200, 3)
    warmed = _noted(monkeypatch)
    warm_up(setup.model, setup.new_state(), chunk)
    assert wanted <= warmed


@pytest.mark.parametrize("chunk", [16, 2048])
def test_a_rehearsal_gets_through_the_model_and_meets_every_kernel(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes the ways of a GPU here, on tensors of the host: zeros lead it nowhere it cannot go."""
    monkeypatch.setattr("kernels.dispatch._is_cuda", lambda value: True)
    monkeypatch.setattr("services.worker.model.moe.SeparateExperts", GroupedExperts)
    monkeypatch.setattr(Attention, "attend", Attention._attend_listed)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    setup = goldens.load(exact=False)
    state = setup.new_state()
    with rehearsal() as programs:
        warm_up(setup.model, state, chunk)
    assert state.position == 0
    unused = {"act_quant_kernel", "fp4_simulate_kernel"}  # by the model: they are specified, and parts of others
    of_prefill = {kernel.name for kernel in KERNELS if not kernel.module.startswith("kernels.decode")}
    assert {program.kernel.name for program in programs} == of_prefill - unused


def test_kernels_are_compiled_before_the_run_that_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    first, second = toy_kernels(monkeypatch, lambda name, n: events.append("compiled"), "first", "second")
    x = torch.zeros(1)

    def run() -> None:
        events.append("run")
        first(n=3)(x)
        second(n=4)(x)

    with target():
        compile_ahead(run, events.append)
    until_done = ["compiling kernels: 1 of 2", "compiling kernels: 2 of 2"]
    assert [e for e in events if e != "compiled"][1:] == ["run", *until_done, "run"]
    assert events.count("compiled") == 2
    assert events[-1] == "run"
    assert x.item() == 4


def _noted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the operations that are called from now on."""
    called: set[str] = set()

    def noting(name: str, operation: object) -> object:
        def noted(*args: object, **kwargs: object) -> object:
            called.add(name)
            return operation(*args, **kwargs)  # type: ignore[operator]

        return noted

    for name in kernels.__all__:
        if not isinstance(getattr(kernels, name), type):
            monkeypatch.setattr(kernels, name, noting(name, getattr(kernels, name)))
    return called
