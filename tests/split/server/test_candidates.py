"""Candidate answers through lanes yield the whole model's log-probabilities and nothing else."""

import pytest
import torch

from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.settings import AdapterSettings
from split.protocol.errors import PeerError
from split.protocol.frames import Kind
from tests.marks import nightly
from tests.split.clients import bodies_kept, send_texts, tokens_taken
from tests.split.model.test_generation import GREEDY, Scene, generated

MOST = 60


def draw_groups() -> list[list[Continuation]]:
    generator = torch.Generator().manual_seed(2)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(2, 64, (count,), generator=generator)

    groups = []
    for length in (5, 9, 3):
        context = draw(length)
        groups.append([Continuation(context, draw(1)) for _ in range(2)])
        groups.append([Continuation(context, draw(size)) for size in (1, 4, 2, 4)])
    return groups


def values(model, most=MOST) -> list[float]:
    found = log_probabilities(model, draw_groups(), padding=0, max_tokens=most)
    return [each.log_probability for group in found for each in group]


def scene_of(random_checkpoint, architecture="Llama", kind="lora", **split) -> Scene:
    prefix = AdapterSettings(kind="prefix", prefix_length=5) if kind == "prefix" else None
    return Scene(random_checkpoint(architecture), architecture, prefix, **split)


@pytest.mark.parametrize(
    ("architecture", "kind", "blocks"),
    [
        *((name, "lora", 1) for name in ("Llama", "OPT", "Gemma2")),
        *(nightly(name, "lora", 1) for name in ("GPT2", "Bloom", "GptOss")),
        *(("Llama", "prefix", 1), nightly("Llama", "lora", 0), ("GPT2", "lora", 0)),
    ],
)
def test_log_probabilities_equal_the_whole_model(random_checkpoint, architecture, kind, blocks):
    scene = scene_of(random_checkpoint, architecture, kind, head_blocks=blocks, tail_blocks=blocks)
    whole, client = scene.whole(), scene.client()
    expected = values(whole)
    with whole.without_adapter():
        bare = values(whole)
    with scene.serving(max_cached_tokens=MOST) as server:
        with scene.lane(server, client) as model:
            scene.choose(model)
            assert values(model) == pytest.approx(expected, abs=1e-5)
            # Generation and another model may come between.
            assert torch.equal(
                model.generate(torch.ones(1, 2).long(), torch.ones(1, 2).long(), 5, **GREEDY),
                whole.generate(torch.ones(1, 2).long(), torch.ones(1, 2).long(), 5, **GREEDY),
            )
            model.choose("base", None)
            assert values(model) == pytest.approx(bare, abs=1e-5)
            model.end()
        (account,) = server.finish_lanes()
    assert not account.error
    if kind == "lora":
        assert bare != pytest.approx(expected, abs=1e-3)
    assert not bodies_kept()


def send_endings(model, rows, columns, each, index=1, side="right") -> None:
    tensors = {"hidden": torch.zeros(rows, columns, 32), "lengths": torch.full((rows,), columns)}
    model.lane.send(Kind.HIDDEN, 0, index, tensors, {"side": side, "endings": each})


def test_endings_are_computed_once_and_nothing_follows_them(random_checkpoint):
    scene = scene_of(random_checkpoint)
    client = scene.client()
    expected = generated(scene.whole(), **GREEDY)
    with scene.serving(max_cached_tokens=84) as server:
        with scene.lane(server, client) as model:
            scene.choose(model)
            send_texts(model, new_tokens=17)
            model.lane.receive(30)
            send_endings(model, rows=6, columns=3, each=2)
            assert model.lane.receive(30).tensors["hidden"].shape == (6, 3, 32)
            send_endings(model, rows=6, columns=3, each=2)
            with pytest.raises(PeerError):
                model.lane.receive(30)
        with scene.lane(server, client) as model:
            scene.choose(model)
            assert torch.equal(generated(model, **GREEDY), expected)
        server.finish_lanes()
        assert tokens_taken(server, scene.split) == 0


def test_a_batch_keeps_to_the_agreed_tokens(random_checkpoint):
    scene = scene_of(random_checkpoint)
    batches = candidate_batches(draw_groups(), 0, 0, MOST)
    assert max(len(b.beginnings) * b.tokens_kept(0) for b in batches) <= MOST
    client = scene.client()
    with (
        scene.serving(max_cached_tokens=MOST - 20) as server,
        scene.lane(server, client) as model,
        pytest.raises(PeerError, match=f"at most {MOST - 20} tokens in total were agreed on"),
    ):
        scene.choose(model)
        values(model)
