"""A small, genuine PPO job on CPU, to watch and to test with."""
