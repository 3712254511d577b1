"""Trains the demo model on one GPU: backbone, quantisation-aware end, then indexers and MTP block on what is frozen.

    python -m demo.train --seconds 1200 --out OUT [--state DIR]

Everything is scheduled by wall-clock time, so that a run ends when it should. Progress goes to OUT/log.jsonl and the
masters, rounded to bfloat16, to OUT/masters-*.safetensors (at most 15 MB each).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from demo.corpus import LONG, SHORT
from demo.export import read_masters
from demo.feed import Check, Feed
from demo.model import build, config, prepare, use_indexers
from demo.mtp import MtpBlock
from demo.optimiser import Optimiser

BATCHES = {SHORT: 65, LONG: 10}
EARLY_SINKHORN = 6
MUON_RATE, ADAM_RATE = 0.02, 3e-3
PART_BYTES = 15_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares of the time: where decay and quantisation begin, and where the backbone is frozen."""

    seconds: float
    decay: float = 0.45
    quantise: float = 0.55
    freeze: float = 0.88
    first_long: float = 0.15

    def rate(self, share: float) -> float:
        """Factor of the learning rates: warm-up, plateau, linear decay to a twentieth."""
        warm = min(1.0, share / 0.01)
        fall = max(0.0, (share - self.decay) / (self.freeze - self.decay))
        return warm * (1 - 0.95 * min(1.0, fall))

    def long_share(self, share: float) -> float:
        """How many of the steps take long rows."""
        return self.first_long + (0.55 - self.first_long) * min(1.0, share / 0.4)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.plan = Plan(args.seconds) if args.resume is None else Plan(args.seconds, 0.02, 0.4, 0.82, 0.5)
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.device = args.device
        torch.set_float32_matmul_precision("high")
        # Feeds fork, so they start before the GPU is touched.
        self.feed = Feed(args.seed, BATCHES, args.processes, self.device)
        made = config()
        made._attn_implementation, made._experts_implementation = "blockwise", args.experts
        self.model = build(args.seed, made)
        prepare(self.model)
        if args.resume is not None:
            self.model.load_state_dict(read_masters(args.resume), strict=False)
        self.model.to(self.device)
        self.backbone = Optimiser(_named(self.model, "", lambda name: "indexer" not in name))
        _to_bfloat16(self.model)
        self.backbone.publish()
        self.checks = [(Check(length, 32, 0, self.device), length) for length in BATCHES]
        self.random = Random(args.seed)
        self.step = 0
        self.tokens = 0

    @property
    def share(self) -> float:
        return (time.monotonic() - self.started) / self.plan.seconds

    def log(self, **values: object) -> None:
        line = {"s": round(time.monotonic() - self.started, 1), "step": self.step, "tokens": self.tokens} | values
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    # --- backbone ------------------------------------------------------------------------------------------------

    def streams(self, ids: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The backbone's streams before its head, and the rotations, for whole rows from position 0."""
        base = self.model.model
        embedded = base.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        rotations = {
            kind: base.rotary_emb(embedded, position_ids=positions, layer_type=kind) for kind in ("main", "compress")
        }
        h = embedded.unsqueeze(2).expand(-1, -1, base.config.hc_mult, -1).contiguous()
        for layer in base.layers:
            h = layer(
                h, position_embeddings=rotations, position_ids=positions, attention_mask=None, input_ids=ids, cache=None
            )
        return h, rotations

    def logits(self, ids: Tensor) -> Tensor:
        h, _ = self.streams(ids)
        return self.model.lm_head(self.model.model.norm(self.model.model.hc_head(h)))

    def train_backbone(self) -> None:
        losses: dict[int, list[Tensor]] = {SHORT: [], LONG: []}
        noted, checked = time.monotonic(), time.monotonic()
        while (share := self.share) < self.plan.freeze:
            self._set_precision(share > self.plan.quantise)
            length = LONG if self.random.random() < self.plan.long_share(share) else SHORT
            ids, weights = self.feed.next(length)
            loss = _weighted(self.logits(ids)[:, :-1], ids[:, 1:], weights[:, 1:])
            loss.backward()
            factor = self.plan.rate(share)
            self.backbone.step(MUON_RATE * factor, ADAM_RATE * factor)
            self._balance(0.002 * factor)
            losses[length].append(loss.detach())
            self.step += 1
            self.tokens += ids.numel()
            if time.monotonic() - noted > 3:
                noted = time.monotonic()
                means = {str(n): round(torch.stack(v).mean().item(), 4) for n, v in losses.items() if v}
                losses = {SHORT: [], LONG: []}
                self.log(loss=means, rate=round(factor, 3), quantised=self.backbone.quantised)
            if time.monotonic() - checked > 60:
                checked = time.monotonic()
                self.check()
                self.save()

    def _set_precision(self, final: bool) -> None:
        """At first plain bfloat16 and a Sinkhorn loop cut short, in the end what the checkpoint will compute with."""
        self.backbone.quantised = final
        for module in self.model.modules():
            if hasattr(module, "hc_sinkhorn_iters"):
                module.hc_sinkhorn_iters = self.model.config.hc_sinkhorn_iters if final else EARLY_SINKHORN

    @torch.no_grad()
    def check(self) -> None:
        scores: dict[str, float] = {}
        for check, length in self.checks:
            scores |= check.score(lambda ids: self.logits(ids).argmax(-1), BATCHES[length])
        self.log(check={k: round(v, 3) for k, v in scores.items()}, load=self._spread())

    def _gates(self, root: nn.Module | None = None) -> Iterator[nn.Module]:
        return (m for m in (root or self.model).modules() if hasattr(m, "e_score_correction_bias"))

    @torch.no_grad()
    def _balance(self, rate: float, root: nn.Module | None = None) -> None:
        """Nudge each expert's bias against its load, as V4 does (https://arxiv.org/abs/2408.15664)."""
        for gate in self._gates(root):
            gate.e_score_correction_bias += rate * torch.sign(gate.load.mean() - gate.load)
            gate.load.mul_(0.5)

    def _spread(self) -> list[float]:
        """Per gate: the busiest expert's load over the mean."""
        return [round((g.load.max() / g.load.mean().clamp_min(1)).item(), 2) for g in self._gates()]

    # --- frozen backbone -----------------------------------------------------------------------------------------

    def train_rest(self) -> None:
        """The MTP block, and the indexers towards what attention really looked at."""
        self.model.requires_grad_(False)
        self.model.zero_grad(set_to_none=True)
        sparse = use_indexers(self.model)
        indexers = {f"layers.{a.layer_idx}": a.compressor.indexer for a in sparse}
        block = MtpBlock(self.model.config)
        prepare(block)
        block.to(self.device)
        base = self.model.model
        block.start_from(base.layers[-1], base.hc_head, base.norm)
        self.rest = Optimiser(
            [*_named(block, "mtp."), *(p for n, m in indexers.items() for p in _named(m, f"{n}.indexer."))]
        )
        _to_bfloat16(block)
        self.rest.quantised = True
        self.rest.publish()
        self.block = block
        for module in indexers.values():
            module.requires_grad_(True)
        noted = saved = time.monotonic()
        losses: dict[str, list[Tensor]] = {"mtp": [], "index": []}
        while (share := self.share) < 1.0:
            length = LONG if self.step % 3 == 0 else SHORT
            ids, weights = self.feed.next(length)
            ids, weights = (ids[:4], weights[:4]) if length == LONG else (ids, weights)
            loss = self._mtp_loss(ids, weights) if length == SHORT else self._index_loss(ids, weights, sparse)
            loss.backward()
            done = (share - self.plan.freeze) / (1 - self.plan.freeze)
            factor = max(0.03, 1 - done)
            self.rest.step(MUON_RATE * factor, ADAM_RATE * factor)
            self._balance(0.002 * factor, block)
            losses["index" if length == LONG else "mtp"].append(loss.detach())
            self.step += 1
            if time.monotonic() - noted > 3:
                noted = time.monotonic()
                self.log(**{k: round(torch.stack(v).mean().item(), 4) for k, v in losses.items() if v})
                losses = {"mtp": [], "index": []}
            if time.monotonic() - saved > 20:
                saved = time.monotonic()
                self.save()

    def _mtp_loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            streams, rotations = self.streams(ids)
            following = self.model.model.embed_tokens(ids.roll(-1, 1))
        logits = self.model.lm_head(self.block(streams, following, rotations))
        return _weighted(logits[:, :-2], ids[:, 2:], weights[:, 2:])

    def _index_loss(self, ids: Tensor, weights: Tensor, sparse: list[nn.Module]) -> Tensor:
        """Cross-entropy between the heads' summed attention over entries and the indexer's softmax."""
        for attention in sparse:
            attention.records = True
        self.streams(ids)
        total = torch.zeros((), device=self.device)
        for attention in sparse:
            attention.records = False
            scores, seen = attention.compressor.indexer.scorer.last, attention.seen
            ends = (torch.arange(scores.shape[2], device=self.device) + 1) * 4
            hidden = ends[None, :] > torch.arange(ids.shape[1], device=self.device)[:, None] + 1
            target = seen / seen.sum(-1, keepdim=True).clamp_min(1e-6)
            logs = scores.masked_fill(hidden, -1e4).log_softmax(-1)
            loss = -(target * logs).sum(-1)
            total = total + (loss * weights).sum() / weights.sum()
        return total

    # --- results -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Masters and buffers, in parts that are complete only once all of them are written."""
        tensors = dict(self.backbone.masters())
        if hasattr(self, "rest"):
            tensors |= {_published_name(k): v for k, v in self.rest.masters().items()}
        tensors = {k: v.float() if _stays_float(k) else v.bfloat16() for k, v in tensors.items()}
        tensors |= {k: v for k, v in self.model.named_buffers() if k.endswith(("tid2eid", "e_score_correction_bias"))}
        if hasattr(self, "rest"):
            bias = self.block.layer.mlp.gate.e_score_correction_bias
            tensors["mtp.layer.mlp.gate.e_score_correction_bias"] = bias
        parts: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in tensors.items():
            tensor = tensor.detach().to(torch.int16) if tensor.dtype == torch.long else tensor.detach()
            if size + tensor.nbytes > PART_BYTES:
                parts.append({})
                size = 0
            parts[-1][name] = tensor.contiguous().cpu()
            size += tensor.nbytes
        for number, part in enumerate(parts):
            save_file(part, self.out / f"masters-{number}.safetensors.tmp")
        for number in range(len(parts)):
            (self.out / f"masters-{number}.safetensors.tmp").rename(self.out / f"masters-{number}.safetensors")


def _named(
    root: nn.Module, prefix: str, keep: Callable[[str], bool] = lambda name: True
) -> list[tuple[str, nn.Parameter]]:
    return [(prefix + name, p) for name, p in root.named_parameters() if keep(name)]


def _published_name(name: str) -> str:
    """Indexers are known by short names while they are trained."""
    return (
        name.replace(".indexer.", ".self_attn.compressor.indexer.").replace("layers.", "model.layers.", 1)
        if name.startswith("layers.")
        else name
    )


def _stays_float(name: str) -> bool:
    """What the checkpoint keeps in float32."""
    return any(part in name for part in ("_hc.", "hc_head", "sinks", "position_bias"))


def _to_bfloat16(root: nn.Module) -> None:
    """Everything but mixing and sinks computes in bfloat16."""
    for name, parameter in root.named_parameters():
        if not _stays_float(name):
            parameter.data = parameter.data.bfloat16()


def _weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume", type=Path, help="begin with these masters and let the rates decay at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=11)
    parser.add_argument("--experts", default="grouped_mm")
    trainer = Trainer(parser.parse_args())
    trainer.train_backbone()
    trainer.check()
    trainer.save()
    trainer.train_rest()
    trainer.save()
    trainer.log(done=True)


if __name__ == "__main__":
    main()
