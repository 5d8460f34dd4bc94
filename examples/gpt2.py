"""GPT-2 (124M parameters) in plain PyTorch, on tokens at random: what `tpujob compile-check` is shown with.

The model is Radford et al. 2019 with tied embeddings. Put your own tokens in place of `Tokens`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tpu_trainer import Task

VOCABULARY, WIDTH, HEADS = 50257, 768, 12


class Tokens(Dataset[Tensor]):
    """Sequences of one token more than the model reads: each predicts the next."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (self._context + 1,), generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        found = self.queries_keys_values(self.before_attention(hidden)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = found.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return hidden + self.mlp(self.before_mlp(hidden))


class GPT2(nn.Module):
    def __init__(self, context: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def task(context: int = 1024, layers: int = 12, vocabulary: int = VOCABULARY) -> Task:
    """`vocabulary`: rows of the embedding; a multiple of 128, such as 50304, fills a TPU's tiles."""
    return Task(model=GPT2(context, layers, vocabulary), train=Tokens(context), loss=_loss)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
