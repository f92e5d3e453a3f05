"""Find and load models, either whole or with the middle blocks at a block server."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chambers.errors import CommandError, first_problem, read_bytes
from chambers.lane_model import LaneModel, explain_lane_error
from chambers.model_source import NO_LIMIT, ModelSource
from chambers.sources import (
    AdapterOptions,
    absolute_name,
    find_run,
    refuse_other_base,
    split_adapter,
)
from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import SavedAdapter, read_adapter
from finetuning.data.formats import format_of
from finetuning.data.tokenization import tokenize
from finetuning.model.base_model import load_base_model, outline
from finetuning.model.drafts import RowDrafts
from finetuning.model.fingerprint import fingerprint
from finetuning.model.interface import TextModel
from finetuning.model.locating import locate
from finetuning.model.positions import check_positions
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import DataSettings, ModelSettings
from finetuning.tasks.reading import read_task_rows
from finetuning.whole_model import WholeModel
from split.model.adapters import body_digest
from split.model.exactness import check_exactness
from split.model.loading import load_parts, locate_parts, tensors_of
from split.model.partition import Partition, PartyName, partition_of
from split.protocol.errors import LaneError
from split.protocol.standing_invitation import StandingInvitation

_CLIENT_PARTS: tuple[PartyName, ...] = ("head", "tail")
MAX_DRAFTED = 8  # maximum number of tokens per draft


def find_source(options: AdapterOptions, invitation_file: Path | None) -> ModelSource:
    """Find the model named by the options; raise ``UserError`` if its parts don't match.

    With an invitation to a block server, only the head and tail need to be on this machine.
    """
    adapter = read_adapter(options.adapter) if options.adapter else None
    if invitation_file:
        return _find_ends(options, adapter, read_invitation(invitation_file))
    run = find_run(adapter)
    settings = options.settings(adapter, run)
    directory = locate(settings.name)
    if run is not None:
        refuse_other_base(fingerprint(directory), run.digests, f"that of {run.directory}")
    return ModelSource(settings, directory, adapter)


def read_invitation(file: Path) -> StandingInvitation:
    """Read an invitation; raise ``CommandError`` if it is unreadable, invalid or expired."""
    try:
        invitation = StandingInvitation.model_validate_json(read_bytes(file))
    except ValidationError as error:
        raise CommandError(
            f"{file} is not an invitation that `chambers serve` has written "
            f"({first_problem(error)}); ask for the file again"
        ) from None
    if invitation.expires <= datetime.now(UTC):
        raise CommandError(
            f"the invitation {file} expired on {invitation.expires:%Y-%m-%d at %H:%M} UTC; ask the "
            "coordinator for a new one"
        )
    return invitation


def check_length(
    source: ModelSource, longest: tuple[int, str], new_tokens: int, batch_tokens: int = NO_LIMIT
) -> None:
    """Check the length of the longest prompt before the model is loaded.

    ``longest`` is the prompt's number of tokens and its origin; at most ``new_tokens`` are added.

    Raise ``BaseModelError`` if prefix, prompt and new tokens exceed the positions of the base
    model. Raise ``CommandError`` if the same sum exceeds ``--batch-tokens`` or the block server's
    limits.
    """
    tokens, origin = longest
    row = {"the prefix": source.columns_before} if source.columns_before else {}
    row[f"the tokens of {origin}"] = tokens
    if new_tokens:
        row["--max-new-tokens"] = new_tokens
    check_positions(source.directory, row)
    if tokens > source.max_prompt_length:
        raise CommandError(
            f"{origin} has {tokens} tokens, but the block server allows only "
            f"{source.max_prompt_length} in a prompt; shorten it"
        )
    total = sum(row.values())
    needed = f"{' and '.join(f'{name} ({n})' for name, n in row.items())} add up to {total}"
    if total > batch_tokens:
        raise CommandError(f"{needed}, but --batch-tokens allows only {batch_tokens}; raise it")
    if total > source.max_tokens:
        cure = f"shorten {origin}{', or lower --max-new-tokens' if new_tokens else ''}"
        raise CommandError(f"{needed}, but the block server allows {source.max_tokens}; {cure}")


@contextmanager
def load_source(source: ModelSource) -> Iterator[TextModel]:
    """Load the model, or load its head and tail and open a lane; raise ``UserError`` on failure."""
    invitation = source.invitation
    if invitation is None:
        yield _whole(source)
        return
    client_parts = load_parts(
        settings=source.settings,
        directory=source.directory,
        partition=_partition_of(invitation),
        parties=_CLIENT_PARTS,
    )
    for part in client_parts.values():
        if source.adapter is not None:
            part.attach(source.adapter.settings)
    try:
        with closing(LaneModel(client_parts, source, invitation)) as model:
            yield model
            with suppress(LaneError):  # errors are unimportant: all texts have arrived
                model.end()
    except LaneError as error:
        raise explain_lane_error(error, invitation) from error


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``generate``
    room: int = 0  # number of drafted tokens by which a text may exceed its maximum length


NO_DRAFT = Draft()


def find_draft(name: str | None, tokenizer: Any, sources: Collection[ModelSource]) -> Draft:
    """Return the ``Draft`` that ``--draft`` selects; load the rows or small model that it names.

    If one of the models, which have the same base, can't verify drafts, print that and return
    `NO_DRAFT`. Raise a ``UserError`` if rows can't be read, or the tokenizer or the vocabulary of
    the small model differs from theirs.
    """
    if name is None:
        return NO_DRAFT
    base = outline(next(iter(sources)).directory)
    # PEFT's prefixes allow only one token per forward pass.
    prefixes = any(each.columns_before and each.invitation is None for each in sources)
    if base._is_stateful or prefixes:
        kind = "a prefix adapter on a whole model" if prefixes else "recurrent layers"
        print(f"--draft has no effect with {kind}", file=sys.stderr)
        return NO_DRAFT
    settings: dict[str, Any] = {
        "prompt_lookup_num_tokens": MAX_DRAFTED,
        "max_matching_ngram_size": 4,
    }
    if format_of(Path(name)):
        settings["row_drafts"] = _row_drafts(Path(name), tokenizer, next(iter(sources)))
    if name == "prompt" or "row_drafts" in settings:
        return Draft(settings, room=MAX_DRAFTED)
    small = load_base_model(ModelSettings(name=absolute_name(name)))
    if load_tokenizer(small.directory).get_vocab() != tokenizer.get_vocab():
        raise CommandError(f"--draft {name}: its tokenizer is not that of the model")
    own, other = (m.get_input_embeddings().num_embeddings for m in (small.model, base))
    if small.model._is_stateful:
        raise CommandError(f"--draft {name}: its recurrent layers can't take back tokens")
    if own != other:
        raise CommandError(f"--draft {name}: its vocabulary has {own} tokens, the model's {other}")
    return Draft({"assistant_model": small.model})


def _row_drafts(file: Path, tokenizer: Any, source: ModelSource) -> RowDrafts:
    """Read rows in the format of the adapter's run, and make a table for drafts."""
    run = find_run(source.adapter)
    config = dict(run.config) if run else {}
    own = {key: config.get(f"data.{key}", "") for key in ("task", "columns")}
    rows = read_task_rows(file.expanduser(), DataSettings.model_validate(own))
    return RowDrafts(tokenize(rows, tokenizer)[0])


