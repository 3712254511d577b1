"""The CUDA driver API (cuda.h) with every result checked; loaded by the first call, so that CPUs never need it."""

from __future__ import annotations

import functools
import logging
from typing import Any

from shared.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)

_HOW_ELSE = 'set worker.device = "cpu" to compute without'


@functools.cache
def api() -> Any:
    """The module `cuda.bindings.driver`, initialised, for its types and flags; `call` is for its functions.

    Raises:
        ConfigError: there is no package, no driver or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"a GPU needs the package cuda-bindings ({error}); pip install 'icebox[cuda]', or {_HOW_ELSE}"
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # the bindings found no library to call
        raise ConfigError(f"no NVIDIA driver ({error}); install it, or {_HOW_ELSE}") from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"no usable NVIDIA GPU ({result.name}); {_HOW_ELSE}")
    return driver


def call(name: str, *args: Any) -> Any:
    """Call a driver function; what it returns besides its result code: nothing, a value, or a tuple.

    Raises:
        DeviceError: the result is not success; names the function and the result.
        ConfigError: see `api`.
    """
    result, *values = getattr(api(), name)(*args)
    if result != api().CUresult.CUDA_SUCCESS:
        raise DeviceError(name, getattr(result, "name", str(result)))
    return values[0] if len(values) == 1 else tuple(values) or None


def release(name: str, *args: Any) -> None:
    """Call a driver function that gives something back. If it cannot, the driver takes it when the process ends."""
    try:
        call(name, *args)
    except DeviceError as error:
        log.warning("not given back: %s", error)
