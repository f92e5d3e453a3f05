"""What measurements of split learning train: a random Llama, equal micro-batches, its parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.random_weights import save_random
from finetuning.adapters.adapter import State, attach_adapter, initial_adapter, load_adapter
from finetuning.data.tokenization import Example
from finetuning.model.base_model import loading_arguments, prepare
from finetuning.settings import AdapterSettings, ModelSettings, SplitSettings, TrainSettings
from finetuning.training.loop import Round
from split.client.split_model import ClientRound, SplitModel
from split.lane import dialling
from split.lane.lane import Lane
from split.model.adapters import load_state, take_apart
from split.model.cut import PartyName, cut_of
from split.model.loading import load_parts
from split.model.part import Part
from split.protocol.frames import Limits
from split.protocol.invitation import Invitation
from split.server.block_server import BlockServer

_MODEL = ModelSettings(dtype="float32")
# Nothing here takes that long, and lanes have to outlive all steps of the others.
LIFETIME = 6 * 3600.0
SEED = 0


@dataclass(frozen=True)
class Shape:
    """A random Llama, and the equal micro-batches that it is trained on.

    Attributes:
        hidden: width; a multiple of that of a head.
        blocks: of the whole model.
        vocabulary: tokens.
        rows: of a micro-batch.
        columns: tokens of each row, none of them padding.
        micro_batches: of an optimizer step.
        head_width: of the attention's heads.

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

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the model with random weights; embedding and output head are two tensors.

        Raises:
            SystemExit: the disk has no room for it.

        """
        from transformers import LlamaConfig, logging

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
        save_random(config, directory, dtype, SEED)


@dataclass(frozen=True)
class Job:
    """What is trained, the same for every process.

    Attributes:
        directory: of the checkpoint.
        shape: of the model and its micro-batches.
        steps: optimizer steps.
        adapter: of all blocks.
        train: the optimizer's settings.
        examples: gives the text of a job.
        model: how the weights are held; its name isn't used.
        client_device: of heads and tails, and of a whole model.
        server_device: of the blocks between.

    """

    directory: Path
    shape: Shape
    steps: int
    adapter: AdapterSettings
    train: TrainSettings
    examples: "Callable[[Job], list[Example]]"
    model: ModelSettings = _MODEL
    client_device: str = "cpu"
    server_device: str = "cpu"

    def place(self, first_step: int = 0) -> Round:
        """Give which examples each step is made of, in their order and over again."""
        size = self.shape.rows * self.shape.micro_batches
        count = len(self.examples(self))
        steps = [[i % count for i in range(n * size, (n + 1) * size)] for n in range(self.steps)]
        return Round(steps, first_step, self.steps, SEED, time.monotonic() + LIFETIME)

    def state(self) -> State:
        """Give the adapter that all begin with."""
        return initial_adapter(str(self.directory), self.adapter, SEED, self.directory)[0]


def random_examples(job: Job) -> list[Example]:
    """Draw random tokens for every step; the second half of each example is the answer."""
    shape, generator = job.shape, torch.Generator().manual_seed(SEED)
    size = (shape.rows * shape.micro_batches * job.steps, shape.columns)
    prompt = shape.columns // 2
    is_target = torch.arange(shape.columns) >= prompt
    rows = torch.randint(shape.vocabulary, size, generator=generator)
    return [Example(row, is_target, prompt, "") for row in rows]


def load_whole(job: Job) -> Any:
    """Load the whole model with the adapter."""
    from transformers import AutoModelForCausalLM

    arguments = loading_arguments(job.model, job.client_device)
    model = AutoModelForCausalLM.from_pretrained(job.directory, **arguments)
    prepare(model, job.model)
    peft_model = attach_adapter(model, job.adapter, str(job.directory))
    load_adapter(peft_model, job.state())
    return peft_model


def load_ends(job: Job, split: SplitSettings) -> dict[PartyName, Part]:
    """Load a client's parts, and attach the adapter that all begin with."""
    cut = cut_of(job.directory, split)
    ends = load_parts(job.model, job.directory, cut, ("head", "tail"), [job.client_device])
    parts = take_apart(job.state(), cut)
    for party, part in ends.items():
        part.attach(job.adapter)
        load_state(part.trainable(), parts[party])
    return ends


def open_lane(
    ends: Mapping[PartyName, Part], invitation: Invitation, job: Job, split: SplitSettings
) -> tuple[SplitModel, Lane]:
    """Open a lane and begin the job's round."""
    shape = job.shape
    limits = Limits(shape.hidden, split.wire_dtype, shape.tokens, window=split.window)
    lane = dialling.open_lane(invitation, limits, time.monotonic() + LIFETIME, split.resume_timeout)
    model = SplitModel(ends["head"], ends["tail"], lane, split.frame_timeout)
    model.join(ClientRound(job.steps, 0, job.steps, shape.tokens, 0, time.monotonic() + LIFETIME))
    return model, lane


def load_body(job: Job, split: SplitSettings) -> Part:
    """Load the server's part."""
    cut = cut_of(job.directory, split)
    return load_parts(job.model, job.directory, cut, ("body",), [job.server_device])["body"]


@contextmanager
def serving(
    body: Part, job: Job, split: SplitSettings, clients: Sequence[str]
) -> Iterator[BlockServer]:
    """Serve the body for a round."""
    state = take_apart(job.state(), body.cut)
    server = BlockServer(
        body=body,
        state=state,
        split=split,
        adapter=job.adapter,
        train=job.train.model_copy(update={"local_steps": job.steps}),
        run="bench",
        rounds=2,
        longest=job.shape.tokens,
        minimum=len(clients),
    )
    try:
        server.begin_round(dict.fromkeys(clients, 1), SEED)
        yield server
    finally:
        server.stop()
