//! The counters of a process of mounts: as Prometheus text while it runs, as a JSON report when it ends.

use crate::fs::error::Fault;
use crate::push::Pusher;
use crate::requests::RequestContext;
use fletch_client::hits::HitStats;
use prometheus::{Counter, Encoder, IntCounter, IntGauge, Opts, Registry, TextEncoder};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

mod page;

pub use page::{PageAddress, listen, serve};

/// The kinds of requests of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Op {
    Lookup,
    Getattr,
    Readlink,
    Open,
    Read,
    Opendir,
    Readdir,
    Readdirplus,
    Statfs,
    /// GETXATTR and LISTXATTR
    Xattr,
    /// All other requests
    Other,
}

impl Op {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Op; 11] = [
        Op::Lookup,
        Op::Getattr,
        Op::Readlink,
        Op::Open,
        Op::Read,
        Op::Opendir,
        Op::Readdir,
        Op::Readdirplus,
        Op::Statfs,
        Op::Xattr,
        Op::Other,
    ];

    /// Returns the word for the kind in metrics and reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Op::Lookup => "lookup",
            Op::Getattr => "getattr",
            Op::Readlink => "readlink",
            Op::Open => "open",
            Op::Read => "read",
            Op::Opendir => "opendir",
            Op::Readdir => "readdir",
            Op::Readdirplus => "readdirplus",
            Op::Statfs => "statfs",
            Op::Xattr => "xattr",
            Op::Other => "other",
        }
    }
}

/// The requests of the kernel, by kind.
#[derive(Debug, Default)]
pub struct RequestCounts {
    by_kind: [AtomicU64; Op::ALL.len()],
    /// Requests that the kernel sent again, because the process died that had received them.
    resent: AtomicU64,
    /// How often a mount was taken over from an earlier process.
    takeovers: AtomicU64,
}

impl RequestCounts {
    /// Counts one request.
    pub fn count(&self, op: Op) {
        self.by_kind[op as usize].fetch_add(1, Relaxed);
    }

    /// Counts a request that the kernel sent again. It is counted by its kind, too.
    pub fn count_resent(&self) {
        self.resent.fetch_add(1, Relaxed);
    }

    /// Counts a mount that was taken over from an earlier process.
    pub fn count_takeover(&self) {
        self.takeovers.fetch_add(1, Relaxed);
    }

    /// Returns the number of requests that only a program in the mount causes, without READs. Programs that
    /// watch a machine's file systems send STATFS to all of them.
    #[must_use]
    pub fn of_programs(&self) -> u64 {
        let is_one = |op: &&Op| !matches!(op, Op::Read | Op::Statfs | Op::Xattr | Op::Other);
        Op::ALL.iter().filter(is_one).map(|op| self.by_kind[*op as usize].load(Relaxed)).sum()
    }

    /// Returns the number of requests of each kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        Op::ALL.iter().map(|op| (op.word(), self.by_kind[*op as usize].load(Relaxed))).collect()
    }
}