def _find_ends(
    options: AdapterOptions, adapter: SavedAdapter | None, invitation: StandingInvitation
) -> ModelSource:
    run = find_run(adapter)
    settings = options.settings(adapter, run, invitation.model)
    directory = locate_parts(settings.name, invitation.split, _CLIENT_PARTS)
    partition = partition_of(directory, invitation.split)
    whose = f"that of the block server at {invitation.address}"
    if partition != _partition_of(invitation):
        raise CommandError(
            f"the base model here is not {whose}: it has {partition.blocks} blocks, not "
            f"{invitation.blocks}; name the same checkpoint with --model ({invitation.model})"
        )
    own = fingerprint(directory, tensors_of(directory, partition, _CLIENT_PARTS))
    refuse_other_base(own, invitation.digests, whose)
    if run is not None:
        refuse_other_base(own, run.digests, f"that of {run.directory}")
    prefixes = adapter is not None and adapter.settings.kind == "prefix"
    check_exactness(directory, settings, partition, prefixes, generation=True)
    bare = ModelSource(settings, directory, invitation=invitation)
    if adapter is None:
        return bare
    parts = split_adapter(adapter, partition)
    digest = body_digest(adapter.settings, parts["body"])
    chosen = next((name for name, served in invitation.models.items() if served == digest), None)
    if chosen is None:
        raise CommandError(
            f"the adapter in {adapter.directory} matches none of the models that the block server "
            f"has for {invitation.client} ({', '.join(invitation.models)}): its weights of the "
            "middle blocks are different. Use the served run's global adapter or your personalised "
            "one, or ask the coordinator to serve this adapter's run"
        )
    client_adapter = parts["head"] | parts["tail"]
    return replace(bare, adapter=adapter, chosen=chosen, client_adapter=client_adapter)


def _whole(source: ModelSource) -> WholeModel:
    try:
        base = load_base_model(source.settings)
        if source.adapter is None:
            return WholeModel(base.model)
        model = attach_adapter(base.model, source.adapter.settings, base.reference)
        load_adapter(model, source.adapter.state)
    except ValueError as error:  # includes BaseModelError
        problem = f"the base model {source.settings.name} can't be used"
        if source.adapter is not None:
            problem += f", or the adapter in {source.adapter.directory} is for a different one"
        raise CommandError(f"{problem}: {error}") from error
    return WholeModel(model)


def _partition_of(invitation: StandingInvitation) -> Partition:
    return Partition(invitation.blocks, invitation.head_blocks, invitation.tail_blocks)
