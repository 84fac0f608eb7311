//! `fletch index`: reads and hashes every file of a dataset once, and writes the tables of its version.
//!
//! Owns the readers of a local tree ([`local`]) and of a store ([`remote`]), and turns what they read into
//! rows of the tables. `docs/INDEX.md` has the rules for entries and faults.
//!
//! Flow: walk or listing → readers → one writer, in path order → tables → published, the tag last. The
//! journal records each finished file, so that a stopped run can be resumed.

pub mod local;
pub mod remote;

use crate::failure::Failure;
use crate::out::count;
use crate::progress::{Progress, Total};
use crate::run::faults::Faults;
use crate::run::file_record::{FileRecord, Lookup};
use crate::run::groups::RunGroups;
use crate::run::journal::files::FileJournalWriter;
use crate::run::journal::write_failed;
use crate::run::learned::LearnedRecords;
use crate::run::mark::Mark;
use crate::run::options::{OnFault, RunFailure, RunOptions, RunReport};
use crate::run::parent::{self, IndexParent};
use crate::run::renewed::RenewedParent;
use crate::run::state::RunState;
use crate::run::{Counters, Run, RunContext, publish};
use crate::source::content::Content;
use crate::source::count;
use crate::source::listing::{KeyOrder, KeySorting, ListingError};
use crate::source::outage::BaseDir;
use crate::source::sampler::Sampler;
use crate::source::walk::{Step, Walk, WalkOptions};
use crate::tables_location::layout_of;
use fletch_core::manifest::tar::shard::{ShardMember, is_compressed_shard};
use fletch_core::manifest::{BadEntry, Entry, EntryKind, LayoutParams};
use fletch_tables::{Fault, NewRow, PinRow, TableError, TablesWriter, Version};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// A run that takes longer counts the tree meanwhile, to say how much is left.
const COUNT_AFTER: Duration = Duration::from_secs(3);

/// What a reader made of one step of the walk or one object of the listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    File {
        /// Its entry path.
        path: String,
        /// How it looked during reading.
        pin: PinRow,
        /// Its hashes.
        content: Content,
        /// Whether the hashes come from an earlier run.
        reused: bool,
        /// Why a file that is named like a tar shard is treated as a plain file.
        plain: Option<String>,
    },
    /// A symbolic link.
    Link {
        /// Its entry path.
        path: String,
        /// Its target, verbatim.
        target: String,
    },
    /// The end of a directory.
    DirEnd {
        /// Its path, without a slash at the end.
        path: String,
    },
    /// A name that cannot be an entry.
    Fault {
        /// Its path, with unprintable bytes escaped.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
    /// An entry that could not be read.
    Lost {
        /// Its path, with unprintable bytes escaped.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
    /// The origin fails, not one of its files: the run ends.
    Outage(Failure),
}

/// Turns outcomes, in path order, into rows of the tables and records of the journal.
struct EntryWriter<'a> {
    tables: TablesWriter,
    journal: FileJournalWriter,
    sampler: Sampler,
    faults: Faults,
    /// The path of the last entry.
    last: String,
    /// Compressed archives so far.
    compressed: u64,
    counters: &'a Counters,
    /// The directory of a local dataset, which must not go away.
    base: Option<&'a BaseDir>,
}

