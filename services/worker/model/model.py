"""The whole model: embedding, layers, head, and the extra block, on the state of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.hyper import Head
from services.worker.model.layer import Layer
from services.worker.model.mtp import MtpBlock
from services.worker.model.precision import EXACT, QUANTISED, Precision
from services.worker.model.state import SequenceState
from services.worker.model.weights import CPU, WeightReader
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

Progress = Callable[[str, int, int], None]
"""Called with what is being read, bytes done and bytes in all."""


class Model:
    """Dense weights, resident; experts come from a provider with every forward."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        layers: list[Layer],
        embedding: torch.Tensor,
        head: Head,
        mtp: MtpBlock | None,
        rotations: _Rotations,
    ) -> None:
        self.config = config
        self.device = embedding.device
        self._precision = precision
        self.layers = layers
        self.head = head
        self.embedding = embedding
        self._mtp = mtp
        self._rotations = rotations

    @classmethod
    def load(
        cls,
        index: TensorIndex,
        config: ModelConfig,
        max_context: int,
        *,
        device: torch.device = CPU,
        exact: bool = False,
        progress: Progress = lambda text, done, total: None,
    ) -> Model:
        """Read the dense weights to `device`, layer by layer.

        `exact` computes in float32 without simulated quantisation.

        Raises:
            CheckpointError: a tensor is missing, unreadable or of another type.
        """
        reader, precision = WeightReader(index, device), EXACT if exact else QUANTISED
        rotations = _Rotations(config, max_context, device)
        has_mtp = config.num_extra_blocks > 0 and not config.is_dspark
        total = _dense_bytes(index, has_mtp)
        progress("weights: embedding and head", 0, total)
        embedding = reader.stored("embed.weight").type(precision.dtype)
        vocabulary = reader.matrix("head.weight")
        layers = []
        for number in range(config.num_hidden_layers):
            progress(f"weights: layer {number + 1} of {config.num_hidden_layers}", reader.bytes_read, total)
            ratio = config.compress_ratios[number]
            layers.append(Layer(reader, config, number, rotations.of(ratio), precision))
        for layer, following in pairwise(layers):
            layer.moe.look_ahead_to(following.moe)
        head = Head(reader, "", config, vocabulary)
        if has_mtp:
            progress("weights: MTP block", reader.bytes_read, total)
        mtp = MtpBlock(reader, config, rotations.of(0), precision, vocabulary) if has_mtp else None
        progress("weights: all read", reader.bytes_read, total)
        return cls(config, precision, layers, embedding, head, mtp, rotations)

    def frequencies(self, ratio: int) -> torch.Tensor:
        """The angles by which a layer's rotation turns with each position, float32 [rope_dim / 2]."""
        return self._rotations.frequencies(ratio)

    def new_state(self, max_context: int) -> SequenceState:
        """An empty sequence of at most `max_context` tokens."""
        return SequenceState.of(self.config, max_context, self.device, self._precision.key_dtype(self.device))

    @torch.inference_mode()
    def forward(self, state: SequenceState, ids: Sequence[int], experts: ExpertProvider) -> torch.Tensor:
        """Take in the next tokens, one or many; logits float32 [vocab] of the last."""
        return self.head.logits(self.hidden(state, ids, experts)[-1:])[0]

    @torch.inference_mode()
    def hidden(self, state: SequenceState, ids: Sequence[int], experts: ExpertProvider) -> torch.Tensor:
        """As `forward`, but the streams [m, streams, hidden] after the last layer."""
        token_ids = torch.tensor(ids, device=self.device)
        assert state.position + len(ids) <= state.max_context, "the sequence is full"
        for layer in self.layers[1 : self.config.num_hash_layers]:
            layer.moe.hint(token_ids, experts)
        h = self.embedding[token_ids].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for layer, layer_state in zip(self.layers, state.layers, strict=False):
            h = layer.forward(h, token_ids, layer_state, state.position, experts)
        state.position += len(ids)
        return h

    @torch.inference_mode()
    def draft(
        self, state: SequenceState, h: torch.Tensor, next_ids: Sequence[int], experts: ExpertProvider
    ) -> torch.Tensor:
        """The MTP block's logits float32 [vocab] for the token after the last of `next_ids`.

        h: [m, streams, hidden] from `hidden`, from where the last draft of this sequence ended; next_ids: the tokens
        one position further.
        """
        assert self._mtp is not None, "this checkpoint has no MTP block"
        token_ids = torch.tensor(next_ids, device=self.device)
        layer_state = state.layers[self.config.num_hidden_layers]
        embedded = self.embedding[token_ids]
        logits = self._mtp.forward(h, embedded, token_ids, layer_state, state.extra_position, experts)
        state.extra_position += len(next_ids)
        return logits


def _dense_bytes(index: TensorIndex, has_mtp: bool) -> int:
    """What there is to read besides the routed experts."""
    names = (name for name in index.tensors if has_mtp or not name.startswith("mtp."))
    return sum(index[name].nbytes for name in names if ".ffn.experts." not in name)


class _Rotations:
    """Rope tables: one for layers without compression, one, stretched by YaRN, for the others."""

    def __init__(self, config: ModelConfig, positions: int, device: torch.device) -> None:
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        plain = kernels.rope_frequencies(dim, config.rope_theta)
        stretched = kernels.yarn_frequencies(
            dim,
            config.compress_rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )
        self._plain = kernels.rope_table(plain, positions).to(device)
        self._stretched = kernels.rope_table(stretched, positions).to(device)
        self._frequencies = plain.to(device), stretched.to(device)

    def of(self, ratio: int) -> torch.Tensor:
        return self._stretched if ratio else self._plain

    def frequencies(self, ratio: int) -> torch.Tensor:
        return self._frequencies[ratio > 0]
