//! `fletch index`: reads a dataset once, names everything in it, and writes the tables of the
//! version it is (`docs/INDEX.md` has the rules).
//!
//! Flow: walk or listing → readers → one taker, in path order → tables → published, tag last.
//! What was finished is journalled on the way, so that a stopped run can be gone on with.

pub mod content;
pub mod journal;
pub mod known;
pub mod listed;
mod names;
mod options;
pub mod outcome;
pub mod parent;
pub mod pool;
pub mod publish;
pub mod remote;
pub(crate) mod spill;
pub mod state;
pub mod walk;

use crate::failure::{Exit, Failure};
use crate::out::Out;
use crate::place::Place;
use crate::progress::{Progress, Total};
use crate::target::Select;
use fletch_core::manifest::sample::SampleMatcher;
use fletch_core::manifest::tar::shard::{ShardMember, is_compressed_shard};
use fletch_core::manifest::{Entry, EntryKind, LayoutParams};
use fletch_origin::Origins;
use fletch_tables::{Fault, NewRow, Provenance, TableError, TablesWriter, WrittenVersion};
use journal::JournalWriter;
use known::{Known, Lookup};
pub use options::{IndexFailure, IndexOptions, OnFault, Report};
use outcome::{Counters, Outcome};
use parent::ParentRows;
use state::RunState;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use walk::{NAMES_BYTES_MAX, Step, Walk, WalkOptions};

/// More failed entries than this are a failure of the whole tree.
const FAULTS_MAX: usize = 100_000;
/// A run that takes longer counts the tree beside, to say how long it will take.
const COUNT_AFTER: Duration = Duration::from_secs(3);

pub(crate) fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// The directories below `base` that are not indexed, relative: Fletch's own, the place of the
/// tables and the state directory, if they lie inside.
pub(crate) fn excluded(base: &Path, to: Option<&Path>, state_dir: &Path, out: Out) -> BTreeSet<String> {
    let mut exclude = BTreeSet::from(["fletch".to_owned()]);
    let places = [(to, "the tables go there"), (Some(state_dir), "it is the state directory")];
    for (place, why) in places {
        let Some(place) = place else { continue };
        let real = std::fs::canonicalize(place).unwrap_or_else(|_| place.to_owned());
        if let Ok(rel) = real.strip_prefix(base)
            && let Some(rel) = rel.to_str().filter(|r| !r.is_empty())
        {
            out.note(format_args!("not indexed: {rel}/ ({why})"));
            exclude.insert(rel.to_owned());
        }
    }
    exclude
}

/// The taker: outcomes in, rows of tables and records of the journal out.
struct Taker<'a> {
    writer: TablesWriter,
    journal: JournalWriter,
    matcher: SampleMatcher,
    on_fault: OnFault,
    faults: Vec<Fault>,
    last: String,
    /// Archives whose members cannot be read by range.
    compressed: u64,
    counters: &'a Counters,
    out: Out,
}

