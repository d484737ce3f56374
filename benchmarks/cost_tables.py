"""How a row of each public table becomes a case of the cost model.

Every table declares the columns that a planner would know. An adapter sees only those (`Inputs`
raises on any other), so that MFU, measured times and other tools' predictions cannot leak in. The
answers are read apart, after the case is made.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from nereus_plugins.cost import stacks
from nereus_plugins.cost.case import Batch, Case
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.hardware import GPU, Network, find_gpu
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.models import find_model, mpt
from nereus_plugins.cost.shape import MLA, Shape
from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelSpec,
    ModelStage,
    MoESpec,
    SpecError,
    WorkloadSpec,
)


class NotModelled(Exception):
    """Why a row cannot be predicted; counted and named in the result."""


class Inputs(Mapping[str, str]):
    """The declared input columns of a row; reading another is an error, not an empty text."""

    def __init__(self, row: Mapping[str, str], allowed: frozenset[str]) -> None:
        self._values = {k: (row.get(k) or "").strip() for k in allowed}

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: int | None = None) -> int:
        text = self[key].split()[0] if self[key] else ""
        if text in ("", "None", "n/a", "nan"):
            if default is None:
                raise NotModelled(f"column {key} is empty")
            return default
        try:
            return int(float(text))
        except ValueError:
            raise NotModelled(f"column {key} is not a number") from None

    def true(self, key: str) -> bool:
        return self[key].lower() == "true"


@dataclasses.dataclass(frozen=True)
class Modelled:
    """A row as the model sees it.

    Attributes:
        case: what is estimated.
        gpus: GPUs of the job.
        tokens: tokens of one step, all GPUs.
        model: name, for groups.
        recompute: for the one-constant baseline.
        stage: the pipeline stage whose memory was measured; None for the fullest.
        memory_only: the row does not say what its time depends on.
        whole_job: for rows that are an iteration of a job: what `estimate` takes; the case is its
            training.
        calibration: the one row of its hardware and software stack that a constant came from.
    """

    case: Case
    gpus: int
    tokens: float
    model: str
    recompute: str
    calibration: bool = False
    stage: int | None = None
    memory_only: bool = False
    whole_job: tuple[JobSpec, GlobalPlan, ClusterSpec, WorkloadSpec] | None = None


@dataclasses.dataclass(frozen=True)
class Answers:
    """What was measured. Seconds of a step; bytes allocated or reserved at the peak."""

    step_s: float | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A public table.

    Attributes:
        file: its file name.
        source: name in groups.
        inputs: columns a planner would know.
        model: row -> case, or `NotModelled`.
        answers: the measured values, given the row and its case.
    """

    file: str
    source: str
    inputs: frozenset[str]
    model: Callable[[Inputs], Modelled]
    answers: Callable[[Mapping[str, str], Modelled], Answers]


def number(text: str | None) -> float | None:
    match = re.match(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?\d+)?)", text or "")
    value = float(match[1]) if match else None
    return value if value else None


# --- llm-foundry ---------------------------------------------------------------------------------


def _llm_foundry(row: Inputs) -> Modelled:
    seq, gpus = row.integer("SeqLen (T)"), row.integer("# GPUs")
    try:
        shape = mpt(row["Model"], seq)
    except KeyError:
        raise NotModelled(f"model {row['Model']} is not known") from None
    gpu = _gpu(row["GPU"])
    pure = row["MP Mode"] == "PURE"
    software = stacks.llm_foundry(pure=pure, fp8=row["Precision"] == "amp_fp8")
    sharding = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2"}.get(row["Sharding Strategy"])
    if sharding is None:
        raise NotModelled(f"sharding strategy {row['Sharding Strategy']}")
    # The A100 clusters' tables are headed "1600 Gbps node-node interconnect"; H100 nodes have 3200.
    network = Network(8, 25e9 if gpu.architecture == "ampere" else 50e9)
    recompute = "full" if row.true("Activation Checkpointing") else "none"
    micro, accumulate = row.integer("MicroBatchSize"), row.integer("GradAccum")
    case = Case(
        shape,
        Layout(dp=gpus, sharding=sharding),
        Batch.uniform(accumulate, micro, seq),
        gpu,
        network,
        software,
        Knobs(recompute=recompute, offload_activations=row.true("Activation CPUOffload")),
    )
    return Modelled(case, gpus, micro * accumulate * seq * gpus, row["Model"], recompute)


