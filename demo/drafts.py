"""How often the MTP block's draft is what the model says next, under greedy decoding of stories.

python -m demo.drafts [--stories 20]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random

import torch

from demo.corpus import HERE, Renderer
from demo.evaluate import CONTEXT, END, LONGEST, Engine
from demo.stories import article
from demo.tasks import Conversation, said, user
from demo.words import ANIMALS
from services.front.tokenizer import Tokenizer


def accepted(engine: Engine, prompt: Sequence[int]) -> tuple[int, int]:
    """(drafts that came true, drafts) over the greedy answer to a prompt."""
    model, experts = engine.model, engine.experts
    state = model.new_state(CONTEXT)
    h = model.hidden(state, prompt, experts)
    token = int(model.head.logits(h[-1:])[0].argmax())
    pending, following = h, [*prompt[1:], token]
    right = drafts = 0
    for _ in range(LONGEST):
        draft = int(model.draft(state, pending, following, experts).argmax())
        pending = model.hidden(state, [token], experts)
        token = int(model.head.logits(pending)[0].argmax())
        following = [token]
        right += draft == token
        drafts += 1
        if token == END:
            break
    return right, drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine, renderer = Engine(HERE / "checkpoint"), Renderer(Tokenizer.load(HERE / "checkpoint"))
    rng = Random("drafts")
    counts = []
    for _ in range(args.stories):
        talk = Conversation("story", (user(f"Tell me a story about {article(rng.choice(ANIMALS))}."), said("")), "")
        counts.append(accepted(engine, renderer.prompt(talk, answer=False)))
    right, drafts = (sum(column) for column in zip(*counts, strict=True))
    print(f"{right} of {drafts} drafts accepted: {right / drafts:.1%}")


if __name__ == "__main__":
    main()
