//! `fletch pack`: groups the small files of a dataset into chunks of a few MiB, each an object of
//! its own, and writes the tables of the version (`docs/FORMATS-pack.md` has the rules).
//!
//! Flow: what there is and how long ([`find`]) → the order, the groups, and what stays of a
//! parent ([`plan`]) → each file read once, chunks written ([`assemble`]) → tables ([`tables`]) →
//! published, tag last. The same tree gives the same chunks, whatever the order of arrival.
//! Chunks that were made are journalled, so that a stopped run can be gone on with.
//!
//! An index layout of the same root is written beside the pack: it holds how each file looked
//! (which a pack does not), serves as a parent, and is another way to the bytes.

pub mod assemble;
pub mod catalogue;
mod faults;
pub mod find;
pub mod journal;
mod options;
pub mod parent;
pub mod plan;
pub mod shards;
pub mod sorter;
pub mod tables;

use crate::failure::{Exit, Failure};
use crate::index::outcome::Counters;
use crate::index::state::RunState;
use crate::index::walk::{NAMES_BYTES_MAX, WalkOptions, reserved_strangers};
use crate::index::{IndexFailure, base_of, excluded, now_ns, publish, writable};
use crate::out::Out;
use crate::place::Place;
use crate::progress::{Progress, Total};
use crate::target::Select;
use assemble::{Assembler, BYTES_MAX, Done, How};
use catalogue::{Catalogue, Fate, Fates, Row};
use faults::Faults;
use find::{Finder, Found};
use fletch_core::Hash;
use fletch_core::manifest::pack::{Item, Keeper, PackParams, ParentLocation};
use fletch_origin::{Origin, Origins};
use fletch_tables::{Fault, Provenance, WrittenVersion};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use journal::Journal;
pub use options::{Kept, PackOptions, PackReport};
use parent::Parent;
use plan::{Plan, Work};
use shards::ShardReader;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tables::{Both, Packed};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Chunks made at once from or to a store.
const REMOTE_AT_ONCE: usize = 16;
/// How often Ctrl-C is looked for while nothing else happens.
const STOP_EVERY: Duration = Duration::from_millis(200);

/// What a run has besides its options.
struct Run<'a> {
    options: &'a PackOptions,
    rt: &'a Handle,
    out: Out,
    stop: &'a AtomicBool,
    place: &'a Place,
    source: &'a Origin,
    scratch: &'a Path,
    counters: Arc<Counters>,
    total: Arc<Total>,
}

/// What was made.
struct MadeChunks {
    fates: Fates,
    chunks: Vec<(Hash, u32)>,
    written: u64,
    bytes_written: u64,
    found: u64,
    kept: Kept,
}

/// Runs it. `stop` is set by Ctrl-C.
///
/// # Errors
/// [`IndexFailure`]; chunks that were written are remembered for the next run.
pub fn run(
    options: &PackOptions,
    origins: &Origins,
    rt: &Handle,
    out: Out,
    stop: &Arc<AtomicBool>,
) -> Result<PackReport, IndexFailure> {
    let place = Place::open(origins, &options.to)?;
    let source = origins.open(&options.uri).map_err(Failure::from)?;
    let base = options.uri.as_local().map(base_of).transpose()?;
    if let Some(to) = options.to.as_local() {
        writable(to, options.to == options.uri)?;
    }
    let key = format!(
        "pack\n{}\n{}\n{:?}\n{}\n{:?}",
        options.uri,
        options.to,
        options.rule,
        options.symlinks.as_str(),
        options.params
    );
    let state = RunState::lock(&options.state_dir, &key)?;
    let run = Run {
        options,
        rt,
        out,
        stop,
        place: &place,
        source: &source,
        scratch: &state.scratch(),
        counters: Arc::default(),
        total: Arc::default(),
    };
    match run.locked(base.as_deref(), &state) {
        Ok(report) => {
            state.finish();
            Ok(report)
        }
        Err(mut e) => {
            state.clear_scratch();
            if e.failure.exit == Exit::Interrupted {
                e.failure.what = "stopped; the chunks that were written are remembered".into();
                e.failure.hint = Some("run the same command again to go on".into());
            }
            Err(e)
        }
    }
}

fn scratch_failed(e: &std::io::Error) -> Failure {
    Failure::io("cannot write temporary files", e).hint("free some space, or give another --state-dir")
}

