"""A mixture's experts as linears of their own, as checkpoints store them, where transformers fuses them."""

import torch
from torch import Tensor, nn

from llmq.profiles.families import ExpertNames


class _Expert(nn.Module):
    """down(act(gate(x)) * up(x)), its linears under the names of the checkpoint."""

    def __init__(self, names: ExpertNames, hidden_size: int, intermediate_size: int, act: nn.Module) -> None:
        super().__init__()
        for name, shape in (
            (names.gate, (hidden_size, intermediate_size)),
            (names.up, (hidden_size, intermediate_size)),
            (names.down, (intermediate_size, hidden_size)),
        ):
            self.add_module(name, nn.Linear(*shape, bias=False, device="meta"))
        self._names, self._act = names, act

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in (self._names.gate, self._names.up, self._names.down))
        return down(self._act(gate(x)) * up(x))


class UnfusedExperts(nn.Module):
    """Stands in for a transformers experts module; its children are "0", "1", …, without weights at first.

    routed_tokens: [num_experts], the tokens that the router sent to each while `is_counting`; then nothing else is
        computed, and the output is zero.
    forced: experts that are shown every token, whatever the router says. What they make of a token that was not sent
        to them is thrown away: the output is the same.
    """

    def __init__(self, fused: nn.Module, names: ExpertNames) -> None:
        super().__init__()
        num_experts, hidden_size, intermediate_size = fused.down_proj.shape
        for index in range(num_experts):
            self.add_module(str(index), _Expert(names, hidden_size, intermediate_size, fused.act_fn))
        self.num_experts = num_experts
        self.routed_tokens = torch.zeros(num_experts, dtype=torch.int64)
        self.is_counting = False
        self.forced: frozenset[int] = frozenset()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [num_tokens, hidden]; top_k_index and top_k_weights [num_tokens, top_k]."""
        output = torch.zeros_like(hidden_states)
        if self.is_counting:
            self.routed_tokens += torch.bincount(top_k_index.flatten(), minlength=self.num_experts).cpu()
            return output
        for index in range(self.num_experts):
            token, choice = torch.where(top_k_index == index)
            expert = self.get_submodule(str(index))
            if index in self.forced:
                made = expert(hidden_states)[token]
            elif len(token):
                made = expert(hidden_states[token])
            else:
                continue
            # Under autocast `made` has fewer bits than the residual stream, and so may the router's weights.
            output.index_add_(0, token, (made * top_k_weights[token, choice, None]).to(output.dtype))
        return output


def fused_experts(layer: nn.Module) -> tuple[str, nn.Module] | None:
    """The path and module of a layer's experts if they are one parameter for all of them; None if it has none."""
    for path, module in layer.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if parameters.keys() == {"gate_up_proj", "down_proj"} and parameters["down_proj"].dim() == 3:
            return path, module
    return None


def unfuse(layer: nn.Module, names: ExpertNames) -> UnfusedExperts | None:
    """Give a transformers decoder layer experts that are linears, and modules named as in the checkpoint.

    Returns the experts; None for a layer that has none.
    """
    found = fused_experts(layer)
    if found is None:
        return None
    path, fused = found
    block_path = path.rpartition(".")[0]
    block = layer.get_submodule(block_path)
    experts = UnfusedExperts(fused, names)
    setattr(block, path.rpartition(".")[2], experts)
    stored_path = names.experts.rpartition(".")[0]
    if stored_path != block_path:
        # Mixtral's checkpoints say block_sparse_moe where the code says mlp: the code keeps its attribute, the name of
        # the module becomes the checkpoint's.
        del layer._modules[block_path]
        object.__setattr__(layer, block_path, block)
        layer.add_module(stored_path, block)
    return experts
