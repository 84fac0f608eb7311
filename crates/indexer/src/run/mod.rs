//! One run of `fletch index` or `fletch pack`: everything that the two commands share.
//!
//! Owns the options and the report of a run, the checks before it, its state directory (lock, journals,
//! scratch files), the parent version, the faults, and the publishing of tables.
//!
//! Never reads a file of the dataset. [`crate::source`] reads files; [`crate::index`] and [`crate::pack`]
//! decide in which order.

pub mod faults;
pub mod file_record;
pub mod groups;
pub mod journal;
pub mod learned;
pub mod loss;
pub mod mark;
pub mod options;
pub mod parent;
pub mod publish;
pub mod renewed;
pub mod state;
pub mod written;

use crate::failure::{Exit, Failure};
use crate::meanings::{self, Folder};
use crate::out::Out;
use crate::progress::{Late, Progress, Total, of_names, of_work};
use crate::source::outage::BaseDir;
use crate::source::sampler::Sampler;
use crate::source::walk::{NAMES_BYTES_MAX, WalkOptions, reserved_extras};
use crate::tables_location::{TablesLocation, in_the_way};
use fletch_core::manifest::LayoutKind;
use fletch_origin::{Origin, Origins};
use fletch_tables::{Fault, Provenance, TagDoc, WrittenVersion};
use loss::Loss;
use options::{RunOptions, RunReport};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use written::WrittenTables;

/// What a run uses and does not own.
#[derive(Clone, Copy)]
pub struct RunContext<'a> {
    /// Opens origins, with the configured credentials.
    pub origins: &'a Origins,
    /// The runtime on which the run waits for origins.
    pub rt: &'a Handle,
    /// Where notes and warnings go.
    pub out: Out,
    /// Set by Ctrl-C: the run ends as soon as it can.
    pub stop: &'a AtomicBool,
    /// The numbers of the run, which others may read while it goes on.
    pub counters: &'a Arc<Counters>,
}

/// The numbers of a run so far. The progress display reads them while the run goes on.
#[derive(Debug, Default)]
pub struct Counters {
    /// Entries written to the tables.
    pub entries: AtomicU64,
    /// Files whose bytes were read.
    pub files_read: AtomicU64,
    pub bytes_read: AtomicU64,
    /// Files taken from the parent or from a journal without reading them.
    pub files_reused: AtomicU64,
    /// Bytes of the reused files.
    pub bytes_reused: AtomicU64,
}

impl Counters {
    /// Counts files that the run does not have to read.
    pub fn reuse(&self, files: u64, bytes: u64) {
        self.files_reused.fetch_add(files, Relaxed);
        self.bytes_reused.fetch_add(bytes, Relaxed);
    }

    /// Begins to count anew: the run starts again, and reuses what was read.
    pub fn restart(&self) {
        let Counters { entries, files_read, bytes_read, files_reused, bytes_reused } = self;
        for counter in [entries, files_read, bytes_read, files_reused, bytes_reused] {
            counter.store(0, Relaxed);
        }
    }

    /// Counts a file that was read to its end.
    pub fn read(&self, bytes: u64) {
        self.files_read.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(bytes, Relaxed);
    }
}

/// A run whose options were checked: its dataset and its tables location are open.
pub struct Run<'a> {
    /// What was asked for.
    pub options: &'a RunOptions,
    /// What the run uses.
    pub ctx: RunContext<'a>,
    /// Where the dataset is.
    pub source: Origin,
    /// Where the tables go.
    pub tables: TablesLocation,
    /// The dataset's directory with all links resolved; `None` for a dataset in a store.
    pub base: Option<BaseDir>,
    /// What tells the dataset's directory from another one at its path; `None` for a dataset in a store.
    pub folder: Option<Folder>,
    /// When the run began, nanoseconds since 1970.
    pub started_ns: u64,
    began: Instant,
}

impl<'a> Run<'a> {
    /// Opens the dataset and the tables location, and checks that tables can be written there.
    ///
    /// # Errors
    /// [`Failure`] when either cannot be opened, or the location is a directory that cannot be written.
    pub fn open(options: &'a RunOptions, ctx: RunContext<'a>) -> Result<Self, Failure> {
        let tables = TablesLocation::open(ctx.origins, &options.to)?;
        let base = options.uri.as_local().map(dataset_dir).transpose()?;
        let source = ctx.origins.open(&options.uri)?;
        let folder = match options.uri.as_local() {
            Some(dir) => Some(Folder::at(dir).map_err(|e| Failure::io(dir.display(), &e))?),
            None => None,
        };
        if let Some(to) = options.to.as_local() {
            check_writable(to, options.to == options.uri)?;
        }
        let (began, started_ns) = (Instant::now(), now_ns());
        Ok(Run { options, ctx, source, tables, base, folder, started_ns, began })
    }

