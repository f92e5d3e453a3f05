"""The measured model, a random Llama, and its equal-sized micro-batches."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

SEED = 0
_DISK_RESERVE = 1.05


@dataclass(frozen=True)
class Shape:
    """Shape of a random Llama and of its equal-sized micro-batches."""

    hidden: int = 512  # a multiple of ``head_width``
    blocks: int = 8
    vocabulary: int = 8000
    rows: int = 2  # number of rows of a micro-batch
    columns: int = 256  # number of tokens of each row; there is no padding
    micro_batches: int = 4  # number of micro-batches of an optimizer step
    head_width: int = 64  # width of an attention head

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch."""
        return self.rows * self.columns

    @property
    def step_bytes(self) -> int:
        """Minimum bytes on the wire per step: four tensors per micro-batch, 2 bytes per value."""
        return 4 * self.tokens * self.micro_batches * self.hidden * 2

    def save(
        self, directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """Write the model with random weights, drawn on a device; exit if the disk is too full.

        Embedding and output head are separate tensors.
        """
        from transformers import AutoModelForCausalLM, LlamaConfig, logging

        logging.disable_progress_bar()
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.hidden // self.head_width,
            num_key_value_heads=self.hidden // self.head_width,
            max_position_embeddings=max(2048, self.columns),
            tie_word_embeddings=False,
            use_cache=False,
        )
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        needed, free = model.get_memory_footprint(), shutil.disk_usage(directory).free
        if free < _DISK_RESERVE * needed:
            raise SystemExit(
                f"the random weights take {needed / 1e9:.1f} GB and {directory} has "
                f"{free / 1e9:.1f} GB free; set TMPDIR to a larger disk, or choose a smaller --size"
            )
        # Save about one block per file, since a file's pages count as memory while it is read.
        model.save_pretrained(directory, max_shard_size=needed // self.blocks)
