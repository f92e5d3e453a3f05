"""``chambers convert``: the converted checkpoint generates, and can be split."""

import shutil

import pytest

from finetuning.settings import ModelSettings
from split.model.exactness import check_exactness
from split.model.partition import partition_of
from split.settings import SplitSettings
from tests.chambers.conftest import execute, refused
from tests.finetuning.conversion.originals import (
    BAICHUAN,
    CHATGLM,
    baichuan_shapes,
    chatglm_shapes,
    draw,
    write,
)


@pytest.fixture(params=["Baichuan-7B", "ChatGLM3-6B"])
def original(request, tmp_path, sentencepiece_file):
    config, shapes = BAICHUAN, baichuan_shapes
    if request.param == "ChatGLM3-6B":
        config, shapes = CHATGLM, chatglm_shapes
    folder = write(tmp_path / "original", config, draw(shapes(config)))
    shutil.copy(sentencepiece_file, folder)
    return request.param, folder


def test_a_converted_checkpoint_generates_and_can_be_split(original, tmp_path, capsys):
    model, folder = original
    target = tmp_path / "models" / "converted"
    shown = execute(capsys, "convert", folder, target)
    assert model in shown
    assert f"chambers train model.name={target}" in shown
    words = ("--max-new-tokens", "6", "the court")
    assert execute(capsys, "generate", "--model", target, *words)
    partition = partition_of(target, SplitSettings())
    settings = ModelSettings(name=str(target))
    check_exactness(target, settings, partition, prefixes=True, generation=True)
    assert f"{target} exists" in refused(capsys, "convert", folder, target)


def test_what_is_missing_or_unknown_is_refused(original, tmp_path, capsys):
    _, folder = original
    assert "there is no folder /nowhere" in refused(capsys, "convert", "/nowhere", tmp_path / "a")
    reason = refused(capsys, "convert", "nobody/not-there", tmp_path / "a")
    assert "nobody/not-there is neither a folder nor the id of a checkpoint" in reason
    (folder / "tokenizer.model").unlink()
    reason = refused(capsys, "convert", folder, tmp_path / "a")
    assert f"{folder / 'tokenizer.model'} can't be read" in reason
    assert not (tmp_path / "a").exists()
