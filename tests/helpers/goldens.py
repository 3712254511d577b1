"""The recorded vectors of `tests/golden/tiny-a`, and what a correct model must reach on them.

Every check is a function of a loaded model that raises AssertionError, so that the tests of the model on any device and
the proof that they notice faults run the same code. Limits come from `thresholds.json` beside the vectors.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from services.worker.local_experts import LocalExperts
from services.worker.model import Model, SequenceState
from services.worker.model.attention import Attention
from services.worker.model.layer import Layer
from services.worker.model.moe import MoE
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex

ROOT = Path(__file__).parents[1] / "golden"
TINY_A = ROOT / "tiny-a"
MAX_CONTEXT = 1024
CACHE_BYTES = 1 << 28
CPU = torch.device("cpu")
_CASE = re.compile(r"(?:swiglu0\.5\.)?prefill(\d+)_decode(\d+)\.logits")


@dataclass(frozen=True, slots=True)
class Setup:
    """A loaded model and where its experts come from."""

    model: Model
    experts: LocalExperts

    def new_state(self) -> SequenceState:
        return self.model.new_state(MAX_CONTEXT)

    def at_model(self, x: torch.Tensor) -> torch.Tensor:
        """On the model's device."""
        return x.to(self.model.device)


@functools.cache
def vectors(name: str) -> dict[str, torch.Tensor]:
    """`golden`, `structure-golden`, `layer-golden` or `ops-golden`."""
    return load_file((ROOT / "ops" if name.startswith("ops") else TINY_A) / f"{name}.safetensors")


@functools.cache
def limits(group: str) -> dict[str, float]:
    return json.loads((ROOT / "thresholds.json").read_text())[group]


def load(*, exact: bool, directory: Path = TINY_A, device: torch.device = CPU) -> Setup:
    """A model of the tiny checkpoint, with the configuration in `directory`."""
    index, config = TensorIndex.open(TINY_A), ModelConfig.from_dir(directory)
    model = Model.load(index, config, MAX_CONTEXT, device=device, exact=exact)
    return Setup(model, LocalExperts(index, config, CACHE_BYTES, device))


@functools.cache
def shared(kind: str, device: torch.device = CPU) -> Setup:
    """`exact`, `quantised`, or `swiglu0.5`: exact, with the configuration whose limit is low enough to act."""
    directory = TINY_A / "config-swiglu0.5" if kind == "swiglu0.5" else TINY_A
    return load(exact=kind != "quantised", directory=directory, device=device)


def token_ids() -> list[int]:
    return vectors("structure-golden")["token_ids"].tolist()


def cases(name: str) -> list[tuple[int, int]]:
    """(prefill, decode) of every recorded run from an empty state."""
    found = [_CASE.fullmatch(key) for key in vectors(name) if key.startswith("prefill")]
    return sorted((int(m[1]), int(m[2])) for m in found if m)


def run_case(setup: Setup, prefill: int, decode: int, state: SequenceState | None = None) -> torch.Tensor:
    """Teacher-forced logits [1 + decode, vocab] of the recorded tokens."""
    ids, state = token_ids(), state or setup.new_state()
    rows = [setup.model.forward(state, ids[:prefill], setup.experts)]
    rows += [setup.model.forward(state, [ids[prefill + i]], setup.experts) for i in range(decode)]
    return torch.stack(rows).cpu()


def used_state(setup: Setup, tokens: int = 150) -> SequenceState:
    """A state that has just held a longer sequence and was reset."""
    state = setup.new_state()
    setup.model.forward(state, token_ids()[:tokens], setup.experts)
    setup.model.forward(state, token_ids()[tokens : tokens + 1], setup.experts)
    state.reset()
    return state


# --- structure: float32 without simulated quantisation ---


def check_structure_case(setup: Setup, prefill: int, decode: int, state: SequenceState | None = None) -> None:
    expected = vectors("structure-golden")[f"prefill{prefill}_decode{decode}.logits"]
    _close(run_case(setup, prefill, decode, state), expected, limits("structure")["logits_max_abs_max"])


def check_structure_after_longer(setup: Setup, prefill: int, decode: int) -> None:
    """The same case where something longer was before: nothing of it may be left."""
    check_structure_case(setup, prefill, decode, used_state(setup))


def check_structure_chunks(setup: Setup, name: str) -> None:
    golden, state, position = vectors("structure-golden"), setup.new_state(), 0
    for length, expected in zip(golden[f"{name}.lengths"].tolist(), golden[f"{name}.logits"], strict=True):
        chunk = token_ids()[position : position + length]
        logits = setup.model.forward(state, chunk, setup.experts)
        _close(logits, expected, limits("structure")["logits_max_abs_max"])
        position += length


