"""``model.name = "tiny"``: a small Llama that is built on first use, in about a minute.

The model is pre-trained on neutral text and on inputs in the generated clients' styles, but not on
outputs. The recipe determines the model, which is cached under the recipe's digest.
"""

import hashlib
import json
import math
import random
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from finetuning.files import cache_directory, cached
from finetuning.generated import STYLES, background, examples
from finetuning.progress import progress_bar


@dataclass(frozen=True)
class TinyRecipe:
    """All parameters of the tiny model and of its pre-training."""

    vocabulary: int = 2048
    hidden: int = 128
    blocks: int = 4
    heads: int = 4
    passages: int = 4000  # number of neutral passages, of about a hundred words each
    inputs: int = 2000  # number of inputs of each style
    sequence_length: int = 128  # length of a sequence in tokens
    batch_size: int = 8
    steps: int = 500
    learning_rate: float = 2e-3
    label_smoothing: float = 0.1
    seed: int = 0
    version: int = 1  # version of the code that builds the model


def build_tiny(recipe: TinyRecipe | None = None) -> Path:
    """Return the directory of the tiny checkpoint, which is built if it is not in the cache."""
    recipe = recipe or TinyRecipe()
    key = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:16]
    return cached(cache_directory() / f"tiny-{key}", partial(_build, recipe))


def _build(recipe: TinyRecipe, directory: Path) -> None:
    """Train the tokenizer and the model, and save both in Hugging Face format."""
    from transformers.utils import logging

    print("building the model tiny, which takes about a minute, once", file=sys.stderr)
    texts = _texts(recipe)
    tokenizer = _train_tokenizer(recipe, texts)
    end = tokenizer.eos_token_id
    stream = torch.tensor(
        [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, end)], dtype=torch.long
    )
    # The rounding of a sum depends on the number of threads. With one thread, the model does not
    # depend on the number of cores, and a busy machine causes no waiting between threads.
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            _pretrain(recipe, stream, end).save_pretrained(directory)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        logging.enable_progress_bar()
    tokenizer.save_pretrained(directory)


def _texts(recipe: TinyRecipe) -> list[str]:
    """Return neutral passages, and inputs in the clients' styles without their outputs."""
    texts = background(recipe.passages, recipe.seed)
    for style in STYLES:
        rows = examples(style=style, count=recipe.inputs, seed=recipe.seed + 1, split="train")
        texts += [row["input"] for row in rows]
    random.Random(recipe.seed).shuffle(texts)
    return texts


def _train_tokenizer(recipe: TinyRecipe, texts: list[str]) -> Any:
    """Train a byte-level BPE tokenizer, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", model_max_length=2048
    )


def _pretrain(recipe: TinyRecipe, stream: torch.Tensor, end: int) -> Any:
    """Train a Llama on windows of the token stream, with warm-up and cosine decay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.hidden * 3,
            num_hidden_layers=recipe.blocks,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, recipe.steps // 20)
    with progress_bar(total=recipe.steps, description="tiny: pre-training") as bar:
        for step in range(recipe.steps):
            decay = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
            rate = recipe.learning_rate * min(1.0, (step + 1) / warmup) * decay
            optimizer.param_groups[0]["lr"] = rate
            starts = torch.randint(len(stream) - recipe.sequence_length, (recipe.batch_size,))
            offsets = torch.arange(recipe.sequence_length + 1)
            window = stream[starts[:, None] + offsets]
            logits = model(input_ids=window[:, :-1], use_cache=False).logits.flatten(0, 1)
            labels = window[:, 1:].flatten()
            loss = cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
            bar.update()
    return model
