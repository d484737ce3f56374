"""Starts verl's own `main_ppo` on CPU as a subprocess: for the demo, the recipes and the tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus_cpu.attention import NAME as PACKED_ATTENTION
from nereus_cpu.install import ROLLOUT_NAME

ENGINES = ("fsdp2", "megatron")
OBJECT_STORE_BYTES = 200_000_000
KILL_WITHIN_S = 10.0


@dataclass(frozen=True)
class Job:
    """One job of `ranks` worker processes.

    layout: of actor, critic and reference at the start. fsdp2: fsdp_size (-1: all ranks), ulysses;
        megatron: tp, pp (dp follows).
    batch_prompts, samples_per_prompt: prompts a step and responses to each.
    mini_batch_prompts: prompts per optimizer step.
    rollout: "hf_cpu", or "vllm" where vLLM's CPU build is installed; rollout_tp: ranks that share a
        server (default: all).
    nereus: overrides of the config group `nereus`, e.g. {"schedule": ...}; None leaves Nereus out.
    plugins: VERL_USE_EXTERNAL_PLUGINS; "nereus_cpu" leaves Nereus itself unloaded.
    extra: further Hydra overrides, applied last.
    """

    engine: str
    ranks: int
    model_dir: Path
    train_file: Path
    test_file: Path
    reward_file: Path
    layout: Mapping[str, int] = field(default_factory=dict)
    critic: bool = True
    reference: bool = False
    steps: int = 2
    batch_prompts: int = 8
    samples_per_prompt: int = 4
    mini_batch_prompts: int = 8
    prompt_tokens: int = 64
    response_tokens: int = 16
    actor_lr: float = 1e-3
    critic_lr: float = 1e-3
    seed: int = 1
    rollout: str = ROLLOUT_NAME
    rollout_tp: int | None = None
    nereus: Mapping[str, Any] | None = None
    plugins: str = "auto"
    extra: Sequence[str] = ()

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass on a rank: divides a rank's share whatever dp becomes."""
        return self.mini_batch_prompts * self.samples_per_prompt // self.ranks

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {ENGINES}, not {self.engine!r}")
        if self.mini_batch_prompts * self.samples_per_prompt % self.ranks:
            raise ValueError("mini_batch_prompts * samples_per_prompt must divide by ranks")


@dataclass(frozen=True)
class JobResult:
    """metrics: what verl's logger got, one mapping a step, `step` included."""

    returncode: int
    log: Path
    metrics: list[dict[str, Any]]

    def require_success(self) -> JobResult:
        """Raises: RuntimeError with the log's end, if the job failed."""
        if self.returncode != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(
                f"main_ppo ended with {self.returncode}; log {self.log}, its end:\n{tail}"
            )
        return self


