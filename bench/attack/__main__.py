"""Measure how much of a client's text its messages reveal: ``python -m bench.attack``.

In the attack of FL-GLM section 4.3.3, a decoder is trained on a colluding client's hidden states
and texts, and then applied to another client's hidden states. Other attacks use the public model.
``--record`` writes the results of all cells of the tables to one file.
"""

import json
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.attack.cells import Sizes, cells_of
from bench.attack.measuring import Attacked
from bench.attack.report import one_cell_per_line, tables
from bench.attack.texts import GENERATED, generated_texts, texts_in
from bench.harness import command
from finetuning.model.fingerprint import combine_digests, fingerprint
from finetuning.model.locating import locate
from finetuning.model.tokenizer import load_tokenizer


def main() -> None:
    """Measure all cells, and print the tables."""
    parser = command(__doc__)
    parser.add_argument("--model", default="tiny", help="base model, as in model.name")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[GENERATED],
        help="data sets: 'generated', or folders with BoolQ's files; all attacks are run on the "
        "first; on the others, only the decoders and the search, for each number of head blocks",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--record", type=Path, help="file for all cells, such as docs/attack.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory, sizes = locate(arguments.model), Sizes()
    tokenizer = load_tokenizer(directory)
    record = _describe(arguments.model, directory, sizes) | {"covered": {}, "cells": []}
    for number, data in enumerate(arguments.data):
        if data == GENERATED:
            texts = generated_texts(tokenizer, sizes)
        else:
            texts = texts_in(Path(data), tokenizer, sizes)
        attacked = Attacked(directory, texts)
        record["covered"][texts.name] = texts.covered()
        for cell in cells_of(texts.name, record["blocks"], arguments.seeds, complete=number == 0):
            started = time.perf_counter()
            measured = asdict(cell) | {"result": attacked.measure(cell)}
            seconds = round(time.perf_counter() - started, 1)
            print(f"{cell}: {seconds} s", flush=True)
            record["cells"].append(measured | {"seconds": seconds})
    if arguments.record:
        arguments.record.write_text(one_cell_per_line(record), encoding="utf-8")
    print(*tables(record), sep="\n")


def _describe(name: str, directory: Path, sizes: Sizes) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    return {
        "model": Path(name).name,
        "blocks": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "versions": {library: version(library) for library in ("torch", "transformers")},
        "sizes": asdict(sizes),
        "model digest": combine_digests(fingerprint(directory)),
    }


if __name__ == "__main__":
    main()
