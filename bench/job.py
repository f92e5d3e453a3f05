"""The training that is measured: a random Llama on equal micro-batches, whole or in parts."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetuning.adapters.adapter import (
    State,
    attach_adapter,
    initial_adapter,
    load_adapter,
    load_state,
)
from finetuning.data.tokenization import Example
from finetuning.model.base_model import loading_arguments, prepare
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import RoundPlan
from split.client.split_model import ClientRound, SplitModel
from split.lane.dialling import open_lane
from split.model.adapters import take_apart
from split.model.loading import load_parts
from split.model.part import Part
from split.model.partition import PartyName, partition_of
from split.protocol.frames import Limits
from split.protocol.invitation import Invitation
from split.server.block_server import BlockServer
from split.settings import SplitSettings

ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0, targets="q_proj,k_proj,v_proj")
FLOAT32 = ModelSettings(dtype="float32")
LIFETIME = 6 * 3600.0  # of tickets and lanes, in seconds: longer than any measurement
SEED = 0
_STANDARD_DEVIATION = 0.02  # of the weights, as usual for untrained models
_DISK_RESERVE = 1.05


@dataclass(frozen=True)
class Shape:
    """A random Llama, and the equal micro-batches that it is trained on.

    Attributes:
        hidden: Hidden size; a multiple of ``head_width``.
        blocks: Number of blocks of the whole model.
        vocabulary: Number of tokens.
        rows: Rows of a micro-batch.
        columns: Tokens of each row, none of them padding.
        micro_batches: Number of micro-batches of an optimizer step.
        head_width: Width of the attention heads.

    """

    hidden: int = 512
    blocks: int = 8
    vocabulary: int = 8000
    rows: int = 2
    columns: int = 256
    micro_batches: int = 4
    head_width: int = 64

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.columns

    @property
    def step_bytes(self) -> int:
        """Least bytes on the wire per step: four tensors per micro-batch, 2 bytes per number."""
        return 4 * self.tokens * self.micro_batches * self.hidden * 2

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the model with random weights, holding no more than one block in memory.

        Matrices are drawn from a normal distribution, norms are ones; embedding and output head
        are two tensors.

        Raises:
            SystemExit: The disk has too little room.

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
    """Return a tensor's name up to its block's number, or the whole name outside the blocks."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype)
    weights = torch.empty(like.shape, dtype=like.dtype)
    return weights.normal_(0.0, _STANDARD_DEVIATION, generator=generator)


def _check_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < _DISK_RESERVE * needed:
        raise SystemExit(
            f"the random weights take {needed / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} "
            "GB free; set TMPDIR to a larger disk, or choose a smaller --size"
        )


@dataclass(frozen=True)
class Job:
    """The training, the same for every process.

    Attributes:
        directory: Directory of the checkpoint.
        shape: Shape of the model and its micro-batches.
        steps: Number of optimizer steps.
        examples: Function that returns a job's examples.
        adapter: Adapter of all blocks.
        learning_rate: Learning rate of the optimizer.
        model: Precision and quantisation; its name is not used.
        client_device: Device of heads, tails and whole models.
        server_device: Device of the blocks between.

    """

    directory: Path
    shape: Shape
    steps: int
    examples: "Callable[[Job], list[Example]]"
    adapter: AdapterSettings = ADAPTER
    learning_rate: float = 2e-4
    model: ModelSettings = FLOAT32
    client_device: str = "cpu"
    server_device: str = "cpu"

    @property
    def train(self) -> TrainSettings:
        """The settings of the optimizer."""
        return TrainSettings(
            batch_size=self.shape.rows,
            accumulation=self.shape.micro_batches,
            learning_rate=self.learning_rate,
        )

    def place(self) -> RoundPlan:
        """Return which examples each step consists of: all in order, repeatedly."""
        size = self.shape.rows * self.shape.micro_batches
        count = len(self.examples(self))
        steps = [[i % count for i in range(n * size, (n + 1) * size)] for n in range(self.steps)]
        return RoundPlan(
            steps=steps,
            first_step=0,
            total_steps=self.steps,
            seed=SEED,
            deadline=time.monotonic() + LIFETIME,
        )

    def state(self) -> State:
        """Return the initial adapter of all parties."""
        return initial_adapter(
            name=str(self.directory), settings=self.adapter, seed=SEED, directory=self.directory
        )[0]


