"""A small GPT that is trained for real, and what each rank of a parallel training would save of it.

bfloat16 parameters with Adam in float32 (master weights, first and second moments), as large models
are trained: 2 + 12 bytes per parameter. The ways in which ranks share a model are those of Table 1
of AITurbo. A rank's state is flat: names such as ``model/blocks.0.mlp.up.weight`` and
``exp_avg/...``, each tensor with storage of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import torch
from torch import Tensor, nn
from torch.nn import functional

from aifs.client.torch import load_safetensors, save_safetensors

State = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    vocabulary: int = 512
    context: int = 128
    width: int = 256
    blocks: int = 2
    heads: int = 4


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Tokens (batch, context) to logits; the embedding of tokens is the output layer, too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class Training:
    """The model and its optimizer after ``step`` steps: what they hold depends on ``size``,
    ``seed`` and ``step`` alone.

    ``frozen``: the first so many blocks and both embeddings are not trained, so the optimizer has
    no state for them.
    """

    def __init__(self, size: Size | None = None, seed: int = 0, frozen: int = 0) -> None:
        torch.manual_seed(seed)
        self.size, self.seed, self.step = size or Size(), seed, 0
        self.model = Gpt(self.size).bfloat16()
        fixed = (
            ("tokens.", "positions.", *(f"blocks.{number}." for number in range(frozen)))
            if frozen
            else ()
        )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = not name.startswith(fixed)
        trained = [
            (name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad
        ]
        self.master = {name: p.float() for name, p in trained}
        self.exp_avg = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in self.master.items()}

    def train(
        self, rate: float = 1e-3, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8
    ) -> None:
        """One step of Adam (Kingma and Ba, 2015). The batch has every token, so no gradient is all
        zero."""
        self.step += 1
        order = torch.randperm(
            self.size.vocabulary, generator=torch.Generator().manual_seed(self.seed + self.step)
        )
        batch = order.view(-1, self.size.context)
        logits = self.model(batch)[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            first = self.exp_avg[name]
            second = self.exp_avg_sq[name]
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(gradient.square(), 1 - beta2)
            scale = (second / (1 - beta2**self.step)).sqrt_().add_(eps)
            self.master[name].addcdiv_(first / (1 - beta1**self.step), scale, value=-rate)
            parameter.data.copy_(self.master[name])
        self.model.zero_grad()

    def parameters(self) -> State:
        return {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}

    def optimizer(self) -> State:
        kinds = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {
            f"{kind}/{name}": tensor for kind, of in kinds.items() for name, tensor in of.items()
        }


def data_parallel(training: Training, ranks: int) -> list[State]:
    """Each rank holds everything."""
    return [_own(training.parameters() | training.optimizer()) for _ in range(ranks)]


def zero1(training: Training, ranks: int) -> list[State]:
    """ZeRO-1, and ZeRO-2, which differs in gradients alone: parameters everywhere, flat slices of
    the optimizer's state."""
    parts = _flat_parts(training.optimizer(), ranks)
    return [_own(training.parameters()) | part for part in parts]


def zero3(training: Training, ranks: int) -> list[State]:
    """ZeRO-3: each rank has a flat slice of everything, and nobody else has it."""
    return _flat_parts(training.parameters() | training.optimizer(), ranks)


def tensor_pipeline(training: Training, ranks: int) -> list[State]:
    """Megatron: linear layers divided among 2 ranks, blocks among 2 stages, all of it ``ranks`` / 4
    times.

    Embeddings are on both stages (the output is tied to them); norms and biases that follow a sum
    are not divided.
    """
    assert ranks % 4 == 0 and training.size.blocks % 2 == 0
    state, states = training.parameters() | training.optimizer(), []
    for rank in range(ranks):
        stage, part = (rank // 2) % 2, rank % 2
        held = {
            name: tensor
            for name, tensor in state.items()
            if stage in _stages(name, training.size.blocks)
        }
        states.append(
            _own({name: _tensor_part(name, tensor, part) for name, tensor in held.items()})
        )
    return states


WAYS: dict[str, Callable[[Training, int], list[State]]] = {
    "dp": data_parallel,
    "dp-zero1": zero1,
    "dp-zero2": zero1,
    "zero3": zero3,
    "tp-pp": tensor_pipeline,
}
"""What each of so many ranks holds, by the name of the way."""


def _own(state: State) -> State:
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }


def _flat_parts(state: State, ranks: int) -> list[State]:
    """Each kind of tensor flattened to one, cut into ``ranks`` equal parts."""
    parts: list[State] = [{} for _ in range(ranks)]
    for kind in dict.fromkeys(name.partition("/")[0] for name in state):
        flat = torch.cat(
            [tensor.flatten() for name, tensor in state.items() if name.startswith(f"{kind}/")]
        )
        for part, piece in zip(parts, flat.tensor_split(ranks), strict=True):
            part[f"{kind}/flat"] = piece.clone()
    return parts


def _stages(name: str, blocks: int) -> tuple[int, ...]:
    words = name.partition("/")[2].split(".")
    if words[0] == "blocks":
        return (int(words[1]) * 2 // blocks,)
    return (1,) if words[0] == "norm" else (0, 1)


def _tensor_part(name: str, tensor: Tensor, part: int) -> Tensor:
    """Rows of the layers before an activation, columns of those after it (Shoeybi et al., 2019)."""
    if ".qkv." in name:
        return torch.cat([third.chunk(2)[part] for third in tensor.chunk(3)])
    if ".up." in name:
        return tensor.chunk(2)[part]
    if name.endswith((".projection.weight", ".down.weight")):
        return tensor.chunk(2, dim=1)[part]
    return tensor


def distinct(states: Iterable[Mapping[str, Tensor]]) -> dict[bytes, int]:
    """Bytes by digest of the distinct tensors that are not all zero."""
    found = {}
    for state in states:
        for tensor in state.values():
            content = tensor.flatten().view(torch.uint8)
            if content.any():
                found[blake3.blake3(content.numpy()).digest()] = content.nbytes
    return found


def new_bytes(
    states: Iterable[Mapping[str, Tensor]], before: Iterable[Mapping[str, Tensor]] = ()
) -> int:
    """Bytes of the distinct tensors of ``states`` that are neither zero nor in ``before``."""
    known = distinct(before)
    return sum(size for digest, size in distinct(states).items() if digest not in known)


def save(state: State, path: Path) -> None:
    """Written by torch.save (nested: model, optimizer's kinds), or as safetensors, by the name's
    ending."""
    if path.suffix == ".safetensors":
        save_safetensors(state, path)
        return
    nested: dict[str, Any] = {}
    for name, tensor in state.items():
        kind, _, rest = name.partition("/")
        nested.setdefault(kind, {})[rest] = tensor
    torch.save(nested, path)


def load(path: Path) -> State:
    """What ``save`` has written."""
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    nested = torch.load(path)
    return {f"{kind}/{name}": tensor for kind, of in nested.items() for name, tensor in of.items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Same names, types, shapes and bytes."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name])
        for name, tensor in left.items()
    )
