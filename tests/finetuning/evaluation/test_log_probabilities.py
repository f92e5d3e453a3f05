"""Log-probabilities of candidate answers equal a plain loop's; beginnings are computed once."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.adapters.adapter import attach_adapter
from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.data.formats import DataError
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.model.output_head import output_head, target_log_probabilities
from finetuning.settings import AdapterSettings
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import ARCHITECTURES, VOCABULARY, draw_weights


def draw_groups(seed: int = 0) -> list[list[Continuation]]:
    """Draw questions of tasks' kinds: single-token answers, longer answers, a shared passage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(2, VOCABULARY, (count,), generator=generator)

    groups = []
    for length in (5, 9, 3):
        context = draw(length)
        groups.append([Continuation(context, draw(1)) for _ in range(2)])
        groups.append([Continuation(context, draw(size)) for size in (1, 4, 2)])
    passage = draw(12)
    for size in (4, 2):
        question = torch.cat([passage, draw(size)])
        groups[-1] += [Continuation(question, torch.tensor([token])) for token in (5, 6)]
    return [*groups, [Continuation(draw(6), draw(3))]]


def plain_loop(model, groups) -> list[list[tuple[float, bool]]]:
    """Score one text at a time, without code of this project."""
    result = []
    for group in groups:
        result.append([])
        for each in group:
            tokens = torch.cat([each.context, each.answer])[None]
            with torch.no_grad():
                found = model(tokens).logits[0, len(each.context) - 1 : -1].float().log_softmax(-1)
            total = float(found.gather(1, each.answer[:, None]).sum())
            greedy = torch.equal(found.argmax(-1), each.answer)
            result[-1].append((total, greedy))
    return result


def assert_same(found, expected) -> None:
    flat = [(e.log_probability, e.is_greedy) for group in found for e in group]
    flat_expected = [each for group in expected for each in group]
    assert [value for value, _ in flat] == pytest.approx([v for v, _ in flat_expected], abs=1e-4)
    assert [greedy for _, greedy in flat] == [greedy for _, greedy in flat_expected]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_those_of_a_plain_loop(architecture, adapted):
    model = adapted(architecture, dropout=0.3).eval()
    groups = draw_groups()
    expected = plain_loop(model, groups)
    for max_tokens in (10_000, 60, 22):
        found = log_probabilities(WholeModel(model), groups, padding=0, max_tokens=max_tokens)
        assert_same(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_prefixes_come_before_the_beginning(architecture, random_model):
    adapter = AdapterSettings(kind="prefix", prefix_length=3)
    # A shorter window would include the padding between a prefix and its text.
    changes = {"sliding_window": 64} if architecture == "gemma2" else {}
    model = attach_adapter(random_model(architecture, **changes), adapter, "base").eval()
    draw_weights(model)
    groups = draw_groups()
    whole = WholeModel(model)
    found = log_probabilities(whole, groups, padding=0, max_tokens=90)
    assert_same(found, plain_loop(model, groups))
    with whole.without_adapter():
        bare = log_probabilities(whole, groups, padding=0, max_tokens=90)
    assert bare != found


def test_the_likeliest_answer_is_greedy(random_model):
    model = random_model().eval()
    context = torch.arange(2, 9)
    text = model.generate(context[None], max_new_tokens=3, do_sample=False, eos_token_id=None)[0]
    answer = text[7:]
    ((found, other),) = log_probabilities(
        WholeModel(model),
        [[Continuation(context, answer), Continuation(context, answer.flip(0))]],
        padding=0,
        max_tokens=100,
    )
    assert found.is_greedy
    assert other.is_greedy == torch.equal(answer, answer.flip(0))


def test_logits_of_a_bfloat16_model_are_computed_in_float32(random_model):
    model = random_model().to(torch.bfloat16).eval()
    hidden = torch.randn(300, model.config.hidden_size).bfloat16()
    labels = torch.randint(VOCABULARY, (300,))
    with torch.no_grad():
        found, *_ = target_log_probabilities(output_head(model), hidden, labels)
        exact = copy.deepcopy(model).float()
        expected, *_ = target_log_probabilities(output_head(exact), hidden.float(), labels)
    assert torch.equal(found, expected)


def test_a_shared_passage_is_computed_once():
    passage = torch.arange(2, 60)
    questions = [torch.tensor([60, number, 61]) for number in range(2, 22)]
    group = [
        Continuation(torch.cat([passage, question]), torch.tensor([answer]))
        for question in questions
        for answer in (3, 4)
    ]
    (batch,) = candidate_batches([group], padding=0, columns_before=0, max_tokens=10_000)
    # All questions begin with the same token, too, and one hidden state predicts both answers.
    assert (batch.beginnings.shape, batch.endings.shape) == ((1, 59), (20, 2))
    assert len(batch.labels) == 40
    several = candidate_batches([group], padding=0, columns_before=0, max_tokens=8 * 62)
    assert [len(each.endings) for each in several] == [8, 8, 4]


def test_a_text_that_does_not_fit_is_refused():
    group = [Continuation(torch.arange(2, 30), torch.tensor([3]))]
    with pytest.raises(DataError, match="a text of 28 tokens takes 34"):
        candidate_batches([group], padding=0, columns_before=5, max_tokens=33)
    candidate_batches([group], padding=0, columns_before=5, max_tokens=34)


_TEXT = st.lists(st.integers(2, 4), min_size=1, max_size=5).map(torch.tensor)


@given(
    st.lists(st.lists(st.builds(Continuation, _TEXT, _TEXT), min_size=1, max_size=4), max_size=4),
    st.integers(12, 60),
)
@settings(max_examples=60)
def test_every_target_is_predicted_from_the_text_before_it(groups, max_tokens):
    """For any groups, beginnings and budgets; what precedes a target is read off the batch."""
    found = {}
    for batch in candidate_batches(groups, padding=0, columns_before=1, max_tokens=max_tokens):
        rows, each = len(batch.beginnings), batch.endings_each
        assert rows * batch.tokens_kept(1) <= max_tokens
        width, ending_width = batch.beginnings.shape[1], batch.endings.shape[1]
        for position, label, owner in zip(
            batch.positions.tolist(), batch.labels.tolist(), batch.owners, strict=True
        ):
            row, column = divmod(position, width)
            ending = []
            if row >= rows:
                line, last = divmod(position - rows * width, ending_width)
                assert last < batch.ending_lengths[line]
                ending = batch.endings[line, : last + 1].tolist()
                row, column = line // each, width - 1
            first = width - int(batch.beginning_lengths[row])
            assert owner not in found
            found[owner] = (*batch.beginnings[row, first : column + 1].tolist(), *ending), label
    expected = {}
    for g, group in enumerate(groups):
        for c, each in enumerate(group):
            text = [*each.context.tolist(), *each.answer.tolist()]
            for t in range(len(each.answer)):
                end = len(each.context) + t
                expected[g, c, t] = tuple(text[:end]), text[end]
    assert found == expected
