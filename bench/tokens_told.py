"""Tokens told by what training changes in an adapter, for ``bench.membership``.

A client takes one step on a few rows. The coordinator knows the adapter before and after the step,
has chosen its weights, and looks for parameters that change only if a certain token occurs:

- LoRA on the *embeddings*: A begins at 0, as usual. A token's column changes if the token is read.
- LoRA on the *output head*: A is chosen so that A · h is about 1 for all hidden states h. Then a
  token's row of B increases if the token is a target more often than the model expects.
- *Prefix*: in the first block, a token's query depends only on the token and its position. With
  chosen keys, the queries of each tested token attend only to one position of the prefix, and other
  queries to the first position, so the values at a token's position change only if it occurs.
- LoRA on *linear layers*: A is 0 and B tiny, so that Adam's change of A is proportional to the
  gradient: its rows are linear combinations of the layer's inputs. In the first block, the inputs
  of query, key and value are the tokens' normalised embeddings. If their three matrices A have more
  rows than there are different tokens, these are the tokens in the space of the changes (DAGER,
  arXiv 2405.15586). *Random*: the weights before the step are random instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import normalize
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bench.harness import make_table
from finetuning.adapters.adapter import attach_adapter, load_state, trainable_parameters
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import Example, tokenize
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.whole_model import WholeModel

ROW_COUNTS = (1, 4, 16)
BATCH = 4
_LONGEST = 128  # tokens of a row
_RATE = 2e-3  # learning rate: with Adam, the size of a weight's first change
_OTHERS = 96  # number of rows that the attacker has
_SATURATED = 1e6  # factor of a prefix's keys
_TINY = 1e-12  # of B; gradients with respect to A are then far below Adam's ε
_WITHIN = 0.99  # cosine of a token's embedding and the space of the changes

_Values = Mapping[str, torch.Tensor]  # adapter weights, or their changes, by name
_Reader = Callable[[_Values], set[int]]  # returns the tokens that changes tell
# Numbers of tested tokens: told and in the rows, in the rows, told but not in the rows.
Told = tuple[int, int, int]


def measure_tokens(
    settings: ModelSettings, seed: int, rows: Sequence[int] = ROW_COUNTS
) -> dict[str, list[Told]]:
    """Attack a step on each number of rows; return the results by kind of adapter."""
    lora = partial(AdapterSettings, alpha=16, dropout=0.0)
    linear = partial(lora, targets="q_proj,k_proj,v_proj")
    attack = partial(_attack, settings, seed, rows)
    return {
        "LoRA on embeddings": attack(lora(rank=8, targets="embed_tokens"), _embeddings),
        "LoRA on the output head": attack(lora(rank=8, targets="lm_head"), _output_head),
        "prefix of 128 positions": attack(AdapterSettings(kind="prefix"), _prefix),
        "LoRA on linear layers, rank 8, random": attack(linear(rank=8), _random_linear),
        "LoRA on linear layers, rank 8": attack(linear(rank=8), _linear),
        "LoRA on linear layers, rank 8, 8 steps": attack(linear(rank=8), _linear, 8),
        "LoRA on linear layers, rank 16": attack(linear(rank=16), _linear),
        "LoRA on linear layers, rank 64": attack(linear(rank=64), _linear),
    }


def make_token_table(results: Sequence[Mapping[str, Sequence[Told]]]) -> Table:
    """Return the table of the sums of several seeds' results."""
    result = make_table("", *(f"{rows} row{'s' * (rows > 1)}" for rows in ROW_COUNTS))
    for name in results[0]:
        cells = []
        for of_rows in zip(*(each[name] for each in results), strict=True):
            right, occurring, wrong = (sum(numbers) for numbers in zip(*of_rows, strict=True))
            cells.append(f"{right}/{occurring}, {wrong} wrong")
        result.add_row(name, *cells)
    return result


