#!/usr/bin/env python3
"""Test moe_translate.spark on a local cluster of two workers, one of which is killed.

Usage: tests/python tests/package/test_spark.py [LINES [NAME]]     (`make test-spark` installs what it needs)

LINES is the number of lines of the job whose worker is killed (default: 3000). With 100000 or more, the last test
prints the overhead of Spark compared with moe-translate. NAME selects tests by a part of their names.
Prints `ok NAME`, `skip NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

from suite import Suite

try:
    import pyspark
    from moe_translate import Translator
    from moe_translate.spark import translate_column, translate_files
except ImportError:
    pyspark = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / os.environ.get("BIN", ".")
MODEL = str(ROOT / "models/en-de-fr-es.bin")
FAST = {"source": "en", "target": "de", "beam": 1, "rerank": 0}
COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 3000

suite = Suite()
test = suite.needs(pyspark, "PySpark")


def lines(count):
    """Return short sentences, of which 29,040 are distinct, in a random order that is the same in every run."""
    who = "I,You,We,They,Tom,Mary,My brother,The teacher,Our neighbour,The old man,The children,Everybody".split(",")
    does = "can see,will buy,wanted,never found,lost,has seen,would like,is looking for,forgot,should read".split(",")
    what = "the book,a car,the house,my key,some bread,the train,your letter,a new job,his dog,an apple,it".split(",")
    when = "today,yesterday,tomorrow,at night,again,at home,in the city,with us,on Sunday,after work,alone".split(",")
    found = [f"{a} {b} {c} {d}{e}" for a, b, c, d, e in itertools.product(who, does, what, when, ".!")]
    random.Random(7).shuffle(found)
    return list(itertools.islice(itertools.cycle(found), count))


def session():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = pyspark.sql.SparkSession.builder.master("local[2,4]")  # 2 workers, 4 attempts for each task
    for name, value in (("ui.enabled", "false"), ("log.level", "ERROR"), ("ui.showConsoleProgress", "false")):
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # otherwise Spark logs killed workers
    return spark


def busy_workers():
    """Return the ids of this test's worker processes that are running and have the model mapped."""
    parents, found = {}, []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            if fields[0] == "R" and b"pyspark.daemon" in (entry / "cmdline").read_bytes():
                if pathlib.Path(MODEL).name in (entry / "maps").read_text():
                    found.append(int(entry.name))
        except OSError:
            continue

    def ours(pid):
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return [pid for pid in found if ours(pid)]


def kill_one(done, killed):
    """Kill one worker after the job has run for a while; append its process id to `killed`."""
    while not done.is_set() and not busy_workers():
        time.sleep(0.05)
    done.wait(min(10, COUNT / 5000))
    while not done.is_set() and not killed:
        for pid in busy_workers()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)


@test
def a_killed_worker_does_not_change_results():
    texts = lines(COUNT)
    spark = session()
    tracker, done, killed = spark.sparkContext.statusTracker(), threading.Event(), []
    frame = spark.createDataFrame(list(enumerate(texts)), "n long, text string").repartition(6).cache()
    frame.count()
    killer = threading.Thread(target=kill_one, args=(done, killed))
    killer.start()
    spark.sparkContext.setJobGroup("killed", "")
    rows = translate_column(frame, "text", MODEL, **FAST).collect()
    done.set()
    killer.join()
    stages = [tracker.getJobInfo(job).stageIds for job in tracker.getJobIdsForGroup("killed")]
    failed = sum(info.numFailedTasks for ids in stages for stage in ids if (info := tracker.getStageInfo(stage)))
    assert killed and failed, f"no worker was killed at work ({killed}, {failed})"
    with Translator(MODEL, **FAST) as translator:
        wanted = translator.translate(texts)
    assert sorted((row.n, row.text, row.translation, row.status) for row in rows) == [
        (i, text, translation, 0) for i, (text, translation) in enumerate(zip(texts, wanted, strict=True))
    ]
    frame.unpersist()


@test
def failed_rows_have_a_status():
    spark = session()
    frame = spark.createDataFrame([(0, "It rains."), (1, None), (2, "a\0b"), (3, "")], "n int, text string").coalesce(1)
    found = translate_column(frame, "text", MODEL, output="german", status="bad", **FAST).collect()
    rows = {row.n: row for row in found}
    assert rows[0].german == "Es regnet." and rows[0].bad == 0
    assert rows[1].german is None and rows[1].bad == 0 and rows[3].german == "" and rows[3].bad == 0
    assert rows[2].bad != 0
    for options, word in (({"column": "txet"}, "txet"), ({"column": "text", "output": "n"}, "'n'")):
        try:
            translate_column(frame, model=MODEL, **options)
        except ValueError as error:
            assert word in str(error)
        else:
            raise AssertionError("an invalid column was accepted")


@test
def interrupted_files_are_resumed():
    spark = session()
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/a.txt", f"{folder}/b.parquet"]
        pathlib.Path(files[0]).write_text("Good morning!\n\nIt rains.\n")
        spark.createDataFrame([("It rains.",)], "value string").write.parquet(files[1])
        out = f"{folder}/out"
        assert translate_files(spark, files, out, MODEL, **FAST) == [f"{out}/a.txt", f"{out}/b.parquet"]
        found = [row.translation for row in spark.read.parquet(f"{out}/a.txt").collect()]
        with Translator(MODEL, **FAST) as translator:
            assert found == translator.translate(["Good morning!", "", "It rains."])
        assert translate_files(spark, files, out, MODEL, **FAST) == []
        os.remove(f"{out}/a.txt/_SUCCESS")  # a killed job does not write _SUCCESS
        assert translate_files(spark, files, out, MODEL, **FAST) == [f"{out}/a.txt"]
        assert spark.read.parquet(f"{out}/a.txt").count() == 3


@test
def pipes_give_the_same_results():
    texts = lines(200)
    command = f"{BIN.resolve()}/moe-translate -q -m {MODEL} -s en -t de --beam 1 --rerank 0 --threads 1"
    with Translator(MODEL, **FAST) as translator:
        wanted = translator.translate(texts)
    assert session().sparkContext.parallelize(texts, 3).pipe(command, checkCode=True).collect() == wanted


@test
def the_overhead_of_spark_is_measured():
    """Compare the time of a long job on a warm cluster with that of moe-translate."""
    if COUNT < 100000:
        return
    spark, texts = session(), lines(COUNT)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file, tempfile.TemporaryDirectory() as folder:
        file.write("".join(text + "\n" for text in texts))
        file.flush()
        command = [BIN / "moe-translate", "-q", "-m", MODEL, "-s", "en", "-t", "de", "--beam", "1", "--rerank", "0"]
        begin = time.monotonic()
        alone = subprocess.run([*command, "-i", file.name], capture_output=True, check=True, text=True).stdout
        middle = time.monotonic()
        frame = spark.read.text(file.name).repartition(8)
        translate_column(frame, "value", MODEL, **FAST).write.parquet(f"{folder}/out")
        end = time.monotonic()
        rows = spark.read.parquet(f"{folder}/out").collect()
        assert sorted(row.translation for row in rows) == sorted(alone.split("\n")[:-1])
    cost = (end - middle) / (middle - begin) - 1
    print(f"    {COUNT} lines: moe-translate {middle - begin:.1f} s, Spark {end - middle:.1f} s, {100 * cost:+.0f} %")


if __name__ == "__main__":
    sys.exit(suite.run(sys.argv[2] if len(sys.argv) > 2 else ""))
