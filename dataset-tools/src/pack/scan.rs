//! The first pass of a pack: lists the paths and sizes of the dataset, and orders the entries for grouping.
//!
//! Reads no file, so that the second pass reads each file once, chunk by chunk. The exceptions are tar
//! shards, because only their bytes say which members they have.

use super::catalogue::{Catalogue, CatalogueWriter, Row};
use super::plan::{ROW_BYTES, row_of};
use super::shards::{ShardReader, ShardScan};
use super::sorter::{Sorted, Sorter};
use crate::failure::Failure;
use crate::out::Out;
use crate::progress::Total;
use crate::run::faults::Faults;
use crate::run::file_record::Lookup;
use crate::run::parent::{PackParent, PackRecord};
use crate::source::content::{self, ReadFault};
use crate::source::listing::{Listed, ListingError, Objects};
use crate::source::outage::directory_outage;
use crate::source::pin::{pin_of, pin_row};
use crate::source::sampler::Sampler;
use crate::source::walk::{Step, Walk, WalkOptions};
use fletch_core::Hash;
use fletch_core::manifest::pack::{Item, Keeper, Keyer, ParentLocation, Placing};
use fletch_core::manifest::tar::shard::{ShardMember, is_compressed_shard, is_shard};
use fletch_core::manifest::{BadEntry, Entry, EntryKind, LayoutParams, PartCutter};
use fletch_tables::{Fault, PinRow};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::runtime::Handle;

/// The memory for sorting, in bytes. Rows beyond it are written out and merged.
const SORT_BYTES: usize = 64 << 20;
/// Steps of the walk whose files are inspected together.
const BATCH: usize = 4096;

/// Collects the entries of the dataset, in path order.
pub struct Scanner<'a> {
    rows: CatalogueWriter,
    items: Sorter<ROW_BYTES>,
    sliced: Vec<u64>,
    keyer: Keyer,
    /// Finds entries that no version can have, before anything is read for them.
    order: PartCutter,
    last: String,
    sampler: &'a Sampler,
    parent: Option<Lookup<PackRecord>>,
    keeper: Option<Keeper>,
    faults: &'a mut Faults,
    total: &'a Total,
    shards: ShardReader<'a>,
    compressed: u64,
}

/// The result of the first pass.
pub struct Scan {
    /// One row for each step of the walk.
    pub catalogue: Catalogue,
    /// The entries to group, in the order of the pack.
    pub items: Sorted<ROW_BYTES>,
    /// The row numbers of files that are cut into slices.
    pub sliced: Vec<u64>,
    /// Decides which chunks of the parent stay; `None` without a parent.
    pub keeper: Option<Keeper>,
}

impl<'a> Scanner<'a> {
    /// Begins before the first entry.
    ///
    /// # Errors
    /// [`Failure`] when the scratch files cannot be created.
    #[expect(clippy::too_many_arguments, reason = "the parts of one run, each used once")]
    pub fn new(
        scratch: &Path,
        params: &LayoutParams,
        sampler: &'a Sampler,
        parent: Option<PackParent>,
        keeper: Option<Keeper>,
        faults: &'a mut Faults,
        total: &'a Total,
        shards: ShardReader<'a>,
    ) -> Result<Self, Failure> {
        Ok(Scanner {
            rows: CatalogueWriter::new(scratch).map_err(|e| Failure::scratch(&e))?,
            items: Sorter::new(scratch, SORT_BYTES).map_err(|e| Failure::scratch(&e))?,
            sliced: Vec::new(),
            keyer: Keyer::new(params),
            order: PartCutter::new(),
            last: String::new(),
            sampler,
            parent: parent.map(|parent| Lookup::new(Box::new(parent))),
            keeper,
            faults,
            total,
            shards,
            compressed: 0,
        })
    }

    /// Ends the pass, and notes the compressed archives.
    ///
    /// # Errors
    /// [`Failure`] when the scratch files cannot be written.
    pub fn finish(self, out: Out) -> Result<Scan, Failure> {
        out.note_compressed(self.compressed);
        Ok(Scan {
            catalogue: self.rows.finish().map_err(|e| Failure::scratch(&e))?,
            items: self.items.finish().map_err(|e| Failure::scratch(&e))?,
            sliced: self.sliced,
            keeper: self.keeper,
        })
    }

    fn lose(&mut self, path: &str, why: String) -> Result<(), Failure> {
        self.faults.lose(Fault { path: path.to_owned(), why })
    }

    fn fault(&mut self, path: &str, why: String) -> Result<(), Failure> {
        self.faults.push(Fault { path: path.to_owned(), why })
    }

    /// Whether a version can have this entry after the entries so far. Otherwise it is a fault.
    fn is_valid(&mut self, entry: &Entry) -> Result<bool, Failure> {
        let checked = entry.as_ref().validate().and_then(|()| self.order.push(entry.as_ref()).map(|_| ()));
        match checked {
            Ok(()) => {
                self.last.clone_from(&entry.path);
                Ok(true)
            }
            Err(e) => {
                let path = entry.path.escape_debug().to_string();
                match e {
                    // The entry is there, and one of the two has no place in a tree.
                    BadEntry::FileAndDirectory(_) => self.lose(&path, e.to_string())?,
                    _ => self.fault(&path, e.to_string())?,
                }
                Ok(false)
            }
        }
    }

