"""A causal language model with Hugging Face transformers: a tiny, randomly initialised GPT-2 on the bytes of a text.

Each byte is a token. The text is an old version of this project's README and documentation, shipped with this file as
`causal_lm.npy`: one uint8 per token, made with `numpy.frombuffer(text.encode(), dtype="uint8")`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config

from tpu_trainer import Task

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

TOKENS = Path(__file__).with_suffix(".npy")
VOCABULARY = 256


def task(context: int = 64, layers: int = 2, width: int = 64) -> Task:
    """`context`: tokens in an example; all examples have the same length, so that one graph serves all batches."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    # With "eager" and the mask in `outputs` the model reads no tensor values: each such read would make the device
    # wait for the host in every step.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # transformers cannot infer the loss from GPT-2's class name alone, and would warn about its guess.
    model.loss_type = "ForCausalLM"
    train, held_out = windows(context)
    return Task(model=model, train=train, loss=loss, evaluation=held_out, metrics=metrics)


def windows(context: int) -> tuple[TensorDataset, TensorDataset]:
    """Examples of `context` tokens each, shape [context]. Training examples overlap by half; the last tenth of the text
    is held out."""
    tokens = torch.from_numpy(np.load(TOKENS).astype(np.int64))
    border = len(tokens) * 9 // 10
    return (
        TensorDataset(tokens[:border].unfold(0, context, context // 2)),
        TensorDataset(tokens[border:].unfold(0, context, context)),
    )


def outputs(model: nn.Module, tokens: Tensor) -> CausalLMOutputWithCrossAttentions:
    # The model itself compares each token with the prediction made before it.
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (tokens,) = batch
    return outputs(model, tokens).loss


def metrics(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
    """Per example: the mean loss over its tokens in nats, and the share of tokens that were the most probable ones."""
    (tokens,) = batch
    scores, following = outputs(model, tokens).logits[:, :-1], tokens[:, 1:]
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), following, reduction="none")
    return {
        "evaluation_loss": losses.mean(dim=1),
        "accuracy": (scores.argmax(dim=-1) == following).float().mean(dim=1),
    }