impl Taker<'_> {
    fn fault(&mut self, path: String, why: String) -> Result<(), Failure> {
        if self.on_fault != OnFault::Stop {
            self.out.warn(format_args!("{path}: {why}"));
        }
        if self.faults.len() == FAULTS_MAX {
            return Err(Failure::new(format!("more than {FAULTS_MAX} entries cannot be indexed"))
                .hint("something is wrong with the whole tree: see the first of them"));
        }
        let stop = Failure::new(format!("{path}: {why}"))
            .hint("--keep-going reports all such entries, --skip-failed leaves them out");
        self.faults.push(Fault { path, why });
        if self.on_fault == OnFault::Stop { Err(stop) } else { Ok(()) }
    }

    fn push(&mut self, row: NewRow) -> Result<(), Failure> {
        let path = row.entry.path.clone();
        let pushed = match row.entry.as_ref().validate() {
            Ok(()) => self.writer.push(row),
            Err(e) => Err(TableError::Entry(e)),
        };
        match pushed {
            Ok(()) => {
                self.last = path;
                self.counters.entries.fetch_add(1, Relaxed);
                Ok(())
            }
            Err(e @ (TableError::Entry(_) | TableError::Row { .. })) => {
                self.fault(path.escape_debug().to_string(), e.to_string())
            }
            Err(e) => Err(e.into()),
        }
    }

    fn member(&mut self, shard: &str, m: ShardMember) -> Result<(), Failure> {
        let path = format!("{shard}\0{}", m.name);
        let sample = self.matcher.sample(&path, EntryKind::Member);
        let kind = EntryKind::Member;
        let entry = Entry { sample, kind, ..Entry::file(path, m.size, m.hash) };
        self.push(NewRow { entry, slices: m.slices, chunks: Vec::new() })
    }

    fn take(&mut self, outcome: Outcome) -> Result<(), Failure> {
        match outcome {
            Outcome::File { path, pin, content, plain, .. } => {
                if let Some(why) = plain {
                    self.out.warn(format_args!("{path}: a file like any other, without members: {why}"));
                }
                self.compressed += u64::from(is_compressed_shard(&path));
                self.journal.push(&path, &pin, &content).map_err(|e| {
                    Failure::io("cannot write the journal", &e)
                        .hint("free some space, or give another --state-dir")
                })?;
                let sample = self.matcher.sample(&path, EntryKind::File);
                let entry = Entry { sample, ..Entry::file(path.as_str(), pin.size, content.hash) };
                let before = self.faults.len();
                self.push(NewRow::indexed(entry, content.slices, &pin))?;
                // A shard that is left out has no members either.
                let members = if self.faults.len() == before { content.members } else { Vec::new() };
                members.into_iter().try_for_each(|m| self.member(&path, m))
            }
            Outcome::Link { path, target } => self.push(NewRow::without_bytes(Entry::symlink(path, target))),
            Outcome::DirEnd { path } => {
                // A directory of which nothing was indexed is an empty one.
                let any = self.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/'));
                if any { Ok(()) } else { self.push(NewRow::without_bytes(Entry::empty_dir(path))) }
            }
            Outcome::Fault { path, why } => self.fault(path, why),
        }
    }
}

/// Runs it. `stop` is set by Ctrl-C.
///
/// # Errors
/// [`IndexFailure`]; what was read is remembered for the next run.
pub fn run(
    options: &IndexOptions,
    origins: &Origins,
    rt: &Handle,
    out: Out,
    stop: &Arc<AtomicBool>,
) -> Result<Report, IndexFailure> {
    let place = Place::open(origins, &options.to)?;
    let local = options.uri.as_local().map(base_of).transpose()?;
    if let Some(to) = options.to.as_local() {
        writable(to, options.to == options.uri)?;
    }
    let key = format!("{}\n{:?}\n{}", options.uri, options.rule, options.symlinks.as_str());
    let state = RunState::lock(&options.state_dir, &key)?;
    let done = locked(options, origins, rt, out, stop, &place, local.as_deref(), &state);
    match done {
        Ok(report) => {
            state.finish();
            Ok(report)
        }
        Err(mut e) => {
            state.clear_scratch();
            if e.failure.exit == Exit::Interrupted {
                e.failure.what = "stopped; what was read is remembered".into();
                e.failure.hint = Some("run the same command again to go on".into());
            }
            Err(e)
        }
    }
}

pub(crate) fn base_of(dir: &Path) -> Result<PathBuf, Failure> {
    let fail = |e: &std::io::Error| {
        Failure::io(format_args!("cannot read the dataset {}", dir.display()), e)
            .hint("give an existing directory you may read, or a URI")
    };
    let base = std::fs::canonicalize(dir).map_err(|e| fail(&e))?;
    if !base.is_dir() {
        return Err(Failure::new(format!("{} is not a directory", dir.display()))
            .hint("a dataset is a directory or a prefix of a bucket"));
    }
    Ok(base)
}