def examples_of(tokenizer: Any, count: int, seed: int) -> list[Example]:
    """Return questions and answers of one client, which differ in names and wording."""
    values = matters.write_questions(matters.divide(3, seed)[0], count, seed, "train")
    rows = [Row(parse_messages(value), f"row {n}", dict(value)) for n, value in enumerate(values)]
    # Rows cycle through the matters, so 64 rows outside a round contain all matters.
    return tokenize(rows, tokenizer, _LONGEST)[0]


def tokens_of(examples: Sequence[Example], only_targets: bool = False) -> set[int]:
    """Return the different tokens of rows, or of the answers in them."""
    chosen = (each.tokens[each.is_target] if only_targets else each.tokens for each in examples)
    return {token for tokens in chosen for token in tokens.tolist()}


def train_adapter(
    model: WholeModel,
    parameters: Mapping[str, torch.nn.Parameter],
    rows: Sequence[Example],
    steps: Sequence[range],
    tokenizer: Any,
    seed: int,
) -> None:
    """Train an adapter with Adam; ``steps`` contains the indices of each step's rows."""
    train_round(
        model=model,
        parameters=parameters,
        examples=rows,
        padding=tokenizer.pad_token_id,
        local_round=LocalRound(steps, 0, len(steps), seed, deadline=math.inf),
        settings=TrainSettings(batch_size=BATCH, accumulation=1, learning_rate=_RATE),
    )


def _attack(
    settings: ModelSettings,
    seed: int,
    rows: Sequence[int],
    adapter: AdapterSettings,
    prepare: Callable[..., _Reader],
    steps: int = 1,
) -> list[Told]:
    """Attack ``steps`` steps on the same rows, each from other weights."""
    base = load_base_model(settings)
    torch.manual_seed(seed)
    model = WholeModel(attach_adapter(base.model, adapter, None))
    parameters = trainable_parameters(model.peft_model)
    examples = examples_of(base.tokenizer, max(rows) + _OTHERS, seed)
    own, others = examples[: max(rows)], examples[max(rows) :]
    tested = _draw(tokens_of(own), 63) + _draw(tokens_of(others) - tokens_of(own), 64)
    with torch.no_grad():
        read = prepare(base.model, parameters, tested, others)
    chosen = {name: value.detach().clone() for name, value in parameters.items()}
    results, generator = [], torch.Generator().manual_seed(seed)  # training seeds torch's own
    for count in rows:
        changes = {}
        for step in range(steps):
            before = dict(chosen)
            if step:
                for name, value in chosen.items():
                    signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
                    before[name] = value * signs
            load_state(parameters, before)
            train_adapter(model, parameters, own[:count], [range(count)], base.tokenizer, seed)
            for name, value in parameters.items():
                changes[f"{step}.{name}"] = value.detach() - before[name]
        told = read(changes)
        occurring = tokens_of(own[:count], only_targets=adapter.targets == "lm_head")
        if adapter.kind == "prefix":
            occurring &= set(tested)
        results.append((len(told & occurring), len(occurring), len(told - occurring)))
    return results


def _draw(tokens: set[int], count: int) -> list[int]:
    ordered = sorted(tokens)
    return [ordered[index] for index in torch.randperm(len(ordered))[:count]]


def _find_nonzero(tokens: torch.Tensor) -> set[int]:
    return set(tokens.nonzero().flatten().tolist())


def _embeddings(*_: Any) -> _Reader:
    return lambda changes: _find_nonzero(_only(changes, "lora_embedding_A").any(0))


def _output_head(model: Any, parameters: _Values, _: Any, others: Sequence[Example]) -> _Reader:
    states = [model.base_model(each.tokens[None]).last_hidden_state[0] for each in others]
    inputs = torch.cat(states).double()
    _only(parameters, "lora_A")[:] = _inverse(inputs, ridge=1e-3) @ inputs.mean(0)
    return lambda changes: _find_nonzero(_only(changes, "lora_B").sum(1) > 0)


def _only(values: _Values, name: str) -> torch.Tensor:
    (value,) = (value for key, value in values.items() if name in key)
    return value


