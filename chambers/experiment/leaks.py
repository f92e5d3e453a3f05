"""What a model reveals about the clients' training rows, row by row or fact by fact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from chambers.experiment.plan import Measure
from finetuning.data.prompts import chat_prompt
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.generation import generate_texts, sampling
from finetuning.evaluation.leaks import alternatives, are_above, exposure, row_leaks
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

        ``membership``: for each row, the share of held-out rows with lower scores. ``extracted``:
        whether a row's rarest span is generated. ``facts-N``: for each fact about a person with N
        rows, whether it is generated after the person's name; ``sampled``: for all people, whether
        one of 500 sampled texts has it, without asking for the name. ``exposure-N``: bits of the
        access number with N rows.
        """
        kind, _, number = leak.partition("-")
        if kind in {"membership", "extracted"}:
            return self._of_rows(kind, secrets.members, held_out)
        if kind == "facts":
            return self._facts([p for p in secrets.people if p.rows == int(number)])
        if kind == "sampled":
            found = [persons.facts_in(self._samples, person) for person in secrets.people]
            return [fact for of_person in found for fact in of_person]
        return [self._exposure(each) for each in secrets.numbers if each.rows == int(number)]

    def _of_rows(self, kind: str, members: Sequence[Row], held_out: Sequence[Row]) -> list[float]:
        inside, outside = (
            tokenize(rows, self.tokenizer, self.max_length)[0] for rows in (members, held_out)
        )
        if not hasattr(self.model.peft_model, "disable_adapter"):  # the base model knows no rows
            return [0.5 if kind == "membership" else 0.0] * len(inside)
        found = row_leaks(self.model, inside, outside, self.tokenizer.pad_token_id)
        if kind == "membership":
            return are_above(found.inside, found.outside).mean(1).tolist()
        return [float(each) for each in found.extracted if each is not None]

    def _facts(self, people: Sequence[Person]) -> list[float]:
        draw = RandomWords(f"attack {self.seed}")
        beginnings = [persons.beginning(person.name) for person in people]
        prompts = self._prompts([persons.ask(draw) for _ in people], beginnings)
        texts = self._generate(prompts, {})
        found = []
        for person, begun, text in zip(people, beginnings, texts, strict=True):
            found += persons.facts_in([begun + text], person)
        return found

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
