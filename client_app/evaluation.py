"""Evaluating the base, global and personalised models on a client's held-out data."""

from typing import Any

from client_app.institution import Institution, load_model
from client_app.state import ClientState
from client_app.training import own_importance
from finetuning.adapters.adapter import State, load_adapter, save_adapter
from finetuning.adapters.model_card import model_card
from finetuning.evaluation.held_out import generate_answers, held_out_loss
from finetuning.model.whole_model import WholeModel
from split.client.split_model import SplitModel
from strategies.messages import Instruction
from strategies.run_config import RunConfig


def evaluate_models(
    institution: Institution,
    config: RunConfig,
    instruction: Instruction,
    arrays: State,
    state: ClientState,
) -> tuple[dict[str, int | float], State | None]:
    """Do what an evaluate message asks for.

    Args:
        institution: whose held-out data.
        config: the run's.
        instruction: the round, and what is due.
        arrays: the global adapter.
        state: where this client's personalised adapter is; the final ones are saved beside it.

    Returns:
        Metrics named ``<model>.<metric>``, and J at the global adapter if it was asked for.

    """
    model, tokenizer = load_model(config.model, config.adapter)
    personalised = state.adapter(instruction.round)
    metrics: dict[str, int | float] = {}
    if instruction.losses:
        if instruction.round == 0:
            with model.without_adapter():
                metrics |= measured("base", model, tokenizer, institution, config)
        elif personalised is not None:
            load_adapter(model.peft_model, personalised)
            metrics |= measured("personalised", model, tokenizer, institution, config)
    load_adapter(model.peft_model, arrays)
    if instruction.losses and instruction.round > 0:
        metrics |= measured("global", model, tokenizer, institution, config)
    if instruction.final:
        _keep(arrays, personalised, model, institution, config, state)
    if not instruction.importance:
        return metrics, None
    return metrics, own_importance(institution, config, model, tokenizer.pad_token_id)


def measured(
    kind: str,
    model: WholeModel | SplitModel,
    tokenizer: Any,
    institution: Institution,
    config: RunConfig,
) -> dict[str, int | float]:
    """Measure the model as it is now; scores of generated answers where the run asks for them.

    Args:
        kind: the model's name.
        model: whole, or with the blocks between at the server.
        tokenizer: of the base model.
        institution: whose held-out data.
        config: the run's.

    Returns:
        Metrics named ``<kind>.<metric>``.

    """
    settings = config.evaluate
    held_out = held_out_loss(model, institution.test, tokenizer.pad_token_id, settings.batch_size)
    metrics: dict[str, int | float] = {
        "loss": held_out.loss,
        "perplexity": held_out.perplexity,
        "examples": len(institution.test),
        "target-tokens": held_out.target_tokens,
    }
    if settings.generate:
        from finetuning.evaluation.scoring import score

        examples = institution.test[: settings.generate_examples]
        answers = generate_answers(
            model, tokenizer, examples, settings.batch_size, settings.max_new_tokens
        )
        metrics |= score(answers, [example.reference for example in examples])
    return {f"{kind}.{name}": value for name, value in metrics.items()}


def _keep(
    arrays: State,
    personalised: State | None,
    model: WholeModel,
    institution: Institution,
    config: RunConfig,
    state: ClientState,
) -> None:
    """Save what the institution takes home, in PEFT's format, on its own disk."""
    peft_config = model.peft_model.peft_config["default"]
    base = str(peft_config.base_model_name_or_path)
    state.describe(config.flat(), base, institution.fingerprint)
    for kind, adapter in (("global", arrays), ("personalised", personalised)):
        if adapter is not None:
            card = model_card(
                f"{kind} adapter of {institution.name}",
                config.model.name,
                base,
                {institution.name: institution.size},
                config.rounds,
                config.flat(),
            )
            save_adapter(state.directory / "adapters" / kind, adapter, peft_config, card)
