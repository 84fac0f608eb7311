//! The command line of `fletch`: its commands, their options and their `--help` texts.

use crate::cmd::doctor::args::DoctorArgs;
use crate::progress::Mode;
use crate::run::loss::Share;
use crate::target::{DatasetArg, Select, Target};
use clap::{ArgAction, Args, Parser, Subcommand};
use fletch_client::TlsOptions;
use fletch_core::{DatasetName, TagName};
use fletch_settings::Span;
use fletch_sim::cli::SimulateArgs;
use std::path::PathBuf;

mod cluster;
pub mod help;
mod index;
mod jobs;
mod receipt;
mod s3;
pub mod words;

pub use cluster::ClusterCommand;
pub use index::{IndexArgs, PackArgs, RuleArg};
pub use jobs::{JobsCommand, OrDefault};
pub use receipt::{Proof, ReceiptCommand};
pub use s3::S3Command;

const AFTER: &str = "\
Example:
  fletch mount s3://bucket/photos /mnt/photos

Global options, for every command:
  --server URL[,URL]  http(s)://HOST:PORT or unix:PATH [env: FLETCH_SERVER; default: a local one]
  --token-file FILE   Its token [env: FLETCH_TOKEN_FILE]; TLS: --ca-file, --cert-file, --key-file
  --config FILE       Settings with [[origin]] tables [env: FLETCH_CONFIG]; --json: print JSON
  -q/--quiet          No notes; --progress auto|bar|plain|none; --origin-fallback: no server needed
Exit codes: 0 ok, 1 failed, 2 misused, 3 in part, 4 unreachable, 5 denied, 6 disk full, 130 Ctrl-C.";