def _llm_foundry_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    rate = number(row.get("Throughput (T/s/GPU)"))
    return Answers(step_s=m.tokens / m.gpus / rate if rate else None)


# --- torchtitan ----------------------------------------------------------------------------------


def _torchtitan(row: Inputs) -> Modelled:
    shape = _model(row["model"])
    gpus, seq, local = row.integer("gpus"), row.integer("seq_len"), row.integer("local_batch")
    axes = {k: int(v) for k, v in re.findall(r"([A-Z]+)(\d+)", row["parallelism"])}
    unknown = set(axes) - {"FSDP", "TP", "PP", "CP"}
    if unknown:
        raise NotModelled(f"parallelism {'+'.join(sorted(unknown))}")
    tp, pp, cp = axes.get("TP", 1), axes.get("PP", 1), axes.get("CP", 1)
    dp = axes.get("FSDP", gpus // (tp * pp * cp))
    techniques = row["techniques"]
    recompute = row["activation_ckpt"] or "none"
    software = stacks.torchtitan(
        compiled="compile" in techniques,
        fp8="fp8" in techniques,
        async_tp="asynctp" in techniques.lower(),
    )
    vpp = 1
    micro_batches, sequences = 1, local
    if pp > 1:
        # torchtitan's default: as many micro-batches as pipeline ranks
        # (pipeline_parallel_microbatches); interleaved: two chunks a rank.
        micro_batches, sequences = min(pp, local), max(1, local // pp)
        vpp = 2 if "interleaved" in techniques.lower() else 1
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, vpp=vpp, sequence_parallel=tp > 1, sharding="fsdp")
    gpu = _gpu("h100_96gb" if "96" in row["gpu"] else row["gpu"])
    case = Case(
        shape, layout, Batch.uniform(micro_batches, sequences, seq), gpu, Network(8, 50e9),
        software, Knobs(recompute=recompute),
    )  # fmt: skip
    calibration = row["parallelism"] == "FSDP8" and techniques == "FSDP+compile"
    return Modelled(
        case, gpus, local * seq * dp, shape.model.name, recompute, calibration=calibration
    )


def _torchtitan_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    rate, memory = number(row.get("tokens_per_s_per_gpu")), number(row.get("peak_mem_gib"))
    return Answers(
        step_s=m.tokens / m.gpus / rate if rate else None,
        # torchtitan logs torch.cuda's max reserved memory.
        reserved_bytes=memory * 2**30 if memory else None,
    )


# --- prime-rl ------------------------------------------------------------------------------------


def _prime_rl(row: Inputs) -> Modelled:
    shape = _model(row["model_name"])
    gpus, seq, micro = row.integer("num_gpus"), row.integer("seq_len"), row.integer("micro_batches")
    recompute = {"Recompute": "full", "Offload": "full", "": "none", "None": "none"}.get(row["ac"])
    if recompute is None:
        raise NotModelled(f"activation checkpointing {row['ac']}")
    tp, cp, ep = row.integer("tp", 1), row.integer("cp", 1), row.integer("ep", 1)
    copies = row.integer("dp_replicate", 1)
    dp = gpus // (tp * cp)
    attention = {"flash_attention_3": "fa3", "flash_attention_2": "fa2", "sdpa": "fa2"}.get(
        row["attention"]
    )
    if attention is None:
        raise NotModelled(f"attention {row['attention']}")
    software = stacks.prime_rl(
        rl=row["type"] == "rl", lora_rank=row.integer("lora_rank", 0), attention=attention
    )
    case = Case(
        shape,
        Layout(
            tp=tp,
            cp=cp,
            dp=dp,
            ep=ep if shape.moe else 1,
            sharding="hsdp" if copies > 1 else "fsdp",
            shard_size=dp // copies if copies > 1 else None,
        ),
        dataclasses.replace(Batch.uniform(micro, 1, seq), attended=seq * stacks.PRIME_RL_ATTENDED),
        _gpu(row["device_name"]),
        Network(8, 50e9),
        software,
        Knobs(recompute=recompute, offload_activations=row["ac"] == "Offload"),
    )
    calibration = (
        shape.model.name == "qwen3-4b"
        and gpus == 8
        and seq == 16384
        and row["type"] == "rl"
        and not software.lora_rank
    )
    return Modelled(
        case, gpus, micro * seq * dp, shape.model.name, row["ac"], calibration=calibration
    )


def _prime_rl_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    memory = number(row.get("peak_mem_gib"))
    return Answers(
        step_s=number(row.get("step_time_mean")),
        # Whole MiB in every row: torch.cuda's max reserved memory.
        reserved_bytes=memory * 2**30 if memory else None,
    )


# --- SimuMax -------------------------------------------------------------------------------------


def _simumax(row: Inputs) -> Modelled:
    text = row["case"]

    def find(pattern: str, default: int) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else default

    known = re.match(
        r"(llama_?3(?:[._]1)?_(?:8b|70b|405b)|llama_?2_\d+b|mi[sx]tral_(?:\dx)?\d+b"
        r"|deepseek_?v[23](?:_lite)?|qwen\d(?:[._]\d)?_[\d.]+b(?:_a\d+b)?)_",
        text,
    )
    if known is None:
        raise NotModelled(f"model of case {text}")
    name = known[1].replace("_", "-").replace("deepseek-v", "deepseekv")
    name = re.sub(r"-(\d)-(\d+b)", r".\1-\2", name).replace("deepseekv", "deepseek-v")
    # Cases keep layers of the model and train without its multi-token prediction.
    shape = dataclasses.replace(_model(name), mtp_layers=0)
    if (layers := find(r"_l(\d+)(?:_|$)", 0)) > 0:
        shape = shape.with_layers(layers)
    tp, pp, dp = find(r"_tp(\d+)", 1), find(r"_pp(\d+)", 1), find(r"_dp(\d+)", 0)
    cp, ep, vpp = find(r"_cp(\d+)", 1), find(r"_ep(\d+)", 1), find(r"_vpp?(\d+)", 1)
    dp = dp or 8 // (tp * pp * cp)
    seq, micro = find(r"_seq(\d+)", 4096), find(r"_mbs(\d+)", 1)
    count = find(r"_mbc(\d+)", 1)
    recompute = "none"
    if re.search(r"full_?re", text):
        recompute = "full"
    elif "recomp" in text or "_sel" in text:
        raise NotModelled("SimuMax case with selective recompute of unnamed modules")
    layout = Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp, sequence_parallel=tp > 1, sharding="zero1"
    )
    case = Case(
        shape, layout, Batch.uniform(count, micro, seq), find_gpu("b200"), Network(8, 50e9),
        stacks.simumax(fused_loss="_cef" in text, fp8="fp8" in text), Knobs(recompute=recompute),
    )  # fmt: skip
    gpus = layout.world_size
    name = shape.model.name
    calibration = re.search(r"_tp2_pp1_dp4_l12_mbc8_cef$", text) is not None
    return Modelled(case, gpus, count * micro * seq * dp, name, recompute, calibration=calibration)


