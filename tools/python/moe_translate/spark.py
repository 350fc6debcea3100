"""Corpora on a Spark cluster.

    from moe_translate.spark import translate_column
    translate_column(df, "text", "/models/model.bin", target="de").write.parquet("out")

Each worker opens the model once and keeps it. The file must be on every node: by SparkContext.addFile, or on a file
system that all nodes see. One row comes out for each row that goes in. Results do not depend on partitions, batches or
retries, so failed tasks and speculative ones give the same bytes.
"""

import os


def translate_batches(batches, column, model, output="translation", status="status", **options):
    """For mapInArrow: record batches with two columns more, the translation and its status (0 is well)."""
    import pyarrow

    from .translator import cached

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


def _local(path):
    if os.path.exists(path):
        return path
    from pyspark import SparkFiles

    return SparkFiles.get(path)