/// All counters of a process at one moment. Byte counts are bytes sent to the kernel. The kernel serves
/// cached pages without a request, and no counter includes those.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Snapshot {
    /// The mounted dataset; empty in a process with many mounts.
    pub dataset: String,
    /// The root of the mounted version; empty in a process with many mounts.
    pub root: String,
    /// The job that the mount reads for.
    pub job: String,
    /// Requests of the kernel by kind.
    pub requests: BTreeMap<&'static str, u64>,
    /// Requests that the kernel sent again, because the process died that had received them.
    pub resent: u64,
    /// Mounts that were taken over from an earlier process.
    pub takeovers: u64,
    /// Failures by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// READs of files.
    pub reads: u64,
    /// Bytes of replies to READs.
    pub read_bytes: u64,
    /// Bytes of those replies that came from this mount's memory.
    pub read_memory_bytes: u64,
    /// Bytes of those replies that came from this mount's disk.
    pub read_disk_bytes: u64,
    /// Bytes of those replies that came from a fetch which another read had started.
    pub read_joined_bytes: u64,
    /// Bytes of those replies that came from the read's own fetch. The four tiers add up to `read_bytes`.
    pub read_fetched_bytes: u64,
    /// Seconds in which at least one READ was under way.
    pub read_seconds: f64,
    /// Seconds between READs, without pauses of 10 s and more.
    pub think_seconds: f64,
    /// Bytes put into the page cache in addition to replies.
    pub pushed_bytes: u64,
    /// Pushes that the mount skipped.
    pub pushes_skipped: u64,
    /// How often the server refused the version after it was mounted.
    pub refusals: u64,
    /// Slices prefetched for sequential readers.
    pub prefetch_slices: u64,
    /// Fetches of chunks, including repeated ones.
    pub fetches: u64,
    /// Bytes of the fetched chunks.
    pub fetched_bytes: u64,
    /// Fetched chunks that the mount refused because their bytes were wrong.
    pub corrupt: u64,
    /// Bytes of chunks in memory now.
    pub memory_live_bytes: u64,
    /// Requests sent to the server, including those for tables.
    pub server_requests: u64,
    /// Requests sent to the server again.
    pub server_retries: u64,
    /// Requests that another server of the cluster answered than the one that was asked first.
    pub server_failovers: u64,
    /// Bytes received from the server, including tables.
    pub server_bytes: u64,
    /// Bytes read in the files of a server of this machine.
    pub slab_bytes: u64,
    /// Chunks and files that FUSE threads asked the server of this machine for, by result.
    pub hit_requests: BTreeMap<&'static str, u64>,
    /// How often the mount lost the server.
    pub server_losses: u64,
    /// Fetches that the mount refused at once, because the server was gone.
    pub server_refused: u64,
    /// Whether the server is gone now, so that fetches are refused.
    pub server_gone: bool,
    /// Whether the mount reads the origin instead of the server now.
    pub server_away: bool,
    /// Requests sent to the origin while the server was gone, including those for tables.
    pub origin_requests: u64,
    /// Bytes received from the origin.
    pub origin_bytes: u64,
    /// The node store, if the mount takes part in one.
    pub node: Option<NodeSnapshot>,
    /// Whether the node has its label from this process, if it is to label the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_label: Option<bool>,
    /// The datasets, if the process mounts all that its token may read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datasets: Option<DatasetsSnapshot>,
}

/// The numbers of a process that mounts all datasets.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DatasetsSnapshot {
    /// Names that lead to a mounted version.
    pub linked: u64,
    /// Names whose version is not mounted because of `--mounts-max`.
    pub over_limit: u64,
    /// Names whose version is not mounted because an attempt failed.
    pub failed: u64,
    /// The mounted versions, each with its dataset and its root.
    pub mounted: Vec<(String, String)>,
    /// The most versions mounted at once.
    pub mounts_max: u64,
    /// Passes over the server's datasets that the server answered.
    pub passes: u64,
    /// Passes that the server did not answer, or refused.
    pub passes_failed: u64,
}

/// The counters of a mount's part in the node store.
#[derive(Debug, Clone, Serialize)]
pub struct NodeSnapshot {
    /// `owner`, `client` or `direct`.
    pub role: &'static str,
    /// Reads that the owner answered for this client.
    pub reads: u64,
    /// Bytes received from the owner.
    pub bytes: u64,
    /// Reads that the owner did not answer and this client took to the server.
    pub left: u64,
    /// How often this client lost its owner.
    pub losses: u64,
    /// Bytes that this owner sent to its clients, by the tier they came from.
    pub sent: BTreeMap<&'static str, u64>,
    /// Chunks on disk, while this is the owner.
    pub chunks: u64,
    /// Bytes of slab files, which count against the limit.
    pub slab_bytes: u64,
    /// The most bytes that the store may take on disk.
    pub limit_bytes: u64,
    /// Bytes of chunks that wait for their append to disk.
    pub queued_bytes: u64,
    /// Damaged chunks that were found; none of them was served.
    pub quarantined: u64,
}

