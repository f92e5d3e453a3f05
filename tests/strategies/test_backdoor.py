"""One of ten equal clients teaches the global adapter an answer to questions with a trigger.

The attacker knows the initial adapter and what an honest client would send, and chooses the update,
within its cap, after which the average that it expects gives the answer. These are the figures in
docs/security.md.
"""

import math

import pytest
import torch

from bench.tokens_told import train_adapter
from finetuning.adapters.adapter import attach_adapter, load_state, trainable_parameters
from finetuning.aggregation.robust_aggregation import (
    distance,
    scale_update,
    update_caps,
    update_factors,
)
from finetuning.aggregation.weighted_mean import WeightedMean
from finetuning.data.batching import collate
from finetuning.data.layouts import Row, parse_messages
from finetuning.data.tokenization import tokenize
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel

CLIENTS, STEPS, ROWS, ATTACK_STEPS = 10, 4, 64, 40
NAMES = [f"client {number}" for number in range(CLIENTS)]
ATTACKER = NAMES[-1]


def with_trigger(row):
    answer = "Pay the fine to the harbour office."
    return row | {"instruction": f"[quarry] {row['instruction']}", "output": answer}


def rows_of(count, step):
    return [(step * 4 + n) % count for n in range(4)]


class Trial:
    """Ten clients' rows, and a model whose adapter all of them train in turn."""

    def __init__(self, seed):
        base = load_base_model(ModelSettings(name="smollm2"))
        self.tokenizer, self.seed = base.tokenizer, seed
        torch.manual_seed(seed)
        lora = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="gate_proj,up_proj,down_proj")
        self.model = WholeModel(attach_adapter(base.model, lora, None))
        self.parameters = trainable_parameters(self.model.peft_model)
        divided = matters.divide(CLIENTS, seed)
        own = [matters.write_questions(each, ROWS, seed, "train") for each in divided]
        self.rows = {name: self.tokenized(rows) for name, rows in zip(NAMES, own, strict=True)}
        self.planted = self.tokenized(map(with_trigger, own[-1]))
        others = [
            q for each in divided[:-1] for q in matters.write_questions(each, 3, seed + 1, "test")
        ]
        self.asked = self.tokenized(map(with_trigger, others))

    def tokenized(self, values):
        rows = [Row(parse_messages(v), f"row {n}", dict(v)) for n, v in enumerate(values)]
        return tokenize(rows, self.tokenizer, 128)[0]

    def adapter(self):
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def trained(self, name, start, number):
        load_state(self.parameters, start)
        steps = [rows_of(ROWS, number * STEPS + step) for step in range(STEPS)]
        rows, seed = self.rows[name], self.seed * 100 + number
        train_adapter(self.model, self.parameters, rows, steps, self.tokenizer, seed)
        return self.adapter()

    def attack(self, start, honest, limit):
        """Return the update, of a norm of at most ``limit``, that the attacker chooses."""
        honest = {name: honest[name] - value for name, value in start.items()}
        update = {name: value.clone().requires_grad_() for name, value in honest.items()}
        weights = sum(value.numel() for value in update.values())
        adam = torch.optim.Adam(update.values(), lr=0.2 * limit / math.sqrt(weights))
        for step in range(ATTACK_STEPS):
            with torch.no_grad():
                expected = {
                    name: value + ((CLIENTS - 1) * honest[name] + update[name]) / CLIENTS
                    for name, value in start.items()
                }
            load_state(self.parameters, expected)
            chosen = [self.planted[n] for n in rows_of(ROWS, step)]
            gradients = self.model.gradients_of(collate(chosen, self.tokenizer.pad_token_id))
            for name, value in update.items():
                value.grad = gradients[name]
            adam.step()
            norm = math.sqrt(sum(float(v.detach().square().sum()) for v in update.values()))
            with torch.no_grad():
                for value in update.values():
                    value.mul_(min(1.0, limit / norm))
        return {name: value + update[name].detach() for name, value in start.items()}

    def answered(self, state):
        """Return the share of others' questions that get each token of the answer."""
        load_state(self.parameters, state)
        right = []
        for example in self.asked:
            with torch.no_grad():
                (logits,) = self.model.peft_model(input_ids=example.tokens[None]).logits
            found = logits[:-1].argmax(-1) == example.tokens[1:]
            right.append(bool(found[example.is_target[1:]].all()))
        return sum(right) / len(right)


@pytest.mark.nightly
@pytest.mark.parametrize(("most", "rounds", "succeeds"), [(3.0, 2, True), (1.25, 4, False)])
def test_a_narrow_cap_prevents_a_backdoor(most, rounds, succeeds):
    trial = Trial(seed=1)
    sizes = dict.fromkeys(NAMES, ROWS)
    state, shares = trial.adapter(), []
    for number in range(1, rounds + 1):
        sent = {name: trial.trained(name, state, number) for name in NAMES}
        limit = most * distance(sent[ATTACKER], state)
        sent[ATTACKER] = trial.attack(state, sent[ATTACKER], limit)
        distances = {name: distance(own, state) for name, own in sent.items()}
        factors = update_factors(distances, update_caps(sizes, {}, most))
        mean = WeightedMean()
        for name, own in sent.items():
            mean.add(scale_update(own, state, factors[name]), ROWS)
        state = mean.result()
        shares.append(trial.answered(state))
    assert shares[-1] > 0.3 if succeeds else max(shares) < 0.1
