//! `fletch erase`: what a file left behind that was deleted from its dataset goes, too.
//!
//! The order makes a run that stops safe to repeat: the record first, then the objects of packs, then the
//! version without the file, then the caches, which can fetch nothing of it any more.

use super::prepare::{Missing, Registered, registered_dataset};
use super::{Context, refresh};
use crate::failure::{Exit, Failure};
use crate::garbage::stored_versions;
use crate::out::count;
use crate::run::{mark::Mark, now_ns};
use crate::tables_location::TablesLocation;
use fletch_core::{Hash, Root, TagName};
use fletch_origin::{OriginError, PutMode};
use fletch_tables::documents::rfc3339;
use fletch_tables::{Version, paths};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The most chunks that one request to a server names.
const CHUNKS_MAX: usize = 64;

/// The record of an erased file.
#[derive(Debug, Serialize, Deserialize)]
struct ErasedDoc {
    path: String,
    /// When, in RFC 3339.
    erased: String,
}

/// What is left of a file.
#[derive(Default)]
struct Traces {
    /// The versions that list it.
    roots: BTreeSet<Root>,
    /// Its chunks, by content or by place.
    chunks: BTreeSet<Hash>,
    /// The chunks that are objects of a pack.
    packed: BTreeSet<Hash>,
}

#[derive(Serialize)]
struct Report<'a> {
    dataset: &'a str,
    path: &'a str,
    /// The versions that list the file.
    versions: Vec<Root>,
    /// Tags that name one of them, besides `latest`.
    tags: Vec<TagName>,
    /// Mounts that show one of them.
    mounts: Vec<String>,
    /// The objects of packs that hold it.
    packed_chunks: usize,
    chunks: usize,
    /// The version without it.
    root: Option<String>,
    /// Servers that may still have chunks.
    unconfirmed: Vec<String>,
    erased: bool,
}

pub fn run(ctx: &Context, text: &str, path: &str, yes: bool) -> Result<Exit, Failure> {
    let registered = registered_dataset(ctx, text)?;
    let Registered { connected, dataset, uri, tables } = &registered;
    let location = TablesLocation::open(&ctx.origins(), tables)?;
    match ctx.rt.block_on(ctx.origins().open(uri)?.head(path)) {
        Err(OriginError::NotFound { .. }) => {}
        Ok(_) => {
            return Err(Failure::new(format!("{path} is still in {uri}: nothing was erased"))
                .hint("delete it there first, with all of its older versions: Fletch changes no dataset"));
        }
        Err(e) => return Err(e.into()),
    }
    let traces = ctx.rt.block_on(traces(&location, path))?;
    let erased_before = ctx.rt.block_on(location.origin().head(&paths::erased(path))).is_ok();
    if traces.roots.is_empty() && !erased_before {
        return Err(Failure::new(format!("no version of {} lists {path}", dataset.name))
            .hint(format!("`fletch ls {}` lists its files", dataset.name)));
    }
    let tags = ctx.rt.block_on(location.tags())?.into_iter();
    let tags = tags.filter(|(tag, doc)| *tag != TagName::latest() && traces.roots.contains(&doc.root));
    let mounts =
        ctx.rt.block_on(connected.client.mounts_of_all())?.0.into_iter().map(|mount| mount.announced);
    let mounts = mounts.filter(|mount| traces.roots.contains(&mount.root));
    let mut report = Report {
        dataset: dataset.name.as_str(),
        path,
        versions: traces.roots.iter().copied().collect(),
        tags: tags.map(|(tag, _)| tag).collect(),
        mounts: mounts.map(|mount| format!("{}:{}", mount.host, mount.dir)).collect(),
        packed_chunks: traces.packed.len(),
        chunks: traces.chunks.len(),
        root: None,
        unconfirmed: Vec::new(),
        erased: yes,
    };
    if yes {
        ctx.rt.block_on(delete_packed(ctx, &location, path, &traces))?;
        let missing = Missing { skip_failed: false, allow_loss: None };
        report.root = Some(refresh::refresh(ctx, &registered, missing)?.root);
        let chunks: Vec<Hash> = traces.chunks.iter().copied().collect();
        let mut unconfirmed = BTreeSet::new();
        for some in chunks.chunks(CHUNKS_MAX) {
            let evicted = ctx.rt.block_on(connected.client.erase(&dataset.name, some))?;
            unconfirmed.extend(evicted.unconfirmed);
        }
        report.unconfirmed = unconfirmed.into_iter().collect();
    }
    print(ctx, &report)?;
    Ok(if report.unconfirmed.is_empty() { Exit::Ok } else { Exit::Partial })
}