/// Index and pack datasets, show their versions, and call a Fletch server.
#[derive(Debug, Parser)]
#[command(name = "fletch", version, after_help = AFTER, max_term_width = 100)]
#[command(disable_help_flag = true, disable_help_subcommand = true)]
pub struct Cli {
    /// The options of every command.
    #[command(flatten)]
    pub global: Global,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options (all: fletch --help)")]
pub struct Global {
    /// The server: http(s)://HOST:PORT[,URL] or unix:PATH [env: FLETCH_SERVER].
    #[arg(long, global = true, value_name = "URL", env = "FLETCH_SERVER", hide_env = true)]
    pub server: Option<String>,
    /// Settings with [[origin]] tables [env: FLETCH_CONFIG].
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_CONFIG", hide_env = true)]
    pub config: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print no notes and no progress.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// How to show progress. `auto` is a bar on a terminal, otherwise a line every few seconds.
    #[arg(long, global = true, value_enum, default_value_t = Mode::Auto, hide = true)]
    pub progress: Mode,
    /// The bearer token for the server. Prefer a file or the variable: other users can see command lines.
    #[arg(long, global = true, value_name = "TOKEN", env = "FLETCH_TOKEN", hide = true)]
    pub token: Option<String>,
    /// A file with the bearer token.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_TOKEN_FILE", hide = true)]
    pub token_file: Option<PathBuf>,
    /// The CAs that may have signed the certificate of an https:// server, in PEM form.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_CA_FILE", hide = true)]
    pub ca_file: Option<PathBuf>,
    /// The certificate of this client in PEM form, if the server requires one.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_CERT_FILE", hide = true)]
    pub cert_file: Option<PathBuf>,
    /// The key of that certificate in PEM form.
    #[arg(long, global = true, value_name = "FILE", env = "FLETCH_KEY_FILE", hide = true)]
    pub key_file: Option<PathBuf>,
    /// When the server is gone, read the version that it named last from the origin. FLETCH_STATE_DIR keeps
    /// these versions [default: /var/lib/fletch as root, else ~/.local/state/fletch].
    #[arg(long, global = true, env = "FLETCH_ORIGIN_FALLBACK", hide = true)]
    pub origin_fallback: bool,
    /// Print this help.
    #[arg(long, short, global = true, action = ArgAction::HelpShort)]
    pub help: Option<bool>,
}

impl Global {
    /// Returns the files of TLS.
    #[must_use]
    pub fn tls(&self) -> TlsOptions {
        TlsOptions {
            ca_file: self.ca_file.clone(),
            cert_file: self.cert_file.clone(),
            key_file: self.key_file.clone(),
        }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show a bucket or a folder as files in a directory: one command from data to files.
    #[command(after_help = "Examples:
  fletch mount s3://bucket/photos /mnt/photos
  fletch mount /data/photos /mnt/photos --index
  fletch mount https://host/photos /mnt/photos --list names.txt
  fletch mount s3://bucket/photos /mnt/photos --pack s3://bucket/photos-packed

The first run lists the source: a file is read when a program reads it. Later runs show what was
listed or read last, and mend a mount that stopped. Starts a server of your own unless one runs,
with your credentials (AWS_*, AZURE_*, GOOGLE_*). docs/howto/mount-a-bucket.md has more.
--json prints {name, dir, source, server, files, bytes, as_of_ns, draft, already, started_server,
cache, state, logs}; with --dry-run {source, files, bytes, left_out, requests, seconds}.")]
    Mount(MountArgs),
    /// Bring what a mount shows up to date: read what is new or changed.
    #[command(after_help = "Example:
  fletch refresh photos

Reads only new and changed files. Mounts that exist show what they showed; new ones show the result.
--json prints what `fletch index --json` prints.")]
    Refresh {
        /// The name that `fletch mount` printed, or the source.
        source: DatasetArg,
        /// Leave out what cannot be read, list it, and exit with 3.
        #[arg(long)]
        skip_failed: bool,
        /// Go on if up to this share of the files is missing, such as 5% [default: 1%].
        #[arg(long, value_name = "SHARE")]
        allow_loss: Option<Share>,
    },
    /// Read what nobody has read of a draft, and make a version of it.
    #[command(after_help = "Example:
  fletch seal photos

A draft is what `fletch mount` shows of a source that nobody has read. The server reads what was not read
through it, and seals a draft by itself once all was read. Mounts that exist show what they showed; new
ones show the version. Ctrl-C stops the waiting, and the server goes on.
--json prints {dataset, draft, state, entries, bytes, entries_done, bytes_known, bytes_read, started_ns,
ended_ns, root, error}; nothing if it is no draft.")]
    Seal {
        /// The name that `fletch mount` printed, or the source.
        source: DatasetArg,
    },
    /// Start your server again, with the credentials of this terminal. Mounts that wait go on.
    #[command(
        hide = true,
        after_help = "Example:
  fletch up

`fletch mount` starts your server, and mounts start it again when it is gone. This does it by hand,
and replaces credentials that expired. Exits with 3 if some credentials cannot be read.
--json prints {started, socket, log, datasets}."
    )]
    Up,
    /// Unmount what you mounted, and stop your server. `fletch up` starts it again.
    #[command(after_help = "Example:
  fletch down

Keeps what was read, and the cache, and prints where they are.
--json prints {unmounted: [{dir, dataset}], stopped, state, cache}.")]
    Down,
    /// Read and hash every file of a dataset once, and write the tables of its version.
    #[command(after_help = "Examples:
  fletch index /data/imagenet
  fletch index s3://bucket/set --tables s3://tables/set --parent auto --tag 2026-11

Writes nothing into the dataset, unless --tables names a place in it. Prints the root on stdout.
--json prints {root, layout, tag, uri, tables, entries, samples, bytes,
files_read, bytes_read, files_reused, bytes_reused, seconds, skipped: [{path, why}]}.
To resume a stopped run, give the same command again. docs/INDEX.md has the rules.")]
    Index(IndexArgs),
    /// Group a dataset's small files into chunks of a few MiB, each written as one object.
    #[command(after_help = "Examples:
  fletch pack /data/imagenet
  fletch pack s3://bucket/set --tables s3://packs/set
  fletch pack /data/imagenet --parent 2026-10 --compact --tag 2026-11

Takes the other options of `fletch index`, too. Prints the root on stdout, as `index` does. Files over
4 MiB stay at the dataset. --json prints what `index` prints and {index_layout, chunks_written,
chunk_bytes_written, chunks_found, kept: {chunks, bytes, samples, samples_outside}|null}.
To resume a stopped run, give the same command again. docs/PACK.md has the rules.")]
    Pack(PackArgs),
    /// List a directory of a version.
    #[command(after_help = "Examples:
  fletch ls /data/imagenet
  fletch ls /data/imagenet@2026-11 train/n01440764
  fletch ls imagenet --server http://127.0.0.1:7380

--json prints {root, path, children: [{name, kind: dir|file|symlink, size}], count}.")]
    Ls {
        /// NAME|URI[@TAG|@ROOT]. The default tag is `latest`.
        target: Target,
        /// A directory of the version [default: its top].
        #[arg(default_value = "", hide_default_value = true)]
        path: String,
        /// Print kind and size before each name.
        #[arg(long, short)]
        long: bool,
        /// The place of the tables [default: the target].
        #[arg(long, value_name = "URI")]
        tables: Option<String>,
    },
    /// Describe a version, or one entry of it.
    #[command(after_help = "Examples:
  fletch show /data/imagenet
  fletch show /data/imagenet@2026-11 train/n01440764/n01440764_10026.JPEG

--json prints {base, root, layout, entries, samples, bytes, created, tool, sample_rule, parts, chunks,
layout_kind: index|pack|draft, slice_bytes, group_bytes, origin, indexed_at_ns, skipped}. For an entry
it prints {root, path, ordinal, kind, size, blake3, target, sample: {kind, key},
slices: [{chunk, chunk_offset, length}]}.")]
    Show {
        /// NAME|URI[@TAG|@ROOT]. The default tag is `latest`.
        target: Target,
        /// An entry of the version.
        path: Option<String>,
        /// The place of the tables [default: the target].
        #[arg(long, value_name = "URI")]
        tables: Option<String>,
    },
    /// Show the differences between two versions.
    #[command(after_help = "Examples:
  fletch diff /data/imagenet@2026-10 /data/imagenet@2026-11
  fletch diff /data/imagenet@2026-10 /copies/imagenet --json

Prints one line for each change: `+` added, `-` removed, `~` changed. --json prints {a, b,
changes: [{change: added|removed|changed, path, what: [kind|size|content|target|sample],
a: {kind, size, blake3, target}, b: {…}}], summary: {added, removed, changed}}.")]
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

--json prints {uri, tags: [{tag, root, layout, created}]}. After a change it prints only the changed tag.")]
    Tag {
        /// The place of the tables: the dataset, or the URI that --tables named.
        uri: DatasetArg,
        /// The tag to show, move or delete. Without a tag, list all tags.
        tag: Option<TagName>,
        /// The version that the tag will name: a root, or another tag.
        to: Option<Select>,
        /// Delete the tag. The version stays.
        #[arg(long, conflicts_with = "to", requires = "tag")]
        delete: bool,
    },
    /// Erase what is left of a file that was deleted from its dataset: in packs and caches.
    #[command(after_help = "Examples:
  fletch erase photos people/ann.jpg
  fletch erase photos people/ann.jpg --yes

Delete the file in the dataset first: Fletch changes no dataset. Prints which versions list it,
and which mounts show these. With --yes: deletes the packed chunks that hold it, brings the dataset
up to date, and has the servers drop its bytes from disk and memory. Versions before list its path
and hash until `fletch gc` deletes them. docs/INDEX.md says what it does not reach.
--json prints {dataset, path, versions, tags, mounts, packed_chunks, chunks, root, unconfirmed,
erased}.")]
    Erase {
        /// The registered name, or the source.
        source: DatasetArg,
        /// The path of the file in the dataset.
        path: String,
        /// Erase it.
        #[arg(long)]
        yes: bool,
    },
    /// Delete versions that nobody uses, and the chunks of packs that only they have.
    #[command(after_help = "Examples:
  fletch gc /data/imagenet
  fletch gc s3://bucket/set --older-than 30d --yes

Prints what would be deleted, and how much that frees. Only --yes deletes. No version goes that a
tag names, or that a mount or a job of the server, or of its cluster, uses. Deletes nothing while an
index or a pack writes there. docs/INDEX.md, \"Old versions\", has the rules.
--json prints {uri, versions: [{root, unused_since, files, bytes}], chunks, chunk_bytes,
kept_versions, bytes, deleted}.")]
    Gc {
        /// A registered name, the dataset, or the URI that --tables named.
        uri: DatasetArg,
        /// Keep versions that were replaced less long ago.
        #[arg(long, value_name = "TIME", default_value = "7d")]
        older_than: Span,
        /// Delete them.
        #[arg(long)]
        yes: bool,
    },
    /// Read and hash every object of a version again, and report the differences.
    #[command(after_help = "Examples:
  fletch verify /data/imagenet
  fletch verify /scratch/tables@2026-11 --json

Exit code 0: no differences. 3: some objects differ. 1: the tables are damaged.
--json prints {root, layout, faults: [{path, fault: missing|changed|corrupt|extra|unreadable|tables, why}],
summary: {faults, entries, bytes_read}}.")]
    Verify {
        /// NAME|URI[@TAG|@ROOT]. The default tag is `latest`.
        target: Target,
        /// Objects to read at once [default: twice the number of cores].
        #[arg(long, value_name = "N")]
        threads: Option<usize>,
        /// Look for additional files only on the file system of the dataset's top.
        #[arg(long)]
        one_file_system: bool,
        /// The place of the tables [default: the target].
        #[arg(long, value_name = "URI")]
        tables: Option<String>,
    },
    /// Register a dataset with the server.
    #[command(after_help = "Examples:
  fletch register imagenet /data/imagenet --server http://127.0.0.1:7380
  fletch register imagenet s3://bucket/set --tables s3://tables/set

Without --tables, uses the place where `index` or `pack` of this account wrote the tables of SOURCE last; a
packed layout of the same version wins. Registering again with other tables replaces the registration.
--json prints {name, uri, tables, registered_ns}.")]
    Register {
        /// The name of the dataset.
        name: DatasetName,
        /// The dataset: a directory or a URI.
        #[arg(value_name = "SOURCE")]
        uri: DatasetArg,
        /// The place of its tables.
        #[arg(long, value_name = "URI")]
        tables: Option<String>,
        /// Replace a registration of this name for another SOURCE.
        #[arg(long)]
        replace: bool,
    },
    /// Remove a dataset from the server. Its objects and tables stay.
    #[command(after_help = "Example:
  fletch unregister imagenet --server http://127.0.0.1:7380

--json prints {name}.")]
    Unregister {
        /// The name of the dataset.
        name: DatasetName,
    },
    /// Fetch all chunks of a version to the server's disk, or check the chunks on the disk.
    #[command(after_help = "Examples:
  fletch warmup imagenet --wait
  fletch warmup imagenet@2026-11 --pin 8h
  fletch warmup imagenet --check

The server does the work. With --wait, Ctrl-C ends only the waiting; with --cancel it ends the warm-up too.
A second run fetches only missing chunks. --check reads and hashes the chunks on the disk, fetches
nothing, and always waits.

Exit code 0: the warm-up has begun; with --wait or --check, every chunk is on the disk. 3: some chunks are
missing. 1: the warm-up failed. --json prints {id, dataset, root, layout, check, state,
total: {chunks, bytes}, looked_at, present, fetched, refused, failed, damaged, missing, bytes_per_s, eta_s,
started_ns, ended_ns, pinned_until_ns, error}.")]
    Warmup(WarmupArgs),
    /// Evict a dataset's chunks from the server's disk.
    #[command(after_help = "Example:
  fletch evict imagenet

Also ends the warm-ups of the dataset and their protection. --json prints {name, chunks}.")]
    Evict {
        /// The name of the dataset.
        name: DatasetName,
    },
    /// List the server's datasets.
    #[command(after_help = "Example:
  fletch datasets --server http://127.0.0.1:7380

--json prints {datasets: [{name, uri, tables, registered_ns}]}.")]
    Datasets,
    /// Show the server on one screen: its health, and what it saves. Live: `fletch top`.
    #[command(after_help = "Example:
  fletch status --server http://127.0.0.1:7380

--json prints {health: {state, reasons}, server, cluster, at_ns, info, datasets: […], jobs: […],
origins: […], accounts: {accounts: [{domain, tenant, job, root, result, tier, bytes}], table_bytes,
datasets: [{dataset, delivered_bytes, origin_bytes, avoided_bytes, …}],
jobs: [{job, dataset, hit_bytes, …, stalled_ms}]}, mounts: […], credentials: […]}.")]
    Status,
    /// List, show or delete the training jobs that the server remembers.
    #[command(after_help = "Examples:
  fletch jobs list
  fletch jobs show train-7
  fletch jobs delete train-7")]
    Jobs {
        /// The command.
        #[command(subcommand)]
        what: JobsCommand,
    },
    /// Show the servers of a cluster, compare them, or drain one.
    #[command(after_help = "Examples:
  fletch cluster status
  fletch cluster check
  fletch cluster drain srv-2")]
    Cluster {
        /// The command.
        #[command(subcommand)]
        what: ClusterCommand,
    },
    /// Print credentials for the server's S3 door, which S3 clients read without a mount.
    #[command(after_help = "Example:
  fletch s3 credentials --ttl 7d")]
    S3 {
        /// The command.
        #[command(subcommand)]
        what: S3Command,
    },
    /// Find what stops Fletch on this machine, at a server or at a dataset, and name the fix.
    #[command(after_help = "Examples:
  fletch doctor
  fletch doctor s3://bucket/set --tables s3://tables/set --server http://cache.example:7380

Prints one line a finding: severity, check, what is wrong, fix. docs/howto/doctor.md explains them.
Options are variables, too: --cache-dir is FLETCH_CACHE_DIR.
Exit code 0: healthy. 3: warnings only. 1: an error. --json prints {checks: [name],
findings: [{check, severity: error|warning|note, what, fix}]}.")]
    Doctor(DoctorArgs),
    /// Show what `status` shows, live.
    #[command(
        hide = true,
        after_help = "Examples:
  fletch top
  fletch top --once --json

On a terminal the screen is drawn again every interval; elsewhere each sample is printed below the last one.
Ctrl-C ends it. --json prints for each sample what `fletch status --json` prints."
    )]
    Top {
        /// Print one sample and exit.
        #[arg(long)]
        once: bool,
        /// The time between two samples.
        #[arg(long, value_name = "TIME", default_value = "2s")]
        interval: Span,
    },
    /// Show the receipt of an epoch, or check consumption logs against it.
    #[command(after_help = "Examples:
  fletch receipt show train-7 3 --server http://127.0.0.1:7380
  fletch receipt verify --help")]
    Receipt {
        /// The command.
        #[command(subcommand)]
        what: ReceiptCommand,
    },
    /// Simulate jobs, caches and origins in virtual time: bytes fetched and time waited.
    #[command(after_help = "Examples:
  fletch simulate --case four-jobs.toml --arm fletch --arm lru --arm pin --json
  fletch simulate cluster --only 'scarce link' --seeds 2
  fletch simulate --play epoch.trace