impl EntryWriter<'_> {
    fn push(&mut self, row: NewRow) -> Result<(), Failure> {
        let path = row.entry.path.clone();
        let pushed = match row.entry.as_ref().validate() {
            Ok(()) => self.tables.push(row),
            Err(e) => Err(TableError::Entry(e)),
        };
        match pushed {
            Ok(()) => {
                self.last = path;
                self.counters.entries.fetch_add(1, Relaxed);
                Ok(())
            }
            // The entry is there, and one of the two has no place in a tree.
            Err(e @ TableError::Entry(BadEntry::FileAndDirectory(_))) => {
                self.faults.lose(Fault { path: path.escape_debug().to_string(), why: e.to_string() })
            }
            Err(e @ (TableError::Entry(_) | TableError::Row { .. })) => {
                self.faults.push(Fault { path: path.escape_debug().to_string(), why: e.to_string() })
            }
            Err(e) => Err(e.into()),
        }
    }

    fn member(&mut self, shard: &str, m: ShardMember) -> Result<(), Failure> {
        let path = format!("{shard}\0{}", m.name);
        let kind = EntryKind::Member;
        let sample = self.sampler.sample(&path, kind);
        let entry = Entry { sample, kind, ..Entry::file(path, m.size, m.hash) };
        self.push(NewRow { entry, slices: m.slices, chunks: Vec::new() })
    }

    fn write(&mut self, outcome: Outcome) -> Result<(), Failure> {
        match outcome {
            Outcome::File { path, pin, content, plain, .. } => {
                if let Some(why) = plain {
                    self.faults.warn_plain_shard(&path, &why);
                }
                self.compressed += u64::from(is_compressed_shard(&path));
                self.journal.push(&path, &pin, &content).map_err(|e| write_failed(&e))?;
                let sample = self.sampler.sample(&path, EntryKind::File);
                let entry = Entry { sample, ..Entry::file(path.as_str(), pin.size, content.hash) };
                let before = self.faults.len();
                self.push(NewRow::indexed(entry, content.slices, &pin))?;
                // A shard that is left out has no members either.
                let members = if self.faults.len() == before { content.members } else { Vec::new() };
                members.into_iter().try_for_each(|m| self.member(&path, m))
            }
            Outcome::Link { path, target } => self.push(NewRow::without_bytes(Entry::symlink(path, target))),
            Outcome::DirEnd { path } => {
                // A directory without entries is an entry itself.
                let any = self.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/'));
                if any { Ok(()) } else { self.push(NewRow::without_bytes(Entry::empty_dir(path))) }
            }
            Outcome::Fault { path, why } => self.faults.push(Fault { path, why }),
            Outcome::Lost { path, why } => {
                // If the directory is gone, its files are missing too.
                self.base.map_or(Ok(()), BaseDir::check)?;
                self.faults.lose(Fault { path, why })
            }
            Outcome::Outage(failure) => Err(failure),
        }
    }
}

/// Indexes a dataset.
///
/// # Errors
/// [`RunFailure`]. The journal keeps the files that were read, for the next run.
pub fn run(options: &RunOptions, ctx: RunContext<'_>) -> Result<RunReport, RunFailure> {
    let run = Run::open(options, ctx)?;
    let mut key = format!("{}\n{:?}\n{}", options.uri, options.rule, options.symlinks.as_str());
    if options.seal.is_some() {
        key.push_str("\nsealed");
    }
    if let Some(uri) = &options.draft {
        // The journal of a draft has names of places, which must never pass for hashes.
        key.push_str(&format!("\ndraft of {uri}"));
    }
    let state = RunState::lock(&options.state_dir, &key, verb(options))?;
    let done = match index(&run, &state, KeyOrder::Listed) {
        Ok(Indexed::Unsorted) => {
            run.note_unsorted();
            match index(&run, &state, KeyOrder::Sorted) {
                Ok(Indexed::Version(report)) => Ok(*report),
                Ok(Indexed::Unsorted) => Err(ListingError::Unsorted.failure().into()),
                Err(e) => Err(e),
            }
        }
        Ok(Indexed::Version(report)) => Ok(*report),
        Err(e) => Err(e),
    };
    state.end(done, "the journal keeps the files that were read")
}

/// Returns the word for what a run does.
fn verb(options: &RunOptions) -> &'static str {
    match (&options.draft, &options.seal) {
        (Some(_), _) => "listing",
        (None, Some(_)) => "sealing",
        (None, None) => "indexing",
    }
}

