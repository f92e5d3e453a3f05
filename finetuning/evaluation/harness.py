"""Run tasks of lm-evaluation-harness, which must be installed, on whole and split models."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from finetuning.data.candidates import Continuation
from finetuning.data.formats import DataError
from finetuning.evaluation.generation import GREEDY, generate_texts
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.model.base_model import text_config
from finetuning.model.interface import TextModel
from finetuning.progress import progress_bar
from finetuning.whole_model import WholeModel

# Defaults of the harness for tasks and models without limits.
_NEW_TOKENS = 256
_LENGTH = 2048
_TEXTS_AT_ONCE = 64


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """Adapter from a whole or split model to the harness's model interface.

    Texts are tokenized and truncated as in the harness's class for Hugging Face models. Unlike in
    that class, a context is processed (and, for a split model, sent) only once, together with all
    of its continuations if they fit into a batch.

    A batch has at most ``max_tokens`` padded tokens, prefixes included. Texts of more than
    ``max_length`` tokens are truncated at the start.
    """

    def __init__(self, model: TextModel, tokenizer: Any, max_tokens: int, max_length: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._model = model
        self._max_tokens = max_tokens

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that is put before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokenize a text, and add special tokens unless the text already begins with one."""
        options = {}
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        tokens: list[int] = self.tokenizer.encode(string, **options)
        return tokens

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-probability of each whole text; long texts are split into windows."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        likelihoods = iter(self._loglikelihood_tokens([w for own in windows for w in own]))
        return [sum(next(likelihoods)[0] for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continue each context until a stop sequence is generated."""
        # Requests with the same settings share batches.
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        texts = [""] * len(requests)
        with progress_bar(total=len(requests), description="generating") as bar:
            for group in groups.values():
                settings = normalize_gen_kwargs(requests[group[0]].args[1], _NEW_TOKENS)
                eos = self.tokenizer.decode(self.eot_token_id)
                stops = handle_stop_sequences(settings.pop("until", None), eos=eos)
                new = int(settings.pop("max_gen_toks"))
                if not 0 < new < self.max_length:
                    raise DataError(
                        f"a task generates up to {new} tokens, but the limit is {self.max_length}"
                    )
                contexts = [self.tok_encode(requests[i].args[0]) for i in group]
                kept = self.max_length - new
                prompts = [torch.tensor(c[-kept:], dtype=torch.int64) for c in contexts]
                beams = int(settings.get("num_beams") or 1)
                if beams > 1 and not isinstance(self._model, WholeModel):
                    raise DataError(
                        f"a task uses {beams} beams (num_beams); split models support only one"
                    )
                longest = self._model.columns_before + max(map(len, prompts))
                total = beams * (longest + new)
                if total > self._max_tokens:
                    raise DataError(
                        f"a prompt of {longest} tokens takes {total} with its answer, but "
                        f"at most {self._max_tokens} can be processed at once"
                    )
                if not settings["do_sample"]:
                    settings |= GREEDY
                settings |= {"stop_strings": stops, "tokenizer": self.tokenizer}
                answers = generate_texts(
                    model=self._model,
                    tokenizer=self.tokenizer,
                    prompts=prompts,
                    batch_size=_TEXTS_AT_ONCE,
                    max_new=new,
                    max_tokens=self._max_tokens // beams,
                    settings=settings,
                    finished=bar.update,
                    exactly=True,
                )
                for i, text in zip(group, answers, strict=True):
                    texts[i] = postprocess_generated_text(text, stops, None)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        continuations: dict[int, Continuation] = {}
        for index, (_text, context, answer) in enumerate(requests):
            if not answer:  # an empty answer is part of the context's last token
                continue
            if len(answer) > self.max_length:
                raise DataError(
                    f"an answer has {len(answer)} tokens, but the limit is {self.max_length}"
                )
            # The last token is predicted but not read, so it takes no position.
            kept = context[max(0, len(context) + len(answer) - self.max_length - 1) :]
            groups.setdefault(tuple(kept), []).append(index)
            continuations[index] = Continuation(torch.tensor(kept), torch.tensor(answer))
        likelihoods_of_groups = log_probabilities(
            model=self._model,
            groups=[[continuations[i] for i in group] for group in groups.values()],
            padding=self.tokenizer.pad_token_id,
            max_tokens=self._max_tokens,
        )
        results = [(0.0, True)] * len(requests)
        for group, likelihoods in zip(groups.values(), likelihoods_of_groups, strict=True):
            for index, likelihood in zip(group, likelihoods, strict=True):
                results[index] = (likelihood.log_probability, likelihood.is_greedy)
        return results


@contextmanager
def load_tasks(names: Sequence[str], folder: Path | None) -> Iterator[Any]:
    """Load tasks with their rows, yield a `TaskManager`, and delete copies of the rows on exit.

    No rows remain in the caches of ``datasets`` and ``evaluate`` or in their temporary folder,
    unless the process is killed. ``names`` are tasks or groups of tasks; ``folder`` contains YAML
    files of additional tasks. Raise a DataError if a name is neither a task nor a group, or a task
    can't be loaded.
    """
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown:
        raise DataError(f"{unknown[0]} is not a task of lm-evaluation-harness")
    with _no_copies():
        for name in names:
            try:
                manager.load([name])
            except Exception as error:
                # A task's description contains code, which may raise any exception.
                reason = f"{type(error).__name__}: {error}"
                raise DataError(f"the task {name} can't be loaded: {reason}") from error
        yield manager


def max_positions(directory: Path, tokenizer: Any) -> int:
    """Return the maximum length in tokens that the harness assumes for a model."""
    return int(resolve_max_length(text_config(directory), tokenizer, default=_LENGTH))


def harness_scores(
    model: HarnessModel, names: Sequence[str], manager: Any, limit: int | None
) -> dict[str, dict[str, Any]]:
    """Return the number of questions and the metrics of each task or group of tasks.

    ``manager`` is from `load_tasks`, whose context must still be active; ``limit`` is the maximum
    number of rows of each task, or None for all rows.
    """
    results = simple_evaluate(
        model=model,
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    counts = results["n-samples"]
    return {
        task: {
            "questions": counts.get(task, {}).get("effective"),
            "metrics": {
                key.removesuffix(",none"): float(value)
                for key, value in values.items()
                if isinstance(value, int | float) and "_stderr" not in key and "," in key
            },
        }
        for task, values in results["results"].items()
    }


@contextmanager
def _no_copies() -> Iterator[None]:
    """Redirect the libraries' caches to a temporary folder within the context."""
    import datasets
    import evaluate

    places = [
        (datasets.config, "HF_DATASETS_CACHE"),
        (datasets.config, "DOWNLOADED_DATASETS_PATH"),
        (evaluate.config, "HF_METRICS_CACHE"),
    ]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for config, name in places:
            stack.callback(setattr, config, name, getattr(config, name))
            setattr(config, name, Path(folder) / name)
        yield