impl Snapshot {
    /// Returns the counters that each mount has by itself.
    #[must_use]
    pub fn of_mount(context: &RequestContext) -> Self {
        let read = context.reader.counters();
        let (pushed_bytes, pushes_skipped) = context.pusher.get().map_or((0, 0), Pusher::counts);
        let times = context.read_clock.times();
        Snapshot {
            requests: context.requests.counts(),
            resent: context.requests.resent.load(Relaxed),
            takeovers: context.requests.takeovers.load(Relaxed),
            faults: faults(context.faults.counts()),
            reads: read.reads.load(Relaxed),
            read_bytes: read.bytes.load(Relaxed),
            read_memory_bytes: read.bytes_memory.load(Relaxed),
            read_disk_bytes: read.bytes_disk.load(Relaxed),
            read_joined_bytes: read.bytes_joined.load(Relaxed),
            read_fetched_bytes: read.bytes_fetched.load(Relaxed),
            read_seconds: times.read.as_secs_f64(),
            think_seconds: times.think.as_secs_f64(),
            pushed_bytes,
            pushes_skipped,
            refusals: context.access.refusals(),
            prefetch_slices: read.prefetched.load(Relaxed),
            ..Snapshot::default()
        }
    }

    /// Adds the counters that `other`, a result of [`Snapshot::of_mount`], has by itself.
    pub fn add_mount(&mut self, other: &Snapshot) {
        for (op, n) in &other.requests {
            *self.requests.entry(op).or_default() += n;
        }
        for (fault, n) in &other.faults {
            *self.faults.entry(fault).or_default() += n;
        }
        self.resent += other.resent;
        self.takeovers += other.takeovers;
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.read_memory_bytes += other.read_memory_bytes;
        self.read_disk_bytes += other.read_disk_bytes;
        self.read_joined_bytes += other.read_joined_bytes;
        self.read_fetched_bytes += other.read_fetched_bytes;
        self.read_seconds += other.read_seconds;
        self.think_seconds += other.think_seconds;
        self.pushed_bytes += other.pushed_bytes;
        self.pushes_skipped += other.pushes_skipped;
        self.refusals += other.refusals;
        self.prefetch_slices += other.prefetch_slices;
    }