def check_structure_hidden(setup: Setup, prefill: int = 150) -> None:
    """The streams after every layer, at every position."""
    golden = vectors("structure-golden")
    with recorded(Layer, "forward") as outputs:
        setup.model.hidden(setup.new_state(), token_ids()[:prefill], setup.experts)
    hidden = torch.stack([call.result for call in outputs])
    _close(hidden, golden[f"prefill{prefill}.hidden_by_layer"], limits("structure")["hidden_max_abs_max"])
    _close(hidden[:, -1], golden[f"prefill{prefill}.last_hidden_by_layer"], limits("structure")["hidden_max_abs_max"])


def check_structure_router(setup: Setup, prefill: int = 150) -> None:
    """Which experts every token takes in every layer, and their weights."""
    golden = vectors("structure-golden")
    with recorded(MoE, "route") as decisions:
        setup.model.hidden(setup.new_state(), token_ids()[:prefill], setup.experts)
    for layer, call in enumerate(decisions):
        ids, weights = sorted_by_expert(*call.result)
        key = f"prefill{prefill}"
        expected = sorted_by_expert(golden[f"{key}.topk_ids"][layer], golden[f"{key}.topk_weights"][layer])
        assert torch.equal(ids, expected[0]), f"layer {layer} takes other experts"
        _close(weights, expected[1], limits("structure")["router_weight_max_abs_max"])


def check_structure_greedy(setup: Setup, prompt: int) -> None:
    golden, state = vectors("structure-golden"), setup.new_state()
    tokens = golden[f"greedy_from{prompt}"].tolist()
    text = tokens[:prompt]
    logits = setup.model.forward(state, text, setup.experts)
    for expected in golden[f"greedy_from{prompt}.logits"]:
        _close(logits, expected, limits("structure")["logits_max_abs_max"])
        text.append(int(logits.argmax()))
        logits = setup.model.forward(state, text[-1:], setup.experts)
    assert text == tokens


def check_structure_mtp(setup: Setup, prefill: int = 40, decode: int = 24) -> None:
    expected = vectors("structure-golden")[f"prefill{prefill}_decode{decode}.mtp_logits"]
    _close(run_mtp(setup, prefill, decode), expected, limits("structure")["logits_max_abs_max"])


def check_structure_swiglu(setup: Setup, prefill: int = 33, decode: int = 8) -> None:
    """`setup` must be that of `shared("swiglu0.5")`."""
    expected = vectors("structure-golden")[f"swiglu0.5.prefill{prefill}_decode{decode}.logits"]
    _close(run_case(setup, prefill, decode), expected, limits("structure")["logits_max_abs_max"])


def run_mtp(setup: Setup, prefill: int, decode: int) -> torch.Tensor:
    """The extra block's logits [1 + decode, vocab], fed by the backbone's own streams."""
    ids, state = token_ids(), setup.new_state()
    rows = []
    for begin, end in _steps(prefill, decode):
        h = setup.model.hidden(state, ids[begin:end], setup.experts)
        rows.append(setup.model.draft(state, h, ids[begin + 1 : end + 1], setup.experts))
    return torch.stack(rows)


# --- layers: quantised, every half layer fed with its recorded input ---

LAYER_PREFILL, LAYER_DECODE = 248, 12
_PREFIX = f"prefill{LAYER_PREFILL}_decode{LAYER_DECODE}."


def check_attention_half(setup: Setup, layer: int) -> None:
    """Output, cached keys, entries and the indexer's choice of one attention half, prefill and decode each."""
    golden, state = vectors("layer-golden"), setup.new_state().layers[layer]
    outputs, keys, chosen = [], [], []
    for begin, end in _steps(LAYER_PREFILL, LAYER_DECODE):
        h = setup.at_model(golden[_PREFIX + "hidden"][layer, begin:end])
        with recorded(Attention, "attend") as calls, torch.inference_mode():
            outputs.append(setup.model.layers[layer].attention_half(h, state, begin))
        keys.append(calls[0].arguments[1])
        chosen += [] if calls[0].arguments[2] is None else list(calls[0].arguments[2])
    _check_token_errors(setup, layer, torch.cat(outputs), golden[_PREFIX + "after_attn"][layer])
    _check_keys(torch.cat(keys), golden[f"{_PREFIX}layer{layer}.kv"])
    _check_ring(state.keys[: state.window], torch.cat(keys))
    _check_entries(state, layer)
    if f"{_PREFIX}layer{layer}.index_topk" in golden:
        _check_choice(chosen, golden[f"{_PREFIX}layer{layer}.index_topk"])


