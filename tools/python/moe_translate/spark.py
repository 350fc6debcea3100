"""Corpora on a Spark cluster.

    from moe_translate.spark import translate_column
    translate_column(df, "text", "/models/model.bin", target="de").write.parquet("out")

Each worker opens the model once and keeps it. The file must be on every node: by SparkContext.addFile, or on a file
system that all nodes see. One row comes out for each row that goes in. Results do not depend on partitions, batches or
retries, so failed tasks and speculative ones give the same bytes. A worker has as many threads as its task has
processors (spark.task.cpus), unless the option threads says otherwise.

A long job goes file by file, and goes on where it ended when it is started again:

    translate_files(spark, ["/corpus/a.txt", "/corpus/b.parquet"], "/translated", "/models/model.bin", target="de")

Without Python on the nodes, the program does it too: see tools/python/README.md.
"""

import os


def translate_batches(batches, column, model, output="translation", status="status", **options):
    """For mapInArrow: record batches with two columns more, the translation and its status (0 is well)."""
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
    """`df` with two columns more. model: a path on every node, or the name of a file that SparkContext.addFile sent."""
    from pyspark.sql.types import ByteType, StringType, StructField, StructType

    if column not in df.columns:
        raise ValueError(f"there is no column {column!r}; there are {', '.join(df.columns)}")
    for name in (output, status):
        if name in df.columns:
            raise ValueError(f"there is a column {name!r} already")
    schema = StructType([*df.schema.fields, StructField(output, StringType()), StructField(status, ByteType())])
    return df.mapInArrow(lambda batches: translate_batches(batches, column, model, output, status, **options), schema)


def translate_files(spark, files, output, model, column="value", **options):
    """Translates files one after the other: each becomes output/NAME, a folder in Parquet with two columns more.
    Files that end in .parquet are read as such, others as text, whose lines are the column "value". What is there as a
    whole is left out, so that a job that failed can be started again. Returns the folders that this call made. A folder
    that has not as many rows as its file is a RuntimeError."""
    made, names = [], [os.path.basename(file.rstrip("/")) for file in files]
    if len(set(names)) < len(names):
        raise ValueError("two of the files have the same name")
    for file, name in zip(files, names, strict=True):
        folder = f"{output.rstrip('/')}/{name}"
        if _exists(spark, f"{folder}/_SUCCESS"):
            continue
        rows = spark.read.parquet(file) if file.endswith(".parquet") else spark.read.text(file)
        translate_column(rows, column, model, **options).write.mode("overwrite").parquet(folder)
        before, after = rows.count(), spark.read.parquet(folder).count()
        if before != after:
            raise RuntimeError(f"{folder} has {after} rows, {file} has {before}")
        made.append(folder)
    return made


def _exists(spark, path):
    path = spark._jvm.org.apache.hadoop.fs.Path(path)
    return path.getFileSystem(spark._jsc.hadoopConfiguration()).exists(path)


def _processors():
    """Of this task; 1 where it is none of Spark's."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.cpus() if context else 1


def _local(path):
    if os.path.exists(path):
        return path
    from pyspark import SparkFiles

    return SparkFiles.get(path)
