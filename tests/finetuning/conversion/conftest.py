"""A SentencePiece model like the originals': byte-pair encoding with byte fallback."""

import pytest

from tests.conftest import WORDS

TEXTS = [
    *WORDS,
    *(" ".join(WORDS[start : start + 7]) for start in range(len(WORDS))),
    *(
        "法院认为合同有效",
        "原告提起诉讼",
        "被告没有按时交货",
        "philosophy of law",
        "a sop to Cerberus",
    ),
    *(
        "Round 1 2 3 4",
        "[Round 12]\n\n问：合同有效吗？\n\n答：有效。",
        "x = 1; y = 2",
        "  two  blanks",
    ),
]


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """Return a function that writes a ``tokenizer.model``."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("sentencepiece")
    made = {}

    def make(**options):
        key = str(options)
        if key not in made:
            prefix = folder / str(len(made))
            SentencePieceTrainer.train(
                sentence_iterator=iter(TEXTS * 20),
                model_prefix=str(prefix),
                minloglevel=2,
                **{
                    "vocab_size": 520,
                    "model_type": "bpe",
                    "byte_fallback": True,
                    "normalization_rule_name": "identity",
                    "remove_extra_whitespaces": False,
                    "character_coverage": 0.99,
                    "split_digits": True,
                }
                | options,
            )
            made[key] = prefix.with_suffix(".model")
        return made[key]

    return make
