//! The first pass of a pack: what there is at the dataset, and how long it is. No byte of a file
//! is read here, so that the second pass reads each once, chunk by chunk; but shards are, because
//! nothing else says what is in them.

use super::catalogue::{Catalogue, CatalogueWriter, Row};
use super::faults::Faults;
use super::parent::Parent;
use super::plan::{ROW_BYTES, row_of};
use super::shards::{Scanned, ShardReader};
use super::sorter::{Sorted, Sorter};
use crate::failure::{Exit, Failure};
use crate::index::content;
use crate::index::known::{pin_of, row_of as pin_row};
use crate::index::listed::{Listed, Names, objects};
use crate::index::remote::{clean, next_object};
use crate::index::walk::{Step, Walk, WalkOptions};
use crate::progress::Total;
use fletch_core::Hash;
use fletch_core::manifest::pack::{Item, Keeper, Keyer, ParentLocation, Placing};
use fletch_core::manifest::sample::SampleMatcher;
use fletch_core::manifest::tar::shard::{ShardMember, is_compressed_shard, is_shard};
use fletch_core::manifest::{Entry, EntryKind, LayoutParams, PartCutter};
use fletch_origin::Origin;
use fletch_tables::{Fault, PinRow};
use futures::StreamExt;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::runtime::Handle;

/// Memory for the order of the pack; what does not fit is written out and merged.
const SORT_BYTES: usize = 64 << 20;
/// Steps of the walk that are looked at together.
const BATCH: usize = 4096;

/// Takes what is found, in path order.
pub struct Finder<'a> {
    rows: CatalogueWriter,
    items: Sorter<ROW_BYTES>,
    sliced: Vec<u64>,
    keyer: Keyer,
    /// Refuses what no version can hold before anything is read for it.
    order: PartCutter,
    last: String,
    matcher: &'a SampleMatcher,
    parent: Option<Parent>,
    keeper: Option<Keeper>,
    faults: &'a mut Faults,
    total: &'a Total,
    shards: ShardReader<'a>,
    compressed: u64,
}

/// Everything that was found.
pub struct Found {
    /// One row a step.
    pub catalogue: Catalogue,
    /// What is grouped, in the order of the pack.
    pub items: Sorted<ROW_BYTES>,
    /// The rows of files that are cut into slices.
    pub sliced: Vec<u64>,
    /// Knows what of the parent is unchanged.
    pub keeper: Option<Keeper>,
    /// The parent.
    pub parent: Option<Parent>,
}

fn scratch_failed(e: &io::Error) -> Failure {
    Failure::io("cannot write temporary files", e).hint("free some space, or give another --state-dir")
}

