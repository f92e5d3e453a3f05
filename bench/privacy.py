"""The cost of row-level differential privacy: ``python -m bench.privacy``.

Three clients with generated rows train with FedJudge-Base. The table has a row for each ε: each
client adds the least noise with which its run spends at most ε; ∞ is a run without privacy. With
privacy, clients' replies contain no losses, so held-out losses are measured here.
"""

import logging
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from opacus.accountants.utils import get_noise_multiplier

from bench.harness import command, make_table, show, spread
from chambers.in_process import InProcessGrid
from client_app.institution import Institution, open_institution
from client_app.privacy_account import private_steps
from federation.run_config import RunConfig, parse_run_config
from federation.site_policy import PrivacyPolicy
from finetuning.adapters.adapter import State, attach_adapter, load_adapter
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_base_model
from finetuning.model.whole_model import WholeModel
from tests.in_process import run_in_process

_CLIENTS = 3
_EPSILONS = (math.inf, 8.0, 2.0)
_DELTA, _ROW_NORM = 1e-4, 1.0
_SETTINGS: dict[str, Any] = {
    "strategy": "fedjudge-base",
    "rounds": 2,
    "adapter.rank": 8,
    "adapter.alpha": 16,
    "adapter.targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
    "data.max-length": 512,
    "train.local-steps": 8,
    "train.batch-size": 4,
    "train.accumulation": 8,
    "train.learning-rate": 3e-3,
    "train.max-gradient-norm": 1.0,
    "evaluate.every": 2,
    "evaluate.batch-size": 32,
}


def run(epsilon: float, seed: int) -> tuple[list[float], list[float]]:
    """Train with one ε and one seed; return noise and losses.

    The noise is each client's σ, in ascending order. The losses are three means over clients of the
    held-out loss: of the base model, with the last global adapter and with personalised adapters.
    """
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel("ERROR")
    values = _SETTINGS | {"seed": seed}
    config = parse_run_config(values)
    nodes: dict[int, dict[str, Any]] = {
        i + 1: {"partition-id": i, "num-partitions": _CLIENTS} for i in range(_CLIENTS)
    }
    institutions = [open_institution(config, node) for node in nodes.values()]
    noise = []
    with tempfile.TemporaryDirectory() as folder:
        for node, institution in zip(nodes.values(), institutions, strict=True):
            if epsilon < math.inf:
                file = Path(folder) / f"{institution.name}.toml"
                noise.append(_write_policy(file, epsilon, config, institution.size))
                node["policy"] = str(file)
        state = str(Path(folder) / "state")
        grid = InProcessGrid(values | {"state-path": state}, nodes)
        journal = run_in_process(values, Path(state), _CLIENTS, grid)
    own = [journal.kept[institution.name] for institution in institutions]
    everyone = [journal.adapters[config.rounds]] * _CLIENTS
    losses = [_loss(config, institutions, adapters) for adapters in (None, everyone, own)]
    return sorted(noise), losses


def _write_policy(file: Path, epsilon: float, config: RunConfig, rows: int) -> float:
    """Write a policy with the least σ such that a client's run spends at most ε; return this σ."""
    steps = private_steps(PrivacyPolicy(), config.train, rows, config.rounds)
    noise: float = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=_DELTA,
        sample_rate=steps.sampling_rate,
        steps=steps.steps,
    )
    folder, name = file.parent, file.stem
    file.write_text(
        f'paths = ["{folder}"]\naudit-log = "{folder}/{name}.audit.jsonl"\n'
        f"[privacy]\nepsilon = {epsilon}\ndelta = {_DELTA}\nnoise-multiplier = {noise}\n"
        f'row-norm = {_ROW_NORM}\naccount = "{folder}/{name}.privacy.jsonl"\n'
    )
    return noise


def _loss(
    config: RunConfig, institutions: Sequence[Institution], adapters: Sequence[State] | None
) -> float:
    """Return the mean held-out loss over clients, each with its adapter or with the base model."""
    base = load_base_model(config.model)
    model = WholeModel(attach_adapter(base.model, config.adapter, base.reference))
    losses = []
    for index, institution in enumerate(institutions):
        # A new adapter has no effect, so without adapters the base model is measured.
        if adapters is not None:
            load_adapter(model.peft_model, adapters[index])
        size = config.evaluate.batch_size
        losses.append(held_out_loss(model, institution.test, institution.padding, size).loss)
    return statistics.mean(losses)


def main() -> None:
    """Run each ε with each seed, one run per core at a time, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    cells = list(product(_EPSILONS, range(seeds)))
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as executor:
        outcomes = dict(zip(cells, executor.map(run, *zip(*cells, strict=True)), strict=True))
    table = make_table("ε", "σ of the clients", "held-out loss: base", "global", "personalised")
    for epsilon in _EPSILONS:
        noise, _ = outcomes[epsilon, 0]
        by_seed = [outcomes[epsilon, seed][1] for seed in range(seeds)]
        table.add_row(
            "∞" if epsilon == math.inf else f"{epsilon:g}",
            f"{noise[0]:.2f} to {noise[-1]:.2f}" if noise else "-",
            *(spread(values, digits=3) for values in zip(*by_seed, strict=True)),
        )
    show(f"FedJudge-Base, mean ± standard deviation over seeds ({seeds}), δ = {_DELTA:g}", table)


if __name__ == "__main__":
    main()
