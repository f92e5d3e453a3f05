"""The attack on hidden states and gradients, and the tables that it writes."""

import json
from pathlib import Path

import pytest
import torch

from bench.attack.decoder import train_decoder
from bench.attack.gradients import client_gradient, read_labels
from bench.attack.observed import compute_head_outputs, encrypt, transmit
from bench.attack.public_head import PublicHead
from bench.attack.report import tables
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.settings import ModelSettings
from split.model.loading import load_parts
from split.model.partition import PARTIES, partition_of
from split.protocol.frames import Padding
from split.settings import SplitSettings
from tests.bench.markdown_tables import assert_selected, tables_in

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = 320
BEGINNING = torch.tensor([5, 6, 7])


def parts_of(checkpoint, head_blocks=1, tail_blocks=1):
    split = SplitSettings(head_blocks=head_blocks, tail_blocks=tail_blocks)
    partition = partition_of(checkpoint, split)
    return load_parts(ModelSettings(dtype="float32"), checkpoint, partition, PARTIES)


def texts(count, length, seed, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, vocabulary, (count, length), generator=generator)
    return [torch.cat([BEGINNING, row]) for row in drawn]


@pytest.mark.parametrize("head_blocks", [0, 1, 2])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_whoever_knows_the_head_reads_everything(deep_checkpoint, head_blocks, wire):
    head = parts_of(deep_checkpoint, head_blocks)["head"]
    search = PublicHead(head, VOCABULARY, BEGINNING)
    rows = texts(2, 12, seed=0)
    for row, hidden in zip(rows, compute_head_outputs(head, rows), strict=True):
        own = hidden[len(BEGINNING) :]
        found = search.read(transmit([own], wire)[0], wire, noise=0.0, most=VOCABULARY)
        assert torch.equal(found, row[len(BEGINNING) :])


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_a_decoder_reads_hidden_states_but_no_sealed_records(deep_checkpoint, wire):
    head = parts_of(deep_checkpoint)["head"]
    kinds = 16
    colluding, attacked = texts(100, 20, 1, kinds + 2), texts(40, 20, 2, kinds + 2)
    chance = 1 / kinds

    def share_read(seen) -> float:
        states = seen(compute_head_outputs(head, colluding), wire)
        decoder = train_decoder(states, colluding, "linear", seed=0, passes=8)
        found = decoder.read(seen(compute_head_outputs(head, attacked), wire))
        # Texts begin with the same tokens, whose positions are known.
        pairs = zip(found, attacked, strict=True)
        equal = torch.cat([(a == b)[len(BEGINNING) :] for a, b in pairs])
        return float(equal.float().mean())

    assert share_read(transmit) > 0.95
    # 800 tokens: five standard deviations are 0.043.
    assert abs(share_read(encrypt) - chance) < 0.043


@pytest.mark.parametrize(("tail_blocks", "wire"), [(0, "int8"), (1, "bfloat16"), (2, "float32")])
def test_the_gradient_reveals_the_labels(deep_checkpoint, tail_blocks, wire):
    parts = parts_of(deep_checkpoint, tail_blocks=tail_blocks)
    for part in parts.values():
        part.train(False)
    (row,) = texts(1, 12, seed=3)
    targets = torch.arange(len(row)) >= 7
    batch = collate(
        [Example(tokens=row, is_target=targets, prompt_length=7, reference="", row=0)], 0
    )
    with torch.no_grad():
        padding = Padding("right", batch.lengths)
        middle = parts["body"](parts["head"](batch.tokens, padding), padding)
    (tail_input,) = transmit([middle[0]], wire, noise=0.5)
    tail = parts["tail"]
    (gradient,) = transmit([client_gradient(tail, tail_input[None], batch)[0]], wire)
    found = read_labels(
        tail=tail,
        tail_input=tail_input,
        gradient=gradient,
        positions=batch.positions,
        count=len(batch.labels),
    )
    assert torch.equal(found, batch.labels)


def test_tables_on_the_page_are_those_of_the_record():
    page = (DOCS / "attack.md").read_text(encoding="utf-8")
    record = json.loads((DOCS / "attack.json").read_text(encoding="utf-8"))
    made = [table for text in tables(record) for table in tables_in(text)]
    shown = tables_in(page.partition("python -m bench.membership")[0])
    assert len(shown) == 3
    for table in shown:
        assert_selected(table, made)
