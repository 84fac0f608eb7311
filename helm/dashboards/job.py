"""The dashboard of a user: is my job waiting for data, for which part, and what would help?"""

from panels import (
    BLUE,
    BYTES,
    BYTES_PER_S,
    COUNT,
    GREEN,
    GREY,
    ORANGE,
    PART,
    PER_S,
    RED,
    SAMPLES_PER_S,
    SECONDS,
    YELLOW,
    add_row,
    bars,
    begin,
    lines,
    number,
    query,
    states,
    steps,
    variable,
    words,
)

JOB = 'tenant=~"$tenant",train_job=~"$job"'
WINDOW = "[$__rate_interval]"
MINE = f"on (instance, dataset) group_left () group by (instance, dataset) (fletch_job_info{{{JOB}}})"
VERDICTS = [("compute", 1), ("preparation", 2), ("origin", 3), ("disk", 4), ("queue", 5)]
WORDS = words(
    (0, "not measured yet", GREY),
    (1, "no: it computes", GREEN),
    (2, "no: it prepares its own batches", YELLOW),
    (3, "yes, for the origin", RED),
    (4, "yes, for the server's disk", ORANGE),
    (5, "yes, for the server itself", ORANGE),
)
VERDICT = (
    "max("
    + " or ".join(
        f'{n} * (fletch_job_waits_for{{{JOB},verdict="{verdict}"}} == 1)' for verdict, n in VERDICTS
    )
    + f" or 0 * fletch_job_info{{{JOB}}})"
)


def entries(of):
    """Returns plan entries of the job's latest epoch."""
    return f'sum(fletch_job_epoch_entries{{{JOB},of="{of}"}})'


def samples(of):
    """Returns a rate of the job, in samples a second."""
    return f'sum(fletch_job_samples_per_second{{{JOB},of="{of}"}})'


def mine(of, metric="fletch_dataset_bytes"):
    """Returns bytes of the job's dataset."""
    return f'sum by (dataset) ({metric}{{of="{of}"}} * {MINE})'


def verdict():
    """One verdict, and the numbers that it stands on."""
    return [
        number(
            "Is my job waiting for data?",
            """What the job waits for most, by its latest 64 steps. It needs
               acks with times, which the loader of the Python package sends.""",
            VERDICT,
            COUNT,
            mappings=WORDS,
            width=8,
        ),
        number(
            "Speed",
            "The job's rate, as a part of its rate if it never waited for data.",
            f"min(fletch_job_speed_ratio{{{JOB}}})",
            PART,
            steps(RED, (0.5, YELLOW), (0.9, GREEN)),
            width=4,
        ),
        number(
            "Rate now",
            "Samples a second of all ranks together.",
            samples("now"),
            SAMPLES_PER_S,
            width=4,
            sparkline=True,
        ),
        number(
            "Rate if it never waited",
            """Samples a second if all data were there at once. It may be an upper
               bound: `fletch jobs show` says so.""",
            samples("never_waiting"),
            SAMPLES_PER_S,
            width=4,
        ),
        number(
            "Rest of the epoch",
            "Time until the epoch ends, at the rate of now.",
            f"({entries('planned')} - {entries('acked')}) / {samples('now')}",
            SECONDS,
            width=4,
        ),
    ]


def waits():
    """Where the wait goes."""
    return [
        lines(
            "Where the time goes",
            """Parts of the job's time: computing, preparing batches, and `fetch`:
              waiting for data. More cache helps against `fetch` only.""",
            [query(f"sum by (part) (fletch_job_time_ratio{{{JOB}}})", "{{part}}")],
            PART,
            stacked="normal",
            most=1,
        ),
        states("What it waits for", "The verdict over time.", [query(VERDICT, "verdict")], WORDS),
        lines(
            "Replies that wait",
            """The part of the time in which at least one reply of the server to the job
              had no byte to send. A loader reads ahead, so its replies may wait while the job does not.""",
            [query(f"sum by (dataset) (rate(fletch_stall_seconds_total{{{JOB}}}{WINDOW}))", "{{dataset}}")],
            PART,
            most=1,
        ),
        lines(
            "Reads of chunks: 99th percentile by tier",
            """Time for which requests of all jobs waited for a
              chunk.""",
            [
                query(
                    "histogram_quantile(0.99, sum by (le, tier) "
                    f"(rate(fletch_chunk_read_seconds_bucket{WINDOW})))",
                    "{{tier}}",
                )
            ],
            SECONDS,
        ),
    ]


def supply():
    """What the job asks for, and what each part of the system gives."""
    return [
        lines(
            "Supply against demand",
            """Demand: the job's rate if it never waited. Supply: what the origin and
              the disk give while they are busy. The job cannot be faster than its slowest supply, except for
              what comes from the cache.""",
            [
                query(samples("never_waiting"), "demand"),
                query(samples("now"), "now"),
                query(samples("origin"), "supply of the origin"),
                query(samples("disk"), "supply of the disk"),
            ],
            SAMPLES_PER_S,
        ),
        lines(
            "Bytes that the job gets",
            "By their source: `hit`, `substituted`, `miss` or `bypass`.",
            [query(f"sum by (result) (rate(fletch_bytes_total{{{JOB}}}{WINDOW}))", "{{result}}")],
            BYTES_PER_S,
            stacked="normal",
        ),
        lines(
            "Read from the origin",
            "For this job, and for all readers of the server.",
            [
                query(f"sum(rate(fletch_origin_read_bytes_total{{{JOB}}}{WINDOW}))", "this job"),
                query(f"sum(rate(fletch_origin_read_bytes_total{WINDOW}))", "all"),
            ],
            BYTES_PER_S,
        ),
        lines(
            "Is the origin the problem?",
            "Calls to origins that failed, and times that an origin asked to slow down.",
            [
                query(f"sum by (error) (rate(fletch_origin_errors_total{WINDOW}))", "{{error}}"),
                query(f"sum(rate(fletch_origin_pauses_total{WINDOW}))", "asked to slow down"),
            ],
            PER_S,
        ),
    ]


