"""Twins of the fused kernels of a decode step, in the operations of this package.

A kernel writes into tensors that it is given; its twin returns them. Activations arrive as a kernel leaves them for the
next: FP8 codes with a float32 scale for 128 of them, or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.reference import indexer
from kernels.reference.activation import swiglu
from kernels.reference.attention import sparse_attention
from kernels.reference.compressor import compress, compress_overlapping
from kernels.reference.dequant import dequant_fp4
from kernels.reference.fp4 import hadamard_fp4
from kernels.reference.fp8 import act_quant, act_round, fp8_simulate
from kernels.reference.hyper_connection import hc_head_weights, hc_mixes, hc_post, hc_pre, hc_split_sinkhorn
from kernels.reference.norm import head_norm, rms_norm
from kernels.reference.rotary import rope
from kernels.reference.router import route_by_score, topk_weights
from kernels.reference.scale import decode_scale


def fused_linear(
    w8: torch.Tensor, scale: torch.Tensor, w16: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """float32 [s, n8 + n16]: FP8 rows w8 uint8 [n8, k] on codes uint8 [s, k], rounded to bfloat16, then bfloat16 rows
    w16 [n16, k] on x [s, k]. scale: uint8 [n8 / rows, k / 128]; scales: float32 [s, k / 128]."""
    quantised = _decode(w8, scale) @ _activations(codes, scales).T
    return torch.cat((quantised.T.bfloat16().float(), F.linear(x.float(), w16.float())), -1)


def grouped_linear(w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, groups: int) -> torch.Tensor:
    """bfloat16 [s, n]: groups of FP8 rows w uint8 [n, k], each on its own k inputs of x bfloat16 [s, groups * k]."""
    parts = zip(_decode(w, scale).chunk(groups), x.float().chunk(groups, -1), strict=True)
    return torch.cat([F.linear(part, rows) for rows, part in parts], -1).bfloat16()


def quantised_linear(w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """bfloat16 [s, n]: FP8 rows w uint8 [n, k] on x bfloat16 [s, k], quantised."""
    return F.linear(act_round(x), _decode(w, scale)).bfloat16()


class Mixing(NamedTuple):
    """Weights of a hyper-connection: fn float32 [24, 4 * d], scale [3], base [24]; at the head [4, 4 * d], [1], [4]."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor


class SublayerInput(NamedTuple):
    """x bfloat16 [s, d], its codes uint8 [s, d] and scales float32 [s, d / 128]; post [s, 4] and comb [s, 4, 4]."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def sublayer_read(
    streams: torch.Tensor, mixing: Mixing, norm: torch.Tensor, eps: float, hc_eps: float, iterations: int
) -> SublayerInput:
    """What a sublayer reads from streams bfloat16 [s, 4, d], and how they will take its output."""
    h = streams.float()
    mixes = hc_mixes(h, mixing.fn, eps)
    pre, post, comb = hc_split_sinkhorn(mixes, mixing.scale, mixing.base, streams.shape[1], iterations, hc_eps)
    x = rms_norm(hc_pre(h, pre).bfloat16(), norm, eps)
    codes, scales = act_quant(x)
    return SublayerInput(x, codes.view(torch.uint8), decode_scale(scales), post, comb)


def head_read(streams: torch.Tensor, mixing: Mixing, norm: torch.Tensor, eps: float, hc_eps: float) -> torch.Tensor:
    """bfloat16 [s, d]: what the vocabulary's product reads."""
    h = streams.float()
    weights = hc_head_weights(hc_mixes(h, mixing.fn, eps), mixing.scale, mixing.base, hc_eps)
    return rms_norm(hc_pre(h, weights).bfloat16(), norm, eps)


