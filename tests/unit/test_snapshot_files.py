"""Snapshots on disk without a process group: the format, what is torn, damaged, or kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus_plugins.emu.boxes import Box, flat_range_to_boxes
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.emu.table import concat
from nereus_plugins.emu.tiling import CoverageError
from nereus_plugins.snapshot import folder, in_memory, read
from nereus_plugins.snapshot.blocks import BLOCK_BYTES
from nereus_plugins.snapshot.errors import DamagedSnapshot, OtherModel, SnapshotError
from nereus_plugins.snapshot.host_copy import HostCopy
from nereus_plugins.snapshot.index import INDEX_NAME, Index, UnitRecord, read_index
from nereus_plugins.snapshot.parts import parts
from nereus_plugins.snapshot.shard_file import parse
from nereus_plugins.snapshot.write import write_file
from nereus_plugins.spec import Layout

DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
    "int16", "int8", "uint8", "bool",
)  # fmt: skip
Whole = dict[str, torch.Tensor]


def whole_tensors(rows: int = 7) -> Whole:
    """Tensors of every type, one with no dims, one that is larger than a block with `rows` high."""
    generator = torch.Generator().manual_seed(rows)
    out: Whole = {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        raw = torch.randint(0, 2 if dtype == "bool" else 100, (rows, 5), generator=generator)
        out[f"buffer/{dtype}"] = raw.to(kind)
    out["exp_avg/flat"] = torch.randn(rows, 6, generator=generator)
    out["buffer/scalar"] = torch.tensor(3.25)
    return out


def units(whole: Whole, ranks: int, flat: bool = True) -> list[DescribedUnit]:
    """`whole` on some ranks: cut by rows, flat ranges of "exp_avg/flat", replicas of the scalar."""
    described = [DescribedUnit() for _ in range(ranks)]
    for name, tensor in whole.items():
        for rank, unit in enumerate(described):
            shape = tuple(tensor.shape)
            low, high = (
                (tensor.numel() if name == "exp_avg/flat" and flat else (shape or (1,))[0])
                * i
                // ranks
                for i in (rank, rank + 1)
            )
            if not shape:
                boxes = [Box((), ())]
            elif name == "exp_avg/flat" and flat:
                boxes = [piece.box for piece in flat_range_to_boxes(shape, low, high)]
            else:
                boxes = [Box((low, 0), (high - low, shape[1]))]
            for box in boxes:
                view = tensor[box.slices_in(Box.whole(shape))].clone()
                unit.shards.append(LocalShard(name, box, shape, view))
    return described


def write(root: Path, described: list[DescribedUnit], step: int = 3, keep: int = 9) -> Path:
    """What `Snapshots` does with several ranks, in one process."""
    table = concat([unit.table(rank) for rank, unit in enumerate(described)])
    writing = folder.begin(root, folder.last_number(root) + 1, step)
    files = []
    for rank, mine in parts(table).items():
        copy = HostCopy(rank, mine, pinned=False)
        copy.fill(described[rank])
        files += [write_file(writing, "actor", rank, file) for file in copy.files]
    unit = UnitRecord(Layout(dp=len(described)), table.tensors, {"steps": {"w": 1.0}})
    number = int(writing.name.split("-")[1])
    index = Index(number, step, 0, {}, len(described), "now", {"actor": unit}, tuple(files))
    path = folder.complete(writing, index)
    folder.keep_last(root, keep)
    return path


def blank(described: list[DescribedUnit]) -> list[DescribedUnit]:
    for unit in described:
        for shard in unit.shards:
            shard.view.zero_()
    return described


def same(described: list[DescribedUnit], whole: Whole) -> bool:
    return all(
        torch.equal(
            shard.view.contiguous().reshape(-1).view(torch.uint8),
            whole[shard.name][shard.box.slices_in(Box.whole(shard.global_shape))]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8),
        )
        for unit in described
        for shard in unit.shards
    )


@pytest.mark.parametrize("source", [1, 3])
@pytest.mark.parametrize("target", [1, 2, 5])
def test_files_restore_into_any_number_of_ranks(tmp_path: Path, source: int, target: int) -> None:
    whole = whole_tensors()
    write(tmp_path, units(whole, source))
    snapshot = folder.latest(tmp_path)
    filled = blank(units(whole, target, flat=target != 2))
    assert not same(filled, whole)
    total = sum(read.read_unit(snapshot, "actor", unit) for unit in filled)
    assert same(filled, whole)
    assert total == sum(s.nbytes for unit in filled for s in unit.shards)
    assert snapshot.index.step == 3
    assert snapshot.index.units["actor"].scalars == {"steps": {"w": 1.0}}


def test_large_tensors_are_read_in_checked_blocks(tmp_path: Path) -> None:
    rows = 2 * BLOCK_BYTES // 24 + 11
    tensor = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6)
    source = [DescribedUnit([LocalShard("weight/w", Box.whole((rows, 6)), (rows, 6), tensor)])]
    path = write(tmp_path, source)
    snapshot = folder.latest(tmp_path)
    assert len(snapshot.index.files[0].blocks) == 3

    def fill(box: Box) -> torch.Tensor:
        view = torch.zeros(box.shape)
        read.read_unit(
            snapshot, "actor", DescribedUnit([LocalShard("weight/w", box, (rows, 6), view)])
        )
        return view

    columns = Box((0, 2), (rows, 3))
    assert torch.equal(fill(columns), tensor[:, 2:5])
    file = path / snapshot.index.files[0].path
    with open(file, "r+b") as handle:
        handle.seek(-5, 2)
        byte = handle.read(1)
        handle.seek(-5, 2)
        handle.write(bytes([byte[0] ^ 1]))
    assert torch.equal(fill(Box((0, 0), (4, 6))), tensor[:4])  # not of the block that changed
    with pytest.raises(DamagedSnapshot, match=r"shard-00001.*have changed"):
        fill(columns)


def test_torchs_distributed_checkpoint_reads_the_files(tmp_path: Path) -> None:
    whole = whole_tensors()
    path = write(tmp_path, units(whole, 3))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(path / "actor")), no_dist=True)
    for name, tensor in whole.items():
        assert torch.equal(
            loaded[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )


def test_safetensors_itself_reads_a_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = whole_tensors()
    path = write(tmp_path, units(whole, 1))
    (file,) = (path / "actor").iterdir()
    loaded = load_file(file)
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[n].float(), whole[n].float()) for n in whole)


def test_every_element_is_copied_once_and_the_bytes_are_spread() -> None:
    replicated = {f"weight/{i}": torch.zeros(10, 2 + i) for i in range(40)}
    described = [
        DescribedUnit(
            [LocalShard(n, Box.whole(t.shape), tuple(t.shape), t) for n, t in replicated.items()]
        )
        for _ in range(4)
    ]
    table = concat([unit.table(rank) for rank, unit in enumerate(described)])
    copied = parts(table)
    names = [box.info.name for mine in copied.values() for box in mine]
    assert sorted(names) == sorted(replicated)
    loads = [sum(box.nbytes for box in mine) for mine in copied.values()]
    assert max(loads) <= sum(loads) / 4 + 41 * 10 * 4


def test_replicas_that_are_cut_differently_are_copied_once() -> None:
    whole = torch.arange(60.0).view(10, 6)

    def unit(cuts: list[int]) -> DescribedUnit:
        return DescribedUnit(
            [
                LocalShard("weight/w", Box((low, 0), (high - low, 6)), (10, 6), whole[low:high])
                for low, high in itertools.pairwise(cuts)
            ]
        )

    table = concat([unit([0, 10]).table(0), unit([0, 3, 7, 10]).table(1)])
    assert sum(box.box.numel for mine in parts(table).values() for box in mine) == 60


def test_a_unit_that_no_rank_holds_whole_is_not_copied() -> None:
    view = torch.zeros(3, 2)
    table = DescribedUnit([LocalShard("weight/w", Box((0, 0), (3, 2)), (4, 2), view)]).table(0)
    with pytest.raises(CoverageError, match="weight/w"):
        parts(table)


def test_torn_snapshots_are_passed_over(tmp_path: Path) -> None:
    whole = whole_tensors()
    good = write(tmp_path, units(whole, 2), step=1)
    no_index = write(tmp_path, units(whole, 2), step=2)
    (no_index / INDEX_NAME).unlink()
    short = write(tmp_path, units(whole, 2), step=3)
    file = next((short / "actor").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    half = write(tmp_path, units(whole, 2), step=4)
    text = (half / INDEX_NAME).read_text()
    (half / INDEX_NAME).write_text(text[: len(text) // 2])
    missing = write(tmp_path, units(whole, 2), step=5)
    next((missing / "actor").iterdir()).unlink()
    other = write(tmp_path, units(whole, 2), step=6)
    (other / INDEX_NAME).write_text(text.replace('"step": 4', '"step": 6'))
    folder.begin(tmp_path, 99, 7)
    assert folder.latest(tmp_path).path == good
    found, passed_over = folder.find(tmp_path)
    assert [s.path for s in found] == [good]
    assert len(passed_over) == 6
    shutil.rmtree(good)
    with pytest.raises(SnapshotError, match="no complete snapshot; passed over"):
        folder.latest(tmp_path)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    whole = whole_tensors()
    paths = [write(tmp_path, units(whole, 1), step=s, keep=2) for s in (1, 2, 2, 1)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in paths[2:]]
    assert folder.latest(tmp_path).path == paths[3]  # the newest, not that of the highest step


def test_what_a_job_that_died_was_writing_is_removed(tmp_path: Path) -> None:
    left = folder.begin(tmp_path, 1, 1)
    (left / "actor").mkdir()
    whole = whole_tensors()
    path = write(tmp_path, units(whole, 1))
    assert list(tmp_path.iterdir()) == [path]


def test_another_model_is_named(tmp_path: Path) -> None:
    whole = whole_tensors()
    write(tmp_path, units(whole, 1))
    snapshot = folder.latest(tmp_path)
    wider = {"exp_avg/flat": torch.zeros(7, 9)}
    with pytest.raises(OtherModel, match=r"exp_avg/flat.*\(7, 6\).*\(7, 9\)"):
        read.read_unit(snapshot, "actor", units(wider, 1)[0])
    with pytest.raises(OtherModel, match="exp_avg/more"):
        read.read_unit(snapshot, "actor", units({"exp_avg/more": torch.zeros(7, 6)}, 1)[0])


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, units(whole_tensors(), 1))
    snapshot = folder.latest(tmp_path)
    (file,) = (path / "actor").iterdir()
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedSnapshot, match="header has changed"):
        read.read_unit(snapshot, "actor", units(whole_tensors(), 1)[0])


def test_an_index_can_name_no_file_outside(tmp_path: Path) -> None:
    path = write(tmp_path, units(whole_tensors(), 1))
    index = folder.latest(tmp_path).index
    from dataclasses import replace

    for wrong in ({"unit": "../.."}, {"name": "../x.safetensors"}, {"nbytes": -1}):
        outside = replace(index, files=(replace(index.files[0], **wrong),))  # type: ignore[arg-type]
        with pytest.raises(DamagedSnapshot):
            read_index(outside.to_json(), str(path))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    with pytest.raises(DamagedSnapshot):
        read_index(data.decode("latin-1"), "index")
    with pytest.raises(DamagedSnapshot):
        parse(data, {}, "file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
@given(json_values, st.sampled_from(["units", "files", "plan", "step", "block_bytes", "world"]))
def test_no_index_crashes_the_reader(value: object, key: str) -> None:
    import hashlib

    body = json.loads(Index(1, 1, 0, {}, 1, "", {}, ()).to_json())
    del body["digest"]
    body[key] = value
    text = json.dumps(body, sort_keys=True)
    body["digest"] = hashlib.sha256(text.encode()).hexdigest()
    with contextlib.suppress(DamagedSnapshot):
        read_index(json.dumps(body), "index")


@contextlib.contextmanager
def few_open_files(more: int) -> Iterator[None]:
    """While in it, this process can open `more` files and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handle = os.dup(0)  # the lowest that is free
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (handle + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_snapshot_of_many_ranks_needs_few_open_files(tmp_path: Path) -> None:
    whole = whole_tensors(rows=60)
    write(tmp_path, units(whole, 60))
    snapshot = folder.latest(tmp_path)
    assert len(snapshot.index.files) >= 60
    filled = blank(units(whole, 1))
    with few_open_files(3):
        read.read_unit(snapshot, "actor", filled[0])
    assert same(filled, whole)


def test_no_more_open_files_is_not_damage(tmp_path: Path) -> None:
    whole = whole_tensors()
    write(tmp_path, units(whole, 1))
    snapshot = folder.latest(tmp_path)
    with few_open_files(0):
        with pytest.raises(SnapshotError, match="Too many open files") as caught:
            read.read_unit(snapshot, "actor", units(whole, 1)[0])
        with pytest.raises(SnapshotError, match="Too many open files"):
            folder.open_snapshot(snapshot.path)
        # Not passed over: an older one would be taken for the newest.
        with pytest.raises(OSError, match="Too many open files"):
            folder.find(tmp_path)
    assert not isinstance(caught.value, DamagedSnapshot)


def test_what_is_half_removed_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".removing-000001-step1").mkdir()
    remove = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if ".removing" in path.name and not ignore_errors:
            raise OSError(16, "Device or resource busy")
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert folder.begin(tmp_path, 2, 2).is_dir()


def test_a_folder_that_goes_as_it_is_looked_into_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it was there a moment ago
    assert folder.numbered(tmp_path / "gone") == []
    assert in_memory.holders(tmp_path / "gone") == []


def test_a_memory_folder_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "job"
    writing = in_memory.begin(root, 0, 1, 1)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert writing.parent == in_memory.holder(root, 0)
    for mode in (0o770, 0o703):
        root.chmod(mode)
        with pytest.raises(SnapshotError, match="writable by other users"):
            in_memory.begin(root, 0, 2, 2)
        with pytest.raises(SnapshotError, match="writable by other users"):
            in_memory._here(root)
    root.chmod(0o755)
    assert in_memory._here(root) == {}
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(SnapshotError, match="another user's"):
        in_memory.begin(root, 0, 2, 2)