Needs no server and no data. docs/SIMULATE.md describes cases, output, and comparing a real run.")]
    Simulate(SimulateArgs),
    /// Print a completion script for a shell.
    #[command(
        hide = true,
        after_help = "Example:
  fletch completions bash > ~/.local/share/bash-completion/completions/fletch"
    )]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// Returns the notes about arguments that can be read in two ways.
    #[must_use]
    pub fn notes(&self) -> Vec<&str> {
        let notes: Vec<&Option<String>> = match self {
            Command::Mount(args) => vec![&args.source.note],
            Command::Refresh { source, .. } | Command::Seal { source } | Command::Erase { source, .. } => {
                vec![&source.note]
            }
            Command::Index(args) => vec![&args.uri.note],
            Command::Pack(args) => vec![&args.index.uri.note],
            Command::Ls { target, .. } | Command::Show { target, .. } | Command::Verify { target, .. } => {
                vec![&target.note]
            }
            Command::Diff { a, b } => vec![&a.note, &b.note],
            Command::Tag { uri, .. } | Command::Gc { uri, .. } | Command::Register { uri, .. } => {
                vec![&uri.note]
            }
            Command::Warmup(args) => vec![&args.target.note],
            Command::Receipt { what: ReceiptCommand::Verify { proof, .. } } => {
                proof.dataset.iter().map(|target| &target.note).collect()
            }
            _ => Vec::new(),
        };
        notes.into_iter().flatten().map(String::as_str).collect()
    }
}

