"""``chambers chat``: chat with one or several models in the terminal."""

import readline  # noqa: F401 - edits and recalls lines that `input` reads
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, TypeAlias

from chambers.endpoint.models import ModelsOptions
from chambers.errors import CommandError
from chambers.sources import option
from finetuning.errors import UserError

if TYPE_CHECKING:
    from chambers.endpoint.answer_stream import Piece
    from chambers.endpoint.answering import Answerer

_HELP = """\
/use MODEL …     answer with these models side by side; there are {models}
/temperature T   sample at this temperature; 0 is greedy
/new             begin a new conversation
Ctrl-C ends an answer, and Ctrl-D the chat."""


@dataclass(frozen=True, kw_only=True)
class Chat(ModelsOptions):
    """Chat with models in the terminal.

    The first adapter answers, or without adapters, the base model; /use selects others:

    \b
      chambers chat runs/…/adapters/global runs/…/adapters/clients/court
      chambers chat --invitation court.json state/adapters/personalised

    Neither prompts nor answers are logged or written to disk.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    temperature: Annotated[float, option("Sampling temperature; default 0 (greedy).", "T")] = 0.0

    def __call__(self) -> int:
        """Answer each line of standard input."""
        self.check_models()
        prompt = "> " if sys.stdin.isatty() else ""
        with self.answerer(batch_size=1, queue=len(self.adapters or []) + 1) as answerer:
            chat = _Chat(answerer, [next(iter(answerer.sources))])
            chat.set_temperature(str(self.temperature))
            if prompt:
                print(chat.help)
            while True:
                try:
                    line = input(prompt).strip()
                except EOFError:
                    return 0
                try:
                    if line.startswith("/"):
                        chat.obey(line)
                    elif line:
                        chat.answer(line)
                except UserError as error:
                    print(error, file=sys.stderr)


_Pieces: TypeAlias = "SimpleQueue[tuple[str, Piece | Exception]]"  # with the model's name


@dataclass
class _Chat:
    """A conversation with each of the selected models."""

    answerer: "Answerer"
    models: Sequence[str]  # names of the models that answer
    temperature: float = 0.0
    # Turns with each model, in the form of a chat template.
    turns: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    @property
    def help(self) -> str:
        """The commands."""
        return _HELP.format(models=", ".join(self.answerer.sources))

    def obey(self, line: str) -> None:
        """Carry out a command; raise ``CommandError`` if it is unknown or malformed."""
        name, *words = line.split()
        if name == "/use" and words and {*words} <= self.answerer.sources.keys():
            self.models = [*dict.fromkeys(words)]
        elif name == "/temperature" and len(words) == 1:
            self.set_temperature(words[0])
        elif name == "/new":
            self.turns.clear()
        else:
            raise CommandError(self.help)

    def set_temperature(self, text: str) -> None:
        """Set the temperature; raise ``CommandError`` unless it is a number from 0 to 2."""
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= 2:
            raise CommandError(f"temperature {text}: must be a number from 0 to 2")
        self.temperature = temperature

    def answer(self, question: str) -> None:
        """Print the models' answers; raise ``UserError`` if the question can't be answered."""
        from chambers.endpoint.answer_stream import Request

        pieces: _Pieces = SimpleQueue()
        user = {"role": "user", "content": question}
        asked = {model: [*self.turns.get(model, []), user] for model in self.models}
        requests = []
        for model, turns in asked.items():
            prompt = self.answerer.chat_prompt(turns)
            longest = self.answerer.max_new_tokens(model, len(prompt))

            def emit(piece: "Piece | Exception", model: str = model) -> None:
                pieces.put((model, piece))

            requests.append(Request(model, prompt, longest, emit, self.temperature))
        for request in requests:
            self.answerer.submit(request)
        texts = dict.fromkeys(self.models, "")
        try:
            with suppress(KeyboardInterrupt), _shown(texts) as show:
                _receive(pieces, texts, show)
        finally:
            for request in requests:
                request.cancelled.set()
        for model, text in texts.items():
            self.turns[model] = [*asked[model], {"role": "assistant", "content": text}]


def _receive(pieces: _Pieces, texts: dict[str, str], show: Callable[[str], None]) -> None:
    """Add the pieces to the models' texts until all answers are complete."""
    unfinished = {*texts}
    while unfinished:
        model, piece = pieces.get()
        if isinstance(piece, UserError):
            raise piece
        if isinstance(piece, Exception):
            raise CommandError(f"the answer failed ({type(piece).__name__})") from piece
        texts[model] += piece.text
        show(piece.text)
        if piece.finish_reason:
            unfinished.remove(model)


@contextmanager
def _shown(texts: Mapping[str, str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a new piece of one text, or all texts in columns."""
    if len(texts) == 1:
        yield lambda piece: print(piece, end="", flush=True)
        print()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def table() -> Table:
        columns = Table(*texts, box=None, expand=True, padding=(0, 2, 1, 0))
        columns.add_row(*texts.values())
        return columns

    console = Console(markup=False, emoji=False, highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        yield lambda _: live.update(table(), refresh=True)
