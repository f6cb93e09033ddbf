# SPDX-License-Identifier: Apache-2.0
import dataclasses
import importlib
import json
import shutil
import subprocess
import sys

import pytest

from mega_factory import specs
from mega_factory.__main__ import main
from mega_factory.spec import Figures
from mega_factory.specs import load, load_all
from mega_factory.verify import comparison, read_us

NAME = "megakernel-gqa-paged-decode"


def test_list(capsys):
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(load_all())


def test_render_check_grade(tmp_path, capfd):
    assert main(["render", str(tmp_path), NAME]) == 0
    assert main(["check", str(tmp_path)]) == 1
    assert "megakernel-smollm2-decode: missing" in capfd.readouterr().out
    (tmp_path / "megakernel-gone").mkdir()
    (tmp_path / "megakernel-gone" / "spec.json").write_text("{}")
    assert main(["render", str(tmp_path)]) == 0
    assert main(["check", str(tmp_path)]) == 1
    assert capfd.readouterr().out.endswith("megakernel-gone: of no task\n")
    shutil.rmtree(tmp_path / "megakernel-gone")
    assert main(["render", str(tmp_path)]) == 0
    assert main(["check", str(tmp_path)]) == 0
    bundle = tmp_path / NAME
    capfd.readouterr()
    options = ["--scale", "tiny", "--device", "cpu", "--seeds", "1"]
    assert main(["grade", str(bundle), str(bundle / "solution.py"), *options]) == 1
    assert "in build_model: NotImplementedError" in capfd.readouterr().out


def test_an_unknown_task_is_an_error(tmp_path, capsys):
    assert main(["render", str(tmp_path), "other"]) == 2
    assert "mega_factory: spec: expected one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_bundles_do_not_go_where_a_file_is(tmp_path, capsys, name):
    (tmp_path / "file").touch()
    assert main(["render", str(tmp_path / name), NAME]) == 2
    expected = f"mega_factory: folder: expected one to write to, got {tmp_path / name}: Not a dir"
    assert capsys.readouterr().err.startswith(expected)


def test_a_measurement_that_could_not_be_kept_is_not_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "found.json"
    assert main(["verify", NAME, "--scale", "tiny", "--device", "cpu", "--json", str(file)]) == 2
    seen = capsys.readouterr()
    assert (seen.out, seen.err.partition(": File exists")[0]) == (
        "",
        f"mega_factory: json: expected a file to write, got {file}",
    )


def test_verify_on_a_gpu_that_is_none(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["verify", NAME, "--scale", "tiny"]) == 2
    expected = "mega_factory: device: expected a GPU for cuda, got a torch that sees none\n"
    assert capsys.readouterr().err == expected


def test_verify_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "cpu" / "found.json"
    arguments = ["verify", NAME, "--scale", "tiny", "--device", "cpu", "--steps", "4"]
    arguments += ["--json", str(file)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-1].strip() == "measured, tiny scale"
    assert any(line.split() == ["steps", "8", "4"] for line in lines)
    assert any(line.split() == ["paged_error", "0.0", "0.0"] for line in lines)
    assert any(line.endswith("none: not applicable on cpu") for line in lines)
    found = json.loads(file.read_text())
    assert found["environment"]["gpu"] == found["measured_on"] == "cpu"
    assert found["kernels"] > 100
    assert found["errors"].keys() == {"fp32_residual", "all_fp32"}
    assert list(found["drops"]) == load(NAME).drops
    assert {field.name for field in dataclasses.fields(Figures)} <= found.keys()


@pytest.mark.parametrize("name", specs.names())
def test_verify_measures_every_task(tmp_path, name):
    file = tmp_path / "found.json"
    arguments = ["verify", name, "--scale", "tiny", "--device", "cpu", "--json", str(file)]
    assert main(arguments) == 0
    found, spec = json.loads(file.read_text()), load(name)
    assert list(found["drops"]) == spec.drops
    assert found["paged_error"] == 0
    assert max(found["errors"].values()) < spec.tol < min(found["drops"].values())


