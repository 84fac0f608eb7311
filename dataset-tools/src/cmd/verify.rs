//! `fletch verify`: every object of a version read and hashed again, and compared with the
//! tables; what lies beside them is reported too.

mod extras;
mod members;
mod packed;

use super::Ctx;
use crate::failure::{Exit, Failure};
use crate::index::known::{pin_from, row_of};
use crate::out::{Rows, broken, bytes};
use crate::progress::{Progress, Total};
use crate::target::Target;
use extras::extras;
use fletch_core::Hash;
use fletch_core::manifest::{EntryKind, EntryRef, LayoutKind, Slice};
use fletch_origin::{Origin, OriginError};
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow, Version};
use futures::{StreamExt, stream};
use members::Members;
use packed::Packed;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of one object in memory.
const PIECE_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Found {
    path: String,
    fault: &'static str,
    why: String,
}

#[derive(Serialize)]
struct Head {
    root: String,
    layout: String,
}

/// Prints faults as they are found.
struct Sink<'a> {
    rows: Rows<'a>,
    count: u64,
    tables: bool,
}

impl Sink<'_> {
    fn push(&mut self, found: &Found) -> Result<(), Failure> {
        self.count += 1;
        self.tables |= found.fault == "tables";
        let text = |f: &Found, w: &mut dyn Write| writeln!(w, "{}\t{}\t{}", f.fault, f.path, f.why);
        self.rows.push(found, text).map_err(|e| broken(&e))
    }
}

struct Shared {
    origin: Origin,
    files: AtomicU64,
    bytes: AtomicU64,
}

pub fn run(ctx: &Ctx, target: &Target, threads: Option<usize>) -> Result<Exit, Failure> {
    let opened = ctx.open(target)?;
    let version = &opened.version;
    // The objects are where the layout says, or beside the tables.
    let origin = match (&version.layout_doc().origin, &opened.place) {
        (Some(uri), _) => ctx.origins.open(&ctx.uri(uri)?)?,
        (None, Some(place)) => place.origin().clone(),
        (None, None) => registered(ctx, target, |d| d.uri)?,
    };
    let place = match &opened.place {
        Some(place) => place.origin().clone(),
        None => registered(ctx, target, |d| d.tables)?,
    };
    let tables = opened.place.as_ref().map(|p| p.origin().uri().clone());
    let threads =
        threads.unwrap_or_else(|| 2 * std::thread::available_parallelism().map_or(2, usize::from)).max(1);
    let shared = Arc::new(Shared { origin, files: AtomicU64::new(0), bytes: AtomicU64::new(0) });
    let total = Arc::new(Total::default());
    total.files.store(version.manifest().entries, Relaxed);
    total.bytes.store(version.manifest().bytes, Relaxed);
    let counted = Arc::clone(&shared);
    let done = Arc::new(move || (counted.files.load(Relaxed), counted.bytes.load(Relaxed)));
    let progress = Progress::start(ctx.out, ctx.global.progress, "verifying", done, total, None);

    let mut out = io::BufWriter::new(io::stdout());
    let head = Head { root: version.root().to_string(), layout: version.layout().to_string() };
    let rows = Rows::begin(&mut out, ctx.out.json, &head, "faults").map_err(|e| broken(&e))?;
    let mut sink = Sink { rows, count: 0, tables: false };
    let mut packed = Packed::new(&std::env::temp_dir())?;
    let entries = objects(ctx, version, &shared, threads, &mut packed, &mut sink)?;
    packed.check(ctx.rt.handle(), version, &place, &shared.bytes, threads, &mut sink)?;
    extras(ctx, version, &shared.origin, tables.as_ref(), &mut sink)?;
    drop(progress);

    let read = shared.bytes.load(Relaxed);
    let (count, tables_damaged) = (sink.count, sink.tables);
    #[derive(Serialize)]
    struct Summary {
        faults: u64,
        entries: u64,
        bytes_read: u64,
    }
    let summary = Summary { faults: count, entries, bytes_read: read };
    sink.rows.end("summary", &summary).map_err(|e| broken(&e))?;
    ctx.out.note(format_args!("{entries} entries, {} read: {count} faults", bytes(read)));
    Ok(match (count, tables_damaged) {
        (0, _) => Exit::Ok,
        (_, true) => Exit::Failed,
        _ => Exit::Partial,
    })
}