impl<'a> Finder<'a> {
    /// At the first entry.
    ///
    /// # Errors
    /// When no files can be made in `scratch`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one run, each used once")]
    pub fn new(
        scratch: &Path,
        params: &LayoutParams,
        matcher: &'a SampleMatcher,
        parent: Option<Parent>,
        keeper: Option<Keeper>,
        faults: &'a mut Faults,
        total: &'a Total,
        shards: ShardReader<'a>,
    ) -> Result<Self, Failure> {
        Ok(Finder {
            rows: CatalogueWriter::new(scratch).map_err(|e| scratch_failed(&e))?,
            items: Sorter::new(scratch, SORT_BYTES).map_err(|e| scratch_failed(&e))?,
            sliced: Vec::new(),
            keyer: Keyer::new(params),
            order: PartCutter::new(),
            last: String::new(),
            matcher,
            parent,
            keeper,
            faults,
            total,
            shards,
            compressed: 0,
        })
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// When the scratch files take no more.
    pub fn finish(self) -> Result<Found, Failure> {
        self.faults.tell_compressed(self.compressed);
        Ok(Found {
            catalogue: self.rows.finish().map_err(|e| scratch_failed(&e))?,
            items: self.items.finish().map_err(|e| scratch_failed(&e))?,
            sliced: self.sliced,
            keeper: self.keeper,
            parent: self.parent,
        })
    }

    fn fault(&mut self, path: &str, why: String) -> Result<(), Failure> {
        self.faults.push(Fault { path: path.to_owned(), why })
    }

    /// Whether a version can hold this entry here.
    fn fits(&mut self, entry: &Entry) -> Result<bool, Failure> {
        let checked = entry.as_ref().validate().and_then(|()| self.order.push(entry.as_ref()).map(|_| ()));
        match checked {
            Ok(()) => {
                self.last.clone_from(&entry.path);
                Ok(true)
            }
            Err(e) => {
                self.fault(&entry.path.escape_debug().to_string(), e.to_string())?;
                Ok(false)
            }
        }
    }

    fn push(&mut self, row: &Row) -> Result<(), Failure> {
        self.rows.push(row).map_err(|e| scratch_failed(&e))
    }

    /// Takes a file.
    ///
    /// # Errors
    /// [`Failure`] when the run ends here.
    pub fn file(&mut self, path: String, pin: PinRow) -> Result<(), Failure> {
        let found = match &mut self.parent {
            Some(parent) => parent.find(&path)?.filter(|(known, _)| known.pin == pin),
            None => None,
        };
        // The hash is not known yet, and nothing here depends on it.
        let sample = self.matcher.sample(&path, EntryKind::File);
        let entry = Entry { sample, ..Entry::file(&path, pin.size, Hash::of(&[])) };
        if !self.fits(&entry)? {
            return Ok(());
        }
        self.total.files.fetch_add(1, Relaxed);
        self.total.bytes.fetch_add(pin.size, Relaxed);
        if is_shard(&path) {
            match self.shards.read(&path, &pin)? {
                Scanned::Shard(content, members) => {
                    self.keyer.next(entry.as_ref());
                    let shard = self.rows.len();
                    self.sliced.push(shard);
                    self.push(&Row::File { path: path.clone(), pin, known: Some(content) })?;
                    return members
                        .into_iter()
                        .try_for_each(|(m, offset)| self.member(&path, shard, m, offset));
                }
                Scanned::Plain(why) => self.faults.warn(&path, &why),
                Scanned::Fault(why) => return self.fault(&path, why),
            }
        }
        self.compressed += u64::from(is_compressed_shard(&path));
        let mut known = found.as_ref().map(|(known, _)| known.content.clone());
        match self.keyer.next(entry.as_ref()) {
            Placing::Group(item) => self.group(&item, found.and_then(|(_, place)| place))?,
            Placing::Slices => self.sliced.push(self.rows.len()),
            Placing::Nothing => known = None,
        }
        self.push(&Row::File { path, pin, known })
    }

    fn group(&mut self, item: &Item, place: Option<ParentLocation>) -> Result<(), Failure> {
        let place = place.filter(|&p| self.keeper.as_mut().is_some_and(|k| k.found(p)));
        self.items.push(row_of(item, place)).map_err(|e| scratch_failed(&e))
    }

    fn member(&mut self, shard_path: &str, shard: u64, m: ShardMember, offset: u64) -> Result<(), Failure> {
        let ShardMember { name, size, hash, slices } = m;
        let path = format!("{shard_path}\0{name}");
        let found = match &mut self.parent {
            Some(parent) => parent.find(&path)?.filter(|(k, _)| k.content.hash == hash && k.pin.size == size),
            None => None,
        };
        let sample = self.matcher.sample(&path, EntryKind::Member);
        let entry = Entry { sample, kind: EntryKind::Member, ..Entry::file(&path, size, hash) };
        if !self.fits(&entry)? {
            return Ok(());
        }
        if let Placing::Group(item) = self.keyer.next(entry.as_ref()) {
            self.group(&item, found.and_then(|(_, place)| place))?;
            self.total.files.fetch_add(1, Relaxed);
            self.total.bytes.fetch_add(size, Relaxed);
        }
        self.push(&Row::Member { path, shard, offset, size, hash, slices })
    }

    fn link(&mut self, path: String, target: String) -> Result<(), Failure> {
        let entry = Entry::symlink(&path, &target);
        if !self.fits(&entry)? {
            return Ok(());
        }
        self.keyer.next(entry.as_ref());
        self.push(&Row::Link { path, target })
    }

    fn dir_end(&mut self, path: String) -> Result<(), Failure> {
        let any = self.last.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/'));
        let entry = Entry::empty_dir(&path);
        if !any && !self.fits(&entry)? {
            return Ok(());
        }
        // The keyer counts rows.
        self.keyer.next(entry.as_ref());
        self.push(&Row::DirEnd { path })
    }

    /// Walks a local tree.
    ///
    /// # Errors
    /// [`Failure`] when the run ends here, or `stop` was set.
    pub fn local(
        &mut self,
        options: WalkOptions,
        scratch: &Path,
        threads: usize,
        stop: &AtomicBool,
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
            if stop.load(Relaxed) {
                return Err(Failure::new("stopped").exit(Exit::Interrupted));
            }
            let each = steps.len().div_ceil(threads.max(1));
            let seen: Vec<Seen> = std::thread::scope(|scope| {
                let looks: Vec<_> = steps
                    .chunks(each)
                    .map(|steps| scope.spawn(|| steps.iter().map(|s| look(&base, s)).collect::<Vec<_>>()))
                    .collect();
                looks.into_iter().map(|l| l.join()).collect::<Result<Vec<_>, _>>()
            })
            .map_err(|_| Failure::new("a thread that looked at files failed; see above"))?
            .into_iter()
            .flatten()
            .collect();
            for seen in seen {
                match seen {
                    Seen::File(path, pin) => self.file(path, pin)?,
                    Seen::Link(path, target) => self.link(path, target)?,
                    Seen::DirEnd(path) => self.dir_end(path)?,
                    Seen::Fault(path, why) => self.fault(&path, why)?,
                }
            }
        }
    }