def random_examples(job: Job) -> list[Example]:
    """Draw random tokens for every step; the second half of each example is the target."""
    shape, generator = job.shape, torch.Generator().manual_seed(SEED)
    size = (shape.rows * shape.micro_batches * job.steps, shape.columns)
    return as_examples(torch.randint(shape.vocabulary, size, generator=generator))


def as_examples(rows: torch.Tensor) -> list[Example]:
    """Turn tokens of shape (examples, columns) into examples; the second half is the target."""
    prompt = rows.shape[1] // 2
    is_target = torch.arange(rows.shape[1]) >= prompt
    return [
        Example(tokens=tokens, is_target=is_target, prompt_length=prompt, reference="", row=row)
        for row, tokens in enumerate(rows)
    ]


@contextmanager
def random_job(
    shape: Shape,
    steps: int,
    examples: Callable[[Job], list[Example]] = random_examples,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Iterator[Job]:
    """Write a random checkpoint to a temporary directory, and return a job for it."""
    with tempfile.TemporaryDirectory() as directory:
        shape.save(Path(directory), dtype)
        yield Job(
            directory=Path(directory), shape=shape, steps=steps, examples=examples, **settings
        )


def load_whole(job: Job) -> Any:
    """Load the whole model with the initial adapter."""
    from transformers import AutoModelForCausalLM

    arguments = loading_arguments(job.model, job.client_device)
    model = AutoModelForCausalLM.from_pretrained(job.directory, **arguments)
    prepare(model, job.model)
    peft_model = attach_adapter(model, job.adapter, str(job.directory))
    load_adapter(peft_model, job.state())
    return peft_model


def load_ends(job: Job, split: SplitSettings) -> dict[PartyName, Part]:
    """Load a client's head and tail with the initial adapter."""
    partition = partition_of(job.directory, split)
    ends = load_parts(
        settings=job.model,
        directory=job.directory,
        partition=partition,
        parties=("head", "tail"),
        devices=[job.client_device],
    )
    parts = take_apart(job.state(), partition)
    for party, part in ends.items():
        part.attach(job.adapter)
        load_state(part.trainable(), parts[party])
    return ends


def load_body(job: Job, split: SplitSettings) -> Part:
    """Load the server's blocks."""
    partition = partition_of(job.directory, split)
    return load_parts(
        settings=job.model,
        directory=job.directory,
        partition=partition,
        parties=("body",),
        devices=[job.server_device],
    )["body"]


def open_model(
    ends: Mapping[PartyName, Part],
    invitation: Invitation,
    job: Job,
    split: SplitSettings,
    noise: float = 0.0,
) -> SplitModel:
    """Open a lane to the block server, and return a split model that uses it."""
    limits = Limits(job.shape.hidden, split.wire_dtype, job.shape.tokens, window=split.window)
    lane = open_lane(
        invitation=invitation,
        limits=limits,
        deadline=time.monotonic() + LIFETIME,
        resume_timeout=split.resume_timeout,
    )
    return SplitModel(
        head=ends["head"],
        tail=ends["tail"],
        lane=lane,
        frame_timeout=split.frame_timeout,
        noise=noise,
    )


def join(model: SplitModel, job: Job) -> None:
    """Begin the job's round of training."""
    model.join(
        ClientRound(
            steps=job.steps,
            first_step=0,
            total_steps=job.steps,
            longest=job.shape.tokens,
            average_every=0,
            deadline=time.monotonic() + LIFETIME,
        )
    )


@contextmanager
def serving(
    body: Part, job: Job, split: SplitSettings, clients: int, most_kept: int = 0
) -> Iterator[BlockServer]:
    """Serve the blocks to the clients; generation keeps at most ``most_kept`` tokens."""
    server = BlockServer(
        body=body,
        state=take_apart(job.state(), body.partition),
        split=split,
        adapter=job.adapter,
        train=job.train.model_copy(update={"local_steps": job.steps}),
        run="bench",
        rounds=2,
        longest=job.shape.tokens,
        minimum=clients,
        most_kept=most_kept,
    )
    try:
        yield server
    finally:
        server.stop()
