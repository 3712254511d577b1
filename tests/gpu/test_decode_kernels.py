"""Fused kernels of a decode step against their torch twins, on random inputs; some on zeros, large values and ties too.

What goes before the attention, `attention_inputs`, `index_scores` and `index_topk`, is in test_decode_attention.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.decode import (
    CUDA,
    close,
    fp4_record,
    fp8_weight,
    in_fp4_order,
    no_guesses,
    poisoned,
    quantised,
    record_offsets,
    routing_of,
    zeros,
)

from kernels.reference import decode as twin
from kernels.reference import rope_frequencies, rope_table

TOKENS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def true_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize(("n8", "n16", "k"), [(1536, 2624, 4096), (256, 32, 128), (0, 512, 256), (512, 0, 384)])
def test_fused_linear(n8: int, n16: int, k: int, s: int) -> None:
    from kernels.decode.linear import fused_linear

    w8, scale = fp8_weight(max(n8, 16), k)
    w16 = torch.randn(max(n16, 16), k, device=CUDA).bfloat16()
    x = torch.randn(s, k, device=CUDA).bfloat16()
    codes, scales = quantised(x)
    y = poisoned(s, n8 + n16)
    kernel = fused_linear(n8=n8, n16=n16, k=k, s=s, rows_per_scale=16)
    arguments = (w8[: max(n8, 1)], scale[: max(1, n8 // 16)], w16[: max(n16, 1)], codes, scales, x)
    kernel(*arguments, y)
    again = poisoned(s, n8 + n16)
    kernel(*arguments, again)
    expected = (
        twin.fused_linear(w8[:n8], scale[: n8 // 16], w16[:n16], codes, scales, x)
        if n8
        else (x.double() @ w16[:n16].double().T)
    )
    close(y, expected)
    assert torch.equal(y, again)


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize(("n", "groups", "k"), [(8192, 8, 4096), (256, 2, 256)])
def test_grouped_linear(n: int, groups: int, k: int, s: int) -> None:
    from kernels.decode.linear import grouped_linear

    w, scale = fp8_weight(n, k)
    x = torch.randn(s, groups * k, device=CUDA).bfloat16()
    y = poisoned(s, n, dtype=torch.bfloat16)
    grouped_linear(n=n, groups=groups, k=k, s=s, rows_per_scale=16)(w, scale, x, y)
    close(y, twin.grouped_linear(w, scale, x, groups))


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize(("n", "k"), [(4096, 8192), (128, 256)])
@pytest.mark.parametrize("spread", [1.0, 1e4, 0.0])
def test_quantised_linear(n: int, k: int, s: int, spread: float) -> None:
    from kernels.decode.linear import quantised_linear

    w, scale = fp8_weight(n, k)
    x = (torch.randn(s, k, device=CUDA) * spread).bfloat16()
    y = poisoned(s, n, dtype=torch.bfloat16)
    quantised_linear(n=n, k=k, s=s, rows_per_scale=16)(w, scale, x, y)
    close(y, twin.quantised_linear(w, scale, x))


def mixing(j: int, d: int) -> twin.Mixing:
    scales = 3 if j == 24 else 1
    return twin.Mixing(
        torch.randn(j, 4 * d, device=CUDA) / (4 * d) ** 0.5,
        torch.rand(scales, device=CUDA) + 0.5,
        torch.randn(j, device=CUDA),
    )


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize("d", [4096, 256, 128])
def test_streams(d: int, s: int) -> None:
    """Start, read, write, read at the head: what one kernel leaves in `parts`, the next one sums up."""
    from kernels.decode.streams import attention_write, head_read, streams_start, sublayer_read

    embedding, tokens = (
        torch.randn(512, d, device=CUDA).bfloat16(),
        torch.randint(512, (s,), device=CUDA, dtype=torch.int32),
    )
    first, norm = mixing(24, d), torch.rand(d, device=CUDA) + 0.5
    streams, parts = poisoned(s, 4, d, dtype=torch.bfloat16), poisoned(s, d // 32, 25)
    streams_start(d=d, s=s, vocab=512)(tokens, embedding, streams, first.fn, parts)
    assert torch.equal(streams, embedding[tokens.long()].unsqueeze(1).expand(-1, 4, -1))

    sizes = {"d": d, "s": s, "eps": 1e-6, "hc_eps": 1e-6}
    x, codes, scales = poisoned(s, d, dtype=torch.bfloat16), poisoned(s, d, dtype=torch.uint8), poisoned(s, d // 128)
    post, comb = poisoned(s, 4), poisoned(s, 4, 4)
    halves = poisoned(s, d, dtype=torch.float16)

    def read(now: twin.Mixing) -> None:
        kernel = sublayer_read(**sizes, iterations=20)
        kernel(streams, parts, now.scale, now.base, norm, x, codes, halves, scales, post, comb)
        expected = twin.sublayer_read(streams, now, norm, 1e-6, 1e-6, 20)
        assert (post - expected.post).abs().max() < 1e-5
        assert (comb - expected.comb).abs().max() < 1e-5
        close(x, expected.x, 4e-3)
        own = quantised(x)
        assert torch.equal(codes, own[0])
        assert torch.equal(scales, own[1])
        assert torch.equal(halves, in_fp4_order(codes))

    read(first)
    streams.copy_(torch.randn(s, 4, d, device=CUDA).bfloat16())
    y, before, second = torch.randn(s, d, device=CUDA).bfloat16(), streams.clone(), mixing(24, d)
    attention_write(d=d, s=s)(y, streams, post, comb, second.fn, parts)
    close(streams, twin.streams_write(y, before, post, comb), 1e-3)
    read(second)

    from kernels.decode.experts import experts_write

    topk = 4
    weights = torch.zeros(s, 16, device=CUDA)
    for token in range(s):
        weights[token, torch.randperm(16, device=CUDA)[:topk]] = 0.5
    routing = routing_of(weights, topk, slots=None)
    outputs, shared = torch.randn(topk * s, s, d, device=CUDA).bfloat16(), torch.randn(s, d, device=CUDA).bfloat16()
    clock, own, before, last = (
        torch.zeros(1, dtype=torch.int64, device=CUDA),
        torch.tensor([7, 0, 0], device=CUDA),
        streams.clone(),
        mixing(4, d),
    )
    parts = poisoned(s, d // 32, 5)
    experts_write(d=d, topk=topk, mixes=4, s=s)(
        routing, outputs, shared, clock, own, streams, post, comb, last.fn, parts
    )
    experts = [e for e in range(16) if weights[:, e].any()]
    total = torch.zeros(s, d, device=CUDA)
    for place, expert in enumerate(experts):
        total += outputs[place].float() * (weights[:, expert] > 0).unsqueeze(1)
    close(streams, twin.streams_write((total + shared.float()).bfloat16(), before, post, comb), 1e-3)
    assert clock.item() == own[0].item() == 8
    head_read(**sizes)(streams, parts, last.scale, last.base, norm, x, codes, scales)
    close(x, twin.head_read(streams, last, norm, 1e-6, 1e-6), 4e-3)


@pytest.mark.parametrize(
    ("heads", "d", "window", "ratio", "topk", "positions"),
    [
        (64, 512, 128, 0, 512, (0, 5000)),
        (64, 512, 128, 4, 512, (0, 3, 126, 2047, 2600)),
        (64, 512, 128, 128, 512, (127, 9000)),
        (4, 128, 32, 4, 16, (31, 32, 100)),
        (8, 128, 128, 128, 512, (700,)),
    ],
)
def test_attention(heads: int, d: int, window: int, ratio: int, topk: int, positions: tuple[int, ...]) -> None:
    from kernels.decode.attention import CHUNK, attend_chunks, attend_combine

    entries = 10_000 // ratio if ratio else 0
    keys = torch.randn(1, window + entries, d, device=CUDA).bfloat16()
    q, sink = torch.randn(1, heads * d, device=CUDA).bfloat16().float() * 3, torch.randn(heads, device=CUDA)
    frequencies = rope_frequencies(64, 160000.0).to(CUDA)
    seen = window + (min(entries, topk) if ratio == 4 else entries)
    chunks = -(-seen // CHUNK)
    sums, tops = poisoned(1, chunks, heads, d), poisoned(1, chunks, heads)
    denominators, o = poisoned(1, chunks, heads), poisoned(1, heads * d, dtype=torch.bfloat16)
    for position in positions:
        count = (position + 1) // ratio if ratio else 0
        chosen = torch.randperm(max(count, topk), device=CUDA)[:topk].sort().values.int().unsqueeze(0)
        at = torch.tensor([position], device=CUDA, dtype=torch.int32)
        sizes = {"heads": heads, "d": d, "rope": 64, "chunks": chunks, "s": 1}
        kernel = attend_chunks(**sizes, q_stride=heads * d, window=window, ratio=ratio, topk=topk, eps=1e-6)
        kernel(q, at, keys, chosen, frequencies, sums, tops, denominators)
        attend_combine(**sizes)(sums, tops, denominators, sink, at, frequencies, o)
        rows = torch.arange(min(position + 1, window), device=CUDA)
        behind = chosen[0].long() if ratio == 4 and count > topk else torch.arange(count, device=CUDA)
        rows = torch.cat((rows, window + behind))
        rotation = rope_table(frequencies.cpu(), position + 1)[position].to(CUDA)
        expected = twin.attend(q.view(heads, d), position, keys[0], rows, sink, rotation, 1e-6)
        close(o[0], expected, 6e-3)  # the twin rounds probabilities against one maximum, not one a chunk


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize(("d", "width", "topk", "experts"), [(4096, 2048, 6, 16), (256, 128, 4, 24)])
def test_expert_half(d: int, width: int, topk: int, experts: int, s: int) -> None:
    """Router, look-up, up and down, with every expert resident and slots in another order than ids."""
    from kernels.decode.experts import experts_down, experts_up, route, routing_words

    rows = -(-experts // 16) * 16
    stride, offset = 2 * width + rows, 2 * width
    x = torch.randn(s, d, device=CUDA).bfloat16()
    codes, scales = quantised(x)
    y = torch.randn(s, stride, device=CUDA).bfloat16().float() * 3
    w2, w2_scale = fp8_weight(d, width)
    slot_of = torch.randperm(experts)
    pool = torch.stack([fp4_record(d, width) for _ in range(experts)])
    table = slot_of.int().to(CUDA).repeat(3, 1)
    bias = torch.randn(experts, device=CUDA)
    uses, counts, own, heads = zeros(3, experts), zeros(3, experts), zeros(3), zeros(1)
    ring, waited, abort = zeros(64, 64, dtype=torch.int32), zeros(1, dtype=torch.uint32), zeros(1, dtype=torch.int32)
    routing = poisoned(routing_words(topk, s), dtype=torch.int32)
    tid2eid, tokens = zeros(1, topk), zeros(s, dtype=torch.int32)
    sizes = {"experts": experts, "topk": topk, "stride": stride, "offset": offset, "vocab": 1}
    sizes |= {"scaling": 1.5, "s": s}
    state = (tokens, table, heads, ring, uses, counts, own, waited, routing, *no_guesses(experts))
    route(**sizes, hashed=False, guesses=False)(2, -1, y, bias, bias, tid2eid, *state)
    weights = twin.route(y[:, offset : offset + experts], bias, None, topk, 1.5)
    expected = routing_of(weights, topk, slot_of)
    count = int(expected[0])
    assert int(routing[0]) == count
    positions = topk * s
    for begin in (1, 1 + positions, 1 + 2 * positions):
        assert torch.equal(routing[begin : begin + count], expected[begin : begin + count])
    begin, end = 1 + 3 * positions, 1 + 3 * positions + count * s
    assert (routing[begin:end].view(torch.float32) - expected[begin:end].view(torch.float32)).abs().max() < 1e-5
    assert int(heads[0]) == 0
    used = (weights > 0).any(0).long()
    assert torch.equal(uses[2], used)
    assert torch.equal(counts, uses)

    shared, outputs = poisoned(s, d, dtype=torch.bfloat16), poisoned(positions, s, d, dtype=torch.bfloat16)
    hidden = poisoned(positions, s, width, dtype=torch.bfloat16)
    sizes = {"d": d, "width": width, "topk": topk, "s": s}
    inputs = (y, w2, w2_scale, in_fp4_order(codes), scales, pool, routing, table[2], abort, waited)
    experts_up(**sizes, limit=10.0, stride=stride, rows_per_scale=16)(*inputs, shared, hidden)
    experts_down(**sizes)(hidden, pool, routing, outputs)
    from kernels.reference import swiglu

    gated = swiglu(y[:, :width], y[:, width : 2 * width], 10.0, None, torch.bfloat16)
    close(shared, twin.quantised_linear(w2, w2_scale, gated))
    values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, -1)
    for place, expert in enumerate(e for e in range(experts) if used[e]):
        users = weights[:, expert] > 0
        record = pool[slot_of[expert]]
        close(outputs[place][users], twin.expert_output(values, record, width, 10.0, weights[:, expert])[users], 4e-3)
    assert record_offsets(d, width)[-1] <= pool.shape[1]


def test_a_missing_expert_is_asked_for_by_a_ticket() -> None:
    from kernels.decode.experts import route, routing_words

    y = torch.full((1, 288), -5.0, device=CUDA)
    y[0, 256 + torch.tensor([3, 7, 11, 20])] = torch.tensor([1.0, 2.0, 3.0, 4.0], device=CUDA)
    table = torch.arange(24, dtype=torch.int32, device=CUDA).repeat(2, 1)
    table[1, 7] = table[1, 20] = -1
    ring, heads, own = zeros(64, 64, dtype=torch.int32), zeros(1), torch.tensor([2**32 + 5, 64, 0], device=CUDA)
    routing = poisoned(routing_words(4, 1), dtype=torch.int32)
    sizes = {"experts": 24, "topk": 4, "stride": 288, "offset": 256, "scaling": 1.5, "s": 1, "vocab": 1}
    bias, tokens = zeros(24, dtype=torch.float32), zeros(1, dtype=torch.int32)
    others = (zeros(2, 24), zeros(2, 24), own, zeros(1, dtype=torch.uint32), routing, *no_guesses(24))
    kernel = route(**sizes, hashed=False, guesses=False)
    kernel(1, -1, y, bias, bias, zeros(1, 4), tokens, table, heads, ring, *others)
    assert int(heads[0]) == int(own[1]) == 65
    assert ring[0, :9].tolist() == [1, 5, 1, 2, 2, 7, 20, 3, 11]
    assert routing[1:13].tolist() == [3, 7, 11, 20, 0, 2, 1, 3, 3, 11, -1, -1]


@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize(("topk", "experts"), [(6, 256), (4, 24)])
def test_a_layer_guesses_what_the_next_one_wants(topk: int, experts: int, s: int) -> None:
    """The guess, its hint, what came of it; and that the layer's own routing stays the same."""
    from kernels.decode.experts import route, routing_words

    clock, offset, rows = 2**32 - 1, 64, -(-experts // 16) * 16
    y = torch.randn(s, offset + 2 * rows, device=CUDA) * 3
    bias, next_bias = torch.randn(2, experts, device=CUDA)
    table = torch.randint(-1, 1, (4, experts), device=CUDA, dtype=torch.int32)
    table[2, : experts // 4], table[2, experts // 4 :] = 5, -1
    is_wanted, hints, hinted, guessed, judged = no_guesses(experts)
    is_wanted[0], hinted[0] = 1, len(hints) - 1
    uses = zeros(4, experts)

    def run(guesses: bool, layer: int, following: int, y: torch.Tensor) -> torch.Tensor:
        sizes = {"experts": experts, "topk": topk, "stride": y.shape[1], "offset": offset, "s": s}
        routing = poisoned(routing_words(topk, s), dtype=torch.int32)
        own, tickets = torch.tensor([clock, 0, 0], device=CUDA), zeros(64, 64, dtype=torch.int32)
        state = (zeros(1), tickets, uses, zeros(4, experts), own, zeros(1, dtype=torch.uint32), routing)
        kernel = route(**sizes, scaling=1.5, vocab=1, hashed=False, guesses=guesses)
        inputs = (y, bias, next_bias, zeros(1, topk), zeros(s, dtype=torch.int32), table)
        kernel(layer, following, *inputs, *state, is_wanted, hints, hinted, guessed, judged)
        return routing

    routing = run(True, 1, 2, y)
    expected = twin.guess(y[:, offset + rows : offset + rows + experts], next_bias, topk, table[2])
    assert expected
    assert hints[-1].tolist()[: 6 + len(expected)] == [len(hints), 1, 2, 0, 1, len(expected), *expected]
    assert (guessed[0] == 2).nonzero().flatten().tolist() == expected
    assert (guessed[0] == -1).sum() == experts - len(expected)
    assert torch.equal(routing, run(False, 1, -1, y[:, : offset + rows].contiguous()))
    assert hinted.tolist() == [len(hints), 0, 0]

    run(True, 2, -1, torch.randn_like(y))
    right = len(set(expected) & set(uses[2].nonzero().flatten().tolist()))
    assert judged.tolist() == hinted[1:].tolist() == [len(expected), right]

    is_wanted.zero_()
    run(True, 1, 2, y)
    assert (guessed[0] == -1).all()
    run(True, 2, -1, y)
    assert hinted.tolist() == [len(hints), len(expected), right]


@pytest.mark.parametrize("s", TOKENS)
def test_a_token_that_is_drawn_hints_at_missing_experts(s: int) -> None:
    from kernels.decode.hints import HINT_WORDS, HINTED_WORDS, HINTS
    from kernels.decode.sampling import BLOCKS, SAMPLING_WORDS, STEPS, sample

    vocab, layers, experts, topk, clock = 512, 3, 24, 4, 2**33 + 2**31
    ints = partial(zeros, dtype=torch.int32)
    hashed = torch.rand(layers, vocab, experts, device=CUDA).argsort(-1)[..., :topk].short().contiguous()
    table = torch.randint(-1, 1, (layers + 2, experts), device=CUDA, dtype=torch.int32)
    table[1] = 0
    own, ring = torch.tensor([clock, 0, 0], device=CUDA), ints(HINTS, HINT_WORDS)
    hinted = torch.tensor([HINTS - 5, *[0] * (HINTED_WORDS - 1)], device=CUDA, dtype=torch.int32)
    state = (ints(s, SAMPLING_WORDS), zeros(s, dtype=torch.float32), ints(s, BLOCKS, 2), zeros(s, dtype=torch.uint32))
    tokens, positions, step, log = ints(s), ints(s), ints(s), ints(STEPS, s)
    draw = sample(vocab=vocab, s=s, hash_layers=layers, experts=experts, topk=topk)
    for _ in range(9):
        logits, before = torch.randn(s, vocab, device=CUDA), int(hinted[0])
        draw(logits, *state, tokens, positions, step, log, hashed, table, own, ring, hinted)
        entries = {number: ring[(number - 1) % HINTS].tolist() for number in range(before + 1, int(hinted[0]) + 1)}
        assert [entry[0] for entry in entries.values()] == list(entries)
        got = [(e[1], e[2], (e[3] - e[2]) & 0xFFFFFFFF, e[4], e[6 : 6 + e[5]]) for e in entries.values()]
        missing = [enumerate(twin.hashed_hints(hashed, t, table[:layers])) for t in logits.argmax(-1).tolist()]
        assert sorted(got) == sorted((0, layer, 2**31, 2, ids) for of in missing for layer, ids in of if ids)


@pytest.mark.parametrize(
    "params",
    [
        (0.0, 1.0, 0.0, 0),
        (1.0, 1.0, 0.0, 0),
        (0.7, 0.9, 0.0, 0),
        (1.3, 1.0, 0.05, 0),
        (1.0, 0.8, 0.0, 40),
        (1.0, 1.0, 0.0, 1),
    ],
)
def test_sampling(params: tuple[float, float, float, int]) -> None:
    """Which tokens can be drawn, and that each is drawn as often as its probability says."""
    from helpers.decode import draws

    from services.worker.sampler import SamplingParams, filtered_probabilities

    temperature, top_p, min_p, top_k = params
    logits = torch.randn(1, 512, device=CUDA) * 2
    drawn = draws(logits, temperature, top_p, min_p, top_k, 4000)
    if temperature == 0.0:
        assert (drawn == logits.argmax()).all()
        return
    p = filtered_probabilities(logits[0].cpu(), SamplingParams(temperature, top_p, top_k, min_p))
    p = p / p.sum()
    counts = torch.bincount(drawn.cpu(), minlength=512).float() / len(drawn)
    assert not counts[p == 0].any()
    assert (counts - p).abs().sum() < 0.25


def test_noise_never_outweighs_a_certain_token() -> None:
    """Half a billion draws of noise, one a logit: the largest would have to be 60, and is about 20."""
    from helpers.decode import draws

    logits = torch.zeros(1, 129280, device=CUDA)
    logits[0, 77] = 60
    assert (draws(logits, 1.0, 1.0, 0.0, 0, 4000) == 77).all()


def test_the_same_seed_draws_the_same_among_what_is_left() -> None:
    from helpers.decode import draws

    logits = torch.randn(1, 512, device=CUDA) * 2
    drawn = draws(logits, 1.0, 0.8, 0.0, 40, 32)
    assert torch.equal(drawn, draws(logits, 1.0, 0.8, 0.0, 40, 32))
    assert set(drawn.tolist()) <= set(logits[0].topk(40).indices.tolist())
