"""Weights of recorded results that are not those that their models' authors publish."""

from collections.abc import Collection

# By the beginning of the model's digest (`finetuning.model.fingerprint`): the model, and the type
# of the GGUF file from which its weights were dequantised.
_FROM_GGUF = {
    "0235610a1b7929ae": ("SmolLM2-135M-Instruct", "Q4_1"),
    "a85c789ad57eda62": ("gemma-3-270m", "Q4_K_M"),
    "11bb877a193dde1e": ("multilingual-e5-small", "Q4_0"),
}


def origin(digests: Collection[str]) -> str:
    """Return a sentence that names the models whose weights were dequantised; empty for none."""
    known = [_FROM_GGUF[start] for start in _FROM_GGUF if start in {d[:16] for d in digests}]
    if not known:
        return ""
    models = ", ".join(f"{name} ({kind})" for name, kind in known)
    return (
        f"Weights were dequantised from 4-bit GGUF files: {models}. Those that the authors publish "
        "give other figures."
    )
