"""The plugin's promise: inert, and loud when Nereus is asked for and cannot be loaded."""

from __future__ import annotations

import dataclasses
import json
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
        timeout=300,
        check=False,
    )


def test_waits_for_verls_trainer() -> None:
    done = _python(
        """
        import sys, verl
        assert "nereus_verl.plugin" in sys.modules
        loaded = [m for m in sys.modules if m.startswith("nereus_plugins")]
        assert not loaded and "nereus_verl.trainer" not in sys.modules, loaded

        import verl.trainer.ppo.v1 as v1
        trainer = sys.modules["nereus_verl.trainer"]
        assert v1.get_trainer_cls("sync") is trainer.NereusTrainer
        # The others stay what they are, but refuse a job that asks for Nereus.
        other = v1.get_trainer_cls("colocate_async")
        assert other.__name__ == "PPOTrainerColocateAsync"
        assert issubclass(other, v1.PPOTrainerColocateAsync)
        assert not issubclass(other, trainer.NereusTrainer)
        """
    )
    assert done.returncode == 0, done.stderr


def test_broken_nereus_fails_the_jobs_that_ask_for_it() -> None:
    done = _python(
        """
        import sys
        sys.modules["nereus_verl.trainer"] = None  # importing it now fails
        import verl.trainer.ppo.v1 as v1
        from nereus_verl.plugin import NereusLoadError
        from omegaconf import OmegaConf
        asks = OmegaConf.create({"nereus": {"enable": True}})
        silent = OmegaConf.create({"trainer": {"marker": 1}})
        for mode in ("sync", "separate_async"):
            trainer = v1.get_trainer_cls(mode)
            try:
                trainer(config=asks)
            except NereusLoadError as error:
                assert "nereus.enable=false" in str(error)
            else:
                raise AssertionError(mode)
            try:
                trainer(config=silent)
            except NereusLoadError:
                raise AssertionError(mode)
            except Exception:
                pass  # verl's own trainer went on, to its own complaint about this configuration
        """
    )
    assert done.returncode == 0, done.stderr
    assert "could not be loaded into verl's trainer" in done.stderr


COMPOSE = """
    import json, verl
    from pathlib import Path
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        assert "nereus" not in compose("ppo_trainer")
        config = compose("ppo_trainer", overrides=[
            "+nereus=on", "++nereus.schedule={5: {tp: 2}}", "nereus.checksum=false"])
    print(json.dumps(OmegaConf.to_container(config.nereus, resolve=True)))
"""


def test_config_group_has_the_settings_and_their_defaults() -> None:
    from nereus_verl.config import NereusConfig

    done = _python(COMPOSE)
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)
    config = NereusConfig.from_dict(settings)
    assert config.enable
    assert config == NereusConfig(schedule={5: {"tp": 2}}, checksum=False)
    assert sorted(settings) == sorted(f.name for f in dataclasses.fields(NereusConfig))


def test_config_group_fails_without_the_plugin() -> None:
    done = _python(COMPOSE, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "nereus_plugin_is_loaded" in done.stderr


def test_every_option_is_explained() -> None:
    import nereus_verl.conf

    text = Path(nereus_verl.conf.__file__).with_name("nereus") / "on.yaml"
    lines = [line.strip() for line in text.read_text().splitlines()]
    for above, line in pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("#"), f"{line!r} has no comment"
