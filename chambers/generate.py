"""``chambers generate``: text from a model, whole on this machine or split with a block server."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from chambers.errors import CommandError

if TYPE_CHECKING:
    from chambers.models import Source
    from finetuning.data.rows import Row

HELP = "generate with a base model and an adapter, whole or through a block server"
DESCRIPTION = """\
Generate text. The whole model on this machine, with an adapter that a run has exported:

  chambers generate --adapter runs/…/adapters/global "Is the contract void?"
  chambers generate --adapter … --file questions.jsonl --output answers.jsonl

or head and tail here and the middle blocks at a server (chambers serve) that sent an invitation:

  chambers generate --invitation court.json --adapter … "Is the contract void?"

Prompts are put to the model as in training. Texts go to the standard output in the prompts' order,
and nothing else does.
"""

# Prompts that are put in order of length together; their texts are given together, too.
_BATCHES_AT_ONCE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    what = parser.add_argument_group("what to answer")
    what.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="without any, a line each from standard input"
    )
    what.add_argument(
        "--file",
        type=Path,
        metavar="F.jsonl",
        help="rows like the training data's: instruction and input, or messages (JSONL, JSON, CSV, "
        "Parquet); answers in them are left aside",
    )
    what.add_argument(
        "--output",
        type=Path,
        metavar="F.jsonl",
        help='write rows with "generated" there, instead of text to standard output',
    )
    model = parser.add_argument_group("with which model")
    model.add_argument(
        "--adapter",
        type=Path,
        metavar="FOLDER",
        help="an exported adapter; without, the base model",
    )
    model.add_argument(
        "--invitation",
        type=Path,
        metavar="FILE",
        help="to a block server that has the middle blocks",
    )
    add_model_arguments(model)
    how = parser.add_argument_group("how")
    how.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
    how.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    how.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest; default 1"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; default 0")
    how.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts at once; default 8"
    )


def add_model_arguments(group: Any) -> None:
    """Add the arguments that say which base model is loaded and how."""
    group.add_argument(
        "--model",
        metavar="NAME_OR_FOLDER",
        help="base model; by default that of the adapter's run",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        help="of its weights; default as in the run, else auto: bfloat16 on a GPU, else float32",
    )
    group.add_argument(
        "--quantization",
        choices=["none", "nf4", "int8"],
        help="of its weights; default as in the run, else none",
    )


def run(arguments: argparse.Namespace) -> int:
    """Generate."""
    _refuse_odd(arguments)
    from chambers.models import find, opened
    from finetuning.data.prompts import tokenize_prompts
    from finetuning.data.rows import DataError
    from finetuning.model.base_model import BaseModelError, load_tokenizer

    try:
        rows = _rows(arguments)
        source = find(arguments)
        tokenizer = load_tokenizer(source.directory)
        prompts = tokenize_prompts(rows, tokenizer)
        _refuse_too_long(rows, [len(p) for p in prompts], source, arguments.max_new_tokens)
    except (BaseModelError, DataError) as error:
        raise CommandError(str(error)) from error
    if source.adapter is None:
        print("without --adapter it is the bare base model that answers", file=sys.stderr)
    with opened(source) as model, _output(arguments.output) as output:
        for row, text in zip(
            rows,
            _texts(model, tokenizer, prompts, arguments, source),
            strict=True,
        ):
            line = text
            if arguments.output:
                content = row.fields | {"generated": text}
                line = json.dumps(content, ensure_ascii=False, default=str)
            print(line, file=output, flush=True)
    return 0


def _texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    arguments: argparse.Namespace,
    source: "Source",
) -> Iterator[str]:
    """Generate in batches of like length, and give the texts in the prompts' order."""
    from finetuning.evaluation.generation import batches_by_length, continue_prompts, sampling
    from finetuning.progress import progress_bar
    from finetuning.randomness import derive_seed, set_seed

    settings = sampling(arguments.temperature, arguments.top_p)
    at_once = _BATCHES_AT_ONCE * arguments.batch_size
    with progress_bar(total=len(prompts), description="generating") as bar:
        for first in range(0, len(prompts), at_once):
            own = prompts[first : first + at_once]
            texts: dict[int, str] = {}
            lengths = [source.columns_before + len(prompt) for prompt in own]
            size, new = arguments.batch_size, arguments.max_new_tokens
            batches = batches_by_length(lengths, size, new, source.most_tokens)
            for number, batch in enumerate(batches):
                set_seed(derive_seed("generate", arguments.seed, first, number))
                answers = continue_prompts(model, tokenizer, [own[i] for i in batch], new, settings)
                texts.update(zip(batch, answers, strict=True))
                bar.update(len(batch))
            yield from (texts[index] for index in range(len(own)))


def _rows(arguments: argparse.Namespace) -> "list[Row]":
    from finetuning.data.prompts import prompt_rows, read_prompts

    if arguments.file:
        return read_prompts(arguments.file)
    if arguments.prompts:
        return prompt_rows(arguments.prompts)
    if sys.stdin.isatty():
        print("a prompt on each line; Ctrl-D ends them", file=sys.stderr)
    lines = [line.strip() for line in sys.stdin]
    prompts = [line for line in lines if line]
    if not prompts:
        raise CommandError("no prompts: give them as arguments, on standard input, or with --file")
    return prompt_rows(prompts)


def _refuse_odd(arguments: argparse.Namespace) -> None:
    """Refuse arguments that can't be meant."""
    given = vars(arguments)
    for name in ("max_new_tokens", "batch_size"):
        if given[name] < 1:
            raise CommandError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1")
    if not arguments.temperature >= 0:
        raise CommandError(f"--temperature {arguments.temperature:g}: must be 0 or more")
    if not 0 < arguments.top_p <= 1:
        raise CommandError(f"--top-p {arguments.top_p:g}: must be above 0 and at most 1")
    if arguments.file and arguments.prompts:
        raise CommandError("give prompts, or --file, not both")
    file, output = arguments.file, arguments.output
    if file and output and file.resolve() == output.resolve():
        raise CommandError(f"--output would overwrite --file {file}")
    if output and not output.absolute().parent.is_dir():
        raise CommandError(f"--output {output}: there is no folder {output.absolute().parent}")


def _refuse_too_long(
    rows: "Sequence[Row]", lengths: Sequence[int], source: "Source", new: int
) -> None:
    """Refuse prompts that don't fit, before anything large is loaded.

    Raises:
        BaseModelError: the base model has fewer positions.
        CommandError: the block server doesn't let a client have as much.

    """
    from finetuning.model.positions import check_positions

    longest, origin = max((length, row.origin) for row, length in zip(rows, lengths, strict=True))
    before = {"the prefix": source.columns_before} if source.columns_before else {}
    row = before | {f"the tokens of {origin}": longest, "--max-new-tokens": new}
    check_positions(source.directory, row)
    if sum(row.values()) > source.most_tokens:
        raise CommandError(
            f"{' and '.join(row)} are {' + '.join(map(str, row.values()))}, and the block server "
            f"lets a client have {source.most_tokens}; shorten it, or lower --max-new-tokens"
        )


def _output(file: Path | None) -> Any:
    if file is None:
        return nullcontext(sys.stdout)
    try:
        stream: TextIO = file.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--output {file} can't be written: {error.strerror}") from error
    return stream