def check_expert_half(setup: Setup, layer: int) -> None:
    golden, limit = vectors("layer-golden"), limits("layer")
    after_attn, expected = setup.at_model(golden[_PREFIX + "after_attn"][layer]), golden[_PREFIX + "hidden"][layer + 1]
    ids = setup.at_model(torch.tensor(token_ids()))
    for begin, end in ((0, LAYER_PREFILL), (LAYER_PREFILL, LAYER_PREFILL + LAYER_DECODE)):
        with torch.inference_mode():
            output = _expert_half(setup, layer, after_attn, ids, begin, end)
        errors = _token_errors(output, expected[begin:end])
        assert errors.median() <= limit["ffn_token_error_median_max"]
        assert _relative(output, expected[begin:end]) <= limit["ffn_rel_frobenius_max"]


def check_router(setup: Setup, layer: int) -> None:
    """The router on its recorded input: same experts, same weights."""
    golden, ids = vectors("layer-golden"), torch.tensor(token_ids()[: LAYER_PREFILL + LAYER_DECODE])
    after_attn = setup.at_model(golden[_PREFIX + "after_attn"][layer])
    with torch.inference_mode():
        decision = setup.model.layers[layer].route(after_attn, setup.at_model(ids))
    got = sorted_by_expert(*decision)
    expected = sorted_by_expert(golden[_PREFIX + "topk_ids"][layer], golden[_PREFIX + "topk_weights"][layer])
    same = (got[0] == expected[0]).all(-1)
    assert same.float().mean() >= 0.99, "the input is rounded, so a near tie may fall the other way, but not many"
    # The norm before the router rounds to bfloat16: where a last bit falls otherwise, so do weights, a little.
    worst = (got[1][same] - expected[1][same]).abs().amax(-1)
    assert float(worst.quantile(0.98)) <= 1e-4
    assert float(worst.max()) <= 5e-4


def check_head(setup: Setup) -> None:
    golden = vectors("layer-golden")
    with torch.inference_mode():
        logits = setup.model.head.logits(setup.at_model(golden[_PREFIX + "hidden"][-1, LAYER_PREFILL - 1 :]))
    _close(logits, golden[_PREFIX + "logits"], limits("layer")["head_logits_max_abs_max"])


def check_mtp_block(setup: Setup) -> None:
    golden, state, ids = vectors("layer-golden"), setup.new_state(), token_ids()
    rows, keys = [], []
    for begin, end in _steps(LAYER_PREFILL, LAYER_DECODE):
        h = setup.at_model(golden[_PREFIX + "hidden"][-1, begin:end])
        with recorded(Attention, "attend") as calls:
            rows.append(setup.model.draft(state, h, ids[begin + 1 : end + 1], setup.experts))
        keys.append(calls[0].arguments[1])
    assert _relative(torch.stack(rows), golden[_PREFIX + "mtp_logits"]) <= limits("layer")["mtp_rel_frobenius_max"]
    _check_keys(torch.cat(keys), golden[_PREFIX + "mtp0.kv"])