def overrides(job: Job, work_dir: Path, ray_dir: Path) -> list[str]:
    """The Hydra overrides of `job`. ray_dir: a short path, as Ray's sockets lie deep below it."""
    engine = _fsdp2_overrides(job) if job.engine == "fsdp2" else _megatron_overrides(job)
    arl = "actor_rollout_ref"
    rows = job.batch_prompts * job.samples_per_prompt
    common = {
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": job.ranks,
        "trainer.logger": '["console","file"]',
        "trainer.val_before_train": False,
        "trainer.total_training_steps": job.steps,
        "trainer.total_epochs": 1000,
        "trainer.resume_mode": "disable",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": work_dir / "checkpoints",
        "trainer.v1.sampler.custom_sampler.path": "pkg://nereus_cpu.replay_buffer",
        "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
        "algorithm.adv_estimator": "gae" if job.critic else "grpo",
        "data.train_files": job.train_file,
        "data.val_files": job.test_file,
        "data.train_batch_size": job.batch_prompts,
        "data.max_prompt_length": job.prompt_tokens,
        "data.max_response_length": job.response_tokens,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "data.seed": job.seed,
        f"{arl}.model.path": job.model_dir,
        f"{arl}.model.enable_gradient_checkpointing": False,
        f"{arl}.actor.ppo_mini_batch_size": job.mini_batch_prompts,
        f"{arl}.actor.use_dynamic_bsz": False,
        f"{arl}.actor.ppo_micro_batch_size_per_gpu": job.micro_batch,
        f"{arl}.actor.optim.lr": job.actor_lr,
        f"{arl}.actor.use_kl_loss": job.reference,
        f"{arl}.actor.use_torch_compile": False,
        f"{arl}.rollout.name": job.rollout,
        f"{arl}.rollout.seed": job.seed,
        # One server for all ranks: a process less per rank.
        f"{arl}.rollout.tensor_model_parallel_size": job.rollout_tp or job.ranks,
        f"{arl}.rollout.n": job.samples_per_prompt,
        f"{arl}.rollout.max_num_seqs": rows,
        f"{arl}.rollout.log_prob_micro_batch_size_per_gpu": job.micro_batch,
        f"{arl}.rollout.agent.num_workers": 1,
        f"{arl}.rollout.agent.default_agent_loop": "seeded_single_turn",
        f"{arl}.rollout.agent.agent_loop_config_path": _agent_loop_config(),
        f"{arl}.ref.log_prob_micro_batch_size_per_gpu": job.micro_batch,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": job.reward_file,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": job.ranks,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": OBJECT_STORE_BYTES,
        "+ray_kwargs.ray_init._temp_dir": ray_dir,
        "hydra.run.dir": work_dir / "hydra",
    }
    if job.rollout == "vllm":
        common |= _vllm_settings(job)
    if job.critic:
        common |= {
            "critic.model.path": job.model_dir,
            "critic.model.enable_gradient_checkpointing": False,
            "critic.ppo_micro_batch_size_per_gpu": job.micro_batch,
            "critic.optim.lr": job.critic_lr,
        }
    nereus: list[str] = []
    if job.nereus is not None:
        # The group is not in verl's defaults list, hence "+" for it and "++" for what lies in it.
        nereus = ["+nereus=on", *(f"++nereus.{k}={_hydra(v)}" for k, v in job.nereus.items())]
    return [*engine, *(f"{k}={v}" for k, v in common.items()), *nereus, *job.extra]


def _fsdp2_overrides(job: Job) -> list[str]:
    unknown = set(job.layout) - {"fsdp_size", "ulysses"}
    if unknown:
        raise ValueError(f"a fsdp2 layout has fsdp_size and ulysses, not {sorted(unknown)}")
    configs = {"actor_rollout_ref.actor": "actor_rollout_ref.model"}
    if job.critic:
        configs["critic"] = "critic.model"
    if job.reference:
        configs["actor_rollout_ref.ref"] = "actor_rollout_ref.model"
    out = []
    for model in sorted(set(configs.values())):
        out += [
            f"{model}.use_remove_padding=True",
            f"+{model}.override_config.attn_implementation={PACKED_ATTENTION}",
        ]
    for config in configs:
        engine = "critic.fsdp" if config == "critic" else f"{config}.fsdp_config"
        out += [
            f"{config}.strategy=fsdp2",
            f"{engine}.fsdp_size={job.layout.get('fsdp_size', -1)}",
            f"{engine}.ulysses_sequence_parallel_size={job.layout.get('ulysses', 1)}",
            f"{engine}.use_torch_compile=False",
            f"{engine}.model_dtype=fp32",
            f"{engine}.dtype=float32",
            f"{engine}.seed={job.seed}",
            # Otherwise nothing seeds the critic's new value head.
            f"{engine}.full_determinism=True",
        ]
    return out