/// A place of a registered dataset.
fn registered(
    ctx: &Ctx,
    target: &Target,
    which: impl FnOnce(fletch_api::Dataset) -> String,
) -> Result<Origin, Failure> {
    let name = ctx.name(target).ok_or_else(|| Failure::new("no place to read objects from"))?;
    let dataset = ctx.rt.block_on(ctx.client()?.dataset(&name))?;
    Ok(ctx.origins.open(&ctx.uri(&which(dataset))?)?)
}

/// One entry with what is needed to check it.
struct Item {
    path: String,
    kind: EntryKind,
    size: u64,
    hash: Option<Hash>,
    target: String,
    pieces: Vec<Piece>,
    /// Of a shard: what lies in it.
    members: Members,
}

/// Where one slice of it is.
struct Piece {
    slice: Slice,
    key: String,
    offset: u64,
    pin: PinRow,
}

/// The rows of a part's entries that lie in chunks of a pack: of one slice, and not in an object of
/// their own.
fn grouped(version: &Version, part: &LoadedPart, rows: &[ChunkRow]) -> BTreeSet<usize> {
    if version.layout_doc().params.kind != LayoutKind::Pack {
        return BTreeSet::new();
    }
    let entry =
        |r: &ChunkRow| if let ObjectRef::Entry { row } = r.object { Some(row as usize) } else { None };
    let own: BTreeSet<usize> = rows.iter().filter_map(entry).collect();
    (0..part.entries.len()).filter(|i| part.placed.slices(*i).len() == 1 && !own.contains(i)).collect()
}

/// What is to be checked by itself. `open` is the last file of the parts before, whose members may go on here.
fn items(
    part: &LoadedPart,
    rows: &[ChunkRow],
    grouped: &BTreeSet<usize>,
    open: &mut Option<Item>,
    is_pack: bool,
) -> Vec<Result<Item, Found>> {
    // A chunk may be at several objects; an index has one row for every slice of every file.
    let mut by_chunk: HashMap<(Hash, Option<u32>), Vec<&ChunkRow>> = HashMap::new();
    for row in rows {
        let entry = if let ObjectRef::Entry { row } = row.object { Some(row) } else { None };
        by_chunk.entry((row.chunk, entry)).or_default().push(row);
    }
    let key = |row: &ChunkRow| match &row.object {
        ObjectRef::Entry { row } => part.entries.path(*row as usize).to_owned(),
        ObjectRef::Key(key) => key.clone(),
    };
    let item = |i: usize| {
        let e: EntryRef<'_> = part.entries.get(i);
        let own = u32::try_from(i).ok();
        let mut at = 0;
        let pieces = part.placed.slices(i).iter().map(|slice| {
            // Of an entry's own rows of one chunk the one at this offset of the file.
            let begin = at;
            at += u64::from(slice.len);
            let own =
                by_chunk.get(&(slice.chunk, own)).and_then(|rows| rows.iter().find(|r| r.offset == begin));
            let other = by_chunk.get(&(slice.chunk, None)).and_then(|rows| rows.first());
            let row = own.or(other).ok_or_else(|| Found {
                path: e.path.to_owned(),
                fault: "tables",
                why: format!("chunks.parquet has no row for its bytes from {begin} on"),
            })?;
            Ok(Piece { slice: *slice, key: key(row), offset: row.offset, pin: row.pin.clone() })
        });
        Ok(Item {
            pieces: pieces.collect::<Result<_, _>>()?,
            path: e.path.to_owned(),
            kind: e.kind,
            size: e.size,
            hash: e.hash,
            target: e.target.to_owned(),
            members: Members::default(),
        })
    };
    let mut items: Vec<Result<Item, Found>> = Vec::new();
    for i in (0..part.entries.len()).filter(|i| !grouped.contains(i)) {
        let e = part.entries.get(i);
        if e.kind != EntryKind::Member {
            items.push(item(i));
            continue;
        }
        // A member is a range of its shard's chunks, and follows its shard. In a pack it has chunks of its own.
        if is_pack {
            continue;
        }
        let shard = e.path.split('\0').next().unwrap_or(e.path);
        match items.last_mut() {
            Some(Ok(last)) if last.path == shard => last.members.push(&e, part.placed.slices(i)),
            // What is wrong with the shard was found.
            Some(Err(last)) if last.path == shard => {}
            _ => match open.as_mut().filter(|o| o.path == shard) {
                Some(open) => open.members.push(&e, part.placed.slices(i)),
                None => items.push(Err(Found {
                    path: e.path.replace('\0', "/"),
                    fault: "tables",
                    why: "it does not follow its shard".to_owned(),
                })),
            },
        }
    }
    items
}

