"""Decoding by fused kernels and graphs: near the model's own forward, the same without a graph, through waits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import goldens
from helpers.resident import ResidentExperts

from services.worker.decode.decoder import Decoder
from services.worker.model import Model, SequenceState
from services.worker.sampler import GREEDY, SamplingParams
from services.worker.warm_up import compile_ahead, warm_up
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.config import PrefetchConfig
from shared.errors import ServiceError

pytestmark = pytest.mark.timeout(600)  # compilers, where nothing is compiled yet
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "checkpoint"
CONTEXT = 3200
CUDA = torch.device("cuda")


class Setup:
    """A checkpoint on the GPU, all its experts, and a decoder that is warm."""

    def __init__(self, checkpoint: Path, sequences: int = 1) -> None:
        index, config = TensorIndex.open(checkpoint), ModelConfig.from_dir(checkpoint)
        self.config = config
        self.model = Model.load(index, config, CONTEXT, device=CUDA)
        self.experts = ResidentExperts(index, config)
        self.states = [self.model.new_state(CONTEXT) for _ in range(sequences)]
        self.graphs = Decoder(self.model, self.states)
        compile_ahead(self._warm_up, print)
        self.graphs.begin(self.experts)

    def close(self) -> None:
        self.graphs.close()
        self.experts.close()

    def _warm_up(self) -> None:
        warm_up(self.model, self.states[0], CONTEXT)
        self.graphs.warm_up()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return [random.Random(seed).randrange(3, self.config.vocab_size) for _ in range(length)]

    def prefill(self, ids: list[int], state: SequenceState) -> torch.Tensor:
        state.reset()
        return self.model.forward(state, ids, self.experts)

    def decode(
        self,
        decoder: Decoder,
        prompts: list[list[int]],
        steps: int,
        params: SamplingParams = GREEDY,
        logits: bool = False,
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        rows = torch.stack([self.prefill(ids, state) for ids, state in zip(prompts, self.states, strict=True)])
        tokens, seen = [], []
        with self.experts.step():
            for now in decoder.tokens(rows, [params] * len(prompts), steps, lookahead=not logits):
                tokens.append(now)
                if logits:
                    seen.append(decoder.logits.clone())
        return tokens, seen


@pytest.fixture(scope="module")
def demo() -> Iterator[Setup]:
    with closing(Setup(DEMO)) as setup:
        yield setup


@pytest.fixture(scope="module")
def eager(demo: Setup) -> Decoder:
    """The same kernels without graphs, on the same state."""
    decoder = Decoder(demo.model, demo.states, eager=True)
    decoder.begin(demo.experts)
    return decoder


@pytest.mark.parametrize("length", [1, 3, 127, 128, 129, 511, 2500])
def test_logits_are_those_of_the_models_forward(demo: Setup, length: int) -> None:
    """Teacher-forced by the decoder's own tokens. Codes may flip, so not every step is equally close."""
    prompt = demo.prompt(length)
    tokens, seen = demo.decode(demo.graphs, [prompt], 150, logits=True)
    state = demo.model.new_state(CONTEXT)
    expected = [demo.model.forward(state, prompt, demo.experts)]
    expected += [demo.model.forward(state, [token], demo.experts) for (token,) in tokens[:-1]]
    errors = [float((a[0] - b).norm() / b.norm()) for a, b in zip(seen, expected, strict=True)]
    print(f"{length}: median {sorted(errors)[75]:.4f}, worst {max(errors):.4f}")
    assert errors[0] == 0
    assert sorted(errors)[75] < 0.05
    assert max(errors) < 0.6


def test_recorded_runs_end_to_end() -> None:
    """The tiny checkpoint's recorded logits, decoded teacher-forced."""
    golden, limit, ids = goldens.vectors("golden"), goldens.limits("end_to_end"), goldens.token_ids()
    got, expected = [], []
    with closing(Setup(goldens.TINY_A)) as setup:
        for prefill, decode in goldens.cases("golden"):
            if decode:
                setup.prefill(ids[:prefill], setup.states[0])
                got += setup.graphs.forced(ids[prefill : prefill + decode])
                expected.append(golden[f"prefill{prefill}_decode{decode}.logits"][1:])
    a, b = torch.stack(got).cpu(), torch.cat(expected)
    measured = float((a - b).norm() / b.norm()), float(torch.cosine_similarity(a, b).mean())
    print("pooled, cosine", measured)
    assert measured[0] <= limit["pooled_rel_frobenius_max"]
    assert measured[1] >= limit["mean_cosine_min"]


