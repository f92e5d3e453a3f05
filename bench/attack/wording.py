"""The sentences of the attack's document; every figure in it comes from the record."""

INTRODUCTION = """\
# How much text can be read from what a client sends

This page is written by `python -m bench.attack --model FOLDER --data generated DATA/superglue/BoolQ
--document docs` from [`attack.json`](attack.json); a test compares the two.
[`security.md`](security.md) says what follows from it.

Split learning (FL-GLM) sends hidden states instead of text. Section 4.3.3 of the paper trains a
decoder on the hidden states and the text of a client that colludes with the server, lets it read
another client's hidden states, and finds that it fails as soon as the client has one block. This
measurement repeats that, and adds what the paper leaves out: an attacker who knows the public
model, gradients, noise, and what a peer on the network sees.

**Model**: {model} ({blocks} blocks, hidden size {hidden}, vocabulary {vocabulary}), {versions}.
{weights}

**Texts** of two clients. *generated* are the demonstration's: the court colludes, the consultancy
is attacked. *BoolQ*, the paper's data, has English passages and questions: half of the training
rows collude, validation rows are attacked. The attacker has {texts} texts of the colluding client.
The attacker knows the beginning that all attacked texts share (the template and the instruction),
and reconstructs the {longest} tokens after it.

**Scores** are those of `finetuning/evaluation/scoring.py` in percent, and the share of tokens that
were read correctly: means ± standard deviations over {seeds} seeds, which determine texts and
initial weights. All measurements took {minutes} minutes on one core of a busy machine.

**What the attacks see** has gone through the program's own head, noise, encoding and encryption
(`bench/attack/observed.py`). Unless a table says otherwise, the wire is bfloat16, and the client
has one block at each end, no noise, and the public weights.

## Attacks on hidden states, by head blocks

- *decoder*: one linear layer, or a Transformer of one block over the whole text (the paper's
  F⁻¹), trained on the colluding client. It can only produce tokens that occur in its training
  texts. Over all attacked texts, the share of tokens that it can produce is: {covered}. In the
  texts drawn for a seed, the share can be slightly different.
- *optimisation*: Adam changes embeddings in {optimisation_steps} steps, so that the public head
  computes from them what was received; each is then replaced by the nearest token.
- *search*: proceeds token by token, and chooses the one with which the public head, given the
  tokens found so far, computes what was received; without blocks it looks up the nearest
  embedding. It tries the most similar tokens (up to {most_candidates}) and the 512 most frequent
  ones.

Texts read with each seed: decoder {decoded}, optimisation {optimised}, search {searched}.
"""

WIRE = """\
## Wire types
"""

NOISE = """\
## Noise

`split.noise` is added to all hidden states that the client sends, in training too. *Loss* is the
consultancy's held-out loss in nats per token, with the noise, of the base model and after
training with LoRA ({steps} steps of 4 rows, whose order and initial adapter depend on the seed).
The decoder is trained on hidden states with the same noise, and the search knows its scale.
"""

SEALED = """\
## What a peer on the network sees

The same decoder, trained on pairs of texts and encrypted records. *Nothing* is chance: random
numbers, from which a decoder can learn what texts look like and how long they are.
"""

ADAPTER = """\
## Adapters that the attacker doesn't have

The attacked client's head has an adapter after {steps} steps of training (first row of the table
of noise); the decoder was trained on, and the search computes with, the public head. (The server
gets the adapter at the next average, so this is the case between averages.) The search tries 64
similar and 512 frequent tokens, since none fits exactly.
"""

GRADIENTS = """\
## Labels from gradients

In training, the client sends the gradient of its loss with respect to the hidden states that the
server sent it. From it, and the tail's public weights, the last {labels} tokens of answers are
read; texts per seed: {labelled}. Neither the head nor `split.noise` makes a difference: the server
knows exactly what it has sent.
"""