fn objects(
    ctx: &Ctx,
    version: &Version,
    shared: &Arc<Shared>,
    threads: usize,
    packed: &mut Packed,
    sink: &mut Sink<'_>,
) -> Result<u64, Failure> {
    let (mut entries, mut open) = (0, None::<Item>);
    let is_pack = version.layout_doc().params.kind == LayoutKind::Pack;
    for i in 0..version.index().parts().len() {
        let loaded = ctx.rt.block_on(async {
            Ok::<_, fletch_tables::TableError>((version.part(i).await?, version.chunk_rows(i).await?))
        });
        let (part, rows) = match loaded {
            Ok(loaded) => loaded,
            Err(e) if matches!(e.kind(), fletch_core::Kind::Corrupt | fletch_core::Kind::Invalid) => {
                sink.push(&Found { path: format!("part {i}"), fault: "tables", why: e.to_string() })?;
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        entries += part.entries.len() as u64;
        let first = version.index().first_ordinal(i);
        let grouped = grouped(version, &part, &rows);
        for &row in &grouped {
            let (slices, hash) = (part.placed.slices(row), part.entries.get(row).hash);
            if let ([slice], Some(hash)) = (slices, hash) {
                packed.push(first + row as u64, slice, hash)?;
            }
            shared.files.fetch_add(1, Relaxed);
        }
        let mut items = items(&part, &rows, &grouped, &mut open, is_pack);
        // The last one waits for members that the next part may have.
        if let Some(last) = items.pop() {
            let before = open.take().map(Ok);
            match last {
                Ok(last) => open = Some(last),
                fault => items.push(fault),
            }
            items.splice(0..0, before);
        }
        shared.check_all(ctx, items, threads, sink)?;
    }
    shared.check_all(ctx, open.into_iter().map(Ok).collect(), threads, sink)?;
    Ok(entries)
}

impl Shared {
    fn check_all(
        self: &Arc<Self>,
        ctx: &Ctx,
        items: Vec<Result<Item, Found>>,
        threads: usize,
        sink: &mut Sink<'_>,
    ) -> Result<(), Failure> {
        let faults = ctx.rt.block_on(async {
            stream::iter(items)
                .map(|item| async {
                    match item {
                        Ok(item) => self.check(item).await,
                        Err(found) => Ok(Some(found)),
                    }
                })
                .buffered(threads)
                .filter_map(|found| async { found.transpose() })
                .collect::<Vec<Result<Found, Failure>>>()
                .await
        });
        for found in faults {
            sink.push(&found?)?;
        }
        Ok(())
    }

    async fn check(self: &Arc<Self>, mut item: Item) -> Result<Option<Found>, Failure> {
        let found = |fault: &'static str, why: String| Some(Found { path: item.path.clone(), fault, why });
        self.files.fetch_add(1, Relaxed);
        match (item.kind, self.origin.local_dir()) {
            (EntryKind::File | EntryKind::Member, _) if item.size > 0 => {
                let members = std::mem::take(&mut item.members);
                self.files.fetch_add(members.len(), Relaxed);
                self.content(&item, members).await
            }
            (EntryKind::File | EntryKind::Member, _) => Ok(match self.origin.head(&item.path).await {
                Ok(meta) if meta.size == 0 => None,
                Ok(meta) => found("changed", format!("it was empty, it has {} bytes now", meta.size)),
                Err(e) => fault_of(&item.path, &e)?,
            }),
            (EntryKind::Symlink, Some(dir)) => Ok(match std::fs::read_link(dir.join(&item.path)) {
                Ok(target) if target == Path::new(&item.target) => None,
                Ok(target) => {
                    found("changed", format!("it led to {:?}, it leads to {:?} now", item.target, target))
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => found("missing", e.to_string()),
                Err(e) => found("changed", format!("it is no link any more: {e}")),
            }),
            (EntryKind::EmptyDir, Some(dir)) => {
                let dir = dir.join(&item.path);
                Ok(match std::fs::symlink_metadata(&dir) {
                    Ok(m) if m.is_dir() => None,
                    Ok(_) => found("changed", "it is no directory any more".into()),
                    Err(e) => found("missing", e.to_string()),
                })
            }
            (EntryKind::Symlink | EntryKind::EmptyDir, None) => Ok(None),
        }
    }

    async fn content(self: &Arc<Self>, item: &Item, mut members: Members) -> Result<Option<Found>, Failure> {
        let found = |fault: &'static str, why: String| Some(Found { path: item.path.clone(), fault, why });
        let mut whole = blake3::Hasher::new();
        for piece in &item.pieces {
            let (begin, len) =
                (piece.offset, u64::from(piece.slice.chunk_offset) + u64::from(piece.slice.len));
            if len > PIECE_BYTES_MAX {
                return Ok(found("tables", format!("a chunk of {len} bytes")));
            }
            let got = match self
                .origin
                .get(&piece.key, Some(begin..begin + len), Some(&pin_from(&piece.pin)))
                .await
            {
                Ok(got) => got,
                Err(e) => return fault_of(&item.path, &e),
            };
            self.bytes.fetch_add(got.bytes.len() as u64, Relaxed);
            let now = row_of(got.meta.pin());
            // A store's listing and its answers give times of different precision; its etags agree.
            let same_pin = match (self.origin.local_dir(), &piece.pin.etag) {
                (None, Some(etag)) => now.etag.as_ref() == Some(etag),
                _ => now == piece.pin,
            };
            let skip = piece.slice.chunk_offset as usize;
            let one = item.pieces.len() == 1;
            let (bytes, chunk) = (got.bytes, piece.slice.chunk);
            let hashed = tokio::task::spawn_blocking(move || {
                if !one {
                    whole.update(&bytes[skip..]);
                }
                members.feed(chunk, &bytes);
                (Hash::of(&bytes), whole, members)
            })
            .await;
            let (hash, hasher, fed) =
                hashed.map_err(|e| Failure::new(format!("hashing {} failed: {e}", item.path)))?;
            (whole, members) = (hasher, fed);
            // A chunk that is read in part (a pack) is checked by the hash of the whole entry.
            let chunk_whole = piece.slice.chunk_offset == 0;
            if chunk_whole && hash != piece.slice.chunk {
                return Ok(differs(item, begin, same_pin));
            }
        }
        if item.pieces.len() > 1 && Some(Hash::from(whole.finalize())) != item.hash {
            return Ok(differs(item, 0, true));
        }
        // The shard is right, so its tables are not.
        Ok(members.wrong().and_then(|why| found("tables", why)))
    }
}

fn differs(item: &Item, begin: u64, same_pin: bool) -> Option<Found> {
    let (fault, why) = if same_pin {
        (
            "corrupt",
            format!("its bytes from {begin} on differ although its times do not: the storage is damaged"),
        )
    } else {
        ("changed", format!("its bytes from {begin} on are not the indexed ones; index again"))
    };
    Some(Found { path: item.path.clone(), fault, why })
}

/// The fault an error of the origin means; unreachable origins end the whole run.
fn fault_of(path: &str, e: &OriginError) -> Result<Option<Found>, Failure> {
    let fault = match e {
        OriginError::NotFound { .. } => "missing",
        OriginError::Changed { .. } => "changed",
        OriginError::Corrupt { .. } => "corrupt",
        OriginError::Denied { .. } | OriginError::Invalid { .. } => "unreadable",
        _ => return Err(e.clone().into()),
    };
    Ok(Some(Found { path: path.to_owned(), fault, why: e.to_string() }))
}