def _expert_half(setup: Setup, layer: int, h: torch.Tensor, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Prefill at once, decode token by token: where `begin` is past the prefill, tokens go one at a time."""
    block, size = setup.model.layers[layer], (end - begin if begin < LAYER_PREFILL else 1)
    parts = [(i, i + size) for i in range(begin, end, size)]
    return torch.cat([block.expert_half(h[a:b], ids[a:b], setup.experts) for a, b in parts])


def _check_token_errors(setup: Setup, layer: int, output: torch.Tensor, expected: torch.Tensor) -> None:
    limit, config = limits("layer"), setup.model.config
    errors = _token_errors(output, expected)
    unselected = 4 * config.index_topk if config.compress_ratios[layer] == 4 else len(errors)
    assert errors[:unselected].max() <= limit["attn_token_error_max_unselected"]
    for part in (slice(0, LAYER_PREFILL), slice(LAYER_PREFILL, None)):
        assert errors[part].median() <= limit["attn_token_error_median_max"]
        assert _relative(output[part], expected[part]) <= limit["attn_rel_frobenius_max"]


def _check_keys(keys: torch.Tensor, expected: torch.Tensor) -> None:
    for part in (slice(0, LAYER_PREFILL), slice(LAYER_PREFILL, None)):
        assert _bit_equal(keys[part], expected[part]) >= limits("layer")["kv_bit_equal_min"], "cached keys differ"


def _check_ring(ring: torch.Tensor, keys: torch.Tensor) -> None:
    positions = torch.arange(len(keys) - len(ring), len(keys), device=keys.device)
    assert torch.equal(ring[positions % len(ring)], keys[positions]), "the ring does not hold the last keys"


def _check_entries(state: Any, layer: int) -> None:
    golden = vectors("layer-golden")
    for name, kept, least in (
        ("compressed_kv", state.entries, limits("layer")["compressed_kv_bit_equal_min"]),
        ("index_k", state.index_keys, limits("layer")["index_k_bit_equal_min"]),
    ):
        expected = golden.get(f"{_PREFIX}layer{layer}.{name}")
        if expected is not None:
            prefilled = LAYER_PREFILL * len(expected) // (LAYER_PREFILL + LAYER_DECODE)
            assert _bit_equal(kept[: len(expected)], expected) >= least, f"{name} differs"
            assert _bit_equal(kept[prefilled : len(expected)], expected[prefilled:]) >= least, f"{name} in decode"


def _check_choice(chosen: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    scores = []
    for mine, recorded_ids in zip(chosen, expected, strict=True):
        kept = set(mine.nonzero().flatten().tolist())
        wanted = set(recorded_ids[recorded_ids >= 0].tolist())
        assert len(kept) == len(wanted), "the indexer keeps another number of entries"
        scores.append(len(kept & wanted) / len(kept | wanted) if wanted else 1.0)
    assert sum(scores) / len(scores) >= limits("layer")["index_topk_jaccard_mean_min"]


# --- end to end, quantised ---


def check_end_to_end(setup: Setup, runs: Sequence[tuple[int, int]] | None = None) -> dict[str, float]:
    """Pooled over `runs`, by default all recorded ones. Returns what was measured."""
    golden, limit = vectors("golden"), limits("end_to_end")
    runs = cases("golden") if runs is None else runs
    got = torch.cat([run_case(setup, *run) for run in runs])
    expected = torch.cat([golden[f"prefill{p}_decode{n}.logits"] for p, n in runs])
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1
    measured = {
        "pooled": _relative(got, expected),
        "cosine": float(torch.cosine_similarity(got, expected).mean()),
        "top1": float((got.argmax(-1) == expected.argmax(-1))[clear].float().mean()),
    }
    assert measured["pooled"] <= limit["pooled_rel_frobenius_max"], measured
    assert measured["cosine"] >= limit["mean_cosine_min"], measured
    assert measured["top1"] >= limit["top1_agreement_margin_gt_1_min"], measured
    return measured


def check_end_to_end_mtp(setup: Setup, prefill: int = 40, decode: int = 24) -> None:
    expected = vectors("golden")[f"prefill{prefill}_decode{decode}.mtp_logits"]
    assert _relative(run_mtp(setup, prefill, decode), expected) <= limits("end_to_end")["mtp_rel_frobenius_max"]


# --- observation and measures ---


@dataclass(frozen=True, slots=True)
class Call:
    """Positional arguments, without self, and result of one call."""

    arguments: tuple[Any, ...]
    result: Any


@contextmanager
def recorded(owner: type, method: str) -> Iterator[list[Call]]:
    """Collects the calls of `owner.method` by any instance."""
    original, calls = getattr(owner, method), []

    def observed(self: Any, *arguments: Any) -> Any:
        result = original(self, *arguments)
        calls.append(Call(arguments, result))
        return result

    setattr(owner, method, observed)
    try:
        yield calls
    finally:
        setattr(owner, method, original)


def sorted_by_expert(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of a token's experts means nothing."""
    ids = ids.to(torch.int64)
    order = ids.argsort(-1)
    return ids.gather(-1, order).cpu(), weights.gather(-1, order).cpu()


def _steps(prefill: int, decode: int) -> list[tuple[int, int]]:
    """[begin, end) of the prefill and of each single-token step."""
    return [(0, prefill)] + [(i, i + 1) for i in range(prefill, prefill + decode)]


def _close(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert got.shape == expected.shape
    worst = float((got.cpu() - expected).abs().max())
    assert worst <= limit, f"max abs difference {worst:.3g}, allowed {limit:.3g}"


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((got.cpu().float() - expected).norm() / expected.norm())


def _token_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each token over all of its streams."""
    expected = expected.float().flatten(1)
    return (got.cpu().float().flatten(1) - expected).norm(dim=-1) / expected.norm(dim=-1)


def _bit_equal(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().float() == expected.float()).float().mean())
