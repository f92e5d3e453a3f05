"""Spreading the server's blocks over devices, tested on the CPU as far as possible.

``accelerate``'s hooks are tested with all devices on the CPU, where all results must be equal, and
with later blocks on the meta device, which computes only shapes but refuses tensors of other
devices as a GPU does.
"""

from itertools import pairwise

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pydantic import ValidationError

from finetuning.errors import BaseModelError
from finetuning.model.base_model import outline
from finetuning.model.placement import assign_blocks, device_map, hand_over, path_of_blocks
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.devices import body_devices, map_of_part
from split.model.key_values import KeyValues
from split.model.loading import load_parts
from split.model.partition import Partition, blocks_of
from split.protocol.frames import Padding
from split.settings import SplitSettings
from tests.split.bodies import DROPOUT, load_body, train_branches
from tests.split.conftest import LENGTHS

PREFIX = AdapterSettings(kind="prefix", prefix_length=5)


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        ([5] * 6, [80, 80], [0, 0, 0, 1, 1, 1]),
        ([5] * 7, [1, 1, 1], [0, 0, 1, 1, 1, 2, 2]),
        ([5] * 6, [80, 40], [0, 0, 0, 0, 1, 1]),
        ([1, 1, 1, 1, 4], [1, 1], [0, 0, 0, 0, 1]),
        ([5], [1, 1], [0]),
        ([5, 5], [1] * 8, [1, 5]),
    ],
)
def test_blocks_are_spread_in_order_and_by_room(sizes, room, expected):
    assert assign_blocks(sizes, room) == expected


def test_equal_devices_differ_by_at_most_one_block():
    for blocks in range(1, 50):
        for devices in range(1, 9):
            places = assign_blocks([3] * blocks, [7] * devices)
            assert places == sorted(places)
            shares = [places.count(device) for device in range(devices)]
            assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "OPT", "Mixtral", "Gemma3Text"])
