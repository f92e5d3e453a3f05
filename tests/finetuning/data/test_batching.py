"""Which examples share a step or a micro-batch, and the content of padded micro-batches."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetuning.data.batching import (
    collate,
    micro_batches,
    round_steps,
    split_rows,
    steps_per_round,
)
from finetuning.data.tokenization import Example
from finetuning.settings import TrainSettings

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=150)


def example_of(tokens, is_target):
    return Example(torch.tensor(tokens), torch.tensor(is_target), 1, "", row=0)


EXAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12).map(
        lambda pairs: example_of([token for token, _ in pairs], [target for _, target in pairs])
    ),
    min_size=1,
    max_size=6,
)


@given(EXAMPLES, st.integers(0, 9))
def test_positions_and_labels_agree_with_a_naive_loop(examples, padding):
    before = [(example.tokens.clone(), example.is_target.clone()) for example in examples]
    batch = collate(examples, padding)
    columns = max(len(example.tokens) for example in examples)
    assert batch.tokens.shape == (len(examples), columns)
    expected = []
    for row, example in enumerate(examples):
        length = len(example.tokens)
        assert batch.lengths[row] == length
        assert torch.equal(batch.tokens[row, :length], example.tokens)
        assert (batch.tokens[row, length:] == padding).all()
        expected += [
            (row * columns + column - 1, int(example.tokens[column]))
            for column in range(1, length)
            if example.is_target[column]
        ]
    assert list(zip(batch.positions.tolist(), batch.labels.tolist(), strict=True)) == expected
    for example, (tokens, is_target) in zip(examples, before, strict=True):
        assert torch.equal(example.tokens, tokens)
        assert torch.equal(example.is_target, is_target)


@given(EXAMPLES, st.integers(1, 7))
def test_parts_of_a_micro_batch_are_those_of_their_rows(examples, most):
    parts = split_rows(collate(examples, 0), most)
    for first, part in zip(range(0, len(examples), most), parts, strict=True):
        expected = collate(examples[first : first + most], 0)
        assert all(torch.equal(value, vars(part)[name]) for name, value in vars(expected).items())


@given(LENGTHS, st.integers(1, 2000), st.randoms(use_true_random=False))
def test_micro_batches_cover_a_step_once_within_the_budget(lengths, budget, shuffler):
    step = shuffler.sample(range(len(lengths)), shuffler.randint(0, len(lengths)))
    groups = micro_batches(step, lengths, budget)
    assert sorted(itertools.chain(*groups)) == sorted(step)
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    padded = [len(group) * max(lengths[i] for i in group) for group in groups]
    for (group, size), following in zip(zip(groups, padded, strict=True), groups[1:], strict=False):
        # No group stops while the next example would still fit.
        assert size + lengths[group[0]] > budget or not following
    shuffled = step.copy()
    shuffler.shuffle(shuffled)
    assert micro_batches(shuffled, lengths, budget) == groups


def test_the_longest_example_comes_first():
    assert micro_batches([0, 1, 2, 3, 4], [5, 90, 10, 8, 40], 40) == [[1], [4], [2, 3, 0]]


TRAINING = st.builds(
    TrainSettings,
    epochs=st.integers(1, 3),
    local_steps=st.integers(0, 20),
    batch_size=st.integers(1, 8),
    accumulation=st.integers(1, 8),
)


@given(LENGTHS, TRAINING, st.integers(0, 2**62))
def test_every_epoch_covers_every_example_once_in_full_steps(lengths, training, seed):
    rounds = 3
    steps = [
        step
        for number in range(1, rounds + 1)
        for step in round_steps(lengths, training, number, seed)
    ]
    assert len(steps) == rounds * steps_per_round(len(lengths), training)
    size = training.batch_size * training.accumulation
    per_epoch = math.ceil(len(lengths) / size)
    for first in range(0, len(steps), per_epoch):
        epoch = steps[first : first + per_epoch]
        for step in epoch[: per_epoch - 1]:
            assert len(step) == size
        seen = [index for step in epoch for index in step]
        assert len(seen) == len(set(seen))
        if len(epoch) == per_epoch:
            assert sorted(seen) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 7), st.integers(1, 9))
def test_division_into_rounds_does_not_change_steps(lengths, per_round, batch_size):
    def steps(local_steps, rounds):
        training = TrainSettings(local_steps=local_steps, batch_size=batch_size, accumulation=2)
        return [
            step
            for number in range(1, rounds + 1)
            for step in round_steps(lengths, training, number, 5)
        ]

    assert steps(per_round, 6) == steps(1, 6 * per_round)
    # Request the last round alone, as a resumed run does.
    training = TrainSettings(local_steps=per_round, batch_size=batch_size, accumulation=2)
    assert round_steps(lengths, training, 6, 5) == steps(1, 6 * per_round)[5 * per_round :]


def test_a_round_has_epochs_or_local_steps():
    assert steps_per_round(100, TrainSettings(epochs=3, batch_size=2, accumulation=8)) == 3 * 7
    assert steps_per_round(1, TrainSettings()) == 1
    assert steps_per_round(100, TrainSettings(epochs=3, local_steps=50)) == 50


@pytest.fixture(scope="module")
def many_lengths():
    source = random.Random(0)
    return [int(source.lognormvariate(5, 0.8)) + 1 for _ in range(1000)]


def test_plans_differ_by_seed_and_epoch_and_by_nothing_else(many_lengths):
    training = TrainSettings(batch_size=4, accumulation=4)
    plan = round_steps(many_lengths, training, 1, 7)
    random.seed(1)
    torch.manual_seed(1)
    assert round_steps(many_lengths, training, 1, 7) == plan
    assert round_steps(many_lengths, training, 2, 7) != plan
    assert round_steps(many_lengths, training, 1, 8) != plan


def test_neighbours_in_a_step_are_alike(many_lengths):
    steps = round_steps(many_lengths, TrainSettings(batch_size=4, accumulation=4), 1, 0)
    within = [
        max(many_lengths[i] for i in step[first : first + 4])
        - min(many_lengths[i] for i in step[first : first + 4])
        for step in steps
        for first in range(0, len(step), 4)
    ]
    spread = max(many_lengths) - min(many_lengths)
    assert sorted(within)[len(within) // 2] < 0.02 * spread


def test_steps_stay_mixed_in_spite_of_grouping(many_lengths):
    # If steps were sorted by length, the model would train on all long rows first.
    lengths = many_lengths[:400]
    steps = round_steps(lengths, TrainSettings(batch_size=8, accumulation=1), 1, 0)
    means = [sum(lengths[i] for i in step) / len(step) for step in steps]
    assert sum(means[:25]) == pytest.approx(sum(means[25:]), rel=0.4)
