//! `fletch verify`: reads and hashes every object of a version again, and compares it with the tables.
//!
//! Also reports objects at the dataset that the version does not have.

mod extras;
mod members;
mod packed;

use super::Context;
use super::erase::erased_files;
use crate::failure::{Exit, Failure};
use crate::out::{self, Rows, bytes, stdout_failed};
use crate::progress::{Progress, Total, of_work};
use crate::source::pin::{origin_pin, pin_row};
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
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The most bytes of one read: no chunk is longer.
const CHUNK_BYTES_MAX: u64 = 16 << 20;

/// One difference between the objects and the tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct VerifyFault {
    path: String,
    fault: &'static str,
    why: String,
}

#[derive(Serialize)]
struct Head {
    root: String,
    layout: String,
}

/// Prints and counts faults.
struct FaultSink<'a> {
    rows: Rows<'a>,
    count: u64,
    /// Whether the tables contradict themselves.
    tables: bool,
    /// When each erased file was erased.
    erased: BTreeMap<String, String>,
}

impl FaultSink<'_> {
    fn push(&mut self, found: &VerifyFault) -> Result<(), Failure> {
        self.count += 1;
        self.tables |= found.fault == "tables";
        let text = |f: &VerifyFault, w: &mut dyn Write| writeln!(w, "{}\t{}\t{}", f.fault, f.path, f.why);
        let mut found = found.clone();
        if let Some(at) = self.erased.get(&found.path).filter(|_| found.fault == "missing") {
            found.why = format!("it was erased by `fletch erase` at {at}");
        }
        self.rows.push(&found, text).map_err(|e| stdout_failed(&e))
    }
}

/// Reads and checks objects, several at once.
struct Checker {
    origin: Origin,
    files: AtomicU64,
    bytes: AtomicU64,
}

pub fn run(
    ctx: &Context,
    target: &Target,
    threads: Option<usize>,
    one_file_system: bool,
) -> Result<Exit, Failure> {
    let opened = ctx.open(target)?;
    let version = &opened.version;
    if version.is_draft() {
        return Err(Failure::new("this is a draft: the hashes of its files are not known")
            .hint("run `fletch seal NAME`, then verify the version"));
    }
    // The objects are where the layout says, or beside the tables.
    let origin = match (&version.layout_doc().origin, &opened.location) {
        (Some(uri), _) => {
            let uri = ctx.remembered_uri(uri)?;
            ctx.warn_of_another_folder(&uri);
            ctx.origins().open(&uri)?
        }
        (None, Some(location)) => location.origin().clone(),
        (None, None) => registered(ctx, target, |d| d.uri)?,
    };
    let chunks = match &opened.location {
        Some(location) => location.origin().clone(),
        None => registered(ctx, target, |d| d.tables)?,
    };
    let tables = opened.location.as_ref().map(|l| l.origin().uri().clone());
    let threads =
        threads.unwrap_or_else(|| 2 * std::thread::available_parallelism().map_or(2, usize::from)).max(1);
    let checker = Arc::new(Checker { origin, files: AtomicU64::new(0), bytes: AtomicU64::new(0) });
    let total = Arc::new(Total::default());
    total.files.store(version.manifest().entries, Relaxed);
    total.bytes.store(version.manifest().bytes, Relaxed);
    let counted = Arc::clone(&checker);
    let done = Arc::new(move || (counted.files.load(Relaxed), counted.bytes.load(Relaxed)));
    let progress = Progress::start(ctx.out, ctx.global.progress, "verifying", of_work(done, total), None);

    let mut out = io::BufWriter::new(io::stdout());
    let head = Head { root: version.root().to_string(), layout: version.layout().to_string() };
    let rows = Rows::begin(&mut out, ctx.out.json, &head, "faults").map_err(|e| stdout_failed(&e))?;
    let erased = ctx.rt.block_on(erased_files(&chunks));
    let mut sink = FaultSink { rows, count: 0, tables: false, erased };
    let mut packed = Packed::new(&std::env::temp_dir())?;
    let entries = objects(ctx, version, &checker, threads, &mut packed, &mut sink)?;
    packed.check(ctx.rt.handle(), version, &chunks, &checker.bytes, threads, &mut sink)?;
    extras(ctx, version, &checker.origin, tables.as_ref(), one_file_system, &mut sink)?;
    drop(progress);

    let read = checker.bytes.load(Relaxed);
    let (count, tables_damaged) = (sink.count, sink.tables);
    #[derive(Serialize)]
    struct Summary {
        faults: u64,
        entries: u64,
        bytes_read: u64,
    }
    let summary = Summary { faults: count, entries, bytes_read: read };
    sink.rows.end("summary", &summary).map_err(|e| stdout_failed(&e))?;
    ctx.out.note(format_args!(
        "{}, {} read: {}",
        out::count(entries, "entry"),
        bytes(read),
        out::count(count, "fault")
    ));
    Ok(match (count, tables_damaged) {
        (0, _) => Exit::Ok,
        (_, true) => Exit::Failed,
        _ => Exit::Partial,
    })
}