/// Fails early, before hours of reading, when tables cannot be written to `to`.
pub(crate) fn writable(to: &Path, own: bool) -> Result<(), Failure> {
    let mut dir = to.to_owned();
    if dir.join("fletch").is_dir() {
        dir.push("fletch");
    }
    while !dir.exists() && dir.pop() {}
    nix::unistd::access(&dir, nix::unistd::AccessFlags::W_OK).map_err(|e| {
        let what = if own { "the dataset's own directory" } else { "the place for the tables" };
        Failure::new(format!("cannot write to {what}, {}: {}", to.display(), e.desc()))
            .hint("name a place you may write with --to URI")
            .exit(if e == nix::errno::Errno::EACCES { Exit::Denied } else { Exit::Failed })
    })
}

fn open_parent(
    options: &IndexOptions,
    rt: &Handle,
    place: &Place,
    local: bool,
    out: Out,
) -> Result<Option<Lookup>, Failure> {
    let Some(select) = &options.parent else { return Ok(None) };
    let version = rt.block_on(async {
        if options.parent_optional
            && let Select::Tag(tag) = select
            && place.tag(tag).await?.is_none()
        {
            return Ok(None);
        }
        let (root, layout) = place.resolve(select).await?;
        // A pack says nothing of how files looked; the index that was made with it does.
        let layout = place.index_layout(root, layout).await?.unwrap_or(layout);
        // Each part is read once, in order, and held by the cursor.
        place.version_keeping(root, layout, 1).await.map(Some)
    });
    match version {
        Ok(Some(version)) => Ok(Some(Lookup::new(Box::new(ParentRows::new(rt.clone(), version, local)?)))),
        Ok(None) => Ok(None),
        Err(e) if options.parent_optional && e.exit == Exit::Failed => {
            out.warn(format_args!("the parent cannot be used, everything is read: {}", e.what));
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

#[expect(clippy::too_many_arguments, reason = "the parts of one run, each used once")]
fn locked(
    options: &IndexOptions,
    origins: &Origins,
    rt: &Handle,
    out: Out,
    stop: &Arc<AtomicBool>,
    place: &Place,
    local: Option<&Path>,
    state: &RunState,
) -> Result<Report, IndexFailure> {
    let (began, started_ns) = (Instant::now(), now_ns());
    let matcher = options.rule.matcher().map_err(|e| Failure::usage(e.to_string()))?;
    let is_local = local.is_some();
    let earlier = state.earlier(is_local)?;
    if earlier.files > 0 {
        out.note(format_args!("resuming: {} files already hashed", earlier.files));
    }
    let mut lookups = vec![Lookup::new(Box::new(earlier))];
    lookups.extend(open_parent(options, rt, place, is_local, out)?);
    let mut known = move |path: &str| -> Result<Option<Known>, Failure> {
        // Each must see every path, so that they stay in step with the walk.
        let mut best = None;
        for lookup in &mut lookups {
            let found = lookup.find(path)?;
            best = best.or(found);
        }
        Ok(best)
    };

    let counters = Arc::new(Counters::default());
    let journal = JournalWriter::create(state.journal(), started_ns)
        .map_err(|e| Failure::io("cannot write the journal", &e).hint("give another --state-dir"))?;
    let scratch = state.scratch();
    let mut taker = Taker {
        writer: TablesWriter::create(&scratch, options.rule.clone(), LayoutParams::INDEX)
            .map_err(Failure::from)?,
        journal,
        matcher,
        on_fault: options.on_fault,
        faults: Vec::new(),
        last: String::new(),
        compressed: 0,
        counters: &counters,
        out,
    };

    let exclude;
    let read = if let Some(base) = local {
        for stranger in walk::reserved_strangers(base).unwrap_or_default() {
            out.warn(format_args!("{stranger} is not indexed: the directory fletch/ is Fletch's own"));
        }
        exclude = excluded(
            base,
            options.to.as_local().filter(|_| options.to != options.uri),
            &options.state_dir,
            out,
        );
        let walk_options = WalkOptions {
            base: base.to_owned(),
            symlinks: options.symlinks,
            exclude,
            names_bytes_max: NAMES_BYTES_MAX,
        };
        let _progress = show(options, out, &counters, Some(&walk_options));
        let mut walk = Walk::new(walk_options, &scratch)
            .map_err(|e| Failure::io(format_args!("cannot read the dataset {}", base.display()), &e))?;
        let feed = move || {
            let step = walk
                .next_step()
                .map_err(|e| Failure::io("the list of names", &e).hint("give another --state-dir"))?;
            let Some(step) = step else { return Ok(None) };
            let known = match &step {
                Step::File { path, .. } => known(path)?,
                _ => None,
            };
            Ok(Some((step, known)))
        };
        pool::run(base, options.threads, &counters, stop, feed, |outcome| taker.take(outcome))
    } else {
        exclude = match (
            options.uri.contains(&options.to),
            options.to.to_string().strip_prefix(&format!("{}/", options.uri)),
        ) {
            (true, Some(rel)) => BTreeSet::from([rel.to_owned()]),
            _ => BTreeSet::new(),
        };
        let origin = origins.open(&options.uri).map_err(Failure::from)?;
        let _progress = show(options, out, &counters, None);
        // The lookups wait for tables by themselves, so they must not run inside the runtime.
        rt.block_on(remote::run(
            &origin,
            options.list.as_ref(),
            &exclude,
            &counters,
            stop,
            |path| tokio::task::block_in_place(|| known(path)),
            |outcome| tokio::task::block_in_place(|| taker.take(outcome)),
        ))
    };
    let flushed = taker.journal.flush();
    let Taker { writer, faults, compressed, .. } = taker;
    out.tell_compressed(compressed);
    if let Err(failure) = read {
        return Err(IndexFailure { failure, faults });
    }
    flushed.map_err(|e| Failure::io("cannot write the journal", &e))?;
    if !faults.is_empty() && options.on_fault == OnFault::Report {
        let n = faults.len();
        let failure = Failure::new(format!("{n} entries cannot be indexed; nothing was written"))
            .hint("mend them, or leave them out with --skip-failed");
        return Err(IndexFailure { failure, faults });
    }
    let written = writer.finish(Provenance {
        created_unix_ns: started_ns,
        indexed_at_ns: started_ns,
        tool: format!("fletch {}", env!("CARGO_PKG_VERSION")),
        origin: (options.to != options.uri).then(|| options.uri.to_string()),
        faults: faults.clone(),
    });
    let written = written.map_err(Failure::from)?;
    rt.block_on(async {
        publish::publish(place, &written, stop).await?;
        match &options.tag {
            Some(tag) => publish::tag(place, tag, &written, now_ns()).await,
            None => Ok(()),
        }
    })?;
    Ok(report(options, &written, &counters, faults, began.elapsed()))
}

fn report(
    options: &IndexOptions,
    written: &WrittenVersion,
    counters: &Counters,
    skipped: Vec<Fault>,
    took: Duration,
) -> Report {
    Report {
        root: written.root.to_string(),
        layout: written.layout.to_string(),
        tag: options.tag.as_ref().map(ToString::to_string),
        uri: options.uri.to_string(),
        tables: options.to.to_string(),
        entries: written.entries,
        samples: written.samples,
        bytes: written.bytes,
        files_read: counters.files_read.load(Relaxed),
        bytes_read: counters.bytes_read.load(Relaxed),
        files_reused: counters.files_reused.load(Relaxed),
        bytes_reused: counters.bytes_reused.load(Relaxed),
        seconds: took.as_secs_f64(),
        skipped,
    }
}

fn show(options: &IndexOptions, out: Out, counters: &Arc<Counters>, tree: Option<&WalkOptions>) -> Progress {
    let c = Arc::clone(counters);
    let done = Arc::new(move || {
        (
            c.files_read.load(Relaxed) + c.files_reused.load(Relaxed),
            c.bytes_read.load(Relaxed) + c.bytes_reused.load(Relaxed),
        )
    });
    let total = Arc::new(Total::default());
    let late = tree.map(|tree| {
        let (tree, total) = (tree.clone(), Arc::clone(&total));
        let count: Box<dyn FnOnce(&AtomicBool) + Send> =
            Box::new(move |ended| count::count(&tree, &total, ended));
        (COUNT_AFTER, count)
    });
    Progress::start(out, options.progress, "indexing", done, total, late)
}

pub(crate) mod count;