def streams_write(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer gave y bfloat16 [s, d]: `attention_write`, and `experts_write` after its sum."""
    return hc_post(y.float(), streams.float(), post, comb).bfloat16()


class Pooling(NamedTuple):
    """Of a compressor: norm float32 [d] and bias of a token's place in its group, ape float32 [ratio, width]; with
    overlap, which goes with a ratio of 4, the width is 2 * d."""

    norm: torch.Tensor
    ape: torch.Tensor


class LayerCaches(NamedTuple):
    """What a layer keeps of a sequence. keys: bfloat16 [window + entries, d]; index_keys: bfloat16 [entries, index_d];
    a compressor's rows: float32 [2, tokens, width], keys and gates, with overlap those of the group before first."""

    keys: torch.Tensor
    compressor: torch.Tensor
    index_keys: torch.Tensor
    index_compressor: torch.Tensor


class AttentionInputs(NamedTuple):
    """The low-rank query's codes uint8 [q] and scales float32 [q / 128]; the caches with the token in them."""

    codes: torch.Tensor
    scales: torch.Tensor
    caches: LayerCaches


def attention_inputs(
    y: torch.Tensor,
    position: int,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    poolings: Sequence[Pooling],
    rotations: torch.Tensor,
    caches: LayerCaches,
    window: int,
    eps: float,
) -> AttentionInputs:
    """One token of one sequence.

    y: float32 [n]: query and key, as wide as their norms, then keys and gates for each of `poolings`, which are none,
    the compressor's, or that and the indexer's; the rest is not looked at. rotations: complex64 [positions, r / 2].
    """
    widths = [len(q_norm), len(kv_norm), *(2 * pooling.ape.shape[1] for pooling in poolings)]
    query, key, *projected = y[: sum(widths)].split(widths)
    codes, scales = act_quant(rms_norm(query.bfloat16(), q_norm, eps))
    caches = LayerCaches(*(cache.clone() for cache in caches))
    key = rope(rms_norm(key.bfloat16(), kv_norm, eps).unsqueeze(0), rotations[position].unsqueeze(0))
    caches.keys[position % window] = _cached_key(key[0], rotations)
    of_poolings = zip(poolings, projected, (caches.compressor, caches.index_compressor), strict=False)
    entries = [_entry(own, position, pooling, rows, rotations, eps) for pooling, own, rows in of_poolings]
    if entries and entries[0] is not None:
        caches.keys[window + position // len(poolings[0].ape)] = _cached_key(entries[0], rotations)
    if len(entries) == 2 and entries[1] is not None:
        caches.index_keys[position // len(poolings[1].ape)] = hadamard_fp4(entries[1])
    return AttentionInputs(codes.view(torch.uint8), decode_scale(scales), caches)


def index_scores(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Scores of index entries for one query, float32 [t].

    q: float32 [heads, d] and w: float32 [heads], head weights, as their linears left them; keys: bfloat16 [t, d];
    rotation: complex64 [r / 2], that of the query's position.
    """
    heads, d = q.shape
    query = hadamard_fp4(rope(q.bfloat16().unsqueeze(0), rotation.unsqueeze(0)))
    weights = w.bfloat16() * (d**-0.5 * heads**-0.5)
    return indexer.index_scores(query, keys, weights.unsqueeze(0))[0]


def attend(
    q: torch.Tensor,
    position: int,
    keys: torch.Tensor,
    rows: torch.Tensor,
    sink: torch.Tensor,
    rotation: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """One query, `attend_chunks` and `attend_combine`: bfloat16 [heads * d].

    q: float32 [heads, d] as its linear left it; keys: bfloat16 [t, d]; rows: the rows it sees, int [j];
    rotation: complex64 [r / 2], that of `position`.
    """
    query = rope(head_norm(q.bfloat16(), eps).unsqueeze(0), rotation.unsqueeze(0))
    o = sparse_attention(query, keys, sink, rows.unsqueeze(0), q.shape[-1] ** -0.5)
    return rope(o, rotation.unsqueeze(0), inverse=True).flatten()


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, hashed: torch.Tensor | None, topk: int, scaling: float
) -> torch.Tensor:
    """Routing weights float32 [s, experts], 0 for those not chosen by logits [s, experts] + bias or by `hashed` ids."""
    scores = F.softplus(logits).sqrt()
    ids = hashed if hashed is not None else route_by_score(scores, bias, topk)
    return torch.zeros_like(scores).scatter_(-1, ids, topk_weights(scores, ids, scaling))


def hashed_hints(hashed: torch.Tensor, token: int, table: torch.Tensor) -> list[list[int]]:
    """Of each layer the experts that `sample` hints at: those that the token wants, in the order of hashed [layers,
    vocab, topk], and that have no slot in table [layers, experts]."""
    wanted = zip(hashed[:, token].tolist(), table.tolist(), strict=True)
    return [[expert for expert in ids if row[expert] < 0] for ids, row in wanted]


def guess(logits: torch.Tensor, bias: torch.Tensor, topk: int, row: torch.Tensor) -> list[int]:
    """What `route` hints at of the next layer: experts without a slot in row [experts] that its router would choose by
    logits [s, experts] for any of the tokens, ascending."""
    chosen = route_by_score(F.softplus(logits).sqrt(), bias, topk).unique().tolist()
    return [expert for expert in chosen if row[expert] < 0]


def expert_output(
    x: torch.Tensor, record: torch.Tensor, width: int, limit: float, weight: torch.Tensor
) -> torch.Tensor:
    """bfloat16 [s, d]: one expert, `experts_up` and `experts_down`. x: float32 [s, d], dequantised activations;
    record: uint8, as in a slot; weight: [s]."""
    d = x.shape[-1]
    sizes = [width * d // 2, width * d // 32] * 3
    w1, s1, w3, s3, w2, s2 = record[: sum(sizes)].split(sizes)

    def weights(codes: torch.Tensor, scale: torch.Tensor, k: int) -> torch.Tensor:
        return dequant_fp4(codes.view(-1, k // 2), scale.view(torch.float8_e8m0fnu).view(-1, k // 32))

    gate, up = F.linear(x, weights(w1, s1, d)).bfloat16(), F.linear(x, weights(w3, s3, d)).bfloat16()
    hidden = act_round(swiglu(gate, up, limit, weight, torch.bfloat16))
    return F.linear(hidden, weights(w2, s2, width)).bfloat16()


def _cached_key(key: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """A key [d] on the FP8 grid, in all but the values that rotate."""
    plain = len(key) - 2 * rotations.shape[1]
    return torch.cat((fp8_simulate(key[:plain]), key[plain:]))


def _entry(
    projected: torch.Tensor,
    position: int,
    pooling: Pooling,
    rows: torch.Tensor,
    rotations: torch.Tensor,
    eps: float,
) -> torch.Tensor | None:
    """Puts a token into its group in `rows`; bfloat16 [d], the entry of the group if that closes it."""
    ratio = len(pooling.ape)
    place, previous = position % ratio, rows.shape[1] - ratio
    rows[:, previous + place] = projected.view(2, -1)
    rows[1, previous + place] += pooling.ape[place]
    if place + 1 < ratio:
        return None
    kv, gate = rows.unflatten(1, (-1, ratio))
    pooled = (compress_overlapping if previous else compress)(kv, gate)
    rows[:, :previous] = rows[:, ratio:]
    return rope(rms_norm(pooled.bfloat16(), pooling.norm, eps), rotations[position - place].unsqueeze(0))[0]


def _decode(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, k] of FP8 codes with a scale row for any number of rows."""
    rows = decode_scale(scale.view(torch.float8_e8m0fnu)).repeat_interleave(len(w) // len(scale), 0)
    return w.view(torch.float8_e4m3fn).float() * rows.repeat_interleave(128, 1)


def _activations(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, -1)
