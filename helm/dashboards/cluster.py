"""The dashboard of an administrator: is Fletch healthy, what did it save, and where is it slow?"""

from panels import (
    BLUE,
    BYTES,
    BYTES_PER_S,
    COUNT,
    GREEN,
    ORANGE,
    PART,
    PER_S,
    RED,
    SECONDS,
    YELLOW,
    add_row,
    bars,
    begin,
    lines,
    number,
    query,
    rows,
    states,
    steps,
    variable,
    words,
)

SET = 'dataset=~"$dataset"'
WINDOW = "[$__rate_interval]"
SHOWN = "[$__range]"
# Requests of users: no probes, no metrics.
USERS = 'route!~"/livez|/startupz|/readyz|/metrics"'
FAILED = f'{USERS},status=~"5..",status!="507"'


def rate(metric, by="", labels=""):
    """Returns the sum of rates by labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}{WINDOW}))"


def latency(part, by, histogram, labels=""):
    """Returns a quantile of a histogram."""
    return f"histogram_quantile({part}, {rate(f'{histogram}_bucket', f'le, {by}', labels)})"


def increase(metric, labels=""):
    """Returns the sum of increases over the shown time."""
    return f"sum(increase({metric}{{{labels}}}{SHOWN}))"


def health():
    """Panels that answer: does everything work?"""
    failed = (
        f"({rate('fletch_requests_total', '', FAILED)} or vector(0)) "
        f"/ {rate('fletch_requests_total', '', USERS)}"
    )
    mounts = f"{rate('fletch_mount_faults_total')} / {rate('fletch_mount_requests_total')}"
    budget = steps(GREEN, (0.001, YELLOW), (0.0144, RED))
    return [
        number(
            "Servers",
            "Servers that Prometheus reads.",
            "count(fletch_build_info)",
            COUNT,
            steps(RED, (1, GREEN)),
            width=3,
        ),
        number(
            "Mounts",
            "Mounts that Prometheus reads. A pod of the chart has one for each domain.",
            "count(fletch_mount_build_info)",
            COUNT,
            steps(BLUE),
            width=3,
        ),
        number(
            "Versions",
            "Versions of Fletch that run side by side. More than one: an upgrade is incomplete.",
            "count(group by (version) (fletch_build_info or fletch_mount_build_info))",
            COUNT,
            steps(GREEN, (2, YELLOW)),
            width=3,
        ),
        number(
            "Failed requests",
            """The part of requests that the servers answer with 5xx. The objective is
               at most 0.1 % over 30 days; from 1.44 % on, the budget of 30 days is used up in two days.""",
            failed,
            PART,
            budget,
            width=3,
        ),
        number(
            "Failing origins",
            """Datasets of which an origin fails now. What is cached can be read.""",
            "sum(fletch_origin_failing)",
            COUNT,
            steps(GREEN, (1, RED)),
            width=3,
        ),
        number(
            "Disks that do not work",
            """Servers whose disk tier is not on: it is full, read-only, absent or
               broken. Reads are correct and skip the disk.""",
            'sum(fletch_disk_state{state!~"on|none"})',
            COUNT,
            steps(GREEN, (1, RED)),
            width=3,
        ),
        number(
            "Wrong bytes",
            """Wrong bytes that servers and mounts noticed in the shown time. No reader got
               them.""",
            f"{increase('fletch_corrupt_total')} + "
            f"({increase('fletch_mount_corrupt_chunks_total')} or vector(0))",
            COUNT,
            steps(GREEN, (0.5, RED)),
            width=3,
        ),
        number(
            "Broken mounts",
            "Mounts that lost their server, or read the origin in its place.",
            "sum(fletch_mount_server_gone) + sum(fletch_mount_server_away)",
            COUNT,
            steps(GREEN, (1, RED)),
            width=3,
        ),
        rows(
            "Firing alerts",
            """Alerts of Fletch that fire. Each has a runbook in docs/runbooks. Empty while
             all is well, and without the rules of the chart.""",
            [
                (
                    "firing",
                    "sum by (alertname, severity, instance) "
                    '(ALERTS{alertname=~"Fletch.*",alertstate="firing"})',
                )
            ],
            "alertname",
            COUNT,
            width=8,
        ),
        lines(
            "Part of requests that fail",
            "Of the servers' HTTP requests, and of the kernel's requests to mounts.",
            [query(failed, "servers"), query(mounts, "mounts")],
            PART,
            width=8,
            thresholds=steps(GREEN, (0.001, YELLOW), (0.0144, RED)),
        ),
        lines(
            "Requests by status",
            "HTTP requests that the servers answered, without probes.",
            [query(rate("fletch_requests_total", "status", USERS), "{{status}}")],
            PER_S,
            width=8,
            stacked="normal",
        ),
        lines(
            "Failed requests by route",
            """HTTP requests that were answered with 5xx. Empty while all is
              well.""",
            [query(rate("fletch_requests_total", "route, status", FAILED), "{{status}} {{route}}")],
            PER_S,
            width=6,
        ),
        lines(
            "Memory in use",
            """Chunks in memory, as a part of their limit. A full memory is normal: unused
              chunks make room.""",
            [
                query(
                    'max by (instance) (fletch_memory_bytes{of="live"}) '
                    "/ on (instance) fletch_memory_limit_bytes",
                    "{{instance}}",
                )
            ],
            PART,
            width=6,
            most=1,
        ),
        lines(
            "Jobs that wait for a lost server",
            """Training jobs whose server of the cluster is down, or has lost their
              ledgers. Every server reports the same jobs.""",
            [
                query(
                    "max by (member) (fletch_cluster_jobs_waiting) or vector(0)",
                    "{{member}}",
                )
            ],
            COUNT,
            width=6,
            thresholds=steps(GREEN, (1, RED)),
        ),
        lines(
            "Requests refused by a limit",
            """Requests that were refused because their tenant was at a limit,
              and connections that were refused.""",
            [
                query(rate("fletch_refused_total", "tenant, limit"), "{{tenant}}: {{limit}}"),
                query(rate("fletch_connections_refused_total", "limit"), "connections: {{limit}}"),
            ],
            PER_S,
            width=6,
        ),
    ]


def saved():
    """Panels that answer: what did the cache save?"""
    delivered, avoided = "fletch_bytes_total", "fletch_avoided_bytes_total"
    share = f"{increase(avoided, SET)} / {increase(delivered, SET)}"
    return [
        number(
            "Origin bytes avoided",
            """Bytes that were delivered beyond those that were read from origins,
               in the shown time: what the cache saved.""",
            increase(avoided, SET),
            BYTES,
            steps(GREEN),
            width=6,
        ),
        number(
            "Share saved",
            "Avoided bytes as a part of the delivered bytes, in the shown time.",
            share,
            PART,
            steps(ORANGE, (0.1, YELLOW), (0.5, GREEN)),
            width=6,
        ),
        number(
            "Delivered",
            "Content bytes handed to readers in the shown time.",
            increase(delivered, SET),
            BYTES,
            width=6,
        ),
        number(
            "Read from origins",
            "Bytes of content and tables read from origins in the shown time.",
            increase("fletch_origin_read_bytes_total", SET),
            BYTES,
            width=6,
        ),
        lines(
            "Delivered bytes: exact, substituted, miss",
            """Where delivered bytes came from. `hit`: exactly
              the wanted sample was cached. `substituted`: the server chose a sample that was cached. `miss`
              and `bypass`: the origin was read for this reader; a bypass is not kept on disk.""",
            [query(rate(delivered, "result", SET), "{{result}}")],
            BYTES_PER_S,
            stacked="normal",
        ),
        lines(
            "Avoided and read",
            "Bytes that the cache saved, and bytes that were read from origins.",
            [
                query(rate(avoided, "", SET), "avoided"),
                query(rate("fletch_origin_read_bytes_total", "of", SET), "read: {{of}}"),
            ],
            BYTES_PER_S,
        ),
        bars(
            "Share saved by dataset",
            """Avoided bytes as a part of the delivered bytes, in the shown time. A
             dataset that is read for the first time saves nothing yet.""",
            [
                query(
                    f"sum by (dataset) (increase({avoided}{{{SET}}}{SHOWN})) "
                    f"/ sum by (dataset) (increase({delivered}{{{SET}}}{SHOWN}))",
                    "{{dataset}}",
                )
            ],
            PART,
            width=12,
            most=1,
            thresholds=steps(ORANGE, (0.1, YELLOW), (0.5, GREEN)),
        ),
        lines(
            "Delivered bytes by tier",
            "The tier from which readers got their bytes.",
            [query(rate(delivered, "tier", SET), "{{tier}}")],
            BYTES_PER_S,
            stacked="normal",
        ),
    ]


def capacity():
    """Panels that answer: which dataset has how much of the disk, and how much should it have?"""

    def of(word, metric="fletch_dataset_bytes"):
        return f'sum by (dataset) ({metric}{{{SET},of="{word}"}})'

    return [
        rows(
            "Disk by dataset: target and actual",
            """`target` is the dataset's share of the disk, `actual` what
             its chunks occupy, `by reads` the share that it would have if jobs were not measured, and `could
             use` what all its chunks would occupy.""",
            [
                ("target", of("share", "fletch_share_bytes")),
                ("actual", of("cached")),
                ("by reads", of("by_reads", "fletch_share_bytes")),
                ("could use", of("layout")),
            ],
            "dataset",
            BYTES,
        ),
        lines(
            "Target and actual over time",
            """The share of each dataset, and what it occupies. A share that
              grew is filled as its data is read.""",
            [
                query(of("share", "fletch_share_bytes"), "{{dataset}}: target"),
                query(of("cached"), "{{dataset}}: actual"),
            ],
            BYTES,
        ),
        lines(
            "Disk",
            "What chunks and slab files occupy, and what they may occupy.",
            [
                query("sum(fletch_disk_chunk_bytes)", "chunks"),
                query("sum(fletch_disk_slab_bytes)", "slab files"),
                query("sum(fletch_disk_capacity_bytes)", "capacity for chunks"),
                query("sum(fletch_disk_limit_bytes)", "limit"),
            ],
            BYTES,
            width=8,
        ),
        lines(
            "Appended and evicted",
            """Bytes that come to the disk and leave it. Many evictions and few saved
              bytes: the cache thrashes.""",
            [
                query(rate("fletch_disk_put_bytes_total"), "appended"),
                query(rate("fletch_disk_evicted_bytes_total"), "evicted"),
                query(rate("fletch_allocation_moved_bytes_total"), "taken away by decisions"),
            ],
            BYTES_PER_S,
            width=8,
        ),
        lines(
            "Chunks not kept",
            """Chunks that the disk tier did not keep, because their dataset's share or the
              disk is full, or because too many waited to be appended.""",
            [
                query(rate("fletch_disk_refused_total", "why"), "{{why}} is full"),
                query(rate("fletch_disk_append_drops_total"), "too many waited"),
            ],
            PER_S,
            width=8,
        ),
    ]


def tiers():
    """Panels that answer: how long does a read take?"""
    reads = "fletch_chunk_read_seconds"
    return [
        lines(
            "Reads of chunks: 99th percentile by tier",
            """Time for which a request waited for a chunk.
              `flight`: it joined a read that another request had begun.""",
            [query(latency(0.99, "tier", reads), "{{tier}}")],
            SECONDS,
        ),
        lines(
            "Reads of chunks: median by tier",
            "Time for which a request waited for a chunk.",
            [query(latency(0.5, "tier", reads), "{{tier}}")],
            SECONDS,
        ),
        lines(
            "Reads of chunks by tier",
            "How often each tier was read.",
            [query(rate("fletch_chunk_reads_total", "tier"), "{{tier}}")],
            PER_S,
            stacked="normal",
        ),
        lines(
            "Requests: 99th percentile by route",
            "Time until the head of a reply.",
            [query(latency(0.99, "route", "fletch_request_seconds", USERS), "{{route}}")],
            SECONDS,
        ),
    ]


def origin():
    """Panels that answer: do the origins keep up?"""
    return [
        states(
            "State of origins",
            """Whether the origin of each dataset answers. While it does not, the server
               leaves it alone and probes it now and then.""",
            [query(f"max by (dataset) (fletch_origin_breaker_state{{{SET}}})", "{{dataset}}")],
            words((0, "answers", GREEN), (1, "is probed", YELLOW), (2, "is left alone", RED)),
        ),
        lines(
            "Calls",
            "Calls to origins: all, attempts after the first, and reads that asked a second origin.",
            [
                query(rate("fletch_origin_requests_total"), "calls"),
                query(rate("fletch_origin_retries_total"), "repeated"),
                query(rate("fletch_origin_hedged_total"), "hedged"),
            ],
            PER_S,
        ),
        lines(
            "Errors and pauses",
            """Calls that failed, by kind. `asked to slow down`: the origin answered 503
              or 429, and the server paused.""",
            [
                query(rate("fletch_origin_errors_total", "error"), "{{error}}"),
                query(rate("fletch_origin_pauses_total"), "asked to slow down"),
            ],
            PER_S,
        ),
        lines(
            "Read by dataset",
            "Content and tables read from the origins of each dataset.",
            [query(rate("fletch_origin_read_bytes_total", "dataset", SET), "{{dataset}}")],
            BYTES_PER_S,
            stacked="normal",
        ),
    ]


def mounts():
    """Panels that answer: do the mounts work, and where do their bytes come from?"""
    sources = [
        ("read_memory", "its memory"),
        ("read_disk", "its disk"),
        ("read_joined", "another's fetch"),
        ("read_fetched", "a fetch"),
    ]
    return [
        lines(
            "Bytes read through mounts",
            "Replies to the kernel, by the place where the mount found the bytes.",
            [query(rate(f"fletch_mount_{name}_bytes_total"), legend) for name, legend in sources],
            BYTES_PER_S,
            stacked="normal",
        ),
        lines(
            "Faults",
            """Requests of the kernel that failed and that somebody can act on; SEMANTICS lists the
              faults.""",
            [query(rate("fletch_mount_faults_total", "fault"), "{{fault}}")],
            PER_S,
        ),
        lines(
            "Names of datasets",
            """Names by state: `linked` to a mounted version, `over_limit` because of the
              largest number of mounts, `failed` because a version could not be mounted.""",
            [query("sum by (state) (fletch_mount_datasets)", "{{state}}")],
            COUNT,
            width=8,
        ),
        states(
            "Connection to the server",
            "Whether each mount reaches its server.",
            [
                query(
                    "max by (instance) (fletch_mount_server_away + 2 * fletch_mount_server_gone)",
                    "{{instance}}",
                )
            ],
            words((0, "works", GREEN), (1, "reads the origin instead", ORANGE), (2, "is gone", RED)),
            width=8,
        ),
        lines(
            "Requests of the kernel",
            "Requests that mounts answer, by operation.",
            [query(f"topk(8, {rate('fletch_mount_requests_total', 'op')} > 0)", "{{op}}")],
            PER_S,
            width=8,
        ),
        lines(
            "Cache of the node",
            """What the mounts' own cache on the nodes' disks occupies, and may occupy.
              Absent without a cache of the mounts.""",
            [
                query("sum(fletch_mount_disk_slab_bytes)", "occupied"),
                query("sum(fletch_mount_disk_limit_bytes)", "limit"),
            ],
            BYTES,
        ),
        lines(
            "Memory of mounts",
            "Chunk buffers in memory, the largest mounts.",
            [query("topk(10, fletch_mount_memory_live_bytes)", "{{instance}}")],
            BYTES,
        ),
    ]


def servers():
    """Panels that answer: do the servers of one cache find each other, and what passes between them?"""
    return [
        lines(
            "Members by state",
            """Servers that share the cache, by what they do. A server that is alone is its own only
              member.""",
            [query("max by (state) (fletch_cluster_members)", "{{state}}")],
            COUNT,
            width=8,
        ),
        states(
            "Contact with etcd",
            """Whether each server reaches etcd. Without etcd reads go on, and nothing can be registered
              or declared.""",
            [query("min by (instance) (fletch_cluster_coordinator_up)", "{{instance}}")],
            words((0, "lost", RED), (1, "in touch", GREEN)),
            width=8,
        ),
        lines(
            "Bytes sent to other servers",
            "By the server that sends. Each chunk has one owner, and the others read it from there.",
            [query(rate("fletch_peer_sent_bytes_total", "instance"), "{{instance}}")],
            BYTES_PER_S,
            width=8,
            stacked="normal",
        ),
        lines(
            "Requests to other servers by result",
            """`hit`: the owner had the chunk. `miss`: it read the origin. `failed`: it gave no answer, and
              another one was asked.""",
            [query(rate("fletch_peer_requests_total", "result"), "{{result}}")],
            PER_S,
        ),
        lines(
            "Chunks away from their owners",
            """`no room`: an owner's disk is full, and another server keeps the chunk. `for others`: a
              server fetched a chunk that it does not own, because the owner did not answer.""",
            [
                query(rate("fletch_peer_passed_on_chunks_total"), "no room"),
                query(rate("fletch_peer_foreign_fills_total"), "for others"),
            ],
            PER_S,
        ),
    ]


def dashboard():
    """Returns the dashboard."""
    built = begin(
        "Fletch: cluster",
        "fletch-cluster",
        """Is Fletch healthy, what did the cache save, and where
                  is it slow? docs/METRICS.md describes every number.""",
    )
    built.with_variable(variable("dataset", "Dataset", "label_values(fletch_bytes_total, dataset)", True))
    add_row(built, "Health", *health())
    add_row(built, "What the cache saved", *saved())
    add_row(built, "Capacity", *capacity())
    add_row(built, "Latency by tier", *tiers())
    add_row(built, "Origins", *origin())
    add_row(built, "Mounts", *mounts())
    add_row(built, "Servers of one cache", *servers())
    return built