def _megatron_overrides(job: Job) -> list[str]:
    unknown = set(job.layout) - {"tp", "pp"}
    if unknown:
        raise ValueError(f"a megatron layout has tp and pp, not {sorted(unknown)}")
    out = ["model_engine=megatron"]
    configs = ["actor_rollout_ref.actor", "actor_rollout_ref.ref"]
    models = ["actor_rollout_ref.model"]
    if job.critic:
        configs.append("critic")
        models.append("critic.model")
    for model in models:
        out += [
            f"{model}.use_remove_padding=False",
            f"+{model}.override_config.attn_implementation=sdpa",
        ]
    transformer = {  # no TransformerEngine, no fused CUDA kernels
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "sequence_parallel": False,
        "use_cpu_initialization": True,
        "attention_backend": "local",
    }
    for config in configs:
        engine = f"{config}.megatron"
        out += [
            f"{engine}.tensor_model_parallel_size={job.layout.get('tp', 1)}",
            f"{engine}.pipeline_model_parallel_size={job.layout.get('pp', 1)}",
            f"{engine}.vanilla_mbridge=True",
            f"{engine}.use_remove_padding=False",
            f"{engine}.sequence_parallel=False",
            f"{engine}.use_distributed_optimizer=True",
            f"{engine}.dtype=bfloat16",  # fp32 masters; verl's Megatron engine takes no fp32 model
            f"{engine}.seed={job.seed}",
            *(
                f"++{engine}.override_transformer_config.{name}={value}"
                for name, value in transformer.items()
            ),
        ]
    return out


def _vllm_settings(job: Job) -> dict[str, Any]:
    """What vLLM's CPU build needs: it has no sleep mode, compiles nothing here, and takes
    gpu_memory_utilization of the host's memory for a server with its KV cache."""
    rollout = "actor_rollout_ref.rollout"
    return {
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.dtype": "float32",
        f"{rollout}.max_model_len": job.prompt_tokens + job.response_tokens,
        f"{rollout}.gpu_memory_utilization": 0.08,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        f"{rollout}.calculate_log_probs": True,
    }


def _agent_loop_config() -> Path:
    import nereus_cpu

    return Path(nereus_cpu.__file__).with_name("agent_loop.yaml")


def _hydra(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value)


def environment(job: Job, work_dir: Path) -> dict[str, str]:
    """The environment of the job's processes (Ray's inherit the driver's)."""
    return {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the key under which verl's engines are registered
        "VERL_USE_EXTERNAL_PLUGINS": job.plugins,
        "VERL_FILE_LOGGER_PATH": str(work_dir / "metrics.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its servers share cores with the ranks
    }


def run(
    job: Job,
    work_dir: Path,
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> JobResult:
    """Runs the job to its end in `work_dir` (made here; log, metrics and checkpoints lie there).

    on_line: called with every line of output. env: added to the environment.
    Ray's cluster, its temporary files and all processes of the job are gone on return, also after a
    timeout (returncode -9) or an exception.
    """
    work_dir = work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    log = work_dir / "job.log"
    metrics = work_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    ray_dir = Path(tempfile.mkdtemp(prefix="nereus-ray-"))
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(job, work_dir, ray_dir)]
    process = subprocess.Popen(
        command,
        cwd=work_dir,
        env={**environment(job, work_dir), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        with open(log, "w") as out:
            assert process.stdout is not None
            for line in process.stdout:
                out.write(line)
                out.flush()
                if on_line is not None:
                    on_line(line.rstrip("\n"))
        process.wait()
    finally:
        timer.cancel()
        with _uninterrupted():
            end_session(process, ray_dir)
    return JobResult(process.returncode, log, read_metrics(metrics))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """verl's file logger: one {"step", "data"} a line -> one flat mapping a step."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"step": line["step"], **line["data"]} for line in lines]


def end_session(process: subprocess.Popen[str], ray_dir: Path) -> None:
    """Ends what is left of the job: its own session, and the Ray processes of its own directory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Again until none is left: Ray starts processes of its own meanwhile.
    deadline = time.monotonic() + KILL_WITHIN_S
    while (strays := processes_of(ray_dir)) and time.monotonic() < deadline:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(ray_dir, ignore_errors=True)


def processes_of(ray_dir: Path) -> list[int]:
    """The processes whose arguments or environment name `ray_dir`, or what is in it."""
    marker = str(ray_dir).encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # Ray names its workers, but they carry the directory in environment or arguments.
            if (
                marker in (entry / "cmdline").read_bytes()
                or marker in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM are ignored: a second one would leave half of the job behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
