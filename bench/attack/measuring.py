"""Measure cells: run each attack on its input, and score the result."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.attack.cells import Cell
from bench.attack.decoder import DecoderKind, train_decoder
from bench.attack.gradients import client_gradient, read_labels
from bench.attack.noisy_training import CLIENT_ADAPTER, train_with_noise
from bench.attack.observed import compute_head_outputs, encrypt, transmit
from bench.attack.public_head import PublicHead
from bench.attack.texts import Texts
from bench.job import FLOAT32
from finetuning.adapters.adapter import load_state
from finetuning.data.batching import collate
from finetuning.evaluation.scoring import score
from split.model.adapters import take_apart
from split.model.loading import load_parts
from split.model.part import Part
from split.model.partition import PartyName, partition_of
from split.protocol.frames import Padding
from split.settings import SplitSettings

_SCORES = ("rouge1", "rouge2", "rougeL", "bleu4")
# Maximum number of candidates if the head has an adapter: then no match ends a search early.
_MAX_WITHOUT_ADAPTER = 64


class Attacked:
    """A client's texts, and the attacks on them; ``directory`` contains the attacked checkpoint."""

    def __init__(self, directory: Path, texts: Texts) -> None:
        self._directory = directory
        self._texts = texts
        self._sizes = texts.sizes
        # Consecutive cells share a head, which is loaded with the client's adapter and without one.
        self._head = functools.lru_cache(maxsize=2)(self._load_head)
        self._colluding = functools.lru_cache(maxsize=1)(self._colluding_outputs)
        self._search = functools.lru_cache(maxsize=1)(self._prepare_search)
        train = functools.partial(train_with_noise, directory, texts)
        self._trained = functools.lru_cache(train)

    def measure(self, cell: Cell) -> dict[str, float]:
        """Return the scores of a cell's attack or, for the attack ``loss``, the losses."""
        if cell.attack == "loss":
            return self._trained(cell.noise, cell.seed)[0]
        if cell.attack == "gradient":
            return self._scores(*self._labels(cell))
        count = self._sizes.searched if cell.attack == "search" else self._sizes.decoded
        rows = self._texts.attacked_rows(count, cell.seed)
        outputs = compute_head_outputs(
            self._head(cell.head_blocks, cell.seed if cell.tuned else None), rows
        )
        hidden = [row[self._texts.known :] for row in outputs]
        if cell.attack == "search":
            search = self._search(cell.head_blocks)
            most = _MAX_WITHOUT_ADAPTER if cell.tuned else self._sizes.max_candidates
            received = transmit(hidden, cell.wire, cell.noise)
            reconstructed = [search.read(row, cell.wire, cell.noise, most) for row in received]
        else:
            reconstructed = self._decode(cell, hidden, cell.attack)
        return self._scores(reconstructed, [row[self._texts.known :] for row in rows])

    def _decode(self, cell: Cell, hidden: Sequence[Tensor], kind: DecoderKind) -> list[Tensor]:
        """Train a decoder on the colluding client, and reconstruct the attacked texts with it."""
        colluding = self._colluding(cell.head_blocks)
        both = [*colluding, *hidden]
        if cell.seen == "encrypted records":
            seen = encrypt(both, cell.wire)
        elif cell.seen == "nothing":
            generator = torch.Generator().manual_seed(cell.seed)
            seen = [torch.randn(row.shape, generator=generator) for row in both]
        else:
            seen = transmit(both, cell.wire, cell.noise)
        texts = [row[self._texts.known_of_colluding :] for row in self._texts.training_rows()]
        decoder = train_decoder(seen[: len(colluding)], texts, kind, cell.seed)
        return decoder.read(seen[len(colluding) :])

    def _colluding_outputs(self, head_blocks: int) -> list[Tensor]:
        """Compute the colluding client's hidden states, after its texts' common beginning."""
        # The colluding client's head lacks the attacked client's adapter.
        outputs = compute_head_outputs(self._head(head_blocks, None), self._texts.training_rows())
        return [row[self._texts.known_of_colluding :] for row in outputs]

    def _labels(self, cell: Cell) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last labels of answers as read from gradients, and the client's true labels.

        Each training step has one text.
        """
        parts = self._load(cell.head_blocks, cell.tail_blocks, ("head", "body", "tail"))
        reconstructed, labels = [], []
        for example in self._texts.choose(self._sizes.labelled, cell.seed):
            batch = collate([example], self._texts.padding)
            padding = Padding("right", batch.lengths)
            outputs = compute_head_outputs(parts["head"], [batch.tokens[0]])
            (sent,) = transmit(outputs, cell.wire, cell.noise)
            with torch.no_grad():
                (tail_input,) = transmit([parts["body"](sent[None], padding)[0]], cell.wire)
            gradients = client_gradient(parts["tail"], tail_input[None], batch)
            (gradient,) = transmit([gradients[0]], cell.wire)
            count, tail = min(self._sizes.labels, len(batch.labels)), parts["tail"]
            read = read_labels(
                tail=tail,
                tail_input=tail_input,
                gradient=gradient,
                positions=batch.positions,
                count=count,
            )
            reconstructed.append(read)
            labels.append(batch.labels[-count:])
        return reconstructed, labels

    def _scores(self, reconstructed: Sequence[Tensor], texts: Sequence[Tensor]) -> dict[str, float]:
        """Compare reconstructed texts with the originals.

        ``attacked`` is the number of attacked tokens; ``tokens`` is the share read correctly.
        """
        decode = self._texts.text_of
        scores = score([decode(row) for row in reconstructed], [decode(row) for row in texts])
        equal = torch.cat(list(reconstructed)) == torch.cat(list(texts))
        tokens = {"tokens": float(equal.float().mean()), "attacked": len(equal)}
        return {name: scores[name] for name in _SCORES} | tokens

    def _load(
        self, head_blocks: int, tail_blocks: int, parties: Sequence[PartyName]
    ) -> dict[PartyName, Part]:
        split = SplitSettings(head_blocks=head_blocks, tail_blocks=tail_blocks)
        partition = partition_of(self._directory, split)
        parts = load_parts(FLOAT32, self._directory, partition, parties)
        for part in parts.values():
            part.train(False)
        return parts

    def _load_head(self, head_blocks: int, trained: int | None) -> Part:
        """Load a head; add the adapter that was trained with the seed ``trained``, if given."""
        head = self._load(head_blocks, 1, ("head",))["head"]
        if trained is not None:
            head.attach(CLIENT_ADAPTER)
            adapter = take_apart(self._trained(0.0, trained)[1], head.partition)
            load_state(head.trainable(), adapter["head"])
        return head

    def _prepare_search(self, head_blocks: int) -> PublicHead:
        head, vocabulary = self._head(head_blocks, None), len(self._texts.tokenizer)
        return PublicHead(head, vocabulary, self._texts.beginning)
