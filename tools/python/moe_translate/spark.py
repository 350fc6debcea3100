"""Translate corpora on a Spark cluster.

    from moe_translate.spark import translate_column
    translate_column(df, "text", "/models/model.bin", target="de").write.parquet("out")

Each worker opens the model once. The file must be on every node, sent by SparkContext.addFile or on a shared file
system. Each input row gives one output row. Results do not depend on partitions, batches or retries, so repeated and
speculative tasks give the same bytes. A worker uses one thread per processor of the task (spark.task.cpus) unless the
option threads is given.

A long job proceeds file by file and resumes when restarted:

    translate_files(spark, ["/corpus/a.txt", "/corpus/b.parquet"], "/translated", "/models/model.bin", target="de")

tools/python/README.md describes a setup without Python on the nodes.
"""

import os


def translate_batches(batches, column, model, output="translation", status="status", **options):
    """Add two columns to record batches, for mapInArrow: the translation and a status, 0 on success."""
    import pyarrow

    from .translator import cached

    options.setdefault("threads", _processors())
    translator = cached(_local(model), **options)
    for batch in batches:
        translation, statuses = translator.translate_arrow(batch.column(batch.schema.get_field_index(column)))
        yield pyarrow.RecordBatch.from_arrays(
            [*batch.columns, translation.cast(pyarrow.string()), statuses.cast(pyarrow.int8())],
            names=[*batch.schema.names, output, status],
        )


def translate_column(df, column, model, output="translation", status="status", **options):
    """Add translation and status columns to `df`. model: a path on every node, or name of a file sent with addFile."""
    from pyspark.sql.types import ByteType, StringType, StructField, StructType

    if column not in df.columns:
        raise ValueError(f"unknown column {column!r}; available: {', '.join(df.columns)}")
    for name in (output, status):
        if name in df.columns:
            raise ValueError(f"column {name!r} already exists")
    schema = StructType([*df.schema.fields, StructField(output, StringType()), StructField(status, ByteType())])
    return df.mapInArrow(lambda batches: translate_batches(batches, column, model, output, status, **options), schema)


def translate_files(spark, files, output, model, column="value", **options):
    """Translate files one at a time into Parquet folders output/NAME with two more columns. Files named *.parquet are
    Parquet; other files are text with one column, "value". Complete folders are skipped, so that a failed job can be
    restarted. Return the new folders. Raise RuntimeError if the row counts of a folder and its file differ."""
    made, names = [], [os.path.basename(file.rstrip("/")) for file in files]
    if len(set(names)) < len(names):
        raise ValueError("two files have the same name")
    for file, name in zip(files, names):
        folder = f"{output.rstrip('/')}/{name}"
        if _exists(spark, f"{folder}/_SUCCESS"):
            continue
        rows = spark.read.parquet(file) if file.endswith(".parquet") else spark.read.text(file)
        translate_column(rows, column, model, **options).write.mode("overwrite").parquet(folder)
        before, after = rows.count(), spark.read.parquet(folder).count()
        if before != after:
            raise RuntimeError(f"{folder} has {after} rows, but {file} has {before}")
        made.append(folder)
    return made


def _exists(spark, path):
    path = spark._jvm.org.apache.hadoop.fs.Path(path)
    return path.getFileSystem(spark._jsc.hadoopConfiguration()).exists(path)


def _processors():
    """Return the number of processors of this task, 1 outside Spark."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.cpus() if context else 1


def _local(path):
    if os.path.exists(path):
        return path
    from pyspark import SparkFiles

    return SparkFiles.get(path)
