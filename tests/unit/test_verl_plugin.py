"""The plugin's promise: inert, and loud when Nereus is asked for and cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("verl")


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_importing_verl_brings_in_nothing_of_nereus() -> None:
    done = _python(
        """
        import sys, verl
        assert "nereus_verl.plugin" in sys.modules
        loaded = [m for m in sys.modules if m.startswith("nereus_plugins")]
        assert not loaded and "nereus_verl.trainer" not in sys.modules, loaded
        """
    )
    assert done.returncode == 0, done.stderr


def test_trainer_comes_with_verls() -> None:
    done = _python(
        """
        import sys, verl.trainer.ppo.v1 as v1
        trainer = sys.modules["nereus_verl.trainer"]
        assert v1.get_trainer_cls("sync") is trainer.NereusTrainer
        assert v1.get_trainer_cls("colocate_async") is v1.PPOTrainerColocateAsync
        """
    )
    assert done.returncode == 0, done.stderr


BROKEN = """
    import sys
    sys.modules["nereus_verl.trainer"] = None  # importing it now fails
    import verl.trainer.ppo.v1 as v1
    from omegaconf import OmegaConf
    trainer = v1.get_trainer_cls({mode!r})
    trainer(config=OmegaConf.create({config!r}))
"""


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_broken_nereus_fails_a_job_that_asks_for_it(mode: str) -> None:
    done = _python(BROKEN.format(mode=mode, config={"nereus": {"enable": True}}))
    assert "could not be loaded into verl's trainer" in done.stderr
    assert "NereusLoadError: nereus.enable is true" in done.stderr


def test_broken_nereus_leaves_other_jobs_alone() -> None:
    done = _python(BROKEN.format(mode="sync", config={"trainer": {"marker": 1}}))
    assert "could not be loaded into verl's trainer" in done.stderr
    assert "NereusLoadError" not in done.stderr
    assert "trainer_base.py" in done.stderr  # verl's own trainer went on, to its own complaint


COMPOSE = """
    import verl
    from pathlib import Path
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides={overrides!r})
    print(OmegaConf.to_yaml(config.get("nereus"), resolve=True) if "nereus" in config else "none")
"""


def test_config_group_matches_the_settings() -> None:
    pytest.importorskip("hydra")
    overrides = ["+nereus=on", "++nereus.schedule={5: {tp: 2}}", "nereus.checksum=false"]
    done = _python(COMPOSE.format(overrides=overrides))
    assert done.returncode == 0, done.stderr
    import yaml
    from nereus_verl.config import NereusConfig

    settings = yaml.safe_load(done.stdout)
    config = NereusConfig.from_dict(settings)
    assert config.enable
    assert config.schedule[5] == {"tp": 2}
    # Every option is in the documented file, with the same default.
    assert {**NereusConfig().to_dict(), "schedule": {5: {"tp": 2}}, "checksum": False} == {
        **settings
    }


def test_group_is_absent_unless_asked_for() -> None:
    done = _python(COMPOSE.format(overrides=[]))
    assert done.stdout.strip() == "none", done.stderr


def test_config_asks_for_the_plugin() -> None:
    done = _python(COMPOSE.format(overrides=["+nereus=on"]), VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "nereus_plugin_is_loaded" in done.stderr


def test_every_option_is_explained() -> None:
    import nereus_verl.conf

    text = Path(nereus_verl.conf.__file__).with_name("nereus") / "on.yaml"
    lines = text.read_text().splitlines()
    for above, line in pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("#"), f"{line!r} has no comment"