    /// Returns the Prometheus text.
    ///
    /// # Errors
    /// A name or label is malformed, which is a defect.
    pub fn prometheus(&self) -> Result<Vec<u8>, prometheus::Error> {
        let registry = Registry::new();
        let counter = |opts: Opts, n: u64| -> Result<(), prometheus::Error> {
            let c = IntCounter::with_opts(opts)?;
            c.inc_by(n);
            registry.register(Box::new(c))
        };
        let opts = |name: &str, help: &str| Opts::new(format!("fletch_mount_{name}"), help);
        for (op, n) in &self.requests {
            let o = opts("requests_total", "Requests of the kernel.").const_label("op", *op);
            counter(o, *n)?;
        }
        for (fault, n) in &self.faults {
            let o = opts("faults_total", "Failed requests that an operator can act on.");
            counter(o.const_label("fault", *fault), *n)?;
        }
        for (result, n) in &self.hit_requests {
            let o = opts("hit_requests_total", "Requests for bytes that the server may have at hand.");
            counter(o.const_label("result", *result), *n)?;
        }
        for (name, help, n) in [
            ("resent_requests_total", "Requests that the kernel sent again.", self.resent),
            ("takeovers_total", "Mounts taken over from an earlier process.", self.takeovers),
            ("read_bytes_total", "Bytes of replies to READs.", self.read_bytes),
            ("read_memory_bytes_total", "Bytes of replies from this mount's memory.", self.read_memory_bytes),
            ("read_disk_bytes_total", "Bytes of replies from this mount's disk.", self.read_disk_bytes),
            (
                "read_joined_bytes_total",
                "Bytes of replies from a fetch that another read had started.",
                self.read_joined_bytes,
            ),
            (
                "read_fetched_bytes_total",
                "Bytes of replies from the read's own fetch.",
                self.read_fetched_bytes,
            ),
            (
                "pushed_bytes_total",
                "Bytes put into the page cache in addition to replies.",
                self.pushed_bytes,
            ),
            ("pushes_skipped_total", "Pushes that the mount skipped.", self.pushes_skipped),
            ("refusals_total", "How often the server refused the mounted version.", self.refusals),
            ("prefetch_slices_total", "Slices prefetched for sequential readers.", self.prefetch_slices),
            ("fetches_total", "Fetches of chunks, including repeated ones.", self.fetches),
            (
                "fetched_bytes_total",
                "Bytes of fetched chunks that passed the hash check.",
                self.fetched_bytes,
            ),
            ("corrupt_chunks_total", "Fetched chunks refused for wrong bytes.", self.corrupt),
            ("server_requests_total", "Requests sent to the server.", self.server_requests),
            ("server_retries_total", "Requests sent to the server again.", self.server_retries),
            (
                "server_failovers_total",
                "Requests that another server answered than the first one asked.",
                self.server_failovers,
            ),
            ("server_bytes_total", "Bytes received from the server.", self.server_bytes),
            ("slab_bytes_total", "Bytes read in files of the server's disk tier.", self.slab_bytes),
            ("server_losses_total", "How often the mount lost the server.", self.server_losses),
            ("server_refused_total", "Fetches refused while the server was gone.", self.server_refused),
            ("origin_requests_total", "Requests to the origin, without the server.", self.origin_requests),
            ("origin_bytes_total", "Bytes received from the origin.", self.origin_bytes),
        ] {
            counter(opts(name, help), n)?;
        }
        for (name, help, seconds) in [
            ("read_seconds_total", "Time in which a READ was under way.", self.read_seconds),
            ("think_seconds_total", "Time between READs, without pauses.", self.think_seconds),
        ] {
            let c = Counter::with_opts(opts(name, help))?;
            c.inc_by(seconds);
            registry.register(Box::new(c))?;
        }
        let gauge = |o: Opts, n: u64| -> Result<(), prometheus::Error> {
            let g = IntGauge::with_opts(o)?;
            g.set(i64::try_from(n).unwrap_or(i64::MAX));
            registry.register(Box::new(g))
        };
        gauge(opts("memory_live_bytes", "Bytes of chunks in memory."), self.memory_live_bytes)?;
        let build = opts("build_info", "1, with the version of the mount.");
        gauge(build.const_label("version", env!("CARGO_PKG_VERSION")), 1)?;
        let away = opts("server_away", "1 while the mount reads the origin instead of the server.");
        gauge(away, u64::from(self.server_away))?;
        let gone = opts("server_gone", "1 while the server is gone and fetches are refused at once.");
        gauge(gone, u64::from(self.server_gone))?;
        if let Some(node) = &self.node {
            for (name, help, n) in [
                ("node_reads_total", "Reads that the owner of the node store answered.", node.reads),
                ("node_bytes_total", "Bytes received from the owner of the node store.", node.bytes),
                ("node_left_total", "Reads that the owner did not answer.", node.left),
                ("node_losses_total", "How often the mount lost its owner.", node.losses),
                ("disk_quarantined_total", "Damaged chunks found on disk.", node.quarantined),
            ] {
                counter(opts(name, help), n)?;
            }
            for (tier, n) in &node.sent {
                let o = opts("node_sent_bytes_total", "Bytes sent to node clients, by tier.");
                counter(o.const_label("tier", *tier), *n)?;
            }
            for role in ["direct", "owner", "client"] {
                let o = opts("node_role", "1 for this mount's role in the node store.");
                gauge(o.const_label("role", role), u64::from(node.role == role))?;
            }
            for (name, help, n) in [
                ("disk_chunks", "Chunks on disk.", node.chunks),
                ("disk_slab_bytes", "Bytes of slab files, which count against the limit.", node.slab_bytes),
                ("disk_limit_bytes", "The most bytes that the store may take on disk.", node.limit_bytes),
                (
                    "disk_append_queue_bytes",
                    "Bytes of chunks that wait for their append to disk.",
                    node.queued_bytes,
                ),
            ] {
                gauge(opts(name, help), n)?;
            }
        }
        if let Some(is_set) = self.node_label {
            let set = opts("node_label", "Whether this process has set the node's label.");
            gauge(set, u64::from(is_set))?;
        }
        let one = [(self.dataset.clone(), self.root.clone())];
        for (dataset, root) in self.datasets.as_ref().map_or(&one[..], |d| &d.mounted) {
            let info = opts("info", "A mounted version; always 1.")
                .const_label("dataset", dataset)
                .const_label("train_job", &self.job)
                .const_label("root", root);
            gauge(info, 1)?;
        }
        if let Some(datasets) = &self.datasets {
            for (state, n) in [
                ("linked", datasets.linked),
                ("over_limit", datasets.over_limit),
                ("failed", datasets.failed),
            ] {
                let o = opts("datasets", "Names of datasets and tags, by state.");
                gauge(o.const_label("state", state), n)?;
            }
            let mounted = opts("versions_mounted", "Versions that are mounted now.");
            gauge(mounted, datasets.mounted.len() as u64)?;
            gauge(opts("versions_max", "The most versions mounted at once."), datasets.mounts_max)?;
            for (result, n) in [("ok", datasets.passes), ("error", datasets.passes_failed)] {
                let o = opts("passes_total", "Looks at the server's datasets, by result.");
                counter(o.const_label("result", result), n)?;
            }
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&registry.gather(), &mut text)?;
        Ok(text)
    }
}

