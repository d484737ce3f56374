"""What a job that is started again goes on from: the newest snapshot, or verl's own checkpoint.

By verl's own setting: trainer.resume_mode=auto takes what is newer; resume_path takes the
checkpoint it names; disable takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.folder import Snapshot
from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import RecordError, StepRecord, read_records
from nereus_verl import jobconfig, json_state, stamp
from nereus_verl.config import SnapshotConfig
from nereus_verl.jobconfig import UnitConfig

TRAINER = "trainer"  # the unit with what the trainer itself needs (`snapshot_worker.TrainerUnit`)
DATA = "data"


@dataclass(frozen=True)
class Resume:
    """A snapshot to go on from.

    Attributes:
        data: the state of verl's data loader.
        passed_over: newer ones that are torn or damaged, with the reason.
    """

    snapshot: Snapshot
    data: Any
    passed_over: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.snapshot.index.step


def place(settings: SnapshotConfig) -> Path:
    """The folder of a job's snapshots."""
    return Path.cwd() / settings.folder


def newest(
    settings: SnapshotConfig,
    config: Mapping[str, Any],
    units: Iterable[str],
    checkpoint: int | None,
) -> Resume | None:
    """What to go on from; None: from verl's checkpoint, or from the beginning.

    Args:
        config: verl's. units: of the job.
        checkpoint: the step of the checkpoint that verl would resume from, None if there is none.

    Raises: SnapshotError: there are snapshots, and none can be used; says what to do.
    """
    if jobconfig.select(config, "trainer.resume_mode", "auto") != "auto":
        return None
    at = place(settings)
    found, passed_over = folder.find(at)
    damaged = [why for why in passed_over if not why.endswith(folder.UNFINISHED)]
    start_anew = "set nereus.snapshot.folder to another directory to start without them"
    if not found:
        if damaged and checkpoint is None:
            raise SnapshotError(
                f"nereus.snapshot.folder: no snapshot in {at} is whole ({'; '.join(damaged)}); "
                f"{start_anew}"
            )
        return None
    snapshot = found[-1]
    if checkpoint is not None and checkpoint > snapshot.index.step:
        return None
    index = snapshot.index
    wanted = sorted({*units, TRAINER} - {"ref"})
    if sorted(index.units) != wanted:
        raise SnapshotError(
            f"nereus.snapshot.folder: {snapshot.path} is of another job: it holds "
            f"{', '.join(sorted(index.units))}, this one needs {', '.join(wanted)}; {start_anew}"
        )
    try:
        data = json_state.from_json(index.units[TRAINER].scalars[DATA])
    except (KeyError, json_state.NotJson) as error:
        raise SnapshotError(
            f"nereus.snapshot.folder: {snapshot.path} holds no position in the data that can be "
            f"read ({error!r}); {start_anew}"
        ) from None
    return Resume(snapshot, data, tuple(passed_over))


def newest_words(settings: SnapshotConfig | None, config: Mapping[str, Any]) -> str:
    """Of a job that ends: from which snapshot the same command goes on, "" if from none, or if
    that cannot be read.

    Args: config: verl's.
    """
    if settings is None:
        return ""
    try:
        checkpoint = stamp.latest_checkpoint(config)
        snapshot = folder.latest(place(settings))
        if checkpoint is not None and stamp.step_of(checkpoint) > snapshot.index.step:
            return ""
    except (SnapshotError, OSError, ValueError):  # of what is there; the job's own error counts
        return ""
    return (
        f"the newest snapshot is after step {snapshot.index.step}, {snapshot.path}; the same "
        "command with trainer.resume_mode=auto goes on from it"
    )


def words(resume: Resume, run_dir: Path, units: Mapping[str, UnitConfig]) -> list[str]:
    """What a job that goes on from a snapshot says, line by line.

    Args: run_dir: whose records say how far the job before had come. units: of this job.
    """
    index = resume.snapshot.index
    out = [f"passed over {why}" for why in resume.passed_over]
    done = _last_step(run_dir)
    lost = ""
    if done is not None and done >= index.step:
        steps = done - index.step
        lost = f"; the job had done step {done}: {steps} step{'s' * (steps != 1)} of work lost"
    out.append(f"goes on from the snapshot after step {index.step}, {resume.snapshot.path}{lost}")
    layouts = {name: index.units[name].layout for name in units if name in index.units}
    were = ", ".join(f"{name} {layout}" for name, layout in layouts.items())
    out.append(f"it was taken on {index.world} ranks in {were} ({_settings(layouts, units)})")
    return out


def _settings(layouts: Mapping[str, Layout], units: Mapping[str, UnitConfig]) -> str:
    return " ".join(
        f"{key}={value}"
        for name, layout in layouts.items()
        for key, value in jobconfig.layout_settings(units[name], layout).items()
    )


def _last_step(run_dir: Path) -> int | None:
    """The last step in the records of the job before, None if they do not say."""
    last = None
    try:
        for record in read_records(run_dir):
            if isinstance(record, StepRecord):
                last = record.step
    except (OSError, RecordError):
        return None
    return last