def _simumax_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    step, memory = number(row.get("measured_ms")), number(row.get("measured_peak_gib"))
    return Answers(
        step_s=step / 1e3 if step else None,
        allocated_bytes=memory * 2**30 if memory else None,
    )


# --- Megatron-Bridge -----------------------------------------------------------------------------


def _bridge(row: Inputs) -> Modelled:
    if "nemotron" in row["model"].lower():
        raise NotModelled("hybrid (Mamba) model")
    shape = _model(row["model"])
    gpus, seq = row.integer("#-GPUs"), row.integer("Sequence Length")
    tp, pp, cp = row.integer("TP", 1), row.integer("PP", 1), row.integer("CP", 1)
    vpp, ep = max(1, row.integer("VP", 1)), max(1, row.integer("EP", 1))
    if shape.moe is None:
        ep = 1
    gbs, micro = row.integer("GBS"), row.integer("MBS")
    dp = gpus // (tp * pp * cp)
    fsdp = row.integer("FSDP", 0) > 1
    layout = Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp if pp > 1 else 1, sequence_parallel=tp > 1,
        sharding="fsdp" if fsdp else "zero1",
    )  # fmt: skip
    layers, first = shape.model.num_layers, None
    if layers % (pp * vpp) and (layers + 2) % (pp * vpp) == 0:
        # Embedding and loss count as a layer each (account_for_*_in_pipeline_split).
        first = (layers + 2) // pp - 1
    precision = row["Precision"] or "FP8"  # the 25.09 tables head their column FP8
    lora = 16 if "LoRA" in row["section"] else 0
    software = stacks.megatron_bridge(fp8=precision.startswith("FP8"), lora_rank=lora)
    system = row["System"].upper()
    gpu = next(
        (
            g
            for k, g in (
                ("GB200", "gb200"),
                ("B200", "b200"),
                ("H100", "h100"),
                ("H200", "h200"),
                ("A100", "a100"),
            )
            if k in system
        ),
        None,
    )
    if gpu is None:
        raise NotModelled(f"system {row['System']}")
    count = max(1, gbs // (dp * micro))
    node = 72 if gpu == "gb200" else 8
    case = Case(
        shape, layout, Batch.uniform(count, micro, seq), find_gpu(gpu), Network(node, 50e9),
        software, Knobs(), first_stage_layers=first, last_stage_layers=first,
    )  # fmt: skip
    return Modelled(case, gpus, gbs * seq, shape.model.name, "not stated")


def _bridge_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    rate = number(row.get("Tokens / sec / GPU"))
    return Answers(step_s=m.tokens / m.gpus / rate if rate else None)


# --- Megatron-LM golden values -------------------------------------------------------------------


def _golden(row: Inputs) -> Modelled:
    family, test = row["model_family"], row["test_case"]
    if family not in ("gpt", "moe", "mixtral"):
        raise NotModelled(f"model family {family}")
    if "inference" in test or "grpo" in test or "static" in test:
        raise NotModelled("inference or GRPO test")
    if row["dup_iter_series"].startswith("copy_of"):
        raise NotModelled("platform file that copies another's numbers")
    if row["mtp-num-layers"]:
        raise NotModelled("multi-token prediction with an unstated layout")
    hidden, layers = row.integer("hidden-size"), row.integer("num-layers")
    heads = row.integer("num-attention-heads")
    tp, pp = (
        row.integer("tensor-model-parallel-size", 1),
        row.integer("pipeline-model-parallel-size", 1),
    )
    cp, ep = row.integer("context-parallel-size", 1), row.integer("expert-model-parallel-size", 1)
    etp = row.integer("expert-tensor-parallel-size", tp if row["num-experts"] else 1)
    gpu = _gpu(row["gpu"]) if row["gpu"] else None
    if gpu is None:
        raise NotModelled("GPU is not stated")
    world = row.integer("world_size", 0)
    if not world and row["nodes"] and row["gpus_per_node"]:
        world = row.integer("nodes") * row.integer("gpus_per_node")
    gbs, micro = row.integer("global-batch-size"), row.integer("micro-batch-size")
    counted = world > 0
    if not counted:
        # Without a distributed optimizer memory is the same on any number of GPUs; time is not.
        if row.true("use-distributed-optimizer") or row["num-experts"]:
            raise NotModelled("GPU count is not stated")
        world = tp * pp * cp
    if gbs < micro * world // (tp * pp * cp):
        world = gbs // micro * tp * pp * cp  # as many ranks as the batch can feed
    dp = world // (tp * pp * cp)
    if dp < 1:
        raise NotModelled("layout takes more GPUs than stated")
    sequence_parallel = row.true("sequence-parallel") and tp > 1
    seq = row.integer("seq-length")
    gated = row.true("swiglu")
    ffn = row.integer(
        "ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    )
    head_dim = row.integer("kv-channels", hidden // heads)
    kv = row.integer("num-query-groups", heads) if row.true("group-query-attention") else heads
    tokenizer = row["tokenizer-type"]
    if row["vocab-size"]:
        vocab = row.integer("vocab-size")
    elif tokenizer in ("", "GPT2BPETokenizer"):
        vocab = 50257
    else:
        raise NotModelled(f"vocabulary of {tokenizer} is not stated")
    pad = row.integer("make-vocab-size-divisible-by", 128) * tp
    vocab = -(-vocab // pad) * pad
    moe = None
    if row["num-experts"]:
        moe = MoESpec(
            row.integer("num-experts"),
            row.integer("moe-router-topk", 2),
            row.integer("moe-ffn-hidden-size", ffn),
        )
    mla = None
    if row.true("multi-latent-attention"):
        # Megatron-LM's defaults for the widths that the table does not have.
        mla = MLA(0, 32, 128, 64, 128)
    shape = Shape(
        ModelSpec(
            name=f"{family} {layers}x{hidden}", num_layers=layers, hidden_size=hidden,
            ffn_hidden_size=ffn, num_attention_heads=heads, num_kv_heads=kv, head_dim=head_dim,
            vocab_size=vocab, tied_embeddings=not row.true("untie-embeddings-and-output-weights"),
            gated_mlp=gated, norm="layernorm", qkv_bias=True, linear_bias=True, moe=moe,
        ),
        mla=mla,
    )  # fmt: skip
    if row.true("use-custom-fsdp") or row.true("use-megatron-fsdp"):
        raise NotModelled("Megatron FSDP with an unstated sharding strategy")
    sharding = "zero1" if row.true("use-distributed-optimizer") else "none"
    vpp = 1
    if pp > 1 and row["num-layers-per-virtual-pipeline-stage"]:
        vpp = layers // pp // row.integer("num-layers-per-virtual-pipeline-stage")
    elif pp > 1 and row["num-virtual-stages-per-pipeline-rank"]:
        vpp = row.integer("num-virtual-stages-per-pipeline-rank")
    recompute = row["recompute-granularity"] or "none"
    if recompute == "selective" and row["recompute-modules"]:
        raise NotModelled("selective recompute of named modules")
    unfused = row["attention-backend"] == "unfused" or row["transformer-impl"] == "local"
    software = stacks.megatron_lm_tests(
        unfused_attention=unfused,
        fp8=bool(row["fp8-format"]),
        overlap_reduce=row.true("overlap-grad-reduce"),
        overlap_gather=row.true("overlap-param-gather"),
    )
    try:
        layout = Layout(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp if moe else 1, vpp=vpp,
            sequence_parallel=sequence_parallel, sharding=sharding,
        )  # fmt: skip
    except SpecError as error:
        raise NotModelled(f"layout: {error}") from None
    case = Case(
        shape, layout, Batch.uniform(max(1, gbs // (micro * dp)), micro, seq), gpu,
        Network(4 if gpu.name == "gb200" else 8, 50e9), software, Knobs(recompute=recompute),
    )  # fmt: skip
    # Megatron-LM's TensorBoard writer runs on the last rank, so on the last pipeline stage.
    return Modelled(
        case, world, gbs * seq, shape.model.name, recompute, stage=pp - 1, memory_only=not counted
    )


def _golden_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    return Answers(
        step_s=None if m.memory_only else number(row.get("iter_time_s_median_2nd_half")),
        allocated_bytes=number(row.get("mem_max_alloc_bytes_peak")),
    )


# --- NeMo-RL -------------------------------------------------------------------------------------

# Not in the table: prompts (OpenMathInstruct-2 problems) are short; responses spread as a lognormal
# cut at the longest sequence. Both are assumptions of this adapter.
_NEMO_PROMPT_TOKENS, _NEMO_SIGMA = 128, 0.6


def _with_mean(mean: float, longest: int) -> LengthDistribution:
    """The lognormal of sigma 0.6, cut at `longest`, whose mean is this."""
    low, high = 1.0, 20.0 * longest
    for _ in range(60):
        middle = math.sqrt(low * high)
        made = LengthDistribution.lognormal(middle, _NEMO_SIGMA, max_tokens=longest)
        low, high = (middle, high) if made.mean_tokens() < mean else (low, middle)
    return LengthDistribution.lognormal(low, _NEMO_SIGMA, max_tokens=longest)


def _nemo_rl(row: Inputs) -> Modelled:
    if row["policy"] != "On policy":
        raise NotModelled(
            "asynchronous: how GPUs are split between rollout and training is not in the table"
        )
    shape = _model(row["model"])
    gpu = "gb200" if "GB200" in row["system"].upper() else "h100"
    gpus, longest = row.integer("gpus"), row.integer("train_max_seq")
    tp, pp, cp = row.integer("train_tp", 1), row.integer("train_pp", 1), row.integer("train_cp", 1)
    ep, vpp = row.integer("train_ep", 1), row.integer("train_vpp", 1)
    layout = Layout(
        tp=tp, pp=pp, dp=gpus // (tp * pp * cp), cp=cp, ep=ep if shape.moe else 1, vpp=vpp,
        sequence_parallel=tp > 1, sharding="zero1",
    )  # fmt: skip
    gen_tp = row.integer("gen_tp", 1)
    job = JobSpec(
        shape.model, backend="megatron", attention="cudnn", entropy=False,
        fp8=row["precision"] == "FP8",
    )  # fmt: skip
    knobs = Knobs(token_budget_tokens=longest, recompute="full")
    plan = GlobalPlan({
        ModelStage.ACTOR_GENERATE: Assignment(
            Layout(tp=gen_tp, dp=gpus // gen_tp), Knobs(rollout_memory_fraction=0.6)),
        ModelStage.REF_LOGPROB: Assignment(layout, Knobs(token_budget_tokens=longest)),
        ModelStage.ACTOR_TRAIN: Assignment(layout, knobs),
    })  # fmt: skip
    sequences, update = row.integer("gen_gbs"), row.integer("train_gbs")
    mean = row.integer("gen_avg_seq")
    workload = WorkloadSpec(
        sequences, LengthDistribution.fixed(_NEMO_PROMPT_TOKENS),
        _with_mean(mean - _NEMO_PROMPT_TOKENS, longest - _NEMO_PROMPT_TOKENS), 1, update,
    )  # fmt: skip
    tokens = float(sequences * mean)
    case = Case(
        shape, layout, Batch.uniform(1, 1, mean), find_gpu(gpu), Network(8, 50e9),
        job.software(ModelStage.ACTOR_TRAIN), knobs,
    )  # fmt: skip
    cluster = cluster_of(gpu, gpus, 8)
    calibration = row["precision"] == "BF16" and gpus == 32 and mean == 3251
    return Modelled(
        case, gpus, tokens, shape.model.name, "full", calibration=calibration,
        whole_job=(job, plan, cluster, workload),
    )  # fmt: skip


def _nemo_rl_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    return Answers(step_s=number(row.get("step_time_s")))


# --- tables whose rows are stages of an RL step --------------------------------------------------


def _verl_stages(row: Inputs) -> Modelled:
    raise NotModelled("verl stage times: batch and response lengths are not in the table")


def _verl_sync(row: Inputs) -> Modelled:
    raise NotModelled("verl weight sync: what the transport does is not in the table")


def _no_answers(row: Mapping[str, str], m: Modelled) -> Answers:
    return Answers()


def _gpu(name: str) -> GPU:
    text = name.lower().replace("nvidia", "").split("(")[0]
    text = re.sub(r"-?(sxm\d?|pcie|hbm\d\w?|\d+w)", " ", text)
    text = re.sub(r"[\s_-]+", "_", text).strip("_")
    for candidate in (text, text.split("_")[0]):
        try:
            return find_gpu(candidate)
        except KeyError:
            continue
    raise NotModelled(f"GPU {name}")


def _model(name: str) -> Shape:
    try:
        return find_model(name)
    except SpecError:
        raise NotModelled(f"model {name} is not known") from None


_GOLDEN_COLUMNS = [
    "model_family", "test_case", "gpu", "nodes", "gpus_per_node", "world_size", "dup_iter_series",
    "tensor-model-parallel-size", "pipeline-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size",
    "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "micro-batch-size",
    "global-batch-size", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads",
    "num-query-groups", "kv-channels", "seq-length", "vocab-size", "make-vocab-size-divisible-by",
    "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce",
    "overlap-param-gather", "recompute-granularity", "recompute-modules", "fp8-format",
    "transformer-impl", "use-custom-fsdp", "use-megatron-fsdp", "swiglu",
    "untie-embeddings-and-output-weights", "multi-latent-attention", "attention-backend",
    "mtp-num-layers", "tokenizer-type", "group-query-attention",
]  # fmt: skip

TABLES = (
    Table(
        "llm_foundry_mpt_training.csv",
        "llm_foundry",
        frozenset(
            ["Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "Precision",
             "MP Mode", "Sharding Strategy", "Activation Checkpointing", "Activation CPUOffload"]
        ),
        _llm_foundry,
        _llm_foundry_answers,
    ),
    Table(
        "torchtitan_h100_2024-12.csv",
        "torchtitan",
        frozenset(["model", "gpu", "gpus", "parallelism", "techniques", "seq_len", "local_batch",
                   "activation_ckpt"]),
        _torchtitan,
        _torchtitan_answers,
    ),
    Table(
        "prime_rl_trainer_benchmarks.csv",
        "prime_rl",
        frozenset(["type", "model_name", "num_gpus", "device_name", "lora_rank", "seq_len",
                   "micro_batches", "ac", "attention", "cp", "ep", "tp", "dp_replicate"]),
        _prime_rl,
        _prime_rl_answers,
    ),
    Table("simumax_b200.csv", "simumax", frozenset(["case"]), _simumax, _simumax_answers),
    Table(
        "megatron_bridge_pretrain_throughput.csv",
        "megatron_bridge",
        frozenset(["System", "#-GPUs", "Precision", "GBS", "MBS", "Sequence Length", "TP", "PP",
                   "CP", "VP", "EP", "model", "section", "FSDP"]),
        _bridge,
        _bridge_answers,
    ),
    Table(
        "nemo_rl_step_times.csv",
        "nemo_rl",
        frozenset(["model", "system", "precision", "policy", "train_max_seq", "gen_avg_seq", "gpus",
                   "gen_gbs", "train_gbs", "gen_tp", "train_tp", "train_cp", "train_ep", "train_pp",
                   "train_vpp"]),
        _nemo_rl,
        _nemo_rl_answers,
    ),
    Table(
        "megatron_lm_golden_values.csv",
        "megatron_lm",
        frozenset(_GOLDEN_COLUMNS),
        _golden,
        _golden_answers,
    ),
    Table("verl_docs_stage_times.csv", "verl", frozenset(["model"]), _verl_stages, _no_answers),
    Table("verl_docs_weight_sync.csv", "verl", frozenset(["model"]), _verl_sync, _no_answers),
)  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def model_flops(case: Case, tokens: float) -> float:
    """FLOPs of a step, 6 * active parameters and the causal half of attention: for the baseline."""
    shape = case.shape
    active = float(shape.num_parameters())
    if shape.moe is not None:
        unused = shape.moe.num_experts - shape.moe.experts_per_token
        active -= shape.num_moe_layers * unused * shape.expert_params()
    attention = 6.0 * shape.model.num_layers * shape.model.query_size * case.batch.attended
    return tokens * (6.0 * active + attention)


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0
