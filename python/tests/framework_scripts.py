"""Starts the scripts of ``frameworks``, on one rank or several, and reads what they print.

`make accept-frameworks` runs them with the frameworks themselves. `make test` runs some with the stand-ins.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import Server, end_with_children

HERE = Path(__file__).parent / "frameworks"
SAMPLES = 1000
WHOLE = {"least": 1, "most": 1, "total": SAMPLES}
TWICE = {"least": 2, "most": 2, "total": 2 * SAMPLES}
#: Torch 1.13 on Python 3.11 cannot read the defaults of the last two, which redirect nothing.
#: With a port of its own: `--standalone` of that torch has the same for everybody on the machine.
RENDEZVOUS = ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
LAUNCHER = ["-m", "torch.distributed.run", *RENDEZVOUS, "--redirects=2", "--tee=2"]


def publish_numbered(server: Server) -> None:
    """Publishes the dataset ``numbered``: 1,000 small files that begin with their number."""
    tree = server.scratch / "tree-numbered"
    tree.mkdir()
    rng = random.Random(3)
    for i in range(SAMPLES):
        (tree / f"{i:04}").write_bytes(i.to_bytes(4, "little") + rng.randbytes(rng.randrange(300)))
    server.publish("numbered", tree)


@dataclass
class Row:
    """A case, and what it gives: the words of its refusal, or a part of its result."""

    case: dict[str, Any]
    gives: str | dict[str, Any]


@dataclass
class Script:
    """A script of ``frameworks``, in a folder of its own, started once or more often.

    Attributes:
        server: the server with the dataset ``numbered``.
        folder: the working directory.
        name: the script's file.
        ranks: the number of processes.
        table: gets a line for each case that was run.
        path: folders from which the script imports frameworks.
        said: what the last start printed.
    """

    server: Server
    folder: Path
    name: str
    ranks: int
    table: list[str]
    path: tuple[Path, ...] = ()
    said: str = field(default="")

    def start(self, *cases: dict[str, Any]) -> int:
        """Runs cases to their end. Returns the exit status."""
        words = [sys.executable, "-W", "ignore"]
        if self.ranks > 1:
            words += [*LAUNCHER, f"--nproc_per_node={self.ranks}"]
        words += [str(HERE / self.name), f"unix:{self.server.socket}", json.dumps(cases)]
        imports = os.pathsep.join([*map(str, self.path), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": imports}
        out = self.folder / "out"
        with open(out, "wb") as file:
            process = subprocess.Popen(
                words, cwd=self.folder, stdout=file, stderr=file, env=env, start_new_session=True
            )
            try:
                return process.wait(900)
            finally:
                end_with_children(process)
                self.said = out.read_text(errors="replace")

    def is_killed_and_finishes(
        self, job: str, kills: list[list[Any]], whole_validations: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Starts a training again and again, which kills itself at a place, and at last to its end.

        A kill is a place and the number of times that the script comes there, and perhaps the only rank that
        dies. Every second run has two workers. Each validation that a run ended has every sample once, and
        all runs together end at least ``whole_validations`` of them. Returns the result.
        """
        validated: list[Any] = []
        for at, kill in enumerate(kills):
            assert self.start({"job": job, "die": kill, "workers": at % 2 * 2, **options}) != 0, self.said
            # A rank that outlives the killed one may report the broken connection.
            assert len(kill) == 3 or "Error" not in self.said.replace("ChildFailedError", ""), self.said
            assert f"KILLED {json.dumps(kill)}" in self.said, self.said
            validated += self.validations()
        [got] = self.results({"job": job, "workers": len(kills) % 2 * 2, **options})
        validated += self.validations()
        assert all(one == WHOLE for one in validated), validated
        assert len(validated) >= whole_validations, (validated, self.said)
        count = f"{len(validated)} whole validations"
        self.table.append(f"{self.name} {self.ranks} ranks: {job}, killed at {kills}: {got}, {count}")
        return got

    def validations(self) -> list[Any]:
        """What each validation of the last start has counted."""
        return [json.loads(text) for text in re.findall(r"^VALIDATED (.*)$", self.said, re.MULTILINE)]

    def results(self, *cases: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs cases. Returns what each of them prints as its result, or as its refusal."""
        assert self.start(*cases) == 0, self.said
        found: dict[str, Any] = {}
        for kind, text in re.findall(r"^(RESULT|REFUSED) (.*)$", self.said, re.MULTILINE):
            got = json.loads(text)
            assert kind == "REFUSED" or got["job"] not in found, f"a result beside a refusal: {self.said}"
            found[got["job"]] = got
        assert found.keys() == {case["job"] for case in cases}, self.said
        return [found[case["job"]] for case in cases]

    def check(self, rows: list[Row]) -> None:
        """Runs rows, compares each of them with what it must give, and notes them in the table."""
        faults = []
        cases = [{"job": f"{self.name[4:-3]}-{self.ranks}-{at}", **row.case} for at, row in enumerate(rows)]
        for row, got in zip(rows, self.results(*cases)):
            if isinstance(row.gives, str):
                holds = re.search(row.gives, got.get("says", "")) is not None
            else:
                holds = all(got.get(key) == value for key, value in row.gives.items())
            shown = f"refused, says {row.gives!r}" if isinstance(row.gives, str) else str(row.gives)
            line = f"{self.name} {self.ranks} ranks: {row.case}: {shown}"
            self.table.append(line)
            if not holds:
                faults.append(f"{line}, and got {got}")
        assert not faults, "\n".join(faults)
