"""Memory of the decode steps of one decoder, whatever their extent."""

from __future__ import annotations

import struct

import torch

from kernels.decode.experts import OWN_WORDS, routing_words
from kernels.decode.sampling import BLOCKS, SAMPLING_WORDS, STEPS
from kernels.decode.streams import COLUMNS, LAYER_MIXES, STREAMS
from services.worker.decode.extent import Extent
from services.worker.decode.hints import Hints
from services.worker.model import Model
from services.worker.sampler import SamplingParams


class Buffers:
    """What kernels hand to each other within a step, and the state of sampling; for `s` sequences."""

    def __init__(self, model: Model, s: int, most: Extent) -> None:
        c, device = model.config, model.device

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def halves(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        def whole(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        d, heads, head_dim, topk = c.hidden_size, c.num_attention_heads, c.head_dim, c.num_experts_per_tok
        chunks = max(most.num_chunks(ratio, c) for ratio in c.compress_ratios)
        self.s = s
        self.tokens, self.positions, self.step = whole(s), whole(s), whole(s)
        self.sampling = whole(s, SAMPLING_WORDS)
        self.log = torch.zeros(STEPS, s, dtype=torch.int32, pin_memory=True)
        self.streams = halves(s, STREAMS, d)
        self.parts = floats(s, d // COLUMNS, LAYER_MIXES + 1)
        self.head_parts = floats(s, d // COLUMNS, STREAMS + 1)
        self.x, self.codes, self.scales = halves(s, d), whole(s, d, dtype=torch.uint8), floats(s, d // 128)
        self.halves = torch.zeros(s, d, dtype=torch.float16, device=device)
        self.post, self.comb = floats(s, STREAMS), floats(s, STREAMS, STREAMS)
        q = c.q_lora_rank
        self.q_codes, self.q_scales = whole(s, q, dtype=torch.uint8), floats(s, q // 128)
        self.index_scores = floats(s * max(1, most.num_entries(4)))
        self.index_done, self.chosen = whole(s, dtype=torch.uint32), whole(s, c.index_topk)
        self.sums = floats(s * chunks * heads * head_dim)
        self.tops, self.denominators = floats(s * chunks * heads), floats(s * chunks * heads)
        self.o, self.z = halves(s, heads * head_dim), halves(s, c.o_groups * c.o_lora_rank)
        self.y = halves(s, d)
        self.routing = whole(routing_words(topk, s))
        self.waited = whole(1, dtype=torch.uint32)
        self.own = whole(OWN_WORDS, dtype=torch.int64)
        self.counts = whole(c.num_moe_layers, c.n_routed_experts, dtype=torch.int64)
        self.shared, self.outputs = halves(s, d), halves(topk * s, s, d)
        self.hidden = halves(topk * s, s, c.moe_intermediate_size)
        self.logits = floats(s, c.vocab_size)
        self.threshold, self.best = floats(s), whole(s, BLOCKS, 2)
        self.done = whole(s, dtype=torch.uint32)
        self.hints = Hints(c.n_routed_experts, device)


def sampling_words(params: SamplingParams, seed: int) -> torch.Tensor:
    """What `sample` reads of one sequence, int32 [SAMPLING_WORDS] on the host."""
    temperature = 0.0 if params.is_greedy else params.temperature
    words = struct.pack("<fffiQ", temperature, params.top_p, params.min_p, params.top_k, seed)
    return torch.frombuffer(bytearray(words), dtype=torch.int32)