/// Opens the parent's index layout.
fn open_parent(run: &Run<'_>) -> Result<Option<Version>, Failure> {
    parent::open(run, |root, layout| {
        run.ctx.rt.block_on(async {
            // A pack has no pins; the index layout beside it has them.
            let layouts = run.tables.layouts(root).await?;
            let index = layout_of(&layouts, &LayoutParams::INDEX, layout).ok_or_else(|| {
                Failure::new(format!("the parent {root} has no layout that `index` makes"))
                    .hint("give a parent that was indexed, or leave --parent out")
            })?;
            // The cursor reads each part once, so a cache of parts would not help.
            run.tables.version_keeping(root, index, 1).await.map(Some)
        })
    })
}

/// Returns the lookup of the parent's files.
fn lookup_of(run: &Run<'_>, parent: Version) -> Lookup<FileRecord> {
    let parent = IndexParent::new(run.ctx.rt, parent, run.is_local());
    Lookup::new(Box::new(RenewedParent::new(parent, run.options.renewed.clone())))
}

/// How a pass over the dataset ended.
enum Indexed {
    /// The version is published.
    Version(Box<RunReport>),
    /// The keys have to be sorted first.
    Unsorted,
}

fn index(run: &Run<'_>, state: &RunState, order: KeyOrder) -> Result<Indexed, RunFailure> {
    let (options, out) = (run.options, run.ctx.out);
    let sampler = run.sampler()?;
    let earlier = state.earlier(run.is_local())?;
    if earlier.files > 0 {
        out.note(format_args!("resuming: {} already hashed", count(earlier.files, "file")));
    }
    let mut lookups = vec![Lookup::new(Box::new(earlier))];
    let parent = open_parent(run)?;
    lookups.extend(parent.clone().map(|parent| lookup_of(run, parent)));
    if let Some(draft) = options.learned.clone() {
        let records = LearnedRecords::new(run.ctx.rt, draft, run.is_local());
        lookups.push(Lookup::new(Box::new(records)));
    }
    let params = if options.draft.is_some() { LayoutParams::DRAFT } else { LayoutParams::INDEX };
    let known = move |path: &str| -> Result<Option<FileRecord>, Failure> {
        // Every lookup must see every path, so that it stays in step with the walk.
        let mut best = None;
        for lookup in &mut lookups {
            let found = lookup.find(path)?;
            best = best.or(found);
        }
        Ok(best)
    };
    let scratch = state.fresh_scratch()?;
    // The names of a draft are no hashes.
    let groups = match &options.draft {
        None => RunGroups::open(state, out),
        Some(_) => RunGroups::default(),
    };
    let mut writer = EntryWriter {
        tables: TablesWriter::create(&scratch, options.rule.clone(), params).map_err(Failure::from)?,
        journal: FileJournalWriter::create(state.file_journal(), run.started_ns)
            .map_err(|e| write_failed(&e))?,
        sampler,
        faults: Faults::new(options.on_fault, out),
        last: String::new(),
        compressed: 0,
        counters: run.ctx.counters,
        base: run.base.as_ref(),
    };
    groups.keep_in(&mut writer.tables);
    let read = read_all(run, (&scratch, order, &groups), known, &mut writer);
    let flushed = writer.journal.flush();
    let EntryWriter { tables, faults, compressed, .. } = writer;
    out.note_compressed(compressed);
    let lost = faults.lost();
    let faults = faults.finish();
    match read {
        Ok(()) => {}
        Err(ListingError::Unsorted) => {
            flushed.map_err(|e| write_failed(&e))?;
            run.ctx.counters.restart();
            return Ok(Indexed::Unsorted);
        }
        Err(ListingError::Failure(failure)) => return Err(RunFailure { failure, faults }),
    }
    flushed.map_err(|e| write_failed(&e))?;
    if !faults.is_empty() && options.on_fault == OnFault::Report {
        return Err(RunFailure { failure: Faults::failure(faults.len()), faults });
    }
    groups.complete(run, &[&tables], parent.as_ref());
    let written = tables.finish(run.created(faults.clone())).map_err(Failure::from)?;
    run.check_not_empty(&written)?;
    run.ctx.rt.block_on(async {
        run.check_loss(&written, lost).await?;
        let mark = Mark::of_run(&run.tables, out, run.ctx.stop).await;
        let mark = mark.map_err(|e| publish::at_another_place(e, &run.tables))?;
        let published = async {
            publish::publish(&run.tables, &written, run.ctx.stop).await?;
            mark.check()?;
            run.move_tag(&written, params.kind).await
        };
        let published = published.await;
        mark.remove(out).await;
        published
    })?;
    Ok(Indexed::Version(Box::new(run.report(&written, faults))))
}

