"""Shared fixtures: small random checkpoints in Hugging Face format, and clients' files."""

import ctypes
import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small matrices gain nothing from threads, and threads of several processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# On a busy machine, an example's duration is meaningless.
hypothesis.settings.register_profile("chambers", deadline=None)
hypothesis.settings.load_profile("chambers")

# Start the longest tests' files first, so that none runs alone at the end.
_LONGEST = {"test_notebook.py", "test_walk.py"}


def pytest_configure() -> None:
    # Shells start background commands with SIGINT ignored, and nohup with SIGHUP. Programs that
    # tests start inherit that, but not a function that does nothing.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST)


WORDS = [
    "the",
    "court",
    "holds",
    "that",
    "this",
    "claim",
    "is",
    "upheld",
    "and",
    "costs",
    "are",
    "shared",
    "between",
    "parties",
    "who",
    "signed",
    "a",
    "contract",
    "about",
    "goods",
    "which",
    "were",
    "never",
    "delivered",
    "before",
    "winter",
    "came",
    "to",
    "town",
]


def pytest_collection_finish() -> None:
    """Exempt the imported modules' objects from garbage collection, which they would slow down."""
    gc.collect()
    gc.freeze()


_PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)


@pytest.fixture
def left_over():
    """Return a function that finds processes that a test has not ended, including orphans."""
    # A process that loses its parent becomes a child of this process, not of init.
    become_subreaper: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    become_subreaper(_PR_SET_CHILD_SUBREAPER, 1)
    own = psutil.Process()
    before = own.children(recursive=True)

    def find() -> list[psutil.Process]:
        started = [p for p in own.children(recursive=True) if p not in before]
        return psutil.wait_procs(started, timeout=5)[1]

    yield find
    become_subreaper(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory):
    """Use a temporary cache, unless CHAMBERS_CACHE names a shared one."""
    if "CHAMBERS_CACHE" in os.environ:
        yield
        return
    os.environ["CHAMBERS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["CHAMBERS_CACHE"]


@pytest.fixture(scope="session")
def nginx():
    """Skip tests that need nginx if it is missing; in CI, fail instead."""
    if shutil.which("nginx") is None:
        reason = (
            "nginx is not installed; on Debian: apt-get install nginx-light libnginx-mod-stream"
        )
        if "CHAMBERS_CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 2 MiB, which a test can fill with ``fill``."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "2m"):
        yield folder


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """Mount a disk of the given size; skip the test if mounting isn't permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount on this system")
    if result.returncode != 0:
        pytest.skip(f"mounting is not permitted: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, free: int = 0) -> None:
    """Fill a disk with a file, ``ballast``, except for ``free`` KiB."""
    size = psutil.disk_usage(str(disk)).free - free * 1024
    try:
        (disk / "ballast").write_bytes(bytes(max(0, size)))
    except OSError as error:  # another process may have used the space
        if error.errno != errno.ENOSPC:
            raise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama with two small random blocks and a byte-level BPE tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), blocks=2)


@pytest.fixture(scope="session")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama that is deep enough to be split."""
    return write_checkpoint(tmp_path_factory.mktemp("deep"), blocks=4)


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a SentencePiece model with as many pieces as a checkpoint has tokens."""
    from sentencepiece import SentencePieceTrainer

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20),
        model_prefix=str(prefix),
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        vocab_size=320,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def write_checkpoint(directory: Path, blocks: int) -> Path:
    """Write a Llama with small random blocks and a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [" ".join(WORDS)],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<pad>", "<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(directory)
    torch.manual_seed(7)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer.get_vocab()),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(directory)
    return directory


def write_rows(file: Path, count: int, seed: int) -> None:
    """Write rows of random words; the answer repeats words of the question."""
    source = random.Random(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            chosen = source.choices(WORDS, k=source.randint(4, 14))
            answer = chosen[: source.randint(2, 4)]
            row = {"instruction": "Repeat", "input": " ".join(chosen), "output": " ".join(answer)}
            lines.write(json.dumps(row) + "\n")


@pytest.fixture(scope="session")
def client_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the data folders of three clients with unequal numbers of rows."""
    folder = tmp_path_factory.mktemp("clients")
    for seed, (name, count) in enumerate({"alpha": 24, "beta": 12, "gamma": 8}.items()):
        write_rows(folder / name / "train.jsonl", count, seed)
        write_rows(folder / name / "test.jsonl", 5, 100 + seed)
    return folder


@pytest.fixture
def values(checkpoint: Path, client_folders: Path) -> dict:
    """A run config with which the small checkpoint trains in seconds."""
    return config(checkpoint, client_folders)


def config(checkpoint: Path, client_folders: Path) -> dict:
    """Return the same run config, for fixtures of a wider scope."""
    return {
        "strategy": "fedjudge-cl",
        "rounds": 3,
        "min-nodes": 3,
        "model.name": str(checkpoint),
        "data.path": str(client_folders),
        "adapter.targets": "q_proj,k_proj,v_proj",
        "train.batch-size": 2,
        "train.accumulation": 2,
        "train.learning-rate": 5e-3,
        "continual.importance-examples": 6,
        "evaluate.generate": False,
    }
