"""The training loop: epochs, checks, checkpoints, and every way to stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from recnets.errors import RecNetsError
from recnets.models import save_weights
from recnets.training.checkpoint import Position, pack, save_checkpoint
from recnets.training.evaluate import Evaluation
from recnets.training.progress import Display
from recnets.training.run_folder import RunFolder
from recnets.training.schedule import learning_rate
from recnets.training.session import Session
from recnets.training.step import named_momentum
from recnets.training.stopwatch import Stopwatch, normalise_seconds
from recnets.utils import HANG_UP

Outcome = Literal["finished", "epochs", "time", "interrupted"]
DIVERGED = 10.0  # times ln(classes), the loss of a guess: no run comes back from a mean loss above that
LEAST_SCALE = 1.0  # of the loss in fp16, which starts at 65536 and is halved at each step that overflows
LARGEST = 1e15  # a weight or momentum beyond it is finite still, but the next layers' products are not
STOPPING = [number for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number is not None]


class Diverged(RecNetsError):
    """The loss or the weights are no longer numbers that training can use."""


class Interrupts:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a flag, so that no step is cut in half; a second one aborts.

    A terminal that closes may send more than one SIGHUP: those never abort.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number != HANG_UP:
            raise KeyboardInterrupt
        self.received = number

    def __enter__(self) -> Interrupts:
        for number in STOPPING:
            if number == HANG_UP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us handles signals
                break
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Loop:
    """Trains a session from `position` on, writing to `folder` from the main process only.

    Args:
        metadata: what every weights file says of its origin.
        interrupts: entered by the caller; asks to stop.
        log: called with every line of metrics, e.g. for TensorBoard.
        began: `time.monotonic()` at the start of the process's work, for the time limit.
    """

    def __init__(
        self,
        session: Session,
        position: Position,
        folder: RunFolder,
        display: Display,
        *,
        data_id: str,
        metadata: dict[str, Any],
        interrupts: Interrupts,
        log: Callable[[dict[str, Any]], None] | None = None,
        began: float | None = None,
    ) -> None:
        self.session, self.position, self.folder, self.display = session, position, folder, display
        self.data_id, self.metadata, self.log = data_id, metadata, log
        self.began = time.monotonic() if began is None else began
        self.interrupts = interrupts
        self.evaluation: Evaluation | None = None
        self._watch = Stopwatch(session.device)
        self._normalise: float | None = None
        self._clock = time.monotonic()  # since when wall time is not yet in position.seconds
        self._saved_at = time.monotonic()
        self._saved: tuple[int, int] | None = None
        self._rate = 0.0

    def run(self) -> Outcome:
        recipe, options = self.session.recipe, self.session.options
        until = min(recipe.epochs, options.epochs_until or recipe.epochs)
        self._save()  # before any work: a folder that cannot be written to is found out now
        while self.position.epoch < until:
            stop = self._train_epoch()
            if stop is None:
                self._end_epoch()
                stop = self._wish_to_stop() if self.position.epoch < until else None
            if stop is not None:
                if self._saved != (self.position.epoch, self.position.step):
                    self._save()
                return stop
        return "finished" if self.position.epoch >= recipe.epochs else "epochs"

    def _train_epoch(self) -> Outcome | None:
        """From `position.step` to the end of the epoch, or to a reason to stop."""
        session, position, step = self.session, self.position, self.session.step
        epoch, steps = position.epoch, session.loader.steps
        masks, shares = self._mixing(epoch)
        began, trained_before = time.monotonic(), position.step
        batches = session.loader.epoch(epoch, position.step)
        stop: Outcome | None = None
        while position.step < steps and stop is None:
            self._watch.mark()
            batch = next(batches)
            self._watch.mark()
            index = position.step
            step.set_lr(learning_rate(session.recipe, epoch, index, steps))
            mix = (None, None) if masks is None or shares is None else (masks[index], shares[index])
            step(batch.images, batch.labels, batch.global_size, *mix)
            self._watch.mark()
            position.step += 1
            self.display.moved(epoch, position.step)
            if position.step < steps and self._check_is_due():
                stop = self._check(began, trained_before)
            if self._normalise is None and session.device.type != "mps":
                self._normalise = normalise_seconds(self._prepare, batch.images, graph=step.graph)
        totals = self._read_meter()
        position.train_seconds += time.monotonic() - began
        position.images += self._images_of(trained_before, position.step)
        self._rate = self._images_of(trained_before, position.step) / max(time.monotonic() - began, 1e-9)
        self._totals = totals
        return stop

    def _mixing(self, epoch: int) -> tuple[Tensor | None, Tensor | None]:
        session = self.session
        if session.mixer is None:
            return None, None
        masks, shares = session.mixer.epoch(epoch, session.loader.steps)
        return masks.to(session.device), shares.to(session.device)

    def _prepare(self, images: Tensor) -> Tensor:
        """What a step does to its input: copy it to where a recorded step reads it, and normalise it."""
        return self.session.loader.normalise(images.clone() if self.session.step.graph else images)

    def _images_of(self, first: int, last: int) -> int:
        """Images of the global batches first … last − 1 of an epoch."""
        loader = self.session.loader
        return min(last * loader.batch_size, loader.total) - min(first * loader.batch_size, loader.total)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _check_is_due(self) -> bool:
        """At fixed steps; a single process also looks at the clock and at Ctrl-C, which needs no waiting."""
        options, step = self.session.options, self.position.step
        if step % options.check_steps == 0 or (options.checkpoint_steps and step % options.checkpoint_steps == 0):
            return True
        return self.session.processes.world == 1 and (self._wish_here() is not None or self._checkpoint_is_due())

    def _checkpoint_is_due(self) -> bool:
        options = self.session.options
        by_steps = bool(options.checkpoint_steps and self.position.step % options.checkpoint_steps == 0)
        return by_steps or time.monotonic() - self._saved_at >= options.checkpoint_seconds

    def _wish_here(self) -> Outcome | None:
        limit = self.session.options.max_seconds
        if self.interrupts.received is not None:
            return "interrupted"
        return "time" if limit is not None and time.monotonic() - self.began >= limit else None

    def _wish_to_stop(self) -> Outcome | None:
        """The same answer in every process: one that was interrupted stops all, the main one keeps the time."""
        processes = self.session.processes
        wish = self._wish_here()
        interrupted = processes.largest([int(wish == "interrupted")], self.session.device)[0]
        answer: Outcome | None = processes.from_main("interrupted" if interrupted else wish)
        return answer

    def _check(self, began: float, trained_before: int) -> Outcome | None:
        """Look at the loss, show it, and save where that is due."""
        position = self.position
        loss, _, images = self._read_meter()
        seconds = max(time.monotonic() - began, 1e-9)
        rate = self._images_of(trained_before, position.step) / seconds
        self.display.measured(position.epoch, position.step, loss / images, rate)
        stop = self._wish_to_stop()
        if stop is None and self.session.processes.from_main(self._checkpoint_is_due()):
            self._save(extra_train_seconds=seconds, extra_images=self._images_of(trained_before, position.step))
        return stop

    def _read_meter(self) -> tuple[float, int, int]:
        """(loss sum, hits, images) over all processes; raises where the loss stopped being a number."""
        session, meter = self.session, self.session.step.meter
        bad = session.processes.largest([int(meter.first_bad)], session.device)[0]
        if bad >= 0:
            raise self._diverged("the loss is not a finite number", bad)
        scaler = session.step.scaler
        if scaler.is_enabled() and scaler.get_scale() < LEAST_SCALE:  # such steps leave no other trace
            raise self._diverged("the gradients overflow fp16 at every step", self.position.step - 1)
        loss, hits, images = (session.processes.total(t.clone()).item() for t in (meter.loss, meter.hits, meter.images))
        if images and loss / images > DIVERGED * math.log(max(session.data.num_classes, 2)):
            raise self._diverged(f"the mean loss of the epoch has grown to {loss / images:.4g}", self.position.step - 1)
        return loss, int(hits), int(images)

    def _diverged(self, what: str, step: int) -> Diverged:
        epoch, steps, recipe = self.position.epoch, self.session.loader.steps, self.session.recipe
        kept = "no checkpoint was written"
        if self._saved is not None:
            done, at = self._saved
            kept = f"the last good checkpoint stays in {self.folder.checkpoint} (epoch {done + 1}, after {at} steps)"
        advice = [f"a lower --lr (it was {recipe.lr:g})", f"--warmup-epochs {min(5, recipe.epochs)}"]
        if recipe.precision != "fp32":
            advice.append("--precision fp32")
        return Diverged(
            f"training diverged: {what} at step {epoch * steps + step} (epoch {epoch + 1}, step {step} of {steps}); "
            f"{kept}; try {', '.join(advice[:-1])} or {advice[-1]}"
        )

    # -- saving ----------------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Evaluate, write the epoch's line and weights, then the checkpoint that makes them final.

        Nothing is written of weights or losses that are not finite.
        """
        session, position, steps = self.session, self.position, self.session.loader.steps
        loss, hits, images = self._totals
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "lr": learning_rate(session.recipe, position.epoch),
            "train_loss": loss / images,
            "train_accuracy": 100 * hits / images,
        }
        self._check_weights()
        improved = self._evaluate(row) if self._evaluation_is_due(row["epoch"]) else False
        for name, value in row.items():
            if not math.isfinite(value):
                raise self._diverged(f"{name} is not a finite number", steps - 1)
        position.epoch, position.step = row["epoch"], 0
        session.step.meter.reset()
        row |= {"images_per_second": self._rate, **self._input_shares()}
        self._add_time()
        row["seconds"] = position.seconds
        position.history.append(row)
        if session.processes.main:
            self.folder.add_metrics(row)
            self._save_weights(self.folder.last, row)
            if improved:
                self._save_weights(self.folder.best, row)
            if self.log is not None:
                self.log(row)
        self._save()
        self.display.epoch(row)

    def _evaluation_is_due(self, epoch: int) -> bool:
        options = self.session.options
        return epoch % options.eval_every == 0 or epoch in (self.session.recipe.epochs, options.epochs_until)

    def _evaluate(self, row: dict[str, Any]) -> bool:
        """Add the accuracies to `row`; True where the validation split finds this the best epoch so far."""
        session, position = self.session, self.position
        if session.processes.world > 1:  # statistics of separate BN differ between processes; the main one's count
            session.processes.copy_from_main(list(session.judged.buffers()))
        self.evaluation = session.test(session.judged)
        improved = False
        if session.val is not None:
            val = session.val(session.judged)
            row |= {"val_accuracy": val.accuracy, "val_loss": val.loss}
            if position.best is None or val.accuracy > position.best["accuracy"]:
                position.best = {"epoch": row["epoch"], "accuracy": val.accuracy}
                improved = True
        row |= {
            "test_accuracy": self.evaluation.accuracy,
            "test_top5": self.evaluation.top5,
            "test_loss": self.evaluation.loss,
        }
        return improved

    def _input_shares(self) -> dict[str, float]:
        """Shares of the steps since the last call: the whole input pipeline, and of it what is done between steps."""
        if self.session.device.type == "cuda":
            torch.cuda.synchronize(self.session.device)
        steps = self._watch.steps
        fetched, whole = self._watch.read()
        whole = max(whole, 1e-9)
        return {"input_share": (fetched + steps * (self._normalise or 0.0)) / whole, "fetch_share": fetched / whole}

    def _save_weights(self, path: Path, row: dict[str, Any]) -> None:
        metadata = {**self.metadata, "epoch": row["epoch"]}
        if "test_accuracy" in row:
            metadata["accuracy"] = row["test_accuracy"]
        save_weights(path, self.session.judged, metadata)

    def _add_time(self) -> None:
        now = time.monotonic()
        self.position.seconds += now - self._clock
        self._clock = now

    def _check_weights(self) -> None:
        """Raise, in every process, where weights or momentum of one are beyond use, or a statistic is no number.

        A statistic may be large: states of a recursion without BN inside grow by any factor, which the BN after them
        takes out, and some batches later the running variance has forgotten it.
        """
        session, step = self.session, self.session.step
        limits: dict[str, tuple[Tensor, float]] = {n: (p, LARGEST) for n, p in session.model.named_parameters()}
        for name, tensor in named_momentum(session.model, step.optimizer):
            limits[f"the momentum of {name}"] = tensor, LARGEST
        for name, tensor in session.model.named_buffers():
            limits[name] = tensor, math.inf
        for number, tensor in enumerate(step.average.tensors() if step.average is not None else []):
            limits[f"tensor {number} of the average"] = tensor, math.inf
        largest, name = _farthest(limits)
        bad = 0 if largest is None else 1 if math.isfinite(largest) else 2
        worst = session.processes.largest([bad], session.device)[0]
        if worst:
            what = (
                "weights or statistics are not finite numbers"
                if worst == 2
                else f"weights or momentum exceed {LARGEST:g}"
            )
            here = f" ({name}: {largest:.3g})" if bad else ""
            raise self._diverged(what + here, max(self.position.step - 1, 0))

    def _save(self, extra_train_seconds: float = 0.0, extra_images: int = 0) -> None:
        """Write the checkpoint, never over a good one with weights that are not finite."""
        session, position, step = self.session, self.position, self.session.step
        self._check_weights()
        meter = step.meter
        totals = [session.processes.total(t.clone()) for t in (meter.loss, meter.hits, meter.images)]
        totals += [meter.steps, meter.first_bad]
        self._add_time()
        if session.processes.main:
            content = pack(step, position, session.recipe, self.data_id, totals)
            content["position"]["train_seconds"] += extra_train_seconds
            content["position"]["images"] += extra_images
            save_checkpoint(self.folder.checkpoint, content)
        self._saved_at, self._saved = time.monotonic(), (position.epoch, position.step)


def _farthest(limits: dict[str, tuple[Tensor, float]]) -> tuple[float | None, str]:
    """The largest magnitude at or beyond its limit, nan before all, and whose it is; (None, "") where there is none."""
    floating = {name: pair for name, pair in limits.items() if pair[0].is_floating_point() and pair[0].numel() > 0}
    norms = torch._foreach_norm([tensor.detach() for tensor, _ in floating.values()], ord=math.inf)
    magnitudes = torch.stack([norm.float() for norm in norms])
    within = magnitudes < torch.tensor([limit for _, limit in floating.values()], device=magnitudes.device)
    if bool(within.all()):  # a comparison with nan is false
        return None, ""
    largest, index = magnitudes.masked_fill(within, 0).max(0)
    return float(largest), list(floating)[int(index)]
