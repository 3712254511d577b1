"""Decode through the services against the same worker in one process, everything resident.

`python -m benchmarks.decode_services [--tokens N] [--rounds R]`. The two take turns, so that a machine that changes its
speed changes both; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import save, show
from services.worker.engine import Engine, Job
from services.worker.local_experts import LocalExperts
from services.worker.model import Model
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.synth import SynthOptions, synthesise
from shared.protocol.messages import Generate
from tests.helpers.services import generate, running, token_ids, worker_client, write_config

PROMPT = tuple(range(2, 66))
ALL_BYTES = 1 << 30
CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        synthesise(checkpoint, SynthOptions(width="small"))
        local, through = measure(Path(directory), checkpoint, args.tokens, args.rounds)
    ratio = statistics.median(local) / statistics.median(through)
    figures = {"seconds_a_token_local": local, "seconds_a_token_services": through, "ratio": ratio}
    show(
        "Decode, everything resident",
        {
            "one process": f"{1000 * statistics.median(local):.2f} ms a token",
            "through the services": f"{1000 * statistics.median(through):.2f} ms a token",
            "speed of services / one process": f"{ratio:.2f}",
        },
    )
    save("decode_services", figures)


def measure(directory: Path, checkpoint: Path, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a decoded token, one figure a round, in one process and through the services."""
    torch.set_num_threads(1)
    model_config, index = ModelConfig.from_dir(checkpoint), TensorIndex.open(checkpoint)
    engine = Engine(Model.load(index, model_config, CONTEXT), CONTEXT, 512)
    experts = LocalExperts(index, model_config, ALL_BYTES)
    config = write_config(
        directory / "icebox.toml", checkpoint, cache={"bytes": ALL_BYTES // 16}, model={"max_context": CONTEXT}
    )
    local, through = [], []
    with running(config, "expertd", "worker") as stack, worker_client(stack.config) as client:
        for number in range(rounds + 1):
            ids, seconds = decode_local(engine, experts, tokens)
            replies = generate(client, Generate(PROMPT, tokens, temperature=0.0))
            assert token_ids(replies) == ids, "the two must say the same"
            if number:  # the first round reads the experts
                local.append(seconds)
                through.append((replies[-1].elapsed_s - replies[-1].ttft_s) / (tokens - 1))
    return local, through


def decode_local(engine: Engine, experts: LocalExperts, tokens: int) -> tuple[list[int], float]:
    ids, first = [], 0.0
    for step in engine.generate(Job(PROMPT, tokens), experts, lambda: False):
        first = first or time.perf_counter()
        assert step.token is not None
        ids.append(step.token)
    return ids, (time.perf_counter() - first) / (tokens - 1)


if __name__ == "__main__":
    main()
