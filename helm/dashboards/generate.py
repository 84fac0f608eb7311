#!/usr/bin/env python3
"""Writes the dashboards of the chart, with the typed builders of grafana-foundation-sdk.

    generate.py [DIRECTORY]

DIRECTORY is helm/fletch/dashboards unless given. The test of the chart compares the files there with what
this script writes. tests/chart/requirements.txt pins the builders.
"""

import pathlib
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder

import cluster
import job

HOME = pathlib.Path(__file__).resolve().parent.parent / "fletch" / "dashboards"


def dashboards():
    """Returns the text of each file, by its name."""
    out = {}
    for name, built in (("fletch-cluster", cluster.dashboard()), ("fletch-job", job.dashboard())):
        board = built.build()
        for number, panel in enumerate(board.panels, 1):
            panel.id_val = number
        out[f"{name}.json"] = JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"
    return out


if __name__ == "__main__":
    where = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HOME
    for name, text in dashboards().items():
        (where / name).write_text(text)
