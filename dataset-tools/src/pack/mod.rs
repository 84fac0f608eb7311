//! `fletch pack`: groups the small files of a dataset into chunks, writes each chunk as one object, and
//! writes the tables of the version.
//!
//! Owns the passes over a dataset that make a pack. The rules of the grouping are in `fletch_core`, and
//! `docs/FORMATS-pack.md` has them to the byte.
//!
//! Flow: paths and sizes ([`scan`]) → the order, the groups, and what stays of a parent ([`plan`]) → each
//! file read once, chunks written ([`assemble`]) → tables ([`tables`]) → published, the tag last. The same
//! tree gives the same chunks, in whatever order reads finish. The journal records each chunk, so that a
//! stopped run can be resumed.
//!
//! A pack has no pins. So a run also writes an index layout of the same root: it has them, serves as the
//! index layout of a parent, and is a second way to the bytes.

pub mod assemble;
pub mod catalogue;
pub mod plan;
pub mod scan;
pub mod shards;
pub mod sorter;
pub mod tables;

use crate::failure::Failure;
use crate::progress::{Progress, Total};
use crate::run::faults::Faults;
use crate::run::groups::RunGroups;
use crate::run::journal::chunks::ChunkJournal;
use crate::run::mark::Mark;
use crate::run::options::{RunFailure, RunOptions, RunReport};
use crate::run::parent::{self, PackParent, ParentChunks};
use crate::run::state::RunState;
use crate::run::{Run, RunContext, publish};
use crate::source::listing::{KeyOrder, KeySorting, ListingError, Objects};
use crate::source::outage::OutageJudge;
use assemble::{Assembler, BYTES_MAX, ChunkWrite, Done};
use catalogue::{Catalogue, Placement, Placements, Row};
use fletch_core::Hash;
use fletch_core::manifest::pack::{Item, Keeper, PackParams, ParentLocation};
use fletch_core::manifest::{LayoutKind, LayoutParams};
use fletch_tables::WrittenVersion;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use plan::{Plan, Work};
use scan::{Scan, Scanner};
use serde::Serialize;
use shards::ShardReader;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tables::{PackTables, Packed};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Chunks made at once when the dataset or the tables location is a store.
const REMOTE_AT_ONCE: usize = 16;
/// How often the run checks for Ctrl-C while it waits.
const STOP_EVERY: Duration = Duration::from_millis(200);

/// What `pack` is asked to do.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// The options that `index` has too.
    pub run: RunOptions,
    /// How files are grouped.
    pub params: LayoutParams,
    /// Whether no sample may be outside the canonical grouping.
    pub compact: bool,
}

/// What a pack kept of its parent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Kept {
    /// Chunks of the parent that stay.
    pub chunks: u64,
    /// Bytes of these chunks.
    pub bytes: u64,
    /// Samples that are grouped.
    pub samples: u64,
    /// Grouped samples outside the canonical grouping.
    pub samples_outside: u64,
}

/// The report of a pack: its `--json` output.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PackReport {
    /// What `index` reports too. The layout is the packed one.
    #[serde(flatten)]
    pub run: RunReport,
    /// The index layout that was written beside it.
    pub index_layout: String,
    /// Chunks that were written.
    pub chunks_written: u64,
    /// Bytes of chunks that were written.
    pub chunk_bytes_written: u64,
    /// Chunks that existed already, from a stopped run or another dataset.
    pub chunks_found: u64,
    /// What was kept of the parent; `null` without a parent.
    pub kept: Option<Kept>,
}

struct Pack<'a> {
    options: &'a PackOptions,
    run: &'a Run<'a>,
    scratch: PathBuf,
    total: Arc<Total>,
}

/// The chunks of the pack, and where each entry is in them.
struct MadeChunks {
    placements: Placements,
    /// Hash and length of each chunk.
    chunks: Vec<(Hash, u32)>,
    written: u64,
    bytes_written: u64,
    found: u64,
    kept: Kept,
}