    /// Whether the dataset is a directory of this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.base.is_some()
    }

    /// What marks the samples.
    ///
    /// # Errors
    /// A usage [`Failure`] when a glob of `--samples` is invalid.
    pub fn sampler(&self) -> Result<Sampler, Failure> {
        Sampler::new(&self.options.rule, &self.options.shard_dirs)
    }

    /// Notes a directory of another file system that is not walked.
    pub fn note_other_file_system(&self, path: &str) {
        self.ctx.out.note(format_args!(
            "not part of the version: the content of {path}/, on another file system (--one-file-system)"
        ));
    }

    /// Notes that a run begins anew, because keys came out of order.
    pub fn note_unsorted(&self) {
        self.ctx.out.note(
            "the store does not list its keys in byte order, or has many empty objects: all keys are listed \
             again and sorted first",
        );
    }

    /// How to walk the dataset's directory. Warns of everything in it that is not walked.
    pub fn walk_options(&self, base: &Path) -> WalkOptions {
        let out = self.ctx.out;
        match reserved_extras(base, self.options.symlinks) {
            Ok(extras) => extras.iter().for_each(|(path, why)| {
                out.warn(format_args!(
                    "{path} is not part of the version: it is {why}, and fletch/ is reserved for Fletch"
                ));
            }),
            Err(e) => out.warn(format_args!(
                "fletch/ is not part of the version: the name is reserved for Fletch; it cannot be read: {e}"
            )),
        }
        let to = self.options.to.as_local().filter(|_| self.options.to != self.options.uri);
        let mut exclude = BTreeSet::from(["fletch".to_owned()]);
        let state_dir = Some(self.options.state_dir.as_path());
        for (dir, why) in [(to, "the tables go there"), (state_dir, "it is the state directory")] {
            let Some(dir) = dir else { continue };
            let real = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
            if let Ok(rel) = real.strip_prefix(base)
                && let Some(rel) = rel.to_str().filter(|r| !r.is_empty())
            {
                self.ctx.out.note(format_args!("not part of the version: {rel}/ ({why})"));
                exclude.insert(rel.to_owned());
            }
        }
        WalkOptions {
            base: base.to_owned(),
            symlinks: self.options.symlinks,
            exclude,
            one_file_system: self.options.one_file_system,
            names_bytes_max: NAMES_BYTES_MAX,
        }
    }

    /// Prefixes below the dataset in a store that are not listed: the tables location, if it lies there.
    #[must_use]
    pub fn excluded_prefixes(&self) -> BTreeSet<String> {
        let (uri, to) = (format!("{}/", self.options.uri), self.options.to.to_string());
        to.strip_prefix(&uri).map(str::to_owned).into_iter().collect()
    }

    /// Starts the progress display.
    #[must_use]
    pub fn progress(&self, verb: &'static str, total: Arc<Total>, late: Option<Late>) -> Progress {
        let c = Arc::clone(self.ctx.counters);
        let line = match self.options.draft {
            Some(_) => {
                let (origins, before) = (self.ctx.origins.clone(), self.ctx.origins.stats().store_requests);
                let is_local = self.is_local();
                of_names(Arc::new(move || {
                    let requests = (!is_local).then(|| origins.stats().store_requests - before);
                    (c.entries.load(Relaxed), requests)
                }))
            }
            None => of_work(
                Arc::new(move || {
                    let files = c.files_read.load(Relaxed) + c.files_reused.load(Relaxed);
                    (files, c.bytes_read.load(Relaxed) + c.bytes_reused.load(Relaxed))
                }),
                total,
            ),
        };
        Progress::start(self.ctx.out, self.options.progress, verb, line, late)
    }

    /// What the manifest says of the run that made the version.
    #[must_use]
    pub fn created(&self, faults: Vec<Fault>) -> Provenance {
        let (options, at) = (self.options, self.started_ns);
        Provenance {
            created_unix_ns: at,
            indexed_at_ns: at,
            tool: format!("fletch {}", env!("CARGO_PKG_VERSION")),
            origin: (options.to != options.uri).then(|| options.uri.to_string()),
            faults,
        }
    }

    /// Moves the tag of the options, if they name one, to what was written, and remembers the place.
    ///
    /// # Errors
    /// [`Failure`] when the tables location cannot be written.
    pub async fn move_tag(&self, written: &WrittenVersion, kind: LayoutKind) -> Result<(), Failure> {
        let Some(tag) = &self.options.tag else { return Ok(()) };
        if let Some(draft) = &self.options.seal
            // Another seal of the same draft may have moved it to the same version.
            && self.tables.tag(tag).await?.is_none_or(|now| ![draft.root(), written.root].contains(&now.root))
        {
            return Err(Failure::new(format!(
                "the tag {tag} was moved while the draft {} was sealed: it names another version now",
                draft.root()
            )));
        }
        let (root, layout, at_ns) = (written.root, written.layout, now_ns());
        self.tables.put_tag(tag, &TagDoc::new(root, layout, at_ns)).await?;
        let place = WrittenTables { tables: self.options.to.to_string(), root, layout, kind, at_ns };
        let (state_dir, uri) = (&self.options.state_dir, &self.options.uri);
        if let Some(folder) = &self.folder
            && let Err(e) = meanings::remember_folder(state_dir, uri, folder.clone())
        {
            self.ctx.out.warn(format_args!("cannot remember which folder {uri} was: {e}"));
        }
        if let Err(e) = written::record(state_dir, uri, place) {
            self.ctx.out.warn(format_args!(
                "cannot remember where the tables are, so `fletch register` needs --tables {}: {e}",
                self.options.to
            ));
        }
        Ok(())
    }

    /// Checks that the version has entries, or may have none.
    ///
    /// # Errors
    /// [`Failure`] for a version without entries, unless the options allow it.
    pub fn check_not_empty(&self, written: &WrittenVersion) -> Result<(), Failure> {
        if written.entries > 0 || self.options.allow_empty {
            return Ok(());
        }
        let uri = &self.options.uri;
        let what = match uri.as_local() {
            Some(dir) => format!("{} is empty", dir.display()),
            None => format!("no object lies below {uri}/"),
        };
        Err(Failure::new(format!("there is nothing to index: {what}; nothing was written"))
            .hint("check the path; if an empty dataset is meant, add --allow-empty"))
    }

    /// Checks that the tag of the options may move to the version, of which `left_out` entries were not read.
    ///
    /// # Errors
    /// [`Failure`] if the version lost too many entries, or the tables location cannot be read.
    pub async fn check_loss(&self, written: &WrittenVersion, left_out: u64) -> Result<(), Failure> {
        let Some(tag) = &self.options.tag else { return Ok(()) };
        let before = match self.tables.tag(tag).await {
            Ok(None) => Ok(None),
            // A version that cannot be read says nothing about the next one.
            Ok(Some(doc)) => match self.tables.version(doc.root, doc.layout).await {
                Ok(version) => Ok(Some(version.manifest().entries)),
                Err(e) if e.exit == Exit::Failed => Ok(None),
                Err(e) => Err(e),
            },
            Err(e) => Err(e),
        };
        let before = before.map_err(|e| publish::at_another_place(e, &self.tables))?;
        let loss = Loss { entries: written.entries, left_out, before };
        loss.check(self.options.allow_loss, &tag.to_string())
    }

    /// The report of a run that has published `written`.
    #[must_use]
    pub fn report(&self, written: &WrittenVersion, skipped: Vec<Fault>) -> RunReport {
        let (options, c) = (self.options, self.ctx.counters);
        RunReport {
            root: written.root.to_string(),
            layout: written.layout.to_string(),
            tag: options.tag.as_ref().map(ToString::to_string),
            uri: options.uri.to_string(),
            tables: options.to.to_string(),
            entries: written.entries,
            samples: written.samples,
            bytes: written.bytes,
            files: written.shown.files,
            file_bytes: written.shown.bytes,
            files_read: c.files_read.load(Relaxed),
            bytes_read: c.bytes_read.load(Relaxed),
            files_reused: c.files_reused.load(Relaxed),
            bytes_reused: c.bytes_reused.load(Relaxed),
            seconds: self.began.elapsed().as_secs_f64(),
            skipped,
        }
    }
}

