//! What an earlier version knows of a dataset's files: from its index layout how they looked and
//! what they are, from its packed layout where they lie.

use crate::failure::Failure;
use crate::index::content::Content;
use crate::index::known::{Known, trusted};
use crate::place::Place;
use fletch_core::manifest::pack::ParentLocation;
use fletch_core::manifest::{EntryKind, LayoutParams};
use fletch_core::{Hash, LayoutId, Root};
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow, Version, paths};
use futures::StreamExt;
use std::cmp::Ordering;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The chunks of a parent's pack, by number: ascending by hash.
#[derive(Debug, Default)]
pub struct ParentChunks {
    /// Name and length of each.
    pub all: Vec<(Hash, u32)>,
    /// Whether its object is still there.
    there: Vec<bool>,
}

impl ParentChunks {
    fn place(&self, chunk: Hash, offset: u32) -> Option<ParentLocation> {
        let at = self.all.binary_search_by_key(&chunk, |c| c.0).ok()?;
        self.there[at].then_some(ParentLocation { chunk: u32::try_from(at).ok()?, offset })
    }

    /// Reads which chunks a pack has, and lists which of their objects are there.
    async fn read(version: &Version, place: &Place) -> Result<Self, Failure> {
        let mut all = Vec::new();
        for part in 0..version.index().parts().len() {
            let rows = version.chunk_rows(part).await?;
            let own = |r: &ChunkRow| matches!(r.object, ObjectRef::Key(_)).then_some((r.chunk, r.len));
            all.extend(rows.iter().filter_map(own));
        }
        all.sort_unstable();
        all.dedup_by_key(|c| c.0);
        let mut there = vec![false; all.len()];
        let mut list = place.origin().list(paths::CHUNKS);
        let mut at = 0;
        while let Some(object) = list.next().await {
            let object = match object {
                Ok(object) => object,
                Err(fletch_origin::OriginError::NotFound { .. }) => break,
                Err(e) => return Err(e.into()),
            };
            let name = object.path.rsplit('/').next().unwrap_or_default();
            let Ok(hash) = name.parse::<Hash>() else { continue };
            // Both are in the order of hashes.
            while all.get(at).is_some_and(|c| c.0 < hash) {
                at += 1;
            }
            if all.get(at).is_some_and(|c| c.0 == hash && u64::from(c.1) == object.size) {
                there[at] = true;
            }
        }
        Ok(ParentChunks { all, there })
    }
}

/// One part, of both layouts.
struct Open {
    index: Arc<LoadedPart>,
    chunks: Arc<Vec<ChunkRow>>,
    packed: Option<Arc<LoadedPart>>,
    /// By row of the part; `u32::MAX` for none.
    pins: Vec<u32>,
    row: usize,
}

/// The files of a parent in path order; looked up in that order. Two parts in memory at most.
pub struct Parent {
    rt: Handle,
    index: Version,
    packed: Option<Version>,
    /// The chunks that may be kept.
    pub chunks: ParentChunks,
    local: bool,
    next_part: usize,
    open: Option<Open>,
    head: Option<(String, Known, Option<ParentLocation>)>,
    started: bool,
}

impl Parent {
    /// Opens a version at `place` for a pack with `params`. `None` when it has no index layout:
    /// then nothing tells which files are unchanged.
    ///
    /// # Errors
    /// [`Failure`] when its tables cannot be read.
    pub fn open(
        rt: &Handle,
        place: &Place,
        (root, layout): (Root, LayoutId),
        params: &LayoutParams,
        local: bool,
    ) -> Result<Option<Self>, Failure> {
        rt.block_on(async {
            let layouts = place.layouts(root).await?;
            let of = |want: &LayoutParams| {
                let mut same = layouts.iter().filter(|l| l.params == *want);
                let named = same.clone().find(|l| l.layout == layout);
                named.or_else(|| same.next()).map(|l| l.layout)
            };
            let Some(index) = of(&LayoutParams::INDEX) else { return Ok(None) };
            // Each part is read once, in order, and held by the cursor.
            let index = place.version_keeping(root, index, 1).await?;
            let packed = match of(params) {
                Some(layout) => Some(place.version_keeping(root, layout, 1).await?),
                None => None,
            };
            let chunks = match &packed {
                Some(packed) => ParentChunks::read(packed, place).await?,
                None => ParentChunks::default(),
            };
            Ok(Some(Parent {
                rt: rt.clone(),
                index,
                packed,
                chunks,
                local,
                next_part: 0,
                open: None,
                head: None,
                started: false,
            }))
        })
    }