/// Packs a dataset.
///
/// # Errors
/// [`RunFailure`]. The journal keeps the chunks that were written, for the next run.
pub fn run(options: &PackOptions, ctx: RunContext<'_>) -> Result<PackReport, RunFailure> {
    let run = Run::open(&options.run, ctx)?;
    let key = format!(
        "pack\n{}\n{}\n{:?}\n{}\n{:?}",
        options.run.uri,
        options.run.to,
        options.run.rule,
        options.run.symlinks.as_str(),
        options.params
    );
    let state = RunState::lock(&options.run.state_dir, &key, "packing")?;
    let pack = Pack { options, run: &run, scratch: state.scratch(), total: Arc::default() };
    // The run relies on chunks that it finds.
    let mark = run.ctx.rt.block_on(Mark::of_run(&run.tables, ctx.out, ctx.stop));
    let mark = mark.map_err(|e| publish::at_another_place(e, &run.tables))?;
    let done = pack.pack(&state, &mark);
    run.ctx.rt.block_on(mark.remove(ctx.out));
    state.end(done, "the journal keeps the chunks that were written")
}

impl Pack<'_> {
    fn open_parent(&self) -> Result<Option<PackParent>, Failure> {
        parent::open(self.run, |root, layout| {
            let parent = PackParent::open(self.run, (root, layout), &self.options.params)?;
            if parent.is_none() {
                self.run
                    .ctx
                    .out
                    .warn("the parent has no index layout to prove files unchanged, so every file is read");
            }
            Ok(parent)
        })
    }

    fn show(&self, verb: &'static str) -> Progress {
        self.run.progress(verb, Arc::clone(&self.total), None)
    }

    /// The first pass: lists the dataset, and returns what was found with the chunks of the parent.
    fn scan(
        &self,
        faults: &mut Faults,
        (judge, order): (&OutageJudge<'_>, KeyOrder),
    ) -> Result<(Scan, Option<Arc<ParentChunks>>), ListingError> {
        let (options, run) = (self.options, self.run);
        let sampler = run.sampler()?;
        let parent = self.open_parent()?;
        let chunks = parent.as_ref().map(PackParent::chunks);
        let keeper = chunks.as_ref().map(|chunks| {
            let lengths = chunks.all.iter().map(|c| c.1).collect();
            Keeper::new(plan::keep_rule(options.compact), &options.params, lengths)
        });
        let shards = ShardReader { rt: run.ctx.rt, source: &run.source, counters: run.ctx.counters, judge };
        let mut scanner = Scanner::new(
            &self.scratch,
            &options.params,
            &sampler,
            parent,
            keeper,
            faults,
            &self.total,
            shards,
        )?;
        let (threads, stop) = (options.run.threads, run.ctx.stop);
        match &run.base {
            Some(base) => {
                let walk = run.walk_options(base.path());
                scanner.local(walk, &self.scratch, threads, stop, |path| run.note_other_file_system(path))?;
                base.check()?;
            }
            None => {
                let (names, exclude) = (options.run.list.as_ref(), run.excluded_prefixes());
                let sorting = KeySorting { order, scratch: &self.scratch, out: Some(run.ctx.out) };
                let objects = Objects::new(&run.source, names, exclude, sorting);
                scanner.remote(run.ctx.rt, objects, stop)?;
            }
        }
        Ok((scanner.finish(run.ctx.out)?, chunks))
    }

    fn pack(&self, state: &RunState, mark: &Mark) -> Result<PackReport, RunFailure> {
        let run = self.run;
        let journal = ChunkJournal::open(state.chunk_journal(), run.started_ns)
            .map_err(|e| Failure::io("cannot use the journal", &e).hint("give another --state-dir"))?;
        if !journal.is_empty() {
            let made = journal.len();
            run.ctx.out.note(format_args!("resuming: chunks and long files already made: {made}"));
        }
        let groups = RunGroups::open(state, run.ctx.out);
        let judge = OutageJudge::new(&run.source, run.base.as_ref());
        let mut faults = Faults::new(self.options.run.on_fault, run.ctx.out);
        let scanned = match self.scan(&mut faults, (&judge, KeyOrder::Listed)) {
            Err(ListingError::Unsorted) => {
                run.note_unsorted();
                run.ctx.counters.restart();
                self.total.restart();
                faults = Faults::new(self.options.run.on_fault, run.ctx.out);
                self.scan(&mut faults, (&judge, KeyOrder::Sorted))
            }
            scanned => scanned,
        };
        let made = scanned.map_err(ListingError::failure).and_then(|(scan, chunks)| {
            let _progress = self.show("packing");
            let made = self.make(&scan, chunks.as_deref(), (journal, &judge, &groups), &mut faults)?;
            judge.finish()?;
            Ok((scan.catalogue, made, chunks))
        });
        let (catalogue, made, parent) = match made {
            Ok(made) => made,
            Err(failure) => return Err(RunFailure { failure, faults: faults.finish() }),
        };
        let packed = Packed { catalogue: &catalogue, placements: &made.placements, chunks: &made.chunks };
        let (report_only, lost) = (faults.report_only(), faults.lost());
        let groups = (&groups, parent.as_ref().and_then(|parent| parent.index.as_ref()));
        let params = &self.options.params;
        let (tables, skipped) = tables::write(&packed, run, params, (&self.scratch, groups), faults)?;
        if report_only {
            return Err(RunFailure { failure: Faults::failure(skipped.len()), faults: skipped });
        }
        run.check_not_empty(&tables.pack)?;
        run.ctx.rt.block_on(run.check_loss(&tables.pack, lost))?;
        self.publish(&tables, mark)?;
        Ok(PackReport {
            run: run.report(&tables.pack, skipped),
            index_layout: tables.index.layout.to_string(),
            chunks_written: made.written,
            chunk_bytes_written: made.bytes_written,
            chunks_found: made.found,
            kept: parent.is_some().then_some(made.kept),
        })
    }

    /// The second pass: makes every chunk and hashes every long file. `parent` has the parent's chunks.
    fn make(
        &self,
        scan: &Scan,
        parent: Option<&ParentChunks>,
        (journal, judge, groups): (ChunkJournal, &OutageJudge<'_>, &RunGroups),
        faults: &mut Faults,
    ) -> Result<MadeChunks, Failure> {
        let (run, catalogue) = (self.run, &scan.catalogue);
        let placements = Placements::new(&self.scratch, catalogue.len()).map_err(|e| Failure::scratch(&e))?;
        place_empty_files(catalogue, &placements)?;
        let params = &self.options.params;
        let mut plan = Plan::new(params, &scan.items, scan.keeper.clone())?;
        let parent: &[(Hash, u32)] = parent.map_or(&[], |chunks| &chunks.all);
        let (chunks, kept) = (Vec::new(), plan.kept);
        let mut made = MadeChunks { placements, chunks, written: 0, bytes_written: 0, found: 0, kept };
        // The number in this pack of each chunk of the parent that stays.
        let mut numbers = vec![u32::MAX; parent.len()];
        let assembler = Assembler {
            source: &run.source,
            tables: run.tables.origin(),
            catalogue,
            params: params.pack.unwrap_or(PackParams::DEFAULT),
            journal: RefCell::new(journal),
            judge,
            groups: groups.clone(),
            counters: run.ctx.counters,
            memory: Semaphore::new(BYTES_MAX as usize),
            report_only: Cell::new(faults.report_only()),
        };
        let local = run.source.local_dir().is_some() && run.tables.origin().local_dir().is_some();
        let at_once = if local { self.options.run.threads.max(1) } else { REMOTE_AT_ONCE };
        let mut sliced = scan.sliced.iter();
        let mut groups_left = true;
        run.ctx.rt.block_on(async {
            let mut under_way = FuturesUnordered::new();
            loop {
                while under_way.len() < at_once {
                    // Long files after the groups.
                    match if groups_left { plan.next_work()? } else { None } {
                        Some(Work::Group(group)) => under_way.push(assembler.group(group).left_future()),
                        Some(Work::Keep(members)) => {
                            self.keep(&members, parent, &mut numbers, catalogue, &mut made)?;
                        }
                        None => {
                            groups_left = false;
                            let Some(&row) = sliced.next() else { break };
                            under_way.push(assembler.sliced(row).right_future());
                        }
                    }
                }
                Failure::if_stopped(run.ctx.stop)?;
                match timeout(STOP_EVERY, under_way.next()).await {
                    Err(_) => {}
                    Ok(None) => return Ok(made),
                    Ok(Some(done)) => {
                        record(done?, &mut made, faults)?;
                        assembler.report_only.set(faults.report_only());
                    }
                }
            }
        })
    }

    /// Records members that stay in chunks of the parent.
    fn keep(
        &self,
        members: &[(Item, ParentLocation)],
        parent: &[(Hash, u32)],
        numbers: &mut [u32],
        catalogue: &Catalogue,
        made: &mut MadeChunks,
    ) -> Result<(), Failure> {
        for (item, place) in members {
            let gone = || {
                Failure::new("the chunks of the parent changed during the run").hint("run the command again")
            };
            let row = catalogue.row(item.ordinal).map_err(|e| Failure::scratch(&e))?;
            let hash = match row {
                Row::File { known: Some(content), .. } => content.hash,
                Row::Member { hash, .. } => hash,
                _ => return Err(gone()),
            };
            let old = place.chunk as usize;
            let &(name, len) = parent.get(old).ok_or_else(gone)?;
            if numbers[old] == u32::MAX {
                numbers[old] = next_number(&made.chunks)?;
                made.chunks.push((name, len));
                made.kept.chunks += 1;
                made.kept.bytes += u64::from(len);
            }
            let placement = Placement::Grouped { hash, chunk: numbers[old], offset: place.offset };
            made.placements.set(item.ordinal, placement).map_err(|e| Failure::scratch(&e))?;
            self.run.ctx.counters.reuse(1, item.len.into());
        }
        Ok(())
    }

    /// Publishes the index layout, then the files that only the pack has, then the tag.
    ///
    /// In this order, a reader of the pack's `layout.json` finds everything that the pack depends on.
    fn publish(&self, made: &PackTables, mark: &Mark) -> Result<(), Failure> {
        let (tables, stop) = (&self.run.tables, self.run.ctx.stop);
        let shared: BTreeSet<&String> = made.index.files.iter().map(|f| &f.0).collect();
        let own = made.pack.files.iter().filter(|f| !shared.contains(&f.0)).cloned().collect();
        let pack = WrittenVersion { files: own, ..made.pack.clone() };
        self.run.ctx.rt.block_on(async {
            publish::publish(tables, &made.index, stop).await?;
            publish::publish(tables, &pack, stop).await?;
            // Nobody finds the version before its tag names it.
            mark.check()?;
            self.run.move_tag(&pack, LayoutKind::Pack).await
        })
    }
}

/// Returns the number of the next chunk.
fn next_number(chunks: &[(Hash, u32)]) -> Result<u32, Failure> {
    match u32::try_from(chunks.len()) {
        Ok(n) if n < u32::MAX => Ok(n),
        _ => Err(Failure::new("the pack would have more than 4 billion chunks")),
    }
}

/// Records the files without bytes, which are in no chunk.
fn place_empty_files(catalogue: &Catalogue, placements: &Placements) -> Result<(), Failure> {
    for (number, row) in (0u64..).zip(catalogue.iter()) {
        let empty = match row.map_err(|e| Failure::scratch(&e))? {
            Row::File { pin, .. } => pin.size == 0,
            Row::Member { size, .. } => size == 0,
            _ => false,
        };
        if empty {
            placements.set(number, Placement::Empty).map_err(|e| Failure::scratch(&e))?;
        }
    }
    Ok(())
}

/// Records the result of one piece of work.
fn record(done: Done, made: &mut MadeChunks, faults: &mut Faults) -> Result<(), Failure> {
    match done {
        Done::Sliced(row, Ok(content)) => {
            made.placements.set_sliced(row, &content).map_err(|e| Failure::scratch(&e))
        }
        Done::Sliced(_, Err(fault)) => faults.lose(fault),
        Done::Group(chunk, faulty) => {
            if let Some(chunk) = chunk {
                let number = next_number(&made.chunks)?;
                made.chunks.push((chunk.hash, chunk.len));
                for (row, hash, offset) in chunk.members {
                    let placement = Placement::Grouped { hash, chunk: number, offset };
                    made.placements.set(row, placement).map_err(|e| Failure::scratch(&e))?;
                }
                match chunk.write {
                    ChunkWrite::Written => {
                        made.written += 1;
                        made.bytes_written += u64::from(chunk.len);
                    }
                    ChunkWrite::Existed => made.found += 1,
                    ChunkWrite::Unwritten => {}
                }
            }
            faulty.into_iter().try_for_each(|fault| faults.lose(fault))
        }
    }
}
