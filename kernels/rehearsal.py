"""Compiling ahead of use: a piece of code is run once without its kernels, which are then compiled side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from tilelang.backend.target import determine_target
from torch.overrides import TorchFunctionMode

from kernels.tile import NOTED, Program


@contextmanager
def rehearsal() -> Iterator[Collection[Program]]:
    """Gives the programs that this thread asks for inside, each once. They are neither compiled nor launched.

    What a kernel would have written is zeros, so that ids and counts which the host reads are in range.
    """
    programs: dict[Program, None] = {}
    token = NOTED.set(programs)
    try:
        with _EmptyIsZero():
            yield programs.keys()
    finally:
        NOTED.reset(token)


def compile_all(programs: Collection[Program], workers: int, progress: Callable[[int, int], None]) -> None:
    """Compile programs for this thread's GPU, `workers` at a time; `progress` gets how many are done, and of how many.

    Most of the time goes to nvcc and to the host's compiler, which are processes of their own, so threads are enough.
    TileLang's files appear whole, by a rename, so that processes may do the same at once, or be killed at it.

    Raises: what TileLang raised, with a note that names the program.
    """
    target = determine_target(return_object=True)  # other threads may have another GPU

    def compile_one(program: Program) -> None:
        try:
            with target:
                program.compile()
        except Exception as error:
            error.add_note(f"while compiling {program}")
            raise

    with ThreadPoolExecutor(workers, "compile") as pool:
        futures = [pool.submit(compile_one, program) for program in programs]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _EmptyIsZero(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in (torch.empty, torch.empty_like) else result
