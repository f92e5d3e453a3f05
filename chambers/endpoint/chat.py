"""``chambers chat``: chat with one or several models in the terminal."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

from chambers.endpoint.command import ModelsOptions
from chambers.errors import CommandError, undecodable_input
from chambers.sources import option
from finetuning.errors import UserError

if TYPE_CHECKING:
    from chambers.endpoint.answer_stream import Piece
    from chambers.endpoint.answering import Answerer

_HELP = """\
/use MODEL …     answer with these models side by side, out of {models}
/temperature T   sample at this temperature; 0 is greedy
/new             begin a new conversation
Ctrl-C ends an answer, and Ctrl-D the chat."""


@dataclass(frozen=True, kw_only=True)
class Chat(ModelsOptions):
    """Chat with models in the terminal.

    The first adapter answers or, without adapters, the base model; /use selects others:

    \b
      chambers chat runs/…/adapters/global runs/…/adapters/clients/court
      chambers chat --invitation court.json state/adapters/personalised

    Neither prompts nor answers are logged or written to disk.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    temperature: Annotated[float, option("Sampling temperature; default 0 (greedy).", "T")] = 0.0

    def __call__(self) -> int:
        """Answer each line of standard input."""
        temperature = _temperature(str(self.temperature))
        self.check_models()
        prompt = "> " if sys.stdin.isatty() else ""
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 - adds line editing and history to `input`
        with self.answerer(batch_size=1, queue=len(self.adapters or []) + 1) as answerer:
            chat = _Chat(answerer, [next(iter(answerer.sources))], temperature)
            if prompt:
                print(chat.help)
            while True:
                try:
                    line = input(prompt).lstrip("\ufeff").strip()
                except EOFError:
                    return 0
                except UnicodeDecodeError as error:
                    raise undecodable_input(error) from error
                try:
                    if line.startswith("/"):
                        chat.obey(line)
                    elif line:
                        chat.answer(line)
                except UserError as error:
                    print(error, file=sys.stderr)


@dataclass
class _Chat:
    """A conversation with each of the selected models."""

    answerer: "Answerer"
    models: Sequence[str]  # names of the models that answer
    temperature: float
    # Messages by model, in the format of chat templates.
    turns: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    @property
    def help(self) -> str:
        """Help for the chat's commands."""
        return _HELP.format(models=", ".join(self.answerer.sources))

    def obey(self, line: str) -> None:
        """Carry out a command; raise ``CommandError`` if it is unknown or malformed."""
        name, *words = line.split()
        if name == "/use" and words and {*words} <= self.answerer.sources.keys():
            self.models = [*dict.fromkeys(words)]
        elif name == "/temperature" and len(words) == 1:
            self.temperature = _temperature(words[0])
        elif name == "/new":
            self.turns.clear()
        else:
            raise CommandError(self.help)

    def answer(self, question: str) -> None:
        """Print the models' answers; raise ``UserError`` if the question can't be answered."""
        from chambers.endpoint.answer_stream import Request
        from finetuning.data.prompts import chat_prompt

        pieces: SimpleQueue[tuple[str, Piece | Exception]] = SimpleQueue()  # with the model's name
        user = {"role": "user", "content": question}
        asked = {model: [*self.turns.get(model, []), user] for model in self.models}
        requests = []
        for model, turns in asked.items():
            prompt = chat_prompt(turns, self.answerer.tokenizer)
            longest = self.answerer.max_new_tokens(model, len(prompt))

            def emit(piece: "Piece | Exception", model: str = model) -> None:
                pieces.put((model, piece))

            requests.append(Request(model, prompt, longest, emit, self.temperature))
        for request in requests:
            self.answerer.submit(request)
        texts, unfinished = dict.fromkeys(self.models, ""), {*self.models}
        try:
            with suppress(KeyboardInterrupt):
                while unfinished:
                    model, piece = pieces.get()
                    if isinstance(piece, Exception):
                        known = isinstance(piece, UserError)
                        raise piece if known else CommandError(f"the answer failed: {piece!r}")
                    texts[model] += piece.text
                    if len(texts) == 1:
                        print(piece.text, end="", flush=True)
                    if piece.finish_reason:
                        unfinished.remove(model)
        finally:
            for request in requests:
                request.cancelled.set()
        print() if len(texts) == 1 else _print_columns(texts)
        for model, text in texts.items():
            if text.strip():  # a prompt can't contain empty answers
                self.turns[model] = [*asked[model], {"role": "assistant", "content": text}]


def _temperature(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 2:
            return float(text)
    raise CommandError(f"temperature {text}: must be a number from 0 to 2")


def _print_columns(texts: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*texts, box=None, expand=True, padding=(0, 2, 1, 0))
    table.add_row(*texts.values())
    Console(markup=False, emoji=False, highlight=False).print(table)
