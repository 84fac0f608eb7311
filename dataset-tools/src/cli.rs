//! The command line of `fletch`.

use crate::index::walk::Symlinks;
use crate::progress::Mode;
use crate::target::{Select, Target};
use clap::{Args, Parser, Subcommand, ValueEnum};
use fletch_core::{DatasetName, TagName};
use fletch_settings::ByteSize;
use fletch_settings::Span;
use fletch_sim::cli::SimulateArgs;
use std::path::PathBuf;

const AFTER: &str = "\
Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 done in part, 4 unreachable, 5 denied, 130 stopped by Ctrl-C.
With --json a result is one JSON document on stdout; a failure is {\"error\": {code, message, hint}} \
(and \"faults\": [{path, why}] where entries are at fault). ConsumptionLog, progress and errors go to stderr.";

/// Index datasets, look into their versions, and talk to a Fletch server.
#[derive(Debug, Parser)]
#[command(name = "fletch", version, after_help = AFTER, max_term_width = 100)]
pub struct Cli {
    /// For every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// For every command.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Print results as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// No notes and no progress; errors and warnings are still printed.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// How progress is shown: a bar on a terminal, a line every few seconds otherwise.
    #[arg(long, global = true, value_enum, default_value_t = Mode::Auto)]
    pub progress: Mode,
    /// A settings file with [[origin]] tables, needed for s3:// URIs.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_CONFIG")]
    pub config: Option<PathBuf>,
    /// The server, http://HOST:PORT or unix:PATH. With it, a target without a slash is a registered name.
    #[arg(long, global = true, value_name = "URL", env = "FLETCH_SERVER")]
    pub server: Option<String>,
    /// The bearer token for the server. Others see command lines: a file or the variable is better.
    #[arg(long, global = true, value_name = "TOKEN", env = "FLETCH_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// A file with the bearer token.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// When the server is gone, look into what it said last, at the origin itself. That is kept in
    /// FLETCH_STATE_DIR [default: /var/lib/fletch as root, else ~/.local/state/fletch].
    #[arg(long, global = true, env = "FLETCH_ORIGIN_FALLBACK")]
    pub origin_fallback: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Read a dataset once and write the tables of the version it is.
    #[command(after_help = "Examples:
  fletch index /data/imagenet
  fletch index /mnt/readonly/set --to /scratch/tables --tag 2026-11 --threads 8
  fletch index s3://bucket/set --config fletch.toml --parent auto --skip-failed

Prints the root on stdout. --json prints {root, layout, tag, uri, tables, entries, samples, bytes,
files_read, bytes_read, files_reused, bytes_reused, seconds, skipped: [{path, why}]}.
A run that was stopped goes on where it was when the same command is given again.")]
    Index(IndexArgs),
    /// Group a dataset's small files into chunks of a few MiB, each written as one object.
    #[command(after_help = "Examples:
  fletch pack /data/imagenet
  fletch pack s3://bucket/set --to s3://packs/set --config fletch.toml --parent auto
  fletch pack /data/imagenet --parent 2026-10 --compact --tag 2026-11

Prints the root on stdout, the same that `index` prints; an index layout is written beside the pack. Files over
4 MiB stay where they are. --json prints {root, layout, index_layout, tag, uri, tables, entries, samples, bytes,
chunks_written, chunk_bytes_written, chunks_found, kept: {chunks, bytes, samples, samples_outside}|null, files_read, bytes_read,
files_reused, bytes_reused, seconds, skipped: [{path, why}]}.
A run that was stopped goes on where it was when the same command is given again.")]
    Pack(PackArgs),
    /// List a directory of a version.
    #[command(after_help = "Examples:
  fletch ls /data/imagenet
  fletch ls /data/imagenet@2026-11 train/n01440764
  fletch ls imagenet --server http://127.0.0.1:7380

--json prints {root, path, children: [{name, kind: dir|file|symlink, size}], count}.")]
    Ls {
        /// NAME|URI[@TAG|@ROOT]; `latest` unless a tag is given.
        target: Target,
        /// A directory of the version.
        #[arg(default_value = "")]
        path: String,
        /// Kind and size before each name.
        #[arg(long, short)]
        long: bool,
    },
    /// Show what a version, or one entry of it, is.
    #[command(after_help = "Examples:
  fletch show /data/imagenet
  fletch show /data/imagenet@2026-11 train/n01440764/n01440764_10026.JPEG

--json prints {base, root, layout, entries, samples, bytes, created, tool, sample_rule, parts, chunks,
layout_kind: index|pack, slice_bytes, group_bytes, origin, indexed_at_ns, skipped}; for an entry {root, path, ordinal, kind, size, blake3, target,
sample: {kind, key}, slices: [{chunk, chunk_offset, length}]}.")]
    Show {
        /// NAME|URI[@TAG|@ROOT]; `latest` unless a tag is given.
        target: Target,
        /// An entry of the version.
        path: Option<String>,
    },
    /// Show what changed from one version to another.
    #[command(after_help = "Examples:
  fletch diff /data/imagenet@2026-10 /data/imagenet@2026-11
  fletch diff /data/imagenet@2026-10 /copies/imagenet --json

A line each: `+` added, `-` removed, `~` changed. --json prints {a, b, changes: [{change: added|removed|changed,
path, what: [kind|size|content|target|sample], a: {kind, size, blake3, target}, b: {…}}],
summary: {added, removed, changed}}.")]
    Diff {
        /// The earlier version: NAME|URI[@TAG|@ROOT].
        a: Target,
        /// The later version: NAME|URI[@TAG|@ROOT].
        b: Target,
    },
    /// List, show, move or delete tags.
    #[command(after_help = "Examples:
  fletch tag /data/imagenet
  fletch tag /data/imagenet stable latest
  fletch tag /data/imagenet old --delete

--json prints {uri, tags: [{tag, root, layout, created}]} (after a change: the tag that was changed).")]
    Tag {
        /// The place of the tables.
        uri: String,
        /// The tag to show, move or delete; all are listed without it.
        tag: Option<TagName>,
        /// What it shall name: a root, or another tag.
        to: Option<Select>,
        /// Delete it. The version stays.
        #[arg(long, conflicts_with = "to", requires = "tag")]
        delete: bool,
    },
    /// Read and hash every object of a version again, and report everything that differs.
    #[command(after_help = "Examples:
  fletch verify /data/imagenet
  fletch verify /scratch/tables@2026-11 --json

Exit code 0: everything is as indexed. 3: the version can be used but something differs.
1: the tables themselves are damaged. --json prints {root, layout, faults: [{path, fault: missing|changed|corrupt|extra|unreadable|tables,
why}], summary: {faults, entries, bytes_read}}.")]
    Verify {
        /// NAME|URI[@TAG|@ROOT]; `latest` unless a tag is given.
        target: Target,
        /// Objects read at once.
        #[arg(long, value_name = "N")]
        threads: Option<usize>,
    },
    /// Register a dataset with the server.
    #[command(after_help = "Examples:
  fletch register imagenet /data/imagenet --server http://127.0.0.1:7380
  fletch register imagenet s3://bucket/imagenet --tables s3://tables/imagenet --server unix:/run/fletch/server.sock

--json prints {name, uri, tables, registered_ns}.")]
    Register {
        /// The name to give it.
        name: DatasetName,
        /// Where its objects are.
        uri: String,
        /// Where its tables are, if elsewhere (what --to named).
        #[arg(long, value_name = "URI")]
        tables: Option<String>,
    },
    /// Remove a dataset from the server. Its objects and tables stay.
    #[command(after_help = "Example:
  fletch unregister imagenet --server http://127.0.0.1:7380

--json prints {name}.")]
    Unregister {
        /// Its name.
        name: DatasetName,
    },
    /// Bring a version's chunks to the server's disk, or check that they are there.
    #[command(after_help = "Examples:
  fletch warmup imagenet --wait
  fletch warmup imagenet@2026-11 --pin 8h
  fletch warmup imagenet --check

The server does it: with --wait Ctrl-C ends the waiting, and the warm-up goes on unless --cancel is given. Running it
again brings only what is missing. --check reads and hashes what is kept, brings nothing, and always waits.

Exit code 0: begun; with --wait or --check, every chunk is there. 3: not every chunk is. 1: it failed.
--json prints the warm-up: {id, dataset, root, layout, check, state, total: {chunks, bytes}, looked_at, present, fetched,
refused, failed, damaged, missing, bytes_per_s, eta_s, started_ns, ended_ns, pinned_until_ns, error}.")]
    Warmup(WarmupArgs),
    /// Evict a dataset's chunks from the server's disk.
    #[command(after_help = "Example:
  fletch evict imagenet

Ends the dataset's warm-ups and what they protect. --json prints {name, chunks}.")]
    Evict {
        /// Its name.
        name: DatasetName,
    },
    /// List the server's datasets.
    #[command(after_help = "Example:
  fletch datasets --server http://127.0.0.1:7380

--json prints {datasets: [{name, uri, tables, registered_ns}]}.")]
    Datasets,
    /// Show the server: version, members, datasets, and bytes delivered.
    #[command(after_help = "Example:
  fletch status --server http://127.0.0.1:7380

--json prints {info, cluster, datasets: […], accounts: {accounts: [{domain, tenant, job, root, result, tier, bytes}],
table_bytes}}.")]
    Status,
    /// Epochs' receipts: show one, or check what consumers wrote down against it.
    #[command(after_help = "Examples:
  fletch receipt show train-7 3 --server http://127.0.0.1:7380
  fletch receipt verify --help")]
    Receipt {
        /// What to do.
        #[command(subcommand)]
        what: ReceiptCommand,
    },
    /// Play jobs, caches and origins in virtual time: how much would be fetched, and who would wait.
    #[command(after_help = "Examples:
  fletch simulate
  fletch simulate --case four-jobs.toml --arm fletch --arm lru --arm pin --json
  fletch simulate rows --only '4 equal' --bandwidth 1.2 --latency 10 --leased 128 --ahead 64
  fletch simulate --play epoch.trace

Needs no server and no data. How a case is written, and how a real run is compared with it: docs/SIMULATE.md.
--json prints {format, major, minor, outcomes: [{case, arm, cache, ratio, bound, simple, ranged, near, near10, run_max, fresh,
peak, stalled, epoch_seconds, delivered, vain, failed}], summary: {runs, seconds}}; with --play {calls, picks, cut}.")]
    Simulate(SimulateArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:
  fletch completions bash > ~/.local/share/bash-completion/completions/fletch")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// `fletch receipt`.
#[derive(Debug, Subcommand)]
pub enum ReceiptCommand {
    /// Show the receipt of a finished epoch.
    #[command(after_help = "Example:
  fletch receipt show train-7 3 --server http://127.0.0.1:7380 --json > epoch-3.receipt

--json prints what the server answers, {receipt, certificate}; `verify --receipt` takes it.")]
    Show {
        /// The job's name or id.
        job: String,
        /// Which epoch.
        epoch: u64,
    },
    /// Check that what consumers wrote down is exactly what the plan of the epoch says.
    #[command(after_help = "Examples:
  fletch receipt verify rank-0.notes rank-1.notes --job train-7 --epoch 3 --server http://127.0.0.1:7380
  fletch receipt verify rank-*.notes --receipt epoch-3.receipt
  fletch receipt verify rank-*.notes --receipt epoch-3.receipt --ledger epoch-3.ledger --dataset /data/photos@v3

Files are those of docs/FORMATS-epochs.md, \"ConsumptionLog\", of all ranks. Exit code 0: they agree. 1: they differ, and each
dropped, doubled or altered sample is named, as far as ledger and version are at hand (a server has both).
--json prints {agrees, root, epoch, deliveries, left_out, receipt: {delivered, redelivered, dropped, padded}, differs: [{what:
doubled|altered|unknown|missing|count|value, path, ordinal, why}], more}.")]
    Verify {
        /// What consumers wrote down.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// What it is held against.
        #[command(flatten)]
        proof: Proof,
    },
}

/// What notes are held against.
#[derive(Debug, Args)]
pub struct Proof {
    /// The job's name or id, asked of the server.
    #[arg(long, requires = "epoch")]
    pub job: Option<String>,
    /// Which epoch of the job.
    #[arg(long, requires = "job")]
    pub epoch: Option<u64>,
    /// A saved receipt, instead of the server's.
    #[arg(long, value_name = "FILE", conflicts_with = "job")]
    pub receipt: Option<PathBuf>,
    /// The epoch's ledger, saved: what it does not have as acknowledged does not count.
    #[arg(long, value_name = "FILE", requires = "receipt")]
    pub ledger: Option<PathBuf>,
    /// The version that was read, NAME|URI[@TAG|@ROOT], to name what differs by its path.
    #[arg(long, value_name = "DATASET", requires = "receipt")]
    pub dataset: Option<Target>,
}

/// `fletch warmup`.
#[derive(Debug, Args)]
pub struct WarmupArgs {
    /// NAME[@TAG|@ROOT]; `latest` unless a tag is given.
    pub target: Target,
    /// Only look: read and hash what is kept, and bring nothing.
    #[arg(long)]
    pub check: bool,
    /// Wait until it is over.
    #[arg(long)]
    pub wait: bool,
    /// How long the chunks are protected from eviction afterwards, at most a week [default: 1h].
    #[arg(long, value_name = "TIME", conflicts_with = "check")]
    pub pin: Option<Span>,
    /// On Ctrl-C cancel the warm-up too.
    #[arg(long)]
    pub cancel: bool,
}

/// `fletch index`.
#[derive(Debug, Args)]
pub struct IndexArgs {
    /// The dataset: a directory or a URI.
    pub uri: String,
    /// Where the tables go (below `fletch/` there); needed when the dataset cannot be written.
    #[arg(long, value_name = "URI")]
    pub to: Option<String>,
    /// The names of the objects, one path or URI below the dataset on each line, instead of the
    /// store's listing; a plain HTTP server needs it.
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// Do not read again what this version knows: a root, a tag, or `auto` (`latest`, if there is one).
    #[arg(long, value_name = "ROOT|TAG|auto")]
    pub parent: Option<String>,
    /// The tag to move.
    #[arg(long, value_name = "TAG", default_value = "latest")]
    pub tag: TagName,
    /// Move no tag.
    #[arg(long, conflicts_with = "tag")]
    pub no_tag: bool,
    /// Which entries are samples (may be repeated; all files unless given). `*` stops at `/`, `**` does not.
    #[arg(long, value_name = "GLOB")]
    pub samples: Vec<String>,
    /// What a sample is: one file, or all files that agree up to the first dot of their name. Unless
    /// given, `stem` where there is a tar shard among the first 1,000 files, else `file`.
    #[arg(long, value_enum)]
    pub sample_rule: Option<RuleArg>,
    /// What becomes of symbolic links.
    #[arg(long, value_enum, default_value_t = Symlinks::Keep)]
    pub symlinks: Symlinks,
    /// Report all entries that cannot be indexed instead of the first, and write nothing.
    #[arg(long)]
    pub keep_going: bool,
    /// Leave out entries that cannot be indexed, list them in the manifest, and exit with 3.
    #[arg(long, conflicts_with = "keep_going")]
    pub skip_failed: bool,
    /// Reader threads; as many as there are cores unless given.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Where to remember what was read, and for temporary tables.
    #[arg(long, value_name = "DIR", env = "FLETCH_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
}

/// `fletch pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// What both commands take.
    #[command(flatten)]
    pub index: IndexArgs,
    /// Group anew whatever lies outside the canonical grouping, however little it is.
    #[arg(long, requires = "parent")]
    pub compact: bool,
    /// The largest group of files; who changes it shares no chunk with anybody.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub chunk_size: Option<ByteSize>,
}

/// What a sample is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuleArg {
    /// One file.
    File,
    /// WebDataset's rule.
    Stem,
}
