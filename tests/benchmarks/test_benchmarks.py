"""The scripts for GPU machines, as far as they run without a GPU."""

import itertools
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from recnets import create_model
from recnets.layers.crc import NONLINEARITIES
from recnets.models import save_weights
from recnets.models.plain import as_plain_modules
from recnets.ops import dispatch

from .scripts import FOLDER, read, run

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are in the repository only")


@pytest.mark.slow
def test_curves_of_three_runs(tmp_path):
    options = ("--data", "digits", "--epochs", 1, "--every", 5, "--device", "cpu", "--model", "RecNet(2, 2, 2, 1, 2)")
    done = run("curves.py", *options, "--out", tmp_path, hidden=("tyro", "rich"))
    assert done.returncode == 0, done.stderr
    rows = read(next(tmp_path.glob("curves-*.csv")))
    assert list(rows[0]) == ["step", "kernels", "plain", "plain, nudged"]
    # On the CPU "auto" is plain: the same seed gives the same curve, a nudge another one.
    assert all(row["kernels"] == row["plain"] for row in rows)
    assert any(row["plain, nudged"] != row["plain"] for row in rows)
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert "largest difference 0, noise " in done.stdout
    picture = next(tmp_path.glob("curves-*.svg")).read_text()
    assert picture.count("<polyline") == 5
    assert str(tmp_path) not in next(tmp_path.glob("curves-*.csv")).read_text()


def test_curves_need_two_plain_runs():
    done = run("curves.py", "--plain-runs", 1)
    assert done.returncode == 2
    assert "--plain-runs must be at least 2, got 1" in done.stderr


def test_a_curve_that_is_no_number_is_infinitely_far(script):
    curves = script("curves")
    a, b = (curves.Run(name, losses, 0.0, 0.0) for name, losses in (("a", [1.0, 2.0]), ("b", [1.5, float("nan")])))
    assert curves.largest(a, a) == 0
    assert curves.largest(a, b) == float("inf")