def test_a_map_covers_a_body_and_splits_between_blocks_alone(random_checkpoint, architecture):
    directory = random_checkpoint(architecture, num_hidden_layers=7)
    partition = Partition(7, 1, 2)
    places = map_of_part(outline(directory), partition, "body", ["cpu:0", "cpu:1"])
    body = load_parts(ModelSettings(name=str(directory)), directory, partition, ["body"], ["cpu"])[
        "body"
    ]
    tensors = [name for name, _ in [*body.model.named_parameters(), *body.model.named_buffers()]]
    owners = [[path for path in places if name.startswith(f"{path}.")] for name in tensors]
    assert all(len(owner) == 1 for owner in owners), "each tensor is placed once"
    assert {path for (path,) in owners} == places.keys()
    blocks = [device for path, device in places.items() if path.rpartition(".")[2].isdigit()]
    assert blocks == ["cpu:0"] * 2 + ["cpu:1"] * 2
    assert list(places.values()) == sorted(places.values()), "the rest is where the first block is"
    assert map_of_part(outline(directory), partition, "body", ["cpu:0"]) == {"": "cpu:0"}


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "OPT", "Bloom", "Mixtral", "Gemma3Text"])
def test_a_map_of_a_whole_model_returns_to_the_first_device(random_checkpoint, architecture):
    whole = outline(random_checkpoint(architecture, num_hidden_layers=4))
    places = device_map(whole, path_of_blocks(whole, 4), ["cpu:0", "cpu:1"])
    for name in dict([*whole.named_parameters(), *whole.named_buffers()]):
        assert sum(name.startswith(f"{path}.") for path in places) == 1, name
    changes = [devices for devices in pairwise(places.values()) if len(set(devices)) == 2]
    assert changes == [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")], "the last block hands over"


def test_devices_are_the_settings_or_what_there_is():
    assert body_devices(SplitSettings()) == ["cpu"]
    assert body_devices(SplitSettings(body_devices="cpu")) == ["cpu"]
    with pytest.raises(BaseModelError, match=r"split\.body-devices names cuda:0, .*available: cpu"):
        body_devices(SplitSettings(body_devices="cuda:0, cuda:1"))


@pytest.mark.parametrize("devices", ["cuda", "cuda:0,cpu", "cuda:0,cuda:0", "cuda:0,", "tpu:0"])
def test_unsupported_devices_are_refused(devices):
    with pytest.raises(ValidationError, match="different GPUs"):
        SplitSettings(body_devices=devices)


def dispatch(body, directory):
    """Dispatch as ``from_pretrained`` does with several devices, and move tensors between them."""
    model = body.model
    places = map_of_part(outline(directory), Partition(6, 1, 1), "body", ["cpu", "cpu"])
    skipped = model._skip_keys_device_placement
    dispatch_model(model, places, skip_keys=skipped, force_hooks=True)
    assert hasattr(model.base_model.layers[-1], "_hf_hook")
    hand_over(model, {f"model.layers.{n}": f"cpu:{n // 3}" for n in range(1, 5)})
    assert [len(block._forward_hooks) for block in model.base_model.layers] == [0, 1, 0, 0]


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_dispatched_body_trains_as_one_that_is_not(
    random_checkpoint, quantization, checkpointing
):
    directory = random_checkpoint(num_hidden_layers=6, hidden_size=64)
    expected = train_branches(load_body(directory, quantization), DROPOUT)
    body = load_body(directory, quantization, checkpointing)
    dispatch(body, directory)
    found = train_branches(body, DROPOUT)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_dispatched_body_has_prefixes_and_a_cache(random_checkpoint):
    directory = random_checkpoint(num_hidden_layers=6)
    alone, body = load_body(directory), load_body(directory)
    dispatch(body, directory)
    expected, found = train_branches(alone, PREFIX), train_branches(body, PREFIX)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    prompts, following = torch.randn(3, 11, 32), torch.randn(3, 1, 32)
    for part in (alone, body):
        part.train(False)
    caches = [KeyValues(part, Padding("left", LENGTHS), 11) for part in (alone, body)]
    for given in (prompts, following, following):
        one, other = (cache.extend(given) for cache in caches)
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        pytest.param(architecture, adapter, id=f"{architecture}-{kind}")
        for kind, adapter in {"none": None, "lora": AdapterSettings(), "prefix": PREFIX}.items()
        for architecture in ("Llama", "GPT2", "Bloom", "Gemma3Text")
        # These two have no prefixes with these tests' grouped heads.
        if not (kind == "prefix" and architecture in {"GPT2", "Bloom"})
    ],
)
def test_what_belongs_to_a_block_is_on_its_device(random_checkpoint, architecture, adapter):
    directory = random_checkpoint(architecture, num_hidden_layers=6)
    body = load_body(directory)
    model = body.model
    path = blocks_of(model, 4)
    places = {f"{path}.{n}": "cpu" if n < 3 else "meta" for n in range(1, 5)}
    for name, device in places.items():
        if device == "meta":
            skipped = model._skip_keys_device_placement
            hook = AlignDevicesHook("meta", place_submodules=True, skip_keys=skipped)
            add_hook_to_module(model.get_submodule(name), hook)
    hand_over(model, places)
    if adapter:
        body.attach(adapter)
        found = {str(value.device) for value in body.trainable().values()}
        assert found == {"cpu", "meta"}
    assert body.device == torch.device("cpu")
    came_from = []
    model.get_submodule(f"{path}.3").register_forward_pre_hook(
        lambda _, given: came_from.append(given[0].device.type)
    )
    for side in ("right", "left"):
        output = body(torch.randn(3, 11, 32), Padding(side, LENGTHS))
        assert output.device == torch.device("meta")
        assert output.shape == (3, 11, 32)
    assert came_from == ["meta"] * 2, "the block before has sent it"
    if adapter is not PREFIX:
        kept = KeyValues(body, Padding("left", LENGTHS), 11)
        assert kept.extend(torch.randn(3, 11, 32)).shape == (3, 11, 32)
        assert kept.extend(torch.randn(3, 1, 32)).device == torch.device("meta")
        assert [str(layer.keys.device) for layer in kept.cache.layers] == ["cpu"] * 2 + ["meta"] * 2