def test_what_the_texts_state_is_compared_though_it_was_measured_here():
    spec = load("megakernel-gqa-decode")
    claimed = load(NAME).claimed
    rest = {"scale": "tiny", "graph_error": "-", "floor_us": 1, "read_us": 2}
    measured = dataclasses.asdict(claimed) | rest
    known = dataclasses.replace(spec, claimed=None, measured=claimed)
    rows = list(comparison(known, measured))
    assert ("kernels", "772", "772") in rows
    assert rows[rows.index(("floor_us", "529", "1")) + 1] == ("read_us", "-", "2")
    unknown = dataclasses.replace(spec, unfused_kernels=None, measured=None)
    assert ("kernels", "-", "772") in list(comparison(unknown, measured))


def test_more_bytes_are_read_in_more_time():
    assert 0 < read_us(8 << 10, "cpu") < read_us(64 << 20, "cpu")


NEW = """
import dataclasses
from mega_factory.spec import Figures
from mega_factory.specs import _common
from mega_factory.specs.megakernel_gqa_decode import DROPS, SPEC as OTHER, TOL

NAME = "megakernel-new"
MEASURED, CPU = Figures.load(NAME), Figures.load(NAME, "cpu")
tolerance_md = _common.tolerance_md(TOL, MEASURED, CPU, DROPS)
perf_md = dataclasses.replace(OTHER.perf_md, eager_us=None, graph_us=None)
SPEC = dataclasses.replace(
    OTHER, name=NAME, unfused_kernels=None, perf_md=perf_md, measured=MEASURED, cpu=CPU,
    precision_md=tolerance_md,
).validate()
"""


def test_a_new_task_is_one_file(tmp_path, monkeypatch, capsys):
    name, folder, bundles = "megakernel-new", tmp_path / "specs", tmp_path / "bundles"
    folder.mkdir()
    monkeypatch.setattr(specs, "__path__", [*specs.__path__, str(folder)])
    (folder / "megakernel_new.py").write_text(NEW)
    assert main(["list"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if name in line)
    assert line.endswith("(the tolerance is not yet backed by any measurement)")
    assert main(["render", str(bundles)]) == 0
    assert "not yet backed by any measurement" in (bundles / name / "TASK.md").read_text()
    assert main(["check", str(bundles)]) == 0
    # What is wrong with another task is no reason not to render or verify this one.
    (folder / "megakernel_wrong.py").write_text("raise ValueError('wrong')")
    importlib.invalidate_caches()
    assert main(["render", str(bundles), name]) == 0
    assert main(["verify", name, "--scale", "tiny", "--device", "cpu"]) == 0
    assert main(["list"]) == main(["check", str(bundles)]) == 2


@pytest.mark.parametrize("steps", ["3", "9"])
def test_steps_that_a_cache_has_no_room_for(steps, capsys):
    options = ["--scale", "tiny", "--device", "cpu", "--steps", steps]
    assert main(["verify", NAME, *options]) == 2
    assert f"steps: expected 4 to 8, got {steps}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "captured"), [("megakernel-gqa-paged-decode", False), ("megakernel-gqa-decode", True)]
)
def test_verify_on_a_gpu(tmp_path, name, captured):
    file = tmp_path / "found.json"
    # In a process of its own: a capture that fails may leave the GPU's context unusable.
    subprocess.run(
        [sys.executable, "-m", "mega_factory", "verify", name, "--scale", "tiny", "--json", file],
        check=True,
    )
    found = json.loads(file.read_text())
    assert (found["graph_us"] is not None) == captured
    assert (found["graph_error"] is None) == captured
    assert found["paged_error"] == 0
    assert found["busy_us"] < found["eager_us"]
    assert found["kernels"] > 60