/// `fletch mount`.
#[derive(Debug, Args)]
pub struct MountArgs {
    /// A folder, s3://…, az://…, gs://…, https://… (with --list), or a registered name.
    pub source: Target,
    /// The directory where the files appear. It is created if it does not exist.
    pub dir: PathBuf,
    /// First read what is new or changed.
    #[arg(long)]
    pub refresh: bool,
    /// First read everything, to know every file by its checksum.
    #[arg(long)]
    pub index: bool,
    /// Copy small files into large pieces, at URI, and read those.
    #[arg(long, value_name = "URI", num_args = 0..=1)]
    pub pack: Option<Option<String>>,
    /// The name of the dataset [default: from SOURCE].
    #[arg(long)]
    pub name: Option<DatasetName>,
    /// Names of the objects, one on each line, for a server without a listing.
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// Leave out what cannot be read, and list it.
    #[arg(long)]
    pub skip_failed: bool,
    /// Go on if up to this share of the files is missing, such as 5% [default: 1%].
    #[arg(long, value_name = "SHARE")]
    pub allow_loss: Option<Share>,
    /// Mount over a directory that has files, and hide them meanwhile.
    #[arg(long)]
    pub allow_non_empty: bool,
    /// Stay in the foreground until the mount ends.
    #[arg(long)]
    pub foreground: bool,
    /// Only say how many files and bytes there are.
    #[arg(long, conflicts_with_all = ["refresh", "index", "pack"])]
    pub dry_run: bool,
}

/// `fletch warmup`.
#[derive(Debug, Args)]
pub struct WarmupArgs {
    /// NAME|SOURCE[@TAG|@ROOT] of a registered dataset. The default tag is `latest`.
    pub target: Target,
    /// Only read and hash the chunks on the disk. Fetch nothing.
    #[arg(long)]
    pub check: bool,
    /// Wait for the end of the warm-up.
    #[arg(long)]
    pub wait: bool,
    /// How long to protect the chunks from eviction afterwards, at most a week [default: 1h].
    #[arg(long, value_name = "TIME", conflicts_with = "check")]
    pub pin: Option<Span>,
    /// On Ctrl-C, cancel the warm-up too.
    #[arg(long)]
    pub cancel: bool,
}
