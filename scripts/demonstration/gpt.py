"""A small GPT, one pipeline-parallel shard of it, trained for one step: real state to save and
load.
"""

import torch
from torch import nn
from torch.nn import functional

HEADS = 8
CONTEXT = 64
VOCABULARY = 2048


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm_mlp(x))


class Shard(nn.Module):
    """The layers that one rank of a pipeline holds, with an embedding and a head of its own for the
    loss.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) of token ids to logits over the vocabulary."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained_state(rank: int, size: int, width: int = 512) -> dict:
    """The state of one shard after a training step: weights and Adam's moments, about ``size``
    bytes.
    """
    torch.manual_seed(rank)
    per_layer = 12 * width * width + 13 * width
    fixed = (VOCABULARY + CONTEXT) * width
    layers = max(1, round((size / 12 - fixed) / per_layer))  # weight and two moments, 4 bytes each
    model = Shard(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.randint(VOCABULARY, (2, CONTEXT + 1))
    logits = model(text[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    optimizer.step()
    return {
        "rank": rank,
        "step": 1,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


def same(a: object, b: object) -> bool:
    """Whether two states are equal, tensor by tensor, bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def tensors(state: object) -> int:
    """How many tensors a state holds."""
    if isinstance(state, torch.Tensor):
        return 1
    if isinstance(state, dict):
        return sum(map(tensors, state.values()))
    return sum(map(tensors, state)) if isinstance(state, list | tuple) else 0
