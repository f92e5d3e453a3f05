"""``chambers generate``: generate text with a whole or a split model."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from chambers.errors import CommandError, undecodable_input
from chambers.sources import (
    DRAFT,
    INVITATION,
    AdapterOptions,
    argument,
    check_output,
    count,
    option,
)
from finetuning.data.prompts import prompt_rows, read_prompts, tokenize_prompts
from finetuning.data.rows import Row
from finetuning.files import filling, json_text

if TYPE_CHECKING:
    from chambers.model_source import ModelSource
    from chambers.models import Draft


@dataclass(frozen=True, kw_only=True)
class Generate(AdapterOptions):
    """Generate text with a fine-tuned model.

    With the whole model on this machine, and an adapter that a run has exported:

    \b
      chambers generate --adapter runs/…/adapters/global "Is the contract void?"
      chambers generate --adapter … --file questions.jsonl --output answers.jsonl

    Or with the first and last blocks on this machine, and the middle blocks at a block server
    (chambers serve) that has issued an invitation:

    \b
      chambers generate --invitation court.json --adapter … "Is the contract void?"

    Without PROMPT and --file, each line of standard input is a prompt. Prompts are formatted in the
    same way as in training. Only the texts are written to standard output, in the order of the
    prompts.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    prompts: Annotated[list[str] | None, argument("[PROMPT]…")] = None
    file: Annotated[
        Path | None,
        option(
            "Read prompts from rows like those of training data: instruction and input, or "
            "messages (JSONL, JSON, CSV, Parquet). Answers are ignored.",
            "F.jsonl",
        ),
    ] = None
    output: Annotated[
        Path | None,
        option('Write rows with the key "generated" to this file instead of printing.', "F.jsonl"),
    ] = None
    invitation: Annotated[Path | None, INVITATION] = None
    max_new_tokens: Annotated[int, count("Maximum tokens per answer; default 256.")] = 256
    temperature: Annotated[float, option("Sampling temperature; default 0 (greedy).", "T")] = 0.0
    top_p: Annotated[
        float,
        option("Sample from the likeliest tokens with a total probability of P; default 1.", "P"),
    ] = 1.0
    seed: Annotated[int, option("Seed for sampling; default 0.", "N")] = 0
    batch_size: Annotated[
        int, count("Number of prompts in a batch; default 8, but always 1 with --draft.")
    ] = 8
    draft: Annotated[str | None, DRAFT] = None

    def __call__(self) -> int:
        """Generate the texts."""
        self._check()
        rows = self._rows()
        from chambers.models import check_length, find_draft, find_source, load_source
        from finetuning.model.tokenizer import load_tokenizer

        source = find_source(self, self.invitation)
        tokenizer = load_tokenizer(source.directory)
        prompts = tokenize_prompts(rows, tokenizer)
        lengths = [(len(prompt), row.origin) for prompt, row in zip(prompts, rows, strict=True)]
        draft = find_draft(self.draft, tokenizer, [source])
        check_length(source, max(lengths), self.max_new_tokens + draft.room)
        if source.adapter is None:
            print("no --adapter: the base model answers", file=sys.stderr)
        with load_source(source) as model, ExitStack() as stack:
            output: TextIO = sys.stdout
            if self.output:
                stack.enter_context(filling(self.output.absolute().parent))
                # Text may contain unpaired surrogates; backslashreplace escapes them as JSON does.
                file = self.output.open("w", encoding="utf-8", errors="backslashreplace")
                output = stack.enter_context(file)
            texts = self._texts(model, tokenizer, prompts, source, draft)
            for row, text in zip(rows, texts, strict=True):
                line = json_text(row.fields | {"generated": text}) if self.output else text
                print(line, file=output, flush=True)
        return 0

    def _check(self) -> None:
        """Refuse invalid options, and files and folders that don't exist."""
        if not 0 <= self.temperature < math.inf:
            raise CommandError(f"--temperature {self.temperature:g}: must be 0 or more, and finite")
        if not 0 < self.top_p <= 1:
            raise CommandError(f"--top-p {self.top_p:g}: must be above 0 and at most 1")
        if self.file and self.prompts:
            raise CommandError("prompts and --file can't be combined")
        if self.output:
            if self.file and self.file.resolve() == self.output.resolve():
                raise CommandError(f"--output would overwrite --file {self.file}")
            check_output(self.output)
        self.check_folders()

    def _rows(self) -> list[Row]:
        if self.file:
            return read_prompts(self.file)
        if self.prompts:
            if not all(prompt.strip() for prompt in self.prompts):
                raise CommandError("a prompt is empty")
            return prompt_rows(self.prompts)
        if sys.stdin.isatty():
            print("one prompt per line; Ctrl-D ends the input", file=sys.stderr)
        try:
            lines = [line.lstrip("\ufeff").strip() for line in sys.stdin]
        except UnicodeDecodeError as error:
            raise undecodable_input(error) from error
        prompts = [line for line in lines if line]
        if not prompts:
            raise CommandError("no prompts: pass them as arguments, on standard input or in --file")
        return prompt_rows(prompts)

    def _texts(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Any],
        source: "ModelSource",
        draft: "Draft",
    ) -> Iterator[str]:
        """Generate in batches of prompts of similar length; yield texts in the prompts' order."""
        from finetuning.evaluation.generation import generate_texts, sampling
        from finetuning.progress import progress_bar
        from finetuning.randomness import derive_seed, set_seed

        at_once = 8 * self.batch_size  # number of prompts that are sorted by length together
        with progress_bar(total=len(prompts), description="generating") as bar:
            for first in range(0, len(prompts), at_once):

                def seed(number: int, first: int = first) -> None:
                    set_seed(derive_seed("generate", self.seed, first, number))

                yield from generate_texts(
                    model=model,
                    tokenizer=tokenizer,
                    prompts=prompts[first : first + at_once],
                    batch_size=1 if draft.settings else self.batch_size,
                    max_new=self.max_new_tokens,
                    max_tokens=source.max_tokens,
                    settings={**sampling(self.temperature, self.top_p), **draft.settings},
                    before_batch=seed,
                    finished=bar.update,
                )
