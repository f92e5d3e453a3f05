"""Convert a SentencePiece model to an equivalent fast tokenizer."""

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

# The definition in sentencepiece would need the protobuf version that it was built with.
from transformers.utils import sentencepiece_model_pb2_new as description

from finetuning.conversion.plan import ConversionError, Plan

# Types of pieces in sentencepiece_model.proto.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BPE = 2
_SPACE = "▁"


def convert_tokenizer(file: Path, plan: Plan) -> Any:
    """Return the ``transformers`` tokenizer of a model from its ``tokenizer.model``.

    Raise a ConversionError if the file is not a SentencePiece BPE model, uses a feature that fast
    tokenizers don't support, lacks a token, or has more tokens than the model.
    """
    tokenizer = _encoder(_read(file), file)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in plan.special_tokens])
    if tokenizer.get_vocab_size() > plan.config.vocab_size:
        raise ConversionError(
            f"{file} has {tokenizer.get_vocab_size()} tokens including special ones, but "
            f"config.json allows only {plan.config.vocab_size}"
        )
    if plan.first_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*plan.first_tokens, "$A"],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in plan.first_tokens],
        )
    named = [t for key, t in plan.tokenizer.items() if key.endswith("_token")]
    absent = sorted({t for t in named if tokenizer.token_to_id(t) is None})
    if absent:
        raise ConversionError(f"{file} has no token {', '.join(absent)}")
    converted = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=plan.config.max_position_embeddings,
        **plan.tokenizer,
    )
    converted.chat_template = plan.chat_template
    return converted


def _read(file: Path) -> Any:
    """Parse the file with the protobuf definition that transformers includes."""
    proto = description.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except OSError as error:
        raise ConversionError(f"{file} can't be read: {error.strerror}") from error
    except DecodeError as error:
        raise ConversionError(f"{file} is not a SentencePiece model: {error}") from error
    types = {piece.type for piece in proto.pieces}
    if not types:
        raise ConversionError(f"{file} is not a SentencePiece model: it has no pieces")
    refused = {
        "its algorithm isn't byte-pair encoding": proto.trainer_spec.model_type != _BPE,
        "its pieces end with whitespace": proto.trainer_spec.treat_whitespace_as_suffix,
        "it doesn't escape whitespace": not proto.normalizer_spec.escape_whitespaces,
        "it has unused pieces": _UNUSED in types,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ConversionError(f"{file} can't be converted: {reason}")
    return proto


def _encoder(proto: Any, file: Path) -> Any:
    """Return the tokenizer without the special tokens that follow the vocabulary."""
    scores = {piece.piece: piece.score for piece in proto.pieces}
    if len(scores) < len(proto.pieces):
        raise ConversionError(f"the SentencePiece model {file} contains a piece twice")
    vocabulary = {piece: number for number, piece in enumerate(scores)}
    # Byte-pair encoding must not form pieces of other types, even if text is spelled like them.
    fixed = {piece.piece for piece in proto.pieces if piece.type != _NORMAL}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=generate_merges(vocabulary, scores, skip_tokens=fixed),
            unk_token=next((p.piece for p in proto.pieces if p.type == _UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(_normalizers(proto.normalizer_spec))
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    # As in every fast tokenizer, these pieces are found in texts, and a word begins after each.
    for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
        tokens = [p.piece for p in proto.pieces if p.type == kind]
        special = kind != _USER_DEFINED
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in tokens])
    return tokenizer


def _normalizers(spec: Any) -> list[Any]:
    """Return the normalisation steps that precede byte-pair encoding."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # Replace only spaces; other whitespace is not changed.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" +"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return [*steps, normalizers.Replace(" ", _SPACE)]
