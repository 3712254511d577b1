"""Asks the held-out questions of one model and prints the table.

    python -m demo.evaluate engine [--checkpoint DIR] [--share 0.2]
    python -m demo.evaluate transformers --masters DIR

`engine` is Icebox's own model with quantised weights and activations, in this process; `transformers` is the trained
model before quantisation, in float32. Both answer greedily.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM, DynamicCache

from demo.corpus import HERE, Renderer
from demo.export import read_masters
from demo.model import build
from demo.questions import Question, Verdict, judge, questions, summary, table
from services.front.tokenizer import Tokenizer
from services.worker.local_experts import LocalExperts
from services.worker.model import Model
from services.worker.model.weights import CPU
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

END, LONGEST, CONTEXT, CHUNK = 1, 160, 4096, 512

Answerer = Callable[[Sequence[int]], list[int]]
"""Prompt ids to the ids of the greedy answer, end mark included."""


class Engine:
    """Icebox's model in this process, on `device`, with experts read from the checkpoint."""

    def __init__(self, checkpoint: Path, device: torch.device = CPU) -> None:
        index, self.config = TensorIndex.open(checkpoint), ModelConfig.from_dir(checkpoint)
        self.model = Model.load(index, self.config, CONTEXT, device=device)
        self.experts = LocalExperts(index, self.config, 64 << 20, device)

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        state = self.model.new_state(CONTEXT)
        for begin in range(0, len(prompt), CHUNK):
            logits = self.model.forward(state, prompt[begin : begin + CHUNK], self.experts)
        answer = [int(logits.argmax())]
        while answer[-1] != END and len(answer) < LONGEST:
            answer.append(int(self.model.forward(state, answer[-1:], self.experts).argmax()))
        return answer


class Unquantised:
    """`transformers`' model in float32 with the masters as they were trained."""

    def __init__(self, masters: Path) -> None:
        self.model: DeepseekV4ForCausalLM = build(0)
        tensors = {k: v for k, v in read_masters(masters).items() if not k.startswith("mtp.")}
        self.model.load_state_dict(tensors)
        self.model.eval()

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int]) -> list[int]:
        cache = DynamicCache(config=self.model.config)
        for begin in range(0, len(prompt), CHUNK):
            part = torch.tensor([prompt[begin : begin + CHUNK]])
            logits = self.model(part, cache=cache, use_cache=True, logits_to_keep=1).logits
        answer = [int(logits[0, -1].argmax())]
        while answer[-1] != END and len(answer) < LONGEST:
            step = self.model(torch.tensor([answer[-1:]]), cache=cache, use_cache=True)
            answer.append(int(step.logits[0, -1].argmax()))
        return answer


def ask(answerer: Answerer, asked: Sequence[Question], renderer: Renderer) -> dict[str, list[Verdict]]:
    """Verdicts by category; prints what went wrong."""
    verdicts: dict[str, list[Verdict]] = {}
    for question in asked:
        ids = answerer(renderer.prompt(question.conversation, answer=False))
        text = b"".join(map(renderer.tokenizer.token_bytes, ids)).decode(errors="replace")
        verdict = judge(question.conversation, text)
        verdicts.setdefault(question.category, []).append(verdict)
        if not verdict.right:
            wanted = question.conversation.call or question.conversation.expected
            print(f"  wrong, {question.category}: {text!r}, wanted {wanted!r}", flush=True)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("engine", "transformers"))
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--masters", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of every category")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    renderer = Renderer(Tokenizer.load(args.checkpoint))
    answerer = Engine(args.checkpoint) if args.model == "engine" else Unquantised(args.masters)
    asked = questions(lambda text: len(renderer.tokenizer.encode([(text, False)])), args.share)
    started = time.monotonic()
    verdicts = ask(answerer, asked, renderer)
    print(table(verdicts))
    print(f"{time.monotonic() - started:.0f} s")
    if args.out is not None:
        args.out.write_text(json.dumps(summary(verdicts), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