/// Nanoseconds since 1970.
#[must_use]
pub fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn dataset_dir(dir: &Path) -> Result<BaseDir, Failure> {
    let cannot = |e: &std::io::Error| {
        Failure::io(format_args!("cannot read the dataset {}", dir.display()), e)
            .hint("give an existing directory that you may read, or a URI")
    };
    let base = std::fs::canonicalize(dir).map_err(|e| cannot(&e))?;
    if base.is_dir() {
        return BaseDir::of(&base).map_err(|e| cannot(&e));
    }
    Err(Failure::new(format!("the dataset {} is not a directory", dir.display()))
        .hint("give a directory, or the URI of a prefix in a bucket"))
}

/// Fails before hours of reading when tables cannot be written to `to`.
fn check_writable(to: &Path, is_dataset: bool) -> Result<(), Failure> {
    if let Some((path, what)) = in_the_way(to) {
        return Err(Failure::new(format!(
            "cannot write tables below {}: the path is {what}, not a directory",
            path.display()
        ))
        .hint("rename it, or name another location with --tables URI"));
    }
    let mut dir = to.to_owned();
    if dir.join("fletch").is_dir() {
        dir.push("fletch");
    }
    while !dir.exists() && dir.pop() {}
    nix::unistd::access(&dir, nix::unistd::AccessFlags::W_OK).map_err(|e| {
        let what = if is_dataset { "the dataset's own directory" } else { "the tables location" };
        Failure::new(format!("cannot write to {what}, {}: {}", to.display(), e.desc()))
            .hint("name a location that you may write with --tables URI")
            .exit(if e == nix::errno::Errno::EACCES { Exit::Denied } else { Exit::Failed })
    })
}