    /// Lists a store.
    ///
    /// # Errors
    /// [`Failure`] when the run ends here, or `stop` was set.
    pub fn remote(
        &mut self,
        rt: &Handle,
        origin: &Origin,
        names: Option<&Names>,
        exclude: &BTreeSet<String>,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        let (mut list, mut held) = (objects(origin, names).fuse(), None);
        while let Some(listed) = rt.block_on(next_object(&mut list, &mut held, exclude))? {
            if stop.load(Relaxed) {
                return Err(Failure::new("stopped").exit(Exit::Interrupted));
            }
            let object = match listed {
                Listed::Object(object) => object,
                Listed::Fault { path, why } => {
                    self.fault(&path, why)?;
                    continue;
                }
            };
            let pin = pin_row(object.pin());
            if clean(&object.path) {
                self.file(object.path, pin)?;
            } else {
                let why = "its key is no clean path (an empty, `.` or `..` component); rename it";
                self.fault(&object.path.escape_debug().to_string(), why.into())?;
            }
        }
        Ok(())
    }
}

/// What a step of the walk turned out to be.
enum Seen {
    File(String, PinRow),
    Link(String, String),
    DirEnd(String),
    Fault(String, String),
}

fn look(base: &Path, step: &Step) -> Seen {
    match step {
        Step::File { path, follow } => {
            let full = base.join(path);
            let meta = if *follow { fs::metadata(&full) } else { fs::symlink_metadata(&full) };
            let fault = |e: content::ReadFault| Seen::Fault(path.clone(), e.to_string());
            match meta {
                Ok(m) if !m.is_file() => fault(content::ReadFault::Kind),
                // A file that has content although its size is 0 is told by trying.
                Ok(m) if m.len() == 0 => {
                    let read = content::open(&full, *follow)
                        .and_then(|(file, meta)| content::read_small(&file, &meta, &mut Vec::new()));
                    match read {
                        Ok(Some(_)) => Seen::File(path.clone(), pin_of(&m)),
                        Ok(None) => fault(content::ReadFault::Changing),
                        Err(e) => fault(e),
                    }
                }
                Ok(m) => Seen::File(path.clone(), pin_of(&m)),
                Err(e) => fault(e.into()),
            }
        }
        Step::Link { path } => match fs::read_link(base.join(path)) {
            Ok(target) => match target.into_os_string().into_string() {
                Ok(target) => Seen::Link(path.clone(), target),
                Err(_) => Seen::Fault(path.clone(), "its target is not UTF-8; replace the link".into()),
            },
            Err(e) => Seen::Fault(path.clone(), content::ReadFault::Io(e).to_string()),
        },
        Step::DirEnd { path } => Seen::DirEnd(path.clone()),
        Step::Fault { path, why } => Seen::Fault(path.clone(), why.clone()),
    }
}
