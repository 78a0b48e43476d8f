"""What deployment keeps: file size and test accuracy of published weights as ONNX files.

    python benchmarks/deployed.py --data-dir data                    # every published model on CIFAR-100
    python benchmarks/deployed.py recnet_60_480.cifar100 --images 500 --data-dir data

Three files of each: float32, float32 of the squeezed model, and 8 bits, all run by ONNX Runtime on the test set.
`changed` counts the predictions that differ from the first file's. Writes benchmarks/results/deployed-….csv, which
scripts/draw_deploy.py puts into its figure of sizes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common import RESULTS, context, file_name, write_csv
from recnets.data import load_dataset
from recnets.deploy import onnx, squeeze
from recnets.deploy.check import compare, normalise
from recnets.deploy.int8 import to_int8
from recnets.errors import RecNetsError
from recnets.models import RecNet, load_weights, published

FORMS = ("float32", "squeezed", "8 bits")


def rows_of(name: str, data_dir: Path | None, images: int | None, calibration: int = 256) -> list[dict[str, object]]:
    """A row for each of `FORMS`."""
    model, about = load_weights(name)
    if not isinstance(model, RecNet):
        raise RecNetsError(f"{name} is no RecNet; only these can be squeezed")
    data = load_dataset(str(about["dataset"]), data_dir=data_dir)
    pictures = normalise(data.train.images[:: len(data.train.images) // calibration][:calibration], about)
    small = squeeze(model.eval()).eval()
    files = {
        FORMS[0]: onnx.export_onnx(model, data.image_size, {}, "concat")[0],
        FORMS[1]: onnx.export_onnx(small, data.image_size, {}, "concat")[0],
        FORMS[2]: to_int8(model, pictures, data.image_size, {}),
    }
    first = onnx.Session(files[FORMS[0]])
    rows: list[dict[str, object]] = []
    for form, content in files.items():
        if form == FORMS[0]:
            continue
        found = compare(first, onnx.Session(content), data.test, about, images or len(data.test.images))
        if not rows:
            rows.append(
                {"model": name, "form": FORMS[0], "bytes": len(files[FORMS[0]]), "images": found.images}
                | {"accuracy": found.accuracy_before, "changed": 0}
            )
        row = {"model": name, "form": form, "bytes": len(content), "images": found.images}
        rows.append(row | {"accuracy": found.accuracy_after, "changed": found.changed})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="published names; by default all on CIFAR-100")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets")
    parser.add_argument("--images", type=int, help="only the first so many test images")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    rows: list[dict[str, object]] = []
    try:
        for name in args.models or [name for name in published() if name.endswith(".cifar100")]:
            for row in rows_of(name, args.data_dir, args.images):
                rows.append(row)
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    except (RecNetsError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    path = args.out / (file_name("deployed", context("cpu")) + ".csv")
    write_csv(path, rows)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