    fn push(&mut self, row: &Row) -> Result<(), Failure> {
        self.rows.push(row).map_err(|e| Failure::scratch(&e))
    }

    /// Adds a file, and the members of a shard.
    fn file(&mut self, path: String, pin: PinRow) -> Result<(), Failure> {
        let found = match &mut self.parent {
            Some(parent) => parent.find(&path)?.filter(|r| r.file.proves(&pin)),
            None => None,
        };
        // The hash is not known yet, and the checks here do not depend on it.
        let sample = self.sampler.sample(&path, EntryKind::File);
        let entry = Entry { sample, ..Entry::file(&path, pin.size, Hash::of(&[])) };
        if !self.is_valid(&entry)? {
            return Ok(());
        }
        self.total.files.fetch_add(1, Relaxed);
        self.total.bytes.fetch_add(pin.size, Relaxed);
        if is_shard(&path) {
            match self.shards.read(&path, &pin)? {
                ShardScan::Shard(content, members) => {
                    self.keyer.next(entry.as_ref());
                    let shard = self.rows.len();
                    self.sliced.push(shard);
                    self.push(&Row::File { path: path.clone(), pin, known: Some(content) })?;
                    return members
                        .into_iter()
                        .try_for_each(|(m, offset)| self.member(&path, shard, m, offset));
                }
                ShardScan::Plain(why) => self.faults.warn_plain_shard(&path, &why),
                ShardScan::Fault(why) => return self.lose(&path, why),
            }
        }
        self.compressed += u64::from(is_compressed_shard(&path));
        let mut known = found.as_ref().map(|r| r.file.content.clone());
        match self.keyer.next(entry.as_ref()) {
            Placing::Group(item) => self.group(&item, found.and_then(|r| r.place))?,
            Placing::Slices => self.sliced.push(self.rows.len()),
            Placing::Nothing => known = None,
        }
        self.push(&Row::File { path, pin, known })
    }

    fn group(&mut self, item: &Item, place: Option<ParentLocation>) -> Result<(), Failure> {
        let place = place.filter(|&p| self.keeper.as_mut().is_some_and(|k| k.found(p)));
        self.items.push(row_of(item, place)).map_err(|e| Failure::scratch(&e))
    }

    fn member(&mut self, shard_path: &str, shard: u64, m: ShardMember, offset: u64) -> Result<(), Failure> {
        let ShardMember { name, size, hash, slices } = m;
        let path = format!("{shard_path}\0{name}");
        let found = match &mut self.parent {
            Some(parent) => parent.find(&path)?,
            None => None,
        };
        let found = found.filter(|r| r.file.content.hash == hash && r.file.pin.size == size);
        let sample = self.sampler.sample(&path, EntryKind::Member);
        let entry = Entry { sample, kind: EntryKind::Member, ..Entry::file(&path, size, hash) };
        if !self.is_valid(&entry)? {
            return Ok(());
        }
        if let Placing::Group(item) = self.keyer.next(entry.as_ref()) {
            self.group(&item, found.and_then(|r| r.place))?;
            self.total.files.fetch_add(1, Relaxed);
            self.total.bytes.fetch_add(size, Relaxed);
        }
        self.push(&Row::Member { path, shard, offset, size, hash, slices })
    }

    fn link(&mut self, path: String, target: String) -> Result<(), Failure> {
        let entry = Entry::symlink(&path, &target);
        if !self.is_valid(&entry)? {
            return Ok(());
        }
        self.keyer.next(entry.as_ref());
        self.push(&Row::Link { path, target })
    }

    fn dir_end(&mut self, path: String) -> Result<(), Failure> {
        let any = self.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/'));
        let entry = Entry::empty_dir(&path);
        if !any && !self.is_valid(&entry)? {
            return Ok(());
        }
        // The keyer counts rows, so it must see this one too.
        self.keyer.next(entry.as_ref());
        self.push(&Row::DirEnd { path })
    }