def cache():
    """The cache of the job's dataset."""
    return [
        number(
            "Part of the dataset in the cache",
            "What is cached, of all chunks of the job's dataset.",
            f"sum({mine('cached')}) / sum({mine('layout')})",
            PART,
            steps(BLUE),
            width=6,
        ),
        number(
            "Part of the job's bytes from the cache",
            """Bytes that the server did not read from the origin
               for this job, over about one pass. Another job may have brought them.""",
            f"avg(fletch_job_cached_ratio{{{JOB}}})",
            PART,
            steps(BLUE),
            width=6,
        ),
        number(
            "Target",
            "The share of the disk of the job's dataset.",
            f"sum({mine('share', 'fletch_share_bytes')})",
            BYTES,
            width=6,
        ),
        number(
            "Could use",
            "What all chunks of the job's dataset would occupy.",
            f"sum({mine('layout')})",
            BYTES,
            width=6,
        ),
        lines(
            "Cache of my dataset",
            """The dataset's share of the disk (target), what its chunks occupy
              (actual), and what all of them would occupy.""",
            [
                query(mine("share", "fletch_share_bytes"), "{{dataset}}: target"),
                query(mine("cached"), "{{dataset}}: actual"),
                query(mine("layout"), "{{dataset}}: could use"),
            ],
            BYTES,
        ),
        lines(
            "The job's bytes from the cache over time",
            "Over about one pass.",
            [query(f"avg(fletch_job_cached_ratio{{{JOB}}})", "cached")],
            PART,
            most=1,
        ),
    ]


def progress():
    """The epoch, and the ranks."""
    return [
        number(
            "Epoch",
            "The number of the latest epoch, from 0.",
            f"max(fletch_job_epoch{{{JOB}}})",
            COUNT,
            width=6,
        ),
        number(
            "Done",
            "Acknowledged samples, as a part of the epoch.",
            f"{entries('acked')} / {entries('planned')}",
            PART,
            steps(BLUE),
            width=6,
        ),
        number(
            "Held", "Samples that were granted and not acknowledged yet.", entries("held"), COUNT, width=6
        ),
        number(
            "Faults of epochs",
            """Late acks, epochs that were left unfinished, and damaged ledgers, of all
               jobs of the server in the shown time. A sample may have been delivered twice or not at all.""",
            "sum(increase(fletch_epoch_faults_total[$__range]))",
            COUNT,
            steps(GREEN, (0.5, ORANGE)),
            width=6,
        ),
        lines(
            "Progress of the epoch",
            "Samples of the latest epoch.",
            [
                query(entries("planned"), "planned"),
                query(entries("acked"), "acknowledged"),
                query(entries("held"), "held"),
            ],
            COUNT,
        ),
        lines(
            "Samples of all jobs",
            "Samples that the server grants, that are acknowledged, and that expire with their lease.",
            [query(f"sum by (event) (rate(fletch_epoch_entries_total{WINDOW}))", "{{event}}")],
            SAMPLES_PER_S,
        ),
    ]


def ranks():
    """Panels that show a rank that is slower than the others."""
    left = f"sum by (rank) (fletch_job_rank_entries_left{{{JOB}}})"
    return [
        lines(
            "Left by rank",
            """Samples that each rank has still to acknowledge in this epoch. Lines that lie
              on each other: no rank is slower than the others.""",
            [query(left, "rank {{rank}}")],
            COUNT,
        ),
        bars(
            "Behind the first rank",
            "Samples by which each rank is behind the first one.",
            [query(f"topk(16, {left} - on () group_left () min({left}))", "rank {{rank}}")],
            COUNT,
            width=12,
            thresholds=steps(BLUE),
        ),
    ]


def dashboard():
    """Returns the dashboard."""
    built = begin(
        "Fletch: is my job waiting for data?",
        "fletch-job",
        """Choose a job. The first panel is the
                  verdict; the rows below show where the wait comes from and what would help.
                  docs/howto/why-does-my-job-wait.md is a walk-through.""",
    )
    built.with_variable(variable("tenant", "Tenant", "label_values(fletch_job_info, tenant)", True))
    built.with_variable(
        variable("job", "Job", 'label_values(fletch_job_info{tenant=~"$tenant"}, train_job)')
    )
    add_row(built, "Verdict", *verdict())
    add_row(built, "Where the wait goes", *waits())
    add_row(built, "Supply against demand", *supply())
    add_row(built, "Cache of my dataset", *cache())
    add_row(built, "Epoch", *progress())
    add_row(built, "Ranks", *ranks())
    return built