@pytest.mark.slow
@pytest.mark.skipif(not dispatch.AVAILABLE or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_kernels_of_the_sanitizer_run():
    done = run("sanitize.py", "--drive", "--device", "cpu", "--shapes", 1, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+):", done.stdout, flags=re.MULTILINE) == ["ok"] * 4


def test_a_missing_sanitizer_is_named():
    done = run("sanitize.py", "--sanitizer", "/nowhere/compute-sanitizer")
    assert done.returncode == 2
    assert done.stderr.startswith("'/nowhere/compute-sanitizer' is no program here; name it with --sanitizer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu():
    done = run("gpu.py", "--only", "training", hidden=("tyro", "rich"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == "this benchmark needs a CUDA device"


@pytest.mark.slow
def test_tests_are_shared_out_among_processes_and_their_log_is_kept(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_small(number):\n    assert number < 2\n"
    )
    options = ("--anywhere", "--jobs", "4", "--out", str(tmp_path))
    done = run("gpu_tests.py", *options, str(tmp_path / "test_three.py"))
    assert done.returncode == 1, done.stderr
    assert "2 passed, 1 failed in" in done.stdout
    (log,) = tmp_path.glob("tests-*.txt")
    text = log.read_text()
    assert text.startswith("# python benchmarks/gpu_tests.py")
    assert [f"# process {number}, exit status {status}\n" in text for number, status in enumerate((0, 0, 1, 5))] == [
        True
    ] * 4
    assert "assert 2 < 2" in text
    assert str(FOLDER) not in text


@pytest.mark.slow
def test_tests_that_are_stopped_leave_their_log_and_no_process(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import os, pathlib, time\ndef test_fails():\n    assert 1 < 0\n"
        "def test_hangs():\n    pathlib.Path(__file__).with_name('started').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, str(FOLDER / "gpu_tests.py"), "--anywhere", "--jobs", "1", "--out", str(tmp_path)]
    started = tmp_path / "started"
    process = subprocess.Popen([*command, str(tmp_path / "test_two.py")], stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.1)
    process.terminate()
    printed = process.communicate()[0]
    assert process.returncode == 1
    assert "1 failed in" in printed
    (log,) = tmp_path.glob("tests-*.txt")
    assert "assert 1 < 0" in log.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_every_file_with_tests_for_a_gpu_is_run_there(script):
    root = FOLDER.parent
    marked = [path for path in (root / "tests").rglob("test_*.py") if "@pytest.mark.gpu\n" in path.read_text()]
    run_there = [root / path for path in script("gpu_tests").PATHS]
    assert len(marked) > 5
    assert not [path for path in marked if not any(path.is_relative_to(place) for place in run_there)]


def test_outcomes_are_read_from_what_pytest_prints(script):
    outcomes = script("gpu_tests").outcomes
    assert outcomes("..s\n80 passed, 2 skipped, 7 deselected in 61.81s (0:01:01)\n") == {"passed": 80, "skipped": 2}
    assert outcomes("10 passed, 1 warning, 2 errors in 6.34s") == {"passed": 10, "error": 2}
    assert outcomes("no tests ran in 0.02s") == outcomes("Fatal Python error: Segmentation fault") == {}


def test_a_variant_that_fails_leaves_a_row_and_the_others(script):
    gpu = script("gpu")
    times = {"fused": 2.0, "plain": 9.0, "plain, compiled": 7.0, "grouped control": 3.0}
    written = []

    def measured(job, batch, variant):
        if variant not in times:
            raise RuntimeError("CUDA out of memory\nand a page of advice")
        return {"ms": times[variant], "images_per_second": 1, "peak_mib": 100 * times[variant]}

    names = ("fused", "plain modules", "plain", "plain, compiled", "grouped control")
    labels = [{"job": "training", "batch": 64, "variant": name} for name in names]
    rows = gpu.collect(labels, measured, lambda rows: written.append([dict(row) for row in rows]))
    assert [len(state) for state in written] == [1, 2, 3, 4, 5]
    assert len({tuple(row) for row in rows}) == 1, "rows of one table have the same columns"
    found = {row["variant"]: row for row in rows}
    assert found["plain modules"]["error"] == "RuntimeError: CUDA out of memory"
    assert found["plain modules"]["times_best_plain"] == ""
    assert [found[name]["times_best_plain"] for name in times] == [3.5, 0.78, 1.0, 2.33]
    assert found["fused"]["memory_of_least_plain"] == 0.29


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_every_variant_of_a_nonlinearity_can_be_built(script, nonlinearity, monkeypatch):
    gpu = script("gpu")
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)
    names = gpu.variants_of(nonlinearity)
    assert len(names) == (8 if nonlinearity == "separate_bn_relu" else 6)
    for name in names:
        gpu.build("RecNet(2, 2, 2, 2, 2)", name, True, nonlinearity)


def test_the_network_of_plain_modules_is_the_same_function():
    model = create_model("RecNet(2, 2, 3, 2, 1)", num_classes=5, backend="torch").train()
    naive = as_plain_modules(model)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert not any(type(module).__name__ == "Recurrent" for module in naive.modules())
    torch.testing.assert_close(naive.double()(x), model.double()(x))


@pytest.mark.slow
def test_layers_are_timed_in_processes_of_their_own(tmp_path):
    options = ("--model", "RecNet(2, 2, 3)", "--batches", 1, "--image-size", 4, "--rounds", 1, "--min-time", 0.01)
    done = run("layers.py", *options, "--patience", 0, "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read(next(tmp_path.glob("layers-*.csv")))
    subjects = ("RecNet(2, 2, 3)", "Rec(2, 4, 6, 3) 4×4")
    works = ("forward", "forward+backward")
    assert [(row["subject"], row["work"], row["way"]) for row in rows] == list(
        itertools.product(subjects, works, ("naive", "concat", "stream"))
    )
    for row in rows:
        assert float(row["milliseconds"]) > 0
        assert float(row["others"]) >= 0
        assert (float(row["speedup_over_naive"]) == 1) or row["way"] != "naive"
        assert (float(row["peak_over_concat"]) == 1) or row["way"] != "concat"


def test_layers_that_differ_are_not_timed(script):
    layers = script("layers")
    models = {way: torch.nn.Linear(2, 2) for way in ("naive", "concat", "stream")}
    with pytest.raises(SystemExit, match=r"concat differs from naive by .* of the largest output; nothing was timed"):
        layers.check_equal(models, lambda model, x: model(x), torch.randn(3, 2))


@pytest.mark.slow
def test_what_deployment_keeps_is_measured_on_each_file(tmp_path):
    for package in ("onnxruntime", "sklearn"):
        pytest.importorskip(package)
    model = create_model("RecNet(2, 4, 4, 2, 2)", num_classes=10, in_channels=1).eval()
    assert model.stages[0][0].crc.norm is not None
    model.stages[0][0].crc.norm.weight.data[:3] = 0  # dead, so that there is something to squeeze, and not zero, which
    model.stages[0][0].crc.norm.bias.data[:3] = 0.3  # a file leaves out anyway
    about = {"dataset": "digits", "normalisation": {"mean": [0.3], "std": [0.3]}, "image_size": [8, 8]}
    weights = tmp_path / "tiny.safetensors"
    save_weights(weights, model, about)
    done = run("deployed.py", weights, "--images", 60, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read(next(tmp_path.glob("deployed-*.csv")))
    assert [row["form"] for row in rows] == ["float32", "squeezed", "8 bits"]
    assert {row["images"] for row in rows} == {"60"}
    assert rows[1]["changed"] == "0"
    assert rows[1]["accuracy"] == rows[0]["accuracy"]
    assert rows[1]["bytes"] != rows[0]["bytes"]  # so small a graph may grow


def test_a_name_that_is_not_published_is_told():
    done = run("deployed.py", "recnet_60_481.cifar100")
    assert done.returncode == 2
    assert "recnet_60_481.cifar100" in done.stderr
    assert "Traceback" not in done.stderr


def test_matrix_products_are_checked(script, monkeypatch, capsys):
    products = script("products")
    monkeypatch.setattr(products, "SHAPES", ((30, 16, 8), (70, 24, 5)))
    monkeypatch.setattr("sys.argv", ["products.py", "--device", "cpu"])
    assert products.main() == 0
    assert "all are right" in capsys.readouterr().out
    right = torch.mm

    def unfinished(a, b, *, out):  # as by kernels that leave some of the output unwritten
        out[:-3] = right(a, b)[:-3]

    monkeypatch.setattr(torch, "mm", unfinished)
    assert products.main() == 1
    assert "2 of 2 shapes are wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_products_of_warpgroups_are_timed_where_there_are_any():
    done = run("wgmma.py", "--compile")
    if "pip install nvidia-cuda-nvrtc" in done.stderr:
        pytest.skip("needs NVRTC")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^[01] \d\d Resources\(registers=\d+, spilled=0\)$", done.stdout, re.MULTILINE)) == 3
    if not torch.cuda.is_available():
        done = run("wgmma.py")
        assert done.returncode == 2
        assert done.stderr.startswith("this benchmark needs a CUDA device of compute capability 9")