/// Reads the whole dataset, and writes every outcome in path order.
fn read_all(
    run: &Run<'_>,
    (scratch, order, groups): (&Path, KeyOrder, &RunGroups),
    mut known: impl FnMut(&str) -> Result<Option<FileRecord>, Failure> + Send,
    writer: &mut EntryWriter<'_>,
) -> Result<(), ListingError> {
    let (options, counters, stop) = (run.options, &**run.ctx.counters, run.ctx.stop);
    // A seal reads each object as the origin gives it: the places are pinned, and nothing is walked.
    let Some(base) = run.base.as_ref().filter(|_| options.seal.is_none()) else {
        let _progress = show(run, None);
        // The lookups wait for tables on the runtime, so they must not run inside it.
        let listing = remote::Listing {
            origin: &run.source,
            seal: options.seal.clone(),
            objects_max: if options.seal.is_some() { options.threads } else { remote::OBJECTS_MAX },
            names: options.list.as_ref(),
            exclude: run.excluded_prefixes(),
            draft: options.draft.as_deref(),
            sorting: KeySorting { order, scratch, out: Some(run.ctx.out) },
            groups: groups.clone(),
        };
        return run.ctx.rt.block_on(remote::run(
            listing,
            counters,
            stop,
            |path| tokio::task::block_in_place(|| known(path)),
            |outcome| tokio::task::block_in_place(|| writer.write(outcome)),
        ));
    };
    let base = base.path();
    let walk_options = run.walk_options(base);
    let _progress = show(run, Some(&walk_options));
    let mut walk = Walk::new(walk_options, scratch)
        .map_err(|e| Failure::io(format_args!("cannot read the dataset {}", base.display()), &e))?;
    let feed = move || {
        let Some(step) = walk.next_step().map_err(|e| Failure::scratch(&e))? else { return Ok(None) };
        let step = match step {
            Step::OtherFileSystem { path } => {
                run.note_other_file_system(&path);
                Step::DirEnd { path }
            }
            step => step,
        };
        let record = match &step {
            Step::File { path, .. } => known(path)?,
            _ => None,
        };
        Ok(Some((step, record)))
    };
    let lists = groups.lists().map(|lists| &**lists);
    let (threads, draft) = (options.threads, options.draft.as_deref());
    let tree = local::TreeReads { base, threads, draft, groups: lists };
    local::run(tree, counters, stop, feed, |outcome| writer.write(outcome))?;
    Ok(writer.base.map_or(Ok(()), BaseDir::check)?)
}

/// Starts the progress display, which counts `tree` if reading it takes long.
fn show(run: &Run<'_>, tree: Option<&WalkOptions>) -> Progress {
    let total = Arc::new(Total::default());
    let late = tree.filter(|_| run.options.draft.is_none()).map(|tree| {
        let (tree, total) = (tree.clone(), Arc::clone(&total));
        let count: Box<dyn FnOnce(&AtomicBool) + Send> =
            Box::new(move |ended| count::count(&tree, &total, ended));
        (COUNT_AFTER, count)
    });
    run.progress(verb(run.options), total, late)
}
