"""Training of a random Llama in measurements: as a whole model, or split between two parties."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetuning.adapters.adapter import (
    State,
    attach_adapter,
    initial_adapter,
    load_adapter,
    load_state,
    trainable_parameters,
)
from finetuning.data.tokenization import Example
from finetuning.files import filling
from finetuning.model.base_model import freeze, loading_arguments
from finetuning.model.interface import TrainableModel
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.optimization import OptimizerState
from finetuning.whole_model import WholeModel
from split.client.connecting import connect
from split.client.split_model import SplitModel
from split.model.adapters import take_apart
from split.model.loading import load_parts
from split.model.part import Part
from split.model.partition import PartyName, partition_of
from split.protocol.tickets import Invitation
from split.protocol.training import RoundPlan
from split.server.block_server import BlockServer
from split.settings import SplitSettings

SEED = 0
_ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0, targets="q_proj,k_proj,v_proj")
FLOAT32 = ModelSettings(dtype="float32")
LIFETIME = 6 * 3600.0  # of tickets and lanes, in seconds; longer than any measurement takes


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

    def save(self, directory: Path, dtype: torch.dtype, device: str) -> None:
        """Write the model with random weights, drawn on a device.

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
        # Save about one block per file, since a file's pages count as memory while it is read.
        of_a_block = model.get_memory_footprint() // self.blocks
        with filling(directory):
            model.save_pretrained(directory, max_shard_size=of_a_block)


def random_examples(job: "TrainingJob") -> list[Example]:
    """Draw random tokens for every step; the second half of each example is the target."""
    shape, generator = job.shape, torch.Generator().manual_seed(job.seed)
    size = (shape.rows * shape.micro_batches * job.steps, shape.columns)
    prompt = shape.columns // 2
    is_target = torch.arange(shape.columns) >= prompt
    return [
        Example(tokens=tokens, is_target=is_target, prompt_length=prompt, reference="", row=row)
        for row, tokens in enumerate(torch.randint(shape.vocabulary, size, generator=generator))
    ]


@dataclass(frozen=True)
class TrainingJob:
    """A training job: checkpoint, examples, number of steps, settings, devices and seed."""

    directory: Path  # directory of the checkpoint
    shape: Shape
    steps: int  # number of optimizer steps
    examples: "Callable[[TrainingJob], list[Example]]" = random_examples
    adapter: AdapterSettings = _ADAPTER
    learning_rate: float = 2e-4
    model: ModelSettings = FLOAT32  # the model's name is not used
    client_device: str = "cpu"  # device of heads, tails and whole models
    server_device: str = "cpu"
    seed: int = SEED  # seed of random examples, the initial adapter and dropout

    @property
    def settings(self) -> TrainSettings:
        """The settings of the optimizer."""
        return TrainSettings(
            batch_size=self.shape.rows,
            accumulation=self.shape.micro_batches,
            learning_rate=self.learning_rate,
        )

    def state(self) -> State:
        """Return the initial adapter of all parties."""
        return initial_adapter(str(self.directory), self.adapter, self.seed, self.directory)[0]


@contextmanager
def random_job(
    shape: Shape,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Iterator[TrainingJob]:
    """Write a random checkpoint to a temporary directory, and yield a job with these settings."""
    with tempfile.TemporaryDirectory() as directory:
        job = TrainingJob(Path(directory), shape, steps, **settings)
        shape.save(job.directory, dtype, job.client_device)
        if job.client_device != "cpu":
            torch.accelerator.empty_cache()  # for other processes
        yield job


class Course:
    """A job's training, some steps at a time.

    ``steps`` are the indices of each step's examples; by default, steps take the examples in order,
    cyclically.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: TrainableModel,
        parameters: Mapping[str, torch.nn.Parameter],
        padding: int = 0,
        steps: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._job, self._examples = job, job.examples(job)
        self._model, self._parameters, self._padding = model, parameters, padding
        size = job.shape.rows * job.shape.micro_batches
        order = [index % len(self._examples) for index in range(job.steps * size)]
        self._steps = steps or [order[n : n + size] for n in range(0, len(order), size)]
        self._done = 0
        self._state: OptimizerState | None = None

    def train(self, count: int) -> list[float]:
        """Train the next steps, and return their losses."""
        job, deadline = self._job, time.monotonic() + LIFETIME
        steps = self._steps[self._done : self._done + count]
        report, self._state = train_round(
            model=self._model,
            parameters=self._parameters,
            examples=self._examples,
            padding=self._padding,
            local_round=LocalRound(steps, self._done, job.steps, job.seed, deadline),
            settings=job.settings,
            optimizer_state=self._state,
        )
        self._done += count
        return report.losses


def load_whole(job: TrainingJob) -> Any:
    """Load the whole model with the initial adapter."""
    from transformers import AutoModelForCausalLM

    arguments = loading_arguments(job.model, job.client_device)
    model = AutoModelForCausalLM.from_pretrained(job.directory, **arguments)
    freeze(model, job.model)
    peft_model = attach_adapter(model, job.adapter, str(job.directory))
    load_adapter(peft_model, job.state())
    return peft_model


def whole_course(job: TrainingJob, steps: Sequence[Sequence[int]] | None = None) -> Course:
    """Load the whole model, and return its course."""
    model = load_whole(job)
    return Course(job, WholeModel(model), trainable_parameters(model), steps=steps)


def load_client_parts(job: TrainingJob, split: SplitSettings) -> dict[PartyName, Part]:
    """Load a client's head and tail with the initial adapter."""
    partition, devices = partition_of(job.directory, split), [job.client_device]
    ends = load_parts(job.model, job.directory, partition, ("head", "tail"), devices)
    parts = take_apart(job.state(), partition)
    for party, part in ends.items():
        part.attach(job.adapter)
        load_state(part.trainable(), parts[party])
    return ends


def load_server_part(job: TrainingJob, split: SplitSettings) -> Part:
    """Load the server's blocks."""
    partition, devices = partition_of(job.directory, split), [job.server_device]
    return load_parts(job.model, job.directory, partition, ("body",), devices)["body"]


def open_model(
    ends: Mapping[PartyName, Part],
    invitation: Invitation,
    job: TrainingJob,
    split: SplitSettings,
    noise: float = 0.0,
) -> AbstractContextManager[SplitModel]:
    """Connect to the block server; see ``split.client.connecting.connect``."""
    return connect(
        invitation=invitation,
        parts=ends,
        split=split,
        max_batch_tokens=job.shape.tokens,
        deadline=time.monotonic() + LIFETIME,
        noise=noise,
    )


def join_round(model: SplitModel, job: TrainingJob) -> None:
    """Start the job's training round."""
    plan = RoundPlan(steps=job.steps, first_step=0, total_steps=job.steps, seed=job.seed)
    model.join(plan, max_batch_tokens=job.shape.tokens, deadline=time.monotonic() + LIFETIME)


def start_block_server(
    body: Part, job: TrainingJob, split: SplitSettings, clients: int
) -> BlockServer:
    """Serve the blocks to the clients."""
    return BlockServer(
        body=body,
        state=take_apart(job.state(), body.partition),
        split=split,
        adapter=job.adapter,
        train=job.settings.model_copy(update={"local_steps": job.steps}),
        run="bench",
        max_batch_tokens=job.shape.tokens,
        max_columns=job.shape.columns,
        minimum=clients,
        max_cached_tokens=job.shape.tokens,
    )
