"""What a model is loaded from: its base model, its adapter, and a block server if it is split."""

from dataclasses import dataclass, replace
from pathlib import Path

from chambers.sources import find_run
from finetuning.adapters.adapter import State
from finetuning.adapters.saved import SavedAdapter
from finetuning.model.names import public_name
from finetuning.settings import ModelSettings
from split.protocol.standing_invitation import StandingInvitation

NO_LIMIT = 2**31


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights have not been loaded yet."""

    settings: ModelSettings
    directory: Path  # contains the base model, or the client's parts
    adapter: SavedAdapter | None = None  # None for the base model alone
    invitation: StandingInvitation | None = None  # to the block server; None for a whole model
    chosen: str = "base"  # name of the model at the server
    client_adapter: State | None = None  # the adapter's part for the head and tail

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before the tokens of each row."""
        return self.adapter.settings.columns_before if self.adapter else 0

    @property
    def description(self) -> str:
        """A sentence that says what the model is, without paths of this machine."""
        base = public_name(self.settings.name)
        if self.adapter is None:
            adapter = f"the adapter {self.chosen}" if self.chosen != "base" else "no adapter"
        else:
            run, name = find_run(self.adapter), self.adapter.directory.name
            kind = "global" if name == "global" else f"personalised ({name})"
            adapter = f"the adapter {name}"
            if run:
                adapter = f"the {kind} adapter of the run {run.directory.name}"
        where = "; a block server computes its middle blocks" if self.invitation else ""
        return f"{base} with {adapter}{where}."

    @property
    def bare(self) -> "ModelSource":
        """The same source without an adapter."""
        return replace(self, adapter=None, chosen="base", client_adapter=None)

    @property
    def max_tokens(self) -> int:
        """Maximum number of padded tokens in a batch, prefixes and answers included."""
        return self.invitation.max_tokens if self.invitation else NO_LIMIT

    @property
    def max_prompt_length(self) -> int:
        """Maximum number of tokens in a prompt."""
        return self.invitation.max_prompt_length if self.invitation else NO_LIMIT
