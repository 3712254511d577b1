"""One decode step of a few sequences as a sequence of kernel launches, with every number that changes on the device.

Positions, tokens, ring and group indices, look-ups and the next token are the kernels' own business, so the same
launches serve every step, and a graph can replay them. What depends on the length of the context is its `Extent`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.decode.attention import (
    CHUNK,
    attend_chunks,
    attend_combine,
    attention_inputs,
    compressor_rows,
    compressor_width,
)
from kernels.decode.experts import OWN_WORDS, experts_down, experts_up, experts_write, route, routing_words
from kernels.decode.indexer import ENTRIES, index_scores, index_topk
from kernels.decode.linear import fused_linear, grouped_linear, quantised_linear
from kernels.decode.sampling import BLOCKS, SAMPLING_WORDS, STEPS, sample, sample_threshold
from kernels.decode.streams import (
    COLUMNS,
    LAYER_MIXES,
    STREAMS,
    attention_write,
    head_read,
    streams_start,
    sublayer_read,
)
from services.worker.decode.control import Control
from services.worker.decode.hints import Hints
from services.worker.decode.weights import Fp8, LayerWeights, StepWeights
from services.worker.device_memory import host_view
from services.worker.model import LayerState, Model, SequenceState
from services.worker.model.hyper import HyperConnection
from services.worker.sampler import SamplingParams
from shared.checkpoint.config import ModelConfig

Launch = Callable[[], None]


class LayerTensors(NamedTuple):
    """A layer's state of all sequences, the sequence first."""

    keys: torch.Tensor
    compressor: torch.Tensor
    index_keys: torch.Tensor
    index_compressor: torch.Tensor


def join(states: Sequence[SequenceState], config: ModelConfig) -> list[LayerTensors]:
    """Lay the states of several sequences behind each other; each goes on as a view of its part."""
    return [_join([state.layers[i] for state in states], config, i) for i in range(config.num_hidden_layers)]


