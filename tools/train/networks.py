"""Train networks for comparison: several seeds of each, some in parallel, every network in a separate process.

Every network has a folder NAME-seed-N in --out with the trainer's files, the trainer's output (log) and finally the
result (test.json). The same command continues after an interruption, and never trains a network twice.
"""
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import statistics
import sys
import time

from train import log, progress

# 97.5% quantiles of Student's t by degrees of freedom
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


def interval(values):
    """Return the mean of values and half the width of their 95% confidence interval (NaN for a single value)."""
    n = len(values)
    half = STUDENT[min(n - 2, len(STUDENT) - 1)] * statistics.stdev(values) / n ** 0.5 if n > 1 else float("nan")
    return statistics.mean(values), half


class Networks:
    MAY_CHANGE = ("command", "corpus", "cache", "out", "threads", "networks", "seeds", "card", "part", "evaluate_every",
                  "save_every")

    def __init__(self, o, options, measure, shown):
        """`options(name, seed, folder)` returns an argparse.Namespace. `measure(options)` trains a network in a
        separate process and returns the result, a dictionary with "minutes", or None if interrupted. `shown`: key of
        the result to print after each network."""
        self.o, self.measure, self.shown, self.stopped, self.running = o, measure, shown, False, {}
        self.each = []  # (name, options)
        for name in o.networks:
            for seed in o.seeds:
                self.each.append((name, options(name, seed, os.path.join(o.out, f"{name}-seed-{seed}"))))

    @staticmethod
    def result(options):
        """Return a network's result, or None if it has not been trained yet."""
        try:
            with open(os.path.join(options.out, "test.json"), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def results(self):
        """Return network -> (options, results of all seeds)."""
        found = {}
        for name, options in self.each:
            found.setdefault(name, (options, []))[1].append(self.result(options))
        return found

    def stop(self, *_):
        self.stopped = True
        for process in list(self.running):
            process.terminate()  # SIGTERM makes the trainer save and exit

    def same_as_before(self):
        """Exit if --out contains networks with different options."""
        path = os.path.join(self.o.out, "options.json")
        ours = {key: value for key, value in vars(self.o).items() if key not in self.MAY_CHANGE}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                theirs = json.load(file)
            other = [f"--{key.replace('_', '-')} {value}" for key, value in theirs.items() if ours.get(key) != value]
            if other:
                raise SystemExit(f"{self.o.out} was created with {' '.join(other)}: use these or another --out")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(ours, file, indent=1)

    def start(self, name, options):
        os.makedirs(options.out, exist_ok=True)
        pathlib.Path(options.out, "log").touch()
        process = multiprocessing.get_context("spawn").Process(target=train_one, args=(self.measure, options))
        process.start()
        self.running[process] = name, options

    def train(self):
        """Train all networks that have not been trained yet; stop if one fails."""
        waiting, failed, shown = [x for x in self.each if not self.result(x[1])], [], time.time()
        done = len(self.each) - len(waiting)
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        while self.running or waiting and not self.stopped:
            while waiting and not self.stopped and len(self.running) < self.o.threads:
                self.start(*waiting.pop(0))
            multiprocessing.connection.wait([x.sentinel for x in self.running], 1)
            for process in [x for x in self.running if not x.is_alive()]:
                name, options = self.running.pop(process)
                result = self.result(options)
                if result:
                    done += 1
                    log(f"{done} of {len(self.each)}: {name}, seed {options.seed}: {self.shown} {result[self.shown]} "
                        f"after {result['minutes']} minutes")
                elif not self.stopped:
                    failed.append(os.path.join(options.out, "log"))
                    self.stop()
            if self.stopped:
                self.stop()  # also stop processes started since the signal
            elif time.time() - shown > (1 if sys.stderr.isatty() else 60):
                shown = time.time()
                progress(" | ".join(f"{name}, seed {options.seed}: {last_line(options)}"[:90]
                                    for name, options in self.running.values()))
        if failed:
            raise SystemExit(f"training failed, see {failed[0]}; the others were saved")
        if self.stopped:
            raise SystemExit("stopped; state saved: run the same command to continue")


def last_line(options):
    """Return the last line of a network's log."""
    return (pathlib.Path(options.out, "log").read_text(encoding="utf-8").splitlines() or ["starting"])[-1]


def train_one(measure, options):
    """Train and measure one network, with output redirected to the network's log."""
    said = os.open(os.path.join(options.out, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(said, sys.stdout.fileno())
    os.dup2(said, sys.stderr.fileno())
    result = measure(options)
    if result is None:
        return
    part = os.path.join(options.out, "test.json.part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    os.replace(part, part.removesuffix(".part"))