impl Run<'_> {
    fn open_parent(&self, local: bool) -> Result<Option<Parent>, Failure> {
        let Some(select) = &self.options.parent else { return Ok(None) };
        let open = || -> Result<Option<Parent>, Failure> {
            if self.options.parent_optional
                && let Select::Tag(tag) = select
                && self.rt.block_on(self.place.tag(tag))?.is_none()
            {
                return Ok(None);
            }
            let version = self.rt.block_on(self.place.resolve(select))?;
            let opened = Parent::open(self.rt, self.place, version, &self.options.params, local)?;
            if opened.is_none() {
                self.out.warn(format_args!(
                    "the parent has no index layout, which tells what is unchanged: everything is read"
                ));
            }
            Ok(opened)
        };
        match open() {
            Err(e) if self.options.parent_optional && e.exit == Exit::Failed => {
                self.out.warn(format_args!("the parent cannot be used, everything is read: {}", e.what));
                Ok(None)
            }
            opened => opened,
        }
    }

    fn show(&self, label: &'static str) -> Progress {
        let c = Arc::clone(&self.counters);
        let done = Arc::new(move || {
            (
                c.files_read.load(Relaxed) + c.files_reused.load(Relaxed),
                c.bytes_read.load(Relaxed) + c.bytes_reused.load(Relaxed),
            )
        });
        Progress::start(self.out, self.options.progress, label, done, Arc::clone(&self.total), None)
    }

    fn find(&self, base: Option<&Path>, faults: &mut Faults) -> Result<Found, Failure> {
        let options = self.options;
        let matcher = options.rule.matcher().map_err(|e| Failure::usage(e.to_string()))?;
        let parent = self.open_parent(base.is_some())?;
        let keeper = parent.as_ref().map(|p| {
            let lengths = p.chunks.all.iter().map(|c| c.1).collect();
            Keeper::new(plan::keep_rule(options.compact), &options.params, lengths)
        });
        let mut finder = {
            let shards = ShardReader { rt: self.rt, source: self.source, counters: &self.counters };
            Finder::new(self.scratch, &options.params, &matcher, parent, keeper, faults, &self.total, shards)?
        };
        let to = (options.to != options.uri).then_some(&options.to);
        match base {
            Some(base) => {
                for stranger in reserved_strangers(base).unwrap_or_default() {
                    self.out.warn(format_args!(
                        "{stranger} is not packed: the directory fletch/ is Fletch's own"
                    ));
                }
                let exclude = excluded(base, to.and_then(|to| to.as_local()), &options.state_dir, self.out);
                let walk = WalkOptions {
                    base: base.to_owned(),
                    symlinks: options.symlinks,
                    exclude,
                    names_bytes_max: NAMES_BYTES_MAX,
                };
                finder.local(walk, self.scratch, options.threads, self.stop)?;
            }
            None => {
                let below = |to: &fletch_origin::OriginUri| {
                    to.to_string().strip_prefix(&format!("{}/", options.uri)).map(str::to_owned)
                };
                let exclude: BTreeSet<String> = to.and_then(below).into_iter().collect();
                finder.remote(self.rt, self.source, self.options.list.as_ref(), &exclude, self.stop)?;
            }
        }
        finder.finish()
    }

    fn locked(&self, base: Option<&Path>, state: &RunState) -> Result<PackReport, IndexFailure> {
        let options = self.options;
        let (began, started_ns) = (Instant::now(), now_ns());
        let journal = Journal::open(state.file("made"), started_ns)
            .map_err(|e| Failure::io("cannot use the journal", &e).hint("give another --state-dir"))?;
        if !journal.is_empty() {
            self.out.note(format_args!("resuming: {} chunks and long files already made", journal.len()));
        }
        let mut faults = Faults::new(options.on_fault, self.out);
        let found = match self.find(base, &mut faults) {
            Ok(found) => found,
            Err(failure) => return Err(IndexFailure { failure, faults: faults.finish() }),
        };
        let progress = self.show("packing");
        let made = match self.make(&found, journal, &mut faults) {
            Ok(made) => made,
            Err(failure) => return Err(IndexFailure { failure, faults: faults.finish() }),
        };
        drop(progress);
        let matcher = options.rule.matcher().map_err(|e| Failure::usage(e.to_string()))?;
        let packed = Packed { catalogue: &found.catalogue, fates: &made.fates, chunks: &made.chunks };
        let about = Provenance {
            created_unix_ns: started_ns,
            indexed_at_ns: started_ns,
            tool: format!("fletch {}", env!("CARGO_PKG_VERSION")),
            origin: (options.to != options.uri).then(|| options.uri.to_string()),
            faults: Vec::new(),
        };
        let in_vain = faults.in_vain();
        let (both, skipped) = tables::write(
            &packed,
            &options.rule,
            &matcher,
            &options.params,
            self.scratch,
            about,
            &self.counters,
            faults,
        )?;
        if in_vain {
            let n = skipped.len();
            let failure = Failure::new(format!("{n} entries cannot be packed; no version was written"))
                .hint("mend them, or leave them out with --skip-failed");
            return Err(IndexFailure { failure, faults: skipped });
        }
        self.publish(&both)?;
        Ok(self.report(&both, &made, found.parent.is_some(), skipped, began.elapsed()))
    }

    /// Makes every chunk and names every long file.
    fn make(&self, found: &Found, journal: Journal, faults: &mut Faults) -> Result<MadeChunks, Failure> {
        let catalogue = &found.catalogue;
        let fates = Fates::new(self.scratch, catalogue.len()).map_err(|e| scratch_failed(&e))?;
        empty_files(catalogue, &fates)?;
        let keeper = found.parent.as_ref().and(found.keeper.clone());
        let params = &self.options.params;
        let mut plan = Plan::new(params, &found.items, keeper)?;
        let lengths: &[(Hash, u32)] = found.parent.as_ref().map_or(&[], |p| &p.chunks.all);
        let mut made =
            MadeChunks { fates, chunks: Vec::new(), written: 0, bytes_written: 0, found: 0, kept: plan.kept };
        // The number here of each chunk of the parent that stays.
        let mut numbers = vec![u32::MAX; lengths.len()];
        let assembler = Assembler {
            source: self.source,
            place: self.place.origin(),
            catalogue,
            params: params.pack.unwrap_or(PackParams::DEFAULT),
            journal: RefCell::new(journal),
            counters: &self.counters,
            memory: Semaphore::new(BYTES_MAX as usize),
            in_vain: Cell::new(faults.in_vain()),
        };
        let local = self.source.local_dir().is_some() && self.place.origin().local_dir().is_some();
        let at_once = if local { self.options.threads.max(1) } else { REMOTE_AT_ONCE };
        let mut sliced = found.sliced.iter();
        let mut groups_left = true;
        self.rt.block_on(async {
            let mut under_way = FuturesUnordered::new();
            loop {
                while under_way.len() < at_once {
                    // Long files after the groups.
                    match if groups_left { plan.next_work()? } else { None } {
                        Some(Work::Group(group)) => under_way.push(assembler.group(group).left_future()),
                        Some(Work::Stay(members)) => {
                            self.stay(&members, lengths, &mut numbers, catalogue, &mut made)?;
                        }
                        None => {
                            groups_left = false;
                            let Some(&row) = sliced.next() else { break };
                            under_way.push(assembler.sliced(row).right_future());
                        }
                    }
                }
                if self.stop.load(Relaxed) {
                    return Err(Failure::new("stopped").exit(Exit::Interrupted));
                }
                match timeout(STOP_EVERY, under_way.next()).await {
                    Err(_) => {}
                    Ok(None) => return Ok(made),
                    Ok(Some(done)) => {
                        take(done?, &mut made, faults)?;
                        assembler.in_vain.set(faults.in_vain());
                    }
                }
            }
        })
    }

    /// Members that stay in chunks of the parent.
    fn stay(
        &self,
        members: &[(Item, ParentLocation)],
        lengths: &[(Hash, u32)],
        numbers: &mut [u32],
        catalogue: &Catalogue,
        made: &mut MadeChunks,
    ) -> Result<(), Failure> {
        for (item, place) in members {
            let gone = || Failure::new("the parent's chunks are not those that were planned with");
            let row = catalogue.row(item.ordinal).map_err(|e| Failure::io("the list of files", &e))?;
            let hash = match row {
                Row::File { known: Some(content), .. } => content.hash,
                Row::Member { hash, .. } => hash,
                _ => return Err(gone()),
            };
            let old = place.chunk as usize;
            let &(name, len) = lengths.get(old).ok_or_else(gone)?;
            if numbers[old] == u32::MAX {
                numbers[old] = number_of(&made.chunks)?;
                made.chunks.push((name, len));
                made.kept.chunks += 1;
                made.kept.bytes += u64::from(len);
            }
            let fate = Fate::Grouped { hash, chunk: numbers[old], offset: place.offset };
            made.fates.set(item.ordinal, fate).map_err(|e| scratch_failed(&e))?;
            self.counters.files_reused.fetch_add(1, Relaxed);
            self.counters.bytes_reused.fetch_add(item.len.into(), Relaxed);
        }
        Ok(())
    }

    fn publish(&self, both: &Both) -> Result<(), Failure> {
        // The index first: with the pack's document everything that it leans on is there. What
        // both have is put in place once.
        let shared: BTreeSet<&String> = both.index.files.iter().map(|f| &f.0).collect();
        let own = both.pack.files.iter().filter(|f| !shared.contains(&f.0)).cloned().collect();
        let pack = WrittenVersion { files: own, ..both.pack.clone() };
        self.rt.block_on(async {
            publish::publish(self.place, &both.index, self.stop).await?;
            publish::publish(self.place, &pack, self.stop).await?;
            match &self.options.tag {
                Some(tag) => publish::tag(self.place, tag, &both.pack, now_ns()).await,
                None => Ok(()),
            }
        })
    }

    fn report(
        &self,
        both: &Both,
        made: &MadeChunks,
        had_parent: bool,
        skipped: Vec<Fault>,
        took: Duration,
    ) -> PackReport {
        let (options, c) = (self.options, &self.counters);
        PackReport {
            root: both.pack.root.to_string(),
            layout: both.pack.layout.to_string(),
            index_layout: both.index.layout.to_string(),
            tag: options.tag.as_ref().map(ToString::to_string),
            uri: options.uri.to_string(),
            tables: options.to.to_string(),
            entries: both.pack.entries,
            samples: both.pack.samples,
            bytes: both.pack.bytes,
            chunks_written: made.written,
            chunk_bytes_written: made.bytes_written,
            chunks_found: made.found,
            kept: had_parent.then_some(made.kept),
            files_read: c.files_read.load(Relaxed),
            bytes_read: c.bytes_read.load(Relaxed),
            files_reused: c.files_reused.load(Relaxed),
            bytes_reused: c.bytes_reused.load(Relaxed),
            seconds: took.as_secs_f64(),
            skipped,
        }
    }
}