    fn load(&mut self) -> Result<bool, Failure> {
        let i = self.next_part;
        if i >= self.index.index().parts().len() {
            return Ok(false);
        }
        self.next_part += 1;
        let all = async {
            let packed = match &self.packed {
                Some(v) => Some(v.part(i).await?),
                None => None,
            };
            Ok::<_, Failure>((self.index.part(i).await?, self.index.chunk_rows(i).await?, packed))
        };
        let (index, chunks, packed) = self.rt.block_on(all)?;
        let mut pins = vec![u32::MAX; index.entries.len()];
        for (at, chunk) in chunks.iter().enumerate() {
            if let ObjectRef::Entry { row } = chunk.object
                && let Some(slot) = pins.get_mut(row as usize)
                && *slot == u32::MAX
            {
                *slot = u32::try_from(at).unwrap_or(u32::MAX);
            }
        }
        self.open = Some(Open { index, chunks, packed, pins, row: 0 });
        Ok(true)
    }

    fn next(&mut self) -> Result<Option<(String, Known, Option<ParentLocation>)>, Failure> {
        let at_ns = self.index.layout_doc().indexed_at_ns;
        loop {
            let Some(open) = &mut self.open else {
                if self.load()? {
                    continue;
                }
                return Ok(None);
            };
            let row = open.row;
            if row >= open.index.entries.len() {
                self.open = None;
                continue;
            }
            open.row += 1;
            let entry = open.index.entries.get(row);
            let slices = open.packed.as_ref().map_or(&[][..], |p| p.placed.slices(row));
            let place = match slices {
                [one] => self.chunks.place(one.chunk, one.chunk_offset),
                _ => None,
            };
            if let (EntryKind::Member, Some(hash)) = (entry.kind, entry.hash) {
                // Known by its content alone: its shard is read anyway.
                let pin = PinRow { size: entry.size, mtime_ns: None, etag: None };
                let known = Known { pin, content: Content::whole(hash, 0) };
                return Ok(Some((entry.path.to_owned(), known, place)));
            }
            let Some(chunk) = open.chunks.get(open.pins[row] as usize) else { continue };
            let (EntryKind::File, Some(hash)) = (entry.kind, entry.hash) else { continue };
            if chunk.pin.size != entry.size || !trusted(&chunk.pin, at_ns, self.local) {
                continue;
            }
            let slices = open.index.placed.slices(row).to_vec();
            let content = Content { hash, slices, members: Vec::new() };
            return Ok(Some((entry.path.to_owned(), Known { pin: chunk.pin.clone(), content }, place)));
        }
    }

    /// What is known of `path`; paths are to be asked for in ascending order.
    ///
    /// # Errors
    /// When the tables cannot be read.
    pub fn find(&mut self, path: &str) -> Result<Option<(Known, Option<ParentLocation>)>, Failure> {
        if !self.started {
            self.started = true;
            self.head = self.next()?;
        }
        while let Some((p, _, _)) = &self.head {
            match p.as_str().cmp(path) {
                Ordering::Less => self.head = self.next()?,
                Ordering::Equal => {
                    let found = self.head.take();
                    self.head = self.next()?;
                    return Ok(found.map(|(_, known, place)| (known, place)));
                }
                Ordering::Greater => return Ok(None),
            }
        }
        Ok(None)
    }
}