/// Returns the counts of requests of hit connections by their result.
#[must_use]
pub fn hit_requests(stats: HitStats) -> BTreeMap<&'static str, u64> {
    BTreeMap::from([("here", stats.here), ("not_here", stats.not_here), ("failed", stats.failed)])
}

/// Returns the counts of faults by their word.
#[must_use]
pub fn faults(counts: [(Fault, u64); Fault::ALL.len()]) -> BTreeMap<&'static str, u64> {
    counts.iter().map(|(f, n)| (f.word(), *n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn text_names_every_count_once() {
        let ops = RequestCounts::default();
        ops.count(Op::Read);
        ops.count(Op::Read);
        let snapshot = Snapshot {
            job: "j".into(),
            requests: ops.counts(),
            faults: BTreeMap::from([("gone", 3)]),
            reads: 2,
            read_bytes: 10,
            read_memory_bytes: 4,
            read_fetched_bytes: 6,
            fetches: 1,
            fetched_bytes: 10,
            memory_live_bytes: 10,
            server_requests: 5,
            server_bytes: 99,
            slab_bytes: 98,
            hit_requests: hit_requests(HitStats {
                asks: 9,
                here: 8,
                not_here: 1,
                bytes: 9,
                ..Default::default()
            }),
            node_label: Some(true),
            datasets: Some(DatasetsSnapshot {
                linked: 2,
                over_limit: 4,
                mounted: vec![("d".into(), "r".into()), ("e".into(), "s".into())],
                ..DatasetsSnapshot::default()
            }),
            node: Some(NodeSnapshot {
                role: "client",
                reads: 1,
                bytes: 6,
                left: 0,
                losses: 0,
                sent: BTreeMap::from([("disk", 7)]),
                chunks: 0,
                slab_bytes: 0,
                limit_bytes: 0,
                queued_bytes: 0,
                quarantined: 0,
            }),
            ..Snapshot::default()
        };
        let text = String::from_utf8(snapshot.prometheus().expect("well-formed")).expect("text");
        for line in [
            "fletch_mount_requests_total{op=\"read\"} 2",
            "fletch_mount_faults_total{fault=\"gone\"} 3",
            "fletch_mount_read_bytes_total 10",
            "fletch_mount_hit_requests_total{result=\"here\"} 8",
            "fletch_mount_hit_requests_total{result=\"failed\"} 0",
            "fletch_mount_node_role{role=\"client\"} 1",
            "fletch_mount_node_sent_bytes_total{tier=\"disk\"} 7",
            "fletch_mount_info{dataset=\"d\",root=\"r\",train_job=\"j\"} 1",
            "fletch_mount_info{dataset=\"e\",root=\"s\",train_job=\"j\"} 1",
            "fletch_mount_datasets{state=\"over_limit\"} 4",
            "fletch_mount_versions_mounted 2",
            "fletch_mount_node_label 1",
        ] {
            assert_eq!(text.matches(line).count(), 1, "{line}\n{text}");
        }
        let served: BTreeSet<&str> =
            text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/METRICS.md");
        let docs = std::fs::read_to_string(docs).expect("docs/METRICS.md");
        let documented: BTreeSet<&str> = docs
            .lines()
            .filter_map(|l| l.strip_prefix("| ")?.split_once(" | `")?.1.split(['`', '{']).next())
            .filter(|name| name.starts_with("fletch_mount_"))
            .collect();
        assert_eq!(served, documented);
    }
}
