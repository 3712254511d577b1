"""What stays within a budget: recently used paths, always from their root on. Against a plain model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.sessions.path_budget import PathBudget

LIMIT = 20
Word = str
words = st.text("ab", min_size=1, max_size=5)


def path_of(word: Word) -> list[bytes]:
    """The keys of a word: each of its beginnings."""
    return [word[: i + 1].encode() for i in range(len(word))]


class Model(RuleBasedStateMachine):
    """`held` maps each key to (last use, size); a use counts for every beginning of the word."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = PathBudget(LIMIT)
        self.held: dict[bytes, tuple[int, int]] = {}
        self.now = 0

    def _use(self, word: Word) -> None:
        self.now += 1
        for key in path_of(word):
            if key in self.held:
                self.held[key] = (self.now, self.held[key][1])

    @rule(word=words)
    def use(self, word: Word) -> None:
        self.budget.use(path_of(word))
        self._use(word)

    @rule(word=words, size=st.integers(0, LIMIT + 2))
    def add_what_is_new(self, word: Word, size: int) -> None:
        """The next key of a word whose beginning is held, as a prompt's segments come."""
        path = path_of(word)
        known = next((i for i, key in enumerate(path) if key not in self.held), None)
        if known is None:
            return
        path = path[: known + 1]
        evicted = self.budget.add(path, size)
        room = LIMIT - sum(self.held[key][1] for key in path[:-1])
        assert (evicted is None) == (size > room)
        if evicted is None:
            return
        self.held[path[-1]] = (self.now, size)
        self._use(word[: known + 1])
        for key in evicted:
            children = [k for k in self.held if len(k) == len(key) + 1 and k.startswith(key)]
            assert not children, "the ends of paths go first"
            oldest = min(used for used, _ in self.held.values())
            assert self.held.pop(key)[0] == oldest, "the oldest goes first"
            assert key not in path

    @rule(word=words)
    def remove_with_all_that_follows(self, word: Word) -> None:
        for key in [k for k in self.held if k.startswith(word.encode())]:
            self.budget.remove(key)
            del self.held[key]

    @invariant()
    def the_same_is_held(self) -> None:
        assert set(self.budget) == set(self.held)
        assert len(self.budget) == len(self.held)
        assert self.budget.nbytes == sum(size for _, size in self.held.values()) <= LIMIT

    @invariant()
    def every_path_begins_at_its_root(self) -> None:
        assert all(key[:-1] in self.held for key in self.held if len(key) > 1)


TestPathBudget = Model.TestCase
TestPathBudget.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nothing_goes_for_what_does_not_fit() -> None:
    budget = PathBudget(10)
    assert budget.add([b"other"], 5) == []
    assert budget.add([b"a"], 5) == []
    assert budget.add([b"a", b"ab"], 6) is None
    assert set(budget) == {b"other", b"a"}


def test_a_use_keeps_a_whole_path() -> None:
    budget = PathBudget(4)
    for key in ([b"a"], [b"a", b"ab"], [b"c"], [b"d"]):
        assert budget.add(key, 1) == []
    budget.use([b"a", b"ab"])
    assert budget.add([b"e"], 2) == [b"c", b"d"]
