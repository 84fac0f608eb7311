"""Writes what clients of tables and of samples read: three Parquet files, or a dataset in the format MDS.

    made.py tables DIR
    made.py mds DIR
"""

import pathlib
import sys

import tree


def tables(directory):
    """Writes three tables with the numbers up to 30,000."""
    import pyarrow
    import pyarrow.parquet

    directory.mkdir()
    for number, name in enumerate(tree.TABLES):
        column = pyarrow.array(range(number * 10_000, (number + 1) * 10_000))
        pyarrow.parquet.write_table(pyarrow.table({"x": column}), directory / name)


def mds(directory):
    """Writes 500 samples in shards of 64 KiB."""
    from streaming import MDSWriter

    with MDSWriter(out=str(directory / tree.SAMPLES), columns={"x": "bytes"}, size_limit=1 << 16) as writer:
        for number in range(500):
            writer.write({"x": tree.content(str(number))})


if __name__ == "__main__":
    {"tables": tables, "mds": mds}[sys.argv[1]](pathlib.Path(sys.argv[2]))
