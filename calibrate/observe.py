"""Look at what reaches modules of a block while a stream passes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .replay import Stream
from .skeleton import Skeleton


@torch.no_grad()
def observe_inputs(skeleton: Skeleton, index: int, stream: Stream, watch: Mapping[str, Callable[[Any], None]]) -> None:
    """Run the loaded block `index` over the stream, which stays as it is; `watch`: module path -> what is called with
    each of its inputs, batch by batch."""

    def hook(look: Callable[[Any], None]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            look(inputs[0])  # what it returns is not handed on: it would replace the layer's inputs

        return see

    handles = [skeleton.model.get_submodule(path).register_forward_pre_hook(hook(look)) for path, look in watch.items()]
    try:
        for batch in range(len(stream.hidden)):
            stream.through(skeleton, index, batch)
    finally:
        for handle in handles:
            handle.remove()
