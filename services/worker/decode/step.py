"""One decode step of a few sequences as a sequence of kernel launches, with every number that changes on the device.

Positions, tokens, ring and group indices, look-ups and the next token are the kernels' own business, so the same
launches serve every step, and a graph can replay them. What depends on the length of the context is its `Extent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.decode.attention import attend_chunks, attend_combine, attention_inputs
from kernels.decode.experts import experts_down, experts_up, experts_write, route
from kernels.decode.indexer import ENTRIES, index_choice
from kernels.decode.linear import fused_linear, grouped_linear, quantised_linear
from kernels.decode.sampling import sample, sample_threshold
from kernels.decode.streams import attention_write, head_read, streams_start, sublayer_read
from services.worker.decode.buffers import Buffers
from services.worker.decode.control import Control
from services.worker.decode.extent import Extent
from services.worker.decode.states import LayerTensors
from services.worker.decode.weights import Fp8, LayerWeights, StepWeights
from services.worker.device_memory import host_view
from services.worker.model import Model
from services.worker.model.hyper import HyperConnection

Launch = Callable[[], None]


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
        inputs16 = w.inputs16 if ratio else None
        projected = torch.zeros(b.s, len(w.inputs8.codes) + (len(w.inputs16) if ratio else 0), device=device)
        chooses = ratio == 4 and self._extent.chooses(c)
        wq_b = w.wq_b if chooses else w.wq_b.head(c.num_attention_heads * c.head_dim)
        q = torch.zeros(b.s, len(wq_b.codes), device=device)
        return [
            self._read(w.hc_attn, w.attn_norm),
            self._fused(w.inputs8, inputs16, (b.codes, b.scales, b.x), projected),
            self._inputs(w, state, ratio, projected),
            self._fused(wq_b, None, (b.q_codes, b.q_scales, b.o[:, : c.q_lora_rank].contiguous()), q),
            *([self._choice(q, projected, state)] if chooses else ()),
            *self._attention(w, state, ratio, q),
            *self._output(w),
        ]

    def _inputs(self, w: LayerWeights, state: LayerTensors, ratio: int, projected: torch.Tensor) -> Launch:
        c, b, frequencies = self._config, self._buffers, self._frequencies[ratio]
        kernel = attention_inputs(
            q=c.q_lora_rank,
            d=c.head_dim,
            rope=c.qk_rope_head_dim,
            ratio=ratio,
            index_d=c.index_head_dim,
            index_heads=c.index_n_heads,
            window=c.sliding_window,
            s=b.s,
            eps=c.rms_norm_eps,
        )
        norms = (w.q_norm, w.kv_norm, *w.pooling, *w.index_pooling, frequencies)
        return lambda: kernel(projected, b.positions, *norms, b.q_codes, b.q_scales, *state)

    def _attention(self, w: LayerWeights, state: LayerTensors, ratio: int, q: torch.Tensor) -> list[Launch]:
        c, b, frequencies = self._config, self._buffers, self._frequencies[ratio]
        heads, chunks = c.num_attention_heads, self._extent.num_chunks(ratio, c)
        sizes = {"heads": heads, "d": c.head_dim, "rope": c.qk_rope_head_dim, "chunks": chunks, "s": b.s}
        attend = attend_chunks(
            **sizes, q_stride=q.shape[1], window=c.sliding_window, ratio=ratio, topk=c.index_topk, eps=c.rms_norm_eps
        )
        combine = attend_combine(**sizes)
        shape = (b.s, chunks, heads)
        sums = b.sums[: b.s * chunks * heads * c.head_dim].view(*shape, c.head_dim)
        tops, denominators = (t[: b.s * chunks * heads].view(shape) for t in (b.tops, b.denominators))
        return [
            lambda: attend(q, b.positions, state.keys, b.chosen, frequencies, sums, tops, denominators),
            lambda: combine(sums, tops, denominators, w.sink, b.positions, frequencies, b.o),
        ]

    def _output(self, w: LayerWeights) -> list[Launch]:
        c, b = self._config, self._buffers
        d, groups, low_rank = c.hidden_size, c.o_groups, c.o_groups * c.o_lora_rank
        k = c.num_attention_heads * c.head_dim // groups
        out = grouped_linear(n=low_rank, groups=groups, k=k, s=b.s, rows_per_scale=w.wo_a.rows_per_scale)
        last = quantised_linear(n=d, k=low_rank, s=b.s, rows_per_scale=w.wo_b.rows_per_scale)
        write = attention_write(d=d, s=b.s)
        return [
            lambda: out(w.wo_a.codes, w.wo_a.scale, b.o, b.z),
            lambda: last(w.wo_b.codes, w.wo_b.scale, b.z, b.y),
            lambda: write(b.y, b.streams, b.post, b.comb, w.hc_ffn.fn, b.parts),
        ]

    def _choice(self, q: torch.Tensor, projected: torch.Tensor, state: LayerTensors) -> Launch:
        c, b, frequencies = self._config, self._buffers, self._frequencies[4]
        own = c.num_attention_heads * c.head_dim
        blocks = -(-self._extent.num_entries(4) // ENTRIES)
        kernel = index_choice(
            heads=c.index_n_heads,
            d=c.index_head_dim,
            rope=c.qk_rope_head_dim,
            q_stride=q.shape[1],
            w_stride=projected.shape[1],
            topk=c.index_topk,
            blocks=blocks,
            s=b.s,
        )
        weights = projected[:, projected.shape[1] - c.index_n_heads :]
        entries = state.index_keys.shape[1]
        scores = b.index_scores[: b.s * entries].view(b.s, entries)
        inputs = (q[:, own:], weights, b.positions, state.index_keys, frequencies)
        return lambda: kernel(*inputs, scores, b.index_done, b.chosen)

    def _expert_half(
        self, w: LayerWeights, number: int, model: Model, following: LayerWeights | None, guesses: bool
    ) -> list[Launch]:
        b = self._buffers
        products = torch.zeros(b.s, len(w.shared_w1_w3.codes) + len(w.gates), device=b.x.device)
        next_fn, parts = (model.head.fn, b.head_parts) if following is None else (following.hc_attn.fn, b.parts)
        return [
            self._read(w.hc_ffn, w.ffn_norm),
            self._fused(w.shared_w1_w3, w.gates, (b.codes, b.scales, b.x), products),
            self._route(w, number, following, guesses, products),
            *self._experts(w, number, products, next_fn, parts),
        ]

    def _route(
        self, w: LayerWeights, number: int, following: LayerWeights | None, guesses: bool, products: torch.Tensor
    ) -> Launch:
        c, b, control, hints = self._config, self._buffers, self._control, self._buffers.hints
        guessed = number + 1 if guesses and following is not None and not c.is_hash_layer(number + 1) else -1
        bias = w.bias if following is None else following.bias
        kernel = route(
            experts=c.n_routed_experts,
            topk=c.num_experts_per_tok,
            stride=products.shape[1],
            offset=len(w.shared_w1_w3.codes),
            hashed=c.is_hash_layer(number),
            scaling=c.routed_scaling_factor,
            s=b.s,
            vocab=len(w.tid2eid),
            guesses=guesses,
        )
        inputs = (products, w.bias, bias, w.tid2eid, b.tokens)
        shared = (control.table, control.num_tickets, control.ring, control.uses)
        own = (b.counts, b.own, b.waited, b.routing)
        guess = (hints.is_wanted, hints.ring, hints.hinted, hints.guessed, hints.judged)
        return lambda: kernel(number, guessed, *inputs, *shared, *own, *guess)

    def _experts(
        self, w: LayerWeights, number: int, products: torch.Tensor, next_fn: torch.Tensor, parts: torch.Tensor
    ) -> list[Launch]:
        """Up, down, and the sum into the streams with the parts of the projection behind it, which is `next_fn`."""
        c, b, control, pool = self._config, self._buffers, self._control, self._pool
        sizes = {"d": c.hidden_size, "width": c.moe_intermediate_size, "topk": c.num_experts_per_tok, "s": b.s}
        up = experts_up(
            **sizes, limit=c.swiglu_limit, stride=products.shape[1], rows_per_scale=w.shared_w2.rows_per_scale
        )
        down = experts_down(**sizes)
        write = experts_write(d=c.hidden_size, topk=c.num_experts_per_tok, mixes=len(next_fn), s=b.s)
        shared = (products, w.shared_w2.codes, w.shared_w2.scale)
        routed = (b.halves, b.scales, pool, b.routing, control.table[number], control.abort, b.waited)
        streams = (b.streams, b.post, b.comb, next_fn, parts)
        return [
            lambda: up(*shared, *routed, b.shared, b.hidden),
            lambda: down(b.hidden, pool, b.routing, b.outputs),
            lambda: write(b.routing, b.outputs, b.shared, control.clock, b.own, *streams),
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
        experts, topk = c.n_routed_experts, c.num_experts_per_tok
        threshold = sample_threshold(vocab=c.vocab_size, s=b.s)
        draw = sample(vocab=c.vocab_size, s=b.s, hash_layers=len(hashed), experts=experts, topk=topk)
        if len(hashed) == 0:
            hashed = hashed.new_zeros(1, 1, topk)
        inputs = (b.logits, b.sampling, b.threshold, b.best, b.done)
        sequence = (b.tokens, b.positions, b.step, host_view(b.log, str(b.x.device)))
        hint = (hashed, control.table, b.own, hints.ring, hints.hinted)
        return [
            lambda: threshold(b.logits, b.sampling, b.threshold),
            lambda: draw(*inputs, *sequence, *hint),
        ]
