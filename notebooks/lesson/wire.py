"""What the ranks send to each other in one step: which collectives, and how many bytes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .palette import COMMUNICATE

# By the name of PyTorch's operator: the collective, and which argument is the whole tensor.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
}
# How often (n - 1) / n of the tensor leaves a rank on a ring, on average over the ranks.
ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}
HATCHES = {"all-reduce": "", "all-gather": "//", "reduce-scatter": "..", "broadcast": "xx"}


class Wire(TorchDispatchMode):
    """Note each collective that this process calls inside a `with` block.

    calls: how often, by collective. size: the bytes of the whole tensors, by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.size: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the operator if it is a collective, and call it."""
        if func.namespace == "c10d":
            name, place = COLLECTIVES[func.overloadpacket.__name__]
            tensors = [args[place]] if isinstance(args[place], Tensor) else args[place]
            self.calls[name] += 1
            self.size[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    def rounds(self, model_bytes: int) -> dict[str, float]:
        """Return, by collective, how many times (n - 1) / n of the model a rank sends."""
        return {name: ROUNDS[name] * size / model_bytes for name, size in self.size.items()}


def backend_operations(step: Callable[[], object]) -> Counter[str]:
    """Call `step` and return which operations gloo or nccl itself ran, and how often."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return Counter(e.name for e in profiler.events() if e.name.startswith(("gloo:", "nccl:")))


def draw_rounds(sent: dict[str, dict[str, float]]) -> Figure:
    """Draw a bar for each strategy, made of its collectives, `sent[strategy][collective]`."""
    figure, axes = plt.subplots(figsize=(8, 2.8))
    left = dict.fromkeys(sent, 0.0)
    for collective, hatch in HATCHES.items():
        sizes = [rounds.get(collective, 0.0) for rounds in sent.values()]
        look: dict[str, Any] = {
            "color": COMMUNICATE,
            "hatch": hatch,
            "edgecolor": "white",
            "label": collective,
        }
        axes.barh(list(sent), sizes, left=list(left.values()), **look)
        left = {name: left[name] + size for name, size in zip(sent, sizes, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("sent by each rank in one step, in units of (n - 1) / n of the model's bytes")
    axes.set_xlim(0, 4.2)
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    return figure
