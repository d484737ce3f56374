"""Unmodified megatron-core (and mbridge) on a machine without CUDA, over gloo.

Megatron-core names the CUDA device in string constants all over its code (`device="cuda"`,
`p.type() == "torch.cuda.FloatTensor"`). Rather than wrap torch's factories for the whole process,
an import hook rewrites those constants in Megatron's own code objects as its modules are loaded;
nothing else in the process sees a difference. What is left are calls into `torch.cuda`, which
without CUDA can only raise: they get the CPU's answer.

`install()` does nothing when CUDA is present. Call it before anything imports `megatron.core`.
Known to work with megatron-core 0.16.1 and mbridge 0.15.1: TP, PP, DP, the distributed optimizer,
sequence parallelism, bf16 with fp32 masters. Not MoE.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

REWRITTEN_PACKAGES = ("megatron.core", "mbridge")

_CONSTANTS: dict[str, str] = {
    "cuda": "cpu",
    "cuda:0": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def install() -> bool:
    """Make megatron-core importable and usable on CPU; idempotent.

    Returns:
        True where the shim is active, False where CUDA is present and nothing was changed.

    Raises:
        RuntimeError: megatron.core was imported before, its constants cannot be rewritten any more.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(f, _Finder) for f in sys.meta_path):
        return True
    early = [m for m in ("megatron.core", "mbridge") if m in sys.modules]
    if early:
        raise RuntimeError(
            f"{', '.join(early)} was imported before nereus_cpu.megatron.install(); call install() "
            "first"
        )
    # Megatron compiles small functions with torch.compile, which costs minutes on a CPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_torch_cuda()
    sys.meta_path.insert(0, _Finder())
    return True


# -- constants in code objects -----------------------------------------------------------------


def rewrite_constants(value: Any) -> Any:
    """`value` (a code object or a constant of one) with CUDA's names replaced by the CPU's."""
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=tuple(rewrite_constants(c) for c in value.co_consts))
    if isinstance(value, tuple):
        return tuple(rewrite_constants(v) for v in value)
    if isinstance(value, frozenset):
        return frozenset(rewrite_constants(v) for v in value)
    if isinstance(value, str):
        return _CONSTANTS.get(value, value)
    return value


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        # After the cache: the .pyc on disk keeps Megatron's own constants.
        code = super().get_code(fullname)
        return None if code is None else rewrite_constants(code)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        after = _AFTER_IMPORT.get(module.__name__)
        if after is not None:
            after(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == p or fullname.startswith(p + ".") for p in REWRITTEN_PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


# -- functions of torch.cuda -------------------------------------------------------------------


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _answer_torch_cuda() -> None:
    # One function object per name: torch.compile's registry refuses one object under two names.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.default_stream = lambda device=None: _NoStream()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cpu": torch.set_rng_state(state)
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self


# -- what needs more than a constant -----------------------------------------------------------


def _cpu_rng(random: Any) -> None:
    # The RNG tracker of tensor parallelism reads torch.cuda's generators by index.
    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)


def _torch_adam_step(distrib_optimizer: Any) -> None:
    # torch's Adam keeps `step` with each parameter's state, FusedAdam does not. Therefore, in
    # Megatron's checkpoints: a fully reshardable one asks for a `step` tensor that was never saved
    # (KeyError); an optimizer that has not stepped has none to show (AssertionError), which is what
    # loading into a new job begins with; what is loaded of each parameter names the counter that it
    # had before, not the saved one; and after a load all parameters share one `step` tensor, which
    # then counts once for each of them.
    cls = distrib_optimizer.DistributedOptimizer
    load = cls._set_main_param_and_optimizer_states
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict

    def state_dict_of_any_age(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            for param in (p for group in adam.param_groups for p in group["params"]):
                if not adam.state[param]:
                    adam.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    def load_with_own_steps(self: Any, *args: Any, **kwargs: Any) -> None:
        load_state_dict(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    def load_keeping_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        current = self._get_main_param_and_optimizer_states(model_param)
        kept = {"step": current["step"]} if "step" in current else {}
        load(self, model_param, {**tensors, **kept})

    cls._set_main_param_and_optimizer_states = load_keeping_step
    cls.state_dict = state_dict_of_any_age
    cls.load_state_dict = load_with_own_steps


def _norm_of_a_part_of_the_sequence(torch_norm: Any) -> None:
    # Megatron's wrapper of torch's norms asserts that sequence parallelism is off. A norm works on
    # each token by itself; what is needed is that the gradients of its weights are summed over the
    # tensor-parallel ranks, which Megatron does for parameters that are marked.
    cls = torch_norm.WrappedTorchNorm
    make = cls.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = make(cls, whole, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    cls.__new__ = new


_AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _cpu_rng,
    "megatron.core.optimizer.distrib_optimizer": _torch_adam_step,
    "megatron.core.transformer.torch_norm": _norm_of_a_part_of_the_sequence,
}
