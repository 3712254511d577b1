"""Warming up goes through the whole model and leaves nothing behind."""

from __future__ import annotations

import pytest
from helpers import goldens

import kernels
from services.worker.warm_up import warm_up


@pytest.mark.parametrize("context", [2, 5, 100, 1024])
def test_leaves_the_state_as_it_was(context: int) -> None:
    setup = goldens.shared("quantised")
    fresh, used, ids = setup.model.new_state(context), setup.model.new_state(context), goldens.token_ids()
    warm_up(setup.model, used)
    assert used.position == 0
    length = min(context, 40)
    expected = setup.model.forward(fresh, ids[:length], setup.experts)
    assert setup.model.forward(used, ids[:length], setup.experts).equal(expected)


def test_reaches_every_operation_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that a long prompt and a decode step use is used before the first request."""
    setup = goldens.shared("quantised")
    with pytest.MonkeyPatch.context() as patch:
        wanted = _noted(patch)
        goldens.run_case(setup, 200, 3)
    warmed = _noted(monkeypatch)
    warm_up(setup.model, setup.new_state())
    assert wanted <= warmed


def _noted(patch: pytest.MonkeyPatch) -> set[str]:
    """Names of the operations that are called from now on."""
    called: set[str] = set()

    def noting(name: str, operation: object) -> object:
        def noted(*args: object, **kwargs: object) -> object:
            called.add(name)
            return operation(*args, **kwargs)  # type: ignore[operator]

        return noted

    for name in kernels.__all__:
        if not isinstance(getattr(kernels, name), type):
            patch.setattr(kernels, name, noting(name, getattr(kernels, name)))
    return called
