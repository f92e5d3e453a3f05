"""Noise is added to all hidden states that are sent, has the stated size, and never repeats."""

import pytest
import torch

from finetuning.data.batching import collate
from split.model.adapters import take_apart
from split.model.partition import partition_of
from split.protocol.frames import Kind
from tests.split.clients import Client, draw, serving, split_settings


def recording(model, sent: list[torch.Tensor]) -> None:
    """Append the hidden states that a split model sends from now on to ``sent``."""
    send = model.lane.send

    def record(kind, step=0, micro_batch=0, tensors=None, fields=None):
        if kind is Kind.HIDDEN:
            sent.append(tensors["hidden"].clone())
        return send(kind, step, micro_batch, tensors or {}, fields or {})

    model.lane.send = record


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_whatever_is_sent_has_noise_of_its_own(base, beginning, noise):
    split, sent = split_settings(), []
    batch = collate(draw(4, 0), 0)
    prompts = torch.randint(2, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    with serving(base, beginning, split) as server:
        client = Client("alpha", base, split, noise=noise)
        for _ in range(2):
            server.begin_round({"alpha": 9}, 0)
            client.train(server, beginning, 1, disturb=lambda model: recording(model, sent))
            server.finish_lanes()
        trained, sent = sent, []
        parts = take_apart(beginning, partition_of(base, split))
        invitation = server.invite_to_evaluate("alpha", 0, {"global": parts["body"]}, 60.0)
        with client.lane(invitation) as model:
            recording(model, sent)
            model.choose("global", parts["head"] | parts["tail"])
            for _ in range(2):
                model.summed_losses([batch])
            for _ in range(2):
                model.generate(prompts, torch.ones_like(prompts), 2, do_sample=False)
            model.end()
    measured, generated = sent[:2], sent[2:]
    pairs = list(zip(trained[: len(trained) // 2], trained[len(trained) // 2 :], strict=True))
    pairs += [(measured[0], measured[1]), (generated[0], generated[2])]
    for one, other in pairs:
        assert one.shape == other.shape
        if not noise:
            assert torch.equal(one, other)
            continue
        # Both have noise, whose variances add up; so they do with that of the states.
        size = (one.square().mean(-1, keepdim=True) / (1 + noise**2)).sqrt()
        # The noise can't be seeded: about six standard deviations of what is measured.
        error = 7 / (2 * one.numel()) ** 0.5
        assert float(((one - other) / size).std()) == pytest.approx(noise * 2**0.5, rel=error)