fn number_of(chunks: &[(Hash, u32)]) -> Result<u32, Failure> {
    match u32::try_from(chunks.len()) {
        Ok(n) if n < u32::MAX => Ok(n),
        _ => Err(Failure::new("the pack would have more than 4 billion chunks")),
    }
}

/// Files without bytes are in no chunk and not at fault.
fn empty_files(catalogue: &Catalogue, fates: &Fates) -> Result<(), Failure> {
    for (number, row) in (0u64..).zip(catalogue.iter()) {
        let empty = match row.map_err(|e| Failure::io("the list of files", &e))? {
            Row::File { pin, .. } => pin.size == 0,
            Row::Member { size, .. } => size == 0,
            _ => false,
        };
        if empty {
            fates.set(number, Fate::Empty).map_err(|e| scratch_failed(&e))?;
        }
    }
    Ok(())
}

/// Writes down what became of one piece of work.
fn take(done: Done, made: &mut MadeChunks, faults: &mut Faults) -> Result<(), Failure> {
    match done {
        Done::Sliced(row, Ok(content)) => {
            made.fates.set_sliced(row, &content).map_err(|e| scratch_failed(&e))
        }
        Done::Sliced(_, Err(fault)) => faults.push(fault),
        Done::Group(chunk, faulty) => {
            if let Some(chunk) = chunk {
                let number = number_of(&made.chunks)?;
                made.chunks.push((chunk.hash, chunk.len));
                for (row, hash, offset) in chunk.members {
                    let fate = Fate::Grouped { hash, chunk: number, offset };
                    made.fates.set(row, fate).map_err(|e| scratch_failed(&e))?;
                }
                match chunk.how {
                    How::Written => {
                        made.written += 1;
                        made.bytes_written += u64::from(chunk.len);
                    }
                    How::Found => made.found += 1,
                    How::Unwritten => {}
                }
            }
            faulty.into_iter().try_for_each(|fault| faults.push(fault))
        }
    }
}
