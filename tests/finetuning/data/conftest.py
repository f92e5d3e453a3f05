"""Small tokenizers of the kinds that models have, written and loaded in Hugging Face format."""

import copy
import json

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from finetuning.model.tokenizer import load_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "Instruction Input:\nIs the contract void?\nInstruction Output:\nYes, it is void.\n",
    "system\nYou answer briefly.\nuser\nWhat does the court say?\n\nassistant\nThe court says no.",
    "[INST] Who pays the costs? [/INST] The defendant pays  the costs.\n\n",
    "USER: hello there ASSISTANT: <think>\n\n</think>\n\n### Response:\nhello",
    "原告认为合同无效。法院认为合同有效,被告应当支付费用。",
    "".join(chr(character) for character in range(32, 127)),
]


def byte_level_bpe() -> Tokenizer:
    """Like GPT-2's and Qwen's: encodes any text, without a beginning-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


def trimming_bpe() -> Tokenizer:
    """Like Llama 3's: offsets exclude a token's whitespace, and a beginning token is added."""
    tokenizer = byte_level_bpe()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """Like T5's, and like newer conversions of SentencePiece models."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2's: a beginning token for every piece of text, and bytes for rare characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, limit_alphabet=80, show_progress=False
    )
    words = [word for text in CORPUS for word in text.split()]
    tokenizer.train_from_iterator(words * 5, trainer)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    state = json.loads(tokenizer.to_str())
    state["model"]["byte_fallback"] = True
    for byte in range(256):
        state["model"]["vocab"][f"<0x{byte:02X}>"] = len(state["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(state))


def with_stripping_marks(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(mark, rstrip=True, special=True) for mark in SPECIAL[3:]]
    )
    return tokenizer


def stripping_bpe() -> Tokenizer:
    """Like Phi 4's: special tokens include the whitespace after them."""
    return with_stripping_marks(byte_level_bpe())


def stripping_sentencepiece() -> Tokenizer:
    """Like Phi 3's: a SentencePiece tokenizer whose special tokens include whitespace."""
    return with_stripping_marks(sentencepiece_bpe())


KINDS = {
    kind.__name__: kind
    for kind in (
        byte_level_bpe,
        trimming_bpe,
        metaspace_unigram,
        sentencepiece_bpe,
        stripping_bpe,
        stripping_sentencepiece,
    )
}


@pytest.fixture(scope="session")
def tokenizers_by_kind(tmp_path_factory):
    loaded = {}
    for name, make in KINDS.items():
        directory = tmp_path_factory.mktemp(name)
        PreTrainedTokenizerFast(
            tokenizer_object=make(),
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<|im_start|>", "<|im_end|>"],
            clean_up_tokenization_spaces=False,
        ).save_pretrained(directory)
        loaded[name] = load_tokenizer(directory)
    return loaded


@pytest.fixture(scope="session")
def tokenizer_of(tokenizers_by_kind):
    made = {}

    def give(kind, template=None):
        if (kind, template) not in made:
            made[kind, template] = copy.deepcopy(tokenizers_by_kind[kind])
            made[kind, template].chat_template = template
        return made[kind, template]

    return give