fn print(ctx: &Context, report: &Report<'_>) -> Result<(), Failure> {
    let Report { dataset, path, versions, tags, mounts, .. } = report;
    ctx.out.result(report, |w| {
        let did = if report.erased { "erased" } else { "found" };
        let of = count(report.packed_chunks, "packed chunk");
        writeln!(w, "{dataset}: {did} {path}; {} list it, {of} held it", count(versions.len(), "version"))
    })?;
    let out = ctx.out;
    if !tags.is_empty() {
        let tags = tags.iter().map(TagName::as_str).collect::<Vec<_>>().join(", ");
        out.note(format_args!(
            "tags that name versions with it: {tags}; move or delete them with `fletch tag`"
        ));
    }
    if !mounts.is_empty() {
        let mounts = mounts.join(", ");
        out.note(format_args!("mounts that may still have it in memory: {mounts}; unmount them"));
    }
    if !report.unconfirmed.is_empty() {
        let servers = report.unconfirmed.join(", ");
        out.warn(format_args!("{servers} did not confirm it; run the command again when they are up"));
    }
    match (report.erased, versions.is_empty()) {
        (false, _) => out.note("nothing was erased; the same command with --yes erases it"),
        (true, false) => out.note(format_args!(
            "versions before list its path and hash; `fletch gc {dataset} --older-than 0s --yes` deletes \
             those that nobody uses"
        )),
        (true, true) => {}
    }
    Ok(())
}

/// Finds a file, and the members of a tar shard at its path, in all versions.
async fn traces(location: &TablesLocation, path: &str) -> Result<Traces, Failure> {
    let mut traces = Traces::default();
    for stored in stored_versions(location.origin(), now_ns()).await? {
        for layout in location.layouts(stored.root).await? {
            let version = location.version(stored.root, layout.layout).await?;
            traces.add(&version, path).await?;
        }
    }
    for &chunk in &traces.chunks {
        match location.origin().head(&paths::chunk(chunk)).await {
            Ok(_) => {
                traces.packed.insert(chunk);
            }
            Err(OriginError::NotFound { .. }) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(traces)
}

impl Traces {
    async fn add(&mut self, version: &Version, path: &str) -> Result<(), Failure> {
        let members = format!("{path}\0");
        let mut ordinal = version.lower_bound(path.as_bytes()).await?;
        while let Some(found) = version.entry(ordinal).await? {
            let entry = found.entry();
            if entry.path != path && !entry.path.starts_with(&members) {
                break;
            }
            self.roots.insert(version.root());
            self.chunks.extend(found.slices().iter().map(|slice| slice.chunk));
            ordinal += 1;
        }
        Ok(())
    }
}

/// Records that the file is erased, and deletes the objects of packs that hold it.
async fn delete_packed(
    ctx: &Context,
    location: &TablesLocation,
    path: &str,
    traces: &Traces,
) -> Result<(), Failure> {
    // No run may rely on these chunks.
    let marks = Mark::of_collection(location, ctx.out).await?;
    let deleted = async {
        let doc = ErasedDoc { path: path.to_owned(), erased: rfc3339(now_ns()) };
        let bytes = serde_json::to_vec(&doc).map_err(|e| Failure::new(format!("the record: {e}")))?;
        location.origin().put(&paths::erased(path), bytes.into(), PutMode::Overwrite).await?;
        for &chunk in &traces.packed {
            location.origin().delete(&paths::chunk(chunk)).await?;
        }
        Ok(())
    };
    let deleted = deleted.await;
    for mark in marks {
        mark.remove(ctx.out).await;
    }
    deleted
}

/// Returns when each erased file of a location was erased, by its path. None where they cannot be listed.
pub async fn erased_files(location: &fletch_origin::Origin) -> BTreeMap<String, String> {
    use futures::TryStreamExt as _;
    let mut erased = BTreeMap::new();
    let mut records = location.list(paths::ERASED);
    while let Ok(Some(record)) = records.try_next().await {
        if let Ok(got) = location.get(&record.path, None, None).await
            && let Ok(ErasedDoc { path, erased: at }) = serde_json::from_slice(&got.bytes)
        {
            erased.insert(path, at);
        }
    }
    erased
}
