"""Attacks on a model: what it reveals about the training rows of clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from statistics import fmean
from typing import Any

import torch

from chambers.experiment.plan import Measure
from finetuning.data.prompts import chat_prompt
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.generation import generate_texts, sampling
from finetuning.evaluation.leaks import alternatives, area_under_curve, exposure, row_leaks
from finetuning.generated import persons
from finetuning.generated.persons import AccessNumber, Person
from finetuning.generated.vocabulary import RandomWords
from finetuning.whole_model import WholeModel

MEMBERS = 200  # of a client's training rows, at most
_NEW_TOKENS = 80  # for the facts about a person
_PROMPTS, _SAMPLES = 20, 25  # the attacker's own questions, and texts sampled for each


@dataclass(frozen=True)
class Secrets:
    """What a client's training rows contain, and an attacker looks for."""

    members: Sequence[Row] = ()
    people: Sequence[Person] = ()  # empty unless ``data.generated = "persons"``
    numbers: Sequence[AccessNumber] = ()


@dataclass
class Attacks:
    """Attacks on one model. An attacker asks with file numbers of its own (FedPII)."""

    model: WholeModel
    tokenizer: Any
    max_length: int
    seed: int

    def values(self, leak: Measure, secrets: Secrets, held_out: Sequence[Row]) -> list[float]:
        """Return the values of an attack on one client's training rows.

        ``membership``: the AUC of all rows. ``extracted``: for each row, whether its rarest span is
        generated. ``facts-N``: for each person with N rows, the share of facts that are generated
        after the name; ``sampled``: for each person, the share of facts that are in one of 500
        sampled texts, without asking for the name. ``exposure-N``: bits of the access number with N
        rows.
        """
        kind, _, number = leak.partition("-")
        if kind in {"membership", "extracted"}:
            return self._of_rows(kind, secrets.members, held_out)
        if kind == "facts":
            return self._facts([p for p in secrets.people if p.rows == int(number)])
        if kind == "sampled":
            return [fmean(persons.facts_in(self._samples, each)) for each in secrets.people]
        return [self._exposure(each) for each in secrets.numbers if each.rows == int(number)]

    def _of_rows(self, kind: str, members: Sequence[Row], held_out: Sequence[Row]) -> list[float]:
        inside, outside = (
            tokenize(rows, self.tokenizer, self.max_length)[0] for rows in (members, held_out)
        )
        found = row_leaks(self.model, inside, outside, self.tokenizer.pad_token_id)
        if kind == "membership":
            return [area_under_curve(found.inside, found.outside)[0]]
        return [float(each) for each in found.extracted if each is not None]

    def _facts(self, people: Sequence[Person]) -> list[float]:
        draw = RandomWords(f"attack {self.seed}")
        beginnings = [persons.beginning(person.name) for person in people]
        prompts = self._prompts([persons.ask(draw) for _ in people], beginnings)
        texts = self._generate(prompts, {})
        answers = map(add, beginnings, texts)
        return [fmean(persons.facts_in([a], p)) for a, p in zip(answers, people, strict=True)]

    @cached_property
    def _samples(self) -> list[str]:
        draw = RandomWords(f"samples {self.seed}")
        begun = persons.beginning("").partition(" ,")[0]
        prompts = self._prompts([persons.ask(draw) for _ in range(_PROMPTS)], [begun] * _PROMPTS)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            texts = self._generate(prompts * _SAMPLES, {"settings": sampling(1.0, 1.0)})
        return [begun + text for text in texts]

    def _exposure(self, secret: AccessNumber) -> float:
        (before,) = self._prompts([secret.question], [persons.number_beginning().rstrip()])
        texts = [f" {each}" for each in alternatives(secret.number)]
        tokens = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return exposure(self.model, before, [torch.tensor(each) for each in tokens])

    def _prompts(self, questions: Sequence[str], begun: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of questions, each with the beginning of its answer."""
        pairs = zip(questions, begun, strict=True)
        return [
            chat_prompt(
                [{"role": "user", "content": text}, {"role": "assistant", "content": answer}],
                self.tokenizer,
            )
            for text, answer in pairs
        ]

    def _generate(self, prompts: Sequence[torch.Tensor], options: Mapping[str, Any]) -> list[str]:
        return generate_texts(
            self.model, self.tokenizer, prompts, 64, _NEW_TOKENS, exactly=True, **options
        )
