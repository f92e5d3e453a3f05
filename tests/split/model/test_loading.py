"""Loading parts: only a party's own tensors are fetched, read and stored, and all are compared."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import split.model.checkpoint
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model, outline
from finetuning.model.fingerprint import fingerprint
from finetuning.model.tensor_names import full_names
from finetuning.settings import ModelSettings
from split.model.checkpoint import Checkpoint, compare_with_checkpoint
from split.model.loading import load_parts, locate_parts, tensors_of
from split.model.partition import (
    Partition,
    part_class,
    tensors_of_part,
)
from split.settings import SplitSettings
from tests.split.conftest import (
    load_all,
)


class CountingFile:
    """Replaces a safetensors file, and records the names of the tensors that are read."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args, **kwargs):
        self.file = safe_open(*args, **kwargs)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return CountingSlice(self.file.get_slice(name), name)


class CountingSlice:
    def __init__(self, stored, name):
        self.stored, self.name = stored, name

    def get_shape(self):
        return self.stored.get_shape()

    def __getitem__(self, place):
        value = self.stored[place]
        if value.numel():
            CountingFile.read[self.name] += 1
        return value


@pytest.mark.parametrize("architecture", ["Llama", "Mixtral"])
def test_only_tensors_of_the_party_are_read_from_shards(
    architecture, random_checkpoint, monkeypatch
):
    directory = random_checkpoint(architecture, shards="30KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    monkeypatch.setattr(split.model.checkpoint, "safe_open", CountingFile)
    ours, settings = fingerprint(directory), ModelSettings(name=str(directory))
    for parties in (["head", "tail"], ["body"]):
        CountingFile.read.clear()
        parts = load_parts(settings, directory, Partition(4, 1, 1), parties)
        needed = tensors_of(directory, Partition(4, 1, 1), parties)
        assert set(CountingFile.read) == needed < ours.keys()
        digests = {name: d for part in parts.values() for name, d in part.digests.items()}
        assert digests == {name: ours[name] for name in needed}


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_have_the_quantised_weights_of_the_whole(
    random_checkpoint, checkpoint, quantization, dtype, tmp_path
):
    source = random_checkpoint(hidden_size=64, vocab_size=320)
    directory = Path(shutil.copytree(source, tmp_path / "whole"))
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, directory)
    settings = ModelSettings(name=str(directory), quantization=quantization, dtype=dtype)
    whole = dict(load_base_model(settings).model.state_dict())
    for part in load_all(directory, 1, 1, quantization=quantization, dtype=dtype).values():
        for name, value in part.model.state_dict().items():
            assert torch.equal(value, whole.pop(name)), name
    assert not whole


def test_only_own_shards_are_required(random_checkpoint, tmp_path):
    source = random_checkpoint(shards="30KB")
    needed = tensors_of(source, Partition(4, 1, 1), ["body"])
    shards = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    directory = tmp_path / "partial"
    directory.mkdir()
    for name in {"config.json", "model.safetensors.index.json", *(shards[n] for n in needed)}:
        shutil.copy(source / name, directory / name)
    absent = sorted(set(shards.values()) - {file.name for file in directory.iterdir()})
    assert absent
    settings = ModelSettings(name=str(directory))
    body = load_parts(settings, directory, Partition(4, 1, 1), ["body"])["body"]
    assert body.digests.keys() == needed
    with pytest.raises(BaseModelError, match=r"incomplete"):
        load_parts(settings, directory, Partition(4, 1, 1), ["head", "tail"])


def test_a_misplaced_block_is_refused_by_name(random_checkpoint):
    directory = random_checkpoint()
    whole = outline(directory)
    checkpoint = Checkpoint(directory)
    partition = Partition(4, 1, 1)
    sources = tensors_of_part(whole, full_names(whole, checkpoint.files), partition, "body")
    state = load_file(directory / "model.safetensors")
    # What is loaded from blocks 2 and 1 instead of 1 and 2.
    swap = {"1": "2", "2": "1"}
    wrong = {
        ".".join(swap.get(part, part) for part in name.split(".")): state[name] for name in sources
    }
    kind = part_class(whole, partition, "body")
    model = kind.from_pretrained(None, config=whole.config, state_dict=wrong)
    with pytest.raises(BaseModelError) as caught:
        compare_with_checkpoint(model, checkpoint, sources, quantized=False)
    assert "model.layers.1." in str(caught.value)
    assert str(directory / "model.safetensors") in str(caught.value)


def test_a_missing_tensor_is_named(random_checkpoint, tmp_path):
    directory = Path(shutil.copytree(random_checkpoint(), tmp_path / "missing"))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_all(directory, 1, 1)


def test_locating_needs_no_hub_for_a_directory(random_checkpoint, tmp_path):
    directory = random_checkpoint()
    assert locate_parts(str(directory), SplitSettings(), ["body"]) == directory
    with pytest.raises(BaseModelError, match=r"no config\.json"):
        locate_parts(str(tmp_path), SplitSettings(), ["body"])
    with pytest.raises(BaseModelError, match="cache"):
        locate_parts("nobody/has-this-model", SplitSettings(), ["body"])


def test_of_a_cached_checkpoint_only_own_shards_are_needed(
    random_checkpoint, tmp_path, monkeypatch
):
    source = random_checkpoint(shards="30KB")
    needed = tensors_of(source, Partition(4, 1, 1), ["body"])
    shards = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    commit = "0" * 40
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in {"config.json", "model.safetensors.index.json", *(shards[n] for n in needed)}:
        shutil.copy(source / name, snapshot / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    directory = locate_parts("someone/model", SplitSettings(), ["body"])
    assert directory == snapshot
    load_parts(ModelSettings(name="someone/model"), directory, Partition(4, 1, 1), ["body"])


MEASURES_LOADING = """
import json, sys
from pathlib import Path
import torch
from finetuning.settings import ModelSettings
from split.model.loading import load_parts
from split.model.partition import Partition

def peak():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
    return int(line.split()[1]) * 1024

small, large = sys.argv[1:]
results = []
for parties in (["head", "tail"], ["body"]):
    load_parts(ModelSettings(name=small), Path(small), Partition(4, 1, 1), parties, ["cpu"])
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    parts = load_parts(ModelSettings(name=large), Path(large), Partition(6, 1, 1), parties, ["cpu"])
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for part in parts.values() for p in part.model.parameters()
    }
    results.append([peak() - before, sum(storages.values())])
    del parts, storages
print(json.dumps(results))
"""


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_tensors(random_checkpoint):
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "vocab_size": 24000}
    large = random_checkpoint(
        **sizes, num_hidden_layers=6, tie_word_embeddings=True, dtype=torch.bfloat16
    )
    process = subprocess.run(
        [sys.executable, "-c", MEASURES_LOADING, str(random_checkpoint()), str(large)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for grown, own in json.loads(process.stdout.splitlines()[-1]):
        # Beside its tensors a process keeps what its loading threads have freed.
        assert grown < 1.15 * own + 32e6, f"{grown / 1e6:.0f} MB for {own / 1e6:.0f} MB"
