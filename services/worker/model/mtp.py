"""The multi-token-prediction block: from the backbone's streams and the next token, logits for the token after it."""

from __future__ import annotations

import torch

import kernels
from services.worker.experts import ExpertProvider
from services.worker.model.hyper import Head
from services.worker.model.layer import Layer
from services.worker.model.precision import Precision
from services.worker.model.state import LayerState
from services.worker.model.weights import WeightReader
from shared.checkpoint.config import ModelConfig


class MtpBlock:
    """Extra block 0 of a checkpoint with plain MTP. Embedding and vocabulary are the backbone's."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        rotations: torch.Tensor,
        precision: Precision,
        vocabulary: torch.Tensor,
    ) -> None:
        number = config.num_hidden_layers
        prefix = config.layer_prefix(number)
        self._eps = config.rms_norm_eps
        self._precision = precision
        self._enorm = reader.float32(f"{prefix}enorm.weight")
        self._hnorm = reader.float32(f"{prefix}hnorm.weight")
        self._e_proj = reader.linear(f"{prefix}e_proj")
        self._h_proj = reader.linear(f"{prefix}h_proj")
        self._layer = Layer(reader, config, number, rotations, precision)
        self._head = Head(reader, prefix, config, vocabulary)

    def forward(
        self,
        h: torch.Tensor,
        embedded: torch.Tensor,
        next_ids: torch.Tensor,
        state: LayerState,
        position: int,
        experts: ExpertProvider,
    ) -> torch.Tensor:
        """Logits float32 [vocab] that follow the last of `next_ids`.

        h: [m, streams, hidden], the backbone's output at `position`..; embedded: [m, hidden], the embeddings of
        next_ids [m], the tokens one position further.
        """
        precision = self._precision
        e = precision.activations(kernels.rms_norm(embedded, self._enorm, self._eps))
        streams = precision.activations(kernels.rms_norm(h, self._hnorm, self._eps))
        e = precision.linear(e, self._e_proj)
        x = e.unsqueeze(1) + precision.linear(streams, self._h_proj)
        x = self._layer.forward(x, next_ids, state, position, experts)
        return self._head.logits(x[-1:])[0]
