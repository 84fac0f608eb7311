//! `fletch verify`: every object of a version read and hashed again, and compared with the
//! tables; what lies beside them is reported too.

mod packed;

use super::Ctx;
use crate::failure::{Exit, Failure};
use crate::index::known::{pin_from, row_of};
use crate::index::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use crate::out::{Rows, broken, bytes};
use crate::progress::{Progress, Total};
use crate::target::Target;
use fletch_core::Hash;
use fletch_core::manifest::{EntryKind, EntryRef, LayoutKind, Slice};
use fletch_origin::{Origin, OriginError, OriginUri};
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow, Version, paths};
use futures::{StreamExt, stream};
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

fn items(part: &LoadedPart, rows: &[ChunkRow], grouped: &BTreeSet<usize>) -> Vec<Result<Item, Found>> {
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
        })
    };
    // A member is a range of its shard's chunks, each of which is checked with the shard.
    let member = |i: usize| part.entries.get(i).kind == EntryKind::Member;
    (0..part.entries.len()).filter(|i| !grouped.contains(i) && !member(*i)).map(item).collect()
}

fn objects(
    ctx: &Ctx,
    version: &Version,
    shared: &Arc<Shared>,
    threads: usize,
    packed: &mut Packed,
    sink: &mut Sink<'_>,
) -> Result<u64, Failure> {
    let mut entries = 0;
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
        let items = items(&part, &rows, &grouped);
        let faults = ctx.rt.block_on(async {
            stream::iter(items)
                .map(|item| async {
                    match item {
                        Ok(item) => shared.check(item).await,
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
    }
    Ok(entries)
}

impl Shared {
    async fn check(self: &Arc<Self>, item: Item) -> Result<Option<Found>, Failure> {
        let found = |fault: &'static str, why: String| Some(Found { path: item.path.clone(), fault, why });
        self.files.fetch_add(1, Relaxed);
        match (item.kind, self.origin.local_dir()) {
            (EntryKind::File | EntryKind::Member, _) if item.size > 0 => self.content(&item).await,
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

    async fn content(self: &Arc<Self>, item: &Item) -> Result<Option<Found>, Failure> {
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
            let bytes = got.bytes;
            let hashed = tokio::task::spawn_blocking(move || {
                if !one {
                    whole.update(&bytes[skip..]);
                }
                (Hash::of(&bytes), whole)
            })
            .await;
            let (hash, hasher) =
                hashed.map_err(|e| Failure::new(format!("hashing {} failed: {e}", item.path)))?;
            whole = hasher;
            // A chunk that is read in part (a pack) is checked by the hash of the whole entry.
            let chunk_whole = piece.slice.chunk_offset == 0;
            if chunk_whole && hash != piece.slice.chunk {
                return Ok(differs(item, begin, same_pin));
            }
        }
        if item.pieces.len() > 1 && Some(Hash::from(whole.finalize())) != item.hash {
            return Ok(differs(item, 0, true));
        }
        Ok(None)
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

/// What lies at the origin and is not in the version.
fn extras(
    ctx: &Ctx,
    version: &Version,
    origin: &Origin,
    tables: Option<&OriginUri>,
    sink: &mut Sink<'_>,
) -> Result<(), Failure> {
    let skipped: BTreeSet<&str> = version.manifest().skipped.iter().map(|f| f.path.as_str()).collect();
    let mut seen = Seen { ctx, version, any_link: None };
    let extra = |path: String, what: &str| Found {
        path,
        fault: "extra",
        why: format!("{what} that is not in the version"),
    };
    if origin.uri().is_plain_http() {
        ctx.out.note("a plain HTTP server has no listing: what is not in the version is not looked for");
        return Ok(());
    }
    let Some(dir) = origin.local_dir() else {
        let mut list = origin.list("");
        while let Some(object) = ctx.rt.block_on(list.next()) {
            let path = object?.path;
            let own =
                path.starts_with(paths::PREFIX) || tables.is_some_and(|t| below(origin.uri(), t, &path));
            if !own && !skipped.contains(path.as_str()) && !seen.has(&path)? {
                sink.push(&extra(path, "an object"))?;
            }
        }
        return Ok(());
    };
    let mut exclude = BTreeSet::from(["fletch".to_owned()]);
    let base = std::fs::canonicalize(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    if let Some(place) = tables.and_then(OriginUri::as_local).and_then(|p| std::fs::canonicalize(p).ok())
        && let Some(rel) = place.strip_prefix(&base).ok().and_then(Path::to_str).filter(|r| !r.is_empty())
    {
        exclude.insert(rel.to_owned());
    }
    let options = WalkOptions { base, symlinks: Symlinks::Keep, exclude, names_bytes_max: NAMES_BYTES_MAX };
    let cannot = |e: io::Error| Failure::io(format_args!("cannot list {}", dir.display()), &e);
    let mut walk = Walk::new(options, &std::env::temp_dir()).map_err(cannot)?;
    let mut last = String::new();
    while let Some(step) = walk.next_step().map_err(cannot)? {
        let (path, what) = match step {
            Step::File { path, .. } => (path, "a file"),
            Step::Link { path } => {
                // Left out or followed when the version was made, if it has no links at all.
                if !seen.any_link()? || seen.below(&path)? {
                    last = path;
                    continue;
                }
                (path, "a link")
            }
            Step::DirEnd { path } => {
                if last.strip_prefix(path.as_str()).is_some_and(|r| r.starts_with('/')) {
                    continue;
                }
                (path + "/", "an empty directory")
            }
            Step::Fault { path, .. } => {
                if !skipped.contains(path.as_str()) {
                    sink.push(&extra(path, "something"))?;
                }
                continue;
            }
        };
        if !skipped.contains(path.as_str()) && !seen.has(&path)? {
            sink.push(&extra(path.clone(), what))?;
        }
        last = path;
    }
    Ok(())
}

/// Whether `path`, relative to `base`, lies in `place`.
fn below(base: &OriginUri, place: &OriginUri, path: &str) -> bool {
    base != place && base.join(path).is_ok_and(|p| place.contains(&p))
}

struct Seen<'a> {
    ctx: &'a Ctx,
    version: &'a Version,
    any_link: Option<bool>,
}

impl Seen<'_> {
    /// Whether the version has this entry. What its damaged tables cannot tell was reported.
    fn has(&self, path: &str) -> Result<bool, Failure> {
        match self.ctx.rt.block_on(self.version.find(path)) {
            Ok(found) => Ok(found.is_some()),
            Err(e) if e.kind() == fletch_core::Kind::Corrupt => Ok(true),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether the version has entries below this path.
    fn below(&self, path: &str) -> Result<bool, Failure> {
        let dir = format!("{path}/");
        let found = self.ctx.rt.block_on(async {
            let at = self.version.lower_bound(dir.as_bytes()).await?;
            self.version.entry(at).await
        })?;
        Ok(found.is_some_and(|f| f.entry().path.starts_with(&dir)))
    }

    /// Whether links were kept when the version was made: it has one.
    fn any_link(&mut self) -> Result<bool, Failure> {
        if let Some(any) = self.any_link {
            return Ok(any);
        }
        let mut any = false;
        for i in 0..self.version.index().parts().len() {
            let part = match self.ctx.rt.block_on(self.version.part(i)) {
                Ok(part) => part,
                Err(e) if e.kind() == fletch_core::Kind::Corrupt => continue,
                Err(e) => return Err(e.into()),
            };
            if (0..part.entries.len()).any(|row| part.entries.get(row).kind == EntryKind::Symlink) {
                any = true;
                break;
            }
        }
        self.any_link = Some(any);
        Ok(any)
    }
}
