"""The measured model, a random Llama, and its equal-sized micro-batches."""

import json
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file

SEED = 0
_STANDARD_DEVIATION = 0.02  # of the weights, as usual for untrained models
_DISK_RESERVE = 1.05


@dataclass(frozen=True)
class Shape:
    """Shape of a random Llama and of its equal-sized micro-batches."""

    hidden: int = 512  # a multiple of ``head_width``
    blocks: int = 8
    vocabulary: int = 8000
    rows: int = 2  # of a micro-batch
    columns: int = 256  # tokens of each row, without padding
    micro_batches: int = 4  # of an optimizer step
    head_width: int = 64  # of the attention heads

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch."""
        return self.rows * self.columns

    @property
    def step_bytes(self) -> int:
        """Minimum bytes on the wire per step: four tensors per micro-batch, 2 bytes per value."""
        return 4 * self.tokens * self.micro_batches * self.hidden * 2

    @classmethod
    def of_checkpoint(cls, directory: Path, rows: int, columns: int) -> "Shape":
        """Return the shape of an existing checkpoint, with one micro-batch per step."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory)
        sizes = (config.hidden_size, config.num_hidden_layers, config.vocab_size)
        return cls(*sizes, rows, columns, micro_batches=1)

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the model with random weights, with at most one block in memory.

        Matrices are drawn from a normal distribution, norm weights are ones; embedding and output
        head are separate tensors.

        Raises:
            SystemExit: The disk has too little space.

        """
        from transformers import AutoModelForCausalLM, LlamaConfig, logging

        logging.disable_progress_bar()
        config = LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.hidden // self.head_width,
            num_key_value_heads=self.hidden // self.head_width,
            max_position_embeddings=self.columns,
            tie_word_embeddings=False,
            use_cache=False,
            dtype=dtype,
        )
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config).to(dtype).state_dict()
        _check_disk(directory, sum(t.numel() for t in shapes.values()) * dtype.itemsize)
        config.save_pretrained(directory)
        generator = torch.Generator().manual_seed(SEED)
        files: dict[str, str] = {}
        for number, (_, names) in enumerate(groupby(shapes, _block)):
            tensors = {name: _draw(shapes[name], generator) for name in names}
            file = f"model-{number:05}.safetensors"
            save_file(tensors, directory / file, metadata={"format": "pt"})
            files |= dict.fromkeys(tensors, file)
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _block(name: str) -> str:
    """Return a tensor's name up to the block number, or its whole name outside the blocks."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        return torch.ones_like(like, device="cpu")
    weights = torch.empty_like(like, device="cpu")
    return weights.normal_(0.0, _STANDARD_DEVIATION, generator=generator)


def _check_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < _DISK_RESERVE * needed:
        raise SystemExit(
            f"the random weights take {needed / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} "
            "GB free; set TMPDIR to a larger disk, or choose a smaller --size"
        )