/// Opens an origin of a registered dataset.
fn registered(
    ctx: &Context,
    target: &Target,
    which: impl FnOnce(fletch_api::Dataset) -> String,
) -> Result<Origin, Failure> {
    let name =
        ctx.name(target).ok_or_else(|| Failure::new("the version does not say where its objects are"))?;
    let dataset = ctx.rt.block_on(ctx.client()?.dataset(&name))?;
    let uri = ctx.registered_uri(&which(dataset))?;
    Ok(ctx.origins().open(&uri)?)
}

/// An entry to check, and where its bytes are.
struct EntryCheck {
    path: String,
    kind: EntryKind,
    size: u64,
    hash: Option<Hash>,
    target: String,
    slices: Vec<SliceLocation>,
    /// The members of a shard.
    members: Members,
}

/// Where one slice of an entry is.
struct SliceLocation {
    slice: Slice,
    key: String,
    offset: u64,
    pin: PinRow,
}

/// Returns the rows of a part whose entries are in chunks of a pack: one slice, and no object of their own.
fn grouped(version: &Version, part: &LoadedPart, rows: &[ChunkRow]) -> BTreeSet<usize> {
    if version.layout_doc().params.kind != LayoutKind::Pack {
        return BTreeSet::new();
    }
    let entry =
        |r: &ChunkRow| if let ObjectRef::Entry { row } = r.object { Some(row as usize) } else { None };
    let own: BTreeSet<usize> = rows.iter().filter_map(entry).collect();
    (0..part.len()).filter(|i| part.slices(*i).len() == 1 && !own.contains(i)).collect()
}

/// Returns the entries of a part to check one by one, with members added to their shards.
///
/// `open` is the last file of the parts before: its members can go on in this part.
fn items(
    part: &LoadedPart,
    rows: &[ChunkRow],
    grouped: &BTreeSet<usize>,
    open: &mut Option<EntryCheck>,
    is_pack: bool,
) -> Vec<Result<EntryCheck, VerifyFault>> {
    // A chunk can be in several objects. An index has one row for every slice of every file.
    let mut by_chunk: HashMap<(Hash, Option<u32>), Vec<&ChunkRow>> = HashMap::new();
    for row in rows {
        let entry = if let ObjectRef::Entry { row } = row.object { Some(row) } else { None };
        by_chunk.entry((row.chunk, entry)).or_default().push(row);
    }
    let key = |row: &ChunkRow| match &row.object {
        ObjectRef::Entry { row } => part.entry(*row as usize).path.to_owned(),
        ObjectRef::Key(key) => key.clone(),
    };
    let item = |i: usize| {
        let e: EntryRef<'_> = part.entry(i);
        let own = u32::try_from(i).ok();
        let mut at = 0;
        let slices = part.slices(i).iter().map(|slice| {
            // An entry can have several rows of one chunk: take the one at this offset of the file.
            let begin = at;
            at += u64::from(slice.len);
            let own =
                by_chunk.get(&(slice.chunk, own)).and_then(|rows| rows.iter().find(|r| r.offset == begin));
            let other = by_chunk.get(&(slice.chunk, None)).and_then(|rows| rows.first());
            let row = own.or(other).ok_or_else(|| VerifyFault {
                path: e.path.to_owned(),
                fault: "tables",
                why: format!("chunks.parquet has no row for its bytes from {begin} on; index again"),
            })?;
            Ok(SliceLocation { slice: *slice, key: key(row), offset: row.offset, pin: row.pin.clone() })
        });
        Ok(EntryCheck {
            slices: slices.collect::<Result<_, _>>()?,
            path: e.path.to_owned(),
            kind: e.kind,
            size: e.size,
            hash: e.hash,
            target: e.target.to_owned(),
            members: Members::default(),
        })
    };
    let mut items: Vec<Result<EntryCheck, VerifyFault>> = Vec::new();
    for i in (0..part.len()).filter(|i| !grouped.contains(i)) {
        let e = part.entry(i);
        if e.kind != EntryKind::Member {
            items.push(item(i));
            continue;
        }
        // A member follows its shard and is a range of its chunks. In a pack it is in chunks of the pack.
        if is_pack {
            continue;
        }
        let shard = e.path.split('\0').next().unwrap_or(e.path);
        match items.last_mut() {
            Some(Ok(last)) if last.path == shard => last.members.push(&e, part.slices(i)),
            // The fault of the shard covers its members.
            Some(Err(last)) if last.path == shard => {}
            _ => match open.as_mut().filter(|o| o.path == shard) {
                Some(open) => open.members.push(&e, part.slices(i)),
                None => items.push(Err(VerifyFault {
                    path: e.path.replace('\0', "/"),
                    fault: "tables",
                    why: "the member does not follow its shard; index again".to_owned(),
                })),
            },
        }
    }
    items
}

