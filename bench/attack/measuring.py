"""Measure cells: run each attack on its input, and score the result."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.attack.cells import Cell, Sizes
from bench.attack.decoder import train_decoder
from bench.attack.gradients import Sent, client_gradient, read_labels
from bench.attack.noisy_training import ADAPTER, NoisyRun, train_with_noise
from bench.attack.observed import as_encrypted, as_received, head_outputs
from bench.attack.optimisation import invert
from bench.attack.public_head import PublicHead
from bench.attack.texts import Texts
from finetuning.adapters.adapter import load_state
from finetuning.data.batching import collate
from finetuning.evaluation.scoring import score
from finetuning.settings import ModelSettings
from split.model.adapters import take_apart
from split.model.loading import load_parts
from split.model.part import Part
from split.model.partition import PartyName, partition_of
from split.protocol.frames import Padding
from split.settings import SplitSettings

_FLOAT32 = ModelSettings(dtype="float32")
_SCORES = ("rouge1", "rouge2", "rougeL", "bleu4")
# If the client has an adapter, no candidate is near enough to end the search early.
_MAX_WITHOUT_ADAPTER = 64


class Attacked:
    """A client's texts, and the attacks on them.

    Args:
        directory: Directory of the checkpoint.
        texts: Texts of the colluding and of the attacked client.
        sizes: Amounts of data and computation.

    """

    def __init__(self, directory: Path, texts: Texts, sizes: Sizes) -> None:
        self._directory = directory
        self._texts = texts
        self._sizes = sizes
        # Cells with the same head are consecutive.
        self._head = functools.lru_cache(maxsize=2)(self._load_head)
        self._colluding = functools.lru_cache(maxsize=1)(self._colluding_outputs)
        self._search = functools.lru_cache(maxsize=1)(self._prepare_search)
        self._trained = functools.lru_cache(self._train)

    def measure(self, cell: Cell) -> dict[str, float]:
        """Return the scores of a cell's attack, or a loss cell's losses."""
        match cell.attack:
            case "loss":
                run = self._trained(cell.noise, cell.seed)
                return {"loss_before": run.loss_before, "loss_after": run.loss_after}
            case "gradient":
                return self._labels(cell)
            case "linear" | "transformer":
                rows = self._attacked(cell, self._sizes.decoded)
                return self._scores(self._decode(cell, rows), rows)
            case "search":
                rows = self._attacked(cell, self._sizes.searched)
                search = self._search(cell.head_blocks)
                most = _MAX_WITHOUT_ADAPTER if cell.tuned else self._sizes.max_candidates
                found = [
                    search.read(received=row, wire=cell.wire, noise=cell.noise, most=most)
                    for row in self._received(cell, rows)
                ]
                return self._scores(found, rows)
            case "optimisation":
                rows = self._attacked(cell, self._sizes.optimised)
                found = invert(
                    head=self._head(cell.head_blocks, None),
                    beginning=self._texts.beginning,
                    received=self._received(cell, rows),
                    steps=self._sizes.optimisation_steps,
                    seed=cell.seed,
                )
                return self._scores(found, rows)

    def _attacked(self, cell: Cell, count: int) -> list[Tensor]:
        return self._texts.attacked_rows(count, self._sizes.longest, cell.seed)

    def _received(self, cell: Cell, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the hidden states that the server has, after the texts' common beginning."""
        outputs = head_outputs(self._attacked_head(cell), rows)
        own = [row[self._texts.known :] for row in outputs]
        return as_received(own, cell.wire, cell.noise)

    def _decode(self, cell: Cell, rows: Sequence[Tensor]) -> list[Tensor]:
        """Train a decoder on the colluding client, and read the attacked texts."""
        known = self._texts.known_of_colluding
        given = self._colluding(cell.head_blocks)
        attacked = head_outputs(self._attacked_head(cell), rows)
        read = [row[self._texts.known :] for row in attacked]
        if cell.seen == "encrypted records":
            given, read = as_encrypted(given, cell.wire), as_encrypted(read, cell.wire)
        elif cell.seen == "nothing":
            generator = torch.Generator().manual_seed(cell.seed)
            given, read = (
                [torch.randn(row.shape, generator=generator) for row in part]
                for part in (given, read)
            )
        else:
            given, read = (as_received(part, cell.wire, cell.noise) for part in (given, read))
        assert cell.attack in ("linear", "transformer")
        decoder = train_decoder(
            seen=given,
            texts=[row[known:] for row in self._training_rows()],
            kind=cell.attack,
            seed=cell.seed,
        )
        return decoder.read(read)

    def _training_rows(self) -> list[Tensor]:
        return self._texts.training_rows(self._sizes.texts, self._sizes.longest)

    def _colluding_outputs(self, head_blocks: int) -> list[Tensor]:
        """Compute the colluding client's hidden states, after its texts' common beginning."""
        # The colluding client's head lacks the attacked client's adapter.
        outputs = head_outputs(self._head(head_blocks, None), self._training_rows())
        return [row[self._texts.known_of_colluding :] for row in outputs]

    def _scores(self, found: Sequence[Tensor], rows: Sequence[Tensor]) -> dict[str, float]:
        """Compare the reconstructed texts with the originals, after the common beginning."""
        texts = [row[self._texts.known :] for row in rows]
        scores = score(
            [self._texts.text_of(row) for row in found], [self._texts.text_of(row) for row in texts]
        )
        return {name: scores[name] for name in _SCORES} | _tokens_read(found, texts)

    def _labels(self, cell: Cell) -> dict[str, float]:
        """Read the ends of answers from gradients, with one text per step."""
        parts = self._load(cell.head_blocks, cell.tail_blocks, ("head", "body", "tail"))
        chosen = self._texts.choose(self._sizes.labelled, cell.seed)
        found, labels = [], []
        for example in chosen:
            batch = collate([example], self._texts.padding)
            padding = Padding("right", batch.lengths)
            sent = self._received_whole(cell, parts["head"], batch.tokens[0])
            with torch.no_grad():
                (given,) = as_received([parts["body"](sent[None], padding)[0]], cell.wire)
            gradient = client_gradient(parts["tail"], given[None], batch)[0]
            count = min(self._sizes.labels, len(batch.labels))
            step = Sent(
                given=given,
                gradient=as_received([gradient], cell.wire)[0],
                positions=batch.positions,
                scale=1 / len(batch.labels),
            )
            found.append(read_labels(parts["tail"], step, count))
            labels.append(batch.labels[-count:])
        pairs = ([self._texts.text_of(row) for row in each] for each in (found, labels))
        scores = score(*pairs)
        return {name: scores[name] for name in _SCORES} | _tokens_read(found, labels)

    def _received_whole(self, cell: Cell, head: Part, tokens: Tensor) -> Tensor:
        return as_received(head_outputs(head, [tokens]), cell.wire, cell.noise)[0]

    def _load(
        self, head_blocks: int, tail_blocks: int, parties: Sequence[PartyName]
    ) -> dict[PartyName, Part]:
        partition = partition_of(
            self._directory, SplitSettings(head_blocks=head_blocks, tail_blocks=tail_blocks)
        )
        parts = load_parts(
            settings=_FLOAT32, directory=self._directory, partition=partition, parties=parties
        )
        for part in parts.values():
            part.train(False)
        return parts

    def _attacked_head(self, cell: Cell) -> Part:
        return self._head(cell.head_blocks, cell.seed if cell.tuned else None)

    def _load_head(self, head_blocks: int, trained: int | None) -> Part:
        """Load a head without an adapter, or with the adapter trained with a seed."""
        head = self._load(head_blocks, 1, ("head",))["head"]
        if trained is not None:
            head.attach(ADAPTER)
            load_state(
                head.trainable(),
                take_apart(self._trained(0.0, trained).adapter, head.partition)["head"],
            )
        return head

    def _prepare_search(self, head_blocks: int) -> PublicHead:
        return PublicHead(
            head=self._head(head_blocks, None),
            vocabulary=len(self._texts.tokenizer),
            beginning=self._texts.beginning,
        )

    def _train(self, noise: float, seed: int) -> NoisyRun:
        return train_with_noise(
            directory=self._directory,
            training=self._texts.own,
            held_out=self._texts.attacked[: self._sizes.measured],
            steps=self._sizes.steps,
            noise=noise,
            seed=seed,
            padding=self._texts.padding,
        )


def _tokens_read(found: Sequence[Tensor], texts: Sequence[Tensor]) -> dict[str, float]:
    """Return the share of tokens that were read correctly, and the number of attacked tokens."""
    equal = torch.cat(list(found)) == torch.cat(list(texts))
    return {"tokens": float(equal.float().mean()), "attacked": len(equal)}
