"""Trains `demo/tokenizer.json` on the corpus: byte-level BPE with single digits and V4's control tokens.

python -m demo.make_tokenizer
"""

from __future__ import annotations

import json
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import words
from demo.corpus import HERE, chat_format, long_conversation, short_conversation
from services.front.chat.encoding import ChatOptions, ThinkingMode, encode_chat, rendered
from shared.checkpoint.synth_tokenizer import CONTROL_TOKENS, LEADING_TOKENS

VOCABULARY = 4096
TOKENIZER = HERE / "tokenizer.json"


def main() -> None:
    table = train(sample(conversations=12_000))
    TOKENIZER.write_text(json.dumps(table, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{TOKENIZER}: {len(table['model']['vocab'])} entries")


def sample(conversations: int) -> list[str]:
    """Corpus text without control tokens, and the bare word lists, so that every word gets its own token."""
    rng = Random("tokenizer")
    fmt = chat_format()
    texts = []
    for i in range(conversations):
        talk = long_conversation(rng) if i % 200 == 0 else short_conversation(rng)
        messages = list(talk.messages)
        if talk.tools:
            messages = [{"role": "system", "content": "", "tools": list(talk.tools)}, *messages]
        texts.append(rendered(encode_chat(messages, fmt, ChatOptions(ThinkingMode.THINKING))))
    lists = [v for v in vars(words).values() if isinstance(v, (tuple, list)) and v and isinstance(v[0], str)]
    texts += [f" {word} {word.lower()} {word.capitalize()}" for group in lists for word in group] * 30
    return _without_controls(texts)


def _without_controls(texts: list[str]) -> list[str]:
    for token in (*LEADING_TOKENS, *CONTROL_TOKENS):
        texts = [text.replace(token, "\n") for text in texts]
    return texts


def train(texts: list[str]) -> dict[str, object]:
    """The content of tokenizer.json; ids 0, 1, 2 are the leading control tokens, the others come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS),
        special_tokens=list(LEADING_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([_control(token) for token in CONTROL_TOKENS])
    return json.loads(tokenizer.to_str())


def _control(token: str) -> object:
    from tokenizers import AddedToken

    return AddedToken(token, normalized=False, special=False)


if __name__ == "__main__":
    main()
