"""A small byte-level BPE tokenizer for synthetic checkpoints, in the format of the `tokenizers` library.

Trained here, on the few sentences below, so that a random checkpoint can be chatted with: every byte and every control
token of the chat format has an id, and every id decodes. The quality of its merges does not matter.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise, product
from string import ascii_lowercase
from typing import Any

SENTENCES = """
The keeper of the lighthouse wrote the weather in a green book every evening before the lamp was lit.
Three boats came back with herring, one with an empty net, and nobody asked the last crew what had happened.
Bring me the small hammer, the longer rope and two lanterns; the bridge will not repair itself tonight.
She counted the steps again: forty-one to the cellar, nineteen to the garden, and none that led to the tower.
When the river freezes, people walk to market across it and talk more loudly than they do in summer.
Is there any bread left? There is, but somebody has hidden the butter behind the clock.
A mill needs wind or water, a baker needs flour and patience, and a village needs both of them by morning.
He had promised his sister a map of the northern islands, drawn without a single straight line.
Under the third stone from the gate lies a key; it opens a box, and the box holds another key.
Good morning! How can I help you today? Please tell me your name and where you would like to travel.
The answer is seven, because four and three make seven, and nothing else was added or taken away.
Old machines remember their makers: this one hums in autumn, stops at noon, and starts when it hears singing.
They painted the door blue, then yellow, then blue again, until the wood forgot which colour it used to be.
I do not know that story, but I know one about a fox who learned to read the stars and became a pilot.
"""

# In the published order; the first three have the ids 0, 1 and 2 there and here.
LEADING_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
CONTROL_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)

Merge = tuple[str, str]


def tokenizer_files(vocab_size: int) -> dict[str, Any]:
    """`tokenizer.json` and `tokenizer_config.json`, by name, for exactly `vocab_size` ids (300 at least)."""
    bytes_ = sorted(byte_alphabet().values())
    merges = train_merges(SENTENCES, vocab_size - len(LEADING_TOKENS) - len(bytes_) - len(CONTROL_TOKENS))
    words = [*LEADING_TOKENS, *bytes_, *(left + right for left, right in merges), *CONTROL_TOKENS]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    return {
        "tokenizer.json": _tokenizer(vocab, merges),
        "tokenizer_config.json": {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": LEADING_TOKENS[0],
            "eos_token": LEADING_TOKENS[1],
            "pad_token": LEADING_TOKENS[1],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte: itself if it is printable Latin-1, else the next one from U+0100."""
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    others = (b for b in range(256) if b not in set(printable))
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def train_merges(text: str, count: int) -> list[Merge]:
    """`count` merges, most frequent pair first (ties: smallest pair); letter pairs fill up when the text runs out."""
    alphabet = byte_alphabet()
    found = re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+", text)
    words = Counter(tuple(alphabet[b] for b in word.encode()) for word in found)
    merges: list[Merge] = []
    while len(merges) < count:
        pairs: Counter[Merge] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): times for word, times in words.items()})
    return merges + _unused_letter_pairs(merges, count - len(merges))


def _merge(word: tuple[str, ...], pair: Merge) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def _unused_letter_pairs(merges: list[Merge], count: int) -> list[Merge]:
    known = {left + right for left, right in merges}
    pairs = [(a, b) for a, b in product(ascii_lowercase, repeat=2) if a + b not in known]
    assert count <= len(pairs), "vocabulary too large for the built-in sentences"
    return pairs[: max(count, 0)]


def _tokenizer(vocab: dict[str, int], merges: list[Merge]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocab[token], token, True) for token in LEADING_TOKENS]
        + [_added(vocab[token], token, False) for token in CONTROL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _added(token_id: int, content: str, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **plain, "special": special}
