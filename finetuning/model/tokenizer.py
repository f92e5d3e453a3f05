"""Load a checkpoint's tokenizer."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import vocabulary_size


def load_tokenizer(directory: Path) -> Any:
    """Load a checkpoint's fast tokenizer; the padding token defaults to the end-of-text token.

    Raise a BaseModelError if there is no end-of-text token or no fast tokenizer, or the model has
    no embedding for a token that texts can contain.
    """
    from transformers import AutoTokenizer

    # Mistral's tekken.json and some tokenizer.json that were made from it split words differently.
    options = {"fix_mistral_regex": True} if (directory / "tekken.json").is_file() else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, **options)
    except Exception as error:  # damaged files can raise any exception
        reason = shorten(str(error), 300, placeholder=" …").rstrip(".")
        raise BaseModelError(
            f"no usable tokenizer in {directory}: {reason}; copy the files of the published one"
        ) from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise BaseModelError(
            f"the tokenizer in {directory} must be a fast tokenizer (tokenizer.json) with an "
            "end-of-text token (eos_token in tokenizer_config.json)"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    size = vocabulary_size(directory)
    used = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    added = tokenizer.added_tokens_decoder
    # Some text models share a tokenizer with a model that has additional tokens, for images.
    beyond = [
        token
        for token, number in tokenizer.get_vocab().items()
        if size is not None
        and number >= size
        and (number in used or number not in added or not added[number].special)
    ]
    if beyond:
        raise BaseModelError(
            f"the tokenizer in {directory} has tokens for which the model's {size} embeddings are "
            f"too few, such as {beyond[0]}; use the tokenizer that was published with the model"
        )
    return tokenizer