    /// Walks a local tree. Passes each directory that is not walked, because it is on another file system, to
    /// `other_file_system`.
    ///
    /// # Errors
    /// [`Failure`] when a fault ends the run, the tree cannot be read, or `stop` was set.
    pub fn local(
        &mut self,
        options: WalkOptions,
        scratch: &Path,
        threads: usize,
        stop: &AtomicBool,
        other_file_system: impl Fn(&str),
    ) -> Result<(), Failure> {
        let base = options.base.clone();
        let cannot =
            |e: &io::Error| Failure::io(format_args!("cannot read the dataset {}", base.display()), e);
        let mut walk = Walk::new(options, scratch).map_err(|e| cannot(&e))?;
        loop {
            let mut steps = Vec::with_capacity(BATCH);
            while steps.len() < BATCH
                && let Some(step) = walk.next_step().map_err(|e| cannot(&e))?
            {
                steps.push(step);
            }
            if steps.is_empty() {
                return Ok(());
            }
            Failure::if_stopped(stop)?;
            let each = steps.len().div_ceil(threads.max(1));
            let inspected: Vec<Inspected> = std::thread::scope(|scope| {
                let threads: Vec<_> = steps
                    .chunks(each)
                    .map(|steps| scope.spawn(|| steps.iter().map(|s| inspect(&base, s)).collect::<Vec<_>>()))
                    .collect();
                threads.into_iter().map(|t| t.join()).collect::<Result<Vec<_>, _>>()
            })
            .map_err(|_| {
                Failure::new("a thread that inspects files panicked")
                    .hint("the message above says why; report it")
            })?
            .into_iter()
            .flatten()
            .collect();
            for step in inspected {
                match step {
                    Inspected::File(path, pin) => self.file(path, pin)?,
                    Inspected::Link(path, target) => self.link(path, target)?,
                    Inspected::DirEnd(path) => self.dir_end(path)?,
                    Inspected::OtherFileSystem(path) => {
                        other_file_system(&path);
                        self.dir_end(path)?;
                    }
                    Inspected::Fault(path, why) => self.fault(&path, why)?,
                    Inspected::Lost(path, why) => self.lose(&path, why)?,
                    Inspected::Outage(failure) => return Err(failure),
                }
            }
        }
    }

    /// Lists a store.
    ///
    /// # Errors
    /// The [`Failure`] when a fault ends the run, the listing fails, the origin is away, or `stop` was set;
    /// [`ListingError::Unsorted`] if the pass must begin anew with sorted keys.
    pub fn remote(
        &mut self,
        rt: &Handle,
        mut objects: Objects,
        stop: &AtomicBool,
    ) -> Result<(), ListingError> {
        while let Some(listed) = rt.block_on(objects.next())? {
            Failure::if_stopped(stop)?;
            match listed {
                Listed::Object(object) => {
                    let pin = pin_row(object.pin());
                    self.file(object.path, pin)?;
                }
                Listed::EmptyDir { path } => self.dir_end(path)?,
                Listed::Link { path, target } => self.link(path, target)?,
                Listed::Fault { path, why } => self.fault(&path, why)?,
                Listed::Failed { path, error } => {
                    let why = rt.block_on(self.shards.judge.judge(error))?;
                    self.lose(&path, why)?;
                }
            }
        }
        Ok(())
    }
}

/// A step of the walk, with the pin of its file or the target of its link.
enum Inspected {
    File(String, PinRow),
    Link(String, String),
    DirEnd(String),
    OtherFileSystem(String),
    Fault(String, String),
    /// An entry that cannot be read.
    Lost(String, String),
    /// The file system fails.
    Outage(Failure),
}

fn faulty(full: &Path, path: &str, fault: &ReadFault) -> Inspected {
    match fault.outage(full) {
        Some(failure) => Inspected::Outage(failure),
        None if fault.is_loss() => Inspected::Lost(path.to_owned(), fault.to_string()),
        None => Inspected::Fault(path.to_owned(), fault.to_string()),
    }
}

fn inspect(base: &Path, step: &Step) -> Inspected {
    match step {
        Step::File { path, follow } => {
            let full = base.join(path);
            let meta = if *follow { fs::metadata(&full) } else { fs::symlink_metadata(&full) };
            let fault = |e: ReadFault| faulty(&full, path, &e);
            match meta {
                Ok(m) if !m.is_file() => fault(ReadFault::Kind),
                // Only reading shows whether a file has content although its size is 0.
                Ok(m) if m.len() == 0 => {
                    let read = content::open(&full, *follow)
                        .and_then(|(file, meta)| content::read_small(&file, &meta, &mut Vec::new(), None));
                    match read {
                        Ok(Some(_)) => Inspected::File(path.clone(), pin_of(&m)),
                        Ok(None) => fault(ReadFault::Changing),
                        Err(e) => fault(e),
                    }
                }
                Ok(m) => Inspected::File(path.clone(), pin_of(&m)),
                Err(e) => fault(e.into()),
            }
        }
        Step::Link { path } => match content::read_target(&base.join(path)) {
            Ok(target) => Inspected::Link(path.clone(), target),
            Err(e) => faulty(&base.join(path), path, &e),
        },
        Step::DirEnd { path } => Inspected::DirEnd(path.clone()),
        Step::OtherFileSystem { path } => Inspected::OtherFileSystem(path.clone()),
        Step::Fault { path, why } => Inspected::Fault(path.clone(), why.clone()),
        Step::Unreadable { path, why } => Inspected::Lost(path.clone(), why.clone()),
        Step::Outage { path, errno } => {
            Inspected::Outage(directory_outage(&base.join(path), &io::Error::from_raw_os_error(*errno)))
        }
    }
}
