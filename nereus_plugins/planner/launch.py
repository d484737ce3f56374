"""A user's own launch command, read as what estimates are asked of: job, plan, GPUs, workload."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import (
    GlobalPlan,
    LengthDistribution,
    ModelSpec,
    SpecError,
    WorkloadSpec,
)
from nereus_plugins.spec.record import read_text


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launch command asks for.

    Attributes:
        framework: "verl" or "openrlhf".
        settings: the command's own names of each knob that `nereus check` may tell to change.
        response_tokens, prompt_tokens: limits of lengths.
        response_setting: the command's setting that limits the response.
        prompts, samples, mini_batch_prompts: as in `WorkloadSpec`.
    """

    framework: str
    job: JobSpec
    plan: GlobalPlan
    gpus: int
    gpus_per_node: int
    prompts: int
    samples: int
    mini_batch_prompts: int
    prompt_tokens: int
    response_tokens: int
    response_setting: str
    settings: dict[str, tuple[str, ...]]

    def workload(self, response_tokens: int, median: float, sigma: float) -> WorkloadSpec:
        """The workload if responses reach `response_tokens`, their median that part of it."""
        return WorkloadSpec(
            self.prompts,
            LengthDistribution.fixed(self.prompt_tokens),
            LengthDistribution.lognormal(
                max(1.0, median * response_tokens), sigma, max_tokens=response_tokens
            ),
            self.samples,
            self.mini_batch_prompts,
        )


def words_of_script(path: Path) -> list[str]:
    """The words of a shell script's launch command, its plain variables filled in.

    Raises: SpecError where the file has no command that starts a known trainer.
    """
    text = read_text(path).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for line in text.splitlines():
        assigned = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s$`]*)\s*", line)
        if assigned:
            variables[assigned[1]] = assigned[2].strip("\"'")
            continue
        if "verl.trainer" in line or "openrlhf" in line:
            for name, value in variables.items():
                line = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, line)
            return shlex.split(line, comments=True)
    raise SpecError(f"{path}: no command that starts verl.trainer... or openrlhf...")


def whole_number(text: str, setting: str, between: str) -> int:
    """ "2" or "2.0" or "1e3". Raises: SpecError naming the setting, as the command writes it."""
    try:
        number = float(text)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise SpecError(f"{setting}{between}{text} is not a whole number")


def model_named(name: str, instead: str | None, *, value_head: bool = False) -> ModelSpec:
    """The shape of a model as the command names it; `instead` overrides it (`--model`)."""
    try:
        return read_model(instead or name, value_head=value_head)
    except SpecError as error:
        raise SpecError(f"{error} (with --model NAME or --model PATH/config.json)") from None


def is_openrlhf(words: Sequence[str]) -> bool:
    return any("openrlhf" in w for w in words) or any(
        w.split("=")[0] in ("--pretrain", "--actor_num_gpus_per_node") or w.startswith("--actor.")
        for w in words
    )


def read_launch(
    words: Sequence[str],
    model: str | None = None,
    critic: str | None = None,
    prompt_tokens: int | None = None,
) -> Launch:
    """The launch that a command's words ask for.

    Args:
        model, critic: shapes to take instead of those that the command names.
        prompt_tokens: longest prompt, where the command limits only prompt and response together.

    Raises: SpecError naming the setting that is missing or cannot be read.
    """
    from . import openrlhf_launch, verl_launch

    if is_openrlhf(words):
        return openrlhf_launch.read(words, model, critic, prompt_tokens)
    if not any("verl." in word or "=" in word for word in words):
        raise SpecError(
            f"{shlex.join(words)[:80]!r} starts neither verl.trainer... nor openrlhf..., and "
            "has no setting of theirs"
        )
    return verl_launch.read(words, model, critic)
