"""Writes what clients of tables and of samples read: three Parquet files, and a dataset in the format MDS.

    made.py TABLES MDS
"""

import pathlib
import sys

import pyarrow
import pyarrow.parquet
import tree
from streaming import MDSWriter

tables = pathlib.Path(sys.argv[1])
tables.mkdir()
for number in range(3):
    column = pyarrow.array(range(number * 10_000, (number + 1) * 10_000))
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), tables / f"{number}.parquet")
with MDSWriter(out=sys.argv[2], columns={"x": "bytes"}, size_limit=1 << 16) as writer:
    for number in range(500):
        writer.write({"x": tree.content(str(number))})