@dataclass(frozen=True, slots=True)
class Extent:
    """A step for positions below `positions`: how much of the key list and of the index entries it looks at."""

    positions: int

    def num_entries(self, ratio: int) -> int:
        return self.positions // ratio if ratio else 0

    def chooses(self, config: ModelConfig) -> bool:
        """Whether a sequence may have more entries than the indexer keeps."""
        return self.num_entries(4) > config.index_topk

    def num_chunks(self, ratio: int, config: ModelConfig) -> int:
        entries = self.num_entries(ratio)
        seen = min(entries, config.index_topk) if ratio == 4 else entries
        return -(-(config.sliding_window + seen) // CHUNK)


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
        self.chosen = whole(s, c.index_topk)
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
    words = struct.pack("<fffiQ", params.temperature, params.top_p, params.min_p, params.top_k, seed)
    return torch.frombuffer(bytearray(words), dtype=torch.int32)


class DecodeStep:
    """The launches of a step: `forward` from tokens to logits, `draw` from logits to the next tokens."""

    def __init__(
        self,
        model: Model,
        weights: StepWeights,
        tensors: Sequence[LayerTensors],
        buffers: Buffers,
        pool: torch.Tensor,
        control: Control,
        extent: Extent,
    ) -> None:
        self._config = model.config
        self._buffers = buffers
        self._pool = pool
        self._control = control
        self._extent = extent
        self._frequencies = {ratio: model.frequencies(ratio) for ratio in set(self._config.compress_ratios)}
        self._draw = self._drawing(weights.hashed)
        self._forward = [self._start(model, weights.layers[0])]
        self.layer_launches: list[int] = []
        """How many each layer has."""
        for number, (layer, state) in enumerate(zip(weights.layers, tensors, strict=True)):
            following = weights.layers[number + 1] if number + 1 < len(weights.layers) else None
            launches = self._attention_half(layer, state, self._config.compress_ratios[number])
            launches += self._expert_half(layer, number, model, following, weights.guesses)
            self._forward += launches
            self.layer_launches.append(len(launches))
        self._forward += self._head(model)

    @property
    def num_launches(self) -> int:
        return len(self._forward) + len(self._draw)

    def forward(self) -> None:
        """Enqueue everything up to the logits, on the current stream."""
        for launch in self._forward:
            launch()

    def draw(self) -> None:
        """Enqueue the choice of the next tokens, which moves the sequences on."""
        for launch in self._draw:
            launch()

    def _start(self, model: Model, first: LayerWeights) -> Launch:
        c, b = self._config, self._buffers
        kernel = streams_start(d=c.hidden_size, s=b.s, vocab=c.vocab_size)
        return lambda: kernel(b.tokens, model.embedding, b.streams, first.hc_attn.fn, b.parts)

    def _read(self, mixing: HyperConnection, norm: torch.Tensor) -> Launch:
        c, b = self._config, self._buffers
        kernel = sublayer_read(
            d=c.hidden_size, s=b.s, eps=c.rms_norm_eps, hc_eps=c.hc_eps, iterations=c.hc_sinkhorn_iters
        )
        scale, base = mixing.scale, mixing.base
        return lambda: kernel(b.streams, b.parts, scale, base, norm, b.x, b.codes, b.halves, b.scales, b.post, b.comb)

    def _fused(
        self, w8: Fp8 | None, w16: torch.Tensor | None, inputs: tuple[torch.Tensor, ...], y: torch.Tensor
    ) -> Launch:
        """inputs: codes, scales and plain inputs of both kinds of rows."""
        codes, scales, x = inputs
        n8, n16, k = 0 if w8 is None else len(w8.codes), 0 if w16 is None else len(w16), codes.shape[1]
        rows = 128 if w8 is None else w8.rows_per_scale
        kernel = fused_linear(n8=n8, n16=n16, k=k, s=self._buffers.s, rows_per_scale=rows)
        none8, none16 = codes[:1], x[:1]
        weights = none8 if w8 is None else w8.codes, none8[:, : k // 128].contiguous() if w8 is None else w8.scale
        return lambda: kernel(*weights, none16 if w16 is None else w16, codes, scales, x, y)

    def _attention_half(self, w: LayerWeights, state: LayerTensors, ratio: int) -> list[Launch]:
        c, b, device = self._config, self._buffers, self._buffers.x.device
        eps, frequencies, heads = c.rms_norm_eps, self._frequencies[ratio], c.num_attention_heads
        chunks, window = self._extent.num_chunks(ratio, c), c.sliding_window
        has_inputs16 = ratio > 0
        width = len(w.inputs8.codes) + (len(w.inputs16) if has_inputs16 else 0)
        projected = torch.zeros(b.s, width, device=device)
        chooses = ratio == 4 and self._extent.chooses(c)
        own = heads * c.head_dim
        wq_b = w.wq_b if chooses else w.wq_b.head(own)
        q = torch.zeros(b.s, len(wq_b.codes), device=device)
        inputs = attention_inputs(
            q=c.q_lora_rank,
            d=c.head_dim,
            rope=c.qk_rope_head_dim,
            ratio=ratio,
            index_d=c.index_head_dim,
            index_heads=c.index_n_heads,
            window=window,
            s=b.s,
            eps=eps,
        )
        sizes = {"heads": heads, "d": c.head_dim, "rope": c.qk_rope_head_dim, "chunks": chunks, "s": b.s}
        attend = attend_chunks(**sizes, q_stride=q.shape[1], window=window, ratio=ratio, topk=c.index_topk, eps=eps)
        combine = attend_combine(**sizes)
        shape = (b.s, chunks, heads)
        sums = b.sums[: b.s * chunks * own].view(*shape, c.head_dim)
        tops, denominators = (t[: b.s * chunks * heads].view(shape) for t in (b.tops, b.denominators))
        out = grouped_linear(
            n=c.o_groups * c.o_lora_rank,
            groups=c.o_groups,
            k=own // c.o_groups,
            s=b.s,
            rows_per_scale=w.wo_a.rows_per_scale,
        )
        last = quantised_linear(
            n=c.hidden_size, k=c.o_groups * c.o_lora_rank, s=b.s, rows_per_scale=w.wo_b.rows_per_scale
        )
        write = attention_write(d=c.hidden_size, s=b.s)
        norms = (w.q_norm, w.kv_norm, *w.pooling, *w.index_pooling, frequencies)
        return [
            self._read(w.hc_attn, w.attn_norm),
            self._fused(w.inputs8, w.inputs16 if has_inputs16 else None, (b.codes, b.scales, b.x), projected),
            lambda: inputs(projected, b.positions, *norms, b.q_codes, b.q_scales, *state),
            self._fused(wq_b, None, (b.q_codes, b.q_scales, b.o[:, : c.q_lora_rank].contiguous()), q),
            *(self._choice(q, projected, state) if chooses else ()),
            lambda: attend(q, b.positions, state.keys, b.chosen, frequencies, sums, tops, denominators),
            lambda: combine(sums, tops, denominators, w.sink, b.positions, frequencies, b.o),
            lambda: out(w.wo_a.codes, w.wo_a.scale, b.o, b.z),
            lambda: last(w.wo_b.codes, w.wo_b.scale, b.z, b.y),
            lambda: write(b.y, b.streams, b.post, b.comb, w.hc_ffn.fn, b.parts),
        ]

    def _choice(self, q: torch.Tensor, projected: torch.Tensor, state: LayerTensors) -> list[Launch]:
        c, b, frequencies = self._config, self._buffers, self._frequencies[4]
        own = c.num_attention_heads * c.head_dim
        blocks = -(-self._extent.num_entries(4) // ENTRIES)
        score = index_scores(
            heads=c.index_n_heads,
            d=c.index_head_dim,
            rope=c.qk_rope_head_dim,
            q_stride=q.shape[1],
            w_stride=projected.shape[1],
            topk=c.index_topk,
            blocks=blocks,
            s=b.s,
        )
        best = index_topk(topk=c.index_topk, s=b.s)
        weights = projected[:, projected.shape[1] - c.index_n_heads :]
        entries = state.index_keys.shape[1]
        scores = b.index_scores[: b.s * entries].view(b.s, entries)
        return [
            lambda: score(q[:, own:], weights, b.positions, state.index_keys, frequencies, scores),
            lambda: best(scores, b.positions, b.chosen),
        ]

    def _expert_half(
        self, w: LayerWeights, number: int, model: Model, following: LayerWeights | None, guesses: bool
    ) -> list[Launch]:
        c, b, control, hints = self._config, self._buffers, self._control, self._buffers.hints
        d, width, topk = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
        offset = len(w.shared_w1_w3.codes)
        products = torch.zeros(b.s, offset + len(w.gates), device=b.x.device)
        guessed = number + 1 if guesses and following is not None and not c.is_hash_layer(number + 1) else -1
        bias = w.bias if following is None else following.bias
        choose = route(
            experts=c.n_routed_experts,
            topk=topk,
            stride=products.shape[1],
            offset=offset,
            hashed=c.is_hash_layer(number),
            scaling=c.routed_scaling_factor,
            s=b.s,
            vocab=len(w.tid2eid),
            guesses=guesses,
        )
        sizes = {"d": d, "width": width, "topk": topk, "s": b.s}
        up = experts_up(
            **sizes, limit=c.swiglu_limit, stride=products.shape[1], rows_per_scale=w.shared_w2.rows_per_scale
        )
        down = experts_down(**sizes)
        row = control.table[number]
        shared = (w.shared_w2.codes, w.shared_w2.scale)
        next_fn, parts = (model.head.fn, b.head_parts) if following is None else (following.hc_attn.fn, b.parts)
        write = experts_write(d=d, topk=topk, mixes=len(next_fn), s=b.s)
        return [
            self._read(w.hc_ffn, w.ffn_norm),
            self._fused(w.shared_w1_w3, w.gates, (b.codes, b.scales, b.x), products),
            lambda: choose(
                number,
                guessed,
                products,
                w.bias,
                bias,
                w.tid2eid,
                b.tokens,
                control.table,
                control.num_tickets,
                control.ring,
                control.uses,
                b.counts,
                b.own,
                b.waited,
                b.routing,
                hints.is_wanted,
                hints.ring,
                hints.hinted,
                hints.guessed,
                hints.judged,
            ),
            lambda: up(
                products,
                *shared,
                b.halves,
                b.scales,
                self._pool,
                b.routing,
                row,
                control.abort,
                b.waited,
                b.shared,
                b.hidden,
            ),
            lambda: down(b.hidden, self._pool, b.routing, b.outputs),
            lambda: write(
                b.routing, b.outputs, b.shared, control.clock, b.own, b.streams, b.post, b.comb, next_fn, parts
            ),
        ]

    def _head(self, model: Model) -> list[Launch]:
        c, b, head = self._config, self._buffers, model.head
        read = head_read(d=c.hidden_size, s=b.s, eps=c.rms_norm_eps, hc_eps=c.hc_eps)
        return [
            lambda: read(b.streams, b.head_parts, head.scale, head.base, head.norm, b.x, b.codes, b.scales),
            self._fused(None, head.vocabulary, (b.codes, b.scales, b.x), b.logits),
        ]

    def _drawing(self, hashed: torch.Tensor) -> list[Launch]:
        c, b, control, hints = self._config, self._buffers, self._control, self._buffers.hints
        filter_ = sample_threshold(vocab=c.vocab_size, s=b.s)
        experts, topk = c.n_routed_experts, c.num_experts_per_tok
        draw = sample(vocab=c.vocab_size, s=b.s, hash_layers=len(hashed), experts=experts, topk=topk)
        if len(hashed) == 0:
            hashed = hashed.new_zeros(1, 1, topk)
        log = host_view(b.log, str(b.x.device))
        return [
            lambda: filter_(b.logits, b.sampling, b.threshold),
            lambda: draw(
                b.logits,
                b.sampling,
                b.threshold,
                b.best,
                b.done,
                b.tokens,
                b.positions,
                b.step,
                log,
                hashed,
                control.table,
                b.own,
                hints.ring,
                hints.hinted,
            ),
        ]


def _join(layers: Sequence[LayerState], config: ModelConfig, number: int) -> LayerTensors:
    ratio = config.compress_ratios[number]
    keys = _stack([layer.keys for layer in layers])
    for i, layer in enumerate(layers):
        layer.keys = keys[i]
    if layers[0].compressor is None:
        return _without_compressor(keys, config)
    rows = _stack([layer.compressor.rows for layer in layers if layer.compressor])
    for i, layer in enumerate(layers):
        assert layer.compressor is not None
        layer.compressor.rows = rows[i]
    if ratio != 4:
        others = _without_compressor(keys, config, ratio)
        return LayerTensors(keys, rows, others.index_keys, others.index_compressor)
    index_keys = _stack([layer.index_keys for layer in layers if layer.index_keys is not None])
    index_rows = _stack([layer.index_compressor.rows for layer in layers if layer.index_compressor])
    for i, layer in enumerate(layers):
        assert layer.index_compressor is not None
        layer.index_keys, layer.index_compressor.rows = index_keys[i], index_rows[i]
    return LayerTensors(keys, rows, index_keys, index_rows)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One sequence keeps its memory."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(tuple(parts))


def _without_compressor(keys: torch.Tensor, config: ModelConfig, ratio: int = 1) -> LayerTensors:
    """Places for what the kernels of such a layer do not touch."""
    s, device = len(keys), keys.device

    def rows(d: int) -> torch.Tensor:
        return torch.zeros(s, 2, compressor_rows(ratio), compressor_width(ratio, d), device=device)

    index_keys = torch.zeros(s, 1, config.index_head_dim, dtype=torch.bfloat16, device=device)
    return LayerTensors(keys, rows(config.head_dim), index_keys, rows(config.index_head_dim))
