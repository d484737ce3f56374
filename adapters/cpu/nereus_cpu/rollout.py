"""A rollout backend for CPU: verl's asynchronous server interface over Hugging Face generate.

One Ray actor per replica serves all ranks of the replica; `rollout.tensor_model_parallel_size` says
how many ranks share it and splits nothing. Weights arrive in full after every step.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from nereus_cpu.checks import CpuPlatformError
from nereus_cpu.generate import Completion, Request, generate
from nereus_plugins.transport import fingerprint

GATHER_S = 0.1  # a batch that has room waits until no request has come for so long


def server_name(replica_rank: int) -> str:
    """Ray's name of a replica's server within the job's namespace."""
    return f"nereus_hf_server_{replica_rank}"


class HFServer:
    """Ray actor: one model, one queue; requests are served in batches of at most max_num_seqs."""

    def __init__(self, config: Any, model_config: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        began = time.perf_counter()
        torch.set_num_threads(1)
        self._config = config
        hf_config = AutoConfig.from_pretrained(model_config.path)
        self._model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa").eval()
        self._global_steps: int | None = None
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._serving: asyncio.Task[None] | None = None
        self._names: list[str] = []  # of the weights that were loaded last
        self._launch_seconds = {"load": time.perf_counter() - began}

    def _request(self, prompt_ids: Iterable[int], params: dict[str, Any]) -> Request:
        top_p, top_k = params.get("top_p", 1.0), params.get("top_k", -1)
        penalty = params.get("repetition_penalty", 1.0)
        if top_p != 1.0 or top_k not in (-1, 0, None) or penalty != 1.0:
            raise CpuPlatformError(
                "the CPU rollout samples from the full distribution only: set "
                f"rollout.top_p=1 (is {top_p}) and rollout.top_k=-1 (is {top_k})"
            )
        limit = params.get("max_tokens") or params.get("max_new_tokens")
        return Request(
            prompt_ids=list(prompt_ids),
            max_new_tokens=min(limit or self._config.response_length, self._config.response_length),
            temperature=float(params.get("temperature", 1.0)),
            # Without agent_loop.SeededAgentLoop nobody gives a seed; the run is not repeatable.
            seed=params.get("seed", uuid.uuid4().int >> 64),
        )

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((self._request(prompt_ids, sampling_params), future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        completion = await future
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def _serve(self) -> None:
        rows = self._config.max_num_seqs
        while self._waiting:
            await self._gather(rows)
            batch, self._waiting = self._waiting[:rows], self._waiting[rows:]
            try:
                completions = await asyncio.to_thread(
                    generate,
                    self._model,
                    [request for request, _ in batch],
                    rows=rows,
                    prompt_tokens=self._config.prompt_length,
                )
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), completion in zip(batch, completions, strict=True):
                    future.set_result(completion)

    async def _gather(self, rows: int) -> None:
        """Wait for more requests: those that miss a batch wait for all of it."""
        waiting = 0
        while waiting < len(self._waiting) < rows:
            waiting = len(self._waiting)
            await asyncio.sleep(GATHER_S)

    async def load_weights(self, named: list[tuple[str, torch.Tensor]], global_steps: int) -> None:
        missing, unexpected = self._model.load_state_dict(dict(named), strict=False)
        tied = self._model.config.tie_word_embeddings
        missing = [name for name in missing if not (tied and name == "lm_head.weight")]
        if missing or unexpected:
            raise CpuPlatformError(
                f"weights of the trained model do not fit {type(self._model).__name__}: "
                f"missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        self._model.tie_weights()
        self._global_steps = global_steps
        self._names = [name for name, _ in named]

    async def fingerprints(self) -> dict[str, str]:
        """Of the weights that the model holds, by the names under which they were loaded."""

        def taken() -> dict[str, str]:
            held = self._model.state_dict()
            return {name: fingerprint.of_tensor(held[name]) for name in self._names}

        return await asyncio.to_thread(taken)

    async def launch_seconds(self) -> dict[str, float]:
        """Of the launch, by part: there is nothing to compile, capture or profile."""
        return self._launch_seconds

    # The rest of verl's server interface: memory is never given up, nothing is cached or profiled.
    async def wake_up(self, tags: list[str] | None = None) -> None:
        return

    async def sleep(self) -> None:
        return

    async def clear_kv_cache(self) -> None:
        return

    async def release_kv_cache(self) -> None:
        return

    async def resume_kv_cache(self) -> None:
        return

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        return

    async def resume_generation(self) -> None:
        return

    async def start_profile(self, **_: Any) -> None:
        return

    async def stop_profile(self) -> None:
        return


class HFReplica(RolloutReplica):
    """Launches one `HFServer` on the node of the replica's first rank."""

    async def launch_servers(self) -> None:
        node = await self.workers[0].__ray_call__.remote(
            lambda worker: ray.get_runtime_context().get_node_id()
        )
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        server = (
            ray.remote(HFServer)
            .options(
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                num_cpus=0,
                scheduling_strategy=on_node,
            )
            .remote(self.config, self.model_config)
        )
        self.servers, self._server_handle = [server], server
        await server.wake_up.remote()
        self._server_address = f"hf-cpu-{self.replica_rank}-{uuid.uuid4().hex[:8]}"


class ServerAdapter(BaseRollout):
    """In every training rank: hands the trained weights to the replica's server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self._leader = rank % ranks == 0
        self._server: Any = None

    def _handle(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self._leader:
            await self._handle().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self._leader:
            await self._handle().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise CpuPlatformError(
                f"the CPU rollout takes full weights, not {wire_format!r}: set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        # Every rank walks the generator: producing a full weight is collective.
        named = [
            (name, (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().float().clone())
            for name, w in weights
        ]
        if self._leader:
            await self._handle().load_weights.remote(named, global_steps)