fn objects(
    ctx: &Context,
    version: &Version,
    checker: &Arc<Checker>,
    threads: usize,
    packed: &mut Packed,
    sink: &mut FaultSink<'_>,
) -> Result<u64, Failure> {
    let (mut entries, mut open) = (0, None::<EntryCheck>);
    let is_pack = version.layout_doc().params.kind == LayoutKind::Pack;
    for i in 0..version.index().parts().len() {
        let loaded = ctx.rt.block_on(async {
            Ok::<_, fletch_tables::TableError>((version.part(i).await?, version.chunk_rows(i).await?))
        });
        let (part, rows) = match loaded {
            Ok(loaded) => loaded,
            Err(e) if matches!(e.kind(), fletch_core::Kind::Corrupt | fletch_core::Kind::Invalid) => {
                sink.push(&VerifyFault { path: format!("part {i}"), fault: "tables", why: e.to_string() })?;
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        entries += part.len() as u64;
        let first = version.index().first_ordinal(i);
        let grouped = grouped(version, &part, &rows);
        for &row in &grouped {
            let (slices, hash) = (part.slices(row), part.entry(row).hash);
            if let ([slice], Some(hash)) = (slices, hash) {
                packed.push(first + row as u64, slice, hash)?;
            }
            checker.files.fetch_add(1, Relaxed);
        }
        let mut items = items(&part, &rows, &grouped, &mut open, is_pack);
        // The next part can have more members of the last entry.
        if let Some(last) = items.pop() {
            let before = open.take().map(Ok);
            match last {
                Ok(last) => open = Some(last),
                fault => items.push(fault),
            }
            items.splice(0..0, before);
        }
        checker.check_all(ctx, items, threads, sink)?;
    }
    checker.check_all(ctx, open.into_iter().map(Ok).collect(), threads, sink)?;
    Ok(entries)
}

impl Checker {
    fn check_all(
        self: &Arc<Self>,
        ctx: &Context,
        items: Vec<Result<EntryCheck, VerifyFault>>,
        threads: usize,
        sink: &mut FaultSink<'_>,
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
                .collect::<Vec<Result<VerifyFault, Failure>>>()
                .await
        });
        for found in faults {
            sink.push(&found?)?;
        }
        Ok(())
    }

    async fn check(self: &Arc<Self>, mut item: EntryCheck) -> Result<Option<VerifyFault>, Failure> {
        let found =
            |fault: &'static str, why: String| Some(VerifyFault { path: item.path.clone(), fault, why });
        self.files.fetch_add(1, Relaxed);
        match (item.kind, self.origin.local_dir()) {
            (EntryKind::File | EntryKind::Member, _) if item.size > 0 => {
                let members = std::mem::take(&mut item.members);
                self.files.fetch_add(members.len(), Relaxed);
                self.content(&item, members).await
            }
            (EntryKind::File | EntryKind::Member, _) => Ok(match self.origin.head(&item.path).await {
                Ok(meta) if meta.size == 0 => None,
                Ok(meta) => {
                    found("changed", format!("it was empty and has {} bytes now; index again", meta.size))
                }
                Err(e) => fault_of(&item.path, &e)?,
            }),
            (EntryKind::Symlink, Some(dir)) => Ok(match std::fs::read_link(dir.join(&item.path)) {
                Ok(target) if target == Path::new(&item.target) => None,
                Ok(target) => found(
                    "changed",
                    format!("its target was {:?} and is {:?} now; index again", item.target, target),
                ),
                Err(e) if e.kind() == io::ErrorKind::NotFound => found("missing", e.to_string()),
                Err(e) => found("changed", format!("it is not a link any more; index again: {e}")),
            }),
            (EntryKind::EmptyDir, Some(dir)) => {
                let dir = dir.join(&item.path);
                Ok(match std::fs::symlink_metadata(&dir) {
                    Ok(m) if m.is_dir() => None,
                    Ok(_) => found("changed", "it is not a directory any more; index again".into()),
                    Err(e) => found("missing", e.to_string()),
                })
            }
            (EntryKind::Symlink | EntryKind::EmptyDir, None) => Ok(None),
        }
    }

    async fn content(
        self: &Arc<Self>,
        item: &EntryCheck,
        mut members: Members,
    ) -> Result<Option<VerifyFault>, Failure> {
        let found =
            |fault: &'static str, why: String| Some(VerifyFault { path: item.path.clone(), fault, why });
        let mut whole = blake3::Hasher::new();
        for location in &item.slices {
            let (begin, len) =
                (location.offset, u64::from(location.slice.chunk_offset) + u64::from(location.slice.len));
            if len > CHUNK_BYTES_MAX {
                return Ok(found("tables", format!("a chunk of {len} bytes")));
            }
            let got = match self
                .origin
                .get_hashed(&location.key, Some(begin..begin + len), &origin_pin(&location.pin))
                .await
            {
                Ok(got) => got,
                Err(e) => return fault_of(&item.path, &e),
            };
            self.bytes.fetch_add(got.bytes.len() as u64, Relaxed);
            let same_pin = match self.origin.local_dir() {
                Some(_) => pin_row(got.meta.pin()) == location.pin,
                None => origin_pin(&location.pin).difference(&got.meta.pin()).is_none(),
            };
            let skip = location.slice.chunk_offset as usize;
            let one = item.slices.len() == 1;
            let (bytes, chunk) = (got.bytes, location.slice.chunk);
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
            // A slice from the middle of a chunk (in a pack) is checked by the hash of the whole entry.
            let chunk_whole = location.slice.chunk_offset == 0;
            if chunk_whole && hash != location.slice.chunk {
                return Ok(differs(item, begin, same_pin));
            }
        }
        if item.slices.len() > 1 && Some(Hash::from(whole.finalize())) != item.hash {
            return Ok(differs(item, 0, true));
        }
        // The bytes of the shard are right, so a wrong member is an error of the tables.
        Ok(members.wrong().and_then(|why| found("tables", why)))
    }
}

fn differs(item: &EntryCheck, begin: u64, same_pin: bool) -> Option<VerifyFault> {
    let (fault, why) = if same_pin {
        (
            "corrupt",
            format!(
                "its bytes from {begin} on differ but not its times: the storage is damaged; restore the file"
            ),
        )
    } else {
        ("changed", format!("its bytes from {begin} on differ from the indexed bytes; index again"))
    };
    Some(VerifyFault { path: item.path.clone(), fault, why })
}

/// Returns the fault for an error of the origin.
///
/// # Errors
/// [`Failure`] when the origin is away, which ends the run.
fn fault_of(path: &str, e: &OriginError) -> Result<Option<VerifyFault>, Failure> {
    let fault = match e {
        OriginError::NotFound { .. } => "missing",
        OriginError::Changed { .. } => "changed",
        OriginError::Denied { .. } | OriginError::Invalid { .. } | OriginError::WrongAnswer { .. } => {
            "unreadable"
        }
        _ => return Err(e.clone().into()),
    };
    Ok(Some(VerifyFault { path: path.to_owned(), fault, why: e.to_string() }))
}
