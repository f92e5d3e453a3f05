"""Generation with prefixes through lanes equals PEFT's own ``generate``."""

import pytest
import torch

from split.protocol.errors import LaneError
from tests.marks import nightly
from tests.split.clients import send_texts, tokens_taken
from tests.split.model.test_generation import GREEDY, NEW, SAMPLED, Scene, ends_of, generated
from tests.split.model.test_prefixes import ARCHITECTURES, PREFIX

# Prompts, new tokens and prefixes of three rows.
MAX_CACHED_TOKENS = 3 * (11 + NEW + PREFIX.prefix_length)
# All of whose blocks have windows that are shorter than prompts; by the others the prefix is left
# behind while the texts grow.
SHORT = ("Mistral", "Gemma3Text")
CASES = [*ARCHITECTURES.items(), *((name, {"sliding_window": 12}) for name in SHORT)]
BY_DAY = {"Llama", "Gemma3Text", "GPT2"}


def choose(scene: Scene, model, name: str) -> None:
    if name == "base":
        model.choose("base", None)
    else:
        scene.choose(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [case if case[0] in BY_DAY else nightly(*case) for case in CASES],
)
def test_texts_equal_the_whole_model_token_for_token(architecture, changes, random_checkpoint):
    """Those of the base model, too, before and after."""
    directory = random_checkpoint(architecture, **changes)
    whole = Scene(directory, architecture, PREFIX).whole()
    expected = {}
    for name in ("base", "global"):
        for index, settings in enumerate((GREEDY, SAMPLED)):
            ended = settings | {"eos_token_id": ends_of(whole, settings)}
            if name == "base":
                with whole.without_adapter():
                    expected[name, index] = ended, generated(whole, **ended)
            else:
                expected[name, index] = ended, generated(whole, **ended)
    if architecture not in SHORT or changes:
        assert not torch.equal(expected["base", 1][1], expected["global", 1][1])
    for blocks in ({}, {"head_blocks": 0, "tail_blocks": 0}):
        scene = Scene(directory, architecture, PREFIX, **blocks)
        client = scene.client()
        with scene.serving(max_cached_tokens=MAX_CACHED_TOKENS) as server:
            with scene.lane(server, client) as model:
                for name in ("base", "global", "base"):
                    choose(scene, model, name)
                    for index in range(2):
                        settings, texts = expected[name, index]
                        assert torch.equal(generated(model, **settings), texts), (blocks, name)
                model.end()
            (account,) = server.finish_lanes()
        assert not account.error


def test_prefixes_take_their_place_in_the_budget(random_checkpoint):
    """And nothing where the base model generates."""
    scene = Scene(random_checkpoint("Llama"), "Llama", PREFIX)
    client = scene.client()

    with scene.serving(max_cached_tokens=MAX_CACHED_TOKENS) as server:
        with scene.lane(server, client) as model:
            for name, expected in (("global", MAX_CACHED_TOKENS), ("base", 3 * (11 + NEW))):
                choose(scene, model, name)
                send_texts(model, new_tokens=NEW)
                model.lane.receive(30)
                assert tokens_taken(server, scene.split) == expected
        server.finish_lanes()
        assert tokens_taken(server, scene.split) == 0
    with (
        scene.serving(max_cached_tokens=MAX_CACHED_TOKENS - 1) as server,
        scene.lane(server, client) as model,
    ):
        scene.choose(model)
        send_texts(model, new_tokens=NEW)
        with pytest.raises(LaneError, match=r"with a prefix of 5.* at most 83 tokens"):
            model.lane.receive(30)
