"""Time of one decoded token, beside the transformers library with the same weights dequantised, in one run.

`python -m benchmarks.decode_transformers [--width small] [--threads 1]`. The contestants take turns token by token, so
that whatever else the machine does disturbs all of them alike. Icebox keeps the experts in four bits and decodes them
for every use; the library holds every weight in its plain type.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.report import save, show
from benchmarks.transformers_model import load_transformers
from services.worker.local_experts import LocalExperts
from services.worker.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.synth import SynthOptions, synthesise

Step = Callable[[list[int]], object]
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", default="small", help="width of the random checkpoint")
    parser.add_argument("--prompt", type=int, default=600, help="tokens before the first decoded one")
    parser.add_argument("--tokens", type=int, default=200, help="decoded tokens that count")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        synthesise(checkpoint, SynthOptions(options.width))
        seconds = _measure(checkpoint, options.prompt, options.tokens)
    _report(seconds, vars(options))


def _measure(checkpoint: Path, prompt: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of every decoded token of every contestant."""
    config = ModelConfig.from_dir(checkpoint)
    ids = torch.randint(config.vocab_size, (prompt + WARM_UP + tokens,), generator=torch.Generator().manual_seed(0))
    contestants = {
        "icebox": _icebox(checkpoint, config, len(ids)),
        "transformers float32": _transformers(checkpoint, torch.float32),
        "transformers bfloat16": _transformers(checkpoint, torch.bfloat16),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for chunk in ids.split([prompt] + [1] * (len(ids) - prompt)):
        for name, step in contestants.items():
            seconds[name].append(_timed(step, chunk.tolist()))
    return {name: times[1 + WARM_UP :] for name, times in seconds.items()}


def _icebox(checkpoint: Path, config: ModelConfig, context: int) -> Step:
    index = TensorIndex.open(checkpoint)
    model = Model.load(index, config, context)
    state, experts = model.new_state(context), LocalExperts(index, config, cache_bytes=1 << 32)
    return lambda ids: model.forward(state, ids, experts)


def _transformers(checkpoint: Path, dtype: torch.dtype) -> Step:
    model = load_transformers(checkpoint, dtype)
    cache = DynamicCache(config=model.config)

    def step(ids: list[int]) -> object:
        with torch.inference_mode():
            return model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits

    return step


def _timed(step: Step, ids: list[int]) -> float:
    started = time.perf_counter()
    step(ids)
    return time.perf_counter() - started


def _report(seconds: dict[str, list[float]], settings: dict[str, int | str]) -> None:
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = {name: min(times) for name, times in seconds.items()}
    others = [name for name in seconds if name != "icebox"]
    figures = {
        "settings": settings,
        "median_ms": {name: 1e3 * value for name, value in median.items()},
        "min_ms": {name: 1e3 * value for name, value in best.items()},
        "ratio_of_medians": {name: median[name] / median["icebox"] for name in others},
        "ratio_of_minima": {name: best[name] / best["icebox"] for name in others},
    }
    path = save("decode_transformers", figures)
    rows = {name: f"{1e3 * median[name]:.2f} ms median, {1e3 * best[name]:.2f} ms at best" for name in seconds}
    rows |= {f"{name} / icebox": f"{median[name] / median['icebox']:.2f}" for name in others}
    show("A decoded token", rows | {"saved": str(path)})


if __name__ == "__main__":
    main()
