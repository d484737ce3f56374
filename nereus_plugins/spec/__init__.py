"""The vocabulary: model, cluster, workload, layout, plan.

Every record is immutable, checked when it is made (`SpecError` names the rule broken and the
setting to change), and reads from and writes to dict, JSON and YAML.
"""

from .cluster import ClusterSpec, GPUSpec, LinkSpec
from .layout import SHARDINGS, Coord, ExpertCoord, Layout
from .model import ModelSpec, MoESpec
from .plan import Assignment, GlobalPlan, Knobs, ModelStage
from .record import FrozenMap, Record, SpecError
from .workload import LengthDistribution, OptimizerSpec, WorkloadSpec

__all__ = [
    "SHARDINGS",
    "Assignment",
    "ClusterSpec",
    "Coord",
    "ExpertCoord",
    "FrozenMap",
    "GPUSpec",
    "GlobalPlan",
    "Knobs",
    "Layout",
    "LengthDistribution",
    "LinkSpec",
    "MoESpec",
    "ModelSpec",
    "ModelStage",
    "OptimizerSpec",
    "Record",
    "SpecError",
    "WorkloadSpec",
]
