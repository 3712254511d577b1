"""Inputs for the decode kernels, made on the GPU."""

from __future__ import annotations

import struct

import torch

from kernels.reference import act_quant

CUDA = "cuda"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in which an element that nobody writes shows: NaN, or bytes of 0x7f."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
    return torch.full(shape, 0x7F, dtype=dtype, device=CUDA)


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=CUDA)


def close(y: torch.Tensor, expected: torch.Tensor, rel: float = 1.5e-3) -> None:
    """Relative Frobenius error; a NaN never passes."""
    error = (y.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= rel, f"relative error {error.item():.2e} > {rel:.1e}"


def equal_but_for_roundings(y: torch.Tensor, expected: torch.Tensor, step: float) -> None:
    """Equal, NaN included, but for one value in a hundred (or two), and those by at most `step` of the largest one."""
    y, expected = y.double(), expected.double()
    assert torch.equal(y.isnan(), expected.isnan()), "written elsewhere"
    off = (y - expected)[~expected.isnan()].abs()
    count, most = int((off > 0).sum()), max(2, off.numel() // 100)
    assert count <= most, f"{count} of {off.numel()} differ"
    assert count == 0 or off.max() <= step * expected.nan_to_num().abs().max(), f"off by {float(off.max()):.3g}"


def fp8_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, k] and exponents uint8 [n / 16, k / 128], a scale row for 16 rows."""
    weight = torch.randn(n, k, device=CUDA).mul_(20).type(torch.float8_e4m3fn).view(torch.uint8)
    return weight, torch.randint(118, 124, (n // 16, k // 128), device=CUDA, dtype=torch.uint8)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [s, k] and scales float32 [s, k / 128]."""
    codes, scales = act_quant(x.cpu())
    return codes.view(torch.uint8).to(CUDA), scales.float().to(CUDA)


def in_fp4_order(codes: torch.Tensor) -> torch.Tensor:
    """What `fp4_rows` reads: float16 [s, k], in eight neighbours inputs i and i + 4 beside each other."""
    values = codes.view(torch.float8_e4m3fn).half()
    return values.view(len(codes), -1, 2, 4).transpose(2, 3).reshape(len(codes), -1).contiguous()


def record_offsets(d: int, width: int) -> list[int]:
    sizes = [width * d // 2, width * d // 32] * 3
    return [sum(sizes[:i]) for i in range(7)]


def fp4_record(d: int, width: int) -> torch.Tensor:
    """A random expert, uint8 [slot_bytes], scales of 2^-9 to 2^-4 about a unit result."""
    offsets = record_offsets(d, width)
    record = torch.randint(256, (-(-offsets[-1] // 4096) * 4096,), dtype=torch.uint8, device=CUDA)
    for part in (1, 3, 5):
        begin, end = offsets[part], offsets[part + 1]
        record[begin:end] = torch.randint(118, 123, (end - begin,), dtype=torch.uint8, device=CUDA)
    return record


def routing_of(weights: torch.Tensor, topk: int, slots: torch.Tensor | None) -> torch.Tensor:
    """What the router leaves for weights float32 [s, experts], everything resident; see `Routing` in experts.cuh."""
    from kernels.decode.experts import routing_words

    s = len(weights)
    positions = topk * s
    experts = weights.any(0).nonzero().squeeze(-1)
    count = len(experts)
    words = torch.zeros(routing_words(topk, s), dtype=torch.int32, device=weights.device)
    words[0] = count
    words[1 : 1 + count] = experts.int()
    words[1 + positions : 1 + 3 * positions] = -1
    words[1 + positions : 1 + positions + count] = torch.arange(count, device=weights.device, dtype=torch.int32)
    slot_of = torch.zeros(count) if slots is None else slots[experts.cpu()]
    words[1 + 2 * positions : 1 + 2 * positions + count] = slot_of.int().to(weights.device)
    chosen = weights[:, experts].T.contiguous()
    begin = 1 + 3 * positions
    words[begin : begin + count * s] = chosen.view(torch.int32).flatten()
    begin += positions * s
    words[begin : begin + count * s] = (chosen != 0).int().flatten()
    return words


def no_hints() -> tuple[torch.Tensor, ...]:
    """What `sample` does not look at if no layer gets hints: hashed, table, own, hints, hinted."""
    from kernels.decode.experts import OWN_WORDS
    from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS

    shapes = (1, 1), (HINTS, HINT_WORDS), (HINTED_WORDS,)
    table, hints, hinted = (zeros(*shape, dtype=torch.int32) for shape in shapes)
    return zeros(1, 1, 1, dtype=torch.int16), table, zeros(OWN_WORDS), hints, hinted


def no_guesses(experts: int) -> tuple[torch.Tensor, ...]:
    """What `route` does not look at if it does not guess: is_wanted, hints, hinted, guessed, judged."""
    from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS

    shapes = (1,), (HINTS, HINT_WORDS), (HINTED_WORDS,), (2, experts), (2,)
    return tuple(zeros(*shape, dtype=torch.int32) for shape in shapes)


def draws(logits: torch.Tensor, temperature: float, top_p: float, min_p: float, top_k: int, steps: int) -> torch.Tensor:
    """So many tokens drawn from the same logits at successive positions, int64 [steps]."""
    from kernels.decode.sampling import BLOCKS, STEPS, sample, sample_threshold

    vocab = logits.shape[1]
    words = struct.pack("<fffiQ", temperature, top_p, min_p, top_k, 1234)
    sampling = torch.frombuffer(bytearray(words), dtype=torch.int32).unsqueeze(0).to(CUDA)
    threshold, best = poisoned(1), poisoned(1, BLOCKS, 2, dtype=torch.int32)
    done = zeros(1, dtype=torch.uint32)
    tokens, positions, step = (zeros(1, dtype=torch.int32) for _ in range(3))
    log = poisoned(STEPS, 1, dtype=torch.int32)
    out = torch.empty(steps, dtype=torch.int64, device=CUDA)
    draw = sample(vocab=vocab, s=1, hash_layers=0, experts=1, topk=1)
    for i in range(steps):
        sample_threshold(vocab=vocab, s=1)(logits, sampling, threshold)
        draw(logits, sampling, threshold, best, done, tokens, positions, step, log, *no_hints())
        out[i] = tokens[0]
    assert positions.item() == step.item() == steps
    return out