@pytest.mark.parametrize("length", [3, 127, 128, 129, 2500])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
def test_a_graph_gives_the_bits_of_its_kernels(demo: Setup, eager: Decoder, length: int, temperature: float) -> None:
    """Over many group boundaries; ids and, every step, logits."""
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature > 1 else 1.0, seed=7)
    ids, _ = demo.decode(demo.graphs, [demo.prompt(length)], 600, params)
    again, with_graphs = demo.decode(demo.graphs, [demo.prompt(length)], 600, params, logits=True)
    launched, without = demo.decode(eager, [demo.prompt(length)], 600, params, logits=True)
    assert ids == again == launched
    assert torch.equal(torch.stack(with_graphs), torch.stack(without))


def test_missing_experts_are_waited_for_and_change_no_bit(demo: Setup) -> None:
    prompt = demo.prompt(40)
    expected, _ = demo.decode(demo.graphs, [prompt], 100)
    rng, table = random.Random(3), demo.experts.control.slot_table
    demo.experts.asked.clear()
    layers, experts = range(demo.config.num_hidden_layers), range(demo.config.n_routed_experts)
    keys = list(itertools.product(layers, experts))
    clock = demo.experts.control.worker_clock
    logits = demo.prefill(prompt, demo.states[0]).clone()
    demo.experts.forget(rng.sample(keys, len(keys) // 2))
    torch.cuda.synchronize()
    with demo.experts.step():
        got = list(demo.graphs.tokens(logits.unsqueeze(0), [GREEDY], 100))
    demo.experts.remember_all()
    assert got == expected
    assert demo.experts.asked
    assert demo.experts.control.worker_clock == clock + 99 * demo.config.num_hidden_layers
    for layer, missing, held, at in demo.experts.asked:
        assert len(missing) + len(held) == demo.config.num_experts_per_tok
        assert clock <= at
        assert all(0 <= e < table.shape[1] for e in missing)
        assert all(slot // table.shape[1] == layer for slot in held)


@pytest.mark.timeout(300, method="thread")  # no signal is heard by a thread that waits for a GPU which waits for it
def test_a_step_in_flight_may_miss_while_the_next_ones_graph_is_captured(demo: Setup) -> None:
    """At position 2,048 an answer outgrows its first graph."""
    decoder = Decoder(demo.model, demo.states, PrefetchConfig(hash_layers=False, look_ahead=False))
    compile_ahead(decoder.warm_up, print)
    decoder.begin(demo.experts)
    prompt, c = demo.prompt(2030), demo.config
    keys = list(itertools.product(range(c.num_hidden_layers), range(c.n_routed_experts)))
    expected, _ = demo.decode(decoder, [prompt], 40)
    decoder.begin(demo.experts)  # without the graphs
    logits = demo.prefill(prompt, demo.states[0]).clone()
    demo.experts.asked.clear()
    demo.experts.forget(random.Random(5).sample(keys, len(keys) // 2))
    torch.cuda.synchronize()
    with demo.experts.step():
        got = list(decoder.tokens(logits.unsqueeze(0), [GREEDY], 40))
    demo.experts.remember_all()
    assert got == expected
    assert demo.experts.asked


def test_hash_layers_are_hinted_at_before_they_ask(demo: Setup) -> None:
    """With time enough to read them they miss nothing, though the cache begins without any of their experts."""
    experts, layers, steps = demo.experts, range(demo.config.num_hash_layers), 30
    prompt = demo.prompt(40)
    wanted = [demo.model.layers[layer].moe.tid2eid.tolist() for layer in layers]
    expected, _ = demo.decode(demo.graphs, [prompt], steps)
    logits = demo.prefill(prompt, demo.states[0]).clone()
    experts.forget([(layer, expert) for layer in layers for expert in range(demo.config.n_routed_experts)])
    torch.cuda.synchronize()
    experts.asked.clear()
    experts.hinted.clear()
    got, read = [], [set() for _ in layers]
    with experts.step():
        for (token,) in demo.graphs.tokens(logits.unsqueeze(0), [GREEDY], steps, lookahead=False):
            got.append([token])
            if len(got) == steps:
                continue  # nothing follows
            new = [set(wanted[layer][token]) - read[layer] for layer in layers]
            assert [set(ids) for _, ids, _ in experts.hinted] == [ids for ids in new if ids]
            experts.until_quiet()
            experts.hinted.clear()
            read = [before | ids for before, ids in zip(read, new, strict=True)]
    experts.remember_all()
    assert got == expected
    assert not experts.asked


def test_guesses_are_made_while_they_are_wanted_and_change_no_bit(demo: Setup) -> None:
    """On a cache that loses half of its experts now and then; the decoder without prefetch never hints."""
    experts, config = demo.experts, demo.config
    layers = range(config.num_hash_layers, config.num_hidden_layers)
    scored = list(itertools.product(layers, range(config.n_routed_experts)))
    plain = Decoder(demo.model, demo.states, PrefetchConfig(hash_layers=False, look_ahead=False))
    plain.begin(experts)
    prompt, steps = demo.prompt(40), 100
    expected, _ = demo.decode(demo.graphs, [prompt], steps)
    for decoder, wants in ((demo.graphs, True), (demo.graphs, False), (plain, True)):
        experts.wants_guesses, experts.guessed, experts.guessed_right = wants, 0, 0
        logits, rng, got = demo.prefill(prompt, demo.states[0]).clone(), random.Random(5), []
        experts.hinted.clear()
        with experts.step():
            for token in decoder.tokens(logits.unsqueeze(0), [GREEDY], steps, lookahead=False):
                got.append(token)
                experts.until_quiet()
                experts.forget(rng.sample(scored, len(scored) // 2))
                torch.cuda.synchronize()
        experts.until_quiet()
        experts.remember_all()
        experts.wants_guesses = True
        assert got == expected
        print(f"{len(experts.hinted)} hints, {experts.guessed_right} of {experts.guessed} guesses right")
        if decoder is plain or not wants:
            assert not experts.hinted
            assert experts.guessed == 0
            continue
        assert all(is_guess and layer in layers for layer, _, is_guess in experts.hinted)
        assert experts.guessed >= sum(len(ids) for _, ids, _ in experts.hinted) > steps
        assert experts.guessed_right > 0.6 * experts.guessed  # 73 % on a CPU


@contextmanager
def unreadable(demo: Setup) -> Iterator[tuple[Iterator[list[int]], list[list[int]]]]:
    """An answer, not begun, that misses a layer's experts, of which none can be read; and the answer as it should be.
    The next one is whole again."""
    prompt = demo.prompt(30)
    expected, _ = demo.decode(demo.graphs, [prompt], 20)
    logits = demo.prefill(prompt, demo.states[0]).clone()
    demo.experts.asked.clear()
    demo.experts.control.slot_table[3] = -1
    demo.experts.fails = True
    try:
        with demo.experts.step(), closing(demo.graphs.tokens(logits.unsqueeze(0), [GREEDY], 20)) as tokens:
            yield tokens, expected
    finally:
        demo.experts.fails = False
        demo.experts.remember_all()
    assert not demo.experts.control.abort
    assert demo.decode(demo.graphs, [prompt], 20)[0] == expected


def test_an_expert_that_cannot_be_read_ends_the_request_and_the_next_one_works(demo: Setup) -> None:
    with unreadable(demo) as (tokens, _), pytest.raises(ServiceError, match="cannot read"):
        list(tokens)


def test_an_expert_that_only_the_step_ahead_cannot_have_is_nobodys_error(demo: Setup) -> None:
    with unreadable(demo) as (tokens, expected):
        assert next(tokens) == expected[0]


def test_a_request_that_ends_early_leaves_nothing_running(demo: Setup) -> None:
    prompt = demo.prompt(64)
    expected, _ = demo.decode(demo.graphs, [prompt], 50)
    for steps in (1, 2, 7):
        logits = demo.prefill(prompt, demo.states[0]).clone()
        with demo.experts.step():
            tokens = demo.graphs.tokens(logits.unsqueeze(0), [GREEDY], 50)
            assert [next(tokens) for _ in range(steps)] == expected[:steps]
            tokens.close()
        assert torch.cuda.current_stream().query()
    assert demo.decode(demo.graphs, [prompt], 50)[0] == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_blocks_the_host_while_steps_hit(demo: Setup) -> None:
    """By the decoder's own count and by torch's, which raises where a call would block."""
    prompt = demo.prompt(30)
    expected, _ = demo.decode(demo.graphs, [prompt], 60)
    counters, logits = replace(demo.graphs.counters), demo.prefill(prompt, demo.states[0]).clone()
    with demo.experts.step(), closing(demo.graphs.tokens(logits.unsqueeze(0), [GREEDY], 60)) as tokens:
        got = [next(tokens)]
        try:
            torch.cuda.set_sync_debug_mode("error")
            got += [next(tokens) for _ in range(50)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert got == expected[:51]
    assert demo.graphs.counters.graph_step_syncs == counters.graph_step_syncs
    assert demo.graphs.counters.graph_request_syncs == counters.graph_request_syncs + 5
    demo.graphs.begin(demo.experts)  # forgets its graphs
    assert demo.decode(demo.graphs, [prompt], 60)[0] == expected
    assert demo.graphs.counters.graph_step_syncs > counters.graph_step_syncs


@pytest.mark.parametrize("sequences", [2, 4])
def test_sequences_in_one_step_are_as_alone(demo: Setup, sequences: int) -> None:
    prompts = [demo.prompt(20 + 50 * i, seed=i) for i in range(sequences)]
    alone = [[t for (t,) in demo.decode(demo.graphs, [prompt], 80)[0]] for prompt in prompts]
    with closing(Setup(DEMO, sequences)) as together:
        got, _ = together.decode(together.graphs, prompts, 80)
    assert [list(column) for column in zip(*got, strict=True)] == alone
