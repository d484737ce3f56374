"""What is checked before a job starts, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

from nereus_verl import preflight

from nereus_plugins.spec import SpecError

from .test_verl_config import HF, job, put


def _job(tmp_path: Path, model: str | None = None) -> dict[str, object]:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    config = job()
    for section in ("actor_rollout_ref", "critic"):
        put(config, f"{section}.model.path", model or str(tmp_path))
    put(config, "trainer.default_local_dir", str(tmp_path / "checkpoints"))
    return put(config, "nereus", {"schedule": {5: {"shard_size": 2}}})


def test_a_step_after_the_end_of_training_is_refused(tmp_path: Path) -> None:
    config = _job(tmp_path)
    put(config, "trainer.total_training_steps", 5)
    assert list(preflight.run(config).targets) == [5]
    put(config, "trainer.total_training_steps", 4)
    with pytest.raises(SpecError, match=r"nereus\.schedule\.5: .* step 4 \(trainer\.total_t"):
        preflight.run(config)
    with pytest.raises(SpecError, match=r"schedule\.7: .* step 6 \(trainer\.total_epochs\)"):
        preflight.check_reached([9, 7, 6], 6, "trainer.total_epochs")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nereus.run_dir", "config.json", r"nereus\.run_dir: .*\(File exists\); set nereus"),
        ("nereus.run_dir", "a\0b", r"nereus\.run_dir: .*null byte\); set nereus\.run_dir"),
        ("trainer.resume_from_path", "nope", "resume_from_path: .*nope is no checkpoint; give a"),
    ],
)
def test_folders_that_are_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, value: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = put(_job(tmp_path), path, value)
    if path.startswith("trainer"):
        put(config, "trainer.resume_mode", "resume_path")
    with pytest.raises(SpecError, match=message):
        preflight.run(config)


def test_checked_ahead_is_what_can_be_known_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _job(tmp_path)
    preflight.check_ahead(config)
    assert "nereus" not in capsys.readouterr().out
    put(config, "nereus.schedule", {5: {"shard_size": 3}})
    with pytest.raises(SpecError, match="shard_size=3"):
        preflight.check_ahead(config)
    preflight.check_ahead(_job(tmp_path, "hdfs://host/model"))  # it is not fetched
    assert "nereus" not in capsys.readouterr().out
    with pytest.raises(SpecError, match="schedul"):
        preflight.check_ahead(put(_job(tmp_path, "hdfs://host/model"), "nereus.schedul", {}))
    preflight.check_ahead(_job(tmp_path, str(tmp_path / "on-another-host")))
    assert "could not be checked before the job starts" in capsys.readouterr().out
