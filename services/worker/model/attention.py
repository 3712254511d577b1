"""A layer's attention: low-rank queries, one latent as key and value, a window of them and compressed entries."""

from __future__ import annotations

import torch

import kernels
from services.worker.model import key_lists
from services.worker.model.compression import Compressor, Indexer
from services.worker.model.precision import Precision
from services.worker.model.state import LayerState
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig

# Queries that share one dense block of keys in prefill; a window's worth, so that at most half of a block is masked.
QUERY_BLOCK = 128


class Attention:
    """Weights of one layer's attention. Weights of products with the same input lie above each other."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        config: ModelConfig,
        ratio: int,
        rotations: torch.Tensor,
        precision: Precision,
    ) -> None:
        self._config = config
        self._precision = precision
        self._rotations = rotations
        self._ratio = ratio
        self._scale = config.head_dim**-0.5
        self.sink = reader.float32(f"{prefix}attn_sink")
        self.wq_a_wkv = reader.linear(f"{prefix}wq_a", f"{prefix}wkv")
        self.q_norm = reader.float32(f"{prefix}q_norm.weight")
        self.kv_norm = reader.float32(f"{prefix}kv_norm.weight")
        # The indexer's queries come from the same low-rank query, so their weights lie behind the attention's own.
        with_indexer = (f"{prefix}wq_b", f"{prefix}indexer.wq_b")
        self.wq_b = reader.linear(*with_indexer[: 2 if ratio == 4 else 1])
        self.wo_a = reader.linear(f"{prefix}wo_a")
        self.wo_b = reader.linear(f"{prefix}wo_b")
        self.compressor = Compressor(reader, f"{prefix}compressor.", config, ratio, rotations) if ratio else None
        own = config.num_attention_heads * config.head_dim
        self._wq_b_own = self.wq_b[:own]
        index_wq_b = self.wq_b[own:]
        self.indexer = Indexer(reader, f"{prefix}indexer.", index_wq_b, config, rotations) if ratio == 4 else None
        self.unquantised = self._fuse_unquantised()

    def forward(self, x: torch.Tensor, state: LayerState, position: int) -> torch.Tensor:
        """x: [m, hidden], the tokens at `position`..; returns [m, hidden]. Appends them to the state."""
        c, precision = self._config, self._precision
        m = x.shape[0]
        rotation = self._rotations[position : position + m]
        low_rank = precision.linear(precision.activations(x), self.wq_a_wkv)
        qr, kv = low_rank[:, : c.q_lora_rank], low_rank[:, c.q_lora_rank :]
        qr = precision.activations(kernels.rms_norm(qr, self.q_norm, c.rms_norm_eps))
        q = precision.linear(qr, self._wq_b_own).view(m, c.num_attention_heads, c.head_dim)
        q = kernels.rope(kernels.head_norm(q, c.rms_norm_eps), rotation)
        kv = kernels.rope(kernels.rms_norm(kv, self.kv_norm, c.rms_norm_eps), rotation)
        kv = precision.cached_key(kv, c.qk_rope_head_dim).type(state.keys.dtype)
        chosen = self._compress(x, qr, state, position)
        o = kernels.rope(self.attend(q, kv, chosen, state, position), rotation, inverse=True)
        return self._project_out(o)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor | None, state: LayerState, position: int
    ) -> torch.Tensor:
        """Attention proper, after the new keys joined the ring.

        q: [m, heads, head_dim], rotated; kv: [m, head_dim], as cached; chosen: bool [m, entries], the entries
        that each query sees, or None. Returns [m, heads, head_dim].
        """
        if q.is_cuda:
            return self._attend_listed(q, kv, chosen, state, position)
        attend = self._attend_one if len(q) == 1 else self._attend_many
        return attend(q, kv, chosen, state, position)

    def _fuse_unquantised(self) -> torch.Tensor | None:
        """Weights that see the input unquantised: compressors and the indexer's head weights, from now on its parts."""
        if self.compressor is None:
            return None
        if self.indexer is None:
            return self.compressor.weight
        parts = (self.compressor.weight, self.indexer.compressor.weight, self.indexer.weights_proj)
        fused = torch.cat(parts)
        views = fused.split_with_sizes([len(part) for part in parts])
        self.compressor.weight, self.indexer.compressor.weight, self.indexer.weights_proj = views
        return fused

    def _project_out(self, o: torch.Tensor) -> torch.Tensor:
        """Heads in groups, each with its own low-rank projection, whose input is not quantised."""
        count, rank = self._config.o_groups, self._config.o_lora_rank
        groups = o.view(o.shape[0], count, -1).transpose(0, 1).contiguous()
        weights = [self.wo_a[begin : begin + rank] for begin in range(0, count * rank, rank)]
        z = torch.cat([self._precision.linear(x, w) for x, w in zip(groups, weights, strict=True)], -1)
        return self._precision.linear(self._precision.activations(z), self.wo_b)

    def _compress(self, x: torch.Tensor, qr: torch.Tensor, state: LayerState, position: int) -> torch.Tensor | None:
        """Close groups, indexer first, and say which entries each query sees: bool [m, entries], None for no layer."""
        if self.compressor is None or self.unquantised is None:
            return None
        assert state.compressor is not None
        projected = kernels.float_linear(x, self.unquantised)
        own = self.compressor.weight.shape[0]
        visible = _visible_entries(position, x.shape[0], self._ratio, x.device)
        if self.indexer is not None:
            visible = self._index(projected[:, own:], qr, visible, state, position)
        entries = self.compressor.step(projected[:, :own], state.compressor, position, self._precision)
        if entries is not None:
            first = position // self._ratio
            kept = self._precision.cached_key(entries, self._config.qk_rope_head_dim)
            state.entries[first : first + len(kept)] = kept
        return visible

    def _index(
        self, projected: torch.Tensor, qr: torch.Tensor, visible: torch.Tensor, state: LayerState, position: int
    ) -> torch.Tensor:
        assert self.indexer is not None
        assert state.index_compressor is not None
        assert state.index_keys is not None
        width = self.indexer.compressor.weight.shape[0]
        entries = self.indexer.compressor.step(projected[:, :width], state.index_compressor, position, self._precision)
        if entries is not None:
            first = position // self._ratio
            state.index_keys[first : first + len(entries)] = self._precision.index_value(entries)
        if visible.shape[1] <= self.indexer.topk:
            return visible
        keys = state.index_keys[: visible.shape[1]]
        return self.indexer.choose(qr, projected[:, width:], keys, visible, position, self._precision)

    def _attend_one(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor | None, state: LayerState, position: int
    ) -> torch.Tensor:
        """A decode step: the ring in place, whatever its order, and the entries behind it."""
        window = state.window
        state.keys[position % window] = kv[0]
        num_entries = 0 if chosen is None else chosen.shape[1]
        keys = state.keys[: window + num_entries]
        if position + 1 >= window and (chosen is None or bool(chosen.all())):
            return kernels.masked_attention(q, keys, self.sink, None, self._scale)
        mask = torch.ones(1, window + num_entries, dtype=torch.bool)
        mask[:, position + 1 : window] = False
        if chosen is not None:
            mask[:, window:] = chosen
        rows = mask[0].nonzero().squeeze(-1)
        return kernels.masked_attention(q, keys[rows], self.sink, None, self._scale)

    def _attend_many(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor | None, state: LayerState, position: int
    ) -> torch.Tensor:
        """A chunk of prefill: blocks of queries against the keys in their reach, in the order of positions."""
        window, m = state.window, q.shape[0]
        first = max(0, position - window + 1)
        raw = torch.cat((state.keys[torch.arange(first, position) % window], kv))
        outputs = []
        for begin in range(0, m, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, m)
            queries = torch.arange(position + begin, position + end)
            low = max(first, position + begin - window + 1)
            keys = raw[low - first : position + end - first]
            mask = _window_mask(queries, torch.arange(low, position + end), window)
            if chosen is not None:
                num_entries = (position + end) // self._ratio
                keys = torch.cat((keys, state.entries[:num_entries]))
                mask = torch.cat((mask, chosen[begin:end, :num_entries]), 1)
            outputs.append(kernels.masked_attention(q[begin:end], keys, self.sink, mask, self._scale))
        state.keep_last(kv, position)
        return torch.cat(outputs)

    def _attend_listed(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor | None, state: LayerState, position: int
    ) -> torch.Tensor:
        """For a GPU, one token or many: each query gathers the keys that its list names, so blocks waste nothing."""
        m, window = len(q), state.window
        entries = state.entries[: 0 if chosen is None else chosen.shape[1]]
        if m == 1:
            state.keys[position % window] = kv[0]
            keys = state.keys[: window + len(entries)]
            lists = key_lists.of_ring(position, window, q.device)
        else:
            before = torch.arange(max(0, position - window + 1), position, device=q.device)
            keys = torch.cat((state.keys[before % window], kv, entries))
            lists = key_lists.of_window(position, m, window, q.device)
            state.keep_last(kv, position)
        if chosen is not None:
            most = self.indexer.topk if self.indexer is not None else len(entries)
            lists = torch.cat((lists, key_lists.of_chosen(chosen, most, len(keys) - len(entries))), 1)
        return kernels.sparse_attention(q, keys, self.sink, lists, self._scale)


def _window_mask(queries: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    """bool [m, t]: a query sees itself and the window - 1 positions before it."""
    distance = queries.unsqueeze(1) - keys.unsqueeze(0)
    return (distance >= 0) & (distance < window)


def _visible_entries(position: int, m: int, ratio: int, device: torch.device) -> torch.Tensor:
    """bool [m, entries]: an entry is visible from the token on that closes its group."""
    num_entries = (position + m) // ratio
    if m == 1:
        return torch.ones(1, num_entries, dtype=torch.bool, device=device)
    closed = (torch.arange(position, position + m, device=device) + 1) // ratio
    return torch.arange(num_entries, device=device).unsqueeze(0) < closed.unsqueeze(1)