def _prefix(model: Any, parameters: _Values, tested: Sequence[int], _: Any) -> _Reader:
    (prefix,) = parameters.values()
    keys = _keys(model, torch.tensor(tested), len(prefix))
    # The dimension after a block's distinguishes keys and values.
    shape = (len(prefix), model.config.num_hidden_layers, 2, *keys.shape[1:])
    prefix.zero_()
    prefix.view(shape)[1 : 1 + len(tested), 0, 0] = _SATURATED * keys

    def read(changes: _Values) -> set[int]:
        values = _only(changes, "").view(shape)[1 : 1 + len(tested), 0, 1]
        changed = (values.abs().amax(-1) > _RATE / 2).all(-1)
        return {tested[index] for index in _find_nonzero(changed)}

    return read


def _keys(model: Any, tested: torch.Tensor, length: int) -> torch.Tensor:
    """Return keys (tested, heads, width) in the first block for linear discriminant analysis.

    A tested token's queries have a product of at least 1 with its key, and nearly all others a
    negative one. The first of a head's queries is used.
    """
    attention, inputs = model.get_decoder().layers[0].self_attn, _first_inputs(model)
    positions = torch.arange(length, length + _LONGEST, 4)[None]
    cosine, sine = model.get_decoder().rotary_emb(inputs, positions)

    def queries(tokens: torch.Tensor) -> torch.Tensor:
        states = attention.q_proj(inputs[tokens]).view(len(tokens), -1, 1, attention.head_dim)
        turned: torch.Tensor = apply_rotary_pos_emb(states, states, cosine, sine)[0]
        heads = model.config.num_key_value_heads
        return turned.reshape(len(tokens), heads, -1, *turned.shape[2:]).double()

    keys = []
    others = queries(torch.randperm(len(inputs))[:1000])
    for head, own in enumerate(queries(tested)[:, :, 0].unbind(1)):
        vectors = others[:, head].flatten(0, -2)
        inverse = _inverse(vectors)
        constant, key = inverse @ vectors.mean(0), own.mean(1) @ inverse
        least = ((own @ key[..., None])[..., 0] / (own @ constant)).amin(1, keepdim=True)
        key -= 0.9 * least * constant
        margin = (own @ key[..., None])[..., 0].amin(1, keepdim=True)
        keys.append((key / margin).where(margin > 0, 0))
    return torch.stack(keys, 1).float()


def _random_linear(model: Any, parameters: _Values, *_: Any) -> _Reader:
    read = _linear(model, parameters)
    for value in parameters.values():
        value.normal_(std=0.02)
    return read


def _linear(model: Any, parameters: _Values, *_: Any) -> _Reader:
    for name, value in parameters.items():
        value.normal_(std=_TINY if ".layers.0." in name and "lora_B" in name else 0.0)
    inputs = _first_inputs(model).double()

    def read(changes: _Values) -> set[int]:
        of_a = [v for k, v in changes.items() if ".layers.0." in k and "lora_A" in k]
        rows = normalize(torch.cat(of_a).double(), dim=-1)
        _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
        # Whitened, the embeddings of different tokens are nearly orthogonal.
        whitening = torch.linalg.cholesky(_inverse(inputs))
        basis = torch.linalg.qr((directions[sizes > 1e-5 * sizes[0]] @ whitening).T).Q
        return _find_nonzero((normalize(inputs @ whitening, dim=-1) @ basis).norm(dim=-1) > _WITHIN)

    return read


def _inverse(inputs: torch.Tensor, ridge: float = 1e-6) -> torch.Tensor:
    """Return the inverse of the inputs' mean square matrix, with a ridge."""
    squares = inputs.T @ inputs / len(inputs)
    ridges = ridge * squares.diagonal().mean() * torch.eye(len(squares)).to(squares)
    inverse: torch.Tensor = torch.linalg.inv(squares + ridges)
    return inverse


def _first_inputs(model: Any) -> torch.Tensor:
    """Return the inputs of the first block's query, key and value, (vocabulary, hidden)."""
    embeddings = model.get_input_embeddings().weight
    inputs: torch.Tensor = model.get_decoder().layers[0].input_layernorm(embeddings)
    return inputs
