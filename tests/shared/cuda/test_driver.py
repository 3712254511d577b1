"""Every result of the driver is looked at, and its absence is a config error; with a driver of the test's own."""

import sys
from enum import IntEnum
from types import ModuleType

import pytest

from shared.cuda import driver
from shared.errors import ConfigError, DeviceError, ExitCode


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


@pytest.fixture(autouse=True)
def _forgotten():
    """The module is looked for again."""
    driver.api.cache_clear()
    yield
    driver.api.cache_clear()


@pytest.fixture
def cuda(monkeypatch):
    module = ModuleType("cuda.bindings.driver")
    module.CUresult = CUresult
    module.cuInit = lambda flags: (CUresult.CUDA_SUCCESS,)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = module
    for name, fake in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", module)):
        monkeypatch.setitem(sys.modules, name, fake)
    return module


@pytest.mark.parametrize(
    ("results", "value"),
    [((), None), ((3,), 3), ((3, 4), (3, 4)), ((0,), 0)],
)
def test_what_comes_besides_the_result(cuda, results, value):
    cuda.cuCall = lambda *args: (CUresult.CUDA_SUCCESS, *results)
    assert driver.call("cuCall", 1) == value


def test_a_failure_names_function_and_result(cuda):
    cuda.cuCall = lambda: (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None)
    with pytest.raises(DeviceError, match=r"^cuCall: CUDA_ERROR_ILLEGAL_ADDRESS$") as failure:
        driver.call("cuCall")
    assert failure.value.exit_code is ExitCode.CRASH


def test_what_cannot_be_given_back_is_logged_and_no_error(cuda, caplog):
    cuda.cuMemFree = lambda address: (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    driver.release("cuMemFree", 1)
    assert "cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match=r"package cuda-bindings.*pip install 'icebox\[cuda\]'.*device = \"cpu\""):
        driver.call("cuInit", 0)


def test_no_driver(cuda):
    def missing(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    cuda.cuInit = missing
    with pytest.raises(ConfigError, match=r"no NVIDIA driver \(Failed to dlopen libcuda\.so\.1\)"):
        driver.api()


def test_no_gpu(cuda):
    cuda.cuInit = lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,)
    with pytest.raises(ConfigError, match=r"no usable NVIDIA GPU \(CUDA_ERROR_NO_DEVICE\)"):
        driver.api()
