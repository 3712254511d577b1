"""The decode graph beside its own kernels launched one by one: ids and, every step, logits, bit for bit.

    python -m benchmarks.decode_bits DIR

DIR holds the slice that `benchmarks.full_width` makes. Answers cross many group boundaries, from prompts that end
beside one or far beyond the window. A graph answers first, so that the other runs find everything resident. Exits 1
unless all bits agree.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decode_slice import Slice, decoding
from benchmarks.report import save
from services.worker.decode.decoder import Decoder
from services.worker.sampler import SamplingParams

LENGTHS = (3, 127, 128, 129, 2500)
TEMPERATURES = (0.0, 0.6, 1.0, 1.5)
TOKENS = 600
SEED = 7


class Answer(NamedTuple):
    """Ids, and the logits that each was drawn from if they were wanted: float32 [vocab]."""

    ids: list[int]
    logits: list[torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    figures = measure(parser.parse_args().directory)
    save("decode_bits", figures)
    raise SystemExit(not figures["all_agree"])


def measure(checkpoint: Path) -> dict[str, Any]:
    """Prints a table; returns what is in it."""
    with decoding(checkpoint, cached=1.0) as own:
        graphs = own.engine.decoder
        assert graphs is not None, "there is no graph without a GPU"
        eager = Decoder(own.engine.model, [own.engine.state], own.engine.prefetch, eager=True)
        cases = list(itertools.product(LENGTHS, TEMPERATURES))
        rows = [_row(own, graphs, eager, *case) for case in track(cases, "prompts and temperatures")]
    figures = {"tokens": TOKENS, "all_agree": all(row["ids"] and row["logits"] for row in rows), "rows": rows}
    _show(rows)
    return figures


def _row(own: Slice, graphs: Decoder, eager: Decoder, length: int, temperature: float) -> dict[str, Any]:
    prompt = [random.Random(length).randrange(own.config.vocab_size) for _ in range(length)]
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature > 1 else 1.0, seed=SEED)
    two_in_flight = _answer(own, graphs, prompt, params, with_logits=False)
    one_by_one = _answer(own, graphs, prompt, params, with_logits=True)
    eager.begin(own.experts)  # its reader of tickets has seen none of the graphs'
    tickets = own.experts.control.ticket_head
    launched = _answer(own, eager, prompt, params, with_logits=True)
    assert own.experts.control.ticket_head == tickets, "what was answered before is resident"
    return {
        "length": length,
        "temperature": temperature,
        "ids": two_in_flight.ids == one_by_one.ids == launched.ids,
        "logits": all(torch.equal(a, b) for a, b in zip(one_by_one.logits, launched.logits, strict=True)),
    }


def _answer(own: Slice, decoder: Decoder, prompt: Sequence[int], params: SamplingParams, with_logits: bool) -> Answer:
    engine, answer = own.engine, Answer([], [])
    engine.state.reset()
    with own.experts.step():
        for begin in range(0, len(prompt), engine.prefill_chunk):
            part = prompt[begin : begin + engine.prefill_chunk]
            logits = engine.model.forward(engine.state, part, own.experts)
    tokens = decoder.tokens(logits.unsqueeze(0), [params], TOKENS, lookahead=not with_logits)
    with own.experts.step(), closing(tokens):
        for (token,) in tokens:
            answer.ids.append(token)
            if with_logits:
                answer.logits.append(decoder.logits[0].clone())
    return answer


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{TOKENS} tokens by graphs and by their kernels one by one")
    for heading in ("prompt", "temperature", "the same ids", "the same logits"):
        table.add_column(heading, justify="right")
    for row in rows:
        agree = ("yes" if row[name] else "NO" for name in ("ids", "logits"))
        table.add_row(f"{row['length']}", f"{row['temperature']}", *agree)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
